"""Nothing that runs in the background thread ends it, and no call waits longer than its timeout."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import pytest

import aiodlock
from aiodlock import sync
from aiodlock.sync import _portal

from ..servers import Store
from .conftest import MakeSync, until

pytestmark = pytest.mark.stores("memory", "valkey9")


class Exits(sync.Hooks):
    """Calls sys.exit() wherever it is told of something."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.told: list[str] = []

    def _raise(self, what: str) -> None:
        self.told.append(what)
        raise self.error

    def acquiring(self, request: aiodlock.RequestInfo) -> None:
        self._raise("acquiring")

    def acquired(self, request: aiodlock.RequestInfo, waited: float) -> None:
        self._raise("acquired")

    def released(self, request: aiodlock.RequestInfo, held: float) -> None:
        self._raise("released")

    def lost(self, request: aiodlock.RequestInfo, held: float, reason: str) -> None:
        self._raise("lost")


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_hook_that_exits_ends_neither_the_thread_nor_a_call(
    make_sync: MakeSync, error: type[BaseException]
) -> None:
    client, other = make_sync(), make_sync()
    kept, hooks = other.lock("kept").acquire(), Exits(error)
    client.add_hooks(hooks)
    lease = client.lock("x").acquire()
    other.break_lock("x")
    until(lambda: "lost" in hooks.told)
    assert lease.lost is not None
    with client.lock("y", timeout=2):
        pass
    until(lambda: "released" in hooks.told)
    assert kept.held
    kept.extend()
    kept.release()


@pytest.mark.parametrize("how", ["exit", "stop"])
def test_callback_that_exits_or_stops_the_loop_does_not_end_the_thread(
    threads: sync.Client, how: str
) -> None:
    with threads.lock("x"):
        loop = threads._life.use().portal.loop
        call: Callable[[], object] = sys.exit if how == "exit" else loop.stop
        loop.call_soon_threadsafe(call)
        with threads.lock("y", timeout=5) as lease:
            assert lease.held


def test_call_does_not_wait_for_a_thread_that_is_blocked(make_sync: MakeSync) -> None:
    client, go_on = make_sync(), threading.Event()
    with client.lock("x"):
        pass
    client._life.use().portal.loop.call_soon_threadsafe(go_on.wait, 60)
    started = time.monotonic()
    try:
        with pytest.raises(sync.BackendUnavailable, match="does not turn"):
            client.lock("y").acquire(timeout=0.1)
        assert time.monotonic() - started < 30
    finally:
        go_on.set()
    with client.lock("y", timeout=5):
        pass


def test_another_thread_begins_when_one_is_lost(make_sync: MakeSync) -> None:
    client = make_sync()
    with client.lock("x"):
        pass
    lost = client._life.use().portal
    lost.stopped = True  # as nothing but the end of a process does
    lost.loop.call_soon_threadsafe(lost.loop.stop)
    until(lambda: lost.ended)
    lost.stopped = False
    with client.lock("y", timeout=5) as lease:
        assert lease.held
        assert client._life.use().portal is not lost


#: A process for each moment. They are forked, so that what they import is imported once.
_SIGNALLED = """
import faulthandler, os, signal, sys, threading
from aiodlock import sync

url, raises = sys.argv[1], sys.argv[2] == "raises"
sync.Client(url)  # imports what the store needs
for number in range(12):
    child = os.fork()
    if not child:
        break
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(f"number {number} failed")
else:
    sys.exit()

faulthandler.dump_traceback_later(60, exit=True)
off = 1e-4 + number * 7e-4
locks = sync.Client(url, ttl=20)


class Raised(BaseException):
    pass


def handler(*_):
    if raises:
        raise Raised
    with locks.lock("y", timeout=3):
        pass


signal.signal(signal.SIGALRM, handler)
try:
    signal.setitimer(signal.ITIMER_REAL, off)
    with locks.lock("x", timeout=3):
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
except Raised:
    pass
with locks.lock("x", timeout=5):
    pass
assert [one.name for one in threading.enumerate()].count("aiodlock.sync") == 1
assert len(locks._life._runnings) == 1
"""


