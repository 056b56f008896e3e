"""Whose a hold is: the thread's that entered the block, or that acquired without one."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from multiprocessing.pool import ThreadPool
from typing import Any

import anyio.to_thread
import pytest

from aiodlock import sync
from aiodlock._clock import now
from aiodlock.sync import _holds

from ..servers import Store
from .conftest import InThread, MakeSync, end_and_take, until, until_extended, waiters

# A script takes fakeredis too long for sixty threads.
pytestmark = pytest.mark.stores("memory", "redis62", "redis70", "valkey9")


def test_a_thread_inside_a_block_gets_in_again(threads: sync.Client, in_thread: InThread) -> None:
    with threads.lock("x") as outer:
        with threads.lock("x", ttl=2.0) as inner:
            assert inner.token == outer.token
            assert inner.ttl == outer.ttl
        bare = threads.lock("x").acquire(timeout=1)
        assert bare.token == outer.token
        bare.release()
        assert outer.held
        with pytest.raises(sync.WouldBlock):
            in_thread(threads.lock("x").acquire_nowait).result(10)
    threads.lock("x").acquire_nowait().release()


def test_a_hold_without_a_block_lets_its_own_thread_in(
    threads: sync.Client, in_thread: InThread
) -> None:
    lease = threads.lock("x").acquire()
    again = threads.lock("x").acquire_nowait()
    assert again.token == lease.token
    again.release()
    with pytest.raises(sync.WouldBlock):
        in_thread(threads.lock("x").acquire_nowait).result(10)
    with lease:
        threads.lock("x").acquire_nowait().release()
    with pytest.raises(sync.NotHeld):
        lease.release()
    in_thread(lambda: threads.lock("x").acquire_nowait().release()).result(10)


def test_a_lease_may_be_released_by_another_thread(
    threads: sync.Client, in_thread: InThread
) -> None:
    lease = threads.lock("x").acquire()
    in_thread(lease.release).result(10)
    threads.lock("x").acquire_nowait().release()


def test_multilock_waits_for_a_name_that_another_thread_has_released_meanwhile(
    threads: sync.Client, in_thread: InThread
) -> None:
    first = threads.lock("a").acquire()
    mine = threads.lock("b").acquire()

    def take_both() -> int:
        with mine, threads.multilock("a", "b") as leases:
            assert leases.held
            return leases.tokens["b"]

    both = in_thread(take_both)
    until(lambda: waiters(threads, "a") == 1)
    mine.release()
    with threads.lock("b") as other:
        first.release()
        until(lambda: waiters(threads, "b") == 1 or both.done())
        assert not both.done()
    with pytest.raises(sync.NotHeld):
        mine.release()
    assert both.result(10) > other.token


def test_release_of_a_lock_ends_this_threads_latest_hold(
    threads: sync.Client, in_thread: InThread
) -> None:
    lock = threads.lock("x")
    lease = lock.acquire()
    with pytest.raises(sync.NotHeld, match=f"thread '{threading.current_thread().name}' does"):
        in_thread(lock.release).result(10)
    with pytest.raises(sync.NotHeld):
        threads.rwlock("x").read.release()
    lock.release()
    assert not lease.held
    with pytest.raises(sync.NotHeld):
        lock.release()
    with lock as outer, lock as inner:
        lock.release()
        assert outer.held
        assert not inner.held


@pytest.mark.parametrize("how", ["lock", "semaphore", "multilock"])
def test_a_thread_that_drops_its_lease_holds_on(
    threads: sync.Client, in_thread: InThread, how: str
) -> None:
    makers: dict[str, Callable[[], Any]] = {
        "lock": lambda: threads.lock("x", ttl=6.0),
        "semaphore": lambda: threads.semaphore("x", limit=1, ttl=6.0),
        "multilock": lambda: threads.multilock("x", "y", ttl=6.0),
    }
    lock = threads.lock("x", ttl=6.0) if how == "multilock" else makers[how]()
    if makers[how]().acquire(timeout=30):
        try:
            gc.collect()
            until_extended(lock)
            with pytest.raises(sync.WouldBlock):
                in_thread(lock.acquire_nowait).result(10)
        finally:
            lock.release()
    in_thread(lock.acquire_nowait).result(10).release()
    with pytest.raises(sync.NotHeld):
        lock.release()


@pytest.mark.parametrize("kept", ["kept", "dropped"])
def test_what_a_thread_holds_is_released_with_a_warning_when_it_ends(
    threads: sync.Client, caplog: pytest.LogCaptureFixture, kept: str
) -> None:
    told: list[sync.LockLost] = []
    leases: list[sync.Lease] = []

    def hold() -> None:
        lease = threads.lock("x", on_lost=told.append).acquire()
        if kept == "kept":
            leases.append(lease)

    thread = threading.Thread(target=hold)
    ended = "when the thread that acquired it ended"
    # Where nobody has the lease, the collector may be first.
    with pytest.warns(ResourceWarning, match=ended if kept == "kept" else "forgotten|" + ended):
        end_and_take(thread, threads.lock("x"))
    assert "forgotten" in [getattr(record, "event", None) for record in caplog.records]
    assert not told
    for lease in leases:
        assert not lease.held
        for call in (lease.release, lease.ensure_held):
            with pytest.raises(sync.NotHeld, match="ended with the thread that acquired it"):
                call()


def test_a_hold_keeps_no_client(make_sync: MakeSync, store: Store) -> None:
    other = make_sync()
    client = sync.Client(store.source, **store.options)
    client.lock("x").acquire()
    del client
    gc.collect()
    other.lock("x").acquire(timeout=10).release()


def in_jobs_of_one_thread(how: str, *jobs: Callable[[], Any]) -> list[Any]:
    if how == "anyio":  # as FastAPI runs dependencies and handlers without async

        async def one_by_one() -> list[Any]:
            return [await anyio.to_thread.run_sync(job) for job in jobs]

        return anyio.run(one_by_one)
    if how == "to_thread":

        async def main() -> list[Any]:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
            return [await asyncio.to_thread(job) for job in jobs]

        return asyncio.run(main())
    if how == "run_in_executor":

        async def run() -> list[Any]:
            with ThreadPoolExecutor(1) as executor:
                run_in = asyncio.get_running_loop().run_in_executor
                return [await run_in(executor, job) for job in jobs]

        return asyncio.run(run())
    if how == "pool":
        with ThreadPool(1) as pool_of_threads:
            return [pool_of_threads.apply(job) for job in jobs]
    with ThreadPoolExecutor(1) as pool:
        return [pool.submit(job).result(20) for job in jobs]


@pytest.mark.parametrize("how", ["to_thread", "anyio", "executor", "pool"])
def test_the_next_job_of_a_thread_waits_for_what_the_one_before_holds(
    threads: sync.Client, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    lock = threads.lock("x")
    leases: list[sync.Lease] = []

    def first() -> None:
        leases.append(lock.acquire())
        assert lock.acquire_nowait().token == leases[0].token  # which is dropped
        lock.release()

    def second() -> None:
        with pytest.raises(sync.AcquireTimeout):
            lock.acquire(timeout=1)
        with pytest.raises(sync.WouldBlock):
            lock.acquire_nowait()
        assert leases[0].held
        leases[0].release()
        lock.acquire(timeout=30).release()

    in_jobs_of_one_thread(how, first, second)
    events = [getattr(record, "event", None) for record in caplog.records]
    assert events.count("waits_for_job") == 1


def test_a_hold_that_nobody_references_is_told_of_after_three_ttls(
    threads: sync.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads.lock("x").acquire()
    kept = threads.lock("y").acquire()
    looks: list[float] = []

    def later() -> float:
        looks.append(now() + 3 * kept.ttl)
        return looks[-1]

    def told() -> list[str]:
        return [one.message for one in caplog.records if "max_hold" in one.message]

    assert not told()
    monkeypatch.setattr(_holds, "now", later)
    until(lambda: len(looks) >= 3)
    assert len(told()) == 1
    assert "'x'" in told()[0]
    threads.lock("x").release()
    kept.release()


def test_a_block_may_be_left_by_another_thread(threads: sync.Client, in_thread: InThread) -> None:
    lock = threads.lock("x")
    lease = in_thread(lock.__enter__).result(10)
    lock.__exit__(None, None, None)
    assert not lease.held
    # The thread that had entered it is not inside any more.
    threads.lock("x").acquire_nowait().release()


def test_each_thread_leaves_its_own_block_of_a_shared_lock(
    threads: sync.Client, in_thread: InThread
) -> None:
    shared = threads.rwlock("x").read
    entered, leave = threading.Barrier(3), threading.Event()

    def body() -> bool:
        with shared as lease:
            entered.wait(10)
            leave.wait(10)
            return lease.held

    both = [in_thread(body), in_thread(body)]
    entered.wait(10)
    with pytest.raises(RuntimeError, match="enter the lease"):
        shared.__exit__(None, None, None)
    assert len(threads.inspect("x").holders) == 2
    leave.set()
    assert [one.result(10) for one in both] == [True, True]


@pytest.mark.parametrize("kind", ["lock", "multilock", "once"])
def test_refusal_to_leave_a_block_hides_nothing_that_comes_out_of_the_body(
    threads: sync.Client, kind: str
) -> None:
    once = threads.once("x", keep=60)
    with once as run:
        run.result = "done"
    read = threads.rwlock("x").read
    shared: Any = {"lock": read, "multilock": threads.multilock(read), "once": once}[kind]

    stack, error = ExitStack(), ValueError("mine")
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        one.submit(stack.enter_context, shared).result(10)
        other.submit(shared.__enter__).result(10)
        with pytest.raises(ValueError, match="mine") as raised, stack:
            raise error
        for thread in (one, other):
            thread.submit(shared.__exit__, None, None, None).result(10)
    assert raised.value is error
    assert any("not clear" in note for note in error.__notes__)


def test_the_block_of_a_thread_that_has_ended_is_the_one_that_is_left(
    threads: sync.Client, in_thread: InThread
) -> None:
    shared = threads.rwlock("x").read
    thread = threading.Thread(target=shared.__enter__)
    thread.start()
    thread.join(10)
    inside, leave = threading.Event(), threading.Event()

    def body() -> None:
        with shared:
            inside.set()
            leave.wait(10)

    other = in_thread(body)
    assert inside.wait(10)
    gc.collect()
    shared.__exit__(None, None, None)
    assert len(threads.inspect("x").holders) == 1
    leave.set()
    other.result(10)


def test_a_lease_is_the_body_of_one_thread(threads: sync.Client, in_thread: InThread) -> None:
    lease = threads.lock("x").acquire()
    with lease, pytest.raises(RuntimeError, match="another thread"):
        in_thread(lease.__enter__).result(10)
    assert not lease.held
    leases = threads.multilock("x", "y").acquire()
    with leases, pytest.raises(RuntimeError, match="another thread"):
        in_thread(leases.__enter__).result(10)
    assert not leases.held


@pytest.mark.parametrize("how", ["lock", "multilock"])
def test_a_lease_that_threads_enter_together_is_the_body_of_one(
    threads: sync.Client, in_thread: InThread, how: str
) -> None:
    """Arming it takes a hop to the loop, in which the others come."""
    shared = threads.lock("x") if how == "lock" else threads.multilock("x", "y")
    lease, begin, leave = shared.acquire(), threading.Barrier(4), threading.Event()
    refused: list[str] = []

    def enter() -> None:
        begin.wait(30)
        try:
            with lease:
                leave.wait(30)
        except RuntimeError as error:
            refused.append(str(error))
            if len(refused) == 3:
                leave.set()

    for done in [in_thread(enter) for _ in range(4)]:
        done.result(60)
    assert len(refused) == 3


def test_of_two_threads_that_enter_a_lease_in_one_moment_one_is_refused(
    threads: sync.Client, in_thread: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have begun to enter it, and neither is inside yet."""
    lease, both, leave = threads.lock("x").acquire(), threading.Barrier(2), threading.Event()
    told: list[str] = []
    mark = _holds.Here.mark

    def mark_together(me: _holds.Here) -> _holds.Mark:
        both.wait(30)
        return mark(me)

    def enter() -> None:
        try:
            with lease:
                told.append("inside")
                leave.wait(60)
        except RuntimeError as error:
            told.append(str(error))

    monkeypatch.setattr(_holds.Here, "mark", mark_together)
    entered = [in_thread(enter), in_thread(enter)]
    until(lambda: len(told) == 2)
    assert "inside" in told
    assert any("another thread" in one for one in told)
    assert lease.held
    leave.set()
    for done in entered:
        done.result(60)
    assert not lease.held


