"""One event loop in a thread of its own, for all synchronous clients of this process.

The calling thread hands over one coroutine per call and sleeps until it has ended: one hop there, one hop
back. The thread is made on first use, and again in a forked child on first use there.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, Generic, TypeAlias, TypeVar, TypeVarTuple

from .._errors import ClientClosed

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")
TakeBack: TypeAlias = Callable[[_T], Coroutine[Any, Any, object]]

#: An interrupted call waits so long for its request to leave the queue (seconds).
_LEAVE_WITHIN = 2.0
#: How long the end of the process waits for the thread (seconds).
_JOIN_WITHIN = 3.0
#: A fork waits so long for the thread to stand still, and the thread for the fork (seconds).
_STOP_WITHIN = 1.0
_LONGEST_FORK = 5.0
#: Signals that the kernel sends to the thread that caused them. The others are for the main thread.
_OWN_SIGNALS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}

_ADVICE = (
    "aiodlock.sync was called in a thread that runs an event loop, which it would block: use "
    "aiodlock.Client with await there, or call your function by asyncio.to_thread"
)
_ENDING = "aiodlock.sync has stopped, because this process is ending"


def check_no_loop() -> None:
    """Raise in a thread whose event loop a blocking call would stop."""
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(_ADVICE)


class _Call(Generic[_T]):
    """One coroutine that a thread waits for.

    Mutable state: ``result`` and ``error`` (set by the loop before ``ended`` is released), ``_task``.
    """

    __slots__ = ("_call", "_context", "_loop", "_task", "ended", "error", "result")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, call: Callable[[], Coroutine[Any, Any, _T]]
    ) -> None:
        self._loop = loop
        self._call = call
        # Tracing finds the span of the calling thread.
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[None] | None = None
        self.ended: threading.Lock = threading.Lock()
        self.ended.acquire()
        self.result: _T | None = None
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begin, in the loop's thread."""
        self._task = start_task(self._run(), self._loop, self._context)

    async def _run(self) -> None:
        try:
            self.result = await self._call()
        except asyncio.CancelledError:
            self.error = ClientClosed("the call was ended, because this process is ending")
        except BaseException as error:
            self.error = error
        finally:
            self.ended.release()

    async def undo(self, take_back: TakeBack[_T] | None) -> None:
        """End the call whose thread was interrupted; give back what it got meanwhile."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait({self._task})
        result, self.result, self.error = self.result, None, None
        if result is not None and take_back is not None:
            await take_back(result)


if sys.version_info >= (3, 12):

    def start_task(
        coro: Coroutine[Any, Any, None],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context,
    ) -> asyncio.Task[None]:
        """Run the first step now: the message is sent one turn of the loop earlier."""
        return asyncio.Task(coro, loop=loop, context=context, eager_start=True)

else:

    def start_task(
        coro: Coroutine[Any, Any, None],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context,
    ) -> asyncio.Task[None]:
        return loop.create_task(coro, context=context)


class _Loop(asyncio.SelectorEventLoop):
    """Looks names up also when the main thread has ended: others go on, and executors take nothing then."""

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*_Args], _T], *args: *_Args
    ) -> asyncio.Future[_T]:
        try:
            return super().run_in_executor(executor, func, *args)
        except RuntimeError:
            if executor is not None or self.is_closed():
                raise
            return self._in_a_thread(lambda: func(*args))

    def _in_a_thread(self, call: Callable[[], _T]) -> asyncio.Future[_T]:
        called: asyncio.Future[_T] = self.create_future()

        def tell(tell_it: Callable[[Any], None], what: object) -> None:
            if not called.done():
                tell_it(what)

        def run() -> None:
            then: tuple[Callable[[Any], None], object]
            try:
                then = (called.set_result, call())
            except Exception as error:
                then = (called.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the process is ending
                self.call_soon_threadsafe(tell, *then)

        threading.Thread(target=run, name="aiodlock.sync: a name", daemon=True).start()
        return called


class Portal:
    """The thread and its loop.

    Mutable state: ``_at_exit`` (what is closed when the process ends), ``ended``.
    """

    def __init__(self) -> None:
        self.pid: int = os.getpid()
        # Not the policy's: what a fork does to another loop is not known here.
        self.loop: asyncio.AbstractEventLoop = _Loop()
        self.ended: bool = False
        self._signals: set[Any] = set()
        self._at_exit: dict[object, Callable[[], Coroutine[Any, Any, None]]] = {}
        # A daemon: the interpreter joins other threads before it calls what atexit was given.
        self._thread = threading.Thread(target=self._run, name="aiodlock.sync", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if hasattr(signal, "pthread_sigmask"):
            # A signal that arrives here would not wake a main thread that waits for a lock.
            self._signals = signal.pthread_sigmask(
                signal.SIG_BLOCK, signal.valid_signals() - _OWN_SIGNALS
            )
        try:
            self.loop.run_forever()
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(self._settle())
        finally:
            self.ended = True
            self.loop.close()

    async def _settle(self) -> None:
        current = asyncio.current_task()
        others = {task for task in asyncio.all_tasks() if task is not current}
        if others:
            await asyncio.wait(others, timeout=1.0)
        await self.loop.shutdown_asyncgens()

    def call(
        self, call: Callable[[], Coroutine[Any, Any, _T]], take_back: TakeBack[_T] | None = None
    ) -> _T:
        """Run the coroutine on the loop and return its result in this thread.

        When a signal handler raises meanwhile (KeyboardInterrupt), the coroutine is cancelled and
        awaited; what it returned all the same goes to ``take_back``.
        """
        check_no_loop()
        made = _Call(self.loop, call)
        try:
            self._soon(made.start)
            made.ended.acquire()
            if made.error is None:
                return made.result  # type: ignore[return-value]
        except BaseException:
            self._abandon(made, take_back)
            raise
        try:
            raise made.error
        finally:
            # The error knows this frame: without this, each would keep the other alive.
            made.error = None

    def _abandon(self, made: _Call[_T], take_back: TakeBack[_T] | None) -> None:
        undone = _Call(self.loop, lambda: made.undo(take_back))
        with contextlib.suppress(RuntimeError):  # the process is ending
            self._soon(undone.start)
            undone.ended.acquire(timeout=_LEAVE_WITHIN)

    def start_soon(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Run the coroutine on the loop; nobody waits for it. From any thread, the loop's too."""
        with contextlib.suppress(RuntimeError):  # the process is ending
            self._soon(_Call(self.loop, call).start)

    def _soon(self, start: Callable[[], None]) -> None:
        try:
            if (
                sys.is_finalizing()
            ):  # the thread runs no more, and whoever waited for it would for ever
                raise RuntimeError
            self.loop.call_soon_threadsafe(start)
        except RuntimeError:
            raise RuntimeError(_ENDING) from None

    def start_thread(self, run: Callable[[], object], name: str) -> None:
        """Start a thread that knows nothing of this one: not of the signals that are blocked here."""

        def unblocked() -> None:
            if hasattr(signal, "pthread_sigmask"):
                signal.pthread_sigmask(signal.SIG_SETMASK, self._signals)
            run()

        threading.Thread(target=unblocked, name=name, daemon=True).start()

    def at_exit(self, what: object, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have ``close`` run when the process ends. In the loop's thread."""
        self._at_exit[what] = close

    def closed(self, what: object) -> None:
        """It is closed already. In the loop's thread."""
        self._at_exit.pop(what, None)

    def stand_still(self) -> threading.Lock | None:
        """Have the thread wait in a callback, until the lock that is returned is released."""
        if self.ended or threading.current_thread() is self._thread:
            return None
        go_on, stands = threading.Lock(), threading.Lock()
        go_on.acquire()
        stands.acquire()

        def stand() -> None:
            stands.release()
            go_on.acquire(timeout=_LONGEST_FORK)

        with contextlib.suppress(RuntimeError):
            self._soon(stand)
            stands.acquire(timeout=_STOP_WITHIN)
        return go_on

    def stop(self) -> None:
        """Close every client, end the thread. At the end of the process."""
        if self.pid != os.getpid() or self.ended:
            return

        async def close() -> None:
            closing = [one() for one in self._at_exit.values()]
            await asyncio.gather(*closing, return_exceptions=True)
            self.loop.stop()

        self.start_soon(close)
        self._thread.join(_JOIN_WITHIN)


_portal: Portal | None = None
_making = threading.Lock()


class _Forking(threading.local):
    """What this thread releases when it has forked."""

    go_on: threading.Lock | None = None


_forking = _Forking()
#: What a fork has copied: kept, for what closes itself when it is collected must not be.
_inherited: list[Portal] = []


def portal() -> Portal:
    """Return the portal of this process; the first call makes it."""
    found = _portal
    if found is not None and found.pid == os.getpid():
        return found
    return _make()


def _make() -> Portal:
    global _portal
    with _making:
        if _portal is None or _portal.pid != os.getpid():
            if (
                sys.is_finalizing()
            ):  # before Python 3.13 a thread that is started now hangs its starter
                raise RuntimeError(_ENDING)
            _portal = Portal()
            if _portal.pid != _imported_in:
                atexit.register(_at_exit)  # multiprocessing clears the list in its children
        return _portal


def _at_exit() -> None:
    if _portal is not None:
        _portal.stop()


def _before_fork() -> None:
    """Let the portal's thread hold no lock that its copy in the child could never release.

    Such as that of a module that it imports: seen, as a child that waited for ever.
    """
    if _portal is not None and _portal.pid == os.getpid():
        _forking.go_on = _portal.stand_still()


def _after_fork_in_parent() -> None:
    go_on, _forking.go_on = _forking.go_on, None
    if go_on is not None:
        go_on.release()


def _after_fork_in_child() -> None:
    global _portal, _making
    _forking.go_on = None
    _making = threading.Lock()  # another thread of the parent may have had it
    before, _portal = _portal, None
    if before is not None:
        _inherited.append(before)
        _cut_off(before.loop)


def _cut_off(loop: asyncio.AbstractEventLoop) -> None:
    """Take the parent's connections out of this process.

    The kernel's list of watched sockets (epoll) is one for both: what asyncio closes here would be taken
    off the parent's list too. So each inherited descriptor becomes one of /dev/null.
    """
    selector = getattr(loop, "_selector", None)
    if selector is None:
        return
    descriptors = [key.fd for key in (selector.get_map() or {}).values()]
    for one in (getattr(loop, "_csock", None), getattr(selector, "_selector", None)):
        if one is not None and hasattr(one, "fileno"):
            descriptors.append(one.fileno())
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in descriptors:
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


_imported_in = os.getpid()
# Now, not on first use: handlers that are registered from now on run before it, and may use locks.
atexit.register(_at_exit)
os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
