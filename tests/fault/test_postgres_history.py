"""A client of PostgreSQL knows its database again: of several that take writes, the newest counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import asyncpg
import pytest

from aiodlock import BackendUnavailable, Client, Lease, WouldBlock
from aiodlock.backends.postgres import scouts
from aiodlock.backends.postgres.history import History
from aiodlock.backends.postgres.schema import VERSION, create_statements
from aiodlock.cli import _doctor_postgres

from ..contract.test_renewal import kill, until_dead
from ..postgres import PostgresServer
from ..scenes import bounded, soon, store_of, until, until_held
from ..servers import installed, postgres_server
from .test_postgres import Proxy

NAME = "order:42"

pytestmark = pytest.mark.skipif(not installed("postgres"), reason="postgres is not installed")


@pytest.fixture
def primary() -> Iterator[PostgresServer]:
    with postgres_server("postgres") as server:
        server.execute(create_statements())
        yield server


@pytest.fixture
def standby(primary: PostgresServer) -> Iterator[PostgresServer]:
    with primary.make_standby() as server:
        yield server


def url_of(*servers: PostgresServer, attributes: str = "?target_session_attrs=read-write") -> str:
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return f"postgresql://postgres@{hosts}/postgres{attributes}"


async def is_at(client: Client, server: PostgresServer) -> bool:
    return bool(store_of(client)._messages.link.where.endswith(f":{server.port}"))


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(record, "event", "") for record in caplog.records]


# -- what counts -------------------------------------------------------------------------------------


def test_histories_have_one_order_for_all_clients() -> None:
    old = History("s", 1, "a", 10, 100)
    new = History("s", 2, "b", 20, 50)
    twin = History("s", 2, "c", 21, 900)
    assert not old.conflict(old)
    assert not new.conflict(old)
    assert "was the primary before" in old.conflict(new)
    assert "promoted to timeline 2" in twin.conflict(new)
    assert not new.conflict(twin)
    assert "older state" in History("s", 1, "a", 10, 99, asked_after=100).conflict(old)
    assert "another database" in History("t", 9, "z", 1, 1).conflict(old)
    assert History("s", 1, "a", 10, 120).after(old).flushed == 120


# -- the old primary ---------------------------------------------------------------------------------


@pytest.mark.parametrize("old_first", [True, False])
@pytest.mark.parametrize("attributes", ["?target_session_attrs=read-write", ""])
async def test_old_primary_that_is_started_again_lets_nobody_in(
    primary: PostgresServer,
    standby: PostgresServer,
    caplog: pytest.LogCaptureFixture,
    old_first: bool,
    attributes: str,
) -> None:
    """*One* was killed, *two* promoted, *one* started again by its init system."""
    both = (primary, standby) if old_first else (standby, primary)
    here, there = url_of(*both, attributes=attributes), url_of(*reversed(both))
    async with Client(here) as one:
        lease = await one.lock(NAME).acquire()
        await asyncio.to_thread(primary.replicate_to, standby)
        primary.crash()
        await asyncio.to_thread(standby.promote)
        await asyncio.to_thread(primary.start)
        async with Client(there) as other:
            await until_held(other, NAME)
            with pytest.raises(WouldBlock):
                await other.lock(NAME).acquire_nowait()
            await until(lambda: is_at(one, standby), "the client is at the newer one")
            assert lease.held
            await soon(lease.release())
            async with other.lock(NAME, timeout=10) as second:
                assert second.token > lease.token
    assert "was the primary before: timeline 1, known 2" in caplog.text


async def test_client_leaves_an_old_primary_that_goes_on(
    primary: PostgresServer, standby: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connection lives, so only a look at the other host can tell."""
    async with Client(url_of(primary, standby), ttl=60) as client:
        kept = await client.lock("kept", on_lost="flag").acquire()
        await asyncio.to_thread(primary.replicate_to, standby)
        await asyncio.to_thread(standby.promote)
        lost = await client.lock("lost", on_lost="flag").acquire()
        async with Client(url_of(standby)) as other:
            async with asyncio.timeout(scouts.LOOK_EVERY + 5):
                await until(lambda: is_at(client, standby), "the client is at the newer one")
            assert kept.held
            with pytest.raises(WouldBlock):
                await other.lock("kept").acquire_nowait()
            await soon(lost.wait_lost())
    assert "is left: it was the primary before" in caplog.text


async def is_there(server: PostgresServer, name: str) -> bool:
    sql = f"select count(*) from aiodlock.name where key = 'aiodlock:l:{name}'"
    return bool((await asyncio.to_thread(server.execute, sql))[0][0])


