"""Blocks: which one is left, and whom a loss cancels, in whatever task and order they are left."""

# A lease is lost inside a body of several statements, and `raises` stands around it.
# ruff: noqa: PT012, PT031

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import anyio
import pytest

import aiodlock
from aiodlock import Client, Lease, Lock, LockLost, NotHeld, Semaphore, Unsupported, WouldBlock

from ..conftest import MakeClient
from ..inside import session_of
from ..scenes import bounded, cancelled, is_held, until, until_cancelled, until_free, until_waiting
from ..servers import Store

T = TypeVar("T")
#: Makes an object that two tasks can be in at the same time, each with a lease of its own.
Shared = Callable[[Client], Lock | Semaphore]
SHARED: dict[str, Shared] = {
    "lock": lambda client: client.rwlock("x").read,
    "semaphore": lambda client: client.semaphore("x", 5),
}


def shared(client: Client, kind: str) -> Lock | Semaphore:
    """Make such an object, where the store has it."""
    try:
        return SHARED[kind](client)
    except Unsupported as unsupported:
        pytest.skip(str(unsupported))


class Bodies:
    """Tasks that enter one shared object on an exit stack of their own, and stay in it until told."""

    def __init__(self, shared: Lock | Semaphore) -> None:
        self.shared = shared
        self.leases: list[Lease] = []
        self.stacks: list[AsyncExitStack] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.enough = asyncio.Event()

    async def enter(self, *, stay: bool = True) -> None:
        entered = len(self.leases) + 1

        async def body() -> None:
            stack = AsyncExitStack()
            self.stacks.append(stack)
            self.leases.append(await stack.enter_async_context(self.shared))
            if stay:
                await self.enough.wait()

        task = asyncio.create_task(body())
        self.tasks.append(task)
        await until(lambda: len(self.leases) == entered and (stay or task.done()))

    async def end(self) -> None:
        self.enough.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for lease in self.leases:
            with suppress(NotHeld, LockLost):
                await lease.release()


@pytest.mark.parametrize("kind", SHARED)
async def test_stack_that_another_task_closes_does_not_end_somebody_elses_block(
    client: Client, kind: str
) -> None:
    bodies = Bodies(shared(client, kind))
    await bodies.enter()
    await bodies.enter()
    with pytest.raises(RuntimeError, match="not clear") as refused:
        await bodies.stacks[0].aclose()
    assert "enter_async_context" in str(refused.value)
    assert [is_held(lease) for lease in bodies.leases] == [True, True]
    assert not any(task.done() for task in bodies.tasks)
    await bodies.end()


@pytest.mark.parametrize("kind", SHARED)
async def test_block_whose_task_has_ended_is_the_one_that_another_task_leaves(
    client: Client, kind: str
) -> None:
    bodies = Bodies(shared(client, kind))
    await bodies.enter()
    await bodies.enter(stay=False)
    await bodies.enter()
    await bodies.stacks[1].aclose()
    assert [is_held(lease) for lease in bodies.leases] == [True, False, True]
    await bodies.end()


@pytest.mark.parametrize("kind", SHARED)
async def test_only_open_block_is_left_by_any_task(client: Client, kind: str) -> None:
    bodies = Bodies(shared(client, kind))
    await bodies.enter()
    await bodies.stacks[0].aclose()
    assert not is_held(bodies.leases[0])
    await bodies.end()


@pytest.mark.parametrize("kind", SHARED)
async def test_two_blocks_whose_tasks_have_ended_are_not_told_apart(
    client: Client, kind: str
) -> None:
    bodies = Bodies(shared(client, kind))
    await bodies.enter(stay=False)
    await bodies.enter(stay=False)
    with pytest.raises(RuntimeError, match="not clear"):
        await bodies.stacks[0].aclose()
    assert [is_held(lease) for lease in bodies.leases] == [True, True]
    await bodies.end()


