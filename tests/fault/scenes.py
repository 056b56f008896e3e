"""What the tests of faults share: waiting for a state, and looking at what is left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiodlock
from aiodlock._place import State
from aiodlock.backends.redis.scripts import ALL, Script

from ..proxy import Command, FaultProxy, Predicate, ProxyConnection
from ..servers import Store

#: What takes effect without waiting for a ttl takes far less than this; the machine may be busy.
SOON = 2.0


async def until(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]], within: float = 5.0
) -> None:
    """Look again and again until the condition is true."""
    give_up_at = time.monotonic() + within
    while True:
        answer = condition()
        if answer if isinstance(answer, bool) else await answer:
            return
        assert time.monotonic() < give_up_at, f"not within {within} s"
        await asyncio.sleep(0.002)


async def queued(client: aiodlock.Client, number: int, name: str = "name") -> None:
    """Wait until so many requests are queued."""

    async def are_queued() -> bool:
        return len((await client.inspect(name)).waiters) == number

    await until(are_queued)


async def waiting_for_notice(client: aiodlock.Client, number: int = 1) -> None:
    """Wait until so many requests of this client know that they are queued."""
    session = client._session
    assert session is not None
    await until(
        lambda: sum(place.state is State.WAITING for place in session.places.values()) == number
    )


async def load_scripts(store: Store) -> None:
    """Let the first call of each script be the only one, as on a server in use."""
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


@asynccontextmanager
async def takes(*, at_least: float = 0.0, at_most: float) -> AsyncIterator[None]:
    """Assert how long the block takes, in seconds."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert at_least <= took <= at_most, f"took {took:.3f} s"


async def nothing_left(store: Store, *, markers: bool = False) -> None:
    """Wait until the store has the tokens alone (and markers, where a reply may have been lost)."""
    raw = await store.raw()

    async def is_clean() -> bool:
        keys = [str(key) for key in await raw.keys("*")]
        left = [key for key in keys if not key.endswith(":token")]
        return all(markers and ":marker:" in key for key in left)

    try:
        await until(is_clean, within=SOON)
    except AssertionError:
        raise AssertionError(f"left in the store: {await raw.keys('*')}") from None


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

    await until(acquired, within=SOON)
    assert lease is not None
    await lease.release()


def no_places(*clients: aiodlock.Client) -> None:
    """Assert that the clients have forgotten every request."""
    for client in clients:
        assert client._session is not None
        assert client._session.places == {}
        assert len(client._session.extender) == 0
