"""``aiodlock demo``: processes take turns on one ledger file, with locks on a real server.

The demo starts a private Valkey or PostgreSQL, and worker processes. Each worker reads the last line of the
ledger, adds 1 to its balance, and appends a line. They do so without a lock, then with one. Then the demo
kills holders and waiters. A terminal shows the holder and the queue meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .. import Client, LockInfo
from .._embedded import EmbeddedServer
from .._embedded_postgres import EmbeddedPostgres
from ..backends.redis.scripts import ACQUIRE
from . import _demo_worker, _show
from ._demo_worker import DEPOSITS, NAME, WAITER_TTL

WORKERS = 6
#: What the contract allows between the end of a dead holder's lease and the next holder.
HEAD_SLACK = 0.1
#: A worker has to be there by then: on a busy machine, processes take long to start.
_PATIENCE = 120.0


@dataclass
class Worker:
    """A process and what it said so far."""

    process: asyncio.subprocess.Process
    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            message = json.loads(line)
            self.said[message["event"]] = message
            self.news.set()
        self.news.set()

    async def heard(self, event: str) -> dict[str, Any]:
        async with asyncio.timeout(_PATIENCE):
            while event not in self.said:
                if self.process.returncode is not None:
                    raise RuntimeError(f"a worker ended without saying {event!r}")
                self.news.clear()
                await self.news.wait()
        return self.said[event]

    async def start(self) -> None:
        await self.heard("ready")
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        await self.process.stdin.drain()


@asynccontextmanager
async def workers(url: str, ledger: Path, *tasks: str) -> AsyncIterator[list[Worker]]:
    started: list[Worker] = []
    async with asyncio.TaskGroup() as group:
        try:
            for task in tasks:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", _demo_worker.__name__, url, str(ledger), task),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
                started.append(Worker(process))
                group.create_task(started[-1].listen())
            for worker in started:
                await worker.heard("ready")
            yield started
        finally:
            for worker in started:
                if worker.process.returncode is None:
                    worker.process.kill()
                await worker.process.wait()


Arrivals = Callable[[], Awaitable[list[str]]]


class ValkeyServer(EmbeddedServer):
    """A Valkey that tells in which order requests have reached it, through MONITOR."""

    async def prepare(self) -> None:
        async with Client(self.url) as client, client.lock("warm-up"):
            pass  # the server knows the scripts from now on

    def arrivals(self) -> AbstractAsyncContextManager[Arrivals]:
        return _monitor(self)


class PostgresServer(EmbeddedPostgres):
    """A PostgreSQL that tells in which order requests have reached it: a function notes each one."""

    async def prepare(self) -> None:
        async with Client(self.url, create=True) as client, client.lock("warm-up"):
            await self._ask(_NOTE_ARRIVALS)

    @asynccontextmanager
    async def arrivals(self) -> AsyncIterator[Arrivals]:
        await self._ask("truncate aiodlock.arrival")

        async def seen() -> list[str]:
            rows = await self._ask("select id from aiodlock.arrival order by number")
            return [row["id"] for row in rows]

        yield seen

    async def _ask(self, sql: str) -> Any:
        import asyncpg

        connection = await asyncpg.connect(self.url)
        try:
            # Several statements cannot be prepared.
            return await (connection.execute(sql) if ";" in sql else connection.fetch(sql))
        finally:
            await connection.close()


Server = ValkeyServer | PostgresServer
STORES: dict[str, type[Server]] = {"valkey": ValkeyServer, "postgres": PostgresServer}

#: Notes each request when it arrives, behind the lock of its name.
_NOTE_ARRIVALS = """
create table aiodlock.arrival (number bigserial, id text unique);
alter function aiodlock.turn(text, bigint, text) rename to noted_turn;
create function aiodlock.turn(caller text, retention bigint, messages text) returns text
language plpgsql as $$
begin
  perform pg_advisory_xact_lock(1095323471, hashtext(split_part(messages, E'\\t', 2)));
  insert into aiodlock.arrival (id)
    select split_part(op, E'\\t', 3) from unnest(string_to_array(messages, E'\\n')) op
    where starts_with(op, E'acquire\\t') on conflict do nothing;
  return aiodlock.noted_turn(caller, retention, messages);