async def test_refusal_to_leave_hides_no_cancellation(client: Client) -> None:
    bodies = Bodies(client.rwlock("x").read)
    await bodies.enter()
    await bodies.enter()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), bodies.stacks[0]:
            await until_cancelled()
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as raised:
        async with bodies.stacks[1]:
            raise error
    assert raised.value is error
    assert any("not clear" in note for note in error.__notes__)
    assert [is_held(lease) for lease in bodies.leases] == [True, True]
    await bodies.end()


async def test_leaving_what_was_never_entered_raises(client: Client) -> None:
    lock = client.lock("x")
    with pytest.raises(RuntimeError):
        await lock.__aexit__(None, None, None)
    lease = await lock.acquire()
    with pytest.raises(RuntimeError):
        await lease.__aexit__(None, None, None)
    assert is_held(lease)
    await lease.release()


async def test_entered_lease_is_left_by_the_stack_of_another_task(client: Client) -> None:
    """What the error advises."""
    lock = client.rwlock("x").read
    stacks = []
    ready, enough = asyncio.Event(), asyncio.Event()

    async def body() -> None:
        stack = AsyncExitStack()
        await stack.enter_async_context(await lock.acquire())
        stacks.append(stack)
        if len(stacks) == 2:
            ready.set()
        await enough.wait()

    tasks = [asyncio.create_task(body()) for _ in range(2)]
    await ready.wait()
    for stack in stacks:
        await stack.aclose()
    await until_free(client, "x")
    enough.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("first", ["outer", "inner"])
async def test_body_stays_armed_until_its_last_block_is_left_in_any_order(
    client: Client, first: str
) -> None:
    outer, inner = client.lock("x"), client.lock("x")
    with pytest.raises(LockLost):
        async with AsyncExitStack() as rest:
            await outer.__aenter__()
            await inner.__aenter__()
            left, stays = (outer, inner) if first == "outer" else (inner, outer)
            await left.__aexit__(None, None, None)
            rest.push_async_exit(stays)
            await client.break_lock("x")
            await until_cancelled()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await until_free(client, "x")


async def test_multilock_left_before_what_was_entered_in_it_leaves_that_armed(
    client: Client,
) -> None:
    both, one = client.multilock("a", "b"), client.lock("a")
    with pytest.raises(LockLost):
        async with AsyncExitStack() as rest:
            await both.__aenter__()
            await one.__aenter__()
            await both.__aexit__(None, None, None)
            rest.push_async_exit(one)
            await client.break_lock("a")
            await until_cancelled()
    await until_free(client, "a", "b")


async def test_name_is_not_to_be_had_inside_a_block_whose_lease_is_lost(client: Client) -> None:
    lock = client.rwlock("x", on_lost="flag")
    with pytest.raises(LockLost):
        async with lock.write as lease:
            await client.break_lock("x")
            await lease.wait_lost()
            for again in (lock.write, lock.read, client.lock("x"), client.lock("x", owner="me")):
                with pytest.raises(LockLost):
                    await again.acquire()
            with pytest.raises(LockLost):
                await lock.write.acquire_nowait()
    async with lock.write:
        pass


async def test_name_is_not_to_be_had_inside_a_block_whose_lease_is_lost_while_it_is_waited_for(
    client: Client, make_client: MakeClient
) -> None:
    operator = await make_client()

    async def break_it() -> None:
        await until_waiting(operator, "x")
        await operator.break_lock("x")

    with pytest.raises(LockLost) as lost:
        async with client.lock("x", on_lost="flag"):
            # Now: a quorum tells of a request as a waiter that is about to hold.
            breaking = asyncio.create_task(break_it())
            # Another owner: it waits for the block around it.
            with pytest.raises(LockLost):
                await client.lock("x", owner="me").acquire(timeout=10)
            await breaking
    assert lost.value.reason == "broken"
    await until_free(client, "x")


async def test_name_is_not_to_be_had_where_a_lease_of_another_task_was_entered_and_lost(
    client: Client,
) -> None:
    lease = await client.lock("x", on_lost="flag").acquire()

    async def body() -> None:
        async with lease:
            await client.break_lock("x")
            await lease.wait_lost()
            with pytest.raises(LockLost):
                await client.lock("x").acquire()

    with pytest.raises(LockLost):
        await asyncio.create_task(body())


