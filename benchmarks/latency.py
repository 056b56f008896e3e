"""How each store gets along with round trips of 0.3 to 3 s, and with connections refused for 5 s.

    python -m benchmarks.latency [--stores one,sentinel,...] [--seconds 40]

A proxy in front of each server holds back what passes, half of the round trip in each direction. Everything
runs at the same time: what is measured is waiting, not work. Prints two tables in Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from redis.asyncio import RedisCluster

import aiodlock
from aiodlock._clock import now
from aiodlock._embedded import EmbeddedServer, find_valkey9
from tests.etcd.servers import EtcdCluster
from tests.ports import free_port
from tests.postgres import PostgresServer, find_debian
from tests.topology.cluster import Cluster
from tests.topology.servers import SERVICE, Node, Sentinel
from tests.zookeeper import ZooKeeperServer

ROUND_TRIPS = (0.3, 0.7, 1.5, 3.0)
REFUSED_FOR = 5.0
_BINARY = find_valkey9()
#: The scenario that a log record belongs to.
_lines: ContextVar[list[str] | None] = ContextVar("lines", default=None)


class Way:
    """A proxy to one server.

    Mutable state: ``one_way`` (seconds), ``refuses``, ``messages`` (chunks from clients), ``_open``.
    """

    def __init__(self, target: int) -> None:
        self.port = free_port()
        self.one_way = 0.0
        self.messages = 0
        self._refuses = False
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()

    async def serve(self, stack: AsyncExitStack) -> Way:
        """Listen until the stack is left."""
        server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)
        stack.callback(server.close)
        return self

    def refuse(self, refuses: bool) -> None:
        """Cut all connections, and every new one at once; or stop doing so."""
        self._refuses = refuses
        for writer in tuple(self._open) if refuses else ():
            writer.transport.abort()

    async def _carry(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        if self._refuses:
            back.transport.abort()
            return
        far, on = await asyncio.open_connection("127.0.0.1", self._target)
        ends = {back, on}
        self._open |= ends
        tasks = [
            asyncio.create_task(self._pass(near, on, counts=True)),
            asyncio.create_task(self._pass(far, back, counts=False)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._open -= ends
            for end in ends:
                end.transport.abort()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool
    ) -> None:
        loop, last = asyncio.get_running_loop(), 0.0
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                self.messages += counts
                last = max(last, loop.time() + self.one_way)
                loop.call_at(last, _write, writer, data)
        await asyncio.sleep(max(0.0, last - loop.time()))


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.is_closing():
        writer.write(data)


Made = tuple[Any, list[Way]]


async def _enter(stack: AsyncExitStack, server: Any) -> Any:
    """Start a server of the tests in a thread; it is stopped there, too."""
    started = await asyncio.to_thread(server.__enter__)
    stack.push_async_callback(asyncio.to_thread, server.__exit__, None, None, None)
    return started


async def _started(stack: AsyncExitStack, server: Any) -> Any:
    await asyncio.to_thread(server.start)
    stack.push_async_callback(asyncio.to_thread, server.stop)
    return server


def _redis() -> EmbeddedServer:
    assert _BINARY is not None
    return Node(_BINARY)


async def one(stack: AsyncExitStack) -> Made:
    server = await _started(stack, _redis())
    way = await Way(server.port).serve(stack)
    return f"redis://127.0.0.1:{way.port}", [way]


async def sentinel(stack: AsyncExitStack) -> Made:
    assert _BINARY is not None
    server = await _started(stack, _redis())
    way = await Way(server.port).serve(stack)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    reached: Any = SimpleNamespace(port=way.port)
    ways = [way]
    for number in range(3):
        own = folder / str(number)
        own.mkdir()
        watcher = await _started(stack, Sentinel(_BINARY, own, reached, quorum=2, **_PATIENT))
        ways.append(await Way(watcher.port).serve(stack))
    await asyncio.sleep(3.0)  # they find one another
    hosts = ",".join(f"127.0.0.1:{one.port}" for one in ways[1:])
    return f"redis+sentinel://{hosts}/{SERVICE}/0", ways


#: The sentinels are far from the server, too, and must not call it down for that.
_PATIENT: dict[str, str] = {"sentinel down-after-milliseconds": f"{SERVICE} 60000"}


async def cluster(stack: AsyncExitStack) -> Made:
    assert _BINARY is not None
    nodes = await _enter(stack, Cluster(_BINARY, primaries=3, replicas=0))
    ways = {port: await Way(port).serve(stack) for port in nodes.ports}

    def remap(address: tuple[str, int]) -> tuple[str, int]:
        return "127.0.0.1", ways[address[1]].port if address[1] in ways else address[1]

    client = RedisCluster(
        host="127.0.0.1", port=next(iter(ways.values())).port, address_remap=remap
    )
    stack.push_async_callback(client.aclose)
    return client, list(ways.values())


async def quorum(stack: AsyncExitStack) -> Made:
    servers = [await _started(stack, _redis()) for _ in range(3)]
    ways = [await Way(server.port).serve(stack) for server in servers]
    return [f"redis://127.0.0.1:{way.port}" for way in ways], ways


async def postgres(stack: AsyncExitStack) -> Made:
    programs = find_debian()
    assert programs is not None
    server = await _started(stack, PostgresServer(programs, fsync="off"))
    async with aiodlock.Client(server.url, create=True):
        pass
    way = await Way(server.port).serve(stack)
    return server.url.replace(f":{server.port}", f":{way.port}"), [way]


async def etcd(stack: AsyncExitStack) -> Made:
    members = await _enter(stack, EtcdCluster(1))
    way = await Way(members.nodes[0].port).serve(stack)
    return f"etcd://127.0.0.1:{way.port}", [way]


async def zookeeper(stack: AsyncExitStack) -> Made:
    server = await _started(stack, ZooKeeperServer())
    way = await Way(server.port).serve(stack)
    return server.url.replace(f":{server.port}", f":{way.port}"), [way]


STORES: dict[str, Callable[[AsyncExitStack], Awaitable[Made]]] = {
    make.__name__: make for make in (one, sentinel, cluster, quorum, postgres, etcd, zookeeper)
}


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        lines = _lines.get()
        if lines is not None:
            lines.append(record.getMessage())


async def _served(source: Any) -> None:
    """Wait until a server has let somebody in: many start at the same time."""
    while True:
        with suppress(aiodlock.LockError):
            async with aiodlock.Client(source) as client, client.lock("first"):
                return


async def far(
    make: Callable[[AsyncExitStack], Awaitable[Made]], trip: float, seconds: float
) -> str:
    """Return a row of the table of latencies."""
    lines: list[str] = []
    _lines.set(lines)
    async with AsyncExitStack() as stack:
        source, ways = await make(stack)
        await _served(source)
        for way in ways:
            way.one_way = trip / 2
        began, turns, failed = now(), 0, 0
        client = aiodlock.Client(source, ttl=60.0, waiter_ttl=60.0)
        try:
            await stack.enter_async_context(client)
        except aiodlock.LockError as error:
            return f"not entered after {now() - began:.1f} s: {str(error)[:90]}"
        entered = now() - began
        held = [await client.lock(f"held {number}").acquire() for number in range(3)]
        before, until = sum(way.messages for way in ways), now() + seconds
        while now() < until:
            try:
                async with client.lock("name"):
                    turns += 1
            except aiodlock.LockError:
                failed += 1
        messages = sum(way.messages for way in ways) - before
        lost = sum(not lease.held for lease in held)
        for way in ways:
            way.one_way = 0.0
        return (
            f"{entered:.1f} | {turns} | {failed} | {lost} of {len(held)} | "
            f"{messages / max(turns, 1):.1f} | {len(lines)}"
        )


async def refused(make: Callable[[AsyncExitStack], Awaitable[Made]]) -> str:
    """Return a row of the table of refusals."""
    lines: list[str] = []
    _lines.set(lines)
    async with AsyncExitStack() as stack:
        source, ways = await make(stack)
        await _served(source)
        client = await stack.enter_async_context(aiodlock.Client(source, ttl=30.0))
        held = [await client.lock(f"held {number}").acquire() for number in range(3)]
        waiting = asyncio.create_task(client.lock("held 0").acquire())
        await asyncio.sleep(0.5)
        for way in ways:
            way.refuse(True)
        await asyncio.sleep(REFUSED_FOR)
        for way in ways:
            way.refuse(False)
        began = now()
        async with client.lock("name"):
            again = now() - began
        lost = sum(not lease.held for lease in held)
        waiting.cancel()
        await asyncio.wait([waiting])
        return f"{again:.1f} | {lost} of {len(held)} | {len(lines)}"


async def _told(row: Awaitable[str]) -> str:
    try:
        async with asyncio.timeout(240):
            return await row
    except Exception as error:  # one row must not cost the others
        return f"failed: {error!r}"[:140]


async def _tables(stores: list[str], seconds: float) -> None:
    rows = [(name, trip) for name in stores for trip in ROUND_TRIPS]
    found = await asyncio.gather(
        *(asyncio.create_task(_told(far(STORES[name], trip, seconds))) for name, trip in rows),
        *(asyncio.create_task(_told(refused(STORES[name]))) for name in stores),
    )
    print(
        "| store | round trip | entered (s) | turns | failed | lost | messages a turn | log lines |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (name, trip), row in zip(rows, found, strict=False):
        print(f"| {name} | {trip:g} s | {row} |")
    print("\n| store | granted again (s) | lost at ttl 30 | log lines |\n|---|---|---|---|")
    for name, row in zip(stores, found[len(rows) :], strict=True):
        print(f"| {name} | {row} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stores", default=",".join(STORES))
    parser.add_argument("--seconds", type=float, default=40.0)
    options = parser.parse_args()
    logger = logging.getLogger("aiodlock")
    logger.addHandler(_Lines(logging.WARNING))
    logger.propagate = False
    asyncio.run(_tables(options.stores.split(","), options.seconds))


if __name__ == "__main__":
    main()
