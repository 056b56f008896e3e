"""What a quorum needs to know of its nodes: stores inside the process tell nothing, servers have to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from fakeredis import FakeServer
from fakeredis.aioredis import FakeRedis

import aiodlock
from aiodlock._embedded import EmbeddedServer
from aiodlock.backends.base import Unanswered
from aiodlock.backends.kept import Notices
from aiodlock.backends.redis.quorum.broadcast import failure_of
from aiodlock.backends.redis.server import Server

from ..scenes import until_waiting


async def test_stores_in_memory_make_a_quorum() -> None:
    nodes = [f"memory://node-{number}" for number in range(3)]
    async with aiodlock.Client(nodes) as one, aiodlock.Client(nodes) as other:
        first = await one.lock("x").acquire()
        waiting = asyncio.create_task(other.lock("x").acquire(timeout=30))
        await first.release()
        second = await waiting
        assert second.token > first.token
        await second.release()


async def test_clients_of_fakeredis_make_a_quorum() -> None:
    nodes = [FakeRedis(server=FakeServer()) for _ in range(3)]
    async with aiodlock.Client(nodes) as client, client.lock("x") as lease:
        assert lease.held


async def test_servers_that_do_not_tell_their_run_id_are_refused() -> None:
    """Nobody would know that they were restarted."""
    with ExitStack() as stack:
        config = {"rename-command": 'INFO ""'}
        nodes = [stack.enter_context(EmbeddedServer(config=config)).url for _ in range(3)]
        with pytest.raises(aiodlock.BackendError, match="a quorum needs INFO"):
            async with aiodlock.Client(nodes):
                pass
        async with aiodlock.Client(nodes, restart_delay=0) as client, client.lock("x"):
            pass


def test_refusal_of_a_minority_is_not_raised_while_the_others_may_answer_soon() -> None:
    refusal, silent = aiodlock.BackendError("out of memory"), Unanswered("no reply in time")
    assert failure_of("q", 3, 1, [refusal]) is not refusal
    assert isinstance(failure_of("q", 3, 1, [refusal, silent]), aiodlock.BackendUnavailable)
    assert isinstance(failure_of("q", 5, 1, [refusal, refusal, silent, silent]), Unanswered)
    assert failure_of("q", 3, 0, [silent, refusal, refusal]) is refusal
    assert failure_of("q", 4, 1, [silent, refusal, refusal]) is refusal


async def test_node_that_refuses_while_the_client_is_left_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On its way out, a server's group of tasks fails, and keeps its cancellation to itself."""
    run, left = Server.run, 0

    async def run_and_refuse(self: Server, listener: Notices, ready: Callable[[], None]) -> None:
        nonlocal left
        try:
            await run(self, listener, ready)
        finally:
            left += 1
            raise ExceptionGroup("a group", [aiodlock.BackendError("refused")])

    async def be_left() -> None:
        async with aiodlock.Client([f"memory://leaving-{number}" for number in range(3)]):
            pass

    monkeypatch.setattr(Server, "run", run_and_refuse)
    leaving = asyncio.create_task(be_left())
    await asyncio.wait([leaving], timeout=3.0)
    ended = leaving.done()
    if not ended:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
    assert ended
    assert left == 3


async def test_node_that_is_connected_last_is_left_too_when_a_session_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its nodes counted as connected still, so it did not wait for them before it left its requests."""
    monkeypatch.setattr("aiodlock.backends.redis.quorum.nodes._WAIT_FOR_ALL", 20.0)
    run, is_dead = Server.run, asyncio.Event()
    sources = [f"memory://dead-{number}" for number in range(3)]

    async def run_later(self: Server, listener: Notices, ready: Callable[[], None]) -> None:
        if is_dead.is_set() and self.described.endswith("2"):
            await asyncio.sleep(0.1)
        await run(self, listener, ready)

    async def bug() -> None:
        is_dead.set()
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(Server, "run", run_later)
    async with aiodlock.Client(sources) as client, aiodlock.Client(sources) as other:
        async with other.lock("x"):
            waiting = asyncio.create_task(client.lock("x").acquire())
            await until_waiting(other, "x")
            assert client._core.session is not None
            client._core.session.start_soon(bug)
            with pytest.raises(aiodlock.BackendError):
                await waiting
            async with client.lock("y"):  # in a new session, before which the dead one has left
                assert (await other.inspect("x")).waiters == ()
