"""A thread cannot be cancelled: it is told."""

from __future__ import annotations

import gc
import logging
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from aiodlock import sync
from aiodlock._model import Kind
from aiodlock.sync._portal import Portal

from .conftest import InThread, MakeSync, end_and_take, until, waiters

# A script takes fakeredis too long for sixty threads.
pytestmark = pytest.mark.stores("memory", "redis62", "redis70", "valkey9")


def test_a_lost_lease_is_told_at_the_end_of_the_block(threads: sync.Client) -> None:
    finished = False
    with pytest.raises(sync.LockLost) as lost, threads.lock("x") as lease:
        threads.break_lock("x")
        until(lambda: not lease.held)
        assert lease.lost is not None
        assert lease.lost.reason == "broken"
        with pytest.raises(sync.LockLost):
            lease.ensure_held()
        with pytest.raises(sync.LockLost):
            threads.lock("x").acquire()  # inside the block whose lease is lost
        finished = True
    assert finished
    assert lost.value.reason == "broken"
    threads.lock("x").acquire_nowait().release()


def test_a_turn_that_comes_when_the_lease_of_a_block_around_it_is_lost_is_given_back(
    threads: sync.Client, in_thread: InThread
) -> None:
    def break_it() -> None:
        until(lambda: waiters(threads, "x") == 1)
        threads.break_lock("x")

    with pytest.raises(sync.LockLost), threads.lock("x"):
        breaking = in_thread(break_it)
        with pytest.raises(sync.LockLost):
            threads.lock("x", owner="me").acquire(timeout=10)  # it waits for the block around it
        breaking.result()
    threads.lock("x").acquire_nowait().release()


def test_the_bodys_own_exception_comes_out_with_the_loss_as_a_note(threads: sync.Client) -> None:
    with pytest.raises(ZeroDivisionError) as mine, threads.lock("x") as lease:
        threads.break_lock("x")
        until(lambda: not lease.held)
        raise ZeroDivisionError
    assert "was broken" in mine.value.__notes__[0]


def test_after_a_bare_lease_was_lost_its_thread_waits_for_a_turn_of_its_own(
    threads: sync.Client,
) -> None:
    lock = threads.lock("x")
    lease = lock.acquire()
    threads.break_lock("x")
    until(lambda: not lease.held)
    fresh = lock.acquire(timeout=5)
    assert fresh.token > lease.token
    lock.release()
    with pytest.raises(sync.LockLost):
        lock.release()
    with pytest.raises(sync.NotHeld):
        lock.release()


def test_release_by_the_lock_tells_losses_once(threads: sync.Client) -> None:
    lock = threads.lock("x")
    lost: list[sync.Lease] = []
    for _ in range(3):
        lost.append(lock.acquire(timeout=5))
        threads.break_lock("x")
        until(lambda: not lost[-1].held)
    with pytest.raises(sync.LockLost, match=str(lost[-1].token)):
        lock.release()
    with pytest.raises(sync.NotHeld):
        lock.release()
    with pytest.raises(sync.NotHeld):
        lost[-1].release()
    for lease in lost[:-1]:  # each belongs to its Lease
        with pytest.raises(sync.LockLost):
            lease.release()
    kept = lock.acquire(timeout=5)
    lock.release()
    assert not kept.held


def test_a_lease_that_is_not_extended_expires(threads: sync.Client) -> None:
    with pytest.raises(sync.LockLost) as lost:
        with threads.lock("x", ttl=0.2, auto_extend=False) as lease:
            assert lease.wait_lost().reason == "expired"
    assert lost.value.reason == "expired"


def told_in(client: sync.Client) -> int | None:
    """Return the background thread's number."""
    thread = client._life.use().portal._thread
    return None if thread is None else thread.ident


@pytest.mark.parametrize("block", [True, False], ids=["block", "bare"])
def test_on_lost_is_called_in_a_thread_of_its_own(threads: sync.Client, block: bool) -> None:
    told: list[tuple[sync.LockLost, int]] = []

    def on_lost(lost: sync.LockLost) -> None:
        told.append((lost, threading.get_ident()))

    lock = threads.lock("x", on_lost=on_lost)
    lease = lock.__enter__() if block else lock.acquire()
    again = lock.acquire() if block else None
    threads.break_lock("x")
    until(lambda: told)
    (lost, thread), *others = told
    assert not others
    assert (lost.reason, lost.name) == ("broken", "x")
    assert thread not in (threading.get_ident(), told_in(threads))
    if again is not None:
        with pytest.raises(sync.LockLost):
            again.release()
    with pytest.raises(sync.LockLost):
        lock.__exit__(None, None, None) if block else lease.release()
    assert len(told) == 1


