"""A PostgreSQL primary that is lost, and its standby: what a failover costs, logged and unlogged."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from aiodlock import BackendUnavailable, Client
from aiodlock.backends.postgres.schema import create_statements
from aiodlock.cli import _doctor_postgres, _init

from ..postgres import PostgresServer
from ..scenes import bounded, takes, until_held, until_waiting
from ..servers import installed, postgres_server

NAME = "order:42"

pytestmark = pytest.mark.skipif(not installed("postgres"), reason="postgres is not installed")


@pytest.fixture(params=["logged"])
def primary(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    with postgres_server("postgres") as server:
        server.execute(create_statements(request.param))
        yield server


@pytest.fixture
def standby(primary: PostgresServer) -> Iterator[PostgresServer]:
    with primary.make_standby() as server:
        yield server


unlogged = pytest.mark.parametrize("primary", ["unlogged"], indirect=True)


def both(primary: PostgresServer, standby: PostgresServer) -> str:
    """Return the URL that a user names for a failover."""
    hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
    return f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write"


async def test_standby_is_refused_because_it_is_read_only(standby: PostgresServer) -> None:
    async with takes(at_most=6):
        with pytest.raises(BackendUnavailable, match="is a standby, which is read-only"):
            async with Client(standby.url):
                pass


async def test_failover_to_a_synchronous_standby_forgets_no_lease_and_no_place(
    primary: PostgresServer, standby: PostgresServer
) -> None:
    primary.configure("synchronous_standby_names", "*")
    url = both(primary, standby)
    async with Client(url, ttl=20) as one, Client(url, ttl=20) as other:
        async with one.lock(NAME) as lease:
            waiting = asyncio.create_task(other.lock(NAME).acquire())
            await until_waiting(one, NAME)
            primary.crash()
            await asyncio.to_thread(standby.promote)
            await until_held(one, NAME)
            assert lease.held
            assert not waiting.done()
        second = await asyncio.wait_for(waiting, 20)
        assert second.token > lease.token
        await second.release()


@pytest.fixture
def silent() -> Iterator[int]:
    """Give the port of a host that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    "hosts",
    ["@127.0.0.1:{},127.0.0.1:{}/postgres?", "@/postgres?host=127.0.0.1,127.0.0.1&port={},{}&"],
)
async def test_host_that_says_nothing_keeps_nobody_from_the_next_one(
    primary: PostgresServer, silent: int, hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_init, "_WITHIN", 1.0)
    monkeypatch.setattr(_doctor_postgres, "_WITHIN", 1.0)
    url = f"postgresql://postgres{hosts}target_session_attrs=read-write".format(
        silent, primary.port
    )
    async with Client(url) as client, client.lock(NAME):
        pass
    assert "nothing to do" in await _init.create(url, None)
    assert await _doctor_postgres.examine(url)


async def test_primary_that_hangs_is_left_for_the_standby(
    primary: PostgresServer, standby: PostgresServer
) -> None:
    async with Client(both(primary, standby), ttl=60) as client:
        primary.pause()
        await asyncio.to_thread(standby.promote)
        async with client.lock(NAME, timeout=20):
            pass


async def test_switch_over_in_which_no_server_takes_writes_for_a_while_is_outlived(
    primary: PostgresServer,
) -> None:
    """An operator's switch-over makes a standby of the old primary before the new one is promoted."""
    url = f"{primary.url}?target_session_attrs=read-write"
    async with Client(url, ttl=20) as one, Client(url, ttl=20) as other:
        async with one.lock(NAME) as lease:
            waiting = asyncio.create_task(other.lock(NAME).acquire())
            await until_waiting(one, NAME)
            set_read_only(primary, "on")
            await asyncio.sleep(1.0)
            set_read_only(primary, "off")
            await until_held(one, NAME)
            assert lease.held
            assert not waiting.done()
        second = await asyncio.wait_for(waiting, 20)
        await second.release()


async def test_server_that_takes_no_writes_is_asked_with_pauses(
    primary: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with Client(primary.url) as client:
        set_read_only(primary, "on")
        acquiring = asyncio.create_task(client.lock(NAME).acquire())
        await asyncio.sleep(3)
        lost = [record.getMessage() for record in caplog.records]
        set_read_only(primary, "off")
        async with bounded(10):
            await (await acquiring).release()
    assert len(lost) == 2, lost  # both connections, once


def set_read_only(server: PostgresServer, to: str) -> None:
    """Let a server take writes, or none, and end the sessions that it has."""
    server.configure("default_transaction_read_only", to)
    server.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where backend_type = 'client backend' and pid <> pg_backend_pid()"
    )


async def test_failover_that_forgets_a_lease_gives_larger_tokens_and_tells_its_holder(
    primary: PostgresServer, standby: PostgresServer
) -> None:
    url = both(primary, standby)
    async with Client(url, ttl=20) as one, Client(url, ttl=20) as other:
        async with one.lock(NAME):
            pass
        await asyncio.to_thread(primary.replicate_to, standby)  # it knows the name
        standby.shut_down()
        lease = await one.lock(NAME, on_lost="flag").acquire()
        primary.crash()
        await asyncio.to_thread(standby.start)
        await asyncio.to_thread(standby.promote)
        second = await asyncio.wait_for(other.lock(NAME).acquire(), 20)
        assert second.token > lease.token
        lost = await asyncio.wait_for(lease.wait_lost(), 20)
        assert lost.reason in ("gone", "taken_over")
        await second.release()


@unlogged
async def test_failover_that_empties_the_tables_lets_nobody_in_before_the_lease_has_ended(
    primary: PostgresServer, standby: PostgresServer
) -> None:
    url = both(primary, standby)
    async with Client(url, ttl=4) as one, Client(url, ttl=4) as other:
        lease = await one.lock(NAME, on_lost="flag", auto_extend=False).acquire()
        await asyncio.to_thread(
            primary.replicate_to, standby
        )  # it has the length of the longest lease
        primary.crash()
        await asyncio.to_thread(standby.promote)
        second = await asyncio.wait_for(other.lock(NAME, timeout=30).acquire(), 30)
        assert not lease.held, "two hold"
        assert second.token > lease.token
        await second.release()
