"""The fake sessions do as real ones do: locks, cancelling and ending in each step, and who is told when."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol

import asyncpg
import pytest

import aiodlock._clock
from aiodlock.backends.postgres import calls, meeting
from aiodlock.backends.postgres.inspection import _INSPECT
from aiodlock.backends.postgres.notifications import channel
from aiodlock.backends.postgres.schema import VERSION, create_statements

from ...postgres import PostgresServer
from ...servers import POSTGRES, installed, postgres_server
from ..world import Process, World
from .postgres_connection import connect
from .postgres_servers import Cluster
from .wire import Wire

_KEY = "aiodlock:l:order"
_BEGIN = "begin; set local idle_in_transaction_session_timeout = {}"


class _Place(Protocol):
    """A server, and what an operator does with it. ``what``: "lock", "standby" or "idle"."""

    async def connect(self) -> Any: ...
    async def until_waits(self, pid: int, what: str) -> None: ...
    async def cancel(self, pid: int) -> None: ...
    async def terminate(self, pid: int) -> None: ...
    async def wait_for_standby(self, wait: bool) -> None: ...


class _Real:
    def __init__(self, server: PostgresServer) -> None:
        self._server = server

    async def connect(self) -> Any:
        return await asyncpg.connect(self._server.url)

    async def _execute(self, sql: str) -> list[Any]:
        return await asyncio.to_thread(self._server.execute, sql)

    async def until_waits(self, pid: int, what: str) -> None:
        condition = {
            "lock": "wait_event = 'advisory'",
            "standby": "wait_event = 'SyncRep'",
            "idle": "state = 'idle in transaction'",
        }[what]
        sql = f"select from pg_stat_activity where pid = {pid} and {condition}"
        while not await self._execute(sql):
            await asyncio.sleep(0.01)

    async def cancel(self, pid: int) -> None:
        await self._execute(f"select pg_cancel_backend({pid})")

    async def terminate(self, pid: int) -> None:
        await self._execute(f"select pg_terminate_backend({pid})")

    async def wait_for_standby(self, wait: bool) -> None:
        names = "*" if wait else ""
        await asyncio.to_thread(self._server.configure, "synchronous_standby_names", names)


class _Fake:
    def __init__(self, cluster: Cluster) -> None:
        self._server = cluster.primary

    async def connect(self) -> Any:
        return await connect("postgresql://10.0.0.1:5432/db", 10.0)

    async def until_waits(self, pid: int, what: str) -> None:
        while True:
            session = self._server.sessions[pid]
            if session.waits == what or (what == "idle" and session.transaction is not None):
                return
            await asyncio.sleep(0.01)

    async def cancel(self, pid: int) -> None:
        self._server.sessions[pid].cancel()

    async def terminate(self, pid: int) -> None:
        self._server.sessions[pid].terminate()

    async def wait_for_standby(self, wait: bool) -> None:
        self._server.set_standby(wait)


class _Play:
    """What is done on both, and what comes of it."""

    def __init__(self, place: _Place) -> None:
        self._place = place
        self.heard: list[Any] = []
        self._history = ""
        self._made: list[Any] = []

    async def connect(self) -> Any:
        connection = await self._place.connect()
        self._made.append(connection)
        connection.add_log_listener(
            lambda _, message: self.heard.append(("log", message.server_source_function))
        )
        return connection

    async def turn(self, connection: Any, line: str, client: str = "one") -> Any:
        """Send one message; return its answer without numbers, or what was refused."""
        line = line.replace("KEY", _KEY).replace(" ", "\t")
        who = (VERSION, self._history)
        calling = connection.fetchval(calls.TURN, client, 3_600_000, line, *who)
        return await self.outcome(connection, calling)

    async def _look(self, connection: Any) -> list[Any]:
        sql, who = calls.rows_of(_INSPECT, 2), (VERSION, self._history)
        rows: list[Any] = json.loads(await connection.fetchval(sql, [_KEY], True, *who))
        return rows

    async def outcome(self, connection: Any, calling: Awaitable[Any]) -> Any:
        try:
            answer = await calling
        except asyncpg.PostgresError as refused:
            await asyncio.sleep(0.1)
            return refused.sqlstate, connection.is_closed()
        except asyncpg.InterfaceError:
            return "not sent", connection.is_closed()
        return re.sub(r"-?\d+", "N", answer)

    async def run(self) -> list[Any]:
        one, two = await self.connect(), await self.connect()
        told: list[str] = []
        hello = await one.fetchrow(meeting._HELLO)
        self._history = f"{hello['history']}/{hello['place']}"
        await two.add_listener(
            channel("two"), lambda *about: told.append(re.sub(r" \d+", " N", about[3]))
        )
        for scene in (self._locks, self._aborted, self._idle, self._standby):
            self.heard.append(scene.__name__)
            await scene(one, two)
            await asyncio.sleep(0.1)
            self.heard.append(list(told))
        for connection in self._made:
            connection.terminate()
        await asyncio.sleep(0.05)
        return self.heard

    async def _while_it_waits(
        self, what: str, line: str, then: Callable[[int], Awaitable[None]]
    ) -> None:
        """Send a message on a connection of its own; do something while it waits."""
        connection = await self.connect()
        pid = connection.get_server_pid()
        calling = asyncio.ensure_future(self.turn(connection, line, "three"))
        await self._place.until_waits(pid, what)
        await then(pid)
        self.heard.append(await calling)
        self.heard.append(await self.outcome(connection, connection.execute("select 1")))
        connection.terminate()

    async def _locks(self, one: Any, two: Any) -> None:
        """A transaction locks its names, and nobody is told before it is committed."""
        hear, place = self.heard.append, self._place
        hear(await self.turn(one, "acquire KEY a x ta 60000 60000 0 wait"))
        hear(await self.turn(two, "acquire KEY b x tb 60000 60000 0 wait", "two"))
        await one.execute(_BEGIN.format(60_000))
        hear(await self.turn(one, "leave KEY a 0 ended"))
        await self._while_it_waits("lock", "acquire KEY c x tc 60000 60000 0 wait", place.cancel)
        await self._while_it_waits("lock", "acquire KEY d x td 60000 60000 0 wait", place.terminate)
        rows = await self._look(two)
        hear(sorted((row["what"], row["owner"]) for row in rows if row["what"] != "name"))

        async def commit(_: int) -> None:
            hear(await one.execute("commit"))

        await self._while_it_waits("lock", "acquire KEY e x te 60000 60000 0 wait", commit)
        await asyncio.sleep(0.1)
        hear(await self.turn(two, "leave KEY b 0 ended", "two"))
        hear(await self.turn(one, "leave KEY e 0 ended"))

    async def _aborted(self, one: Any, two: Any) -> None:
        """An error aborts a transaction; it is of no use until it is left, and nothing of it stays."""
        hear, place = self.heard.append, self._place
        await one.execute(_BEGIN.format(60_000))
        hear(await self.turn(one, "acquire KEY f x tf 60000 60000 0 wait"))
        three = await self.connect()
        await three.execute(_BEGIN.format(200))
        calling = asyncio.ensure_future(self.turn(three, "acquire KEY g x tg 60000 60000 0 wait"))
        await place.until_waits(three.get_server_pid(), "lock")
        await place.cancel(three.get_server_pid())
        hear(await calling)
        await asyncio.sleep(0.5)  # what was set for the transaction is over with it
        hear(await self.turn(three, "acquire KEY g x tg 60000 60000 0 wait"))
        hear(await three.execute("commit"))
        three.terminate()
        hear(await one.execute("rollback"))
        hear(await self.turn(two, "acquire KEY h x th 60000 60000 0 nowait", "two"))
        hear(await self.turn(two, "leave KEY h 0 ended", "two"))

    async def _idle(self, one: Any, two: Any) -> None:
        """A transaction that is not gone on with is ended by the server."""
        hear, three = self.heard.append, await self.connect()
        ended = asyncio.Event()
        three.add_termination_listener(lambda _: ended.set())
        await three.execute(_BEGIN.format(200))
        hear(await self.turn(three, "acquire KEY i x ti 60000 60000 0 wait"))
        await ended.wait()
        hear(await self.turn(three, "acquire KEY i x ti 60000 60000 0 wait"))
        hear(await self.turn(two, "acquire KEY j x tj 60000 60000 0 nowait", "two"))

    async def _standby(self, one: Any, two: Any) -> None:
        """A commit waits for the standby; if the wait is ended, it is visible, and nobody else waits."""
        hear, place = self.heard.append, self._place
        await place.wait_for_standby(True)

        async def look_and_cancel(pid: int) -> None:
            rows = await self._look(one)
            hear([row["owner"] for row in rows if row["what"] == "waiter"])
            await place.cancel(pid)

        line = "acquire KEY k x tk 60000 60000 0 wait"
        await self._while_it_waits("standby", line, look_and_cancel)
        await self._while_it_waits("standby", line, place.terminate)  # it only reads
        line = "acquire KEY l x tl 60000 60000 0 wait"
        await self._while_it_waits("standby", line, place.terminate)
        rows = await self._look(one)
        hear([row["owner"] for row in rows if row["what"] == "waiter"])
        # To release waits for nobody; to grant what is released does.
        hear(await self.turn(one, "leave KEY l 0 ended"))
        await self._while_it_waits("standby", "leave KEY j 0 ended", place.cancel)
        await asyncio.sleep(0.1)

        async def appear(_: int) -> None:
            await place.wait_for_standby(False)

        await self._while_it_waits("standby", line, appear)


@pytest.fixture(params=POSTGRES)
def server(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    if not installed(request.param):
        pytest.skip(f"{request.param} is not installed")
    with postgres_server(request.param) as server:
        server.execute(create_statements())
        yield server


def test_fake_sessions_do_as_real_ones(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = asyncio.run(_Play(_Real(server)).run())
    with monkeypatch.context() as patched:
        fake = _on_the_fake(patched)
    for number, (one, other) in enumerate(zip(real, fake, strict=False)):
        assert one == other, f"step {number}: the server {real[: number + 1]}, the fake {fake}"
    assert len(real) == len(fake)


def _on_the_fake(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    world = World(1)
    wire = Wire(world)
    play = _Play(_Fake(Cluster(world, wire, 1, unlogged=False)))
    process = Process(world, "p")
    process.loop.wire = wire
    monkeypatch.setattr(aiodlock._clock, "_gettime", lambda _: (world.current or process).boot())
    task: asyncio.Task[Any] = process.start(play.run())  # type: ignore[arg-type]
    assert world.run_until(1e3, task.done), f"the fake did not answer after {play.heard}"
    process.bury()
    heard: list[Any] = task.result()
    return heard
