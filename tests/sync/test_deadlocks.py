"""Threads that wait for each other: the youngest wait ends with DeadlockError."""

from __future__ import annotations

import threading

import pytest

from aiodlock import sync

from .conftest import InThread, MakeSync

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
