"""What the contract says of a store that does not answer, and of what is not sent at all."""

# ruff: noqa: PT012

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from aiodlock import (
    AcquireTimeout,
    BackendUnavailable,
    Client,
    Hooks,
    Lease,
    LockLost,
    NotHeld,
    RequestInfo,
)
from aiodlock._embedded import EmbeddedServer, find_valkey9

from ..conftest import MakeClient
from ..proxy import FaultProxy
from ..scenes import (
    PATIENCE,
    held_elsewhere,
    is_held,
    stalls,
    takes,
    until,
    until_cancelled,
    until_free,
    until_waiting,
)


def scripts_seen(proxy: FaultProxy) -> int:
    return proxy.commands["EVALSHA"] + proxy.commands["EVAL"]


async def test_bad_input_sends_nothing(proxy: FaultProxy, make_client: MakeClient) -> None:
    client = await make_client(proxy.url)
    async with client.lock("x") as lease:
        seen = scripts_seen(proxy)
        attempts: list[Callable[[], Awaitable[object]]] = [
            lambda: client.lock("y").acquire(timeout=-1),
            lambda: client.inspect(""),
            lambda: client.break_lock("\ud800"),
            lambda: lease.extend(0.01),
        ]
        for attempt in attempts:
            with pytest.raises(ValueError):
                await attempt()
        for nonsense in ("", "nothing", "x:exclusive:-1"):
            assert not await client.check_sequencer(nonsense)
        assert scripts_seen(proxy) == seen


async def test_reentering_sends_nothing(proxy: FaultProxy, make_client: MakeClient) -> None:
    client = await make_client(proxy.url)
    lock = client.lock("x")
    async with lock:
        seen = scripts_seen(proxy)
        for _ in range(10):
            async with lock, lock:
                await lock.acquire()
                await lock.release()
        with pytest.raises(NotHeld):
            await client.rwlock("x").read.release()
        assert scripts_seen(proxy) == seen


async def test_what_does_not_wait_raises_within_2_seconds(
    proxy: FaultProxy, make_client: MakeClient
) -> None:
    client = await make_client(proxy.url)
    proxy.half_open()
    lock = client.lock("x")
    attempts: list[Awaitable[object]] = [
        lock.acquire_nowait(),
        lock.acquire(timeout=0),
        lock.locked(),
        client.inspect("x"),
        client.break_lock("x"),
        client.check_sequencer("x:exclusive:1"),
    ]
    async with takes(at_most=2.0):
        results = await asyncio.gather(*attempts, return_exceptions=True)
    assert [type(result) for result in results] == [BackendUnavailable] * len(attempts)
    await proxy.heal()
    async with lock:
        pass


class StallsWhenGranted(Hooks):
    """The store is silent from the grant of a name on."""

    def __init__(self, proxy: FaultProxy, name: str) -> None:
        self.proxy = proxy
        self.name = name

    def acquired(self, request: RequestInfo, waited: float) -> None:
        if request.name == self.name:
            self.proxy.stall()


@pytest.mark.parametrize(("timeout", "at_most"), [(0, 2.0), (0.3, 0.6)])
async def test_multilock_is_no_later_than_its_last_name_when_the_store_falls_silent(
    proxy: FaultProxy, make_client: MakeClient, timeout: float, at_most: float
) -> None:
    other, client = await make_client(), await make_client(proxy.url)
    client.add_hooks(StallsWhenGranted(proxy, "a"))
    async with takes(at_most=at_most):
        with pytest.raises(BackendUnavailable):
            await client.multilock("a", "b").acquire(timeout=timeout)
    await proxy.heal()
    await until_free(other, "a")
    await until_free(other, "b")


async def test_multilock_waits_without_end_though_one_of_its_locks_tries_once(
    proxy: FaultProxy, make_client: MakeClient
) -> None:
    other, client = await make_client(), await make_client(proxy.url)
    proxy.delay(0.05)
    async with held_elsewhere(other.lock("a")):
        both = client.multilock("a", client.lock("b", timeout=0))
        task = asyncio.create_task(both.acquire(timeout=None))
        await asyncio.sleep(2.2)
    await (await task).release()


