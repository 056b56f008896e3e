"""A failing seed, cut to the shortest schedule that still fails, and drawn.

A step is one turn of a task or one fault. Without a step the later ones draw something else. So a cut is a
new trial and not a part of the old run: it is kept when the same checker finds something.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from .run import Outcome, run_seed
from .scenario import Simulation
from .server import Said

Prepare = Callable[[Simulation], None]
#: A diagram tells the end of a schedule.
_DRAWN = 60
_PROCESS = re.compile(r"^(p\d+'*)\.")


@dataclass(frozen=True, slots=True)
class Shrunk:
    """What is left of a seed."""

    outcome: Outcome
    skipped: frozenset[int]
    steps: int
    steps_before: int
    runs: int


def shrink(
    seed: int, kind: type[Simulation], prepare: Prepare | None = None, *, most_runs: int = 200
) -> Shrunk | None:
    """Return the shortest failing schedule that was found; None if the seed does not fail."""
    runs = 0

    def attempt(skipped: frozenset[int]) -> tuple[Outcome, int]:
        nonlocal runs
        runs += 1
        seen: list[Simulation] = []

        def skip(simulation: Simulation) -> None:
            seen.append(simulation)
            simulation.skipped = skipped
            if prepare is not None:
                prepare(simulation)

        outcome = run_seed(seed, skip, kind)
        return outcome, seen[0].steps

    outcome, before = attempt(frozenset())
    if not outcome.checker:
        return None
    best, skipped, steps = outcome, frozenset[int](), before
    size = max(1, steps // 2)
    while runs < most_runs:
        shorter = False
        first = 0
        while first < steps and runs < most_runs:
            trial = skipped | frozenset(range(first, first + size))
            if trial != skipped:
                found, ran = attempt(trial)
                if found.checker == outcome.checker and _left(trial, ran) < _left(skipped, steps):
                    best, skipped, steps, shorter = found, trial, ran, True
            first += size
        if not shorter:
            if size == 1:
                break
            size = max(1, size // 2)
    return Shrunk(best, skipped, _left(skipped, steps), before, runs)


def _left(skipped: frozenset[int], steps: int) -> int:
    return steps - len([step for step in skipped if step < steps])


def diagram(outcome: Outcome) -> str:
    """Return the end of a schedule as a Mermaid sequence diagram."""
    lines: list[str] = []
    parties: dict[str, None] = {}
    for when, what in outcome.trace:
        at = f"{when:.3f}"
        if not isinstance(what, Said):
            lines.append(f"    note: {at} {_plain(str(what))}")
            continue
        about = getattr(what.command, "id", "")
        script = getattr(what.command, "script", None)
        asks = _PROCESS.match(about)
        if script is None or asks is None:
            continue  # pings, subscriptions and marks
        process = asks[1]
        parties |= {process: None, what.server: None}
        call = _plain(str(what.command))[:70]
        reply = _plain(str(what).rpartition(" -> ")[2])[:60]
        lines.append(f"    {process}->>{what.server}: {at} {call}")
        lines.append(f"    {what.server}-->>{process}: {reply}")
    names = sorted(parties)
    over = f"{names[0]},{names[-1]}" if len(names) > 1 else (names or ["world"])[0]
    drawn = [
        f"    Note over {over}: {line.removeprefix('    note: ')}" if "    note: " in line else line
        for line in lines[-_DRAWN:]
    ]
    last = f"    Note over {over}: {_plain(outcome.message)}"
    participants = [f"    participant {name}" for name in names or ["world"]]
    return "\n".join(("sequenceDiagram", *participants, *drawn, last))


def _plain(text: str) -> str:
    """Mermaid ends a message at a semicolon, and reads # as an entity."""
    return re.sub(r"[;#\n]+", " ", text)
