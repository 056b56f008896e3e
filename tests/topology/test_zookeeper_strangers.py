"""What others have put into ZooKeeper, and servers that refuse, end no client."""

from __future__ import annotations

import asyncio
import logging

import pytest
from kazoo.client import KazooClient
from kazoo.security import OPEN_ACL_UNSAFE, make_acl

import aiodlock

from ..scenes import bounded
from ..zookeeper import ZooKeeperServer, installed

pytestmark = pytest.mark.skipif(not installed(), reason="ZooKeeper is not installed")
TTL = 4.0
DATA = {
    "deep": b"[" * 100_000,
    "digits": b'["tx", "c", ' + b"9" * 5000 + b', "", ""]',
    "halves": b'["u\\ud800", "\\ud800", 0, "\\udfff", ""]',
    "infinite": b'["tx", "c", 1e999, "", "", 1]',
    "nothing": b"",
}
NODES = {
    "digits": "x:zz::" + "9" * 5000,
    "limit": "9" * 5000 + ":zz::0000000001",
    "colons": ":::",
    "other": "lock-0000000001",
}


def _url(server: ZooKeeperServer) -> str:
    return f"{server.url}?tick_time=0.5"


async def _use(client: aiodlock.Client, name: str) -> None:
    """Ask everything there is to ask about a name. Nothing is answered too late, or ends the client."""
    async with bounded(20.0):
        for timeout in (0, 0.2):
            try:
                async with client.lock(name, timeout=timeout):
                    pass
            except aiodlock.AcquireTimeout:
                pass
        repr(await client.inspect(name))
        await client.break_lock(name)
        async with client.lock(f"{name} and another", timeout=5.0) as lease:
            assert lease.held


@pytest.mark.parametrize("data", DATA)
async def test_data_of_a_node_that_cannot_be_read_harms_nobody(data: str) -> None:
    with ZooKeeperServer(tick=0.5) as server:
        kazoo = KazooClient(f"127.0.0.1:{server.port}")
        await asyncio.to_thread(kazoo.start)
        try:
            async with aiodlock.Client(_url(server), ttl=TTL) as client:
                async with client.lock("name"), client.lock("held") as held:
                    pass
                path = "/aiodlock/locks/name/x:zz::0000000000"
                await asyncio.to_thread(kazoo.create, path, DATA[data], makepath=True)
                async with client.lock("held") as held:
                    await _use(client, "name")
                    assert held.held
        finally:
            kazoo.stop()
            kazoo.close()


@pytest.mark.parametrize("node", NODES)
async def test_node_that_is_not_aiodlocks_is_left_out(node: str) -> None:
    with ZooKeeperServer(tick=0.5) as server:
        kazoo = KazooClient(f"127.0.0.1:{server.port}")
        await asyncio.to_thread(kazoo.start)
        try:
            async with aiodlock.Client(_url(server), ttl=TTL) as client:
                async with client.lock("name"):
                    waiting = asyncio.create_task(client.lock("name", timeout=20).acquire())
                    while not (await client.inspect("name")).waiters:
                        await asyncio.sleep(0.01)
                    await asyncio.to_thread(kazoo.create, f"/aiodlock/locks/name/{NODES[node]}")
                await (await waiting).release()
                await _use(client, "name")
        finally:
            kazoo.stop()
            kazoo.close()


async def test_acl_that_shuts_a_client_out_for_a_moment_is_an_outage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    looks = [make_acl("world", "anyone", read=True, admin=True)]
    with ZooKeeperServer(tick=0.5) as server:
        kazoo = KazooClient(f"127.0.0.1:{server.port}")
        await asyncio.to_thread(kazoo.start)
        try:
            async with aiodlock.Client(_url(server), ttl=30.0) as client:
                async with client.lock("warm"):
                    pass
                async with client.lock("held") as held:
                    await asyncio.to_thread(kazoo.set_acls, "/aiodlock/ids", looks)
                    with pytest.raises(aiodlock.BackendUnavailable, match="ACL"):
                        await client.lock("name", timeout=1.0).acquire()
                    asking = asyncio.create_task(client.lock("name", timeout=20.0).acquire())
                    await asyncio.sleep(0.5)
                    await asyncio.to_thread(kazoo.set_acls, "/aiodlock/ids", OPEN_ACL_UNSAFE)
                    await (await asking).release()
                    assert held.held
        finally:
            kazoo.stop()
            kazoo.close()


async def test_outage_is_told_once_and_before_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    with ZooKeeperServer(tick=0.5) as server:
        async with aiodlock.Client(_url(server), ttl=TTL) as client:
            lease = await client.lock("name").acquire()
            await asyncio.to_thread(server.crash)
            await lease.wait_lost()
            told = [
                one
                for one in caplog.records
                if getattr(one, "event", "") in ("no_connection", "lost")
                and one.levelno >= logging.WARNING
            ]
            assert [one.event for one in told][:1] == ["no_connection"]  # type: ignore[attr-defined]
            assert sum(one.event == "no_connection" for one in told) == 1  # type: ignore[attr-defined]
            await asyncio.to_thread(server.start)
            async with client.lock("name", timeout=20.0) as again:
                assert again.held