# -- another event loop -----------------------------------------------------------------------------


async def test_lease_in_another_event_loop_is_refused_and_harms_nobody(
    client: Client, store: Store
) -> None:
    lease = await client.lock("x").acquire()
    lock = client.lock("y")
    failures: list[BaseException] = []

    async def elsewhere() -> None:
        async def enter() -> None:
            async with lease:
                pytest.fail("entered")

        for use in (enter, lease.wait_lost, lease.extend, lease.release):
            with pytest.raises(RuntimeError, match="event loop"):
                await use()
        with pytest.raises(RuntimeError, match="event loop"):
            await lease.__aexit__(None, None, None)
        with pytest.raises(RuntimeError, match="event loop"):
            await lock.__aexit__(None, None, None)
        with pytest.raises(ZeroDivisionError):
            await lock.__aexit__(ZeroDivisionError, ZeroDivisionError(), None)
            raise ZeroDivisionError

    def thread() -> None:
        try:
            asyncio.run(elsewhere())
        except BaseException as error:
            failures.append(error)

    async with lock as held:
        elsewhere_thread = threading.Thread(target=thread)
        elsewhere_thread.start()
        await until(lambda: not elsewhere_thread.is_alive())
        assert failures == []
        assert is_held(held)
    assert is_held(lease)
    await lease.release()
    async with client.lock("z"):
        pass


# -- whose a hold is --------------------------------------------------------------------------------


async def _tokens(client: Client) -> list[int]:
    return [holder.token for holder in (await client.inspect("x")).holders]


async def test_how_a_lease_is_dropped_makes_no_difference(client: Client) -> None:
    lock = client.lock("x", ttl=1.0)
    kept: dict[str, Lease] = {}

    async def only_the_token() -> None:
        assert (await lock.acquire()).token

    async def deleted() -> None:
        lease = await lock.acquire()
        assert lease.held
        del lease

    async def popped() -> None:
        kept["x"] = await lock.acquire()
        kept.pop("x")

    async def out_of_a_dict() -> None:
        kept["x"] = await lock.acquire()
        del kept["x"]

    async def discarded() -> None:
        await lock.acquire()

    for drop in (only_the_token, deleted, popped, out_of_a_dict, discarded):
        await drop()
        await client.inspect("another name")
        assert await lock.locked(), drop
        with pytest.raises(WouldBlock):
            await asyncio.create_task(lock.acquire_nowait())
        await lock.release()
        assert not await lock.locked(), drop
        with pytest.raises(NotHeld):
            await lock.release()