end $$;
"""


@asynccontextmanager
async def _monitor(server: EmbeddedServer) -> AsyncIterator[Arrivals]:
    reader, writer = await asyncio.open_unix_connection(urlsplit(server.url).path)
    seen: dict[str, None] = {}

    async def listen() -> None:
        async for line in reader:
            words = line.decode().split('" "')
            if len(words) > 8 and words[1] == ACQUIRE.sha.decode():
                seen.setdefault(words[8])  # EVALSHA sha 5, five keys, then the request's id

    writer.write(b"MONITOR\r\n")
    await reader.readline()
    listening = asyncio.create_task(listen())

    async def arrived() -> list[str]:
        return list(seen)

    try:
        yield arrived
    finally:
        listening.cancel()
        await asyncio.wait({listening})
        writer.close()


class Screen:
    """Events as plain lines, or in a terminal a live view of holder, queue and the last events."""

    def __init__(self, client: Client, *, as_json: bool) -> None:
        self.client = client
        self._as_json = as_json
        self._console = Console(force_terminal=False if as_json else None)
        self._events: list[str] = []
        self._info: LockInfo | None = None
        self._checks: list[tuple[str, str, bool]] = []
        self._started = time.monotonic()

    @property
    def ok(self) -> bool:
        return bool(self._checks) and all(ok for _, _, ok in self._checks)

    def event(self, text: str) -> None:
        line = f"{time.monotonic() - self._started:5.1f} s  {text}"
        self._events.append(line)
        if not self._console.is_terminal and not self._as_json:
            print(line, flush=True)

    def check(self, what: str, shown: object, ok: bool) -> None:
        self._checks.append((what, str(shown), ok))
        self.event(f"{'ok    ' if ok else 'FAILED'}  {what}: {shown}")

    @asynccontextmanager
    async def live(self) -> AsyncIterator[None]:
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self._render, console=self._console, refresh_per_second=12):
            looking = asyncio.create_task(self._look())
            try:
                yield
            finally:
                looking.cancel()
                await asyncio.wait({looking})

    async def _look(self) -> None:
        while True:
            self._info = await self.client.inspect(NAME)
            await asyncio.sleep(0.08)

    def _render(self) -> Group:
        table = Table("place", "client", "token", "lease / waiting", title=f"lock {NAME!r}")
        info = self._info
        for holder in info.holders if info else ():
            left = f"{holder.remaining or 0.0:.1f} s left"
            place = Text("holder", style="green")
            table.add_row(place, Text(holder.client), str(holder.token), left)
        for waiter in info.waiters[:8] if info else ():
            waiting = f"{waiter.waiting or 0.0:.1f} s waiting"
            table.add_row(f"waiter {waiter.position + 1}", Text(waiter.client), "", waiting)
        if not table.row_count:
            table.add_row("free", "", "", "")
        return Group(table, Text("\n".join(self._events[-14:])))

    def close(self) -> None:
        if self._as_json:
            checks = [
                {"shown": what, "figure": shown, "true": ok} for what, shown, ok in self._checks
            ]
            _show.print_json(checks)
            return
        if not self._console.is_terminal:
            return  # told line by line
        table = Table("what was shown", "measured", "as expected", title="aiodlock demo")
        for what, shown, ok in self._checks:
            verdict = Text("yes", style="green") if ok else Text("NO", style="red")
            table.add_row(Text(what), Text(shown), verdict)
        self._console.print(table)


def entries(ledger: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ledger.read_text().splitlines()]


async def take_turns(
    screen: Screen, server: Server, folder: Path, task: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """Let all workers deposit; return the ledger and the ids in order of arrival at the server."""
    ledger = folder / task
    ledger.touch()
    async with (
        server.arrivals() as seen,
        workers(server.url, ledger, *[task] * WORKERS) as all_of_them,
    ):
        for worker in all_of_them:
            await worker.start()
        for worker in all_of_them:
            await worker.heard("done")
        return entries(ledger), await seen()


async def show_lost_updates(screen: Screen, server: Server, folder: Path) -> None:
    screen.event(
        f"{WORKERS} processes write {DEPOSITS} deposits each to one ledger, without a lock"
    )
    ledger, _ = await take_turns(screen, server, folder, "careless")
    lost = len(ledger) - ledger[-1]["balance"]
    screen.check("deposits lost without a lock", f"{lost} of {len(ledger)}", lost > 0)


async def show_turns(screen: Screen, server: Server, folder: Path) -> None:
    screen.event("the same with a lock")
    ledger, arrived = await take_turns(screen, server, folder, "careful")
    total, balances = WORKERS * DEPOSITS, [entry["balance"] for entry in ledger]
    kept = balances == list(range(1, total + 1))
    screen.check("deposits lost with a lock", total - balances[-1], kept)
    order = [entry["request"] for entry in ledger]
    swapped = sum(a != b for a, b in zip(order, arrived, strict=False)) + abs(
        len(order) - len(arrived)
    )
    screen.check("grants out of order of arrival", f"{swapped} of {total}", swapped == 0)
    tokens = [entry["token"] for entry in ledger]
    rising = all(a < b for a, b in pairwise(tokens))
    screen.check("tokens grow with every grant", f"{tokens[0]} … {tokens[-1]}", rising)


async def show_deaths(screen: Screen, server: Server, folder: Path, ghosts: int) -> None:
    dead = f"the holder and {ghosts} waiters" if ghosts else "the holder"
    screen.event(f"next, {dead} will be killed while one more process waits")
    client = screen.client
    tasks = ["hold"] * (1 + ghosts) + ["take"]
    async with workers(server.url, folder / "unused", *tasks) as started:
        for place, worker in enumerate(started):
            await worker.start()
            async with asyncio.timeout(_PATIENCE):
                while True:  # one after the other, so that everybody's place is known
                    info = await client.inspect(NAME)
                    if len(info.holders) + len(info.waiters) == place + 1:
                        break
                    await asyncio.sleep(0.005)
        survivor = started.pop()
        left = (await client.inspect(NAME)).holders[0].remaining or 0.0
        for worker in started:
            worker.process.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        screen.event(f"killed {dead}; the holder's lease had {left:.2f} s left")
        waited = (await survivor.heard("acquired"))["at"] - killed_at
        bound = left + HEAD_SLACK + (WAITER_TTL * 4 / 3 if ghosts else 0.0)
        await survivor.heard("done")
        shown = f"{waited:.2f} s (at most {bound:.2f})"
        screen.check(
            f"wait after {dead} were killed" if ghosts else f"wait after {dead} was killed",
            shown,
            waited <= bound,
        )


async def run(store: str = "valkey", *, as_json: bool = False) -> bool:
    """Return whether everything was true that was shown.

    :param store: one of STORES.
    :raises EmbeddedServerError: when there is no server to start.
    """
    with tempfile.TemporaryDirectory() as folder, STORES[store]() as server:
        await server.prepare()
        async with Client(server.url) as client:
            screen = Screen(client, as_json=as_json)
            async with screen.live():
                await show_lost_updates(screen, server, Path(folder))
                await show_turns(screen, server, Path(folder))
                await show_deaths(screen, server, Path(folder), ghosts=0)
                await show_deaths(screen, server, Path(folder), ghosts=3)
            screen.close()
    return screen.ok
