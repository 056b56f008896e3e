"""Threads that wait for each other: the youngest wait ends with DeadlockError."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import pytest

from aiodlock import sync

from .conftest import InThread, MakeSync, until, waiters

pytestmark = pytest.mark.stores("memory", "valkey9")

#: Where nobody may wait for ever.
LONG = 30.0


def _cross(
    clients: tuple[sync.Client, sync.Client], in_thread: InThread, others: str = "b"
) -> list[sync.DeadlockError]:
    """Let two threads take 'a' and 'b' in either order; return what came out."""
    both, found = threading.Barrier(2), list[sync.DeadlockError]()

    def work(client: sync.Client, first: str, second: str) -> None:
        try:
            with client.lock(first):
                both.wait(LONG)
                with client.lock(second):
                    pass
        except sync.DeadlockError as error:
            found.append(error)

    one = in_thread(lambda: work(clients[0], "a", others))
    work(clients[1], others, "a")
    one.result(LONG)
    return found


def test_two_threads_of_one_client(make_sync: MakeSync, in_thread: InThread) -> None:
    client = make_sync(deadlock_after=0.2)
    (error,) = _cross((client, client), in_thread)
    assert {member[0] for member in error.cycle} == {"a", "b"}
    assert "multilock" in str(error)


def test_threads_of_two_clients(make_sync: MakeSync, in_thread: InThread) -> None:
    clients = (make_sync(deadlock_after=0.2), make_sync(deadlock_after=0.2))
    (error,) = _cross(clients, in_thread)
    assert len(error.cycle) == 2


def test_thread_that_holds_nothing_else_is_no_part_of_a_cycle(
    make_sync: MakeSync, in_thread: InThread
) -> None:
    client = make_sync(deadlock_after=0.05)

    def wait() -> bool:
        with client.lock("a"):
            return True

    with client.lock("a"):
        waiting = in_thread(wait)
        with client.lock("b"), pytest.raises(sync.AcquireTimeout):
            in_thread(lambda: client.lock("a", timeout=0.5).acquire()).result(LONG)
        assert not waiting.done()
    assert waiting.result(LONG)


@pytest.mark.parametrize("before", [0.0, 0.6], ids=["short wait", "wait that was told"])
def test_block_that_another_thread_has_left_makes_no_edge_though_a_bare_lease_holds_on(
    make_sync: MakeSync, in_thread: InThread, before: float
) -> None:
    client = make_sync(deadlock_after=0.2)
    a, b = client.lock("a"), client.lock("b")
    block, bare = ExitStack(), list[sync.Lease]()
    in_a, in_b, left = threading.Event(), threading.Event(), threading.Event()

    def wait_for_b() -> bool:
        block.enter_context(a)
        bare.append(a.acquire())
        in_a.set()
        in_b.wait(LONG)
        with b:
            return True

    def wait_for_a() -> bool:
        with b:
            in_b.set()
            left.wait(LONG)
            with a:
                return True

    waits = [in_thread(wait_for_a), in_thread(wait_for_b)]
    in_a.wait(LONG)
    until(lambda: waiters(client, "b") == 1)
    time.sleep(before)
    block.close()
    left.set()
    until(lambda: waiters(client, "a") == 1)
    time.sleep(0.8)
    assert bare[0].held
    bare[0].release()
    assert all(wait.result(LONG) for wait in waits)


def test_block_that_another_thread_has_left_makes_no_edge_though_its_lease_lingers(
    make_sync: MakeSync, in_thread: InThread
) -> None:
    client = make_sync(deadlock_after=0.5)
    a, b, block = client.lock("a", linger=60.0), client.lock("b"), ExitStack()
    in_a, in_b, kept, again, over = (threading.Event() for _ in range(5))

    def wait_for_b() -> bool:
        block.enter_context(a)
        in_a.set()
        in_b.wait(LONG)
        with b:
            return True

    def wait_for_a() -> bool:
        with b:
            in_b.set()
            again.wait(LONG)
            with a:
                return True

    def hold_a() -> bool:
        kept.wait(LONG)
        with a:
            again.set()
            over.wait(LONG)
        return True

    waits = [in_thread(wait_for_a), in_thread(wait_for_b), in_thread(hold_a)]
    in_a.wait(LONG)
    until(lambda: waiters(client, "b") == 1)
    block.close()
    kept.set()
    until(lambda: waiters(client, "a") == 1)
    time.sleep(1.2)
    over.set()
    assert all(wait.result(LONG) for wait in waits)
