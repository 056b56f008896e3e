"""The command on PostgreSQL: init, run, ls, show, break, doctor."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from aiodlock import Client
from aiodlock.backends.postgres.schema import VERSION

from ..postgres import PostgresServer


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aiodlock", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


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
    assert found["notifications"]["found"] == "arrive"
    assert found["commits"]["level"] == "warning", "fsync is off on this server"


def test_doctor_tells_that_the_schema_is_missing(empty: PostgresServer) -> None:
    done = command("doctor", "--url", empty.url)
    assert done.returncode != 0
    assert "aiodlock init" in done.stderr + done.stdout