async def test_of_two_servers_that_were_promoted_all_clients_choose_the_same(
    primary: PostgresServer, standby: PostgresServer
) -> None:
    """Their timelines have the same number."""
    with primary.make_standby() as twin:
        primary.crash()
        for server in (standby, twin):
            await asyncio.to_thread(server.promote)
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(Client(url_of(*servers)))
                for servers in ((standby, twin), (twin, standby), (primary, twin, standby))
            ]
            lease = await clients[0].lock(NAME).acquire()
            for client in clients[1:]:
                with pytest.raises(WouldBlock):
                    await client.lock(NAME).acquire_nowait()
            assert lease.held


async def test_twin_that_is_promoted_later_takes_nobody_away(
    primary: PostgresServer, standby: PostgresServer
) -> None:
    with primary.make_standby() as twin:
        primary.crash()
        await asyncio.to_thread(standby.promote)
        async with Client(url_of(twin, standby)) as one:
            lease = await one.lock(NAME, on_lost="flag").acquire()
            await asyncio.to_thread(twin.promote)
            async with Client(url_of(twin, standby)) as other:
                with pytest.raises(WouldBlock):
                    await other.lock(NAME).acquire_nowait()
                await asyncio.sleep(scouts.LOOK_EVERY + 0.5)
                assert await is_at(one, standby)
                assert await is_at(other, standby)
                assert lease.held


# -- another database --------------------------------------------------------------------------------


@asynccontextmanager
async def moved(
    primary: PostgresServer, **options: object
) -> AsyncIterator[tuple[Proxy, Client, PostgresServer]]:
    """Give a client whose address leads to another database from now on."""
    with postgres_server("postgres") as other:
        other.execute(create_statements())
        async with Proxy(primary) as proxy, Client(proxy.url, **options) as client:  # type: ignore[arg-type]
            yield proxy, client, other


