"""Seeds of programs that deadlock, courses of events that seeds have found, and broken variants."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from aiodlock import DeadlockError

from .catching import assert_caught, one_of_each
from .deadlock_variants import DEADLOCK_VARIANTS
from .deadlocks import Deadlocks, DeadlocksOnRedis
from .run import run_seed
from .scenario import SimClient, Simulation
from .test_scripted import Scripted

#: What clients have without being told otherwise, and when a cycle has to be found at the latest.
_AFTER, _WITHIN = 2.0, 1.0
#: A variant is caught within so many seeds.
_SEARCH = 60


@pytest.fixture(autouse=True)
def collected() -> None:
    gc.collect()


# -- seeds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "seeds"), [(Deadlocks, 16), (DeadlocksOnRedis, 3)])
def test_deadlocks_are_found_and_nobody_else_is_hurt(kind: type[Simulation], seeds: int) -> None:
    found = 0
    for seed in range(seeds):
        outcome = run_seed(seed, kind=kind)
        found += outcome.turns["deadlocks"]
        store = " --store memory" if kind is Deadlocks else ""
        assert not outcome.checker, (
            f"replay it: python -m tests.simulation --deadlocks{store} --seed {seed}\n{outcome}"
        )
    assert found >= seeds / 2, "tasks did deadlock"


@pytest.mark.parametrize("name", one_of_each(DEADLOCK_VARIANTS))
def test_broken_search_is_caught_by_its_checker(name: str) -> None:
    assert_caught(DEADLOCK_VARIANTS[name], _SEARCH)


@pytest.mark.parametrize("kind", [Deadlocks, DeadlocksOnRedis])
def test_seed_replays_exactly(kind: type[Simulation]) -> None:
    first, second = run_seed(3, kind=kind), run_seed(3, kind=kind)
    assert first.schedule == second.schedule


# -- courses of events -------------------------------------------------------------------------------


async def _two(client: SimClient, first: str, second: str, ends: list[tuple[str, float]]) -> None:
    """Take two names; note when that fails."""
    loop = asyncio.get_running_loop()
    async with client.lock(first):
        await asyncio.sleep(0.1)
        try:
            async with client.lock(second):
                pass
        except DeadlockError:
            ends.append((first, loop.time()))


def test_wait_that_becomes_long_is_told_at_once_although_another_has_been_long_for_some_time() -> (
    None
):
    ends: list[tuple[str, float]] = []
    began: list[float] = []

    async def main(client: SimClient) -> None:
        lease = await client.lock("elsewhere").acquire()

        async def wait() -> None:
            async with client.lock("x"), client.lock("elsewhere"):
                pass

        waiting = asyncio.ensure_future(wait())
        await asyncio.sleep(_AFTER - 1.0)
        began.append(asyncio.get_running_loop().time() + 0.1)
        await asyncio.gather(_two(client, "a", "b", ends), _two(client, "b", "a", ends))
        await lease.release()
        await waiting

    simulation = Scripted(main, until=20.0)
    simulation.run()
    assert simulation.ended == [None]
    ((_, ended),) = ends
    assert _AFTER <= ended - began[0] <= _AFTER + _WITHIN


def test_what_was_told_of_a_wait_is_taken_back_although_the_answer_is_lost() -> None:
    left: list[Any] = []

    async def main(client: SimClient) -> None:
        lease = await client.lock("elsewhere", ttl=60.0).acquire()

        async def wait() -> None:
            async with client.lock("x", ttl=60.0), client.lock("elsewhere"):
                pass

        waiting = asyncio.ensure_future(wait())
        await asyncio.sleep(_AFTER + 0.2)
        assert client._core.session is not None
        backend = client._core.session.backend
        left.append(len(await backend.waits_of([backend.label])))
        for connection in simulation.network.connections:
            connection.mute = True
        waiting.cancel()
        await asyncio.wait([waiting])
        await asyncio.sleep(30.0)
        left.append(len(await backend.waits_of([backend.label])))
        await lease.release()

    simulation = Scripted(main, until=60.0)
    simulation.run()
    assert simulation.ended == [None]
    assert left == [1, 0]


def test_wait_that_ends_while_it_is_told_is_not_kept_alive() -> None:
    left: list[int] = []

    async def main(client: SimClient) -> None:
        lease = await client.lock("elsewhere", ttl=60.0).acquire()

        async def wait() -> None:
            async with client.lock("x", ttl=60.0), client.lock("elsewhere", ttl=60.0):
                pass

        waiting = asyncio.ensure_future(wait())
        await asyncio.sleep(_AFTER - 0.1)
        path = simulation.network.path(simulation.process(0))
        path.in_blocked = True
        await asyncio.sleep(0.2)  # it is told meanwhile, and the answer is on its way
        waiting.cancel()
        await asyncio.sleep(0.05)
        path.in_blocked = False
        simulation.network.released()
        await asyncio.wait([waiting])
        await asyncio.sleep(0.5)
        assert client._core.session is not None
        backend = client._core.session.backend
        left.append(len(await backend.waits_of([backend.label])))
        await lease.release()

    simulation = Scripted(main, until=20.0)
    simulation.run()
    assert simulation.ended == [None]
    assert left == [0]
