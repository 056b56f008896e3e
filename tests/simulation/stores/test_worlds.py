"""A few seeds of each store's world, and the broken variants that they catch."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from aiodlock._deadlines import Deadlines

from ..catching import assert_caught, one_of_each
from ..run import run_seed
from ..scenario import Simulation
from ..world import SimLoop
from .etcd import EtcdScene
from .etcd_variants import ETCD_VARIANTS
from .postgres import PostgresScene
from .postgres_variants import POSTGRES_VARIANTS
from .redis_cluster_scene import RedisClusterScene
from .redis_cluster_variants import CLUSTER_VARIANTS
from .scene import Scene
from .zookeeper import ZooKeeperScene
from .zookeeper_variants import ZOOKEEPER_VARIANTS

WORLDS: dict[str, type[Scene]] = {
    "zookeeper": ZooKeeperScene,
    "etcd": EtcdScene,
    "postgres": PostgresScene,
    "cluster": RedisClusterScene,
}
VARIANTS = {**ZOOKEEPER_VARIANTS, **ETCD_VARIANTS, **POSTGRES_VARIANTS, **CLUSTER_VARIANTS}
#: In blocks, so that several workers share them.
_BLOCKS, _BLOCK = 5, 10
#: Caught rarely: ``--variants`` searches for them.
_RARE = frozenset(
    name
    for name in VARIANTS
    if "session counts" in name
    or "record is told" in name
    or "neither a marker" in name
    or "beside a standby" in name
)
#: A variant is caught by the first seed of these as long as the library is what it was, else soon.
_SEARCH = 300


@pytest.fixture(autouse=True)
def collected() -> None:
    """The collector rests while a seed runs; whatever others left to it is taken before."""
    gc.collect()


@pytest.mark.parametrize("first", range(0, _BLOCKS * _BLOCK, _BLOCK))
@pytest.mark.parametrize("world", WORLDS)
def test_promises_hold_on_the_store_whatever_happens(world: str, first: int) -> None:
    for seed in range(first, first + _BLOCK):
        outcome = run_seed(seed, kind=WORLDS[world])
        assert not outcome.checker, (
            f"replay it: python -m tests.simulation --store {world} --seed {seed}\n{outcome}"
        )


@pytest.mark.parametrize("name", one_of_each(VARIANTS, sorted(VARIANTS.keys() - _RARE)))
def test_broken_client_is_caught(name: str) -> None:
    assert_caught(VARIANTS[name], _SEARCH)


def test_same_seed_gives_the_same_run() -> None:
    for kind in WORLDS.values():
        assert run_seed(3, kind=kind).digest == run_seed(3, kind=kind).digest


@pytest.mark.parametrize("world", WORLDS)
def test_timer_that_comes_early_is_not_set_again_and_again(world: str) -> None:
    """On a loop with timers of whole milliseconds. Ends of leases alone are waited for to the moment."""
    call_at, early = SimLoop.call_at, 0

    def counted(loop: SimLoop, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        nonlocal early
        if 0.0 < when - loop.process.monotonic() < 0.0005 and not of_deadlines(callback):
            early += 1
        return call_at(loop, when, callback, *args, context=context)

    def of_deadlines(callback: Any) -> bool:
        return isinstance(getattr(callback, "__self__", None), Deadlines)

    def with_coarse_timers(simulation: Simulation) -> None:
        simulation.coarse_timers = True
        simulation.patch(SimLoop, "call_at", counted)

    for seed in range(3):
        assert not run_seed(seed, with_coarse_timers, WORLDS[world]).checker
    assert early < 50