async def test_address_that_leads_to_another_database_is_not_used(
    primary: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with moved(primary) as (proxy, client, other):
        lease: Lease = await client.lock(NAME, on_lost="flag", ttl=60).acquire()
        proxy.server = other
        await proxy.cut()
        with pytest.raises(BackendUnavailable, match="it is another database"):
            await client.lock("another").acquire_nowait()
        assert not await is_there(other, "another")
        assert events(caplog).count("other_store") <= 2  # for each connection
        proxy.server = primary
        await until_held(client, NAME)
        assert lease.held
        await soon(lease.release())


async def test_move_to_another_database_goes_on_when_the_old_one_is_silent_and_its_leases_are_over(
    primary: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with moved(primary, unavailable_after=3.0, ttl=2) as (proxy, client, other):
        lease = await client.lock(NAME, on_lost="flag").acquire()
        proxy.server = other
        await proxy.cut()
        async with bounded(20):
            await lease.wait_lost()
            while True:
                try:
                    async with client.lock(NAME, timeout=10) as second:
                        assert second.token > lease.token
                        break
                except BackendUnavailable:
                    await asyncio.sleep(0.1)
        assert await is_there(other, NAME.replace(":", "%3A"))
    assert "store_replaced" in events(caplog)


async def test_next_session_knows_the_database_of_the_one_that_died(
    primary: PostgresServer,
) -> None:
    async with moved(primary) as (proxy, client, other):
        async with client.lock(NAME):
            pass
        proxy.server = other
        kill(client)
        await until_dead(client)
        await proxy.cut()
        with pytest.raises(BackendUnavailable):
            await client.lock("another", timeout=3).acquire()
        assert not await is_there(other, "another")


async def _swap(server: PostgresServer, one: str, other: str) -> None:
    """Let two databases of a server change their names, as operators do after a restore."""
    connection = await asyncpg.connect(server.url_of("postgres", "template1"))
    for sql in (
        f"alter database {one} allow_connections false",
        f"select pg_terminate_backend(pid, 9000) from pg_stat_activity where datname = '{one}'",
        f"alter database {one} rename to moving",
        f"alter database {other} rename to {one}",
        f"alter database moving rename to {other}",
        f"alter database {other} allow_connections true",
    ):
        await connection.execute(sql)
    await connection.close()


async def _copy_database(server: PostgresServer) -> None:
    await _swap(server, "postgres", "copy")


async def _restore_schema(server: PostgresServer) -> None:
    restored = (
        "insert into aiodlock.history select * from before.history; drop schema before cascade;"
    )
    server.execute(f"alter schema aiodlock rename to before; {create_statements()} {restored}")


@pytest.mark.parametrize("replace", [_copy_database, _restore_schema])
async def test_copy_on_the_same_server_is_another_database(
    primary: PostgresServer, replace: Callable[[PostgresServer], Awaitable[None]]
) -> None:
    """It has the rows of the known one, also that of the history, and lacks what was acquired since."""
    async with Client(primary.url) as client:
        await client.inspect(NAME)  # there is a history now
    primary.execute("create database copy template postgres;")
    async with Client(primary.url) as one, Client(primary.url, unavailable_after=60) as other:
        lease = await one.lock(NAME, on_lost="flag", ttl=60).acquire()
        await replace(primary)
        with pytest.raises(BackendUnavailable, match="it is another database"):
            await other.lock(NAME, timeout=5).acquire()
        assert lease.held
        assert not await is_there(primary, NAME.replace(":", "%3A"))


async def _inspect(client: Client) -> object:
    return await client.inspect(NAME)


async def _list(client: Client) -> object:
    return [info async for info in client.locks()]


async def _tell_waits(client: Client) -> object:
    return await store_of(client).tell_waits(1, b"waits", keep=5.0)


async def _read_record(client: Client) -> object:
    return await store_of(client)._recorded("a key")


@pytest.mark.parametrize("asks", [_inspect, _list, _tell_waits, _read_record])
async def test_each_query_notices_that_the_server_is_not_the_known_one(
    primary: PostgresServer, asks: Callable[[Client], Awaitable[object]]
) -> None:
    async with Client(primary.url, listen_source=primary.url) as client:
        await asks(client)
        primary.execute("update aiodlock.history set id = 'other', born_us = born_us + 1;")
        with pytest.raises(
            BackendUnavailable, match=r"another server answers now|the other one counts"
        ):
            await asks(client)


@pytest.mark.parametrize("changed", ["history", "version"])
async def test_each_call_notices_that_the_server_is_not_the_known_one(
    primary: PostgresServer, changed: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a pooler, which leads a session elsewhere, or when the schema was upgraded meanwhile."""
    async with Client(primary.url, listen_source=primary.url) as client:
        async with client.lock(NAME):
            pass
        primary.execute(
            "update aiodlock.history set id = 'other', born_us = born_us + 1;"
            if changed == "history"
            else f"update aiodlock.meta set version = {VERSION + 1};"
            "create or replace function aiodlock.version() returns integer language sql immutable as "
            f"'select {VERSION + 1}';"
        )
        told = "promoted to timeline 1" if changed == "history" else "upgrade aiodlock here"
        with pytest.raises(BackendUnavailable, match=told):
            await client.lock("another", timeout=3).acquire()
        assert not await is_there(primary, "another")


# -- what doctor says --------------------------------------------------------------------------------


async def examined(*servers: PostgresServer) -> dict[str, str]:
    """Return what doctor finds of the hosts, each with its level."""
    found = await _doctor_postgres.examine(url_of(*servers))
    return {
        one.subject: f"{one.level}: {one.found}" for one in found if one.subject.startswith("host")
    }


async def test_doctor_says_nothing_of_a_standby_that_follows(
    primary: PostgresServer, standby: PostgresServer
) -> None:
    told = f"ok: 127.0.0.1:{primary.port} is the primary, on timeline 1"
    assert await examined(standby, primary) == {"hosts": told}


async def test_doctor_names_a_standby_that_has_diverged_and_a_host_that_is_silent(
    primary: PostgresServer, standby: PostgresServer
) -> None:
    """The old primary is started as a standby, with commits that the new one does not have."""
    await asyncio.to_thread(primary.replicate_to, standby)
    await asyncio.to_thread(standby.promote)
    primary.execute("create table mine as select generate_series(1, 100000);")
    primary.crash()
    old, new = f"host 127.0.0.1:{primary.port}", f"127.0.0.1:{standby.port}"
    found = await examined(primary, standby)
    assert found["hosts"] == f"ok: {new} is the primary, on timeline 2"
    assert found[old].startswith("warning: does not answer")
    primary.keep("standby.signal", b"")
    primary._options["primary_conninfo"] = f"host=127.0.0.1 port={standby.port} user=postgres"
    await asyncio.to_thread(primary.start)
    assert (
        "bytes of the log that the primary does not have" in (await examined(primary, standby))[old]
    )
    standby.execute("create table ours as select generate_series(1, 200000);")
    assert (await examined(primary, standby))[old].startswith(
        "warning: a standby that stands still"
    )
