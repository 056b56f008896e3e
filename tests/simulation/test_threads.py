"""Seeds of programs with threads, and broken variants that they catch."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from .catching import assert_caught
from .run import run_seed
from .thread_variants import THREAD_VARIANTS
from .threads import Threads

#: Caught after many seeds.
_LONG = (
    "a turn inside a lost block is kept",
    "a body begins before its thread has the lease",
    "a block whose lease was lost ends well",
    "a hold outlives its thread while somebody watches over it",
    "no function is told of a loss",
)


@pytest.fixture(autouse=True)
def collected() -> None:
    gc.collect()


def test_promises_hold_for_threads() -> None:
    simulations: list[Any] = []
    for seed in range(20, 40):
        outcome = run_seed(seed, simulations.append, Threads)
        assert not outcome.checker, (
            f"replay it: python -m tests.simulation --threads --store memory --seed {seed}\n{outcome}"
        )
    seen = {
        "grants": sum(simulation.checkers.grants for simulation in simulations),
        "interrupted": sum(simulation.seen["interrupted"] for simulation in simulations),
        "on_lost": sum(simulation.seen["on_lost"] for simulation in simulations),
    }
    assert all(seen.values()), f"there was nothing to look at: {seen}"


@pytest.mark.parametrize("seed", [3, 5])
def test_seed_replays_exactly(seed: int) -> None:
    first, second = run_seed(seed, kind=Threads), run_seed(seed, kind=Threads)
    assert first.schedule == second.schedule


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in _LONG else ())
        for name in THREAD_VARIANTS
    ],
)
def test_broken_locks_for_threads_are_caught(name: str) -> None:
    assert_caught(THREAD_VARIANTS[name], 60)