def test_the_thread_of_on_lost_gets_signals_as_any_other(threads: sync.Client) -> None:
    blocked: list[set[int]] = []

    def on_lost(lost: sync.LockLost) -> None:
        blocked.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, [])))

    lease = threads.lock("x", on_lost=on_lost).acquire()
    threads.break_lock("x")
    until(lambda: blocked)
    assert blocked == [set(signal.pthread_sigmask(signal.SIG_BLOCK, []))]
    assert lease.lost is not None


def test_on_lost_is_not_called_for_a_release(threads: sync.Client) -> None:
    told: list[sync.LockLost] = []
    with threads.lock("x", on_lost=told.append):
        pass
    threads.lock("x", on_lost=told.append).acquire().release()
    with threads.election("e", on_lost=told.append).lead():
        pass
    with threads.multilock("a", "b", on_lost=told.append):
        pass
    assert told == []


def test_what_on_lost_raises_is_logged(
    threads: sync.Client, caplog: pytest.LogCaptureFixture
) -> None:
    def on_lost(lost: sync.LockLost) -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR, "aiodlock"):
        with pytest.raises(sync.LockLost), threads.lock("x", on_lost=on_lost):
            threads.break_lock("x")
            until(lambda: [r for r in caplog.records if "on_lost" in r.getMessage()])
    with threads.lock("x"):
        pass


def test_the_loss_of_one_name_loses_a_multilock(threads: sync.Client) -> None:
    told: list[sync.LockLost] = []
    with pytest.raises(sync.LockLost):
        with threads.multilock("a", "b", on_lost=told.append) as leases:
            threads.break_lock("b")
            assert leases.wait_lost().name == "b"
            assert not leases.held
            assert threads.lock("a").locked()
    until(lambda: told)
    assert not threads.lock("a").locked()


def test_a_lock_in_a_multilock_keeps_its_on_lost(threads: sync.Client) -> None:
    mine: list[sync.LockLost] = []
    others: list[sync.LockLost] = []
    both: list[sync.LockLost] = []
    lock = threads.lock("a", on_lost=mine.append)
    reading = threads.rwlock("b", on_lost=others.append).read
    with pytest.raises(sync.LockLost):
        # What is given twice is taken once, and told once.
        with threads.multilock(lock, reading, lock, "a", "c", on_lost=both.append):
            threads.break_lock("a")
            until(lambda: mine and both)
            threads.break_lock("b")
            until(lambda: others)
            threads.break_lock("c")
    assert [lost.name for lost in mine] == ["a"]
    assert [lost.name for lost in others] == ["b"]
    assert [lost.name for lost in both] == ["a"]
    leases = threads.multilock(lock, "b").acquire()
    threads.break_lock("a")
    until(lambda: len(mine) == 2)
    with pytest.raises(sync.LockLost):
        leases.release()
    with threads.multilock(lock, reading):
        pass
    assert (len(mine), len(others), len(both)) == (2, 1, 1)


def test_on_lost_of_a_lock_is_called_once_though_a_multilock_enters_it_again(
    threads: sync.Client,
) -> None:
    told: list[sync.LockLost] = []
    lock = threads.lock("a", on_lost=told.append)
    with pytest.raises(sync.LockLost), lock, threads.multilock(lock, "b") as leases:
        threads.break_lock("a")
        leases.wait_lost()
        until(lambda: told)
    assert [lost.name for lost in told] == ["a"]


@pytest.mark.parametrize("how", ["lock", "multilock"])
def test_on_lost_is_called_though_only_a_reentry_is_left(threads: sync.Client, how: str) -> None:
    told: list[sync.LockLost] = []
    lock = threads.lock("a", on_lost=told.append)
    with lock:
        kept = lock.acquire() if how == "lock" else threads.multilock(lock, "b").acquire()
    threads.break_lock("a")
    until(lambda: told)
    kept.wait_lost()
    with pytest.raises(sync.LockLost):
        kept.release()
    assert [lost.name for lost in told] == ["a"]


def test_on_lost_of_a_reentry_is_called_too_if_it_is_another(threads: sync.Client) -> None:
    outer: list[sync.LockLost] = []
    inner: list[sync.LockLost] = []
    with pytest.raises(sync.LockLost), threads.lock("a", on_lost=outer.append):
        with threads.lock("a", on_lost=inner.append), threads.lock("a", on_lost=inner.append):
            threads.break_lock("a")
            until(lambda: outer and inner)
    assert [lost.name for lost in (*outer, *inner)] == ["a", "a"]


