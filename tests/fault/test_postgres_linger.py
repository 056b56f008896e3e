"""Leases that linger on PostgreSQL: their process dies or stops while idle, and messages are lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aiodlock import Client
from aiodlock._clock import now
from aiodlock.backends.postgres.schema import create_statements

from .. import forked
from ..inside import session_of
from ..postgres import PostgresServer
from ..scenes import PATIENCE, STARTING, store_of, until, until_waiting
from ..servers import Servers, installed
from .test_postgres import NAME, Proxy

pytestmark = pytest.mark.skipif(not installed("postgres"), reason="postgres is not installed")
#: Far longer than a machine stalls.
TTL = 2.0


@pytest.fixture
def server(servers: Servers) -> PostgresServer:
    server = servers.postgres("postgres")
    server.execute("drop schema if exists aiodlock cascade;")
    server.execute(create_statements())
    return server


class Lingerer:
    """A process that keeps the name after each body."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def token(self) -> int:
        """Return the token of the next body."""
        assert self.process.stdout is not None
        return int(await asyncio.wait_for(self.process.stdout.readline(), STARTING))

    def again(self) -> None:
        """Ask for another body."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")


@asynccontextmanager
async def lingerer(url: str) -> AsyncIterator[Lingerer]:
    process = await forked.start(
        "tests.fault.lingerer",
        url,
        NAME,
        str(TTL),
        cwd=Path(__file__).parents[2],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Lingerer(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_killed_while_idle_it_costs_what_a_dead_holder_costs(
    server: PostgresServer,
) -> None:
    async with Client(server.url) as client, lingerer(server.url) as other:
        await other.token()
        other.process.kill()
        killed = now()
        await other.process.wait()
        assert await client.lock(NAME).locked()
        lease = await client.lock(NAME).acquire(timeout=PATIENCE)
        assert now() - killed > TTL / 2  # it was extended a third of the ttl ago at the most
        await lease.release()


async def test_stopped_while_idle_it_begins_no_body_when_it_goes_on(
    server: PostgresServer,
) -> None:
    async with Client(server.url) as client, lingerer(server.url) as other:
        first = await other.token()
        other.again()
        assert await other.token() == first
        other.process.send_signal(signal.SIGSTOP)
        lease = await client.lock(NAME).acquire(timeout=PATIENCE)
        other.process.send_signal(signal.SIGCONT)
        other.again()
        await until_waiting(client, NAME)
        await lease.release()
        assert await other.token() > lease.token > first


@pytest.mark.parametrize("message", [b"acquire\t", b"extend\t", b"leave\t"])
async def test_reply_is_lost(server: PostgresServer, message: bytes) -> None:
    async with Proxy(server) as proxy:
        async with Client(proxy.url, ttl=TTL) as one, Client(server.url) as other:
            async with one.lock("warm"):
                pass
            proxy.loses = message
            lock = one.lock(NAME, linger=60.0)
            async with lock as lease:
                first = lease.token
            if message == b"extend\t":
                await asyncio.wait_for(proxy.lost.wait(), PATIENCE)
            async with other.lock(NAME, timeout=PATIENCE) as second:
                assert second.token > first
            async with asyncio.timeout(PATIENCE), lock as lease:
                assert lease.token > second.token
            assert proxy.lost.is_set()


async def test_recall_that_is_not_heard_is_told_by_the_next_extension(
    server: PostgresServer,
) -> None:
    dropped: list[str] = []
    async with Client(server.url, ttl=TTL) as one, Client(server.url) as other:
        async with one.lock(NAME, linger=60.0):
            pass
        session, heard_by = session_of(one), store_of(one)._listening._heard_by
        for channel in heard_by:
            heard_by[channel] = [dropped.append]
        async with other.lock(NAME, timeout=PATIENCE):
            assert not session.lingering.kept
            await until(lambda: not session.requests)
    # An empty one asks whether notifications come at all.
    assert [message.split(" ")[0] for message in dropped if message] == ["recall"]


async def test_recall_is_lost_with_the_connection_that_listens(server: PostgresServer) -> None:
    """The client asks about what lingers as soon as it listens again, long before its next extension."""
    async with Client(server.url) as one, Client(server.url) as other:
        async with one.lock(NAME, linger=3600.0, ttl=3600.0):
            pass
        listening = store_of(one)._listening
        connection = listening.link.connection
        for channel in listening._heard_by:
            await connection.remove_listener(channel, listening._hear)
        waiting = asyncio.create_task(other.lock(NAME).acquire(timeout=3 * PATIENCE))
        await until_waiting(other, NAME)
        connection.terminate()
        await (await waiting).release()
        await until(lambda: not session_of(one).requests)
