"""What processes that take turns have written down: who was in when. Told by one clock of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple


class Stay(NamedTuple):
    """A body; of a process that was killed, until that moment."""

    began: float
    ended: float
    mode: str
    token: int
    lost: bool


def stays(journal: Path, killed: Mapping[int, float]) -> dict[str, list[Stay]]:
    """Return the bodies of each name, in the order in which they began."""
    open_ones: dict[tuple[str, ...], tuple[float, str, int, int]] = {}
    found: dict[str, list[Stay]] = {}
    for line in journal.read_text().splitlines():
        when, what, pid, name, mode, token, lease = line.split()
        key = (pid, name, lease, token)
        if what == "in":
            open_ones[key] = (float(when), mode, int(token), int(pid))
        else:
            began, *_ = open_ones.pop(key)
            stay = Stay(began, float(when), mode, int(token), what == "lost")
            found.setdefault(name, []).append(stay)
    for (_, name, _, _), (began, mode, grant, of) in open_ones.items():
        found.setdefault(name, []).append(Stay(began, killed[of], mode, grant, lost=False))
    return {name: sorted(those) for name, those in found.items()}


def check(those: Sequence[Stay], lost: int = 0) -> None:
    """No writer was in beside anybody, and tokens grew. A body that was lost may have ended late.

    :param lost: how many may be lost; a slow machine loses a few more.
    """
    kept = [stay for stay in those if not stay.lost]
    assert len(those) - len(kept) <= lost + 0.1 * len(those), "leases were lost"
    latest_writer = latest = 0.0
    for stay in kept:
        assert stay.began >= (latest if stay.mode == "exclusive" else latest_writer), stay
        latest = max(latest, stay.ended)
        if stay.mode == "exclusive":
            latest_writer = max(latest_writer, stay.ended)
    writers = [stay for stay in kept if stay.mode == "exclusive"]
    assert all(one.token < next_one.token for one, next_one in pairwise(writers))
