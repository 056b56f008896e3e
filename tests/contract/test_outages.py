# ruff: noqa: PT012
"""What the contract says of a store that is away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis.exceptions import RedisError

import aiodlock

from ..proxy import FaultProxy, named
from ..scenes import (
    PATIENCE,
    SOON,
    cancelled,
    held_elsewhere,
    is_free,
    takes,
    until,
    until_cancelled,
    until_extended,
    until_free,
    until_waiting,
)
from ..servers import Store

pytestmark = pytest.mark.stores("valkey9")


async def away(proxy: FaultProxy, how: str) -> None:
    if how == "stalled":
        proxy.stall()
    elif how == "half open":
        proxy.half_open()
    else:
        await proxy.refuse()
        proxy.cut()


HOW = pytest.mark.parametrize("how", ["stalled", "half open", "refused"])

Use = Callable[[aiodlock.Client], Awaitable[object]]


async def until_free_again(client: aiodlock.Client, *names: str) -> None:
    """As until_free, from the moment on at which the client has reconnected."""

    async def free() -> bool:
        try:
            return await is_free(client, *names)
        except aiodlock.BackendUnavailable:
            return False

    await until(free, f"freedom of {names}", within=20)


async def list_locks(client: aiodlock.Client) -> None:
    async for _ in client.locks():
        pass


AT_ONCE: dict[str, Use] = {
    "acquire_nowait": lambda client: client.lock("x").acquire_nowait(),
    "timeout=0": lambda client: client.lock("x").acquire(timeout=0),
    "shared": lambda client: client.rwlock("x").read.acquire_nowait(),
    "semaphore": lambda client: client.semaphore("x", 1).acquire_nowait(),
    "semaphore timeout=0": lambda client: client.semaphore("x", 1).acquire(timeout=0),
    "multilock timeout=0": lambda client: client.multilock("x", "y").acquire(timeout=0),
    "inspect": lambda client: client.inspect("x"),
    "break_lock": lambda client: client.break_lock("x"),
    "locked": lambda client: client.lock("x").locked(),
    "locks": list_locks,
    "check_sequencer": lambda client: client.check_sequencer("x:exclusive:1"),
}


@HOW
async def test_what_does_not_wait_raises_within_two_seconds(proxy: FaultProxy, how: str) -> None:
    async with aiodlock.Client(proxy.url, close_timeout=0.1) as client:
        sequencer = ""
        async with client.lock("s") as lease:
            sequencer = lease.sequencer
        await away(proxy, how)

        async def outcome(use: Use) -> BaseException | None:
            async with takes(at_most=2.2):
                try:
                    await use(client)
                except aiodlock.BackendUnavailable as error:
                    return error
            return None

        uses = {**AT_ONCE, "check_sequencer": lambda client: client.check_sequencer(sequencer)}
        outcomes = await asyncio.gather(*(outcome(use) for use in uses.values()))
        for what, error in zip(uses, outcomes, strict=True):
            assert isinstance(error, aiodlock.BackendUnavailable), what
            assert isinstance(error, ConnectionError)
            assert error.__cause__ is not None or how != "refused", what
        await proxy.heal()
        await until_free_again(client, "x", "y")


@pytest.mark.parametrize("use", AT_ONCE.values(), ids=AT_ONCE)
async def test_what_does_not_wait_reconnects_once(proxy: FaultProxy, use: Use) -> None:
    async with aiodlock.Client(proxy.url) as client:
        proxy.cut()
        held = await use(client)
        if isinstance(held, aiodlock.Lease | aiodlock.MultiLease):
            await held.release()


@HOW
async def test_acquire_raises_when_nothing_answered_for_unavailable_after(
    proxy: FaultProxy, how: str
) -> None:
    async with aiodlock.Client(proxy.url, unavailable_after=0.6) as client:
        await away(proxy, how)
        for timeout in (None, 60.0):
            async with takes(at_least=0.4, at_most=0.6 + SOON):
                with pytest.raises(aiodlock.BackendUnavailable) as raised:
                    await client.lock("x").acquire(timeout=timeout)
            assert raised.value.name == "x"
            assert "'x'" in str(raised.value)
        await proxy.heal()
        await until_free_again(client, "x")


@HOW
async def test_acquire_raises_unavailable_at_its_timeout(proxy: FaultProxy, how: str) -> None:
    async with aiodlock.Client(proxy.url, unavailable_after=30) as client:
        await away(proxy, how)
        async with takes(at_least=0.35, at_most=0.4 + SOON):
            with pytest.raises(aiodlock.BackendUnavailable):
                await client.lock("x").acquire(timeout=0.4)
        await proxy.heal()
        await until_free_again(client, "x")


@HOW
async def test_a_waiter_is_told_after_unavailable_after(
    real_store: Store, proxy: FaultProxy, how: str
) -> None:
    async with (
        aiodlock.Client(real_store.url) as other,
        held_elsewhere(other.lock("x")),
        aiodlock.Client(proxy.url, unavailable_after=1.0, waiter_ttl=0.6) as client,
    ):
        async with takes(at_least=0.99, at_most=PATIENCE):
            waiting = asyncio.create_task(client.lock("x").acquire())
            await until_waiting(other, "x")
            await away(proxy, how)
            async with takes(at_most=1.0 + SOON):
                with pytest.raises(aiodlock.BackendUnavailable):
                    await waiting
        await until_waiting(other, "x", 0)
        await proxy.heal()


async def test_a_waiter_keeps_its_place_across_a_lost_connection(
    real_store: Store, proxy: FaultProxy
) -> None:
    async with aiodlock.Client(real_store.url) as other, aiodlock.Client(proxy.url) as client:
        order = []

        async def take(who: aiodlock.Client, label: str) -> None:
            async with who.lock("x"):
                order.append(label)

        tasks = []
        async with held_elsewhere(other.lock("x")):
            for number, (who, label) in enumerate(
                [(client, "a"), (other, "b"), (client, "c"), (other, "d")]
            ):
                tasks.append(asyncio.create_task(take(who, label)))
                await until_waiting(other, "x", number + 1)
            await proxy.refuse()
            proxy.cut()
            await asyncio.sleep(0.2)
            await proxy.accept()
            await until(lambda: proxy.open_connections)
        await asyncio.gather(*tasks)
        assert order == ["a", "b", "c", "d"]


async def test_a_waiter_that_is_back_too_late_queues_at_the_end(
    real_store: Store, proxy: FaultProxy
) -> None:
    async with (
        aiodlock.Client(real_store.url) as other,
        aiodlock.Client(proxy.url, waiter_ttl=0.4) as client,
    ):
        order = []

        async def take(who: aiodlock.Client, label: str) -> None:
            async with who.lock("x"):
                order.append(label)

        async with held_elsewhere(other.lock("x")):
            first = asyncio.create_task(take(client, "late"))
            await until_waiting(other, "x", 1)
            second = asyncio.create_task(take(other, "in time"))
            await until_waiting(other, "x", 2)
            await proxy.refuse()
            proxy.cut()
            await until_waiting(other, "x", 1)
            await proxy.accept()
            await until_waiting(other, "x", 2)
        await asyncio.gather(first, second)
        assert order == ["in time", "late"]


async def test_a_waiter_is_granted_although_its_wake_up_was_lost(
    real_store: Store, proxy: FaultProxy
) -> None:
    async with aiodlock.Client(real_store.url) as other, aiodlock.Client(proxy.url) as client:
        async with held_elsewhere(other.lock("x")):
            waiting = asyncio.create_task(client.lock("x").acquire())
            await until_waiting(other, "x")
            await proxy.refuse()
            proxy.cut()
        await proxy.accept()
        async with takes(at_most=8):
            lease = await waiting
        assert lease.held
        await lease.release()


@pytest.mark.parametrize("how", ["cut", "refused for a moment"])
async def test_a_holder_survives_a_short_outage(proxy: FaultProxy, how: str) -> None:
    async with aiodlock.Client(proxy.url) as client:
        async with client.lock("x", ttl=4) as lease:
            if how == "cut":
                proxy.cut()
            else:
                await proxy.refuse()
                proxy.cut()
                await asyncio.sleep(0.4)
                await proxy.accept()
            await until_extended(lease)
            lease.ensure_held()


@HOW
async def test_a_holder_that_cannot_extend_is_told_within_its_ttl(
    proxy: FaultProxy, how: str
) -> None:
    async with aiodlock.Client(proxy.url, close_timeout=0.2) as client:
        async with takes(at_most=0.6 + 1.3):
            with pytest.raises(aiodlock.LockLost) as raised:
                async with client.lock("x", ttl=0.6):
                    await away(proxy, how)
                    await until_cancelled()
        assert raised.value.reason == "expired"
        await proxy.heal()


@pytest.mark.parametrize("lost", ["reply", "command"])
async def test_a_lost_reply_leaves_no_ghost(proxy: FaultProxy, lost: str) -> None:
    """Nor does a lost command."""
    drop = proxy.drop_reply if lost == "reply" else proxy.drop_command
    async with aiodlock.Client(proxy.url) as client:
        await is_free(client, "x")
        for nth in range(1, 4):
            drop(named("EVALSHA", nth))
            async with client.lock("x"):
                pass
            await until_free(client, "x")


async def test_cancelled_while_the_store_is_away_leaves_no_ghost(proxy: FaultProxy) -> None:
    async with aiodlock.Client(proxy.url) as client:
        proxy.stall()
        before = proxy.command_count
        waiting = asyncio.create_task(client.lock("x").acquire())
        await until(lambda: proxy.command_count > before, "the acquire has been sent")
        async with takes(at_most=1.3):
            await cancelled(waiting)
        await proxy.heal()
        await until_free_again(client, "x")


async def test_a_store_that_refuses_is_a_backend_error_with_its_cause(
    real_store: Store, client: aiodlock.Client
) -> None:
    raw = await real_store.raw()
    async with client.lock("warm"):
        pass
    await raw.config_set("maxmemory", "1")
    lock = client.lock("x")
    attempts: list[Callable[[], Awaitable[object]]] = [
        lambda: lock.acquire(timeout=5),
        lock.acquire_nowait,
    ]
    for attempt in attempts:
        async with takes(at_most=SOON):
            with pytest.raises(aiodlock.BackendError) as raised:
                await attempt()
        assert not isinstance(raised.value, aiodlock.BackendUnavailable)
        assert isinstance(raised.value.__cause__, RedisError), "the driver's error"
        assert raised.value.name == "x"
        assert "'x'" in str(raised.value)
    await raw.config_set("maxmemory", "0")
    assert await is_free(client, "x")


async def test_a_store_that_forgot_its_scripts_goes_on(
    real_store: Store, client: aiodlock.Client
) -> None:
    raw = await real_store.raw()
    async with client.lock("x"):
        await raw.script_flush()
    async with client.lock("x"):
        pass