async def test_a_thread_with_a_running_loop_gets_advice() -> None:
    client = sync.Client("memory://")
    for call in (
        client.lock("x").acquire,
        client.lock("x").acquire_nowait,
        client.lock("x").locked,
        client.lock("x").__enter__,
        client.multilock("x").acquire,
        client.election("x").lead().__enter__,
        client.__enter__,
        lambda: client.inspect("x"),
        lambda: next(client.locks()),
    ):
        with pytest.raises(RuntimeError, match="to_thread"):
            call()
    lease = await asyncio.to_thread(client.lock("x").acquire)
    with pytest.raises(RuntimeError, match="to_thread"):
        lease.release()
    assert lease.held
    await asyncio.to_thread(lease.release)
    await asyncio.to_thread(client.close)


async def test_a_block_that_is_left_in_a_running_loop_is_released_without_blocking_it() -> None:
    client = sync.Client("memory://")
    lock = client.lock("x")
    lease = await asyncio.to_thread(lock.__enter__)
    lock.__exit__(None, None, None)

    def released() -> None:
        client.lock("x").acquire(timeout=5).release()

    await asyncio.to_thread(released)
    assert not lease.held
    await asyncio.to_thread(client.close)


def test_a_collected_generator_leaves_its_block(threads: sync.Client) -> None:
    def rows() -> Iterator[int]:
        with threads.lock("x"):
            yield 1

    reading = rows()
    assert next(reading) == 1
    assert threads.lock("x").locked()
    del reading
    gc.collect()
    assert not threads.lock("x").locked()