async def test_multilock_that_tries_once_takes_as_long_as_the_store_answers(
    proxy: FaultProxy, make_client: MakeClient
) -> None:
    client = await make_client(proxy.url)
    proxy.delay(0.3)
    leases = await client.multilock(*"abcdefgh").acquire(timeout=0)
    assert leases.held
    proxy.delay(0)
    await leases.release()


async def test_multilock_that_is_cancelled_while_the_store_is_silent_ends_within_a_second(
    proxy: FaultProxy, make_client: MakeClient
) -> None:
    other, client = await make_client(), await make_client(proxy.url)
    async with held_elsewhere(other.lock("b")):
        task = asyncio.create_task(client.multilock("a", "b").acquire())
        await until_waiting(other, "b")
        proxy.stall()
        task.cancel()
        async with takes(at_most=1.2):
            with pytest.raises(asyncio.CancelledError):
                await task
    await proxy.heal()
    await until_free(other, "a")


async def test_timeout_while_the_store_is_away_is_not_an_acquire_timeout(
    proxy: FaultProxy, make_client: MakeClient
) -> None:
    client = await make_client(proxy.url)
    proxy.half_open()
    async with takes(at_least=0.39, at_most=0.6):
        with pytest.raises(BackendUnavailable) as error:
            await client.lock("x").acquire(timeout=0.4)
    assert not isinstance(error.value, AcquireTimeout)
    assert error.value.name == "x"
    assert "'x'" in str(error.value)
    await proxy.heal()


async def test_waiter_gives_up_after_unavailable_after(
    proxy: FaultProxy, make_client: MakeClient
) -> None:
    other, client = await make_client(), await make_client(proxy.url, unavailable_after=0.5)
    async with held_elsewhere(other.lock("x")):
        waiting = asyncio.create_task(client.lock("x", ttl=0.3).acquire())
        await until_waiting(other, "x")
        await proxy.refuse()
        proxy.cut()
        with pytest.raises(BackendUnavailable) as error:
            await waiting
        assert error.value.name == "x"
    await proxy.heal()
    await until_free(other, "x")


async def test_waiter_keeps_its_place_over_a_cut_connection(
    proxy: FaultProxy, make_client: MakeClient
) -> None:
    other, client = await make_client(), await make_client(proxy.url)
    async with held_elsewhere(other.lock("x")):
        first = asyncio.create_task(client.lock("x").acquire())
        await until_waiting(other, "x")
        second = asyncio.create_task(other.lock("x").acquire())
        await until_waiting(other, "x", 2)
        assert proxy.cut() == 2
    lease = await first
    assert not second.done()
    await lease.release()
    await (await second).release()


async def test_leaving_returns_within_a_second_and_the_release_goes_on(
    proxy: FaultProxy, make_client: MakeClient
) -> None:
    other, client = await make_client(), await make_client(proxy.url)
    lock = client.lock("x", ttl=30)
    await lock.__aenter__()
    proxy.stall()
    async with takes(at_most=1.0):
        await lock.__aexit__(None, None, None)
    assert await other.lock("x").locked()
    await proxy.heal()
    await until_free(other, "x")


async def test_leaving_keeps_the_exception_of_the_body_while_the_store_is_away(
    proxy: FaultProxy, make_client: MakeClient
) -> None:
    client = await make_client(proxy.url)
    with pytest.raises(ValueError, match="mine"):
        async with client.lock("x"):
            proxy.stall()
            raise ValueError("mine")
    await proxy.heal()


async def test_unconfirmed_leaving_does_not_wait_for_the_store(
    proxy: FaultProxy, make_client: MakeClient
) -> None:
    other, client = await make_client(), await make_client(proxy.url)
    lock = client.lock("x", confirm_release=False)
    await lock.__aenter__()
    proxy.stall()
    async with takes(at_most=0.2):
        await lock.__aexit__(None, None, None)
    await proxy.heal()
    await until_free(other, "x")


