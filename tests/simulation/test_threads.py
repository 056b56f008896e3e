"""Seeds of programs with threads, and broken variants that they catch."""

from __future__ import annotations

import gc

import pytest

from .catching import assert_caught
from .run import run_seed
from .thread_variants import THREAD_VARIANTS
from .threads import Threads


@pytest.fixture(autouse=True)
def collected() -> None:
    gc.collect()


def test_promises_hold_for_threads() -> None:
    for seed in range(30):
        outcome = run_seed(seed, kind=Threads)
        assert not outcome.checker, (
            f"replay it: python -m tests.simulation --threads --store memory --seed {seed}\n{outcome}"
        )


def test_there_is_something_to_look_at() -> None:
    seen = {"interrupted": 0, "on_lost": 0, "grants": 0}
    for seed in range(30):
        simulation = Threads(seed)
        simulation.run()
        seen["grants"] += simulation.checkers.grants
        for what in ("interrupted", "on_lost"):
            seen[what] += simulation.seen[what]
    assert all(seen.values()), seen


@pytest.mark.parametrize("seed", [3, 5])
def test_seed_replays_exactly(seed: int) -> None:
    first, second = run_seed(seed, kind=Threads), run_seed(seed, kind=Threads)
    assert first.schedule == second.schedule


@pytest.mark.parametrize("name", THREAD_VARIANTS)
def test_broken_locks_for_threads_are_caught(name: str) -> None:
    assert_caught(THREAD_VARIANTS[name], 60)
