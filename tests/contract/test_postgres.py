"""Entering a client of PostgreSQL: what is missing or wrong is said, with what to do."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import trustme

from aiodlock import BackendError, BackendUnavailable, Client, LockLost, Unsupported, WouldBlock
from aiodlock._client import core_of
from aiodlock.backends.postgres.schema import VERSION, create_statements
from aiodlock.backends.postgres.sweeping import Sweeping
from aiodlock.cli import _doctor_postgres, _init

from ..postgres import PostgresServer
from ..scenes import until, until_cancelled
from ..servers import POSTGRES, Store

NAME = "order:42"


@pytest.fixture
def empty(postgres: PostgresServer) -> PostgresServer:
    """Give a database without the schema, and roles that may lock or may not."""
    postgres.execute("drop schema if exists aiodlock cascade;")
    for role in ("locker", "stranger"):
        postgres.execute(f"drop role if exists {role}; create role {role} login;")
    return postgres


def install(server: PostgresServer, durability: str = "logged") -> None:
    server.execute(create_statements("unlogged" if durability == "unlogged" else "logged"))


async def test_database_without_the_schema_is_told_to_be_initialized(empty: PostgresServer) -> None:
    with pytest.raises(
        BackendError, match=r"no schema aiodlock: create it once with 'aiodlock init"
    ):
        async with Client(empty.url):
            pytest.fail("entered")


async def test_schema_is_created_when_asked_for(empty: PostgresServer) -> None:
    async with Client(empty.url, create=True) as one, Client(empty.url, create=True) as other:
        async with one.lock(NAME):
            assert await other.lock(NAME).locked()


async def test_client_that_may_create_needs_no_more_than_others_when_the_schema_is_there(
    empty: PostgresServer,
) -> None:
    """Neither rights on the tables, nor the lock of those who install: a stopped one may have it."""
    install(empty)
    empty.execute(
        "grant usage on schema aiodlock to locker;"
        "grant execute on all functions in schema aiodlock to locker;"
    )
    stopped = await asyncpg.connect(empty.url)
    try:
        async with stopped.transaction():
            await stopped.execute("select pg_advisory_xact_lock(1095323470)")
            async with Client(empty.url_of("locker"), create=True) as client, client.lock(NAME):
                pass
    finally:
        await stopped.close()


@pytest.mark.usefixtures("brief_entering")
async def test_installation_that_another_one_holds_up_is_told(
    empty: PostgresServer,
) -> None:
    stopped = await asyncpg.connect(empty.url)
    try:
        async with stopped.transaction():
            await stopped.execute("select pg_advisory_xact_lock(1095323470)")
            with pytest.raises(BackendUnavailable, match="another process installs the schema"):
                async with Client(empty.url, create=True):
                    pytest.fail("entered")
    finally:
        await stopped.close()


async def test_schema_of_another_version_is_refused(empty: PostgresServer) -> None:
    install(empty)
    empty.execute(f"update aiodlock.meta set version = {VERSION + 1};")
    for create in (False, True):
        with pytest.raises(BackendError, match=f"has version {VERSION + 1}, and this release"):
            async with Client(empty.url, create=create):
                pytest.fail("entered")


@pytest.mark.parametrize("version", [1, VERSION - 1])
async def test_schema_of_an_older_tree_is_refused_and_the_way_on_is_told(
    empty: PostgresServer, version: int
) -> None:
    install(empty)
    empty.execute(f"update aiodlock.meta set version = {version};")
    told = (
        f"has version {version}, and this release of aiodlock needs version {VERSION}: stop every client, "
        + ("run 'drop schema aiodlock cascade', and run" if version == 1 else "and run")
        + " 'aiodlock init' of this release"
    )
    for create in (False, True):
        with pytest.raises(BackendError, match=told):
            async with Client(empty.url, create=create):
                pytest.fail("entered")


async def test_schema_whose_tables_were_emptied_is_told(empty: PostgresServer) -> None:
    """As suites of tests do, which truncate every table that they find."""
    install(empty)
    empty.execute("truncate aiodlock.meta, aiodlock.name, aiodlock.history, aiodlock.present;")
    for create in (False, True):
        with pytest.raises(BackendError, match=r"were emptied .* 'drop schema aiodlock cascade'"):
            async with Client(empty.url, create=create):
                pytest.fail("entered")
    with pytest.raises(BackendError, match="were emptied"):
        await _init.create(empty.url, None)


async def test_role_with_execute_alone_can_lock(empty: PostgresServer) -> None:
    install(empty)
    empty.execute(
        "grant usage on schema aiodlock to locker;"
        "grant execute on all functions in schema aiodlock to locker;"
    )
    async with Client(empty.url_of("locker")) as client:
        with pytest.raises(LockLost):  # noqa: PT012
            async with client.lock(NAME):
                assert (await client.inspect(NAME)).holders
                assert [info.name async for info in client.locks()] == [NAME]
                assert await client.break_lock(NAME) == 1
                await until_cancelled()


def sql_of_the_page(heading: str) -> list[str]:
    """Return the blocks of SQL below a heading of the page, as they stand."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "postgresql.md"
    section = page.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```sql\n(.*?)```", section, re.DOTALL)