def test_sixty_threads_of_which_half_gives_up(threads: sync.Client, in_thread: InThread) -> None:
    def work(number: int) -> bool:
        try:
            with threads.lock("x", timeout=0.03 if number % 2 else 30):
                time.sleep(0.002)
                return True
        except (sync.AcquireTimeout, sync.BackendUnavailable):  # where no answer was in time
            return False

    assert not threads.lock("x").locked()  # connected
    results = [done.result(60) for done in [in_thread(work, number) for number in range(60)]]
    assert all(results[0::2])
    until(lambda: waiters(threads, "x") == 0)
    assert not threads.lock("x").locked()


@pytest.mark.parametrize("kind", ["lock", "semaphore"])
def test_generator_that_is_closed_in_another_block_leaves_its_own(
    threads: sync.Client, kind: str
) -> None:
    def numbers() -> Iterator[int]:
        with shared as lease:
            leases.append(lease)
            yield 1
            yield 2

    leases: list[sync.Lease] = []
    shared = threads.rwlock("x").read if kind == "lock" else threads.semaphore("x", limit=3)
    for _ in (generator := numbers()):
        break
    with shared as mine:
        generator.close()  # type: ignore[attr-defined]
        assert mine.held
        assert not leases[0].held
    assert not shared.inspect().holders


