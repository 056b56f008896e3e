"""The command on PostgreSQL: init, run, ls, show, break, doctor."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import asyncpg
import pytest

from aiodlock import BackendError, BackendUnavailable, Client, WouldBlock
from aiodlock.backends.postgres.dialing import Host
from aiodlock.backends.postgres.history import History
from aiodlock.backends.postgres.schema import VERSION, create_statements
from aiodlock.cli import _doctor_postgres, _init

from .. import forked
from ..pooler import Pooler
from ..postgres import PostgresServer
from ..servers import PGBOUNCER, Servers, installed, postgres_server

#: What `aiodlock init` made before holders could linger.
_SCHEMA_2 = Path(__file__).parents[1] / "compat" / "postgres_schema_2.sql"


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return forked.run("aiodlock", *words, capture_output=True, timeout=60)


@pytest.fixture
def empty(postgres: PostgresServer) -> PostgresServer:
    postgres.execute("drop schema if exists aiodlock cascade;")
    return postgres


def test_init_creates_the_schema_once(empty: PostgresServer) -> None:
    first = command("init", "--url", empty.url)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.rstrip().endswith(
        f"created the schema aiodlock (version {VERSION}, logged)"
    )
    again = command("init", "--url", empty.url)
    assert again.returncode == 0
    assert "nothing to do" in again.stdout
    other = command("init", "--url", empty.url, "--durability", "unlogged")
    assert other.returncode == 69
    assert "is logged: to change that" in other.stderr


async def test_init_fills_a_schema_that_another_role_has_made(empty: PostgresServer) -> None:
    """One that may create schemas, for one that may not."""
    empty.execute(
        "drop role if exists installer; create role installer login;"
        "create schema aiodlock authorization installer;"
    )
    try:
        assert "created the schema" in await _init.create(empty.url_of("installer"), None)
        async with Client(empty.url_of("installer")) as client, client.lock("one"):
            pass
    finally:
        empty.execute("drop owned by installer cascade; drop role installer;")


async def test_init_that_asks_for_another_durability_of_an_older_schema_is_told_so(
    empty: PostgresServer,
) -> None:
    """To run init, as an older schema asks for, was what it did."""
    empty.execute(create_statements())
    empty.execute(f"update aiodlock.meta set version = {VERSION - 1};")
    with pytest.raises(BackendError, match="is logged: to change that"):
        await _init.create(empty.url, "unlogged")


@pytest.mark.skipif(not installed(PGBOUNCER), reason="no pgbouncer, or no postgres")
def test_init_through_a_pooler_can_be_repeated(servers: Servers) -> None:
    """The sessions that the pooler keeps have no statements of an earlier run."""
    server = servers.postgres("postgres")
    server.execute("drop schema if exists aiodlock cascade;")
    with Pooler(server) as pooler:
        for _ in range(2):
            done = command("init", "--url", pooler.url)
            assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("durability", ["logged", "unlogged"])
async def test_init_upgrades_what_version_2_has_stored(
    empty: PostgresServer, durability: str
) -> None:
    unlogged = durability == "unlogged"
    empty.execute(
        _SCHEMA_2.read_text()
        .replace("@unlogged@ table", "unlogged table" if unlogged else "table")
        .replace("@is_unlogged@", str(unlogged))
        .replace("@version@", "2")
    )
    empty.execute(
        "drop role if exists reader; create role reader login;"
        "grant usage on schema aiodlock to reader;"
        "grant execute on all functions in schema aiodlock to reader;"
    )

    def turn(*words: object) -> str:
        text = "\\t".join(map(str, words))
        rows = empty.execute(f"select aiodlock.turn_one('old', 3600000, E'{text}')")
        return str(rows[0][0])

    for request, mode in (("r1", "s"), ("r2", "s"), ("r3", "x")):
        wishes = (request, mode, f"t{request}", 600_000, 600_000, 0, "wait")
        assert turn("acquire", "aiodlock:l:two", *wishes).startswith(("granted", "waiting"))
    assert turn("acquire", "aiodlock:l:one", "r4", "x", "tr4", 600_000, 600_000, 0, "wait")
    assert turn("acquire", "aiodlock:o:done", "r5", "x", "tr5", 600_000, 600_000, 0, "wait")
    assert turn("leave", "aiodlock:o:done", "r5", 0, "recorded", 600_000, "sfine") == "recorded"

    done = command("init", "--url", empty.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"upgraded the schema aiodlock (version {VERSION}, {durability})" in done.stdout
    async with Client(empty.url_of("reader")) as client:
        two, one = await client.inspect("two"), await client.inspect("one")
        assert (len(two.holders), len(two.waiters), len(one.holders)) == (2, 1, 1)
        async with client.once("done", keep=60) as once:
            assert (once.first, once.result) == (False, "fine")
        for name, holders in (("one", 1), ("two", 2)):
            with pytest.raises(WouldBlock):
                await client.lock(name).acquire_nowait()
            assert await client.break_lock(name) == holders
        async with client.lock("one", linger=1, timeout=10) as lease:
            assert lease.token > one.token
    assert "nothing to do" in command("init", "--url", empty.url).stdout


@pytest.mark.parametrize("version", range(3, VERSION))
async def test_init_upgrades_the_functions_of_older_versions(
    empty: PostgresServer, version: int
) -> None:
    """Their tables are those of the next version."""
    await _init.create(empty.url, None)
    async with Client(empty.url) as client:
        lease = await client.lock("one", ttl=60).acquire()
        empty.execute(
            f"update aiodlock.meta set version = {version}; drop function aiodlock.inspect;"
        )
        done = await _init.create(empty.url, None)
        assert f"upgraded the schema aiodlock (version {VERSION}, logged)" in done
        assert (await client.inspect("one")).token == lease.token
        await lease.release()


@pytest.mark.parametrize("version", [11, VERSION - 1])
async def test_upgrade_by_another_role_leaves_every_role_its_rights(
    empty: PostgresServer, version: int
) -> None:
    """The owner's, too: a superuser upgrades what the role of the service has made."""
    empty.execute(
        "drop role if exists owner; create role owner login; grant create on database postgres to owner;"
        "drop role if exists reader; create role reader login;"
    )
    try:
        await _init.create(empty.url_of("owner"), None)
        empty.execute(
            "grant usage on schema aiodlock to reader;"
            "grant execute on function aiodlock.hello, aiodlock.inspect, aiodlock.names to reader;"
            f"update aiodlock.meta set version = {version};"
        )
        if version == 11:  # it had neither of these tables
            empty.execute("drop table aiodlock.history, aiodlock.wait;")
        assert "upgraded" in await _init.create(empty.url, None)
        empty.execute(f"update aiodlock.meta set version = {VERSION - 1};")
        assert "upgraded" in await _init.create(empty.url_of("owner"), None)
        async with Client(empty.url_of("owner")) as client, client.lock("one"):
            async with Client(empty.url_of("reader")) as other:
                assert [info.name async for info in other.locks()] == ["one"]
                with pytest.raises(BackendError, match="permission denied"):
                    await other.break_lock("one")
    finally:
        empty.execute("drop owned by owner cascade; drop role owner;")