async def test_hold_that_nobody_references_ends_with_its_task_and_is_logged(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    held = asyncio.Event()
    enough = asyncio.Event()

    async def body() -> None:
        token = (await client.lock("x").acquire()).token
        assert token in await _tokens(client)
        held.set()
        await enough.wait()

    task = asyncio.create_task(body())
    await held.wait()
    assert await client.lock("x").locked()
    with pytest.warns(ResourceWarning, match="'x'"):
        enough.set()
        await task
        await until_free(client, "x")
    (record,) = [record for record in caplog.records if getattr(record, "event", "") == "forgotten"]
    assert record.levelname == "WARNING"
    assert "'x'" in record.getMessage()


async def test_hold_that_is_referenced_outlives_its_task_and_ends_with_the_reference(
    client: Client,
) -> None:
    leases: list[Lease] = []

    async def body() -> None:
        leases.append(await client.lock("x").acquire())
        await client.lock("x").acquire()  # entered again: that ends with its task

    with pytest.warns(ResourceWarning, match="'x'"):
        await asyncio.create_task(body())
        await until(lambda: len(leases[0]._request.handles) == 1)
    assert is_held(leases[0])
    with pytest.raises(WouldBlock):
        await client.lock("x").acquire_nowait()
    with pytest.warns(ResourceWarning, match="'x'"):
        leases.clear()
        await until_free(client, "x")


async def test_lease_that_is_collected_in_another_thread_is_kept_for_its_task(
    client: Client,
) -> None:
    holder = [await client.lock("x").acquire()]
    thread = threading.Thread(target=holder.clear)
    thread.start()
    await until(lambda: not thread.is_alive())
    assert await client.lock("x").locked()
    await client.lock("x").release()
    assert not await client.lock("x").locked()


# -- a lost lease is told once ----------------------------------------------------------------------


async def test_lost_bare_lease_does_not_shut_its_task_out(client: Client) -> None:
    lock = client.lock("x")
    lease = await lock.acquire()
    await client.break_lock("x")
    await lease.wait_lost()
    async with lock as again:
        assert again.token > lease.token
        assert is_held(again)
    fresh = await lock.acquire_nowait()
    assert fresh.token > again.token
    await lock.release()  # the newest live hold
    assert not is_held(fresh)
    with pytest.raises(LockLost):
        await lock.release()
    with pytest.raises(NotHeld):
        await lock.release()


async def test_lock_whose_lease_was_lost_and_dropped_tells_it_once(client: Client) -> None:
    lock = client.lock("x", ttl=0.1, auto_extend=False)
    await lock.acquire()
    await until_free(client, "x")
    with pytest.raises(LockLost):
        await lock.release()
    with pytest.raises(NotHeld):
        await lock.release()


async def test_task_that_loses_again_and_again_keeps_no_memory_of_it(client: Client) -> None:
    lock = client.lock("x")
    for _ in range(20):
        lease = await lock.acquire()
        await client.break_lock("x")
        await lease.wait_lost()
        del lease
    session = client._core.session
    assert session is not None
    await until(lambda: len(session.requests) <= 2)
    with pytest.raises(LockLost):
        await lock.release()
    with pytest.raises(NotHeld):
        await lock.release()
    await until(lambda: not session.requests)


async def test_waiter_behind_its_own_lost_lease_waits_for_a_turn_of_its_own(
    client: Client,
) -> None:
    lock = client.lock("x", ttl=1.0, margin=0.8, auto_extend=False)
    lost = await lock.acquire()
    await lost.wait_lost()  # the server still has the record
    async with client.lock("x") as lease:
        assert lease.token > lost.token
    with pytest.raises(LockLost):
        await lost.release()


async def test_cancelled_body_of_a_shared_lock_is_not_hidden_by_a_stack_of_another(
    client: Client,
) -> None:
    bodies = Bodies(client.rwlock("x").read)
    await bodies.enter()
    await bodies.enter()

    async def closes() -> None:
        async with bodies.stacks[0]:
            await until_cancelled()

    task = asyncio.create_task(closes())
    await asyncio.sleep(0)
    await cancelled(task)
    assert isinstance(client, aiodlock.Client)
    await bodies.end()


async def test_block_that_was_left_by_a_call_of_aexit_is_refused_with_a_reason(
    client: Client,
) -> None:
    with pytest.raises(RuntimeError, match="left before"):
        async with client.lock("x") as lease:
            await lease.__aexit__(None, None, None)
    await until_free(client, "x")


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


# -- generators ------------------------------------------------------------------------------------


async def numbers(block: AbstractAsyncContextManager[object]) -> AsyncGenerator[int, None]:
    """Give some numbers inside the block."""
    async with block:
        for number in range(3):
            yield number


async def free_of_holders(shared: Lock | Semaphore) -> None:
    async def is_free() -> bool:
        return not (await shared.inspect()).holders

    await until(is_free, "nobody holds")


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("how", ["cancelled", "broken off"])
async def test_generators_in_one_shared_object_that_are_collected_release_each_its_own(
    client: Client, kind: str, how: str
) -> None:
    """The loop closes each in a task of its own, which has entered none."""

    async def read() -> None:
        async for _ in numbers(shared_object):
            inside.release()
            if how == "cancelled":
                await asyncio.Event().wait()
            break
        await stop.wait()

    shared_object = shared(client, kind)
    inside, stop = asyncio.Semaphore(0), asyncio.Event()
    async with shared_object as stays:
        readers = [asyncio.create_task(read()) for _ in range(2)]
        for _ in readers:
            await inside.acquire()
        if how == "cancelled":
            for reader in readers:
                reader.cancel()
            await asyncio.wait(readers)
            readers.clear()

        async def is_alone() -> bool:
            return sum(holder.count for holder in (await shared_object.inspect()).holders) == 1

        await until(is_alone, "only this body")
        assert is_held(stays), "each has released its own"
    stop.set()
    await asyncio.gather(*readers)
    await free_of_holders(shared_object)


@pytest.mark.parametrize("kind", SHARED)
async def test_generators_whose_steps_are_tasks_of_their_own_leave_each_its_own(
    client: Client, kind: str
) -> None:
    """As with ``wait_for(anext(...))`` on Python 3.11."""

    async def step(generator: AsyncGenerator[int, None]) -> int | None:
        return await anext(generator, None)

    shared_object = shared(client, kind)
    generators = [numbers(shared_object) for _ in range(2)]
    for wanted in (0, 1, 2, None):
        for generator in generators:
            assert await asyncio.create_task(step(generator)) == wanted
    await free_of_holders(shared_object)


async def test_generators_in_something_to_be_done_once_leave_each_its_own(client: Client) -> None:
    async def read() -> None:
        async for _ in numbers(once):
            inside.release()
            await asyncio.Event().wait()

    try:
        once = client.once("x", keep=0.5)
    except Unsupported as unsupported:
        pytest.skip(str(unsupported))
    inside = asyncio.Semaphore(0)

    async def readers(number: int) -> None:
        """Let so many read together, and be cancelled together."""
        tasks = [asyncio.create_task(read()) for _ in range(number)]
        for _ in tasks:
            await inside.acquire()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async with once as run:
        assert run.first
    await readers(2)
    async with bounded(20.0):  # some stores count whole seconds
        while (await client.inspect("x", kind="once")).recorded is not None:
            await asyncio.sleep(0.05)
    await readers(1)
    async with client.once("x", keep=60, timeout=5) as run:
        assert run.first


@pytest.mark.parametrize("kind", SHARED)
async def test_blocks_that_a_helper_enters_and_leaves_are_their_tasks_own(
    client: Client, kind: str
) -> None:
    """The helper's frame ends with the entering, and the next one may be made in its place."""

    async def call(function: Callable[..., Awaitable[T]], *arguments: object) -> T:
        return await function(*arguments)

    async def body(number: int) -> None:
        await asyncio.sleep(number * 0.01)
        lease = await call(shared_object.__aenter__)
        await asyncio.sleep(0.02)
        assert is_held(lease)
        await call(shared_object.__aexit__, None, None, None)
        assert not is_held(lease)

    shared_object = shared(client, kind)
    await asyncio.gather(*(body(number) for number in range(12)))
    await free_of_holders(shared_object)


async def test_generator_in_a_lock_that_lingers_leaves_its_own(client: Client) -> None:
    async def stays() -> None:
        async with lock:
            inside.set()
            await stop.wait()

    async def read() -> None:
        async for _ in numbers(lock):
            break
        await stays()  # a re-entry

    try:
        lock = client.lock("x", linger=0.2)
    except Unsupported as unsupported:
        pytest.skip(str(unsupported))
    inside, stop = asyncio.Event(), asyncio.Event()
    async with lock:
        pass
    reader = asyncio.create_task(read())
    await inside.wait()
    gc.collect()
    await asyncio.sleep(0.1)
    stop.set()
    await reader
    await until_free(client, "x")


@pytest.mark.parametrize("on_lost", ["cancel", "flag"])
async def test_loss_comes_out_of_a_generator_that_is_closed(
    client: Client, on_lost: Literal["cancel", "flag"]
) -> None:
    """What is added to GeneratorExit nobody sees."""
    with pytest.raises(LockLost):
        async with aclosing(numbers(client.lock("x", on_lost=on_lost))) as read:
            async for _ in read:
                assert await client.break_lock("x") == 1
                with suppress(TimeoutError):  # with "cancel" it is cut short
                    await asyncio.wait_for(asyncio.Event().wait(), 0.5)
                break
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await free_of_holders(client.lock("x"))


async def test_cancellation_from_outside_comes_out_of_a_generator_that_is_closed_and_lost(
    client: Client,
) -> None:
    async def read() -> None:
        async with aclosing(numbers(client.lock("x"))) as read:
            async for _ in read:
                inside.set()
                await asyncio.Event().wait()

    inside = asyncio.Event()
    reader = asyncio.create_task(read())
    await inside.wait()
    lease = next(iter(session_of(client).requests.values()))
    session_of(client).register.lose(lease, "gone")
    await cancelled(reader)


# -- what else comes out ---------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["the scope", "the loss"])
async def test_anyio_scope_that_ends_in_the_turn_of_a_loss_knows_its_cancellation(
    client: Client, first: str
) -> None:
    with anyio.CancelScope() as scope:
        async with client.lock("x"), asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(60))
            request = next(iter(session_of(client).requests.values()))
            lose: Callable[[], object] = partial(session_of(client).register.lose, request, "gone")
            ends = [scope.cancel, lose]
            for end in ends if first == "the scope" else reversed(ends):
                asyncio.get_running_loop().call_soon(end)
    assert scope.cancelled_caught
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@dataclass(frozen=True)
class PaymentFailed(Exception):
    """To which no note can be added."""

    order: int