async def test_roles_and_grants_of_the_page_lead_from_nothing_to_a_lock(
    empty: PostgresServer,
) -> None:
    operators = Path(__file__).parents[2] / "examples" / "operators"
    empty.execute("drop role locker;")
    empty.execute((operators / "roles.sql").read_text())
    try:
        assert "created" in await _init.create(empty.url_of("aiodlock_owner"), None)
        empty.execute((operators / "grants.sql").read_text(), role="aiodlock_owner")
        url = empty.url_of("locker")
        async with Client(url) as client, client.lock(NAME):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await asyncio.to_thread(
                    partial(empty.execute, "select * from aiodlock.name", role="locker")
                )
        found = {one.subject: one.level for one in await _doctor_postgres.examine(url)}
        assert "error" not in found.values(), found
    finally:
        empty.execute("drop schema if exists aiodlock cascade;")
        empty.execute("drop owned by aiodlock_owner, locker; drop role aiodlock_owner;")


async def test_guards_of_the_page_refuse_a_stale_token(empty: PostgresServer) -> None:
    install(empty)
    column, guarded, read, trigger = sql_of_the_page("Fencing in the same database")
    empty.execute("drop table if exists account;")
    empty.execute("drop function if exists refuse_stale_token;")
    empty.execute("create table account (id integer, balance integer);")
    empty.execute(column)
    empty.execute("insert into account values (1, 0);")
    async with Client(empty.url) as client:
        async with client.lock(NAME) as lease:
            old = lease.token
        async with client.lock(NAME) as lease:
            new = lease.token
    connection = await asyncpg.connect(empty.url)
    try:
        assert await connection.execute(guarded, 10, new, 1) == "UPDATE 1"
        assert await connection.execute(guarded, 20, old, 1) == "UPDATE 0"
        assert await connection.fetchval(read, new, 1) == 10
        assert await connection.fetchval(read, old, 1) is None
        await connection.execute(trigger)
        with pytest.raises(asyncpg.RaiseError, match="is stale"):
            await connection.execute("update account set balance = 30, fence = $1", old)
        await connection.execute("update account set balance = 40, fence = $1", new)
        assert await connection.fetchval("select balance from account") == 40
        with pytest.raises(asyncpg.RaiseError, match="is stale"):
            await connection.execute("delete from account where id = 1")
        name_token = "select set_config('aiodlock.token', $1, true)"
        with pytest.raises(asyncpg.RaiseError, match="is stale"):  # noqa: PT012
            async with connection.transaction():
                await connection.execute(name_token, str(old))
                await connection.execute("delete from account where id = 1")
        async with connection.transaction():
            await connection.execute(name_token, str(new))
            assert await connection.execute("delete from account where id = 1") == "DELETE 1"
    finally:
        await connection.close()


