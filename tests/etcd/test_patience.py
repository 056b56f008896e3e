"""How long a store may take: as long as it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from aiodlock import BackendUnavailable, Client
from aiodlock._clock import now

from ..ports import free_ports
from ..scenes import bounded
from .servers import EtcdCluster, find_etcd
from .test_access import _guard, _login
from .test_refusals import _is_served

pytestmark = pytest.mark.skipif(find_etcd() is None, reason="etcd is not installed")


class Slow:
    """A proxy whose answers take a while.

    Mutable state: ``seconds``, ``connections`` (that were made).
    """

    def __init__(self, target: int) -> None:
        self.seconds = 0.0
        self.connections = 0
        self._target = target

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far_reader, far = await asyncio.open_connection("127.0.0.1", self._target)
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def up() -> None:
            while data := await reader.read(65536):
                far.write(data)

        async def down() -> None:
            while data := await far_reader.read(65536):
                late.put_nowait((now() + self.seconds, data))

        async def out() -> None:
            while True:
                due, data = await late.get()
                await asyncio.sleep(max(0.0, due - now()))
                writer.write(data)

        tasks = [asyncio.create_task(one()) for one in (up, down, out)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for end in (far, writer):
                end.transport.abort()


@asynccontextmanager
async def _slow(cluster: EtcdCluster) -> AsyncIterator[tuple[Slow, str]]:
    (port,) = free_ports(1)
    slow = Slow(cluster.nodes[0].port)
    server = await asyncio.start_server(slow.serve, "127.0.0.1", port)
    try:
        yield slow, f"etcd://127.0.0.1:{port}"
    finally:
        server.close()


async def test_store_that_becomes_slow_keeps_its_connection_and_its_leases(
    one_node: EtcdCluster,
) -> None:
    async with _slow(one_node) as (slow, url), Client(url, ttl=12.0) as client:
        async with client.lock("name") as lease:
            slow.seconds = 1.2
            until = now() + 14.0
            while now() < until:
                assert lease.held
                await asyncio.sleep(0.1)
            async with client.lock("another", timeout=20.0):
                pass
        assert slow.connections == 1


async def test_client_enters_a_slow_store(one_node: EtcdCluster) -> None:
    async with _slow(one_node) as (slow, url):
        slow.seconds = 0.6
        async with Client(url, ttl=20.0) as client, client.lock("name", timeout=20.0) as lease:
            assert lease.held


async def test_connection_that_is_dead_is_given_up(one_node: EtcdCluster) -> None:
    async with _slow(one_node) as (slow, url), Client(url, ttl=30.0) as client:
        async with client.lock("name") as lease:
            slow.seconds = 3600.0
            with pytest.raises(BackendUnavailable):
                async with client.lock("another", timeout=3.0):
                    pass
            slow.seconds = 0.0  # what is on its way never comes
            await _is_served(client)
            assert slow.connections > 1
            assert lease.held


@pytest.fixture
def guarded() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        _guard(cluster)
        yield cluster


async def test_users_who_come_together_get_in_and_come_back(guarded: EtcdCluster) -> None:
    """A member checks some ten passwords in a second, and forgets its tokens when it is restarted."""
    url = _login(guarded, "locker's pass")
    async with AsyncExitStack() as stack:
        clients = [Client(url, prefix="mine", ttl=60.0) for _ in range(60)]
        async with bounded(30.0):
            await asyncio.gather(*(stack.enter_async_context(one) for one in clients))
        leases = [await one.lock(f"name {n}").acquire() for n, one in enumerate(clients)]
        guarded.nodes[0].kill()
        await asyncio.to_thread(guarded.start)
        await asyncio.gather(*(_is_served_by_name(one, n) for n, one in enumerate(clients)))
        assert all(lease.held for lease in leases)


async def _is_served_by_name(client: Client, number: int) -> None:
    async with asyncio.timeout(50.0):
        while True:
            with suppress(BackendUnavailable):
                async with client.lock(f"other {number}", timeout=20.0):
                    return
