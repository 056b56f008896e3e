"""Run seeds, and say what a bad one did."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from time import perf_counter

from .scenario import Simulation
from .world import Wrong


@dataclass(frozen=True, slots=True)
class Outcome:
    """One seed. ``checker`` is empty when nothing is wrong."""

    seed: int
    checker: str
    message: str
    style: str
    trace: tuple[tuple[float, object], ...]
    grants: int
    turns: Counter[str]
    virtual_seconds: float

    @property
    def schedule(self) -> tuple[str, ...]:
        """What happened when."""
        lines = (f"{when:10.6f}  {what}" for when, what in self.trace)
        return f"seed {self.seed}: {self.style}", *lines

    @property
    def digest(self) -> str:
        """The same for two runs that did the same."""
        return sha256("\n".join((*self.schedule, self.message)).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return "\n".join((*self.schedule, f"seed {self.seed}: {self.message}"))


def run_seed(
    seed: int,
    prepare: Callable[[Simulation], None] | None = None,
    kind: type[Simulation] = Simulation,
) -> Outcome:
    """Simulate one seed, with a broken variant if ``prepare`` makes it one."""
    simulation = kind(seed, prepare)
    checker = message = ""
    try:
        simulation.run()
    except Wrong as wrong:
        checker, message = wrong.checker, str(wrong)
    except Exception as error:
        checker, message = "failure", f"failure: {error!r}"
    return Outcome(
        seed,
        checker,
        message,
        str(simulation.style),
        tuple(simulation.world.trace),
        simulation.checkers.grants,
        Counter(simulation.outcomes),
        simulation.world.time,
    )


@dataclass
class Total:
    """What many seeds came to."""

    seeds: int = 0
    grants: int = 0
    virtual_seconds: float = 0.0
    began: float = 0.0

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.grants += outcome.grants
        self.virtual_seconds += outcome.virtual_seconds

    def closing_line(self, bad: int) -> str:
        took = perf_counter() - self.began
        return (
            f"{self.seeds} seeds, {self.grants} grants, {self.virtual_seconds / 3600:.1f} h of virtual "
            f"time, {bad} violations, in {took:.0f} s ({self.seeds / took:.1f} seeds/s)"
        )


@contextmanager
def collector_at_rest() -> Iterator[Callable[[], object]]:
    """Give what collects between seeds. While one runs the collector rests: nothing depends on its moments.

    (After each seed it takes a millisecond. What many have left costs more than that: the caches are cold.)
    What has been imported stays out of it. That is said once, before a seed has left anything: what is
    alive then stays for ever.
    """
    enabled = gc.isenabled()
    gc.disable()
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
    try:
        yield gc.collect
    finally:
        if enabled:
            gc.enable()
