"""What a failover costs the locks, on stores that elect or promote by themselves or by hand.

    python -m benchmarks.failover [--rounds 5] [--stores etcd,zookeeper,postgres]

Three members of etcd and three servers of ZooKeeper, whose leader is killed; a PostgreSQL with a
synchronous standby, whose primary is killed and whose standby is promoted at once. One client holds a lock
of 30 s, another one waits for it. Measured is the time from the kill until a third client has taken a free
name. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiodlock
from aiodlock.backends.postgres.schema import create_statements
from tests.etcd.servers import EtcdCluster
from tests.ports import free_ports
from tests.postgres import PostgresServer, find_debian
from tests.zookeeper import ZooKeeperServer

#: Gives the URL, and a function that takes the leader away.
Store = tuple[str, Callable[[], Awaitable[None]]]


@asynccontextmanager
async def etcd() -> AsyncIterator[Store]:
    # The settings of a new installation, not those of the tests.
    with EtcdCluster(3, heartbeat_interval=100, election_timeout=1000) as cluster:

        def kill() -> None:
            for node in cluster.nodes:
                url = f"http://{node.endpoint}/v3/maintenance/status"
                request = urllib.request.Request(url, data=b"{}", method="POST")
                with urllib.request.urlopen(request, timeout=5.0) as answer:
                    status = json.load(answer)
                if status.get("leader") == status["header"]["member_id"]:
                    node.kill()
                    return
            raise AssertionError("no leader")

        yield cluster.url, lambda: asyncio.to_thread(kill)


@asynccontextmanager
async def zookeeper() -> AsyncIterator[Store]:
    numbers = (1, 2, 3)
    ports = free_ports(9)
    lines = ["syncLimit=5", "initLimit=10"]  # those of a new installation, as the tick
    lines += [f"server.{n}=127.0.0.1:{ports[3 * n - 3]}:{ports[3 * n - 2]}" for n in numbers]
    servers = [
        ZooKeeperServer(tick=2.0, longest=100.0, lines=lines, number=n, port=ports[3 * n - 1])
        for n in numbers
    ]

    def start() -> None:
        for server in servers:
            server.start(wait=False)
        for server in servers:
            server.wait()

    def kill() -> None:
        next(server for server in servers if server.mode() == "leader").crash()

    try:
        await asyncio.to_thread(start)
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        yield f"zookeeper://{hosts}", lambda: asyncio.to_thread(kill)
    finally:
        for server in servers:
            server.stop()


@asynccontextmanager
async def postgres() -> AsyncIterator[Store]:
    programs = find_debian()
    assert programs is not None, "Debian's PostgreSQL is not installed"
    with PostgresServer(programs) as primary:
        primary.execute(create_statements("logged"))
        with primary.make_standby() as standby:
            # Else the grants that the standby has not yet are lost.
            primary.configure("synchronous_standby_names", "*")
            hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
            url = f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write"

            def fail_over() -> None:
                primary.crash()
                standby.promote()
                standby.configure("synchronous_standby_names", "")

            yield url, lambda: asyncio.to_thread(fail_over)


STORES = {"etcd": etcd, "zookeeper": zookeeper, "postgres": postgres}


async def measure(name: str) -> tuple[float, bool]:
    """Return the seconds until a free name was taken, and whether the lease and the place were kept."""
    async with (
        STORES[name]() as (url, fail_over),
        aiodlock.Client(url) as holder,
        aiodlock.Client(url) as waiter,
        aiodlock.Client(url) as third,
    ):
        lease = await holder.lock("held").acquire()
        waiting = asyncio.create_task(waiter.lock("held").acquire())
        while not (await holder.inspect("held")).waiters:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await fail_over()
        async with third.lock("free"):
            took = time.monotonic() - began
        await lease.extend()
        kept = lease.held and not waiting.done()
        await lease.release()
        async with asyncio.timeout(30):
            await (await waiting).release()
        return took, kept


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failover", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stores", default=",".join(STORES))
    options = parser.parse_args()
    print(
        "| | first free name after | leases of 30 s kept | rounds |\n|---|---|---|---|", flush=True
    )
    for name in options.stores.split(","):
        took, kept = [], 0
        for _ in range(options.rounds):
            seconds, lease = await measure(name)
            took.append(seconds)
            kept += lease
        low, middle, high = min(took), statistics.median(took), max(took)
        print(
            f"| {name} | {middle:.1f} s ({low:.1f} to {high:.1f}) | {kept} | {len(took)} |",
            flush=True,
        )


if __name__ == "__main__":
    asyncio.run(main())
