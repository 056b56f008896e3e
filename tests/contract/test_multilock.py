"""multilock: several names, all or none."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import anyio
import pytest

import aiodlock
from aiodlock import (
    AcquireTimeout,
    Client,
    ClientClosed,
    DeadlockError,
    Lease,
    LockLost,
    MultiLease,
    MultiLock,
    NotHeld,
)
from aiodlock._clock import now
from aiodlock._departure import Departure
from aiodlock._model import Granted
from aiodlock._request import Request, State
from aiodlock.backends.kept_place import KeptPlace

from ..conftest import MakeClient
from ..proxy import FaultProxy, named
from ..scenes import (
    BRIEF,
    LASTING,
    PATIENCE,
    SOON,
    held_elsewhere,
    is_free,
    takes,
    until,
    until_cancelled,
    until_free,
    until_held,
    until_waiting,
)
from ..servers import Store

# -- what is taken ---------------------------------------------------------------------------------


async def test_all_names_are_held_in_the_body_and_free_after_it(client: Client) -> None:
    async with client.multilock("b", "a") as leases:
        assert leases.held
        assert leases.lost is None
        assert set(leases) == {"a", "b"}
        assert leases.tokens == {name: leases[name].token for name in ("a", "b")}
        for name in "ab":
            assert [h.token for h in (await client.inspect(name)).holders] == [leases[name].token]
    assert leases.remaining() == 0.0
    assert await is_free(client, "a", "b")


async def test_names_are_taken_in_the_order_of_their_bytes(client: Client) -> None:
    names = ["é", "z", "a", "B", "\U0001f600", "\uffee"]
    multilock = client.multilock(*names)
    assert multilock.names == tuple(sorted(names, key=str.encode))
    async with multilock as leases:
        assert list(leases) == list(multilock.names)
        assert list(leases.tokens.values()) == sorted(leases.tokens.values())


async def test_none_is_held_when_one_is_not_granted_in_time(client: Client) -> None:
    async with client.lock("b"):

        async def other() -> None:
            with pytest.raises(AcquireTimeout, match="'b'") as caught:
                await client.multilock("a", "b", "c", timeout=BRIEF).acquire()
            assert caught.value.name == "b"
            assert await is_free(client, "a", "c")

        await asyncio.create_task(other())


async def test_timeout_is_one_for_all_names(client: Client) -> None:
    async with held_elsewhere(client.lock("b")):
        holding_a = await client.lock("a", owner="somebody else").acquire()

        async def release_a() -> None:
            await asyncio.sleep(0.5)
            await holding_a.release()

        releasing = asyncio.create_task(release_a())
        async with takes(at_least=1.49, at_most=1.8):  # 2.0 if "b" had a timeout of its own
            with pytest.raises(AcquireTimeout, match="'b'"):
                await client.multilock("a", "b", timeout=1.5).acquire()
        await releasing


async def test_timeout_zero_tries_once(client: Client) -> None:
    leases = await client.multilock("a", "b").acquire(timeout=0)
    with pytest.raises(AcquireTimeout):
        await asyncio.create_task(client.multilock("b", "c").acquire(timeout=0))
    assert await is_free(client, "c")
    await leases.release()


async def test_repeated_names_are_taken_once_and_exclusive_wins(client: Client) -> None:
    shared = client.rwlock("a", ttl=7).read
    async with client.multilock(shared, "a", "a", shared) as leases:
        assert leases["a"].mode == "exclusive"
        assert leases["a"].ttl == 7, "a lock keeps its options"
        (holder,) = (await client.inspect("a")).holders
        assert holder.count == 1


async def test_modes_are_mixed_through_lock_objects(client: Client) -> None:
    async with client.multilock(client.rwlock("rates").read, "account") as leases:
        assert {name: lease.mode for name, lease in leases.items()} == {
            "account": "exclusive",
            "rates": "shared",
        }
        reader = await asyncio.create_task(client.rwlock("rates").read.acquire(timeout=PATIENCE))
        await reader.release()


async def test_options_are_those_of_names_and_not_of_locks(client: Client) -> None:
    async with client.multilock("a", client.lock("b", ttl=3), ttl=5) as leases:
        assert (leases["a"].ttl, leases["b"].ttl) == (5, 3)


async def test_opposite_orders_do_not_deadlock(client: Client) -> None:
    inside = 0

    async def transfer(first: str, second: str) -> None:
        nonlocal inside
        for _ in range(10):
            async with client.multilock(first, second):
                inside += 1
                assert inside == 1
                await asyncio.sleep(0)
                inside -= 1

    async with asyncio.TaskGroup() as tasks:
        for number in range(6):
            tasks.create_task(transfer("a", "b") if number % 2 else transfer("b", "a"))


async def test_one_object_serves_many_tasks(client: Client) -> None:
    multilock = client.multilock("a", "b")
    order: list[int] = []

    async def work(number: int) -> None:
        async with multilock as leases:
            assert leases.held
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(work(number) for number in range(8)))
    assert sorted(order) == list(range(8))
    assert await is_free(client, "a", "b")


async def test_a_task_that_holds_a_name_gets_in_again(client: Client) -> None:
    async with client.lock("a") as outer:
        async with client.multilock("b", "a", timeout=PATIENCE) as leases:
            assert leases["a"].token == outer.token
        assert outer.held
        assert not await client.lock("b").locked()


async def test_shared_then_exclusive_is_a_deadlock_and_leaves_nothing(client: Client) -> None:
    async with client.rwlock("b").read:
        with pytest.raises(DeadlockError):
            await client.multilock("a", "b").acquire()
        assert await is_free(client, "a")


# -- waiting ---------------------------------------------------------------------------------------


async def test_what_is_taken_is_extended_while_the_rest_is_waited_for(client: Client) -> None:
    blocker = await client.lock("b").acquire()
    waiting = asyncio.create_task(client.multilock("a", "b", ttl=LASTING).acquire())
    await until_waiting(client, "b")
    clock = asyncio.get_running_loop().time
    (before,) = (await client.inspect("a")).holders
    ends_at = clock() + (before.remaining or 0.0)

    async def outlived() -> bool:
        (now,) = (await client.inspect("a")).holders
        assert now.token == before.token
        return clock() + (now.remaining or 0.0) >= ends_at + LASTING - 0.2

    await until(outlived, "a longer life")
    await blocker.release()
    leases = await waiting
    assert leases.held
    await leases.release()


async def test_loss_during_the_wait_starts_over(client: Client) -> None:
    blocker = await client.lock("b").acquire()
    waiting = asyncio.create_task(client.multilock("a", "b", timeout=PATIENCE).acquire())
    await until_waiting(client, "b")
    first = (await client.inspect("a")).token
    await client.break_lock("a")

    async def taken_again() -> bool:
        info = await client.inspect("a")
        return info.token > first and bool(info.holders)

    await until(taken_again, "a is taken again")
    await blocker.release()
    leases = await waiting
    assert leases.held
    assert leases.tokens["a"] > first
    await leases.release()


async def test_loss_during_the_wait_is_noticed_behind_the_end_of_another_hold(
    client: Client,
) -> None:
    async def holds_already() -> MultiLease:
        bare.append(await client.lock("a").acquire())
        return await client.multilock("a", "b").acquire()

    bare: list[Lease] = []
    blocker = await client.lock("b").acquire()
    waiting = asyncio.create_task(holds_already())
    await until_waiting(client, "b")
    await bare[0].release()
    first = (await client.inspect("a")).token
    await client.break_lock("a")

    async def taken_again() -> bool:
        info = await client.inspect("a")
        return info.token > first and bool(info.holders)

    await until(taken_again, "a is taken again")
    await blocker.release()
    await (await waiting).release()


async def test_loss_that_the_clock_tells_during_the_wait_stays_one_though_an_extension_is_answered(
    client: Client,
) -> None:
    """The end of another hold lets the multilock look, and the answer is read in the same turn."""

    async def holds_already() -> MultiLease:
        bare.append(await client.lock("a", ttl=1).acquire())
        return await client.multilock("a", "b", ttl=1).acquire()

    bare: list[Lease] = []
    blocker = await client.lock("b").acquire()
    waiting = asyncio.create_task(holds_already())
    await until_waiting(client, "b")
    request = bare[0]._request
    await bare[0].release()
    time.sleep(max(0.0, request.ends_at - now()) + 0.01)  # a blocked loop
    asyncio.get_running_loop().call_soon(answered, request)
    await until(lambda: request.state is State.OVER, "the end of the lease that was lost")
    assert request.loss is not None
    assert request.loss.reason == "expired"
    assert not waiting.done()
    await blocker.release()
    leases = await waiting
    assert set(leases) == {"a", "b"}
    await leases.release()


def answered(request: Request) -> None:
    """An extension was carried out before the lease was over."""
    place = request.place
    if isinstance(place, KeptPlace):
        place.keeper.on_answer(place, Granted(place.token, now() + 1), place.length, as_holder=True)


async def test_max_hold_over_during_the_wait_is_raised(client: Client) -> None:
    async with client.lock("b"):
        with pytest.raises(LockLost) as caught:
            await asyncio.create_task(client.multilock("a", "b", max_hold=0.2).acquire())
        assert caught.value.reason == "max_hold"
        assert len((await client.inspect("b")).waiters) == 0


async def test_loss_of_an_earlier_bare_hold_during_the_wait_is_waited_out(client: Client) -> None:
    async def entered_again() -> None:
        lease = await client.lock("a").acquire()
        async with client.multilock("a", "b"):
            assert lease.lost is not None
        with pytest.raises(LockLost):
            await lease.release()

    blocker = await client.lock("b").acquire()
    waiting = asyncio.create_task(entered_again())
    await until_waiting(client, "b")
    await client.break_lock("a")
    await until_held(client, "a")
    await blocker.release()
    async with takes(at_most=SOON):
        await waiting


async def test_loss_of_the_block_around_during_the_wait_is_raised(client: Client) -> None:
    async def entered_again() -> None:
        with pytest.raises(LockLost):
            async with client.lock("a", on_lost="flag"):
                await client.multilock("a", "b").acquire()

    blocker = await client.lock("b").acquire()
    waiting = asyncio.create_task(entered_again())
    await until_waiting(client, "b")
    await client.break_lock("a")
    async with takes(at_most=SOON):
        await waiting
    await blocker.release()


async def test_cancelled_acquire_leaves_nothing(client: Client) -> None:
    blocker = await client.lock("b").acquire()
    waiting = asyncio.create_task(client.multilock("a", "b").acquire())
    await until_waiting(client, "b")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await is_free(client, "a")
    assert not (await client.inspect("b")).waiters
    await blocker.release()


async def test_closing_the_client_ends_the_wait(make_client: MakeClient) -> None:
    holder, client = await make_client(), await make_client()
    async with holder.lock("b"):
        waiting = asyncio.create_task(client.multilock("a", "b").acquire())
        await until_waiting(holder, "b")
        await client.__aexit__(None, None, None)
        with pytest.raises(ClientClosed):
            await waiting
        assert await is_free(holder, "a")


# -- losing ----------------------------------------------------------------------------------------


async def test_losing_one_cancels_the_body_once_and_frees_all(client: Client) -> None:
    cleaned_up = False
    with pytest.raises(LockLost) as caught:  # noqa: PT012
        async with client.multilock("a", "b", "c") as leases:
            try:
                await client.break_lock("b")
                await until_cancelled()
            finally:
                assert not leases.held
                await client.break_lock("a")  # a second loss does not disturb the cleaning up
                await until(lambda: leases["a"].lost is not None)
                await client.inspect("a")
                cleaned_up = True
    assert cleaned_up
    assert (caught.value.name, caught.value.reason) in {("a", "broken"), ("b", "broken")}
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await until_free(client, "a", "b", "c")


async def test_names_that_are_not_lost_stay_closed_until_the_body_has_ended(client: Client) -> None:
    with pytest.raises(LockLost):  # noqa: PT012
        async with client.multilock("a", "b"):
            try:
                await client.break_lock("b")
                await until_cancelled()
            finally:
                assert await client.lock("a").locked()
    await until_free(client, "a")


async def test_flag_only_flags(client: Client) -> None:
    with pytest.raises(LockLost):  # noqa: PT012
        async with client.multilock("a", "b", on_lost="flag") as leases:
            await client.break_lock("a")
            lost = await leases.wait_lost()
            assert lost.name == "a"
            await client.inspect("a")  # time for a cancellation, if there were one
            assert not leases.held
            with pytest.raises(LockLost):
                leases.ensure_held()


async def test_own_exception_of_the_body_comes_out_with_the_loss_as_a_note(client: Client) -> None:
    with pytest.raises(ZeroDivisionError) as caught:  # noqa: PT012
        async with client.multilock("a", "b"):
            try:
                await client.break_lock("a")
                await until_cancelled()
            except asyncio.CancelledError:
                raise ZeroDivisionError from None
    assert any("'a'" in note for note in caught.value.__notes__)


async def test_outer_cancellation_comes_before_the_loss(client: Client) -> None:
    async def body() -> None:
        async with client.multilock("a", "b", on_lost="flag") as leases:
            await client.break_lock("a")
            await leases.wait_lost()
            await until_cancelled()

    task = asyncio.create_task(body())

    async def lost() -> bool:
        return not (await client.inspect("a")).holders and await client.lock("b").locked()

    await until(lost, "a is lost and b is held")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_free(client, "a", "b")


async def test_exception_of_the_body_passes(client: Client) -> None:
    with pytest.raises(KeyError):
        async with client.multilock("a", "b"):
            raise KeyError
    assert await is_free(client, "a", "b")


async def test_closing_the_client_cancels_the_body(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    started = asyncio.Event()

    async def body() -> None:
        async with client.multilock("a", "b"):
            started.set()
            await until_cancelled()

    task = asyncio.create_task(body())
    await started.wait()
    await client.__aexit__(None, None, None)
    with pytest.raises(LockLost) as caught:
        await task
    assert caught.value.reason == "closed"
    assert await is_free(other, "a", "b")


# -- releasing -------------------------------------------------------------------------------------


async def test_release_frees_all_once(client: Client) -> None:
    leases = await client.multilock("a", "b").acquire()
    await leases.release()
    assert await is_free(client, "a", "b")
    assert leases.lost is None
    with pytest.raises(NotHeld) as told:
        await leases.release()
    assert told.value.name == "a", "the first of them"
    with pytest.raises(NotHeld):
        leases.ensure_held()
    with pytest.raises(NotHeld):
        await leases.wait_lost()


async def test_release_in_reverse_attempts_all_even_when_one_was_lost(client: Client) -> None:
    leases = await client.multilock("a", "b", "c").acquire()
    await client.break_lock("b")
    await leases.wait_lost()
    with pytest.raises(LockLost, match="'b'"):
        await leases.release()
    await until_free(client, "a", "b", "c")


async def test_cancelled_release_still_frees_all(client: Client) -> None:
    leases = await client.multilock("a", "b", "c").acquire()
    releasing = asyncio.create_task(leases.release())
    await asyncio.sleep(0)
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    await until_free(client, "a", "b", "c")


async def test_cancellation_while_leaving_the_body_still_frees_all(client: Client) -> None:
    leaving = asyncio.Event()

    async def body() -> None:
        async with client.multilock("a", "b", "c"):
            asyncio.get_running_loop().call_soon(leaving.set)

    task = asyncio.create_task(body())
    await leaving.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_free(client, "a", "b", "c")


async def test_release_wakes_who_waits_for_a_loss(client: Client) -> None:
    leases = await client.multilock("a", "b").acquire()
    waiting = asyncio.create_task(leases.wait_lost())
    await asyncio.sleep(0)
    await leases.release()
    with pytest.raises(NotHeld):
        await waiting


async def test_bare_leases_are_armed_by_async_with(client: Client) -> None:
    leases = await client.multilock("a", "b").acquire()
    with pytest.raises(LockLost):  # noqa: PT012
        async with leases:
            await client.break_lock("a")
            await until_cancelled()
    await until_free(client, "b")


async def test_lease_released_in_the_body_is_no_error(client: Client) -> None:
    async with client.multilock("a", "b") as leases:
        await leases["a"].release()
        assert not await client.lock("a").locked()
        assert await client.lock("b").locked()
    assert await is_free(client, "a", "b")


async def test_unanswered_release_holds_the_body_up_for_a_second_at_most(
    proxy: FaultProxy, make_client: MakeClient
) -> None:
    client = await make_client(url=proxy.url)
    multilock = client.multilock(*"abcdef", ttl=30)
    await multilock.__aenter__()
    proxy.stall()
    async with takes(at_most=1.0):
        await multilock.__aexit__(None, None, None)
    await proxy.heal()
    await until_free(await make_client(), *"abcdef")


# -- bad input -------------------------------------------------------------------------------------


async def test_bad_input_is_an_error_before_anything_is_sent() -> None:
    client, other = Client("memory://"), Client("memory://")  # neither is entered
    with pytest.raises(ValueError):
        client.multilock()
    with pytest.raises(ValueError):
        client.multilock("a", "")
    with pytest.raises(ValueError):
        client.multilock("a", other.lock("b"))
    with pytest.raises(ValueError):
        client.multilock("a", timeout=-1)
    with pytest.raises(ValueError):
        client.multilock(client.lock("a"), ttl=0)
    with pytest.raises(ValueError):
        client.multilock(client.lock("a", owner="x"), client.lock("a", owner="y"))
    for wrong in (1, ["a", "b"], None, b"a", client.semaphore("a", 2), client.rwlock("a")):
        with pytest.raises(TypeError):
            client.multilock("a", wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        client.multilock("a", colour="red")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        client.multilock("a", timeout="1")  # type: ignore[arg-type]
    assert isinstance(client.multilock("a"), MultiLock)
    assert aiodlock.MultiLease is not None


@pytest.mark.parametrize("how", ["block", "release"])
async def test_names_are_left_together(real_store: Store, how: str) -> None:
    """Five names are left in one round trip: no leave waits for the answer to another."""
    async with FaultProxy(real_store.url) as proxy, aiodlock.Client(proxy.url) as client:
        names = [f"account:{number}" for number in range(5)]
        leases = await client.multilock(*names).acquire()
        asked = sum(connection.commands["EVALSHA"] for connection in proxy.connections)
        held_back = proxy.hold_reply(named("EVALSHA"))

        async def leave() -> None:
            if how == "release":
                await leases.release()
            else:
                async with leases:
                    pass

        leaving = asyncio.create_task(leave())
        await until(
            lambda: (
                sum(connection.commands["EVALSHA"] for connection in proxy.connections) == asked + 5
            )
        )
        held_back.release()
        await leaving
        for name in names:
            assert not await client.lock(name).locked()


async def test_cancelled_before_the_first_leave_is_sent_still_leaves_all(
    client: aiodlock.Client,
) -> None:
    leases = await client.multilock("a", "b", "c").acquire()
    leaving = asyncio.create_task(leases.release())
    asyncio.get_running_loop().call_soon(
        leaving.cancel
    )  # after its first step, before its children's
    await asyncio.wait({leaving})
    assert leaving.cancelled()
    for name in ("a", "b", "c"):
        await until_free(client, name)


async def test_multilock_whose_loss_is_known_by_the_clock_alone_says_so(
    client: aiodlock.Client,
) -> None:
    with pytest.raises(aiodlock.LockLost) as lost:
        async with client.multilock("a", "b", ttl=0.1, auto_extend=False):
            time.sleep(0.15)  # a stopped process, or a blocked loop: the extender could not run
    assert lost.value.reason == "expired"


async def test_multilease_that_is_asked_after_its_end_says_so(client: aiodlock.Client) -> None:
    leases = await client.multilock("a", "b", ttl=0.8, auto_extend=False).acquire()
    time.sleep(0.85)
    with pytest.raises(aiodlock.LockLost):
        leases.ensure_held()
    with pytest.raises(aiodlock.LockLost):
        await leases.release()


@pytest.mark.parametrize("how", ["block", "by hand"])
async def test_anyio_scope_that_ends_while_names_are_released_knows_its_cancellation(
    client: Client, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def slow(self: Departure, *arguments: Any) -> Any:
        left = await awaited(self, *arguments)
        await asyncio.sleep(BRIEF)  # a store that is far away
        return left

    name = "awaited" if how == "block" else "until_deadline"
    awaited = getattr(Departure, name)
    monkeypatch.setattr(Departure, name, slow)
    with anyio.CancelScope() as scope:
        leases = await client.multilock("a", "b").acquire()
        asyncio.get_running_loop().call_later(BRIEF / 2, scope.cancel)
        if how == "block":
            async with leases:
                pass
        else:
            await leases.release()
    assert scope.cancelled_caught
    for free in "ab":
        await until_free(client, free)


async def test_loss_of_a_multilock_is_waited_for_in_its_loop_alone(client: Client) -> None:
    leases = await client.multilock("a", "b", ttl=LASTING).acquire()
    with pytest.raises(RuntimeError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, leases.wait_lost())
    await leases.release()
