"""Eight processes take turns on one name in PostgreSQL, and some of them are killed at random moments.

``AIODLOCK_ACQUISITIONS`` sets how many acquisitions there are (default 600; 4,000 before a release).
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from aiodlock._clock import now
from aiodlock.backends.postgres.schema import create_statements

from .. import forked
from ..postgres import PostgresServer
from ..scenes import STARTING
from ..servers import installed, postgres_server
from .postgres_worker import SCHEMA, TTL

ACQUISITIONS = int(os.environ.get("AIODLOCK_ACQUISITIONS", "600"))
PROCESSES = 8
#: Notes each request when it arrives, behind the name's lock.
_NOTE_ARRIVALS = """
create table aiodlock.arrival (number bigserial, id text unique);
create function aiodlock.note_arrivals(messages text) returns void language plpgsql as $$
declare
  op text;
begin
  perform pg_advisory_xact_lock(1095323471, hashtext(split_part(messages, E'\\t', 2)));
  foreach op in array string_to_array(messages, E'\\n') loop
    if starts_with(op, E'acquire\\t') then
      insert into aiodlock.arrival (id) values (split_part(op, E'\\t', 3)) on conflict do nothing;
    end if;
  end loop;
end $$;
alter function aiodlock.turn(text, bigint, text) rename to carry_out;
create function aiodlock.turn(caller text, retention bigint, messages text) returns text
language plpgsql as $$
begin
  perform aiodlock.note_arrivals(messages);
  return aiodlock.carry_out(caller, retention, messages);
end $$;
"""
_LEFT = """
select 1 from aiodlock.waiter union all
select 1 from aiodlock.name n where cardinality(aiodlock.holders_of(n)) > 0
"""

pytestmark = pytest.mark.skipif(not installed("postgres"), reason="postgres is not installed")


@asynccontextmanager
async def worker(url: str, database: Path, seed: int) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await forked.start(
        "tests.fault.postgres_worker",
        url,
        str(database),
        str(seed),
        cwd=Path(__file__).parents[2],
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), STARTING) == b"ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def one_after_the_other(url: str, database: Path, seed: int) -> None:
    """Keep one process running. It is killed now and then, and another one takes its place."""
    chance = random.Random(seed)
    while True:
        async with worker(url, database, chance.randrange(10**6)):
            await asyncio.sleep(chance.uniform(3, 12))


async def until_granted(database: Path, count: int) -> None:
    granted = 0
    while granted < count:
        await asyncio.sleep(0.1)
        with closing(sqlite3.connect(database)) as db:  # not open while another process is forked
            (granted,) = db.execute("SELECT count(*) FROM grants").fetchone()


async def until_nothing_is_left(server: PostgresServer) -> None:
    """A dead process costs its ttl at the most. Dead records go when somebody asks for the name."""
    from aiodlock import Client

    give_up = now() + 3 * TTL + 10
    async with Client(server.url) as client:
        async with client.lock("turn", timeout=3 * TTL + 5):
            pass
    while await asyncio.to_thread(server.execute, _LEFT):
        assert now() < give_up, "something is left"
        await asyncio.sleep(0.1)


# Every second or so a process dies, and its waiters delay the others: an acquisition may take a second.
@pytest.mark.timeout(600 + ACQUISITIONS)
async def test_killed_processes_break_no_order_let_nobody_in_twice_and_leave_nothing(
    tmp_path: Path,
) -> None:
    database = tmp_path / "witness.db"
    with closing(sqlite3.connect(database)) as db:
        db.executescript(SCHEMA)
    with postgres_server("postgres") as server:
        server.execute(create_statements("logged"))
        server.execute(_NOTE_ARRIVALS)
        async with asyncio.TaskGroup() as tasks:
            calls = (one_after_the_other(server.url, database, seed) for seed in range(PROCESSES))
            running = [tasks.create_task(call) for call in calls]
            await until_granted(database, ACQUISITIONS)
            for task in running:
                task.cancel()
        await until_nothing_is_left(server)
        arrived = server.execute("select id from aiodlock.arrival order by number")
    with closing(sqlite3.connect(database)) as db:
        assert [row[0] for row in db.execute("SELECT what FROM violations")] == []
        grants = [row[0] for row in db.execute("SELECT request FROM grants ORDER BY token")]
    position = {row["id"]: number for number, row in enumerate(arrived)}
    order = [position[request] for request in grants]
    assert order == sorted(order), "a grant out of the order of arrival"
    assert len(grants) >= ACQUISITIONS
