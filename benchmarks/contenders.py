"""Who is measured, and how each of them locks a name.

An asyncio contender makes *holds*: ``make(name, shared)`` returns a function whose result is an async
context manager that has the lock inside. Contenders of threads do the same with plain context
managers, and one in another process is sent the whole case.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import subprocess
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import redis
import redis.asyncio

import aiodlock

from .servers import NotThere, Servers

Hold = Callable[[], AbstractAsyncContextManager[Any]]
MakeHold = Callable[[str, bool], Hold]
ThreadHold = Callable[[], AbstractContextManager[Any]]
MakeThreadHold = Callable[[str, bool], ThreadHold]

#: Of so many acquisitions of a read-mostly case one is exclusive.
WRITE_EVERY = 10


@dataclass(frozen=True, slots=True)
class Load:
    """``tasks`` tasks on ``names`` names; each locks ``count`` times, for ``body`` seconds."""

    tasks: int
    names: int
    count: int
    body: float = 0.0
    read_mostly: bool = False


#: Runs a load once and returns the seconds that it took.
Run = Callable[[Load], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class Contender:
    """One who is measured.

    :param open_holds: for contenders on asyncio.
    :param open_run: for all others; those do not care for the event loop.
    :param reshape: carries the same number of acquisitions differently.
    """

    key: str
    title: str
    open_holds: Callable[[Servers], AbstractAsyncContextManager[MakeHold]] | None = None
    open_run: Callable[[Servers], AbstractAsyncContextManager[Run]] | None = None
    reshape: Callable[[Load], Load] | None = None

    @asynccontextmanager
    async def open(self, servers: Servers) -> AsyncIterator[Run]:
        if self.open_run is not None:
            async with self.open_run(servers) as run:
                yield run
        else:
            assert self.open_holds is not None
            async with self.open_holds(servers) as make:
                run, reshape = _tasks(make), self.reshape
                yield run if reshape is None else lambda load: run(reshape(load))


def _tasks(make: MakeHold) -> Run:
    holds: dict[tuple[int, str, bool], Hold] = {}

    def hold_of(index: int, name: str, shared: bool) -> Hold:
        # One for each task: most peers' lock objects know of one holder only.
        if (index, name, shared) not in holds:
            holds[index, name, shared] = make(name, shared)
        return holds[index, name, shared]

    async def work(hold: Hold, count: int) -> None:
        for _ in range(count):
            async with hold():
                pass

    async def work_with_bodies(index: int, name: str, load: Load) -> None:
        for i in range(index, index + load.count):
            async with hold_of(index, name, load.read_mostly and i % WRITE_EVERY != 0)():
                await asyncio.sleep(load.body)

    async def run(load: Load) -> float:
        names = [f"bench{i % load.names}" for i in range(load.tasks)]
        if load.body:
            works = [work_with_bodies(i, name, load) for i, name in enumerate(names)]
        else:
            works = [work(hold_of(i, name, False), load.count) for i, name in enumerate(names)]
        started = time.perf_counter()
        if len(works) == 1:
            await works[0]
        else:
            await asyncio.gather(*works)
        return time.perf_counter() - started

    return run


@asynccontextmanager
async def _threads(make: MakeThreadHold) -> AsyncIterator[Run]:
    """A thread for each task of a load; they are kept from one repetition to the next."""
    loop = asyncio.get_running_loop()

    def work(name: str, index: int, load: Load) -> None:
        holds = [make(name, False), make(name, True)]
        for i in range(index, index + load.count):
            with holds[load.read_mostly and i % WRITE_EVERY != 0]():
                if load.body:
                    time.sleep(load.body)

    with ThreadPoolExecutor(max_workers=64) as pool:

        async def run(load: Load) -> float:
            started = time.perf_counter()
            await asyncio.gather(
                *(
                    loop.run_in_executor(pool, work, f"bench{i % load.names}", i, load)
                    for i in range(load.tasks)
                )
            )
            return time.perf_counter() - started

        yield run


class _TwoRoundTrips:
    """In place of a lock: what an acquire and a release cannot be faster than."""

    __slots__ = ("_send", "_sha")

    def __init__(self, send: Callable[..., Awaitable[Any]], sha: bytes) -> None:
        self._send, self._sha = send, sha

    async def __aenter__(self) -> None:
        await self._send("EVALSHA", self._sha, "0")

    async def __aexit__(self, *_: object) -> None:
        await self._send("EVALSHA", self._sha, "0")


@asynccontextmanager
async def _raw(servers: Servers) -> AsyncIterator[MakeHold]:
    """Two round trips of ``return 1`` on the wire that aiodlock uses: the limit."""
    async with aiodlock.Client(servers.redis) as client:
        backend: Any = client._core.use().backend.store  # type: ignore[attr-defined]
        wire = await backend.server.link.wait_up()
        both = _TwoRoundTrips(wire.send, await wire.send("SCRIPT", "LOAD", "return 1"))
        yield lambda name, shared: lambda: both


def _ours(
    *,
    exclusive: bool = False,
    source: Callable[[Servers], str] = attrgetter("redis"),
    **options: Any,
) -> Callable[[Servers], AbstractAsyncContextManager[MakeHold]]:
    @asynccontextmanager
    async def opened(servers: Servers) -> AsyncIterator[MakeHold]:
        async with aiodlock.Client(source(servers)) as client:

            def make(name: str, shared: bool) -> Hold:
                if shared and not exclusive:
                    lock = client.rwlock(name, **options).read
                else:
                    lock = client.lock(name, **options)
                return lambda: lock

            yield make

    return opened


@asynccontextmanager
async def _redis_py(servers: Servers) -> AsyncIterator[MakeHold]:
    async with redis.asyncio.Redis.from_url(servers.redis) as client:

        def make(name: str, shared: bool) -> Hold:
            lock = client.lock(f"redis-py:{name}", timeout=30)
            return lambda: lock

        yield make


@asynccontextmanager
async def _redis_fifo_lock(servers: Servers) -> AsyncIterator[MakeHold]:
    from redis_fifo_lock import FifoLock

    async with redis.asyncio.Redis.from_url(servers.redis) as client:

        def make(name: str, shared: bool) -> Hold:
            hold: Hold = FifoLock(client, f"fifo-{name}").hold
            return hold

        yield make


@asynccontextmanager
async def _pottery(servers: Servers) -> AsyncIterator[MakeHold]:
    from pottery import AIORedlock

    async with redis.asyncio.Redis.from_url(servers.redis) as client:

        def make(name: str, shared: bool) -> Hold:
            return lambda: AIORedlock(key=name, masters={client}, auto_release_time=30)

        yield make


@asynccontextmanager
async def _python_redis_lock(servers: Servers) -> AsyncIterator[Run]:
    import redis_lock

    with redis.Redis.from_url(servers.redis) as client:
        async with _threads(
            lambda name, shared: lambda: redis_lock.Lock(client, name, expire=30)
        ) as run:
            yield run


_NODE = Path(__file__).parent / "node"


@asynccontextmanager
async def _node_redlock(servers: Servers) -> AsyncIterator[Run]:
    """A node process beside us, which is told each case and keeps its own time."""
    url = servers.redis
    node = _install_node_modules()
    process = await asyncio.create_subprocess_exec(
        *(node, str(_NODE / "driver.js"), url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    to, answers = process.stdin, process.stdout

    async def run(load: Load) -> float:
        case = {"tasks": load.tasks, "names": load.names, "count": load.count, "body": load.body}
        to.write(json.dumps(case).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await answers.readline())
        return float(answer["seconds"])

    try:
        yield run
    finally:
        process.kill()
        await process.wait()


def _install_node_modules() -> str:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise NotThere("no node")
    if not (_NODE / "node_modules" / "redlock").is_dir():
        quiet = ("--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", "--silent")
        try:
            subprocess.run([npm, "install", *quiet], cwd=_NODE, check=True, timeout=180)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            raise NotThere("npm could not install it") from None
    return node


@asynccontextmanager
async def _postgres(servers: Servers) -> AsyncIterator[MakeHold]:
    """A connection for each task that locks, its statements prepared: as fast as these can be."""
    import asyncpg

    where = {"host": servers.postgres, "user": "bench", "database": "postgres"}
    everyone: list[Any] = []
    idle: list[Any] = []

    class Advisory:
        __slots__ = ("_connection", "_key", "_suffix")

        def __init__(self, name: str, shared: bool) -> None:
            self._key = zlib.crc32(name.encode())
            self._suffix = "_shared" if shared else ""

        async def __aenter__(self) -> None:
            if idle:
                self._connection = idle.pop()
            else:
                self._connection = await asyncpg.connect(**where)
                everyone.append(self._connection)
            await self._connection.fetchval(f"SELECT pg_advisory_lock{self._suffix}($1)", self._key)

        async def __aexit__(self, *_: object) -> None:
            await self._connection.fetchval(
                f"SELECT pg_advisory_unlock{self._suffix}($1)", self._key
            )
            idle.append(self._connection)

    try:
        yield lambda name, shared: lambda: Advisory(name, shared)
    finally:
        for connection in everyone:
            await connection.close()


@asynccontextmanager
async def _kazoo(servers: Servers) -> AsyncIterator[Run]:
    from kazoo.client import KazooClient

    logging.getLogger("kazoo").setLevel(logging.CRITICAL)  # it tells of its own disconnecting
    client = KazooClient(hosts=servers.zookeeper)
    await asyncio.to_thread(client.start, timeout=15)

    def make(name: str, shared: bool) -> ThreadHold:
        kind = client.ReadLock if shared else client.WriteLock
        return lambda: kind(f"/bench/{name}", f"{name}")

    try:
        async with _threads(make) as run:
            yield run
    finally:
        await asyncio.to_thread(client.stop)
        client.close()


RAW = Contender("raw", "two raw EVALSHA", _raw)
OURS = Contender("ours", "aiodlock", _ours())
UNCONFIRMED = Contender(
    "ours-unconfirmed",
    "aiodlock, confirm_release=False",
    _ours(confirm_release=False),
)
LINGERING = Contender("ours-linger", "aiodlock, linger=60", _ours(linger=60.0))
FEW = Contender(
    "ours-few",
    "aiodlock, as many by 64 tasks on 64 names",
    _ours(),
    reshape=lambda load: replace(load, tasks=64, names=64, count=load.tasks * load.count // 64),
)
EXCLUSIVE = Contender("ours-exclusive", "aiodlock, all exclusive", _ours(exclusive=True))
REDIS_PY = Contender("redis-py", "redis-py Lock", _redis_py)
FIFO = Contender("redis-fifo-lock", "redis-fifo-lock", _redis_fifo_lock)
POTTERY = Contender("pottery", "pottery AIORedlock", _pottery)
THREADED = Contender(
    "python-redis-lock", "python-redis-lock (threads)", open_run=_python_redis_lock
)
NODE = Contender("node-redlock", "node-redlock (node, ioredis)", open_run=_node_redlock)
POSTGRES = Contender("postgres", "PostgreSQL advisory locks (asyncpg)", _postgres)
OURS_ZOOKEEPER = Contender(
    "ours-zookeeper",
    "aiodlock on ZooKeeper",
    _ours(source=lambda servers: f"zookeeper://{servers.zookeeper}"),
)
KAZOO = Contender("kazoo", "kazoo on ZooKeeper (threads)", open_run=_kazoo)

ALL = (
    *(RAW, OURS, UNCONFIRMED, LINGERING, FEW, EXCLUSIVE),
    *(REDIS_PY, FIFO, POTTERY, THREADED, NODE, POSTGRES, OURS_ZOOKEEPER, KAZOO),
)
