"""Ten thousand waiters of one client come and go: ``python -m benchmarks.crowd``.

Each phase is a row: the longest turn of the event loop, in ms of CPU of its thread, with the median and
the quartiles of the rounds, and the same of as many tasks that wait for an ``asyncio.Event``. Calls of
aiodlock's functions, in one turn and in one callback, are counted in a run of their own. They are nearly
the same however busy the machine is. To compare with another tree, name the Python of its environment; the
trees take turns::

    python -m benchmarks.crowd --against ../old/.venv/bin/python
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiodlock
from aiodlock._embedded import EmbeddedServer, find_valkey9

_WORKER = Path(__file__).with_name("crowd_worker.py")
#: What as many tasks on asyncio alone do meanwhile.
_FLOORS = {
    "queue on one name": "floor: queue",
    "are cancelled": "floor: are cancelled",
    "queue with a timeout": "floor: queue with a timeout",
    "time out": "floor: time out",
    "queue on as many names": "floor: queue",
    "are cancelled there": "floor: are cancelled",
    "their client is left": "floor: are woken",
}
_TIMES = ("turn", "turn without collector", "full run of the collector", "full runs")
_CALLS = ("calls in a turn", "calls in a callback")

Figures = dict[str, dict[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.crowd",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--against", metavar="PYTHON", help="the Python of another tree's environment"
    )
    parser.add_argument("--waiters", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--collector",
        choices=("on", "off", "seldom"),
        default="on",
        help="Python's; seldom: frozen and tuned as docs/how-to/checklist.md says",
    )
    options = parser.parse_args()
    pythons = {"this tree": sys.executable}
    if options.against:
        pythons["the other tree"] = options.against
    print(f"load before: {os.getloadavg()[0]:.1f}; Python's collector {options.collector}")
    with EmbeddedServer(find_valkey9()) as server:
        asyncio.run(_measure(server.url, pythons, options))


async def _measure(url: str, pythons: dict[str, str], options: argparse.Namespace) -> None:
    figures: dict[str, Figures] = {tree: {} for tree in pythons}
    lost: dict[str, int] = dict.fromkeys(pythons, 0)
    async with aiodlock.Client(url, ttl=3600.0) as elsewhere:
        leases: list[aiodlock.Lease] = []
        for first in range(0, options.waiters, 500):
            names = range(first, min(first + 500, options.waiters))
            locks = [elsewhere.lock(f"crowd:{number}") for number in names]
            leases += await asyncio.gather(*(lock.acquire() for lock in locks))
        for number in range(options.rounds + 1):
            # The first round counts calls, which takes times as long.
            what = "times" if number else "calls"
            for tree in list(pythons)[:: 1 if number % 2 else -1]:
                worker = (pythons[tree], url, options.waiters, options.collector, what)
                try:
                    answer = await asyncio.to_thread(_run, *worker)
                except subprocess.CalledProcessError:
                    print(f"a run of {tree} failed")
                    continue
                lost[tree] += answer["lost"] if number else 0
                for phase, found in answer["phases"].items():
                    known = figures[tree].setdefault(phase, {})
                    for key in _TIMES if number else _CALLS:
                        known.setdefault(key, []).append(found.get(key, 0.0))
    for tree, of_tree in figures.items():
        print(f"\n{tree}: {lost[tree]} leases of the same client lost\n")
        _show(of_tree)


def _run(python: str, url: str, waiters: int, collector: str, what: str) -> Any:
    # Safe path: the modules beside the worker are not to be found by its imports.
    worker = [python, "-P", str(_WORKER), url, str(waiters), collector, what]
    return json.loads(subprocess.run(worker, stdout=subprocess.PIPE, check=True).stdout)


def _show(figures: Figures) -> None:
    columns = (
        "longest turn, ms of CPU",
        "of asyncio's",
        "without the collector",
        "of asyncio's",
        "full run of the collector",
        "calls in a turn",
        "in a callback",
    )
    print(f"| {len(figures)} phases |", " | ".join(columns), "|")
    print("|---|" + "---:|" * len(columns))
    for phase, floor in _FLOORS.items():
        own, asyncios = figures[phase], figures[floor]
        row = [
            _spread(own["turn"]),
            _ratio(own["turn"], asyncios["turn"]),
            _spread(own["turn without collector"]),
            _ratio(own["turn without collector"], asyncios["turn without collector"]),
            f"{_spread(own['full run of the collector'])}, {_spread(own['full runs'])} times",
            *(f"{own[key][0]:,.0f}" if key in own else "?" for key in _CALLS),
        ]
        print(f"| {phase} |", " | ".join(row), "|")
    print()
    for phase in dict.fromkeys(_FLOORS.values()):
        turn, bare = figures[phase]["turn"], figures[phase]["turn without collector"]
        print(f"{phase}: {_spread(turn)}, without the collector {_spread(bare)}")


def _spread(values: list[float]) -> str:
    if len(values) < 3:
        return " / ".join(f"{value:.0f}" for value in values)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def _ratio(values: list[float], floors: list[float]) -> str:
    ratios = [value / floor for value, floor in zip(values, floors, strict=True)]
    return f"{statistics.median(ratios):.1f}"


if __name__ == "__main__":
    main()
