"""once, hold_at_least and resize for threads."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from aiodlock import sync


@pytest.fixture
def client() -> Iterator[sync.Client]:
    with sync.Client(f"memory://once-{uuid.uuid4().hex}") as client:
        yield client


def test_one_thread_is_first_and_all_others_get_its_result(client: sync.Client) -> None:
    once = client.once("order:42", keep=60)
    effects: list[int] = []
    results: list[object] = []

    def click(number: int) -> None:
        with once as run:
            if run.first:
                assert run.lease is not None
                assert run.lease.held
                effects.append(number)
                run.result = f"done by {number}"
        results.append(run.result)

    threads = [threading.Thread(target=click, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (first,) = effects
    assert results == [f"done by {first}"] * 8
    assert client.forget("order:42")
    assert not client.forget("order:42")


def test_failing_body_records_nothing(client: sync.Client) -> None:
    with pytest.raises(ValueError, match="failed"), client.once("a", keep=60):
        raise ValueError("failed")
    with client.once("a", keep=60) as run:
        assert run.first
        with pytest.raises(sync.DeadlockError), client.once("a", keep=60):
            pass
        with pytest.raises(TypeError):
            run.result = 42  # type: ignore[assignment]
    with client.once("a", keep=60) as run:
        assert (run.first, run.result) == (False, None)


def test_result_that_cannot_be_kept_is_no_reason_to_do_it_again(client: sync.Client) -> None:
    with client.once("long", keep=60) as run:
        run.result = "x" * 65537
        run.fingerprint = "of the request"
    with pytest.raises(TypeError), client.once("wrong", keep=60) as run:
        run.result = {"receipt": 7}  # type: ignore[assignment]
    for name, fingerprint in (("long", "of the request"), ("wrong", None)):
        with client.once(name, keep=60) as run:
            assert (run.first, run.result, run.fingerprint) == (False, None, fingerprint)


def test_released_or_broken_body_records_nothing(client: sync.Client) -> None:
    with pytest.raises(sync.NotHeld), client.once("a", keep=60) as run:
        assert run.lease is not None
        run.lease.release()
    with pytest.raises(sync.LockLost), client.once("a", keep=60):
        assert client.break_lock("a", kind="once") == 1
    with client.once("a", keep=60) as run:
        assert run.first


def test_block_that_is_not_clear_ends_none(client: sync.Client) -> None:
    once = client.once("a", keep=60)
    with once as run:
        run.result = "done"

    stack = ExitStack()
    with ThreadPoolExecutor(1) as second, ThreadPoolExecutor(1) as first:
        assert not second.submit(stack.enter_context, once).result().first
        client.forget("a")
        run = first.submit(once.__enter__).result()
        assert run.first
        with pytest.raises(RuntimeError, match="not clear"):
            stack.close()
        assert run.lease is not None
        assert run.lease.held
        run.result = "again"
        first.submit(once.__exit__, None, None, None).result()
    with once as run:
        assert run.result == "again"


def test_once_per_calls_the_function_once_per_name(client: sync.Client) -> None:
    calls = []

    @client.once_per("report:{day}", keep=60)
    def report(day: str) -> str:
        calls.append(day)
        return "sent"

    assert [report("monday"), report(day="monday"), report("tuesday")] == ["sent"] * 3
    assert calls == ["monday", "tuesday"]


def test_function_whose_result_is_too_long_is_done_once_too(client: sync.Client) -> None:
    calls = []

    @client.once_per("report:{day}", keep=60)
    def report(day: str) -> str:
        calls.append(day)
        return "x" * 65537

    assert len(report("monday") or "") == 65537
    assert report("monday") is None
    assert calls == ["monday"]


def test_name_stays_closed_and_kinds_are_told_apart(client: sync.Client) -> None:
    with client.lock("a", hold_at_least=30, note="run 7"):
        (holder,) = client.lock("a").inspect().holders
        assert holder.note == "run 7"
    assert client.inspect("a").closed > 20
    assert client.lock("a").break_lock() == 0
    with client.lock("a", timeout=5), client.semaphore("a", 2, resize=True):
        assert {info.kind for info in client.locks("a")} == {"lock", "semaphore"}
        assert client.inspect("a", kind="semaphore").kind == "semaphore"