async def test_bodys_own_exception_comes_out_of_a_lost_block_though_it_takes_no_note(
    client: Client,
) -> None:
    with pytest.raises(PaymentFailed):
        async with client.lock("x", on_lost="flag") as lease:
            await client.break_lock("x")
            await lease.wait_lost()
            raise PaymentFailed(3)


async def test_loss_of_an_outer_block_is_noted_on_that_of_an_inner_one(client: Client) -> None:
    with pytest.raises(LockLost) as lost:
        async with client.lock("a", on_lost="flag") as a, client.lock("b", on_lost="flag") as b:
            for name in "ab":
                await client.break_lock(name)
            await a.wait_lost()
            await b.wait_lost()
    assert lost.value.name == "b"
    assert any("'a'" in note for note in lost.value.__notes__)


async def test_inner_block_on_the_same_name_tells_the_loss_once(client: Client) -> None:
    lock = client.lock("a", on_lost="flag")
    with pytest.raises(LockLost) as lost:
        async with lock as lease, lock:
            await client.break_lock("a")
            await lease.wait_lost()
    assert not getattr(lost.value, "__notes__", [])


@pytest.mark.parametrize("what", ["lock", "bare lease", "multilock", "once"])
async def test_block_whose_task_has_ended_without_leaving_it_ends_with_its_task(
    client: Client, what: str
) -> None:
    """Nothing but the exit stack, which is gone, could have left it."""
    if what == "once" and not client._core.store.capabilities.once:
        pytest.skip("the store keeps no record of what was done once")

    async def enter() -> None:
        stack = AsyncExitStack()
        match what:
            case "lock":
                await stack.enter_async_context(client.lock("x"))
            case "bare lease":
                await stack.enter_async_context(await client.lock("x").acquire())
            case "multilock":
                await stack.enter_async_context(client.multilock("x", "y"))
            case _:
                await stack.enter_async_context(client.once("x", keep=60))

    kind: Literal["lock", "once"] = "once" if what == "once" else "lock"

    async def is_free() -> bool:
        gc.collect()
        return not (await client.inspect("x", kind=kind)).holders

    with pytest.warns(ResourceWarning, match="'[xy]'"):
        await asyncio.create_task(enter())
        await until(is_free)