async def test_upgrade_and_a_call_do_not_wait_for_each_other(empty: PostgresServer) -> None:
    """The call has used the names, and is about to note the longest lease of unlogged tables."""
    empty.execute(create_statements("unlogged"))
    empty.execute(f"update aiodlock.meta set version = {VERSION - 1};")
    calling = await asyncpg.connect(empty.url)
    try:
        async with calling.transaction():
            await calling.execute("select from aiodlock.name")
            upgrading = asyncio.create_task(asyncio.to_thread(command, "init", "--url", empty.url))
            while not await calling.fetchval(
                "select exists (select from pg_locks where not granted)"
            ):
                await asyncio.sleep(0.01)
            await calling.execute("select aiodlock.note_length(99999)")
        assert "upgraded" in (await upgrading).stdout
    finally:
        await calling.close()


@pytest.mark.parametrize("durability", ["logged", "unlogged"])
async def test_dry_run_prints_sql_that_creates_it(empty: PostgresServer, durability: str) -> None:
    dry = command("init", "--dry-run", "--durability", durability, "--url", empty.url)
    assert dry.returncode == 0
    assert empty.execute("select to_regclass('aiodlock.meta')") == [(None,)]
    empty.execute(dry.stdout)
    assert empty.execute("select durability from aiodlock.meta") == [(durability,)]
    async with Client(empty.url) as client, client.lock("a"):
        pass


