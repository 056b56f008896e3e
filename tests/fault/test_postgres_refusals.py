"""What PostgreSQL refuses after a client has entered is an outage: leases last, and it tries again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import asyncpg
import pytest

from aiodlock import BackendUnavailable, Client
from aiodlock._clock import now
from aiodlock.backends.postgres.schema import VERSION, create_statements

from ..postgres import PostgresServer
from ..scenes import bounded, soon, until_held, until_waiting
from ..servers import installed, postgres_server

NAME = "order:42"
_END = (
    "select pg_terminate_backend(pid) from pg_stat_activity "
    "where backend_type = 'client backend' and pid <> pg_backend_pid();"
)
_GRANTS = "grant execute on all functions in schema aiodlock to locker;"

pytestmark = pytest.mark.skipif(not installed("postgres"), reason="postgres is not installed")


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server("postgres") as server:
        server.execute(create_statements())
        server.execute(
            "create role locker login; grant usage on schema aiodlock to locker;" + _GRANTS
        )
        yield server


@pytest.mark.parametrize(
    ("refuse", "allow"),
    [
        ("alter role locker nologin;" + _END, "alter role locker login;"),
        ("revoke all on all functions in schema aiodlock from locker;", _GRANTS),
        ("revoke all on schema aiodlock from locker;", "grant usage on schema aiodlock to locker;"),
        ("alter role locker connection limit 0;" + _END, "alter role locker connection limit -1;"),
        (
            "alter role locker set default_transaction_read_only = on;" + _END,
            "alter role locker reset default_transaction_read_only;" + _END,
        ),
        (
            "alter role locker set statement_timeout = '1us';" + _END,
            "alter role locker reset statement_timeout;" + _END,
        ),
        ("alter schema aiodlock rename to away;", "alter schema away rename to aiodlock;"),
        (
            "alter function aiodlock.turn rename to away;",
            "alter function aiodlock.away rename to turn;",
        ),
        (
            "delete from aiodlock.meta;" + _END,
            f"insert into aiodlock.meta values ({VERSION}, 'logged', 0);",
        ),
        (
            "alter database postgres allow_connections false;" + _END,
            "",
        ),
    ],
    ids=[
        *(
            "login",
            "functions",
            "schema",
            "connections",
            "read_only",
            "timeout",
            "renamed",
            "missing",
            "emptied",
        ),
        "database",
    ],
)
async def test_refusal_for_a_while_costs_no_lease(
    server: PostgresServer, refuse: str, allow: str
) -> None:
    if not server.execute("select 1 from pg_database where datname = 'side'"):
        server.execute("create database side;")
    admin = server.url_of("postgres", "side")

    async def run(sql: str) -> None:
        connection = await asyncpg.connect(admin if "database" in sql else server.url)
        try:
            await connection.execute(sql)
        except asyncpg.AdminShutdownError:
            pass
        finally:
            connection.terminate()

    async with Client(server.url_of("locker"), ttl=30) as client:
        lease = await client.lock(NAME, on_lost="flag").acquire()
        await run(refuse)
        began = now()
        while now() < began + 5:
            try:
                await client.lock("other").acquire_nowait()
            except BackendUnavailable:
                await asyncio.sleep(0.1)
        await run(allow or "alter database postgres allow_connections true;")
        async with bounded(5), client.lock("third"):
            pass
        await until_held(client, NAME)
        assert lease.held
        await soon(lease.release())


@pytest.mark.parametrize(
    ("refuse", "allow", "words"),
    [
        (
            "alter role locker nologin;" + _END,
            "alter role locker login;",
            "not permitted to log in",
        ),
        (
            "revoke all on all functions in schema aiodlock from locker;",
            _GRANTS,
            "permission denied for function turn",
        ),
        (
            "revoke connect on database postgres from public;" + _END,
            "grant connect on database postgres to public;",
            "does not have CONNECT privilege",
        ),
    ],
    ids=["login", "functions", "database"],
)
async def test_what_a_refusal_ends_names_it_on_one_line(
    server: PostgresServer, refuse: str, allow: str, words: str
) -> None:
    async with (
        Client(server.url_of("locker"), ttl=6, unavailable_after=3) as client,
        Client(server.url) as other,
        other.lock("other"),
    ):
        lease = await client.lock(NAME, on_lost="flag").acquire()
        waiting = asyncio.create_task(client.lock("other").acquire())
        await until_waiting(other, "other")
        try:
            await asyncio.to_thread(server.execute, refuse)
            with pytest.raises(BackendUnavailable) as ended:
                async with bounded(20):
                    await waiting
            lost = await lease.wait_lost()
        finally:
            await asyncio.to_thread(server.execute, allow)
    for told in (str(ended.value), str(lost)):
        assert words in told
        assert "\n" not in told
        assert told.count("postgresql://") == 1
