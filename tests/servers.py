"""The stores the tests run against: real servers of three kinds, and the memory store."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import redis
import redis.asyncio
from fakeredis.aioredis import FakeRedis

from aiodlock._embedded import EmbeddedServer, find_redis62, find_redis_on_path, find_valkey9

MEMORY = "memory"
REAL = ("valkey9", "redis62", "redis70")
ALL = (MEMORY, *REAL)

# What a waiter needs to hear of a key that goes: keyspace channels for generic commands, expiry
# and eviction.
NOTIFICATIONS = "Kgxe"

# What a test may have changed and the next one relies on.
_DEFAULTS = {"notify-keyspace-events": "", "maxmemory": "0", "maxmemory-policy": "noeviction"}

_numbers = itertools.count(1)


def _redis_on_path() -> Path:
    found = find_redis_on_path()
    assert found is not None, "the store redis70 needs a redis-server on PATH"
    return found


BINARIES: dict[str, Callable[[], Path]] = {
    "valkey9": find_valkey9,
    "redis62": find_redis62,
    "redis70": _redis_on_path,
}


def installed(name: str) -> bool:
    """Tell whether this machine is expected to run the store. Only redis70 may be missing."""
    return name != "redis70" or find_redis_on_path() is not None


def embedded(name: str, *, tcp: bool = False, **config: str | int) -> EmbeddedServer:
    """Make a server of a test's own (not started): embedded("valkey9", maxmemory="2mb").

    Underscores in the names of options become dashes.
    """
    options = {key.replace("_", "-"): value for key, value in config.items()}
    return EmbeddedServer(BINARIES[name](), tcp=tcp, config=options)


@dataclass
class Store:
    """Where one test keeps its locks."""

    name: str
    url: str
    server: EmbeddedServer | None = None
    _raw_clients: list[redis.asyncio.Redis] = field(default_factory=list)

    @property
    def is_memory(self) -> bool:
        return self.server is None

    async def raw(self, *, decode_responses: bool = True) -> redis.asyncio.Redis:
        """Return a redis-py client to the same store, to look at keys and to disturb them.

        It is closed at the end of the test.
        """
        client = self._connect(decode_responses)
        self._raw_clients.append(client)
        return client

    async def notifications(self, on: bool) -> None:
        """Have the server send keyspace notifications, or not; the memory store always does."""
        if self.is_memory:
            return
        client = await self.raw()
        await client.config_set("notify-keyspace-events", NOTIFICATIONS if on else "")

    async def aclose(self) -> None:
        for client in self._raw_clients:
            await client.aclose()
        self._raw_clients.clear()

    def _connect(self, decode_responses: bool) -> redis.asyncio.Redis:
        if not self.is_memory:
            return redis.asyncio.Redis.from_url(self.url, decode_responses=decode_responses)
        from aiodlock.backends.memory import shared_server

        return FakeRedis(server=shared_server(self.url), decode_responses=decode_responses)


class Servers:
    """Starts each kind of server when a test first asks for it, and stops all in the end."""

    def __init__(self) -> None:
        self._running: dict[str, EmbeddedServer] = {}

    def store(self, name: str) -> Store:
        """Return an empty store, whatever the test before did to it."""
        if name == MEMORY:
            return Store(name, f"memory://test-{next(_numbers)}")
        server = self._server(name)
        reset(server)
        return Store(name, server.url, server)

    def stop(self) -> None:
        for server in self._running.values():
            server.stop()
        self._running.clear()

    def _server(self, name: str) -> EmbeddedServer:
        if name not in self._running:
            self._running[name] = embedded(name)
        server = self._running[name]
        server.resume()
        if not server.running:
            server.start()
        return server


def reset(server: EmbeddedServer) -> None:
    """Empty the server, forget its scripts, and set back what tests change in its configuration."""
    with redis.Redis.from_url(server.url) as client:
        for option, value in _DEFAULTS.items():
            client.config_set(option, value)
        client.flushall()
        client.script_flush()
