# ruff: noqa: PT012
"""Who gets in again, with what, and who frees the name."""

from __future__ import annotations

import asyncio
import enum
import sys
import textwrap

import pytest

import aiodlock
from aiodlock.testing import expire

from ..conftest import MakeClient
from ..proxy import FaultProxy
from ..scenes import (
    SOON,
    held_elsewhere,
    is_free,
    settled,
    soon,
    takes,
    until,
    until_cancelled,
    until_free,
    until_waiting,
)
from ..servers import BEYOND, Store

pytestmark = pytest.mark.stores("memory", "fakeredis", "valkey9", *BEYOND)


async def test_a_task_gets_in_again_with_the_same_token(client: aiodlock.Client) -> None:
    lock = client.lock("x")
    async with lock as outer:
        async with lock as inner, client.lock("x") as third:
            assert inner.token == outer.token == third.token
            assert inner.owner == outer.owner
            assert inner.sequencer == outer.sequencer
        assert outer.held
        assert (await client.inspect("x")).holders[0].token == outer.token
    assert await is_free(client, "x")


async def test_in_any_way_of_acquiring(client: aiodlock.Client) -> None:
    async with client.lock("x") as outer:
        leases = [
            await client.lock("x").acquire(),
            await client.lock("x").acquire(timeout=0),
            await client.lock("x").acquire_nowait(),
            await client.rwlock("x").write.acquire(),
        ]
        assert {lease.token for lease in leases} == {outer.token}
        for lease in leases:
            assert await client.lock("x").locked()
            await lease.release()
        assert outer.held


async def test_shared_again_in_the_same_task(client: aiodlock.Client) -> None:
    lock = client.rwlock("x").read
    async with lock as outer, lock as inner:
        assert outer.token == inner.token


@pytest.mark.stores("valkey9")
async def test_without_a_round_trip(proxy: FaultProxy) -> None:
    async with aiodlock.Client(proxy.url) as client:
        async with client.lock("x"):
            await settled(client)
            proxy.forget()
            async with client.lock("x"):
                pass
            assert not [command for command in proxy.log if b"{x}" in command.raw]


async def test_with_the_outermost_options(client: aiodlock.Client) -> None:
    async with client.lock("x", ttl=9) as outer:
        async with client.lock("x", ttl=1, on_lost="flag") as inner:
            assert inner.ttl == outer.ttl == 9
            assert inner.remaining() > 5


async def test_free_when_every_acquisition_was_released_in_any_order(
    client: aiodlock.Client,
) -> None:
    first = await client.lock("x").acquire()
    second = await client.lock("x").acquire()
    await first.release()
    assert not first.held
    assert second.held
    assert await client.lock("x").locked()
    await second.release()
    assert await is_free(client, "x")


async def test_released_twice_does_not_count_twice(client: aiodlock.Client) -> None:
    first = await client.lock("x").acquire()
    second = await client.lock("x").acquire()
    await second.release()
    with pytest.raises(aiodlock.NotHeld):
        await second.release()
    assert first.held
    await first.release()


async def test_lock_release_releases_the_latest_hold(client: aiodlock.Client) -> None:
    lock = client.lock("x")
    first, second = await lock.acquire(), await lock.acquire()
    await lock.release()
    assert (first.held, second.held) == (True, False)
    await lock.release()
    assert not first.held
    with pytest.raises(aiodlock.NotHeld):
        await lock.release()


async def test_on_a_lost_lease_it_gets_lock_lost(client: aiodlock.Client) -> None:
    with pytest.raises(aiodlock.LockLost) as raised:
        async with client.lock("x", on_lost="flag") as lease:
            expire(lease)
            for attempt in (
                client.lock("x").acquire(),
                client.lock("x").acquire_nowait(),
                client.lock("x").acquire(timeout=0),
            ):
                with pytest.raises(aiodlock.LockLost) as inner:
                    await attempt
                assert inner.value.reason == "expired"
    assert raised.value.reason == "expired"
    async with client.lock("x"):
        pass


