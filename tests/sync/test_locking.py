"""aiodlock.sync does for threads what aiodlock does for tasks."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import wait

import pytest
import redis

import aiodlock
from aiodlock import sync

from ..conftest import MakeClient
from ..servers import Store
from .conftest import InThread, MakeSync, until, waiters

# A script takes fakeredis too long for sixty threads.
pytestmark = pytest.mark.stores("memory", "redis62", "redis70", "valkey9")


def test_a_block_holds_the_lock_and_leaving_releases_it(threads: sync.Client) -> None:
    with threads.lock("order:42") as lease:
        lease.ensure_held()
        assert lease.token > 0
        assert lease.remaining() > 1.0
        assert (lease.name, lease.mode) == ("order:42", "exclusive")
        assert threads.lock("order:42").locked()
        assert threads.check_sequencer(lease.sequencer)
        (holder,) = threads.inspect("order:42").holders
        assert holder.token == lease.token
    assert not lease.held
    assert not threads.lock("order:42").locked()
    with pytest.raises(sync.NotHeld):
        lease.release()


def test_threads_of_one_client_exclude_each_other(
    threads: sync.Client, in_thread: InThread
) -> None:
    inside, most, turns = 0, 0, 0

    def work() -> None:
        nonlocal inside, most, turns
        for _ in range(10):
            with threads.lock("x"):
                inside += 1
                most = max(most, inside)
                time.sleep(0.0005)
                turns += 1
                inside -= 1

    for done in [in_thread(work) for _ in range(16)]:
        done.result(60)
    assert (most, turns) == (1, 160)


def test_threads_are_served_in_order_of_arrival(threads: sync.Client, in_thread: InThread) -> None:
    order: list[int] = []

    def work(number: int) -> None:
        with threads.lock("x"):
            order.append(number)

    with threads.lock("x"):
        started = []
        for number in range(8):
            started.append(in_thread(work, number))
            until(lambda before=number: waiters(threads, "x") == before + 1)  # type: ignore[misc]
    wait(started, 30)
    assert order == list(range(8))


async def test_a_thread_and_a_task_exclude_each_other(
    store: Store, make_client: MakeClient
) -> None:
    theirs = await make_client()
    ours = sync.Client(store.source, **store.options)

    def blocked() -> bool:
        try:
            ours.lock("x").acquire_nowait().release()
        except sync.WouldBlock:
            return True
        return False

    try:
        if not store.is_memory:
            async with theirs.lock("x"):
                assert await asyncio.to_thread(blocked)
            assert not await asyncio.to_thread(blocked)
    finally:
        await asyncio.to_thread(ours.close)


def test_a_timeout_ends_the_wait_and_leaves_the_queue(
    threads: sync.Client, in_thread: InThread
) -> None:
    lease = in_thread(threads.lock("x").acquire).result(10)
    with pytest.raises(sync.AcquireTimeout):
        threads.lock("x").acquire(timeout=0.05)
    with pytest.raises(sync.AcquireTimeout), threads.lock("x", timeout=0.05):
        pytest.fail("two hold")
    with pytest.raises(sync.WouldBlock):
        threads.lock("x").acquire_nowait()
    assert waiters(threads, "x") == 0
    lease.release()


def test_extending_by_hand(threads: sync.Client) -> None:
    with threads.lock("x", ttl=1.0, auto_extend=False) as lease:
        lease.extend(20.0)
        assert lease.remaining() > 15.0
        assert lease.ttl == 20.0


def test_readers_share_and_a_writer_waits(threads: sync.Client, in_thread: InThread) -> None:
    prices = threads.rwlock("prices")
    assert prices.name == "prices"
    with prices.read as mine:
        other = in_thread(lambda: prices.read.acquire(timeout=5)).result(10)
        assert mine.mode == other.mode == "shared"
        other.release()
        with pytest.raises(sync.DeadlockError):
            prices.write.acquire(timeout=1)
        writer = in_thread(lambda: prices.write.acquire(timeout=10))
        until(lambda: waiters(threads, "prices") == 1)
    writer.result(10).release()


def test_a_writer_may_read_and_so_downgrade(threads: sync.Client, in_thread: InThread) -> None:
    prices = threads.rwlock("prices")
    with prices.write as write, prices.read as read:
        assert read.token == write.token
        write.release()
        in_thread(lambda: prices.read.acquire(timeout=5).release()).result(10)


def test_a_semaphore_has_so_many_holders(threads: sync.Client) -> None:
    smtp = threads.semaphore("smtp", 2)
    assert smtp.limit == 2
    with smtp, smtp:
        assert smtp.locked()
        with pytest.raises(sync.WouldBlock):
            smtp.acquire_nowait()
    with smtp:
        assert not smtp.locked()
    assert not smtp.locked()


@pytest.mark.parametrize("kind", ["Lock", "Semaphore"])
def test_locked_says_that_it_answers_what_it_answers_for_tasks(kind: str) -> None:
    ours, theirs = getattr(sync, kind).locked, getattr(aiodlock, kind).locked
    first_line = [str(inspect.getdoc(locked)).partition("\n")[0] for locked in (ours, theirs)]
    assert first_line[0] == first_line[1]


def test_a_multilock_takes_all_or_none(threads: sync.Client, in_thread: InThread) -> None:
    both = threads.multilock("b", threads.lock("a"))
    in_vain = threads.multilock("b", threads.lock("a"), timeout=0.1)
    assert both.names == ("a", "b")
    with both as leases:
        assert list(leases) == ["a", "b"]
        assert leases.tokens == {name: lease.token for name, lease in leases.items()}
        leases.ensure_held()
        with threads.lock("a") as again:  # its own thread is inside
            assert again.token == leases["a"].token
        with pytest.raises(sync.AcquireTimeout):
            in_thread(in_vain.acquire).result(10)
    assert not leases.held
    held = in_thread(threads.lock("b").acquire).result(10)
    with pytest.raises(sync.AcquireTimeout):
        in_vain.acquire()
    assert not threads.lock("a").locked()
    held.release()
    taken = both.acquire()
    taken.release()
    with pytest.raises(sync.NotHeld):
        taken.release()


def test_an_election_has_one_leader_and_tells_its_value(
    threads: sync.Client, in_thread: InThread
) -> None:
    election = threads.election("scheduler")
    leaders = election.observe(interval=0.1)
    with election.lead("host-1") as lease:
        assert lease.held
        assert next(leaders) == "host-1"
        second = in_thread(election.lead("host-2").__enter__)
        until(lambda: waiters(threads, "scheduler") == 1)
    assert next(leaders) == "host-2"
    second.result(10).release()
    del leaders


def test_locks_are_listed_and_broken(threads: sync.Client) -> None:
    with pytest.raises(sync.LockLost, match="broken") as lost:
        with threads.lock("order:1"), threads.lock("bill:1"):
            assert {info.name for info in threads.locks("order:*")} == {"order:1"}
            assert len(list(threads.locks())) == 2
            assert threads.break_lock("order:1") == 1
    assert lost.value.reason == "broken"


def test_what_iterates_keeps_its_client_open_as_long_as_it_is_needed(
    threads: sync.Client, store: Store
) -> None:
    clients: weakref.WeakSet[sync.Client] = weakref.WeakSet()

    def client() -> sync.Client:
        made = sync.Client(store.source, **store.options)
        clients.add(made)
        return made

    with threads.election("x").lead("host-1"):
        assert [info.name for info in client().locks()] == ["x"]
        assert next(client().election("x").observe()) == "host-1"
        leaders, infos = client().election("x").observe(), client().locks("x*")
        gc.collect()
        assert next(leaders) == "host-1"
        assert [info.name for info in infos] == ["x"]
        del leaders
        gc.collect()
        assert not clients


def test_wrong_arguments_are_told_before_anything_is_iterated(make_sync: MakeSync) -> None:
    client = make_sync()
    for wrong, of in ((5, TypeError), (None, TypeError)):
        with pytest.raises(of, match="match"):
            client.locks(wrong)  # type: ignore[arg-type]
    for kind in ("wait", "file", 5):
        with pytest.raises(ValueError, match="kind"):
            client.locks(kind=kind)  # type: ignore[arg-type]
    election = client.election("x")
    with pytest.raises(ValueError, match="interval"):
        election.observe(interval=0)
    with pytest.raises(TypeError, match="interval"):
        election.observe(interval="5")  # type: ignore[arg-type]
    assert list(client.locks("")) == []
    client.close()
    for closed in (client.locks, election.observe):
        with pytest.raises(sync.ClientClosed):
            closed()


def test_a_client_is_opened_by_the_first_use_and_by_entering(make_sync: MakeSync) -> None:
    client = make_sync()
    assert "not connected yet" in repr(client)
    with client.lock("x"):
        assert repr(client).endswith(" open>")
    with client:
        with pytest.raises(RuntimeError, match="entered already"), client:
            pytest.fail("entered twice")
    assert repr(client).endswith(" closed>")
    with pytest.raises(sync.ClientClosed, match="was closed"):
        client.lock("x").acquire()
    with pytest.raises(sync.ClientClosed):
        client.inspect("x")
    client.close()
    with client, client.lock("x") as lease:
        assert lease.held


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_client_is_not_copied_for_the_end_of_a_copy_would_close_it(
    threads: sync.Client, way: Callable[[object], object]
) -> None:
    lock = threads.lock("x")
    with lock as lease:
        with pytest.raises(TypeError, match="make one in each process"):
            way(threads)
        gc.collect()
        assert lease.held
    with pytest.raises(TypeError, match="make one in each process"):
        pickle.dumps(lock)


def test_closing_ends_waits_and_releases(
    make_sync: MakeSync, threads: sync.Client, in_thread: InThread
) -> None:
    client = make_sync()
    with threads.lock("x"):
        waiting = in_thread(client.lock("x").acquire)
        until(lambda: waiters(threads, "x") == 1)
        kept = client.lock("y").acquire()
        client.close()
        with pytest.raises(sync.ClientClosed):
            waiting.result(10)
        assert waiters(threads, "x") == 0
    assert kept.lost is not None
    assert kept.lost.reason == "closed"
    threads.lock("y").acquire_nowait().release()


def test_closing_waits_for_the_blocks_of_other_threads(
    make_sync: MakeSync, threads: sync.Client, in_thread: InThread
) -> None:
    client = make_sync()
    inside, go_on = threading.Event(), threading.Event()

    def body() -> None:
        with client.lock("x") as lease:
            inside.set()
            until(lambda: not lease.held)
            go_on.wait(10)

    running = in_thread(body)
    assert inside.wait(10)
    closing = in_thread(client.close)
    time.sleep(0.05)
    assert threads.lock("x").locked()
    go_on.set()
    closing.result(10)
    with pytest.raises(sync.LockLost) as lost:
        running.result(10)
    assert lost.value.reason == "closed"
    threads.lock("x").acquire_nowait().release()


def test_closing_in_its_own_block_does_not_wait_for_it(make_sync: MakeSync) -> None:
    client = make_sync()
    started = time.monotonic()
    with pytest.raises(sync.LockLost), client.lock("x"):
        client.close()
    assert time.monotonic() - started < 4.0


@pytest.mark.stores("valkey9")
def test_a_store_that_does_not_answer_is_told_by_each_call(make_sync: MakeSync) -> None:
    client = make_sync("redis://127.0.0.1:1/0")
    started = time.monotonic()
    with pytest.raises(sync.BackendUnavailable):
        client.lock("x").acquire(timeout=0)
    with pytest.raises(sync.BackendUnavailable, match="before the call's timeout"):
        client.lock("x").acquire(timeout=0.1)
    assert time.monotonic() - started < 4.0
    with pytest.raises(sync.BackendUnavailable), client:
        pytest.fail("opened")


@pytest.mark.stores("valkey9")
def test_a_client_of_redis_py_is_a_source(store: Store, make_sync: MakeSync) -> None:
    assert store.server is not None
    blocking = redis.Redis.from_url(store.url, socket_timeout=3, retry_on_timeout=True)
    client = sync.Client(blocking)
    with client, client.lock("x") as lease:
        assert lease.held
    with pytest.raises(TypeError, match="give its URL"):
        sync.Client(
            redis.sentinel.Sentinel([("127.0.0.1", 1)]).master_for("mymaster")  # type: ignore[no-untyped-call]
        )


def test_hooks_hear_of_threads(threads: sync.Client) -> None:
    heard: list[str] = []

    class Heard(sync.Hooks):
        def acquired(self, request: aiodlock.RequestInfo, waited: float) -> None:
            heard.append(request.name)

    threads.add_hooks(Heard())
    with threads.lock("x"):
        pass
    assert heard == ["x"]


def test_wrong_options_are_told_at_once(threads: sync.Client) -> None:
    with pytest.raises(ValueError, match="name"):
        threads.lock("")
    with pytest.raises(ValueError, match="thread cannot"):
        threads.lock("x", on_lost="cancel")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        threads.lock("x", blocking=False)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="limit"):
        threads.semaphore("x", 0)
    with pytest.raises(ValueError, match="at least one name"):
        threads.multilock()
    with pytest.raises(ValueError, match="another client"):
        threads.multilock(sync.Client("memory://").lock("x"))
    with pytest.raises(TypeError):
        sync.Client(42)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout"):
        threads.lock("x").acquire(timeout=-1)
