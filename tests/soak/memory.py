"""Memory over time: samples, the rule that calls them flat, and the plot."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MEBIBYTE = 1024 * 1024


def resident(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


@dataclass
class Series:
    """One thing's memory in bytes, each with its moment in seconds since the start."""

    label: str
    points: list[tuple[float, int]] = field(default_factory=list)

    def growth(self) -> tuple[int, int]:
        """Return medians, in bytes: of the second quarter of the time, and of the last.

        The first quarter is warming up: caches, and the records that live for a minute.
        """
        length = self.points[-1][0] if self.points else 0.0
        middle = [size for at, size in self.points if length / 4 <= at < length / 2]
        last = [size for at, size in self.points if length * 3 / 4 <= at]
        return (int(median(middle)), int(median(last))) if middle and last else (0, 0)

    @property
    def is_flat(self) -> bool:
        """Whether it grew by no more than 2 % and 1.5 MiB: 200 bytes per request of a part would show.

        Less says nothing: the heap of a client whose objects had grown by 0.05 MiB (tracemalloc) had 2.1.
        """
        before, after = self.growth()
        return after <= before * 1.02 + 1.5 * _MEBIBYTE

    def __str__(self) -> str:
        before, after = self.growth()
        return f"{self.label} {before / _MEBIBYTE:.1f} -> {after / _MEBIBYTE:.1f} MiB"


def plot(series: list[Series], waits: list[tuple[float, float]], title: str, path: Path) -> None:
    """Draw the series, and the longest wait of each second; needs matplotlib."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    rows = len(series) + 1
    figure, axes = pyplot.subplots(rows, 1, sharex=True, figsize=(9, 2.0 * rows))
    for one, axis in zip(series, axes[:-1], strict=True):
        axis.plot([at for at, _ in one.points], [size / _MEBIBYTE for _, size in one.points], lw=1)
        axis.set_ylim(0, 1.2 * max((size for _, size in one.points), default=1) / _MEBIBYTE)
        axis.set_ylabel("MiB")
        axis.set_title(str(one), fontsize=9, loc="left")
    axes[-1].bar([at for at, _ in waits], [wait for _, wait in waits], width=1.0)
    axes[-1].set_ylabel("s")
    axes[-1].set_title("longest wait that ended in this second", fontsize=9, loc="left")
    axes[-1].set_xlabel("seconds")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.suptitle(title, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
