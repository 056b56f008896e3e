"""A server whose every answer takes long, and a name that is not resolved."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

import aiodlock

from ..conftest import MakeClient
from ..proxy import FaultProxy
from ..scenes import bounded
from .scenes import until

#: How long each answer takes (seconds): longer than an answer may take where nothing was learned.
_FAR = 1.5


@pytest.mark.stores("valkey9")
async def test_server_that_becomes_far_keeps_its_connections_and_its_leases(
    make_unlucky: MakeClient, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    client = await make_unlucky(ttl=30.0, unavailable_after=60.0)
    lease = await client.lock("held").acquire()
    dialled = proxy.accepted
    proxy.delay(_FAR)
    for _ in range(2):
        async with client.lock("name", timeout=60.0):
            assert lease.held
    assert (await client.inspect("held")).holders
    await lease.extend()
    assert proxy.accepted == dialled
    assert not [one for one in caplog.records if getattr(one, "event", "") == "no_connection"]
    await proxy.heal()


@pytest.mark.stores("valkey9")
async def test_client_enters_at_a_far_server(proxy: FaultProxy) -> None:
    proxy.delay(_FAR)
    async with aiodlock.Client(proxy.url, ttl=60.0) as client:
        async with client.lock("name", timeout=60.0) as lease:
            assert lease.held
        assert not await client.lock("name").locked()
        await proxy.heal()


@pytest.mark.stores("valkey9")
async def test_resolver_that_hangs_takes_no_threads_of_the_loop(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, hangs, ends = socket.getaddrinfo, threading.Event(), threading.Event()

    def resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        if hangs.is_set() and host == "localhost":
            ends.wait(60.0)
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return real(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    url = proxy.url.replace("127.0.0.1", "localhost")
    async with aiodlock.Client(url, ttl=60.0) as client:
        lease = await client.lock("held").acquire()
        hangs.set()
        proxy.cut()

        def asked() -> int:
            return sum(one.name == "aiodlock: resolver" for one in threading.enumerate())

        await until(lambda: asked() == 1, "a question")
        # Longer than a dial may take: it is given up, and another one begins.
        for _ in range(10):
            await asyncio.sleep(0.5)
            async with bounded(5.0):
                await asyncio.to_thread(lambda: None)
        assert asked() == 1
        hangs.clear()
        ends.set()
        async with client.lock("name", timeout=30.0):
            assert lease.held