async def test_role_without_rights_is_told_the_grants(empty: PostgresServer) -> None:
    install(empty)
    with pytest.raises(BackendError, match="GRANT USAGE ON SCHEMA aiodlock"):
        async with Client(empty.url_of("stranger")):
            pytest.fail("entered")
    empty.execute("grant usage on schema aiodlock to stranger;")
    with pytest.raises(BackendError, match="GRANT EXECUTE ON ALL FUNCTIONS"):
        async with Client(empty.url_of("stranger")):
            pytest.fail("entered")


async def test_search_path_of_the_caller_changes_nothing(empty: PostgresServer) -> None:
    """Whoever may lock cannot put functions of their own under the names that ours use."""
    install(empty)
    empty.execute(
        "drop schema if exists trap cascade; create schema trap;"
        "create function trap.pg_notify(text, text) returns void language plpgsql as"
        " $$ begin raise exception 'trapped'; end $$;"
        "create function trap.hashtext(text) returns integer language plpgsql as"
        " $$ begin raise exception 'trapped'; end $$;"
        "alter role postgres set search_path = trap, pg_catalog;"
    )
    try:
        async with Client(empty.url) as one, Client(empty.url) as other:
            with pytest.raises(LockLost):  # noqa: PT012
                async with one.lock(NAME):
                    assert await other.lock(NAME).locked()
                    assert await other.break_lock(NAME) == 1
                    await until_cancelled()
    finally:
        empty.execute("alter role postgres reset search_path; drop schema trap cascade;")


async def test_isolation_level_that_cannot_work_is_refused(empty: PostgresServer) -> None:
    install(empty)
    empty.execute(
        "grant usage on schema aiodlock to locker;"
        "grant execute on all functions in schema aiodlock to locker;"
        "alter role locker set default_transaction_isolation = 'serializable';"
    )
    with pytest.raises(BackendError, match='needs the isolation level "read committed"'):
        async with Client(empty.url_of("locker")):
            pytest.fail("entered")


@pytest.mark.usefixtures("brief_entering")
async def test_role_whose_sessions_are_read_only_is_told(empty: PostgresServer) -> None:
    install(empty)
    empty.execute(
        "grant usage on schema aiodlock to locker;"
        "grant execute on all functions in schema aiodlock to locker;"
        "alter role locker set default_transaction_read_only = on;"
    )
    with pytest.raises(BackendUnavailable, match="switch default_transaction_read_only off"):
        async with Client(empty.url_of("locker")):
            pytest.fail("entered")


@pytest.mark.parametrize("durability", ["logged", "unlogged"])
async def test_publication_of_all_tables_refuses_nothing(
    empty: PostgresServer, durability: str
) -> None:
    """As for change data capture. It refuses updates of a table whose rows cannot be told apart."""
    install(empty, durability)
    empty.execute("create publication everything for all tables;")
    try:
        async with Client(empty.url) as client, client.lock(NAME):
            pass
        empty.execute(
            "update aiodlock.meta set version = 9;"
            "alter table aiodlock.meta replica identity default;"
        )
        assert "upgraded" in await _init.create(empty.url, None)
        async with Client(empty.url) as client, client.lock(NAME, ttl=60):
            pass
    finally:
        empty.execute("drop publication everything;")


async def test_checks_that_a_server_makes_of_functions_find_nothing(empty: PostgresServer) -> None:
    """Some servers refuse a function in which a variable has the name of another one."""
    empty.execute(f"set plpgsql.extra_errors = 'all'; {create_statements()}")
    empty.execute("alter role postgres set plpgsql.extra_errors = 'all';")
    try:
        async with Client(empty.url) as client, client.lock(NAME):
            assert (await client.inspect(NAME)).holders
    finally:
        empty.execute("alter role postgres reset plpgsql.extra_errors;")


async def test_functions_do_without_md5(empty: PostgresServer) -> None:
    """A server whose OpenSSL keeps to FIPS 140 refuses it, and so each hand-over to another client."""
    install(empty)
    functions = "select proname, prosrc from pg_proc where pronamespace = 'aiodlock'::regnamespace"
    assert [name for name, source in empty.execute(functions) if "md5" in source] == []