def test_job_of_a_pool_is_not_inside_what_another_job_has_entered_in_its_thread(
    threads: sync.Client,
) -> None:
    """As FastAPI runs dependencies without async: up to the yield in a thread, the rest in any other."""

    @contextmanager
    def holding(timeout: float = 30) -> Iterator[sync.Lease]:
        with threads.lock("x", timeout=timeout) as lease:
            yield lease

    with ThreadPoolExecutor(1) as pool:

        def in_a_job(call: Callable[[], Any]) -> Any:
            return pool.submit(copy_context().run, call).result(60)

        def again() -> None:
            with holding() as outer, holding() as inner:
                assert inner.token == outer.token

        first = holding()
        lease = in_a_job(first.__enter__)
        with pytest.raises(sync.AcquireTimeout):
            in_a_job(holding(timeout=1).__enter__)
        assert lease.held
        first.__exit__(None, None, None)
        in_a_job(again)


@pytest.mark.parametrize("how", ["executor", "run_in_executor", "pool"])
def test_job_of_a_pool_that_shares_one_context_is_not_inside_of_anothers_block(
    threads: sync.Client, how: str
) -> None:
    leases: list[sync.Lease] = []

    def first() -> None:
        with threads.lock("x"), threads.lock("x") as again:  # a job's own block lets it in
            assert again.held
        leases.append(threads.lock("x").__enter__())

    def second() -> None:
        with pytest.raises(sync.WouldBlock):
            threads.lock("x").acquire_nowait()
        with pytest.raises(sync.AcquireTimeout), threads.lock("x", timeout=0.5):
            pass
        assert leases[0].held
        leases[0].__exit__(None, None, None)
        with threads.lock("x", timeout=30):
            pass

    in_jobs_of_one_thread(how, first, second)


