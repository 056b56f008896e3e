"""What processes do that fork, are interrupted or end: python -m tests.sync.process SCENARIO URL."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread
import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import redis

import aiodlock
from aiodlock import sync

SCENARIOS: dict[str, Callable[[], None]] = {}
URL = sys.argv[2] if __name__ == "__main__" else "memory://"
client = sync.Client(URL)


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


def holders(name: str) -> list[str]:
    return [holder.client for holder in client.inspect(name).holders]


def wait_for(pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with {status}"


def in_child(body: Callable[[], None]) -> None:
    pid = os.fork()
    if pid:
        wait_for(pid)
        return
    try:
        body()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def until(happened: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


# -- forks --------------------------------------------------------------------------------------------


@scenario
def made_at_import_and_used_in_children() -> None:
    def child() -> None:
        with client.lock("x"):
            (name,) = holders("x")
            assert f"-{os.getpid()}-" in name

    for _ in range(3):
        in_child(child)


@scenario
def inherited_leases_are_not_held() -> None:
    lock = client.lock("x")
    bare = client.lock("bare").acquire()
    with lock as lease, client.multilock("m", "n") as several:
        before = holders("x")

        def child() -> None:
            assert not lease.held
            assert not bare.held
            assert not several.held
            assert lease.lost is None
            assert lease.remaining() == several.remaining() == 0.0
            for call in (
                lease.release,
                lease.ensure_held,
                lease.extend,
                lease.wait_lost,
                bare.release,
                several.release,
                several.ensure_held,
                lock.release,
            ):
                try:
                    call()
                except sync.NotHeld:
                    pass
                else:
                    raise AssertionError(call)
            several.__exit__(None, None, None)
            lock.__exit__(None, None, None)
            assert holders("x") == before
            try:
                lock.acquire_nowait()  # no re-entry into the parent's block
            except sync.WouldBlock:
                pass
            else:
                raise AssertionError("two hold")
            with client.lock("y"):
                assert holders("y") != before

        in_child(child)
        assert lease.held
        assert several.held
    bare.release()
    for name in ("x", "bare", "m", "n"):
        assert not client.lock(name).locked()


@scenario
def a_child_that_ends_as_programs_do_leaves_the_parent_alone() -> None:
    # Modules are taken apart and everything is collected, in the child alone.
    with client.lock("x", ttl=1.0) as lease:
        bare = client.lock("bare", ttl=1.0).acquire()
        pid = os.fork()
        if pid == 0:
            del bare, lease
            gc.collect()
            sys.exit(0)
        wait_for(pid)
        time.sleep(1.5)  # extended several times since
        assert lease.held
        assert bare.held
        with client.lock("y"):
            pass
    bare.release()


@scenario
def forked_as_by_uwsgi_which_tells_python_nothing() -> None:
    unused = sync.Client(URL, ttl=5.0)
    with client.lock("x", ttl=5.0) as lease:
        pid = ctypes.PyDLL(None).fork()
        if pid:
            wait_for(pid)
            assert lease.held
            return
        try:
            _as_a_worker(unused)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)


@scenario
def forked_when_a_thread_was_lost() -> None:
    logging.getLogger("aiodlock").addHandler(logging.NullHandler())  # it tells what it lost
    with client.lock("x"):
        pass
    lost = client._life.use().portal
    lost.stopped = True  # as nothing but the end of a process does
    lost.loop.call_soon_threadsafe(lost.loop.stop)
    until(lost.loop.is_closed)
    lost.stopped = False
    with client.lock("x", ttl=5.0) as lease:

        def take() -> None:
            assert not lease.held
            with client.lock("y", timeout=20) as own:
                assert own.held

        in_child(take)
        assert lease.held


def _as_a_worker(unused: sync.Client) -> None:
    def take(one: sync.Client) -> None:
        with one.lock("y", timeout=20) as lease:
            assert lease.held

    # Several first calls at once: each finds out by itself that this is another process.
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(take, one) for one in (unused, client) * 4]:
            done.result(60)
    assert not unused.lock("y").locked()
    assert client.lock("x").locked()  # by the parent

    async def take_as_a_task() -> None:
        async with aiodlock.Client(URL) as one, one.lock("y", timeout=20) as lease:
            assert lease.held

    asyncio.run(take_as_a_task())


@scenario
def the_parent_ends_and_the_child_goes_on() -> None:
    with client.lock("x"):
        pass
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent has ended
        with client.lock("x", timeout=5):
            print("the child was in", flush=True)
        os._exit(0)
    os.close(reading)
    # It has connections of its own: its name is that of no other.
    assert f"-{os.getpid()}-" in client.inspect("x").holders[0].client if holders("x") else True


@scenario
def forked_by_multiprocessing() -> None:
    context = multiprocessing.get_context("fork")
    with client.lock("warm"):
        pass
    counter = redis.Redis.from_url(URL)
    counter.set("n", 0)
    workers = [context.Process(target=_count, args=(50,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    _count(50)
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert counter.get("n") == b"250", counter.get("n")


@scenario
def children_of_multiprocessing_end_and_release() -> None:
    context = multiprocessing.get_context("fork")
    with client.lock("warm"):
        pass
    for end in (_return, sys.exit):
        child = context.Process(target=_hold_and, args=(end,))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert not holders("x"), f"it is held behind a child that ended by {end}"


@scenario
def children_of_every_start_method_end_and_release() -> None:
    """Those of a forkserver have imported all this themselves, and end without Python's clean-up."""
    for method in multiprocessing.get_all_start_methods():
        child = multiprocessing.get_context(method).Process(target=_hold_at, args=(URL,))  # type: ignore[attr-defined]
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert not holders("x"), f"it is held behind a child of {method}"


