"""Cancelled at every await point: nothing is left behind, and the cancellation is not swallowed.

The points are counted, not guessed: a call is driven once to its end, and then once per point with
a cancellation there. A cancellation reaches a task in three ways that differ: as the task begins to
wait, while it waits (its message may have been sent and carried out), and in the same turn of the
event loop in which what it waits for arrives, when the reply is there and is not read any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from random import Random
from typing import Any, Literal

import anyio
import pytest

import aiodlock
from aiodlock.backends.redis.scripts import ACQUIRE, LEAVE, Script

from ..conftest import MakeClient
from ..inside import session_of
from ..proxy import FaultProxy
from ..scenes import PATIENCE, SOON
from ..servers import Store
from .scenes import (
    calling,
    free_at_once,
    no_places_soon,
    nothing_left,
    queued,
    until,
)

When = Literal["at once", "meanwhile", "as it arrives"]
WHENS: tuple[When, ...] = ("at once", "meanwhile", "as it arrives")

#: A call to be cancelled, and what it leaves held when it was not.
Call = Callable[[aiodlock.Client], Awaitable[object]]


class Steps:
    """Drives an awaitable, counts its suspensions, and cancels the task at some of them."""

    def __init__(
        self, inner: Coroutine[Any, Any, object], cancel_at: frozenset[int], when: When
    ) -> None:
        self._inner = inner
        self._cancel_at = cancel_at
        self._when = when
        self.count = 0
        self.cancelled = 0

    def __await__(self) -> Generator[Any, Any, object]:
        steps = self._inner.__await__()
        throw: BaseException | None = None
        while True:
            try:
                awaited = steps.send(None) if throw is None else steps.throw(throw)
            except StopIteration as end:
                return end.value
            throw = None
            self.count += 1
            if self.count in self._cancel_at:
                self._cancel(awaited)
            try:
                yield awaited
            except BaseException as thrown:
                throw = thrown

    def _cancel(self, awaited: asyncio.Future[object] | None) -> None:
        task = asyncio.current_task()
        assert task is not None

        def cancel(_: object = None) -> None:
            if not task.done():
                self.cancelled += 1
                task.cancel()

        loop = asyncio.get_running_loop()
        if self._when == "at once" or awaited is None:
            cancel()
        elif self._when == "as it arrives":
            # Before the callback with which the task itself is woken.
            awaited.add_done_callback(cancel)
        else:
            # The message has gone out by then, and its answer cannot be here before the next turn.
            loop.call_soon(lambda: cancel() if not awaited.done() else None)


async def _acquire_and_release(client: aiodlock.Client) -> None:
    await (await client.lock("name").acquire()).release()


async def _acquire_with_timeout(client: aiodlock.Client) -> None:
    await (await client.lock("name").acquire(timeout=30)).release()


async def _acquire_nowait(client: aiodlock.Client) -> None:
    lease = await client.lock("name").acquire_nowait()
    await lease.release()


async def _release_of_the_lock(client: aiodlock.Client) -> None:
    lock = client.lock("name")
    await lock.acquire()
    await lock.release()


async def _body(client: aiodlock.Client) -> None:
    async with client.lock("name"):
        await asyncio.sleep(0)


async def _nested_bodies(client: aiodlock.Client) -> None:
    lock = client.lock("name")
    async with lock:
        async with lock:
            await asyncio.sleep(0)


async def _body_of_a_bare_lease(client: aiodlock.Client) -> None:
    async with await client.lock("name").acquire():
        await asyncio.sleep(0)


async def _semaphore(client: aiodlock.Client) -> None:
    async with client.semaphore("name", 1):
        await asyncio.sleep(0)


async def _extended_body(client: aiodlock.Client) -> None:
    async with client.lock("name") as lease:
        await lease.extend()


UNCONTENDED: list[Call] = [
    _acquire_and_release,
    _acquire_with_timeout,
    _acquire_nowait,
    _release_of_the_lock,
    _body,
    _nested_bodies,
    _body_of_a_bare_lease,
    _semaphore,
    _extended_body,
]
#: Those that wait while somebody else holds the name.
CONTENDED: list[Call] = [_acquire_and_release, _acquire_with_timeout, _body]

# What a cancelled acquire hands over is released; a lease that the test itself lets go of is not
# what is tested here.
pytestmark = pytest.mark.filterwarnings("error::ResourceWarning")


async def drive(
    call: Call, client: aiodlock.Client, cancel_at: frozenset[int], when: When
) -> tuple[Steps, asyncio.Task[object]]:
    """Run a call in a task of its own."""
    inner = call(client)
    assert isinstance(inner, Coroutine)
    steps = Steps(inner, cancel_at, when)

    async def run() -> object:
        return await steps

    task = asyncio.create_task(run())
    await asyncio.wait([task], timeout=PATIENCE)
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE)
        raise AssertionError(f"cancelled at {sorted(cancel_at)}, it did not come to an end")
    return steps, task


async def cancel_everywhere(
    run: Callable[[frozenset[int], When], Awaitable[tuple[Steps, asyncio.Task[object]]]],
    check: Callable[[], Awaitable[None]],
    *,
    at_least: int,
) -> None:
    """Count the points of a run, then cancel at each, also twice in a row."""
    steps, task = await run(frozenset(), "at once")
    task.result()
    await check()
    assert steps.count >= at_least, f"only {steps.count} await points: is it still what it was?"
    for when in WHENS:
        for point in range(1, steps.count + 1):
            for twice in (False, True):
                points = frozenset({point, point + 1} if twice else {point})
                cancelled, task = await run(points, when)
                where = f"{when}, at {sorted(points)} of {steps.count}"
                if cancelled.cancelled:
                    assert task.cancelled(), f"swallowed: {where}: {task}"
                try:
                    await check()
                except AssertionError as left:
                    raise AssertionError(f"cancelled {where}: {left}") from left


@pytest.mark.parametrize("call", UNCONTENDED)
async def test_cancelled_at_every_await_it_leaves_nothing_behind(
    store: Store, make_client: MakeClient, client: aiodlock.Client, call: Call
) -> None:
    mine = await make_client()

    async def run(points: frozenset[int], when: When) -> tuple[Steps, asyncio.Task[object]]:
        return await drive(call, mine, points, when)

    async def check() -> None:
        await free_at_once(store, client)
        if call is _semaphore:
            async with client.semaphore("name", 1, timeout=SOON):
                pass
        await no_traces(store, mine)

    await cancel_everywhere(run, check, at_least=2)


@pytest.mark.parametrize("call", CONTENDED)
async def test_cancelled_at_every_await_of_a_wait_it_leaves_nothing_behind(
    store: Store, make_client: MakeClient, client: aiodlock.Client, call: Call
) -> None:
    """The holder releases when the other one waits: the grant and a cancellation may meet."""
    mine = await make_client()

    async def run(points: frozenset[int], when: When) -> tuple[Steps, asyncio.Task[object]]:
        held = await client.lock("name").acquire()
        driving = asyncio.create_task(drive(call, mine, points, when))
        await until(lambda: driving.done() or bool(waiting_places(mine)))
        await held.release()
        return await driving

    async def check() -> None:
        await free_at_once(store, client)
        await no_traces(store, mine)

    await cancel_everywhere(run, check, at_least=3)


@pytest.mark.scripted
@pytest.mark.parametrize("call", [_acquire_and_release, _body])
async def test_cancelled_while_its_scripts_are_unknown_it_leaves_nothing_behind(
    store: Store, make_client: MakeClient, client: aiodlock.Client, call: Call
) -> None:
    """Every call is then two messages."""
    mine = await make_client()
    raw = await store.raw()

    async def run(points: frozenset[int], when: When) -> tuple[Steps, asyncio.Task[object]]:
        await raw.script_flush()
        return await drive(call, mine, points, when)

    async def check() -> None:
        await free_at_once(store, client)
        await no_traces(store, mine)

    await cancel_everywhere(run, check, at_least=3)


@pytest.mark.stores("valkey9", "quorum")
@pytest.mark.scripted
async def test_cancelled_at_any_time_while_scripts_are_flushed_again_and_again_nobody_holds(
    store: Store, make_client: MakeClient, client: aiodlock.Client
) -> None:
    """A script may be unknown twice in a row, and known again meanwhile by what others sent."""
    mine, raw, random = await make_client(), await store.raw(), Random(1)
    over = asyncio.Event()

    async def flush() -> None:
        while not over.is_set():
            await asyncio.sleep(random.uniform(0, 0.004))
            await raw.script_flush()

    async def others() -> None:
        while not over.is_set():
            async with client.lock("other"):
                pass

    async def give_up(task: int) -> None:
        for number in range(50):
            acquiring = asyncio.create_task(mine.lock(f"n{task}-{number}", ttl=600).acquire())
            await asyncio.sleep(random.uniform(0, 0.003))
            acquiring.cancel()
            with suppress(asyncio.CancelledError):
                await (await acquiring).release()

    beside = [asyncio.create_task(flush()), asyncio.create_task(others())]
    await asyncio.gather(*map(give_up, range(8)))
    over.set()
    await asyncio.gather(*beside)

    async def is_free() -> bool:
        return not [info async for info in client.locks("n*")]

    await until(is_free)


@pytest.mark.stores("valkey9")
@pytest.mark.parametrize("script", [ACQUIRE, LEAVE], ids=["acquire", "leave"])
@pytest.mark.parametrize("lose", ["command", "reply"])
async def test_cancelled_while_a_message_is_lost_it_leaves_nothing_behind(
    proxy: FaultProxy,
    unlucky: aiodlock.Client,
    store: Store,
    client: aiodlock.Client,
    script: Script,
    lose: str,
) -> None:
    """A marker is left, since a duplicate may be under way; and nothing else."""

    async def run(points: frozenset[int], when: When) -> tuple[Steps, asyncio.Task[object]]:
        plan = proxy.drop_reply if lose == "reply" else proxy.drop_command
        fault = plan(calling(script))
        try:
            return await drive(_acquire_and_release, unlucky, points, when)
        finally:
            fault.release()

    async def check() -> None:
        await free_at_once(store, client)
        await no_places_soon(unlucky)
        await nothing_left(store, markers=True)

    await cancel_everywhere(run, check, at_least=3)


async def test_reader_cancelled_at_every_await_leaves_the_others_alone(
    store: Store, make_client: MakeClient, client: aiodlock.Client
) -> None:
    mine = await make_client()

    async def read(mine: aiodlock.Client) -> None:
        async with mine.rwlock("name").read:
            await asyncio.sleep(0)

    async with client.rwlock("name").read:

        async def run(points: frozenset[int], when: When) -> tuple[Steps, asyncio.Task[object]]:
            return await drive(read, mine, points, when)

        async def check() -> None:
            async def is_alone() -> bool:
                return len((await client.inspect("name")).holders) == 1

            await until(is_alone)
            await no_places_soon(mine)

        await cancel_everywhere(run, check, at_least=3)
    await nothing_left(store)


def waiting_places(client: aiodlock.Client) -> list[object]:
    return [place for place in session_of(client).requests.values() if place.woken is not None]


async def no_traces(store: Store, client: aiodlock.Client) -> None:
    await no_places_soon(client)
    assert session_of(client).register.holds_of == {}
    await nothing_left(store)


# -- in the forms in which programs cancel -----------------------------------------------------------


async def test_asyncio_timeout_around_an_acquire(store: Store, client: aiodlock.Client) -> None:
    async with client.lock("name"):
        for _ in range(5):
            with pytest.raises(TimeoutError) as raised:
                await _with_asyncio_timeout(client)
            assert not isinstance(raised.value, aiodlock.LockError)
        await queued(client, 0)
    await free_at_once(store, client)
    await no_traces(store, client)


async def _with_asyncio_timeout(client: aiodlock.Client) -> None:
    async def other_task() -> None:
        async with asyncio.timeout(0.03):
            await client.lock("name").acquire()

    await asyncio.create_task(other_task())


async def test_anyio_move_on_after_around_an_acquire(store: Store, client: aiodlock.Client) -> None:
    async def other_task() -> None:
        for _ in range(5):
            with anyio.move_on_after(0.03) as scope:
                await client.lock("name").acquire()
            assert scope.cancelled_caught

    async with client.lock("name"):
        await asyncio.create_task(other_task())
        await queued(client, 0)
    await free_at_once(store, client)
    await no_traces(store, client)


async def test_anyio_move_on_after_around_a_body(store: Store, client: aiodlock.Client) -> None:
    with anyio.move_on_after(0.05) as scope:
        async with client.lock("name"):
            await anyio.sleep(30)
    assert scope.cancelled_caught
    await free_at_once(store, client)
    await no_traces(store, client)


async def test_wait_for_around_an_acquire(store: Store, client: aiodlock.Client) -> None:
    async def other_task() -> None:
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.lock("name").acquire(), 0.03)

    async with client.lock("name"):
        await asyncio.create_task(other_task())
        await queued(client, 0)
    await free_at_once(store, client)
    await no_traces(store, client)


async def test_time_running_out_as_the_grant_arrives(
    store: Store, make_client: MakeClient, client: aiodlock.Client
) -> None:
    """Either the lease is handed over, or it is given back."""
    mine = await make_client()
    for _ in range(20):
        held = await client.lock("name").acquire()

        async def hold_for(seconds: float, held: aiodlock.Lease) -> None:
            await asyncio.sleep(seconds)
            await held.release()

        async def try_for(seconds: float) -> None:
            # Unavailable: on a busy machine the time may be over before the store has answered.
            with suppress(aiodlock.AcquireTimeout, aiodlock.BackendUnavailable):
                await (await mine.lock("name").acquire(timeout=seconds)).release()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(hold_for(0.03, held))
            tasks.create_task(try_for(0.03))
        await free_at_once(store, client)
    await no_traces(store, mine)


async def test_failing_task_group_around_many_acquires(
    store: Store, make_client: MakeClient, client: aiodlock.Client
) -> None:
    mine = await make_client()
    held = await client.lock("name").acquire()

    async def fail_when_all_wait() -> None:
        await queued(client, 100)
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as raised:  # noqa: PT012
        async with asyncio.TaskGroup() as tasks:
            for _ in range(100):
                tasks.create_task(_body(mine))
            tasks.create_task(fail_when_all_wait())
    assert raised.group_contains(ZeroDivisionError)
    assert len(raised.value.exceptions) == 1
    await queued(client, 0)
    await held.release()
    await free_at_once(store, client)
    await no_traces(store, mine)


async def test_failing_task_group_around_a_holder_and_its_waiters(
    store: Store, make_client: MakeClient, client: aiodlock.Client
) -> None:
    mine = await make_client()

    async def hold_and_fail() -> None:
        async with mine.lock("name"):
            await queued(client, 50)
            raise ZeroDivisionError

    with pytest.raises(ExceptionGroup):  # noqa: PT012
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(hold_and_fail())
            await until(lambda: session_of(mine).requests)
            for _ in range(50):
                tasks.create_task(_body(mine))
    await free_at_once(store, client)
    await no_traces(store, mine)


async def test_cancelled_release_frees_the_name(
    store: Store, make_client: MakeClient, client: aiodlock.Client
) -> None:
    mine = await make_client()
    lease = await mine.lock("name").acquire()
    task = asyncio.create_task(lease.release())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await free_at_once(store, client)
    await no_traces(store, mine)


# -- the check itself -----------------------------------------------------------------------------------


@pytest.mark.stores(
    "fakeredis"
)  # the memory store gives way before the call: nothing was done then
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_acquire_that_forgets_to_withdraw_is_noticed(
    store: Store,
    make_client: MakeClient,
    client: aiodlock.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = await make_client()

    async def forget(*_: object) -> None: ...

    monkeypatch.setattr(mine._core.session, "withdraw", forget)

    async def run(points: frozenset[int], when: When) -> tuple[Steps, asyncio.Task[object]]:
        return await drive(_acquire_and_release, mine, points, when)

    async def check() -> None:
        await (await client.lock("name").acquire_nowait()).release()

    with pytest.raises(aiodlock.WouldBlock):
        await cancel_everywhere(run, check, at_least=2)
    session = session_of(mine)
    for request in session.requests.values():
        session.departure.in_background(request)


@pytest.mark.stores("valkey9")
async def test_thousands_of_waiters_that_queue_and_are_cancelled_at_once_do_not_stall_the_loop(
    client: aiodlock.Client,
) -> None:
    """In slices: else other leases of the client get lost meanwhile."""
    number = 3000
    waiting: list[asyncio.Task[aiodlock.Lease]] = []
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with client.lock("name", ttl=60), client.lock("other", ttl=60) as other:
        counting = asyncio.create_task(count())
        waiting += [asyncio.create_task(client.lock("name").acquire()) for _ in range(number)]
        await asyncio.sleep(0)
        # They begin a hundred in a turn, and not all in this one.
        await until(lambda: len(waiting_places(client)) == number)
        assert turns > number / 150
        turns = 0
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert turns > number / 150
        assert other.held
        counting.cancel()
        await asyncio.wait([counting])
    assert all(task.cancelled() for task in waiting)
    assert all(task.cancelling() == 1 for task in waiting)
    await no_places_soon(client)


@pytest.mark.stores("memory")
async def test_cancelled_waiter_whose_turn_comes_before_its_slice_is_still_cancelled(
    client: aiodlock.Client,
) -> None:
    number = 300
    lease = await client.lock("name").acquire()
    waiting = [asyncio.create_task(client.lock("name").acquire()) for _ in range(number)]
    await until(lambda: len(waiting_places(client)) == number)
    for task in reversed(waiting):  # the next to be granted is the last to be cancelled
        task.cancel()
    await lease.release()
    await asyncio.wait(waiting)
    assert all(task.cancelled() for task in waiting)
    async with client.lock("name", timeout=PATIENCE):
        pass
