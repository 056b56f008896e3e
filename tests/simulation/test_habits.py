"""Seeds of users' code, and broken variants that they catch."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from .catching import assert_caught
from .habits import Habits, HabitsOnRedis
from .run import run_seed
from .scenario import Simulation
from .variants import VARIANTS


@pytest.fixture(autouse=True)
def collected() -> None:
    gc.collect()


@pytest.mark.parametrize(("kind", "seeds"), [(Habits, 16), (HabitsOnRedis, 4)])
def test_promises_hold_whatever_users_code_does(kind: type[Simulation], seeds: int) -> None:
    for seed in range(seeds):
        outcome = run_seed(seed, kind=kind)
        store = " --store memory" if kind is Habits else ""
        assert not outcome.checker, (
            f"replay it: python -m tests.simulation --habits{store} --seed {seed}\n{outcome}"
        )


def test_bodies_lose_leases_and_swallow_it() -> None:
    swallowed = 0
    for seed in range(8):
        simulation = Habits(seed)
        simulation.run()
        swallowed += simulation.swallowed
    assert swallowed > 0


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("nobody is told of the end", 6),
        ("the loss is marked some turns later", 35),
        ("only the task that acquired is cancelled", 61),
    ],
)
def test_library_that_tells_bodies_late_is_caught(name: str, seed: int) -> None:
    assert_caught(replace(VARIANTS[name], seed=seed), 60, kind=Habits, by=("steps", "told"))