def test_init_refuses_stores_that_need_nothing() -> None:
    asked = command("init")
    assert asked.returncode == 2
    assert "--url" in asked.stderr
    done = command("init", "--url", "redis://localhost")
    assert done.returncode == 2
    assert "init is for postgresql://" in done.stderr


@pytest.mark.parametrize("there", [False, True])
async def test_init_without_rights_is_a_refusal(empty: PostgresServer, there: bool) -> None:
    empty.execute("drop role if exists reader; create role reader login;")
    if there:
        empty.execute(create_statements())
        empty.execute("grant usage on schema aiodlock to reader;")
    with pytest.raises(
        BackendError, match=r"refused: permission denied .*: init needs a role"
    ) as told:
        await _init.create(empty.url_of("reader"), None)
    assert not isinstance(told.value, BackendUnavailable)


async def test_init_that_another_one_holds_up_tells_it(empty: PostgresServer) -> None:
    keeper = await asyncpg.connect(empty.url)
    try:
        async with keeper.transaction():
            await keeper.execute("select pg_advisory_xact_lock(1095323470)")
            with pytest.raises(BackendUnavailable, match="another process installs") as told:
                await _init.create(empty.url, None)
        assert "is the server running" not in str(told.value)
    finally:
        await keeper.close()


def test_init_tells_that_the_server_is_away() -> None:
    done = command("init", "--url", "postgresql://nobody@127.0.0.1:1/db")
    assert done.returncode == 69
    assert "postgresql://127.0.0.1:1/db" in done.stderr


async def test_command_runs_lists_shows_and_breaks(empty: PostgresServer) -> None:
    assert command("init", "--url", empty.url).returncode == 0
    url = ("--url", empty.url)
    done = command("run", *url, "report", "--", "sh", "-c", "echo $AIODLOCK_NAME")
    assert (done.returncode, done.stdout) == (0, "report\n")
    async with Client(empty.url) as client:
        lease = await client.lock("order:42", on_lost="flag").acquire()
        listed = await asyncio.to_thread(command, "ls", *url, "--json")
        assert [one["name"] for one in json.loads(listed.stdout)] == ["order:42"]
        shown = await asyncio.to_thread(command, "show", *url, "order:42")
        assert str(lease.token) in shown.stdout
        broken = await asyncio.to_thread(command, "break", *url, "--yes", "order:42")
        assert broken.returncode == 0
        assert (await lease.wait_lost()).reason == "broken"


def test_doctor_looks_at_everything(empty: PostgresServer) -> None:
    assert command("init", "--url", empty.url, "--durability", "unlogged").returncode == 0
    done = command("doctor", "--url", empty.url, "--json")
    found = {one["subject"]: one for one in json.loads(done.stdout)}
    assert set(found) == {"lock", "server", "schema", "commits", "notifications", "transactions"}
    assert found["lock"]["level"] == found["server"]["level"] == "ok"
    assert "unlogged" in found["schema"]["found"]
    assert found["notifications"]["found"] == "arrive; their queue is 0% full"
    assert found["commits"]["level"] == "warning", "fsync is off on this server"


