"""An old primary that lives: a client goes to the new one, with all connections, within about a second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from functools import partial

import pytest

import aiodlock
from aiodlock._embedded import find_valkey9
from aiodlock.backends.redis import RedisBackend
from aiodlock.backends.redis.keys import keys_of
from aiodlock.backends.redis.wire import Wire

from ..conftest import MakeClient
from ..scenes import bounded, cancelled, is_held, store_of, takes, until
from .servers import Node, SentinelService

pytestmark = pytest.mark.timeout(400)

#: Longer than any of this takes: nothing here is mended by the end of a lease.
FOR_EVER = 300.0


@pytest.fixture
def service() -> Iterator[SentinelService]:
    """Give a primary, two replicas and three sentinels of the test's own."""
    with SentinelService(find_valkey9(), replicas=2) as service:
        yield service


@pytest.fixture
async def make_client(service: SentinelService) -> AsyncIterator[MakeClient]:
    """Give a factory of entered clients of the service."""
    async with AsyncExitStack() as stack:

        async def make(url: str | None = None, **options: object) -> aiodlock.Client:
            settings: dict[str, object] = {"ttl": FOR_EVER, "waiter_ttl": FOR_EVER, **options}
            client = aiodlock.Client(url or service.url, **settings)  # type: ignore[arg-type]
            return await stack.enter_async_context(client)

        yield make


def _backend(client: aiodlock.Client) -> RedisBackend:
    backend = store_of(client)
    assert isinstance(backend, RedisBackend)
    return backend


def _wires(client: aiodlock.Client) -> dict[str, Wire | None]:
    server = _backend(client).server
    assert server.commands is not None
    assert server.wakeups is not None
    wires = {"commands": server.commands.wire, "wake-ups": server.wakeups.link.wire}
    if server.replicated is not None:
        wires["replicated"] = server.replicated.link.wire
    return wires


def _ports(client: aiodlock.Client) -> set[int | None]:
    """Return the ports of the servers that the connections of a client are to."""
    peers = [wire.peer if wire is not None else None for wire in _wires(client).values()]
    return {peer[1] if isinstance(peer, tuple) else None for peer in peers}


def _knows(node: Node, name: str) -> bool:
    return bool(node.call("EXISTS", keys_of("aiodlock", "lock", name).state))


async def test_holder_at_an_old_primary_that_lives_is_told_when_another_is_named(
    service: SentinelService, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind a cut network it goes on as a primary for ever, and this lease would be extended there."""
    first = await make_client()
    old, new = await asyncio.to_thread(service.promote_another, old_lives=True)
    lease = await first.lock("name").acquire()
    assert _knows(old, "name")
    assert not _knows(new, "name")
    await asyncio.to_thread(service.wait_promoted, old)
    second = await make_client()
    successor = await second.lock("name").acquire()
    async with bounded(10.0):
        assert (await lease.wait_lost()).reason in ("gone", "taken_over")
    assert is_held(successor)
    await until(lambda: _ports(first) == {new.port}, "all connections at the new primary")
    assert f"Sentinel names 127.0.0.1:{new.port} as the primary now" in caplog.text
    await successor.release()
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_waiter_at_an_old_primary_that_lives_is_served_by_the_new_one(
    service: SentinelService, make_client: MakeClient
) -> None:
    client = await make_client()
    held = await client.lock("name").acquire()
    await until(lambda: all(_knows(node, "name") for node in service.followers))
    old, new = await asyncio.to_thread(service.promote_another, old_lives=True)
    waiting = asyncio.create_task(client.lock("name").acquire())
    await until(lambda: _ports(client) == {new.port}, "a move", within=15.0)
    async with bounded(10.0):
        await held.release()
        await (await waiting).release()
    assert old.is_primary


async def test_client_that_asks_for_replicas_is_at_the_new_primary_when_they_are_missing(
    service: SentinelService, make_client: MakeClient
) -> None:
    """They follow the new one by then. What was short here is not short there."""
    client = await make_client(min_replicas=1)
    old, new = await asyncio.to_thread(service.promote_another, old_lives=True)
    await asyncio.to_thread(service.wait_promoted, old)
    async with bounded(10.0):
        async with client.lock("name") as lease:
            assert lease.held
            assert _knows(new, "name")
    # Each of its links: the last one may be a pause later.
    await until(lambda: _ports(client) == {new.port}, "a move")


async def test_server_that_lacks_replicas_for_a_write_is_asked_about_at_once(
    service: SentinelService, make_client: MakeClient
) -> None:
    client = await make_client()
    old = service.primary
    old.call("CONFIG", "SET", "min-replicas-to-write", 1)
    old, new = await asyncio.to_thread(service.promote_another, old_lives=True)
    await asyncio.to_thread(service.wait_promoted, old)
    async with bounded(10.0):
        async with client.lock("name") as lease:
            assert lease.held
    assert _knows(new, "name") or not _knows(old, "name")


@pytest.mark.parametrize("min_replicas", [0, 1])
async def test_connections_of_one_client_are_on_one_server_whichever_comes_up_last(
    service: SentinelService, make_client: MakeClient, min_replicas: int
) -> None:
    """A message is heard where it is said. Sentinels are made to lie, so that only this can tell."""
    client = await make_client(min_replicas=min_replicas)
    backend = _backend(client)
    old, new = await asyncio.to_thread(service.promote_another, old_lives=True)
    await asyncio.to_thread(service.wait_promoted, old)
    await until(lambda: _ports(client) == {new.port}, "a move", within=15.0)
    lookup = backend.server.source._kwargs["connection_pool"]
    for lost in _wires(client):
        stray = old if _ports(client) == {new.port} else new
        _let_lookup_name(lookup, stray)
        wire = _wires(client)[lost]
        assert wire is not None
        wire.close()
        await until(partial(_are_at, client, stray), f"{lost} together with the others")


def _are_at(client: aiodlock.Client, node: Node) -> bool:
    return _ports(client) == {node.port}


def _let_lookup_name(lookup: object, node: Node) -> None:
    async def named() -> tuple[str, int]:
        return "127.0.0.1", node.port

    lookup.get_master_address = named  # type: ignore[attr-defined]
    lookup._named_last = lambda _: []  # type: ignore[attr-defined]


async def test_idle_command_connection_that_is_dead_is_noticed(
    service: SentinelService, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodlock.backends.redis.connections.PING_EVERY", 0.2)
    client = await make_client()
    before = _wires(client)["commands"]
    service.primary.pause()
    await until(lambda: _wires(client)["commands"] is None, "a loss that nobody asked about")
    assert before is not None
    assert before.lost.done()
    service.primary.resume()


async def test_client_that_is_left_in_the_middle_of_a_move_leaves_nothing_behind(
    service: SentinelService,
) -> None:
    client = aiodlock.Client(service.url, ttl=FOR_EVER, close_timeout=1.0)
    await client.__aenter__()
    old, _ = await asyncio.to_thread(service.promote_another, old_lives=True)
    lease = await client.lock("name").acquire()
    waiting = asyncio.create_task(client.lock("name").acquire())
    await asyncio.to_thread(service.wait_promoted, old)
    async with takes(at_most=5.0):
        await client.__aexit__(None, None, None)
    await cancelled(waiting) if not waiting.done() else waiting.exception()
    assert lease.lost is not None
