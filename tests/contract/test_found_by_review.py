"""Promises that a review of the code found broken."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings

import pytest

import aiodlock

from ..scenes import PATIENCE, until, until_cancelled, until_free, until_held
from ..servers import Store


async def test_exclusive_hold_is_entered_again_also_behind_a_later_shared_one(
    client: aiodlock.Client,
) -> None:
    both = client.rwlock("x")
    async with both.write as first, both.read, both.write as again:
        assert again.token == first.token
    await until_free(client, "x")


async def test_body_is_cancelled_also_when_a_thread_was_the_first_to_notice(
    client: aiodlock.Client,
) -> None:
    noticed = threading.Event()

    def notice(lease: aiodlock.Lease) -> None:
        try:
            while True:
                lease.ensure_held()
                time.sleep(0.005)
        finally:
            noticed.set()

    with pytest.raises(aiodlock.LockLost):  # noqa: PT012
        async with client.lock("x", ttl=0.2, auto_extend=False) as lease:
            noticing = asyncio.get_running_loop().run_in_executor(None, notice, lease)
            assert noticed.wait(PATIENCE)  # the loop is blocked: only the thread can see it
            await until_cancelled()
    with pytest.raises(aiodlock.LockLost):
        await noticing


async def test_looking_at_lost_does_not_keep_the_body_from_being_cancelled(
    client: aiodlock.Client,
) -> None:
    with pytest.raises(aiodlock.LockLost):  # noqa: PT012
        async with client.lock("x", ttl=0.1, auto_extend=False) as lease:
            time.sleep(0.2)  # the loop is blocked, and the lease over when it runs again
            assert lease.lost is not None
            await until_cancelled()


async def test_forgotten_lease_is_released_also_when_warnings_are_errors(
    client: aiodlock.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", ignored.append)
    lease: aiodlock.Lease | None = await asyncio.create_task(client.lock("x").acquire())
    assert lease is not None
    await asyncio.sleep(0)  # the loop has handed the task on, and forgets it
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        lease = None
    assert len(ignored) == 1
    await until_free(client, "x")


async def test_acquisitions_whose_lease_is_discarded_leave_nothing_at_the_task(
    client: aiodlock.Client,
) -> None:
    lock = client.lock("x")

    async def worker() -> int:
        for _ in range(20):
            await lock.acquire()
            await lock.release()
        task = asyncio.current_task()
        callbacks = getattr(task, "_callbacks", None) or []
        return len(callbacks)

    assert await asyncio.create_task(worker()) <= 2  # who awaits it is one


async def test_margin_that_leaves_no_time_to_extend_is_refused(client: aiodlock.Client) -> None:
    with pytest.raises(ValueError, match="margin"):
        client.lock("x", ttl=1, margin=0.995)


async def test_extending_by_hand_again_and_again_takes_no_memory(client: aiodlock.Client) -> None:
    async with client.lock("x", ttl=3600) as lease:
        for _ in range(300):
            await lease.extend()
        assert client._session is not None
        assert len(client._session.extender._heap) < 200


async def test_waiting_for_the_loss_of_an_inner_lease_ends_with_its_release(
    client: aiodlock.Client,
) -> None:
    async with client.lock("x"):
        inner = await client.lock("x").acquire()
        waiting = asyncio.create_task(inner.wait_lost())
        await until(lambda: inner._place.watchers)
        await inner.release()
        with pytest.raises(aiodlock.NotHeld):
            await waiting


async def test_leaving_the_client_in_a_forked_child_releases_nothing_of_the_parent(
    client: aiodlock.Client,
) -> None:
    lease = await client.lock("x", on_lost="flag").acquire()
    session = client._session
    assert session is not None
    session.pid += 1  # as a child sees it
    with pytest.raises(RuntimeError, match="fork"):
        await client.__aexit__(None, None, None)
    session.pid -= 1
    client._session = session
    assert lease.held
    await lease.release()


async def test_leaving_the_client_waits_for_a_body_that_is_only_flagged(
    store: Store, client: aiodlock.Client
) -> None:
    leaving = aiodlock.Client(store.source)
    await leaving.__aenter__()
    told, finish = asyncio.Event(), asyncio.Event()

    async def body() -> None:
        async with leaving.lock("x", on_lost="flag") as lease:
            await lease.wait_lost()
            told.set()
            await finish.wait()

    working = asyncio.create_task(body())
    await until_held(client, "x")
    closing = asyncio.create_task(leaving.__aexit__(None, None, None))
    await told.wait()
    with pytest.raises(aiodlock.WouldBlock):
        await client.lock("x").acquire_nowait()
    finish.set()
    with pytest.raises(aiodlock.LockLost, match="closed"):
        await working
    await closing
    await (await client.lock("x").acquire_nowait()).release()


async def test_lost_shared_hold_of_a_block_is_told_also_to_who_asks_exclusively(
    client: aiodlock.Client,
) -> None:
    both = client.rwlock("name", ttl=0.1, auto_extend=False, on_lost="flag")
    with pytest.raises(aiodlock.LockLost):  # noqa: PT012
        async with both.read as lease:
            await lease.wait_lost()
            with pytest.raises(aiodlock.LockLost):
                await both.write.acquire()


async def test_lost_shared_hold_without_a_block_is_no_obstacle_to_asking_exclusively(
    client: aiodlock.Client,
) -> None:
    both = client.rwlock("name", ttl=0.1, auto_extend=False)
    lease = await both.read.acquire()
    await lease.wait_lost()
    async with both.write:
        pass
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_lease_is_the_body_of_one_task_at_a_time(client: aiodlock.Client) -> None:
    lease = await client.lock("name").acquire()
    entered, enough = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        async with lease:
            entered.set()
            await enough.wait()

    task = asyncio.create_task(first())
    await entered.wait()
    with pytest.raises(RuntimeError, match="another task"):
        await lease.__aenter__()
    assert lease.held
    enough.set()
    await task
    assert not lease.held