async def test_a_loss_cancels_nested_bodies_and_comes_out_of_the_outermost(
    client: aiodlock.Client,
) -> None:
    lock = client.lock("x")
    with pytest.raises(aiodlock.LockLost):
        async with lock as outer:
            with pytest.raises(aiodlock.LockLost):
                async with lock:
                    expire(outer)
                    await until_cancelled()
            assert not outer.held
    assert await is_free(client, "x")


async def test_a_task_in_the_place_of_a_dead_one_is_another_owner(client: aiodlock.Client) -> None:
    """The id of a task is used again soon after it is gone."""
    kept = []

    async def take() -> None:
        kept.append(await client.lock("x").acquire())

    await asyncio.create_task(take())

    async def try_it() -> bool:
        try:
            await (await client.lock("x").acquire_nowait()).release()
        except aiodlock.WouldBlock:
            return False
        return True

    for _ in range(50):
        assert not await asyncio.create_task(try_it())
    await kept[0].release()


async def test_a_given_owner_is_shared_by_tasks_and_clients(make_client: MakeClient) -> None:
    one, other = await make_client(), await make_client()
    async with one.lock("x", owner="job") as first:
        async with other.lock("x", owner="job") as second:
            assert second.token == first.token
            assert second.owner == "job"
            info = await one.inspect("x")
            assert sum(holder.count for holder in info.holders) == 2
            assert {holder.owner for holder in info.holders} == {"job"}
            with pytest.raises(aiodlock.WouldBlock):
                await other.lock("x", owner="another").acquire_nowait()

            async def task() -> int:
                async with one.lock("x", owner="job") as third:
                    return third.token

            assert await asyncio.create_task(task()) == first.token
        assert first.held
        info = await one.inspect("x")
        assert sum(holder.count for holder in info.holders) == 1
    assert await is_free(one, "x")


async def test_the_last_of_an_owner_to_leave_frees_the_name(make_client: MakeClient) -> None:
    one, other = await make_client(), await make_client()
    first = await one.lock("x", owner="job").acquire()
    second = await other.lock("x", owner="job").acquire()
    waiting = asyncio.create_task(one.lock("x").acquire())
    await until_waiting(one, "x")
    await first.release()
    assert second.held
    await settled(one)
    assert not waiting.done()
    await second.release()
    third = await waiting
    assert third.token > second.token
    await third.release()


@pytest.mark.stores("valkey9")
async def test_an_owner_of_several_processes(store: Store, client: aiodlock.Client) -> None:
    program = textwrap.dedent(
        f"""
        import asyncio, aiodlock
        async def main():
            async with aiodlock.Client({store.url!r}) as client:
                async with client.lock("x", owner="job", timeout=5) as lease:
                    print(lease.token)
        asyncio.run(main())
        """
    )
    async with client.lock("x", owner="job") as lease:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        assert int(out) == lease.token
        assert lease.held


async def test_losing_one_hold_of_an_owner_leaves_the_others(make_client: MakeClient) -> None:
    one, other = await make_client(), await make_client()
    first = await one.lock("x", owner="job", ttl=0.3, auto_extend=False).acquire()
    async with other.lock("x", owner="job") as second:
        assert (await first.wait_lost()).reason == "expired"

        async def one_left() -> bool:
            info = await other.inspect("x")
            return sum(holder.count for holder in info.holders) == 1

        await until(one_left)
        assert second.held
    with pytest.raises(aiodlock.LockLost):
        await first.release()


async def test_the_default_owner_equals_no_string_of_a_user(client: aiodlock.Client) -> None:
    async with client.lock("x") as lease:
        owner = lease.owner
        with pytest.raises(aiodlock.WouldBlock):
            await client.lock("x", owner=owner).acquire_nowait()
        shown = (await client.inspect("x")).holders[0].owner
        with pytest.raises(aiodlock.WouldBlock):
            await client.lock("x", owner=shown).acquire_nowait()


async def test_an_owner_string_in_the_same_task_is_not_the_task(client: aiodlock.Client) -> None:
    async with client.lock("x"):
        with pytest.raises(aiodlock.WouldBlock):
            await client.lock("x", owner="me").acquire_nowait()