_WITHOUT_LOGGING = """
import logging, sys, threading
from aiodlock import sync

locks = sync.Client("memory://")


def use():
    with locks.lock("a"):
        pass


logging._lock.acquire()  # as a signal handler may find it
using = threading.Thread(target=use, daemon=True)
using.start()
using.join(30)
sys.exit("the first call waits for the lock of logging" if using.is_alive() else 0)
"""


def test_loop_is_made_without_the_lock_of_logging() -> None:
    """A signal handler that came while it was taken waited for the thread, which logs."""
    subprocess.run([sys.executable, "-c", _WITHOUT_LOGGING], timeout=120, check=True)


@pytest.mark.stores("valkey9")
@pytest.mark.parametrize("what", ["locks", "raises"])
def test_signal_handler_within_the_first_call(store: Store, what: str) -> None:
    subprocess.run([sys.executable, "-c", _SIGNALLED, store.url, what], timeout=300, check=True)


_TRACED = """
import threading

from aiodlock import sync


def trace(*_):
    raise ZeroDivisionError


locks = sync.Client("memory://")
threading.settrace(trace)
try:
    with locks.lock("x", timeout=1):
        pass
except sync.LockError:
    pass
threading.settrace(None)
with locks.lock("x", timeout=30):
    pass
"""


@pytest.mark.stores("memory")
def test_thread_that_cannot_begin_is_replaced() -> None:
    subprocess.run([sys.executable, "-c", _TRACED], timeout=60, check=True, stderr=subprocess.PIPE)


class Blocks(sync.Hooks):
    """Blocks the loop for longer than a call waits before it looks whether the loop turns."""

    def acquired(self, request: aiodlock.RequestInfo, waited: float) -> None:
        time.sleep(2.0)


def test_call_that_a_hook_has_held_up_gets_its_lease(make_sync: MakeSync) -> None:
    client = make_sync()
    client.lock("x").locked()
    client.add_hooks(Blocks())
    with client.lock("x", timeout=0.5) as lease:
        assert lease.held


def use_at(client: sync.Client, at: int) -> bool:
    """Use the client, and again where that calls its function of that number; return if there was one."""
    steps = 0

    def step(frame: FrameType, event: str, _: object) -> None:
        nonlocal steps
        if "/sync/" in frame.f_code.co_filename and event == "call":
            steps += 1
            if steps == at:
                sys.setprofile(None)
                client._life.use()

    sys.setprofile(step)
    try:
        client._life.use()
    finally:
        sys.setprofile(None)
    return steps >= at


@pytest.mark.stores("memory")
def test_handler_at_any_step_of_the_first_use(
    make_sync: MakeSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a signal handler or a finalizer would, in the middle of anything."""
    for at in itertools.count(1):
        monkeypatch.setattr(_portal, "_portals", {})
        client = make_sync()
        reached = use_at(client, at)
        assert len(client._life._runnings) == 1
        assert len(_portal._portals) == 1
        with client.lock("x", timeout=5):
            pass
        client.close()
        _portal.portal().stop()
        if not reached:
            break
    assert at > 8


_SHALLOW = """
import sys
import threading
import time

from aiodlock import sync
from aiodlock.sync import _portal

locks = sync.Client("memory://")
usual = sys.getrecursionlimit()


def acquire():
    try:
        with locks.lock("x"):
            pass
    except (RecursionError, sync.LockError):
        pass


for limit in range(4, 24):
    with locks.lock("y", timeout=30):
        pass
    go_on = _portal.portal().stand_still()
    waiting = threading.Thread(target=acquire, daemon=True)
    waiting.start()
    time.sleep(0.1)
    sys.setrecursionlimit(limit)  # also of the thread that is given something to do now
    go_on.release()
    time.sleep(0.1)
    sys.setrecursionlimit(usual)
    waiting.join(20)
    assert not waiting.is_alive(), limit
with locks.lock("x", timeout=30):
    pass
"""


@pytest.mark.stores("memory")
def test_call_ends_wherever_the_recursion_limit_is_met() -> None:
    """It is one for all threads: a call that the loop had dropped was waited for."""
    subprocess.run(
        [sys.executable, "-c", _SHALLOW], timeout=150, check=True, stderr=subprocess.PIPE
    )
