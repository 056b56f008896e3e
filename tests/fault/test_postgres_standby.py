"""A primary of PostgreSQL whose commits wait for a standby: what it has not is told to nobody."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import asyncpg
import pytest

from aiodlock import BackendError, Client
from aiodlock.backends.postgres.schema import create_statements
from aiodlock.cli import _doctor_postgres

from ..postgres import PostgresServer
from ..scenes import bounded, cancelled, until, until_waiting
from ..servers import installed, postgres_server

NAME = "order:42"
_WAITING = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'"

pytestmark = pytest.mark.skipif(not installed("postgres"), reason="postgres is not installed")


@pytest.fixture
def alone() -> Iterator[PostgresServer]:
    """Give a primary whose standby is away. ``wait_for`` makes it wait."""
    with postgres_server("postgres") as server:
        server.execute(create_statements())
        yield server


def wait_for(server: PostgresServer, standbys: str) -> None:
    server.configure("synchronous_standby_names", standbys)


async def until_waits(server: PostgresServer) -> None:
    """Wait until a commit waits for a standby."""

    async def waits() -> bool:
        return bool((await asyncio.to_thread(server.execute, _WAITING))[0][0])

    await until(waits, "a commit that waits for the standby")


def crash_restart(server: PostgresServer) -> None:
    """Have the server restart itself, as when one of its processes is killed for want of memory."""
    for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split():
        if "walwriter" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(int(pid), signal.SIGKILL)
            return


async def is_granted(task: asyncio.Task[object], within: float = 4.0) -> bool:
    await asyncio.wait({task}, timeout=within)
    return task.done()


@pytest.mark.parametrize("end", ["pg_cancel_backend", "pg_terminate_backend", "crash"])
@pytest.mark.parametrize("quiet", [False, True])
async def test_grant_whose_wait_was_ended_counts_for_nobody(
    alone: PostgresServer, end: str, quiet: bool
) -> None:
    """It is visible on the primary, and nowhere else. Neither it nor what only reads it is answered."""
    if quiet:  # and the server says nothing of it
        alone.execute("alter role postgres set client_min_messages = 'error'")
    async with Client(alone.url, ttl=60) as client:
        async with client.lock(NAME):
            pass
        wait_for(alone, "*")
        acquiring = asyncio.create_task(client.lock(NAME).acquire())
        await until_waits(alone)
        if end == "crash":
            await asyncio.to_thread(crash_restart, alone)
        else:
            await asyncio.to_thread(
                alone.execute,
                f"select {end}(pid) from pg_stat_activity where wait_event = 'SyncRep'",
            )
        assert not await is_granted(acquiring)
        await until_waits(alone)
        wait_for(alone, "")
        async with bounded(60):
            await (await acquiring).release()


async def test_grant_that_is_told_to_another_client_waits_for_the_standby(
    alone: PostgresServer,
) -> None:
    """The hand-over's commit was cancelled, and its notification goes out."""
    async with Client(alone.url, ttl=60) as one, Client(alone.url, ttl=60) as other:
        lease = await one.lock(NAME).acquire()
        acquiring = asyncio.create_task(other.lock(NAME).acquire())
        await until_waiting(one, NAME)
        wait_for(alone, "*")
        releasing = asyncio.create_task(lease.release())
        await until_waits(alone)
        await asyncio.to_thread(
            alone.execute,
            "select pg_cancel_backend(pid) from pg_stat_activity where wait_event = 'SyncRep'",
        )
        assert not await is_granted(acquiring)
        wait_for(alone, "")
        async with bounded(60):
            await asyncio.wait({releasing})
            await (await acquiring).release()


