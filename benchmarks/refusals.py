"""What it costs to be refused for a while, on every store.

    python -m benchmarks.refusals [--seconds 5] [--rounds 1] [--stores redis,etcd]

A client holds a lock of 30 s, another one waits for it. Then the servers take away what both may do (their
user on Redis and etcd, its login on PostgreSQL, the right to write on ZooKeeper) and, where that alone
would leave them connected, their connections; seconds later they give it back. Measured is the time from
then until a third name is taken, whether the lease was kept and the waiter was served after it, and what
was logged. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import NamedTuple

import redis

import aiodlock
from aiodlock._embedded import EmbeddedServer, find_valkey9
from aiodlock.backends.postgres.schema import create_statements
from tests.etcd.servers import EtcdCluster
from tests.etcd.test_access import _as_root, _guard, _login
from tests.postgres import PostgresServer, find_debian
from tests.servers import embedded
from tests.topology.cluster import Cluster, port
from tests.topology.servers import SentinelService
from tests.zookeeper import ZooKeeperServer

_RULES = ("on", ">secret", "~*", "&*", "+@all")


class Store(NamedTuple):
    """Where its clients go, and what takes their rights away and gives them back."""

    source: str | list[str]
    refuse: Callable[[], object]
    allow: Callable[[], object]


def _with_user(source: str | list[str], nodes: Sequence[EmbeddedServer]) -> Store:
    """Return servers of Redis, each with a user that is deleted and made again."""

    def everywhere(*command: str) -> None:
        for node in nodes:
            with redis.Redis(port=port(node), protocol=2) as admin:
                admin.execute_command("ACL", *command)

    everywhere("SETUSER", "locks", *_RULES)
    return Store(
        source,
        lambda: everywhere("DELUSER", "locks"),
        lambda: everywhere("SETUSER", "locks", *_RULES),
    )


def _url(server: EmbeddedServer) -> str:
    return f"redis://locks:secret@127.0.0.1:{port(server)}"


@asynccontextmanager
async def _redis() -> AsyncIterator[Store]:
    with embedded("valkey9", tcp=True) as server:
        yield _with_user(_url(server), [server])


@asynccontextmanager
async def _quorum() -> AsyncIterator[Store]:
    with ExitStack() as stack:
        nodes = [stack.enter_context(embedded("valkey9", tcp=True)) for _ in range(3)]
        yield _with_user([_url(node) for node in nodes], nodes)


@asynccontextmanager
async def _sentinel() -> AsyncIterator[Store]:
    with SentinelService(find_valkey9()) as service:
        # The sentinels know no such user.
        where = f"redis+sentinel://locks:secret@{','.join(service.addresses)}/primary/0?sentinel_username="
        yield _with_user(where, service.nodes)


@asynccontextmanager
async def _cluster() -> AsyncIterator[Store]:
    with Cluster(find_valkey9(), primaries=3, replicas=0) as cluster:
        yield _with_user(cluster.url.replace("//", "//locks:secret@", 1), cluster.nodes)


@asynccontextmanager
async def _postgres() -> AsyncIterator[Store]:
    programs = find_debian()
    assert programs is not None, "Debian's PostgreSQL is not installed"
    with PostgresServer(programs) as server:
        server.execute(create_statements())
        server.execute(
            "create role locker login; grant usage on schema aiodlock to locker; "
            "grant execute on all functions in schema aiodlock to locker;"
        )
        refuse = (
            "alter role locker nologin; select pg_terminate_backend(pid) from pg_stat_activity "
            "where backend_type = 'client backend' and pid <> pg_backend_pid();"
        )
        allow = "alter role locker login;"
        yield Store(
            server.url_of("locker"), lambda: server.execute(refuse), lambda: server.execute(allow)
        )


@asynccontextmanager
async def _etcd() -> AsyncIterator[Store]:
    with EtcdCluster(3) as cluster:
        _guard(cluster)
        who = {"user": "locker", "role": "locks"}
        yield Store(
            _login(cluster, "locker's pass"),
            lambda: _as_root(cluster, "auth/user/revoke", name=who["user"], role=who["role"]),
            lambda: _as_root(cluster, "auth/user/grant", **who),
        )


@asynccontextmanager
async def _zookeeper() -> AsyncIterator[Store]:
    from kazoo.client import KazooClient
    from kazoo.security import OPEN_ACL_UNSAFE, make_acl

    looks = [make_acl("world", "anyone", read=True, admin=True)]
    with ZooKeeperServer() as server:
        admin = KazooClient(f"127.0.0.1:{server.port}")
        admin.start()
        try:

            def set_acls(rights: object) -> None:
                for path in ("/aiodlock/ids", "/aiodlock/locks", "/aiodlock/locks/held"):
                    admin.set_acls(path, rights)

            yield Store(
                f"zookeeper://127.0.0.1:{server.port}",
                lambda: set_acls(looks),
                lambda: set_acls(OPEN_ACL_UNSAFE),
            )
        finally:
            admin.stop()
            admin.close()


STORES = {
    "redis": _redis,
    "sentinel": _sentinel,
    "cluster": _cluster,
    "quorum": _quorum,
    "postgres": _postgres,
    "etcd": _etcd,
    "zookeeper": _zookeeper,
}


class _Counted(logging.Handler):
    """How many lines were logged from WARNING on."""

    lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.lines += 1


class Measured(NamedTuple):
    """What one store did. Times in seconds."""

    granted_after: float
    refused: int
    kept: bool
    served: bool
    lines: int


async def measure(name: str, seconds: float) -> Measured:
    """Refuse for so long, and tell what came of it."""
    counted = _Counted()
    logger = logging.getLogger("aiodlock")
    prefix = "mine" if name == "etcd" else "aiodlock"  # what its role is for
    async with STORES[name]() as (source, refuse, allow):
        logger.addHandler(counted)
        logger.propagate = False
        async with (
            aiodlock.Client(source, ttl=30, waiter_ttl=30, prefix=prefix) as holder,
            aiodlock.Client(source, ttl=30, waiter_ttl=30, prefix=prefix) as waiter,
        ):
            lease = await holder.lock("held", on_lost="flag").acquire()
            waiting = asyncio.create_task(waiter.lock("held").acquire())
            while not (await holder.inspect("held")).waiters:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(refuse)
            refused, until = 0, time.monotonic() + seconds
            while time.monotonic() < until:
                try:
                    await (await holder.lock(f"other {refused}").acquire_nowait()).release()
                except aiodlock.BackendUnavailable:
                    refused += 1
                await asyncio.sleep(0.05)
            await asyncio.to_thread(allow)
            began = time.monotonic()
            granted = False
            while not granted:
                with suppress(aiodlock.BackendUnavailable):
                    async with holder.lock("third"):
                        granted = True
            took = time.monotonic() - began
            kept = lease.held and not waiting.done()
            await lease.extend()
            await lease.release()
            async with asyncio.timeout(30):
                await (await waiting).release()
            served = True
        logger.removeHandler(counted)
    return Measured(took, refused, kept, served, counted.lines)


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.refusals", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long they are refused")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--stores", default=",".join(STORES))
    options = parser.parse_args()
    print(
        "| | granted again after | leases of 30 s kept | waiters served | calls refused | warnings |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    for name in options.stores.split(","):
        rounds = [await measure(name, options.seconds) for _ in range(options.rounds)]
        took = [one.granted_after for one in rounds]
        print(
            f"| {name} | {min(took):.2f} to {max(took):.2f} s | {sum(one.kept for one in rounds)} of "
            f"{len(rounds)} | {sum(one.served for one in rounds)} of {len(rounds)} | "
            f"{min(one.refused for one in rounds)} | {max(one.lines for one in rounds)} |",
            flush=True,
        )


if __name__ == "__main__":
    asyncio.run(main())