async def test_sessions_are_kept_though_the_server_ends_idle_ones(empty: PostgresServer) -> None:
    """Else each client dials, and warns of a lost connection, each time that it has nothing to ask."""
    install(empty)
    empty.execute(
        "grant usage on schema aiodlock to locker;"
        "grant execute on all functions in schema aiodlock to locker;"
        "alter role locker set idle_session_timeout = '1s';"
    )
    sessions = "select pid from pg_stat_activity where usename = 'locker' order by pid"
    async with Client(empty.url_of("locker")):
        mine = await asyncio.to_thread(empty.execute, sessions)
        assert len(mine) == 2
        other, ended = await asyncpg.connect(empty.url_of("locker")), asyncio.Event()
        other.add_termination_listener(lambda _: ended.set())
        await ended.wait()  # and it was idle for less long
        assert await asyncio.to_thread(empty.execute, sessions) == mine


async def test_wrong_database_is_refused_at_once(empty: PostgresServer) -> None:
    with pytest.raises(BackendError, match="refused"):
        async with Client(empty.url_of("postgres", "nowhere")):
            pytest.fail("entered")


@pytest.mark.usefixtures("brief_entering")
async def test_server_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(BackendUnavailable, match="cannot reach the store"):
        async with Client("postgresql://postgres@127.0.0.1:1/postgres"):
            pytest.fail("entered")


@pytest.mark.parametrize("option", ["sslmode=on", "target_session_attrs=master"])
async def test_option_of_the_url_that_the_driver_does_not_take_is_told_at_once(option: str) -> None:
    with pytest.raises(BackendError, match=option.partition("=")[0]) as refused:
        async with Client(f"postgresql://postgres@127.0.0.1:1/postgres?{option}"):
            pytest.fail("entered")
    assert not isinstance(refused.value, BackendUnavailable)


@pytest.mark.parametrize("option", ["sslrootcert", "sslcrl", "sslcert", "sslkey"])
@pytest.mark.parametrize("told_by", ["url", "environment"])
async def test_file_of_tls_that_is_not_there_is_told_at_once(
    option: str, told_by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority, own = trustme.CA(), tmp_path / "own.pem"
    authority.cert_pem.write_to_path(own)
    files: dict[str, object] = {"sslrootcert": own, "sslcert": own, option: "/nowhere/it.pem"}
    if told_by == "environment":
        for name, path in files.items():
            monkeypatch.setenv(f"PG{name.upper()}", str(path))
        files = {}
    query = "".join(f"&{name}={path}" for name, path in files.items())
    url = f"postgresql://postgres@127.0.0.1:1/postgres?sslmode=verify-full{query}"
    with pytest.raises(
        BackendError, match=f"cannot be used: {option}: .*'/nowhere/it.pem'"
    ) as told:
        async with Client(url):
            pytest.fail("entered")
    assert not isinstance(told.value, BackendUnavailable)


async def test_silence_is_told() -> None:
    connections: list[asyncio.StreamWriter] = []

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.read()
        writer.close()
        connections.remove(writer)

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(BackendUnavailable, match="no answer in time"):
            async with Client(f"postgresql://postgres@127.0.0.1:{port}/postgres"):
                pytest.fail("entered")
        await until(lambda: not connections, "an end of all connections")


@pytest.mark.parametrize("pooled", [False, True])
async def test_silence_in_a_call_is_told(empty: PostgresServer, pooled: bool) -> None:
    install(empty)
    keeper = await asyncpg.connect(empty.url)
    options = {"listen_source": empty.url} if pooled else {}
    try:
        async with keeper.transaction():
            await keeper.execute("lock table aiodlock.meta")
            with pytest.raises(BackendUnavailable, match="no answer for 2 s"):
                async with Client(empty.url, **options):  # type: ignore[arg-type]
                    pytest.fail("entered")
    finally:
        await keeper.close()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"min_replicas": 1}, Unsupported),
        ({"restart_delay": 1.0}, ValueError),
        ({"configure_notifications": True}, ValueError),
        ({"listen_source": "redis://localhost"}, ValueError),
        ({"listen_source": 1}, TypeError),
        ({"create": 1}, TypeError),
    ],
)
def test_options_that_mean_nothing_here_are_refused(
    options: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        Client("postgresql://localhost/db", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"listen_source": "postgresql://h/d"}, {"create": True}])
