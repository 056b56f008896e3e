"""Leases that linger serve all threads of a client."""

from __future__ import annotations

import pytest

from aiodlock import sync

from .conftest import InThread, MakeSync, until

pytestmark = pytest.mark.stores("memory", "valkey9")


def test_next_block_of_any_thread_has_the_kept_lease(
    threads: sync.Client, in_thread: InThread
) -> None:
    lock = threads.lock("x", linger=60.0)

    def body() -> int:
        with lock as lease:
            assert lease.held
            return lease.token

    first = body()
    assert in_thread(body).result(20) == first
    assert lock.locked()


def test_another_client_gets_it_and_ended_leases_stay_ended(make_sync: MakeSync) -> None:
    one, other = make_sync(), make_sync()
    with one.lock("x", linger=60.0) as ended:
        pass
    with other.lock("x", timeout=20) as lease:
        assert lease.token > ended.token
    assert not ended.held
    assert ended.lost is None
    with pytest.raises(sync.NotHeld):
        ended.release()


def test_function_of_an_ended_block_does_not_hear_of_a_later_loss(threads: sync.Client) -> None:
    heard: list[str] = []
    options = {"linger": 60.0, "ttl": 20.0}
    with threads.lock("x", on_lost=lambda lost: heard.append("first"), **options):  # type: ignore[arg-type]
        pass
    lock = threads.lock("x", on_lost=lambda lost: heard.append("second"), **options)  # type: ignore[arg-type]
    with pytest.raises(sync.LockLost), lock:
        threads.break_lock("x")
        until(lambda: heard)
    assert heard == ["second"]


def test_threads_exclude_each_other(threads: sync.Client, in_thread: InThread) -> None:
    inside = most = 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(20):
            with threads.lock("x", linger=0.5):
                inside += 1
                most = max(most, inside)
                inside -= 1

    for done in [in_thread(work) for _ in range(6)]:
        done.result(60)
    assert most == 1