async def test_release_by_hand_retries_until_the_local_deadline(
    proxy: FaultProxy, make_client: MakeClient
) -> None:
    client = await make_client(proxy.url)
    # Longer than the silence after which a connection is given up: it has to try on another one.
    lease = await client.lock("x", ttl=1.3, auto_extend=False).acquire()
    proxy.half_open()
    deadline = time.monotonic() + lease.remaining()
    async with stalls() as stalled:
        with pytest.raises(LockLost) as lost:
            await lease.release()
        assert deadline - 0.01 <= time.monotonic() <= deadline + 0.1 + stalled()
    assert lost.value.reason == "expired"
    assert lost.value.name == "x"
    assert not is_held(lease)
    with pytest.raises(NotHeld):
        await lease.release()
    await proxy.heal()


async def test_release_by_hand_succeeds_once_the_store_is_back(
    proxy: FaultProxy, make_client: MakeClient
) -> None:
    other, client = await make_client(), await make_client(proxy.url)
    lease = await client.lock("x", ttl=20).acquire()
    proxy.cut()
    await lease.release()
    assert not await other.lock("x").locked()


async def test_holder_that_cannot_extend_is_told_before_the_next_is_in(
    proxy: FaultProxy, make_client: MakeClient
) -> None:
    other, client = await make_client(), await make_client(proxy.url)
    entered: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
    told: list[float] = []

    async def body() -> None:
        async with client.lock("x", ttl=0.8) as lease:
            proxy.half_open()
            entered.set_result(lease)
            try:
                await until_cancelled()
            finally:
                told.append(time.monotonic())

    holding = asyncio.create_task(body())
    first = await entered
    async with stalls() as stalled:
        lease = await other.lock("x").acquire()
        assert not is_held(first)
        next_is_in = time.monotonic() + stalled()
    with pytest.raises(LockLost) as lost:
        await holding
    assert lost.value.reason == "expired"
    assert told[0] <= next_is_in
    await lease.release()
    await proxy.heal()


async def test_release_that_failed_is_logged_once_and_not_for_a_lease_that_was_lost(
    proxy: FaultProxy, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = await make_client(proxy.url, ttl=1)
    with pytest.raises(LockLost):
        async with client.lock("lost"):
            async with client.lock("left"):
                proxy.half_open()
            await until_cancelled()
    assert client._core.session is not None
    requests = client._core.session.register.requests
    async with asyncio.timeout(PATIENCE):
        await until(lambda: not requests)
    records = [one for one in caplog.records if getattr(one, "event", "") == "release_failed"]
    assert [one.lock for one in records] == ["left"]  # type: ignore[attr-defined]
    assert "had no answer until its lease ended" in records[0].getMessage()


async def test_extend_by_hand_retries_until_the_store_is_back(
    proxy: FaultProxy, make_client: MakeClient
) -> None:
    client = await make_client(proxy.url)
    async with client.lock("x", ttl=5, auto_extend=False) as lease:
        proxy.cut()
        await lease.extend()
        assert is_held(lease)
        assert lease.remaining() > 4


async def test_outage_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="aiodlock"), pytest.raises(TimeoutError):
        async with asyncio.timeout(2), Client(f"unix://{tmp_path}/none"):
            pass
    attempts = [r for r in caplog.records if getattr(r, "event", "") == "no_connection"]
    assert len(attempts) > 4
    assert sum(record.levelno == logging.WARNING for record in attempts) == 1


async def test_end_of_a_server_is_logged_once_by_an_idle_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both connections are lost, that of the calls and that of the notices."""
    with EmbeddedServer() as server, caplog.at_level(logging.DEBUG, logger="aiodlock"):
        async with Client(server.url):
            server.kill()
            await until(lambda: caplog.text.count("no connection") > 4)
    told = [r for r in caplog.records if getattr(r, "event", "") == "no_connection"]
    assert sum(record.levelno >= logging.WARNING for record in told) == 1


@pytest.mark.stores("valkey9")
async def test_short_timeout_on_a_silent_store_is_no_acquire_timeout() -> None:
    server = EmbeddedServer(find_valkey9())
    server.start()
    try:
        async with Client(server.url) as client:
            server.pause()
            with pytest.raises(BackendUnavailable):
                await client.lock("x").acquire(timeout=0.05)
            server.resume()
    finally:
        server.stop()