def test_a_multilock_of_a_thread_that_has_ended_is_released_although_a_lock_has_on_lost(
    threads: sync.Client,
) -> None:
    told: list[sync.LockLost] = []
    both = threads.multilock(threads.lock("a", on_lost=told.append), "b")
    thread = threading.Thread(target=both.acquire)
    with pytest.warns(ResourceWarning, match="forgotten|when the thread that acquired it ended"):
        end_and_take(thread, threads.lock("a"))
    assert told == []


def test_waiting_for_a_loss_ends_with_the_release(
    threads: sync.Client, in_thread: InThread
) -> None:
    lease = threads.lock("x").acquire()
    watching = in_thread(lease.wait_lost)
    lease.release()
    with pytest.raises(sync.NotHeld):
        watching.result(10)


def test_lost_lease_is_not_kept_by_the_function_that_was_told(threads: sync.Client) -> None:
    class Job:
        def __init__(self) -> None:
            self.told = 0
            self.lock = threads.lock("x", on_lost=self.lost)

        def lost(self, _: sync.LockLost) -> None:
            self.told += 1

        def run(self) -> None:
            with pytest.raises(sync.LockLost), self.lock as self.lease:
                threads.break_lock("x")
                until(lambda: self.told)

    job = Job()
    job.run()
    known = weakref.ref(job)
    del job

    def is_gone() -> bool:
        gc.collect()
        return known() is None

    until(is_gone)


@pytest.mark.parametrize("names", ["a", "ab"])
def test_lease_that_was_lost_before_its_block_is_left_by_entering_it(
    threads: sync.Client, names: str
) -> None:
    lease = (threads.lock("a") if names == "a" else threads.multilock(*names)).acquire()
    threads.break_lock("a")
    lease.wait_lost()
    with pytest.raises(sync.LockLost), lease:
        raise AssertionError
    for name in names:
        threads.lock(name).acquire(timeout=5).release()
    with pytest.raises(sync.NotHeld):
        lease.release()


def test_lost_block_is_still_open_when_its_lease_cannot_be_entered_again(
    threads: sync.Client,
) -> None:
    with pytest.raises(sync.LockLost), threads.lock("x").acquire() as lease:
        threads.break_lock("x")
        lease.wait_lost()
        with pytest.raises(sync.LockLost), lease:
            raise AssertionError
        with pytest.raises(sync.LockLost):
            threads.lock("x").acquire()


MAKERS: dict[str, Callable[[sync.Client], Any]] = {
    "lock": lambda client: client.lock("x", hold_at_least=600),
    "semaphore": lambda client: client.semaphore("x", limit=1, hold_at_least=600),
    "multilock": lambda client: client.multilock("w", "x", hold_at_least=600),
    "once": lambda client: client.once("x", keep=600, hold_at_least=600),
    "election": lambda client: client.election("x", hold_at_least=600).lead(),
}
KINDS: dict[str, Kind] = {"semaphore": "semaphore", "once": "once"}
WAYS = [(what, "block") for what in MAKERS]
WAYS += [(what, "bare") for what in MAKERS if what not in ("once", "election")]


# A bare lease that came when its call had been interrupted already is dropped.
@pytest.mark.filterwarnings("ignore:.*forgotten:ResourceWarning")
@pytest.mark.filterwarnings("ignore:.*thread that acquired it ended:ResourceWarning")
@pytest.mark.parametrize("how", ["closed", "interrupted"])
@pytest.mark.parametrize(("what", "way"), WAYS)
def test_body_does_not_begin_when_its_lease_ends_on_the_way_into_the_thread(
    make_sync: MakeSync, monkeypatch: pytest.MonkeyPatch, what: str, way: str, how: str
) -> None:
    client, other = make_sync(close_timeout=0.1), make_sync()
    made = MAKERS[what](client)
    call = Portal.call

    def call_and_end_it(
        portal: Portal, work: Any, take_back: Any = None, *, within: float | None = None
    ) -> Any:
        result = call(portal, work, take_back, within=within)
        if take_back is not None:  # granted
            monkeypatch.undo()
            if how == "interrupted":
                raise KeyboardInterrupt
            client.close()
        return result

    monkeypatch.setattr(Portal, "call", call_and_end_it)
    with pytest.raises(sync.LockLost if how == "closed" else KeyboardInterrupt):
        with made if way == "block" else made.acquire():
            raise AssertionError
    gc.collect()
    kind = KINDS.get(what, "lock")
    for name in ("w", "x"):
        until(lambda name=name: not other.inspect(name, kind=kind).holders)  # type: ignore[misc]
        assert not other.inspect(name, kind=kind).closed