async def test_record_whose_wait_was_ended_is_told_to_nobody(alone: PostgresServer) -> None:
    async with Client(alone.url, ttl=60) as one, Client(alone.url) as other:
        async with one.once("job", keep=60):
            wait_for(alone, "*")
            recording = asyncio.current_task()
            assert recording is not None

            async def cancel_commit() -> None:
                await until_waits(alone)
                cancel = "select pg_cancel_backend(pid) from pg_stat_activity where wait_event = 'SyncRep'"
                await asyncio.to_thread(alone.execute, cancel)
                asking = asyncio.create_task(_ask_once(other))
                assert not await is_granted(asking)
                await cancelled(asking)
                wait_for(alone, "")

            cancelling = asyncio.create_task(cancel_commit())
        async with bounded(60):
            await cancelling
            assert await _ask_once(other) is False


async def _ask_once(client: Client) -> bool:
    async with client.once("job", keep=60) as once:
        return once.first


async def test_calls_that_wait_for_a_standby_keep_few_sessions(alone: PostgresServer) -> None:
    """Each repetition would leave one that waits for as long as the standby is away."""
    count = "select count(*) from pg_stat_activity where backend_type = 'client backend'"
    async with Client(alone.url, ttl=60) as client:
        wait_for(alone, "*")
        tasks = [asyncio.create_task(client.lock(f"n{number}").acquire()) for number in range(5)]
        await until_waits(alone)
        most = 0
        for _ in range(24):
            await asyncio.sleep(0.5)
            most = max(most, (await asyncio.to_thread(alone.execute, count))[0][0])
        assert most <= 6  # the two of the client, one more while they change, and ours
        found = {one.subject: one for one in await _doctor_postgres.examine(alone.url)}
        assert "no standby is connected" in found["commits"].found
        wait_for(alone, "")
        async with bounded(60):
            for lease in await asyncio.gather(*tasks):
                try:
                    await lease.release()
                except BackendError:
                    pass


@pytest.mark.parametrize("durability", ["logged", "unlogged"])
async def test_every_way_that_grants_or_extends_waits_for_the_standby(
    durability: Literal["logged", "unlogged"],
) -> None:
    """Also of unlogged tables, whose changes alone let a commit wait for nothing."""

    def ask(key: str, id: str) -> str:
        return f"acquire\taiodlock:l:{key}\t{id}\tx\tt{id}\t30000\t10000\t0\twait"

    def leave(key: str, id: str) -> str:
        return f"leave\taiodlock:l:{key}\t{id}\t0\tended"

    steps = {
        "a free name": ask("x", "r1"),
        "an extension": "extend\taiodlock:l:x\tr1\t30000",
        "a queue": ask("x", "r2"),
        "a hand-over": leave("x", "r1"),
        "many": "\n".join((ask("y", "r3"), ask("z", "r4"), "extend\taiodlock:l:x\tr2\t30000")),
    }
    with postgres_server("postgres") as server:
        server.execute(create_statements(durability))
        connection = await asyncpg.connect(server.url)

        async def turn(messages: str) -> str:
            answer: str = await connection.fetchval(
                "select aiodlock.turn('me', 60000, $1)", messages
            )
            return answer

        for key in "xyz":  # free names have rows
            await turn(ask(key, "r0"))
            await turn(leave(key, "r0"))
        for step, messages in steps.items():
            wait_for(server, "*")
            await until_standby_is_wanted(connection)
            turning = asyncio.create_task(turn(messages))
            await until_waits(server)
            assert not turning.done(), step
            wait_for(server, "")
            async with bounded(60):
                answer = await turning
            assert answer.startswith(("granted", "held", "waiting", "released")), (step, answer)
        await connection.close()


async def until_standby_is_wanted(connection: asyncpg.Connection) -> None:
    """Wait until the session has read the setting."""

    async def is_wanted() -> bool:
        return bool(await connection.fetchval("show synchronous_standby_names"))

    await until(is_wanted)


async def test_client_comes_in_while_the_standby_is_away(alone: PostgresServer) -> None:
    wait_for(alone, "*")
    async with Client(alone.url) as client:
        assert (await client.inspect(NAME)).token == 0