async def test_doctor_tells_what_a_role_cannot_see(empty: PostgresServer) -> None:
    empty.execute(create_statements())
    empty.execute(
        "drop role if exists reader; create role reader login;"
        "grant usage on schema aiodlock to reader;"
        "grant execute on all functions in schema aiodlock to reader;"
    )
    for role, sees in (("reader", False), ("postgres", True)):
        found = {one.subject: one for one in await _doctor_postgres.examine(empty.url_of(role))}
        assert ("hidden" in found["transactions"].found) != sees
        assert ("pg_read_all_stats" in found["transactions"].fix) != sees


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
async def test_doctor_tells_of_an_old_transaction(
    empty: PostgresServer, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one that has written and does nothing now: it has no snapshot, and dead rows stay."""
    empty.execute(create_statements())
    monkeypatch.setattr(_doctor_postgres, "_LONG", 0.1)
    old = await asyncpg.connect(empty.url)
    try:
        await old.execute(f"begin isolation level {level}; select pg_current_xact_id()")
        await asyncio.sleep(0.1)
        found = {one.subject: one for one in await _doctor_postgres.examine(empty.url)}
        assert found["transactions"].level == "warning", found["transactions"]
    finally:
        await old.close()


@pytest.mark.skipif(not installed("postgres"), reason="postgres is not installed")
async def test_doctor_tells_of_a_prepared_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """No session has it any more."""
    monkeypatch.setattr(_doctor_postgres, "_LONG", 0.0)
    with postgres_server("postgres", max_prepared_transactions=1) as server:
        server.execute(create_statements())
        server.execute("begin; create table t (); prepare transaction 'forgotten';")
        found = {one.subject: one for one in await _doctor_postgres.examine(server.url)}
        assert found["transactions"].level == "warning", found["transactions"]
        assert "ROLLBACK PREPARED 'forgotten'" in found["transactions"].fix


@pytest.mark.skipif(not installed("postgres"), reason="postgres is not installed")
async def test_doctor_tells_that_no_standby_is_waited_for() -> None:
    """A role whose commits are local waits for none, whichever are named."""
    with postgres_server("postgres", synchronous_standby_names="*") as server:
        server.execute(
            "set synchronous_commit = local; alter role postgres set synchronous_commit = local;"
        )
        server.execute(create_statements())
        found = {one.subject: one for one in await _doctor_postgres.examine(server.url)}
        assert "no standby is waited for" in found["commits"].found


async def test_doctor_takes_no_standby_for_diverged_when_the_primary_stops_answering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the primary had before is less than what the standby has got since."""
    history = History("system", 1, "id", 0, 100)

    async def look(host: Host) -> _doctor_postgres._Look:
        if "standby" in host.where:
            return _doctor_postgres._Look(host, has=200)
        asked.append(host)
        if len(asked) > 1:
            return _doctor_postgres._Look(host, failed="connection refused")
        return _doctor_postgres._Look(host, history)

    asked: list[Host] = []
    monkeypatch.setattr(_doctor_postgres, "_look", look)
    _, findings = await _doctor_postgres._hosts("postgresql://primary,standby/db")
    assert [(one.subject, one.level) for one in findings] == [
        ("hosts", "ok"),
        ("host primary", "warning"),
    ]


def test_doctor_tells_that_sessions_are_read_only(empty: PostgresServer) -> None:
    assert command("init", "--url", empty.url).returncode == 0
    empty.execute(
        "drop role if exists reader; create role reader login;"
        "grant usage on schema aiodlock to reader;"
        "grant execute on all functions in schema aiodlock to reader;"
        "alter role reader set default_transaction_read_only = on;"
    )
    done = command("doctor", "--url", empty.url_of("reader"), "--json")
    found = {one["subject"]: one for one in json.loads(done.stdout)}
    assert found["server"]["level"] == "error"
    assert "default_transaction_read_only" in found["server"]["fix"]


def test_doctor_tells_that_the_schema_is_missing(empty: PostgresServer) -> None:
    done = command("doctor", "--url", empty.url)
    assert done.returncode != 0
    assert "aiodlock init" in done.stderr + done.stdout
