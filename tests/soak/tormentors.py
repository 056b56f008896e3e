"""The stores that a soak knows: the servers of each, and what happens to them."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, Self

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ResponseError

from aiodlock._embedded import EmbeddedServer
from aiodlock.backends.postgres.schema import create_statements

from ..etcd.servers import EtcdCluster
from ..postgres import PostgresServer
from ..proxy import FaultProxy, named
from ..servers import REAL, embedded, postgres_server
from ..zookeeper import ZooKeeperEnsemble, left
from .disk import Disk
from .faults import Fault, Tormentor
from .memory import resident
from .records import first_mismatch, of_lease
from .sentinel import SentinelTormentor
from .wire import Wire

_RESTART = "server killed and restarted"
_TO_WORKERS = ("SIGSTOP of a worker", "SIGKILL of a worker")


def _own_client(server: EmbeddedServer) -> redis.asyncio.Redis:
    """Return a client of the soak's own. What is done to all connections is done to its as well."""
    again = Retry(ExponentialBackoff(cap=0.5, base=0.01), 40)
    return redis.asyncio.Redis.from_url(server.url, decode_responses=True, retry=again)


class RedisTormentor(Tormentor):
    """One server that saves every command, or a quorum of three that save none."""

    memory_is_judged = True

    def __init__(self, rng: random.Random, disk: Disk | None, store: str = "valkey9") -> None:
        super().__init__(rng, disk)
        self._is_quorum = store == "quorum"
        kind = "valkey9" if self._is_quorum else store
        # Redis 6.2 has no such option and always allows it.
        config = {} if kind == "redis62" else {"enable_debug_command": "yes"}
        if not self._is_quorum:
            config |= {"appendonly": "yes", "appendfsync": "always"}
        self.servers: list[EmbeddedServer] = [
            embedded(kind, tcp=False, **config) for _ in range(3 if self._is_quorum else 1)
        ]
        self._stack = AsyncExitStack()
        #: A node of a quorum that comes back empty does not count until the longest lease is over.
        self._rest = 5.0 if self._is_quorum else 0.0
        if self._is_quorum:
            self.recovery = 6.0  # a majority may have to be trusted again

    async def __aenter__(self) -> Self:
        with self._disk.making() if self._disk is not None else nullcontext():
            for server in self.servers:
                self._stack.enter_context(server)
        for server in self.servers:
            self.lines.append(await self._stack.enter_async_context(FaultProxy(server.url)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def may_forget(self, moment: float) -> bool:
        """Of a quorum: a node has just lost its votes, and another one did not get all that was sent to it
        while the lease could have begun. What is left is no majority."""
        if not self._is_quorum:
            return False
        lasted = [span for span in self.spans if span.began <= moment <= span.ended]
        before = [
            s
            for s in self.spans
            if s.began < moment < s.ended + self.ttl and s.what not in _TO_WORKERS
        ]
        restarts = [span for span in lasted if span.what == _RESTART]
        return bool(restarts) and len(before) > len(restarts)

    def source(self, *, through_lines: bool) -> str | list[str]:
        urls = [one.url for one in (self.lines if through_lines else self.servers)]
        return urls if self._is_quorum else urls[0]

    async def heal(self) -> None:
        for server in self.servers:
            server.resume()
            if not server.running:
                await asyncio.to_thread(server.start)
            with suppress(OSError):
                await self._ask_when_loaded(server, "CONFIG", "SET", "maxmemory", 0)

    async def left(self) -> list[str]:
        found = []
        for server in self.servers:
            async with _own_client(server) as client:
                keys = [str(key) async for key in client.scan_iter(count=1000)]
                passing = (":token", ":quorum", ":lengths", ":members")
                found += [
                    key for key in keys if not key.endswith(passing) and ":marker:" not in key
                ]
                found += [f"{key} without a TTL" for key in keys if await client.ttl(key) == -1]
        return found

    async def memory(self) -> tuple[str, int]:
        used = 0
        for server in self.servers:
            async with _own_client(server) as client:
                used += int((await client.info("memory"))["used_memory"])
        # It remembers every connection and command for tests that look at them; here they are too many.
        for line in self.lines:
            line.forget()
            line.connections[:] = line.open_connections
        return "used_memory", used

    def lose(self, line: Any, *, replies: bool, times: int) -> None:
        (line.drop_reply if replies else line.drop_command)(named("EVALSHA"), times=times)

    def of_server(self) -> dict[str, Fault]:
        return {
            "CLIENT KILL": self._kill_clients,
            "all connections killed at once": self._kill_all_clients,
            "CLIENT PAUSE": self._pause_clients,
            "SCRIPT FLUSH": self._flush_scripts,
            "DEBUG SLEEP": self._sleep,
            "notifications changed": self._change_notifications,
            "memory full": self._fill_memory,
            "SIGSTOP of the server": self._stop_server,
            _RESTART: self._restart,
            **({} if self._is_quorum else self.of_disk()),
        }

    def _any(self) -> EmbeddedServer:
        return self._rng.choice(self.servers)

    async def _ask(self, server: EmbeddedServer, *command: str | int) -> None:
        async with _own_client(server) as client:
            await client.execute_command(*command)  # type: ignore[no-untyped-call]

    async def _ask_when_loaded(self, server: EmbeddedServer, *command: str | int) -> None:
        while True:
            try:
                return await self._ask(server, *command)
            except ResponseError as refused:
                if "loading" not in str(refused).lower():
                    raise
            await asyncio.sleep(0.1)

    async def _kill_clients(self) -> None:
        await self._ask(
            self._any(), "CLIENT", "KILL", "TYPE", self._rng.choice(("normal", "pubsub"))
        )

    async def _kill_all_clients(self) -> None:
        for server in self.servers:
            for kind in ("normal", "pubsub"):
                await self._ask(server, "CLIENT", "KILL", "TYPE", kind)

    async def _pause_clients(self) -> None:
        await self._ask(self._any(), "CLIENT", "PAUSE", self._rng.randint(100, 2000))

    async def _flush_scripts(self) -> None:
        await self._ask(self._any(), "SCRIPT", "FLUSH")

    async def _sleep(self) -> None:
        await self._ask(self._any(), "DEBUG", "SLEEP", f"{self.up_to(1.0):.2f}")

    async def _change_notifications(self) -> None:
        events = self._rng.choice(("", "Kgxe"))
        await self._ask(self._any(), "CONFIG", "SET", "notify-keyspace-events", events)

    async def _fill_memory(self) -> None:
        server = self._any()
        await self._ask(server, "CONFIG", "SET", "maxmemory", 1)
        try:
            await asyncio.sleep(self.up_to(3.0))
        finally:
            await asyncio.shield(self._ask(server, "CONFIG", "SET", "maxmemory", 0))

    async def _stop_server(self) -> None:
        server = self._any()
        server.pause()
        try:
            await asyncio.sleep(self.up_to(2.0))
        finally:
            server.resume()

    async def _restart(self) -> None:
        server = self._any()
        await asyncio.to_thread(server.kill)
        await asyncio.shield(asyncio.ensure_future(asyncio.to_thread(server.start)))
        await asyncio.sleep(self._rest)


_TABLES = ("name", "waiter", "record", "marker", "broken")
#: The server's clock is an hour ahead from now on: nothing is kept for longer here.
_MUCH_LATER = """
create or replace function aiodlock.clock_us() returns bigint language sql volatile as
$$ select ((extract(epoch from clock_timestamp()) + 3600) * 1000000)::bigint $$
"""


class PostgresTormentor(Tormentor):
    """One server whose tables are logged."""

    def __init__(self, rng: random.Random, disk: Disk | None) -> None:
        super().__init__(rng, disk)
        self.server: PostgresServer = postgres_server(
            "postgres", max_wal_size="64MB", min_wal_size="32MB"
        )
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        with self._disk.making() if self._disk is not None else nullcontext():
            await asyncio.to_thread(self._stack.enter_context, self.server)
        await self._execute(create_statements("logged"))
        self.lines = [await self._stack.enter_async_context(Wire(self.server.port))]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def source(self, *, through_lines: bool) -> str:
        port = self.lines[0].port if through_lines else self.server.port
        return self.server.url.replace(f":{self.server.port}/", f":{port}/")

    async def heal(self) -> None:
        self.server.resume()
        if not self.server.running:
            await asyncio.to_thread(self.server.start)

    async def left(self) -> list[str]:
        # A name's row, with a dead holder in it, stays as long as its last token or a marker is kept, which
        # is longer than anybody would wait here. Then any client sweeps, once a minute.
        await self._execute(_MUCH_LATER)
        await self._execute(
            "select aiodlock.sweep(100000, 100000, 'm0'), aiodlock.sweep(100000, 100000, 'b0'), "
            "aiodlock.sweep(100000, 100000, 'r0'), aiodlock.sweep(100000, 100000, 'n0')"
        )
        rows = await self._execute(
            " union all ".join(
                f"select concat('{one} ', t, ' at ', aiodlock.clock_us() / 1000) from aiodlock.{one} t"
                for one in _TABLES
            )
        )
        return [row[0] for row in rows]

    async def memory(self) -> tuple[str, int]:
        # Not the size of the tables: a server that is killed forgets what there is to vacuum.
        sums = [
            f"(select coalesce(sum(pg_column_size(t.*)), 0) from aiodlock.{one} t)"
            for one in _TABLES
        ]
        rows = await self._execute(f"select {' + '.join(sums)}")
        return "live rows", int(rows[0][0])

    def of_server(self) -> dict[str, Fault]:
        return {
            "pg_terminate_backend": self._terminate,
            "pg_cancel_backend": self._cancel,
            "LOCK TABLE": self._lock,
            "open transaction": self._open_transaction,
            "VACUUM FULL": self._vacuum,
            "SIGSTOP of the server": self._stop_server,
            "server killed and restarted": self._crash,
            "server restarted in order": self._restart,
            **self.of_disk(),
        }

    async def _execute(self, sql: str) -> list[Any]:
        async with asyncio.timeout(20.0):
            return await asyncio.to_thread(self.server.execute, sql)

    async def _terminate(self) -> None:
        await self._execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where pid <> pg_backend_pid() and backend_type = 'client backend'"
        )

    async def _cancel(self) -> None:
        await self._execute(
            "select pg_cancel_backend(pid) from pg_stat_activity "
            "where pid <> pg_backend_pid() and state = 'active'"
        )

    async def _lock(self) -> None:
        seconds = self.up_to(2.0)
        await self._execute(
            "begin; lock table aiodlock.name in access exclusive mode; "
            f"select pg_sleep({seconds:.2f}); commit;"
        )

    async def _open_transaction(self) -> None:
        seconds = self.up_to(10.0)
        await self._execute(
            "begin isolation level repeatable read; select count(*) from aiodlock.name; "
            f"select pg_sleep({seconds:.2f}); commit;"
        )

    async def _vacuum(self) -> None:
        await self._execute("vacuum full aiodlock.name")

    async def _stop_server(self) -> None:
        self.server.pause()
        try:
            await asyncio.sleep(self.up_to(2.0))
        finally:
            self.server.resume()

    async def _crash(self) -> None:
        await asyncio.to_thread(self.server.crash)
        await asyncio.shield(asyncio.to_thread(self.server.start))

    async def _restart(self) -> None:
        await asyncio.to_thread(self.server.shut_down)
        await asyncio.shield(asyncio.to_thread(self.server.start))


class StandbyTormentor(PostgresTormentor):
    """A primary whose commits wait for its standby. They change places: the old primary comes back as one,
    and goes on beside the new one for a while.

    Mutable state, besides that of the other one: ``standby``, ``old`` while it goes on, and ``_changing``,
    held while they change places: that ends though the soak does.
    """

    standby: PostgresServer
    old: PostgresServer | None = None

    def __init__(self, rng: random.Random, disk: Disk | None) -> None:
        super().__init__(rng, disk)
        self._changing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        # Before the standby is made: it has this setting from then on.
        await asyncio.to_thread(self.server.configure, "synchronous_standby_names", "*")
        await self._make_standby(postgres_server("postgres").port)
        self.lines.append(await self._stack.enter_async_context(Wire(self.standby.port)))
        self._targets = [self.server.port, self.standby.port]
        return self

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        for server in (self.server, self.standby, self.old):
            if server is not None:
                await asyncio.to_thread(server.stop)

    def source(self, *, through_lines: bool) -> str:
        ports = [line.port for line in self.lines] if through_lines else self._targets
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        return f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write"

    async def heal(self) -> None:
        async with self._changing:
            await super().heal()
            if self.standby is self.server:  # the making of another one met with a fault
                (port,) = {*self._targets} - {self.server.port}
                await self._make_standby(port)
            elif not self.standby.running:
                await asyncio.to_thread(self.standby.start)

    async def left(self) -> list[str]:
        try:
            return await super().left()
        except TimeoutError:  # of a commit that waits for a standby, say
            raise RuntimeError(
                f"no answer in time: {await asyncio.to_thread(self._state)}"
            ) from None

    def _state(self) -> list[str]:
        found = []
        for name, server in (("server", self.server), ("standby", self.standby)):
            for sql in (
                "select pg_is_in_recovery(), pg_last_wal_receive_lsn()",
                "select application_name, state, sync_state, flush_lsn from pg_stat_replication",
                "select pid, wait_event, state, left(query, 80) from pg_stat_activity where query <> ''",
            ):
                try:
                    found.append(f"{name}: {[*map(tuple, server.execute(sql))]}")
                except Exception as error:  # each driver has its own words
                    found.append(f"{name}: {error!r}")
        return found

    def of_server(self) -> dict[str, Fault]:
        return {
            "pg_terminate_backend": self._terminate,
            "SIGSTOP of the server": self._stop_server,
            "server killed and restarted": self._crash,
            "standby away": self._standby_away,
            "standby away, and commits cancelled": self._cancel_commits,
            "fail-over, and the old primary comes back": self._fail_over,
            "switch-over of a primary that goes on": self._promote_beside,
        }

    async def _make_standby(self, port: int) -> None:
        standby = await asyncio.to_thread(self.server.make_standby, max_wal_size="64MB")
        standby.port = port
        await asyncio.shield(asyncio.to_thread(standby.start))
        self.standby = standby

    async def _standby_away(self) -> None:
        await asyncio.to_thread(self.standby.shut_down)
        await self.after(self.up_to(4.0))

    async def _cancel_commits(self) -> None:
        await asyncio.to_thread(self.standby.shut_down)
        try:
            for _ in range(self._rng.randint(1, 8)):
                await asyncio.sleep(self.up_to(0.5))
                how = self._rng.choice(("pg_cancel_backend", "pg_terminate_backend"))
                await self._execute(
                    f"select {how}(pid) from pg_stat_activity where wait_event = 'SyncRep'"
                )
            if self._rng.random() < 0.5:
                await self._fail_over()
        finally:
            await asyncio.shield(self.heal())

    async def _fail_over(self) -> None:
        await asyncio.shield(self._change_places(killed=True))

    async def _promote_beside(self) -> None:
        await asyncio.shield(self._change_places(killed=False))

    async def _change_places(self, *, killed: bool) -> None:
        async with self._changing:
            await self._changed(killed=killed)

    async def _changed(self, *, killed: bool) -> None:
        old, new = self.server, self.standby
        if killed:
            await asyncio.to_thread(old.crash)
        if not new.running:
            await asyncio.to_thread(new.start)
        await asyncio.to_thread(new.promote)
        self.server, self.old = new, old
        if killed:
            await asyncio.sleep(self.up_to(1.0))
            await asyncio.to_thread(old.start)
        await asyncio.sleep(self.up_to(4.0))
        await asyncio.to_thread(old.stop)
        self.old = None
        await self._make_standby(old.port)


class EtcdTormentor(Tormentor):
    """Three members on one disk."""

    #: A new leader is elected, and gives every lease its whole ttl again.
    recovery = 8.0

    def __init__(self, rng: random.Random, disk: Disk | None) -> None:
        super().__init__(rng, disk)
        with disk.making() if disk is not None else nullcontext():
            self.cluster = EtcdCluster(
                3,
                auto_compaction_mode="revision",
                auto_compaction_retention="1000",
                snapshot_count=5000,
                max_wals=2,
            )
        self._peers: list[Wire] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for node in self.cluster.nodes:
            wire = await self._stack.enter_async_context(Wire(node.peer))
            node.advertised = wire.port
            self._peers.append(wire)
            self.lines.append(await self._stack.enter_async_context(Wire(node.port)))
        await asyncio.to_thread(self._stack.enter_context, self.cluster)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def source(self, *, through_lines: bool) -> str:
        ports = [one.port for one in (self.lines if through_lines else self.cluster.nodes)]
        return "etcd://" + ",".join(f"127.0.0.1:{port}" for port in ports)

    async def heal(self) -> None:
        for wire in self._peers:
            await wire.heal()
        await asyncio.to_thread(self.cluster.start)

    async def left(self) -> list[str]:
        return [key for key in await asyncio.to_thread(self.cluster.keys) if "/q/" in key]

    async def memory(self) -> tuple[str, int]:
        running = [
            node._process.pid for node in self.cluster.nodes if node._process and node.running
        ]
        return "resident", sum(map(resident, running))

    def of_server(self) -> dict[str, Fault]:
        return {
            "member killed and restarted": self._kill,
            "SIGSTOP of a member": self._stop,
            "SIGSTOP of all members": self._stop_all,
            "member cut off from the others": self._cut_off,
            "compaction": self._compact,
            **self.of_disk(),
        }

    async def _kill(self) -> None:
        await asyncio.to_thread(self._rng.choice(self.cluster.nodes).kill)
        await self.after(self.up_to(6.0))

    async def _stop(self) -> None:
        self._rng.choice(self.cluster.nodes).pause()
        await self.after(self.up_to(6.0))

    async def _stop_all(self) -> None:
        for node in self.cluster.nodes:
            node.pause()
        await self.after(self.up_to(2.0))

    async def _cut_off(self) -> None:
        """What the others send to it is lost; it still reaches them, until they have no answer."""
        wire = self._rng.choice(self._peers)
        self._rng.choice((wire.stall, wire.half_open, wire.cut))()
        await self.after(self.up_to(6.0))

    async def _compact(self) -> None:
        def compact() -> None:
            revision = self.cluster.call("kv/range", key="AA==")["header"]["revision"]
            self.cluster.call("kv/compaction", revision=revision)

        await asyncio.to_thread(compact)


class ZooKeeperTormentor(Tormentor):
    """An ensemble of three on one disk."""

    #: An election, and sessions that are given their whole time again after it.
    recovery = 15.0
    #: The lease rests on a thread of the leader's that is not late by a quarter of a tick: short ticks ask
    #: too much of a busy machine.
    ttl, _TICK = 6.0, 0.5

    def __init__(self, rng: random.Random, disk: Disk | None) -> None:
        super().__init__(rng, disk)
        # Ticks for which a server goes on without the others, and for which it tries to follow a leader.
        self.ensemble = ZooKeeperEnsemble(tick=self._TICK, sync_limit=20, init_limit=50, tells=True)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        with ExitStack() as making:
            if self._disk is not None:
                making.enter_context(self._disk.making())
            self._stack.enter_context(self.ensemble)
        for server in self.ensemble.servers.values():
            self.lines.append(await self._stack.enter_async_context(Wire(server.port)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def source(self, *, through_lines: bool) -> str:
        servers = self.lines if through_lines else list(self.ensemble.servers.values())
        hosts = ",".join(f"127.0.0.1:{one.port}" for one in servers)
        return f"zookeeper://{hosts}?tick_time={self._TICK}"

    async def heal(self) -> None:
        await asyncio.to_thread(self.ensemble.heal, restart_after=15.0)

    async def left(self) -> list[str]:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in self.ensemble.servers.values())
        return await left(f"zookeeper://{hosts}", receipts=True)

    async def memory(self) -> tuple[str, int]:
        running = [
            one._process.pid
            for one in self.ensemble.servers.values()
            if one._process and one.running
        ]
        return "resident", sum(map(resident, running))

    def keep(self, folder: Path) -> None:
        for number, server in self.ensemble.servers.items():
            lines = "\n".join(server.transactions())
            (folder / f"transactions-{number}").write_text(lines, errors="replace")

    def logs(self) -> list[Path]:
        return [server.log for server in self.ensemble.servers.values()]

    def broke(self) -> tuple[float, str] | None:
        found = [
            first_mismatch(server.log.read_text()) for server in self.ensemble.servers.values()
        ]
        return min(filter(None, found), default=None)

    async def explain(self, violation: str) -> list[str]:
        lease = re.search(r"lease on '(.*?)' .*\(token (\d+)\)", violation)
        if lease is None:
            return []
        servers = self.ensemble.servers
        return await asyncio.to_thread(
            lambda: of_lease(
                lease[1],
                int(lease[2]),
                {number: server.transactions() for number, server in servers.items()},
                {number: server.log.read_text() for number, server in servers.items()},
            )
        )

    def of_server(self) -> dict[str, Fault]:
        return {
            "server killed and restarted": self._kill,
            "leader killed and restarted": self._kill_leader,
            "SIGSTOP of a server": self._stop,
            "SIGSTOP of the leader": self._stop_leader,
            "SIGSTOP of all servers": self._stop_all,
            "server cut off from the others": self._cut_off,
            "connections of a server to the others reset": self._reset,
            **self.of_disk(),
        }

    def _any(self) -> int:
        return self._rng.choice(list(self.ensemble.servers))

    async def _kill(self) -> None:
        await asyncio.to_thread(self.ensemble.servers[self._any()].crash)
        await self.after(self.up_to(6.0))

    async def _kill_leader(self) -> None:
        leader = await asyncio.to_thread(self.ensemble.leader)
        await asyncio.to_thread(self.ensemble.servers[leader].crash)
        await self.after(self.up_to(6.0))

    async def _stop(self) -> None:
        self.ensemble.servers[self._any()].pause()
        await self.after(self.up_to(6.0))

    async def _stop_leader(self) -> None:
        self.ensemble.servers[await asyncio.to_thread(self.ensemble.leader)].pause()
        await self.after(self.up_to(6.0))

    async def _stop_all(self) -> None:
        for server in self.ensemble.servers.values():
            server.pause()
        await self.after(self.up_to(2.0))

    async def _cut_off(self) -> None:
        await asyncio.to_thread(self.ensemble.isolate, self._any())
        await self.after(self.up_to(6.0))

    async def _reset(self) -> None:
        await asyncio.to_thread(lambda: self.ensemble.isolate(self._any(), reset=True))
        await self.after(self.up_to(6.0))


#: What `--store` takes.
STORES: Sequence[str] = (
    *REAL,
    "sentinel",
    "quorum",
    "postgres",
    "postgres-standby",
    "etcd",
    "zookeeper",
)
#: How large a disk each needs, in MiB: full, it is to be full soon. But faults keep Redis from rewriting
#: its append-only file, and that must not fill it.
_DISKS = {"postgres": 400, "etcd": 1600, "zookeeper": 1000}


def disk_of(store: str) -> int:
    """Return the size of a store's disk in MiB."""
    return _DISKS.get(store, 600)


def tormentor_of(store: str, rng: random.Random, disk: Disk | None) -> Tormentor:
    """Return the one of a store."""
    if store == "postgres":
        return PostgresTormentor(rng, disk)
    if store == "postgres-standby":
        return StandbyTormentor(rng, disk)
    if store == "sentinel":
        return SentinelTormentor(rng, disk)
    if store == "etcd":
        return EtcdTormentor(rng, disk)
    if store == "zookeeper":
        return ZooKeeperTormentor(rng, disk)
    return RedisTormentor(rng, disk, store)