def test_options_of_postgresql_are_refused_elsewhere(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="for PostgreSQL"):
        Client("redis://localhost", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "url",
    [
        "postgresql:",
        "postgresql://h:x/db",
        "postgres://h:99999/d",
        "postgresql://u:p#w@h/d",
        "postgresql://h,a..b/d",
    ],
)
def test_url_that_cannot_be_read_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        Client(url)


def test_client_shows_no_password() -> None:
    client = Client("postgresql://user:secret@one:1,two:2/db?password=secret")
    assert "secret" not in repr(client)
    assert "postgresql://one:1,two:2/db" in repr(client)


@pytest.mark.stores(*POSTGRES)
async def test_prefixes_keep_locks_apart(store: Store) -> None:
    async with Client(store.url, prefix="one") as one, Client(store.url, prefix="two") as two:
        async with one.lock(NAME), two.lock(NAME):
            assert [info.name async for info in one.locks()] == [NAME]


@pytest.mark.stores(*POSTGRES)
async def test_holder_and_waiter_that_died_are_swept_though_nobody_asks_for_the_name(
    store: Store,
) -> None:
    assert store.postgres is not None
    for request in ("1", "2"):
        store.postgres.execute(f"select {_acquire(request)}")
    assert len(await store.left()) == 1
    # Their time is over, and that of the name's last token, too.
    store.postgres.execute(
        "update aiodlock.waiter set deadline = 1; update aiodlock.name set keep_until = 1;"
    )
    store.postgres.execute("select aiodlock.sweep(1000, 100, 'n0')")
    assert await store.left() == []
    assert store.postgres.execute("select count(*) from aiodlock.waiter")[0][0] == 0
    assert store.postgres.execute("select count(*) from aiodlock.name")[0][0] == 0


@pytest.mark.stores(*POSTGRES)
async def test_name_that_is_taken_while_others_are_swept_is_not_swept(store: Store) -> None:
    """The sweep had read that nobody needs it, and deleted what was the holder's record by then."""
    assert store.postgres is not None
    keeper, sweeper = await asyncpg.connect(store.url), await asyncpg.connect(store.url)
    async with Client(store.url) as client, Client(store.url) as other:
        for name in ("a", "b", "c"):
            async with client.lock(name):
                pass
        store.postgres.execute("update aiodlock.name set keep_until = 1")
        # Whichever order it takes them in, it waits before it comes to the second one.
        async with keeper.transaction():
            await keeper.execute("select from aiodlock.name where right(key, 1) <> 'b' for update")
            sweeping = asyncio.create_task(
                sweeper.fetchval("select aiodlock.sweep(1000, 100, 'n0')")
            )
            blocked = "select cardinality(pg_blocking_pids($1)) > 0"
            while not await keeper.fetchval(blocked, sweeper.get_server_pid()):
                await asyncio.sleep(0.005)
            lease = await client.lock("b").acquire()
        await sweeping
        with pytest.raises(WouldBlock):
            await other.lock("b").acquire_nowait()
        await lease.release()
    await keeper.close()
    await sweeper.close()