def _hold_at(url: str) -> None:
    global client
    client = sync.Client(url)
    _hold_and(_return)


def _return() -> None:
    pass


def _hold_and(end: Callable[[], None]) -> None:
    client.lock("x", ttl=60.0).acquire()
    assert holders("x")
    end()


def _count(times: int) -> None:
    counter = redis.Redis.from_url(URL)
    for _ in range(times):
        with client.lock("n"):
            value = counter.get("n")
            assert isinstance(value, bytes)
            counter.set("n", int(value) + 1)


@scenario
def forked_while_other_threads_use_it() -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with client.lock("busy"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()

    def child() -> None:
        with client.lock("busy", timeout=20):
            pass

    for _ in range(10):
        in_child(child)
    stop.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


@scenario
def a_store_in_memory_is_refused_in_children() -> None:
    for url in ("memory://", "memory://name"):
        inner = sync.Client(url)
        with inner.lock("x"):
            in_child(lambda inner=inner: _refused(inner))  # type: ignore[misc]


def _refused(inner: sync.Client) -> None:
    try:
        inner.lock("x").acquire_nowait()
    except RuntimeError:
        return
    raise AssertionError


@scenario
def a_closed_client_is_closed_in_children() -> None:
    with client:
        pass

    def child() -> None:
        try:
            client.lock("x").acquire()
        except sync.ClientClosed:
            return
        raise AssertionError

    in_child(child)


@scenario
def a_child_may_leave_the_parents_client() -> None:
    with client:
        lease = client.lock("x").acquire()
        in_child(lambda: client.__exit__(None, None, None))
        assert lease.held
        lease.release()


# -- interruptions ------------------------------------------------------------------------------------


def interrupt_when(happened: Callable[[], object]) -> None:
    def interrupt() -> None:
        until(happened)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()


@scenario
def interrupted_while_it_waits() -> None:
    other = sync.Client(URL)
    with other.lock("x"):
        for wait in (
            lambda: client.lock("x").acquire(),
            lambda: client.lock("x").acquire(timeout=30),
            lambda: client.lock("x").__enter__(),
            lambda: client.multilock("w", "x").acquire(),
            lambda: client.election("x").lead().__enter__(),
        ):
            interrupt_when(lambda: other.inspect("x").waiters)
            started = time.monotonic()
            try:
                wait()
            except KeyboardInterrupt:
                pass
            else:
                raise AssertionError
            assert not other.inspect("x").waiters
            assert time.monotonic() - started < 15
    assert not other.lock("w").locked()
    with client.lock("x", timeout=5):
        pass


@scenario
def interrupted_at_any_moment() -> None:
    """However the signals fall, nothing stays behind: no hold, no waiter, no block."""
    other = sync.Client(URL)
    with other.lock("y"):
        pass
    main, stop, interrupts = threading.main_thread(), threading.Event(), 0
    assert main.ident is not None

    def interrupt() -> None:
        pause = 0.0
        while not stop.wait(0.001 + pause):
            pause = (pause + 0.00037) % 0.004
            os.kill(os.getpid(), signal.SIGINT)

    lock = client.lock("x")
    began = time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    thread = threading.Thread(target=interrupt)
    thread.start()
    while time.monotonic() < began + 3 or (interrupts <= 100 and time.monotonic() < began + 30):
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with lock:
                pass
        except KeyboardInterrupt:
            interrupts += 1
        finally:
            while True:
                try:
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
                    break
                except KeyboardInterrupt:
                    interrupts += 1
    stop.set()
    thread.join()
    assert interrupts > 100, interrupts
    client.close()  # what was left by an interruption in the `with` statement itself
    with other.lock("x", timeout=5):
        assert not other.inspect("x").waiters


# -- the end ------------------------------------------------------------------------------------------


@scenario
def the_end_of_the_process_releases() -> None:
    global kept
    kept = client.lock("x", ttl=60.0).acquire()
    print("held", flush=True)


@scenario
def used_by_other_handlers_of_atexit() -> None:
    def at_exit() -> None:
        with client.lock("x"):
            print("held at the end", flush=True)

    atexit.register(at_exit)
    client.lock("x").acquire().release()
    atexit.register(at_exit)


@scenario
def threads_at_the_end() -> None:
    # The interpreter waits for the first; the others are daemons, which it stops anywhere.
    # One that writes its traceback just then makes CPython abort, whatever its body was.
    threading.excepthook = lambda _: None

    def work(times: int) -> None:
        for _ in range(times):
            with client.lock("x"):
                time.sleep(0.001)
        print("done", flush=True)

    threading.Thread(target=work, args=(100,)).start()
    for _ in range(4):
        threading.Thread(target=work, args=(10**9,), daemon=True).start()
    time.sleep(0.1)


@scenario
def a_waiter_that_is_a_daemon_at_the_end() -> None:
    client.lock("x", ttl=60.0).acquire().release()
    lease = client.lock("x", ttl=60.0).acquire()
    threading.Thread(target=lambda: client.lock("x").acquire(), daemon=True).start()
    until(lambda: client.inspect("x").waiters)
    global kept
    kept = lease
    print("held", flush=True)


@scenario
def first_used_when_the_main_thread_has_ended() -> None:
    def work() -> None:
        until(lambda: concurrent.futures.thread._shutdown)
        with client.lock("x"):
            print("held by a thread", flush=True)

    def at_exit() -> None:
        with sync.Client(URL) as another, another.lock("x"):
            print("held at the end", flush=True)

    threading.Thread(target=work).start()
    atexit.register(at_exit)


class UsesALockWhenCollected:
    def __del__(self) -> None:
        try:
            client.lock("x", timeout=1).acquire()
        except RuntimeError as error:
            os.write(1, f"refused: {error}\n".encode())


@scenario
def first_used_by_what_the_interpreter_collects_at_its_end() -> None:
    global collected
    collected = UsesALockWhenCollected()


@scenario
def used_again_by_what_the_interpreter_collects_at_its_end() -> None:
    global collected
    collected = UsesALockWhenCollected()
    client.lock("x", ttl=60.0).acquire().release()


kept: sync.Lease | None = None
collected: UsesALockWhenCollected | None = None

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]]()
    print("ok", flush=True)
