"""Clients for threads, and threads that a test waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeAlias

import pytest

from aiodlock import sync

from ..servers import Store

MakeSync: TypeAlias = Callable[..., sync.Client]
InThread: TypeAlias = Callable[..., Future[Any]]


@pytest.fixture
def make_sync(store: Store) -> Iterator[MakeSync]:
    """Give a factory of clients that are closed when the test ends."""
    with ExitStack() as stack:

        def make(url: str | None = None, **options: Any) -> sync.Client:
            source = url if url is not None else store.source
            client = sync.Client(source, **{**store.options, **options})
            stack.callback(client.close)
            return client

        yield make


@pytest.fixture
def threads(make_sync: MakeSync) -> sync.Client:
    """Give one client for threads, not connected yet."""
    return make_sync()


@pytest.fixture
def in_thread(make_sync: MakeSync) -> Iterator[InThread]:
    """Give what starts a function in a thread of its own and returns its future."""
    with ThreadPoolExecutor(64) as pool:
        yield pool.submit


def until(happened: Callable[[], object], within: float = 60.0) -> None:
    """Wait for a state."""
    give_up_at = time.monotonic() + within
    while not happened():
        assert time.monotonic() < give_up_at, "it did not happen"
        time.sleep(0.005)


def until_extended(lock: sync.Lock) -> None:
    """Wait until whoever holds it has extended its lease."""
    before = [0.0]

    def extended() -> bool:
        before.append(lock.inspect().holders[0].remaining or 0.0)
        return before[-1] > before[-2] > 0

    until(extended)


def end_and_take(thread: threading.Thread, lock: sync.Lock) -> None:
    """Let the thread run to its end, and take what it has held."""
    thread.start()
    thread.join(30)
    lock.acquire(timeout=30).release()


def waiters(client: sync.Client, name: str) -> int:
    return len(client.inspect(name).waiters)
