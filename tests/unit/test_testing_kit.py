"""`aiodlock.testing`, as a user's tests use it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from unittest.mock import create_autospec

import pytest

import aiodlock
from aiodlock import AcquireTimeout, BackendError, BackendUnavailable, LockLost, sync
from aiodlock.testing import (
    drop_next_notice,
    expire,
    fail_next_call,
    hold,
    lose,
    memory_client,
    memory_url,
)

from ..scenes import PATIENCE, takes, until_cancelled, until_waiting


def test_needs_no_plugin() -> None:
    async def use() -> int:
        async with memory_client() as client, client.lock("x") as lease:
            return lease.token

    # A plain test with a loop of its own, as without pytest-asyncio.
    with asyncio.Runner() as runner:
        assert runner.run(use()) > 0


USERS_TEST = """
import asyncio
from aiodlock.testing import memory_client

def test_it(aiodlock_client, aiodlock_store):
    async def use():
        async with aiodlock_client as client, memory_client(aiodlock_store) as other:
            async with client.lock("x"):
                assert await other.lock("x").locked()
    asyncio.run(use())
"""


def test_fixtures_need_no_other_plugin(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["aiodlock.testing"]\n')
    (tmp_path / "test_it.py").write_text(USERS_TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:asyncio", "-p", "no:anyio"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_clients_share_a_store_by_its_url() -> None:
    url = memory_url()
    async with memory_client(url) as one, memory_client(url) as two, memory_client() as alone:
        async with one.lock("x"):
            assert await two.lock("x").locked()
            assert not await alone.lock("x").locked()


async def test_expired_lease_cancels_its_body_in_milliseconds_and_lets_the_next_in() -> None:
    async with memory_client() as client:
        cleaned = False
        lock = client.lock("x")
        waiting: asyncio.Task[object] | None = None

        async def body() -> None:
            nonlocal cleaned, waiting
            async with lock as lease:
                waiting = asyncio.create_task(client.lock("x").acquire(timeout=PATIENCE))
                expire(lease)
                assert not lease.held
                try:
                    await until_cancelled()
                finally:
                    cleaned = True

        async with takes(at_most=0.5):
            with pytest.raises(LockLost) as caught:
                await body()
            assert caught.value.reason == "expired"
            assert cleaned
            assert waiting is not None
            await waiting
        await client.break_lock("x")


async def test_lost_lease_has_the_reason_and_its_lock_is_free() -> None:
    async with memory_client() as client:
        lease = await client.lock("x").acquire()
        await lose(lease, "taken_over")
        assert (await lease.wait_lost()).reason == "taken_over"
        assert not await client.lock("x").locked()
        with pytest.raises(LockLost):
            await lease.release()
        with pytest.raises(ValueError):
            lose(lease, "gone")


async def test_unknown_reason_is_refused() -> None:
    async with memory_client() as client, client.lock("x") as lease:
        with pytest.raises(ValueError):
            lose(lease, "bored")  # type: ignore[arg-type]


async def test_what_is_no_lease_of_the_client_is_refused_with_what_to_do() -> None:
    async with memory_client() as client, client.multilock("a", "b") as leases:
        with pytest.raises(TypeError, match="give one of its leases"):
            expire(leases)  # type: ignore[arg-type]

    def in_thread() -> None:
        with sync.Client(memory_url()) as locks, locks.lock("x") as lease:
            with pytest.raises(TypeError, match="break_lock"):
                lose(lease, "gone")  # type: ignore[arg-type]
            locks.break_lock("x")
            assert lease.wait_lost().reason == "broken"

    with pytest.raises(LockLost):
        await asyncio.to_thread(in_thread)


async def test_held_lock_keeps_also_the_same_task_out() -> None:
    async with memory_client() as client, hold(client, "x"):
        with pytest.raises(AcquireTimeout):
            await client.lock("x").acquire(timeout=0)


async def test_waiter_is_granted_although_its_notice_was_dropped() -> None:
    url = memory_url()
    async with memory_client(url) as one, memory_client(url, waiter_ttl=1.5) as two:
        async with one.lock("x"):
            waiting = asyncio.create_task(two.lock("x").acquire(timeout=PATIENCE))
            await until_waiting(one, "x")
            dropped = drop_next_notice(two)
        lease = await waiting
        assert dropped.happened
        await lease.release()


async def test_next_call_fails_once() -> None:
    async with memory_client() as client:
        fail_next_call(client)
        with pytest.raises(BackendUnavailable):
            await client.lock("x").acquire()
        fail_next_call(client, BackendError("no"))
        with pytest.raises(BackendError, match="no"):
            await client.inspect("x")
        async with client.lock("x") as lease:
            fail_next_call(client)
            with pytest.raises(BackendUnavailable):
                await lease.extend()
            assert lease.held


async def test_injection_is_taken_back_at_the_end_of_its_block() -> None:
    async with memory_client() as client:
        with fail_next_call(client) as unused:
            pass
        assert not unused.happened
        async with client.lock("x"):
            pass


async def test_two_injections_let_the_next_two_calls_fail() -> None:
    async with memory_client() as client:
        lock = client.lock("x")
        with fail_next_call(client) as first, fail_next_call(client, ValueError("two")) as second:
            with pytest.raises(BackendUnavailable):
                await lock.acquire()
            with pytest.raises(ValueError, match="two"):
                await lock.acquire()
            await (await lock.acquire()).release()
        assert first.happened
        assert second.happened


async def test_injection_that_is_taken_back_leaves_the_others() -> None:
    async with memory_client() as client:
        with fail_next_call(client, ValueError("stays")):
            with fail_next_call(client):
                pass
            with pytest.raises(ValueError, match="stays"):
                await client.lock("x").acquire()
        await (await client.lock("x").acquire()).release()


async def test_somebody_who_holds_may_have_a_name() -> None:
    async with memory_client() as client, hold(client, "x", owner="the other worker"):
        assert (await client.inspect("x")).holders[0].owner == "the other worker"


def test_what_is_no_client_for_tasks_is_refused() -> None:
    for inject in (fail_next_call, drop_next_notice):
        with pytest.raises(TypeError, match=r"client must be an aiodlock\.Client"):
            inject(sync.Client("memory://"))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["Client", "Lease", "Lock", "MultiLock", "Semaphore"])
async def test_mock_of_a_class_can_be_entered(kind: str) -> None:
    mock = create_autospec(getattr(aiodlock, kind), instance=True)
    entered = False
    async with mock:
        entered = True
    assert entered