@pytest.mark.parametrize("kind", ["lock", "semaphore", "read"])
def test_function_leaves_its_own_block_beside_a_generator_that_is_still_open(
    threads: sync.Client, kind: str
) -> None:
    lock: sync.Lock | sync.Semaphore
    match kind:
        case "lock":
            lock = threads.lock("x")
        case "semaphore":
            lock = threads.semaphore("x", 2)
        case _:
            lock = threads.rwlock("x").read

    def read() -> Iterator[sync.Lease]:
        with lock as lease:
            yield lease

    with lock as mine:
        reading = read()
        other = next(reading)
    assert (mine.held, other.held) == (False, True)
    next(reading, None)
    assert not other.held
    assert not lock.locked()


def test_coroutine_of_another_loop_leaves_its_own_block(threads: sync.Client) -> None:
    """Of a framework that asyncio does not know, as trio."""
    semaphore = threads.semaphore("x", 2)

    class Pause:
        def __await__(self) -> Generator[None, None, None]:
            yield

    async def hold(leases: list[sync.Lease]) -> None:
        with semaphore as lease:
            leases.append(lease)
            await Pause()

    leases: list[sync.Lease] = []
    first, second = hold(leases), hold(leases)
    first.send(None)
    second.send(None)
    with pytest.raises(StopIteration):
        first.send(None)
    assert [lease.held for lease in leases] == [False, True]
    with pytest.raises(StopIteration):
        second.send(None)


def test_body_of_a_lease_that_another_thread_ends_meanwhile_does_not_begin(
    threads: sync.Client, in_thread: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = threads.lock("x").acquire()
    looked, begun = lease.ensure_held, list[bool]()

    def look() -> None:
        looked()
        monkeypatch.undo()
        in_thread(lease.release).result(10)  # between the look and the body

    monkeypatch.setattr(type(lease), "ensure_held", lambda _: look())
    with pytest.raises(sync.NotHeld), lease:
        begun.append(lease.held)
    assert begun == []
    threads.lock("x").acquire_nowait().release()


def test_error_that_is_kept_keeps_no_hold_beyond_its_thread(threads: sync.Client) -> None:
    kept: list[sync.NotHeld] = []

    def hold() -> None:
        threads.lock("x").acquire()
        try:
            threads.lock("y").release()
        except sync.NotHeld as error:
            kept.append(error)

    thread = threading.Thread(target=hold)
    with pytest.warns(ResourceWarning):  # noqa: PT031
        thread.start()
        thread.join()
        until(lambda: not threads.lock("x").locked())
    assert kept
