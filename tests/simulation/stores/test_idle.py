"""A few seeds of clients that nobody uses while their store goes away, and broken ones that are caught."""

from __future__ import annotations

import gc

import pytest

from ..catching import assert_caught, one_of_each
from ..run import run_seed
from .idle import IDLE
from .idle_variants import IDLE_VARIANTS


@pytest.fixture(autouse=True)
def collected() -> None:
    gc.collect()


@pytest.mark.parametrize("world", IDLE)
def test_promises_hold_for_clients_that_nobody_uses(world: str) -> None:
    for seed in range(10):
        outcome = run_seed(seed, kind=IDLE[world])
        assert not outcome.checker, (
            f"replay it: python -m tests.simulation --idle --store {world} --seed {seed}\n{outcome}"
        )


def test_idle_clients_are_used_again_after_another_store_was_there() -> None:
    for kind in IDLE.values():
        elsewhere = 0
        for seed in range(6):
            simulation = kind(seed)
            simulation.run()
            elsewhere += simulation.used_elsewhere
        assert elsewhere


@pytest.mark.parametrize("name", one_of_each(IDLE_VARIANTS))
def test_broken_idle_client_is_caught(name: str) -> None:
    assert_caught(IDLE_VARIANTS[name], 300)