@pytest.mark.stores(*POSTGRES)
async def test_names_that_end_together_are_swept_together(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many: else the table would grow for ever where more end in a minute than one call takes."""
    assert store.postgres is not None
    monkeypatch.setattr("aiodlock.backends.postgres.sweeping._SWEEP_MOST", 3)
    async with Client(store.url) as client:
        for number in range(10):
            async with client.lock(f"job:{number}"):
                pass
        store.postgres.execute("update aiodlock.name set keep_until = 1")
        assert client._core.session is not None
        backend: Any = client._core.session.backend
        await Sweeping(backend.store._calls).sweep()
        assert store.postgres.execute("select count(*) from aiodlock.name")[0][0] == 0


@pytest.mark.stores(*POSTGRES)
async def test_longest_name_owner_and_prefix_fit(store: Store) -> None:
    long = "\N{LOCK}" * 128
    async with (
        Client(store.url, prefix="p" * 128) as one,
        Client(store.url, prefix="p" * 128) as two,
    ):
        async with one.lock(long, owner=long):
            assert await two.lock(long, owner="other").locked()


@pytest.mark.stores(*POSTGRES)
async def test_nothing_is_logged_when_all_is_well(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiodlock")
    async with Client(store.url) as client, client.lock(NAME):
        pass
    assert not caplog.records


_ACQUIRE = r"E'acquire\taiodlock:l:name\tr\tx\ttr\t30000\t10000\t0\twait'"
_LEAVE = r"E'leave\taiodlock:l:name\tr\t0\tended'"
_EXTEND = r"E'extend\taiodlock:l:name\tr\t30000'"
_ACQUIRING = f"aiodlock.turn('me', 1000, {_ACQUIRE})"
_LEAVING = f"aiodlock.turn('me', 1000, {_LEAVE})"
#: Each way for each message, such that all of them do something: one of two goes the general way.
_CALLS = [
    _ACQUIRING,
    f"aiodlock.turn('me', 1000, {_EXTEND})",
    rf"aiodlock.turn('me', 1000, {_EXTEND} || E'\n' || {_EXTEND})",
    _LEAVING,
    rf"aiodlock.turn('me', 1000, {_ACQUIRE} || E'\n' || {_EXTEND})",
    "aiodlock.inspect('aiodlock:l:name')",
    rf"aiodlock.turn('me', 1000, {_LEAVE} || E'\n' || {_EXTEND})",
]


async def test_calls_about_one_name_wait_for_each_other(empty: PostgresServer) -> None:
    """Also if the one that came first writes nothing."""
    install(empty)
    one, other = await asyncpg.connect(empty.url), await asyncpg.connect(empty.url)
    try:
        await other.fetchval(f"select {_ACQUIRING}")
        await other.fetchval(f"select {_LEAVING}")
        nobody = _EXTEND.replace(r"\tr", r"\tnobody")
        for call in _CALLS:
            if "inspect" in call:
                continue
            async with one.transaction():
                gone = await one.fetchval(f"select aiodlock.turn('me', 1000, {nobody})")
                assert gone.startswith("gone")
                calling = asyncio.create_task(other.fetchval(f"select {call}"))
                await until_blocked(one, other, calling)
            await calling
    finally:
        await one.close()
        await other.close()


async def until_blocked(one: Any, other: Any, calling: asyncio.Task[Any]) -> None:
    """Wait until the call on the other connection waits for this one."""
    blocked = "select $1::integer = any (pg_blocking_pids($2))"
    while not await one.fetchval(blocked, one.get_server_pid(), other.get_server_pid()):
        assert not calling.done()
        await asyncio.sleep(0.005)


async def test_one_client_sweeps_at_a_time(empty: PostgresServer) -> None:
    install(empty)
    one, other = await asyncpg.connect(empty.url), await asyncpg.connect(empty.url)
    try:
        async with one.transaction():
            assert await one.fetchval("select swept from aiodlock.sweep(1000, 100, 'n0')") == 0
            await other.fetchval(f"select {_ACQUIRING}")
            await other.execute("update aiodlock.name set keep_until = 1")
            assert await other.fetchval("select swept from aiodlock.sweep(1000, 100, 'n0')") == 0
        assert await other.fetchval("select swept from aiodlock.sweep(1000, 100, 'n0')") == 1
    finally:
        await one.close()
        await other.close()


async def test_sweep_that_was_given_up_goes_on(empty: PostgresServer) -> None:
    """It may have to read a large table from the disk, and each attempt would end before it has."""
    install(empty)
    one, keeper = await asyncpg.connect(empty.url), await asyncpg.connect(empty.url)
    try:
        await one.execute("set client_connection_check_interval = '1s'")
        await one.fetchval(f"select {_ACQUIRING}")
        await one.execute("update aiodlock.name set keep_until = 1")
        async with keeper.transaction():
            await keeper.execute("lock table aiodlock.waiter")
            sweeping = asyncio.create_task(one.fetchval("select aiodlock.sweep(1000, 100, 'n0')"))
            await until_blocked(keeper, one, sweeping)
            one.terminate()
            await asyncio.wait({sweeping})
            assert sweeping.exception() is not None
            await asyncio.sleep(1.5)  # the server looks once a second whether the client is there
        gone = "select count(*) = 0 from aiodlock.name"
        await until(lambda: keeper.fetchval(gone), "the name is swept")
    finally:
        await keeper.close()


@pytest.mark.parametrize("durability", ["logged", "unlogged"])
async def test_calls_read_few_pages_beside_a_transaction_that_stays_open(
    empty: PostgresServer, durability: str
) -> None:
    """Also when the server has looked at the table, whose rows are dead for all but that transaction."""
    install(empty, durability)
    reader, caller = await asyncpg.connect(empty.url), await asyncpg.connect(empty.url)
    try:
        await caller.fetchval(f"select {_ACQUIRING}")
        await caller.fetchval(f"select {_LEAVING}")
        # With one row only, the index looks cheaper to the server than it does with two.
        await caller.fetchval(f"select {_ACQUIRING.replace('name', 'other')}")
        await reader.execute("begin isolation level repeatable read; select 1 from aiodlock.meta")
        await caller.execute(
            "do $$ begin for pair in 1 .. 2000 loop "
            f"perform {_ACQUIRING}; perform {_LEAVING}; end loop; end $$"
        )
        await caller.execute("analyze aiodlock.name")
        for _ in range(2):  # in the first round the session reads the catalogs
            read = {call: await pages_read(caller, call) for call in _CALLS}
        assert max(read.values()) < 60, read
    finally:
        await reader.close()
        await caller.close()


async def test_many_who_waited_are_not_walked_through_beside_a_transaction_that_stays_open(
    empty: PostgresServer,
) -> None:
    install(empty)
    reader, caller = await asyncpg.connect(empty.url), await asyncpg.connect(empty.url)
    try:
        await caller.fetchval(f"select {_ACQUIRING}")
        await reader.execute("begin isolation level repeatable read; select 1 from aiodlock.meta")
        await caller.execute(
            f"do $$ begin perform {_LEAVING}; for turn in 1 .. 1000 loop perform {_ACQUIRING}; "
            f"perform {_acquire('turn')}; perform {_LEAVING}; perform {_leave('turn')}; end loop; end $$"
        )
        await caller.execute("analyze aiodlock.name, aiodlock.waiter")
        inspect = "aiodlock.inspect('aiodlock:l:name')"
        calls = [_ACQUIRING, _acquire("0"), inspect, _LEAVING, _leave("0")]
        for _ in range(2):  # in the first round the session reads the catalogs
            read = {call: await pages_read(caller, call) for call in calls}
        assert max(read.values()) < 60, read
    finally:
        await reader.close()
        await caller.close()


async def test_sweep_reads_each_page_of_many_names_once(empty: PostgresServer) -> None:
    """In the order of the keys it would read a page for each name, and messages wait for that."""
    install(empty)
    caller = await asyncpg.connect(empty.url)
    try:
        await _make_names(caller, 3000, keep_until="10 ^ 15", key="md5(number::text)")
        sweep = "aiodlock.sweep(1000, 1000, 'n0')"
        for _ in range(2):  # before and after the server has looked at the table
            await pages_read(caller, sweep)  # the session reads the catalogs
            assert await pages_read(caller, sweep) < 1000
            await caller.execute("analyze aiodlock.name")
    finally:
        await caller.close()


async def test_sweep_goes_on_where_the_last_call_has_ended(empty: PostgresServer) -> None:
    """Or each call would read again what is in front: more and more, the more names there are."""
    install(empty)
    caller = await asyncpg.connect(empty.url)
    try:
        kept = "case when number < 8000 then 10 ^ 15 else 1 end"
        await _make_names(caller, 9000, keep_until=kept, key="number")
        first, calls = "aiodlock.sweep(10, 100, 'n0')", 0
        await pages_read(caller, first)  # the session reads the catalogs
        assert await pages_read(caller, first) < 60
        place: str | None = "n0"
        swept = 0
        while place is not None:
            assert calls < 1000
            calls += 1
            place, now_swept = await caller.fetchrow(
                "select * from aiodlock.sweep(10, 100, $1)", place
            )
            swept += now_swept
        assert swept == 1001
    finally:
        await caller.close()


async def test_names_are_listed_in_pages(empty: PostgresServer) -> None:
    """Of a million names one call took seconds, and extensions wait behind it on the same connection."""
    install(empty)
    caller = await asyncpg.connect(empty.url)
    try:
        await _make_names(caller, 3000, keep_until="10 ^ 15", key="number")
        async with Client(empty.url) as client:
            names = core_of(client).use().backend.names("*")
            listed = [await anext(names)]
            async with client.lock("z comes after the first page was read"):
                listed += [name async for name in names]
        assert len(listed) == len(set(listed)) == 3002
        page = "aiodlock.names('aiodlock:l:', 'aiodlock:l;', 100)"
        for _ in range(2):  # before and after the server has looked at the table
            await pages_read(caller, page)  # the session reads the catalogs
            assert await pages_read(caller, page) < 1000
            await caller.execute("analyze aiodlock.name")
    finally:
        await caller.close()


async def _make_names(
    caller: asyncpg.Connection, number: int, *, keep_until: str, key: str
) -> None:
    """Make that many names, each with what these expressions say of its number."""
    await caller.fetchval(f"select {_ACQUIRING}")
    await caller.execute("create temp table one as select * from aiodlock.name")
    await caller.execute(
        f"do $$ begin for number in 1 .. {number} loop "
        f"update one set keep_until = {keep_until}, key = 'aiodlock:l:' || {key}; "
        "insert into aiodlock.name table one; end loop; end $$"
    )


def _acquire(number: str) -> str:
    """Return the call by which the request of that number acquires."""
    words = rf"{number} || E'\tx\tt' || {number} || E'\t9000\t9000\t0\twait'"
    message = rf"E'acquire\taiodlock:l:name\tq' || {words}"
    return f"aiodlock.turn('me', 1000, {message})"


def _leave(number: str) -> str:
    message = rf"E'leave\taiodlock:l:name\tq' || {number} || E'\t0\tended'"
    return f"aiodlock.turn('me', 1000, {message})"


async def test_functions_that_clients_call_have_the_settings_they_need(
    empty: PostgresServer,
) -> None:
    """A function that is added has these settings too, or reads what no transaction makes longer."""
    install(empty)
    rows = empty.execute(
        "select p.proname, p.proconfig from pg_proc p "
        "where p.pronamespace = 'aiodlock'::regnamespace and p.prosecdef"
    )
    settings = {row["proname"]: set(row["proconfig"] or ()) for row in rows}
    assert {"turn", "inspect"} <= set(settings)
    for name, found in settings.items():
        assert "search_path=pg_catalog, pg_temp" in found, name
        assert "enable_sort=off" in found or name in _READ_ALL_NAMES, name
        # Before 18, a plan that does what is off counts as very expensive, and is compiled: 0.1 s.
        assert "jit=off" in found or not any(one.startswith("enable_") for one in found), name


#: They seek no name's newest row.
_READ_ALL_NAMES = {"recorded", "versions"}


async def pages_read(connection: Any, call: str) -> int:
    plan = await connection.fetchval(
        f"explain (analyze, buffers, format json) select * from {call}"
    )
    return int(json.loads(plan)[0]["Plan"]["Shared Hit Blocks"])