async def test_exclusive_then_shared_is_allowed(client: aiodlock.Client) -> None:
    both = client.rwlock("x")
    async with both.write as write, both.read as read:
        assert read.mode == "shared"
        assert read.token == write.token
        assert (write.held, read.held) == (True, True)
    assert await is_free(client, "x")


async def test_releasing_the_exclusive_hold_first_is_a_downgrade(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    both = client.rwlock("x")
    write = await both.write.acquire()
    read = await both.read.acquire()
    with pytest.raises(aiodlock.WouldBlock):
        await other.rwlock("x").read.acquire_nowait()
    await write.release()
    assert read.held
    async with held_elsewhere(other.rwlock("x").read):
        assert {holder.mode for holder in (await client.inspect("x")).holders} == {"shared"}
        with pytest.raises(aiodlock.WouldBlock):
            await other.lock("x", owner="writer").acquire_nowait()
    await read.release()
    assert await is_free(client, "x")


async def test_a_downgrade_lets_waiting_readers_in(client: aiodlock.Client) -> None:
    both = client.rwlock("x")
    write = await both.write.acquire()
    read = await both.read.acquire()
    waiting = asyncio.create_task(both.read.acquire())
    await until_waiting(client, "x")
    await write.release()
    other = await soon(waiting)
    assert read.held
    await other.release()
    await read.release()


async def test_shared_then_exclusive_raises_deadlock_at_once(client: aiodlock.Client) -> None:
    both = client.rwlock("x")
    async with both.read as lease, takes(at_most=SOON):
        for attempt in (
            both.write.acquire(),
            both.write.acquire_nowait(),
            both.write.acquire(timeout=0),
            client.lock("x").acquire(timeout=60),
            client.multilock("x", "y").acquire(),
        ):
            with pytest.raises(aiodlock.DeadlockError) as raised:
                await attempt
            assert raised.value.name == "x"
        assert lease.held
    assert await is_free(client, "x", "y")


async def test_shared_then_exclusive_of_a_given_owner_raises_deadlock(
    make_client: MakeClient,
) -> None:
    one, other = await make_client(), await make_client()
    async with one.rwlock("x", owner="job").read:
        async with takes(at_most=SOON):
            with pytest.raises(aiodlock.DeadlockError):
                await other.lock("x", owner="job").acquire()


async def test_exclusive_again_after_exclusive_and_shared(client: aiodlock.Client) -> None:
    both = client.rwlock("x")
    async with both.write as write, both.read, both.write as again:
        assert again.token == write.token
    assert await is_free(client, "x")


async def test_other_readers_do_not_make_it_a_deadlock(client: aiodlock.Client) -> None:
    async with held_elsewhere(client.rwlock("x").read):
        with pytest.raises(aiodlock.WouldBlock):
            await client.lock("x").acquire_nowait()


async def test_a_multilock_gets_in_again(client: aiodlock.Client) -> None:
    async with client.lock("a") as lease:
        async with client.multilock("a", "b") as leases:
            assert leases["a"].token == lease.token
        assert lease.held
        assert await is_free(client, "b")


async def test_a_name_released_may_be_acquired_anew_with_a_larger_token(
    client: aiodlock.Client,
) -> None:
    tokens = []
    for _ in range(3):
        async with client.lock("x") as lease, client.lock("x"):
            tokens.append(lease.token)
    assert tokens == sorted(set(tokens))
    await until_free(client, "x")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="wait_for has no task of its own there")
async def test_wait_for_is_told_to_use_timeout(client: aiodlock.Client) -> None:
    lock = client.lock("x")
    lease = await asyncio.wait_for(lock.acquire(), 5)
    with pytest.raises(aiodlock.NotHeld, match="timeout="):
        await lock.release()
    await lease.release()


async def test_a_name_may_be_a_str_of_another_class(client: aiodlock.Client) -> None:
    class Name(str, enum.Enum):  # noqa: UP042
        REPORT = "report"

    async with client.lock(Name.REPORT) as lease, client.lock("report") as again:
        assert lease.name == "report"
        assert again.token == lease.token
        assert await client.check_sequencer(lease.sequencer)
