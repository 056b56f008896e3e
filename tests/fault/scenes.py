"""What the tests of faults share: a line of waiters, and a look at what is left behind."""

from __future__ import annotations

import asyncio

import aiodlock
from aiodlock._request import State
from aiodlock.backends.etcd.store import EtcdBackend
from aiodlock.backends.redis.scripts import ALL, Script
from aiodlock.backends.zookeeper.store import ZooKeeperBackend

from ..inside import session_of
from ..proxy import Command, FaultProxy, Predicate, ProxyConnection
from ..scenes import SOON, keeper_of, stalls, store_of, takes, until, until_waiting
from ..servers import Store

#: What has to come at once, also on a busy machine, and yet without a lease of 10 s or more ending.
_AT_ONCE = 5.0

__all__ = [
    "SOON",
    "calling",
    "connections",
    "free_at_once",
    "keeper_of",
    "line_up",
    "load_scripts",
    "met_silence",
    "no_places",
    "no_places_soon",
    "nothing_left",
    "queued",
    "stalls",
    "store_of",
    "takes",
    "until",
    "waiting_for_notice",
]


async def line_up(
    holder: aiodlock.Client, *waiters: aiodlock.Client
) -> tuple[aiodlock.Lease, list[asyncio.Task[aiodlock.Lease]]]:
    """Let the first client hold the name, and the others wait for it in this order."""
    held = await holder.lock("name").acquire()
    tasks = []
    for client in waiters:
        already = _waiting(client)
        tasks.append(asyncio.create_task(client.lock("name").acquire()))
        await waiting_for_notice(client, already + 1)
    return held, tasks


async def queued(client: aiodlock.Client, number: int, name: str = "name") -> None:
    """Wait until so many requests are queued."""
    await until_waiting(client, name, number)


async def waiting_for_notice(client: aiodlock.Client, number: int = 1) -> None:
    """Wait until so many requests of this client know that they are queued."""
    await until(lambda: _waiting(client) == number, f"{number} waiters that know it")


def _waiting(client: aiodlock.Client) -> int:
    return sum(request.state is State.WAITING for request in session_of(client).requests.values())


async def met_silence(client: aiodlock.Client, proxy: FaultProxy) -> None:
    """Wait until the client has sent something in vain, or has noticed that its connection is gone."""
    session, sent = session_of(client), proxy.command_count
    keeper = keeper_of(client)
    for place in keeper.places.values():
        keeper.extend_now(place)
    await until(lambda: session.backend.failure is not None or proxy.command_count > sent)


async def load_scripts(store: Store) -> None:
    """Let the first call of each script be the only one, as on a server in use."""
    if store.is_memory:
        return
    raw = await store.raw(decode_responses=False)
    for script in ALL:
        await raw.script_load(script.source)


def calling(script: Script, containing: bytes = b"") -> Predicate:
    """Match calls of a script, by its hash or its source."""

    def matches(command: Command) -> bool:
        called = command.name in ("EVALSHA", "EVAL") and command.args[1] in (
            script.sha,
            script.source,
        )
        return called and containing in command.raw

    return matches


def connections(proxy: FaultProxy) -> tuple[ProxyConnection, ProxyConnection]:
    """Return the command connection and that of the wake-ups, of the only client of the proxy."""
    wakeups = [c for c in proxy.open_connections if c.commands["SUBSCRIBE"]]
    commands = [c for c in proxy.open_connections if not c.commands["SUBSCRIBE"]]
    assert len(wakeups) == len(commands) == 1
    return commands[0], wakeups[0]


async def nothing_left(store: Store, *, markers: bool = False) -> None:
    """Wait until the store has the tokens alone (and markers, where a reply may have been lost)."""

    async def is_clean() -> bool:
        return not await store.left(markers=markers)

    try:
        await until(is_clean, within=_AT_ONCE)
    except AssertionError:
        raise AssertionError(f"left in the store: {await store.left(markers=markers)}") from None


async def free_at_once(store: Store, client: aiodlock.Client, name: str = "name") -> None:
    """Assert that the name can be had without waiting, by a client that nothing happened to."""
    lease: aiodlock.Lease | None = None

    async def acquired() -> bool:
        nonlocal lease
        try:
            lease = await client.lock(name).acquire_nowait()
        except aiodlock.WouldBlock:
            return False
        return True

    await until(acquired, within=_AT_ONCE)
    assert lease is not None
    await lease.release()


def no_places(*clients: aiodlock.Client) -> None:
    """Assert that the clients have forgotten every request."""
    for client in clients:
        session = session_of(client)
        assert (session.requests, len(session.deadlines)) == ({}, 0)
        backend = session.backend
        if isinstance(backend, ZooKeeperBackend):
            assert not any(one.members for one in backend._sessions.values())
        elif isinstance(backend, EtcdBackend):
            assert not backend.requests
            assert not any(lease.users for lease in backend.cluster.leases.all())
        else:
            keeper = keeper_of(client)
            assert (keeper.places, len(keeper)) == ({}, 0)


async def no_places_soon(client: aiodlock.Client) -> None:
    """Wait until the client has forgotten every request."""
    await until(lambda: not session_of(client).requests, "the last leave")
    no_places(client)
