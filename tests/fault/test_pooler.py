"""PostgreSQL behind pgbouncer in transaction mode, where notifications do not arrive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from urllib.parse import urlsplit

import asyncpg
import pytest

from aiodlock import Client, LockError
from aiodlock._clock import now
from aiodlock.backends.postgres.schema import create_statements
from aiodlock.cli import _doctor_postgres

from ..pooler import Pooler
from ..postgres import PostgresServer
from ..scenes import bounded, until_waiting
from ..servers import PGBOUNCER, Servers, installed

NAME = "order:42"

pytestmark = pytest.mark.skipif(not installed(PGBOUNCER), reason="no pgbouncer, or no postgres")


@pytest.fixture
def server(servers: Servers) -> PostgresServer:
    server = servers.postgres("postgres")
    server.execute("drop schema if exists aiodlock cascade;")
    server.execute(create_statements())
    return server


@pytest.fixture
def pooled(server: PostgresServer) -> Iterator[str]:
    """Give the URL of a pooler."""
    with Pooler(server) as pooler:
        yield pooler.url


async def _hand_over(one: Client, other: Client) -> float:
    """Return how long a hand-over takes."""
    async with one.lock(NAME):
        waiting = asyncio.create_task(other.lock(NAME).acquire())
        await until_waiting(one, NAME)
    released = now()
    lease = await asyncio.wait_for(waiting, 20)
    took = now() - released
    await lease.release()
    return took


async def test_client_behind_a_pooler_hears_by_the_connection_that_goes_around_it(
    server: PostgresServer, pooled: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "aiodlock")
    async with (
        Client(pooled, listen_source=server.url) as one,
        Client(pooled, listen_source=server.url) as other,
    ):
        for _ in range(5):
            await _hand_over(one, other)
        await asyncio.gather(*(_many(client, 20) for client in (one, other) * 8))
    assert not [record for record in caplog.records if getattr(record, "event", "") == "polling"]


async def test_client_that_hears_nothing_polls_and_says_so(
    pooled: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "aiodlock")
    async with Client(pooled) as one, Client(pooled) as other:
        events = [getattr(record, "event", "") for record in caplog.records]
        assert events.count("polling") == 2
        assert "poll every 1 s" in caplog.text
        for _ in range(3):
            assert await _hand_over(one, other) < 3
        await asyncio.gather(*(_many(client, 3) for client in (one, other) * 4))


async def test_client_that_hears_nothing_asks_about_leases_that_linger(pooled: str) -> None:
    async with Client(pooled) as one, Client(pooled) as other:
        async with one.lock(NAME, linger=60, ttl=60):
            pass
        asked = now()
        async with other.lock(NAME, timeout=20):
            assert now() - asked < 15  # a third of the ttl is 20 s


async def _many(client: Client, turns: int) -> None:
    for _ in range(turns):
        async with client.lock(NAME):
            pass


async def test_nothing_stays_in_the_sessions_that_a_pooler_lends_to_others(
    server: PostgresServer, pooled: str
) -> None:
    kept = (
        "select pg_listening_channels() as what union all select name from pg_prepared_statements "
        "union all select 'checks' where current_setting('client_connection_check_interval') <> '0'"
    )
    application = await asyncpg.connect(pooled, statement_cache_size=0)
    try:
        async with Client(pooled) as one, Client(pooled, listen_source=server.url) as other:
            await asyncio.gather(_many(one, 3), _many(other, 3))
            await asyncio.to_thread(_doctor, pooled)
            for _ in range(20):
                async with application.transaction():
                    assert await application.fetch(kept) == []
    finally:
        await application.close()


def _doctor(url: str) -> None:
    found = {one.subject: one for one in asyncio.run(_doctor_postgres.examine(url))}
    assert "leads to a pooler" in found["notifications"].found


async def test_transaction_that_is_cancelled_in_any_step_is_left(
    server: PostgresServer, pooled: str
) -> None:
    """Also in its begin or its commit: else the session would stay in it for good, and so the client."""
    cancel = (
        "select pg_cancel_backend(pid) from pg_stat_activity "
        "where backend_type = 'client backend' and pid <> pg_backend_pid()"
    )
    canceller = await asyncpg.connect(server.url)
    try:
        async with Client(pooled, listen_source=server.url, ttl=3) as client:
            ended = False

            async def work(name: str) -> None:
                while not ended:
                    try:
                        async with client.lock(name):
                            pass
                    except LockError:
                        await asyncio.sleep(0.01)

            working = [asyncio.create_task(work(f"n{number}")) for number in range(4)]
            for _ in range(600):
                await canceller.execute(cancel)
                await asyncio.sleep(0.005)
            ended = True
            async with bounded(20):
                await asyncio.gather(*working)
                async with client.lock("after"):
                    pass
    finally:
        await canceller.close()


@pytest.mark.parametrize("trip", [0.0, pytest.param(3.0, marks=pytest.mark.long)])
async def test_client_enters_with_one_connection_for_each_purpose(pooled: str, trip: float) -> None:
    """Each connection costs round trips, and a pooler may be far."""
    accepted: list[asyncio.StreamWriter] = []
    passing: set[asyncio.Task[None]] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            asyncio.get_running_loop().call_later(trip / 2, writer.write, data)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        parts = urlsplit(pooled)
        there, back = await asyncio.open_connection(parts.hostname, parts.port)
        accepted.append(back)
        passing.add(asyncio.create_task(pass_on(reader, back)))
        passing.add(asyncio.create_task(pass_on(there, writer)))

    proxy = await asyncio.start_server(accept, "127.0.0.1")
    try:
        port = proxy.sockets[0].getsockname()[1]
        async with Client(
            pooled.replace(f":{urlsplit(pooled).port}", f":{port}"), ttl=120
        ) as client:
            assert len(accepted) == 2 * 2  # one for messages, one to listen
            async with client.lock(NAME):
                pass
    finally:
        proxy.close()
        for task in passing:
            task.cancel()
        await asyncio.wait(passing)
        for writer in accepted:
            writer.close()
