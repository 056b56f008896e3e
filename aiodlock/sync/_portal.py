"""One event loop in a thread of its own, for all synchronous clients of this process.

The calling thread hands over one coroutine per call and sleeps until it has ended: one hop there, one hop
back. The thread is made on first use, and again in a forked child on first use there.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import logging
import os
import selectors
import signal
import sys
import threading
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from io import FileIO
from typing import Any, Generic, TypeAlias, TypeVar, TypeVarTuple

from .. import _process
from .._errors import BackendUnavailable, ClientClosed
from .._tasks import running_loop

_logger = logging.getLogger("aiodlock")
# asyncio logs when a loop is made. What is asked for the first time takes the lock of all logging: a signal
# handler that came just then would wait for a thread that waits for it.
logging.getLogger("asyncio").isEnabledFor(logging.DEBUG)
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
#: What a call may take beyond its timeout before its thread asks whether the loop turns (seconds).
_GRACE = 1.0
_LONGEST_PAUSE = 30.0
#: How many rings are heard at once.
_MANY = 1024
#: A loop that turns does so within (seconds).
_TURNS_WITHIN = 5.0
#: Signals that the kernel sends to the thread that caused them. The others are for the main thread.
_OWN_SIGNALS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}

_ADVICE = (
    "aiodlock.sync was called in a thread that runs an event loop, which it would block: use "
    "aiodlock.Client with await there, or call your function by asyncio.to_thread"
)
_ENDING = "aiodlock.sync has stopped, because this process is ending"
_GREENLETS = (
    "aiodlock.sync was called under gevent or eventlet, which have replaced threads by greenlets: its "
    "event loop needs a thread of its own. Use workers that are threads or processes "
    "(gunicorn -k gthread, celery -P threads or prefork)"
)
_LOST = (
    "the call was lost in the background thread of aiodlock.sync, such as by a RecursionError there: see "
    "the log of asyncio"
)
_GONE = "the thread of aiodlock.sync has ended"
_STUCK = "the background thread of aiodlock.sync does not turn: a hook or a finalizer blocks it"


def runs_a_loop() -> bool:
    """Whether the calling thread runs an event loop."""
    return running_loop() is not None


def check_no_loop() -> None:
    """Raise in a thread whose event loop a blocking call would stop."""
    if runs_a_loop():
        check_no_greenlets()
        raise RuntimeError(_ADVICE)


def check_no_greenlets() -> None:
    """Raise where threads are greenlets: all of them run in one thread, the loop's too."""
    if start_new_thread.__module__ != "_thread" or getattr(
        threading.Lock, "__module__", ""
    ).startswith(("gevent", "eventlet")):
        raise RuntimeError(_GREENLETS)


class _Ending(RuntimeError):
    """The process is ending, or the thread has."""


class _Ended(ClientClosed, _Ending):
    """The thread has ended, and the process has not: the next call begins another one."""


class _Call(Generic[_T]):
    """One coroutine that a thread waits for.

    Mutable state: ``result`` and ``error`` (set by the loop before ``ended`` is released), ``_task``.
    """

    __slots__ = ("_among", "_call", "_context", "_loop", "_task", "ended", "error", "result")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, call: Callable[[], Coroutine[Any, Any, _T]]
    ) -> None:
        self._loop = loop
        self._call = call
        # Tracing finds the span of the calling thread.
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[None] | None = None
        self._among: set[_Call[Any]] | None = None
        self.ended: threading.Lock = threading.Lock()
        self.ended.acquire()
        self.result: _T | None = None
        self.error: BaseException | None = None

    def among(self, calls: set[_Call[Any]]) -> None:
        """Be one of these until it has ended."""
        calls.add(self)
        self._among = calls

    def start(self) -> None:
        """Begin, in the loop's thread."""
        self._task = self._loop.create_task(self._run(), context=self._context)

    async def _run(self) -> None:
        try:
            self.result = await self._call()
        except asyncio.CancelledError:
            self.error = ClientClosed("the call was ended, because this process is ending")
        except BaseException as error:
            self.error = error
        finally:
            self._end()

    def fail(self, error: BaseException) -> None:
        """End a call whose coroutine will not: the loop is lost. In the loop's thread."""
        if self.ended.locked():
            self.error = error
            self._end()

    def _end(self) -> None:
        if self._among is not None:
            self._among.discard(self)
        if self.ended.locked():  # else ended already
            self.ended.release()

    def is_lost(self) -> bool:
        """Whether it will not end by itself: never begun, or ended without a word.

        A RecursionError does that, at the first step of any call: the limit is one for all threads.
        """
        return self._task is None or self._task.done()

    async def undo(self, take_back: TakeBack[_T] | None) -> None:
        """End the call whose thread was interrupted; give back what it got meanwhile."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait({self._task})
        result, self.result, self.error = self.result, None, None
        if result is not None and take_back is not None:
            await take_back(result)


class _Selector(selectors.DefaultSelector):
    """What the loop waits by. Begins what a thread hands over in the turn of the loop that it wakes.

    By asyncio's own way, ``call_soon_threadsafe``, a call begins one turn later, and costs a third more.

    Mutable state: ``_handed`` (what the loop has not begun yet).
    """

    def __init__(self) -> None:
        super().__init__()
        self._handed: deque[Callable[[], object]] = deque()
        bell, cord = os.pipe()
        os.set_blocking(bell, False)
        os.set_blocking(cord, False)  # one that is full has rung
        self._bell, self._cord = FileIO(bell), FileIO(cord, "w")
        self.register(self._bell, selectors.EVENT_READ)

    def hand(self, begin: Callable[[], object]) -> None:
        """Have the loop call this. From any thread, in the middle of anything."""
        self._handed.append(begin)
        self._cord.write(b"!")

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0 if self._handed else timeout)
        for index, (key, _) in enumerate(events):
            if key.fileobj is self._bell:
                del events[index]
                self._bell.read(_MANY)  # before the calls are looked for: none is overlooked
                break
        while self._handed:
            self._handed.popleft()()
        return events

    def close(self) -> None:
        super().close()
        self._bell.close()

    def __del__(self) -> None:
        self._cord.close()  # not before: a thread may be pulling it, and its number may be another file's

    def descriptors(self) -> list[int]:
        """Return those that are open."""
        return [self._cord.fileno(), *(key.fd for key in (self.get_map() or {}).values())]


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

    Nothing that runs in the thread ends it (``sys.exit()`` in a hook is logged), but ``stop``. If it is
    lost all the same, its calls end, and ``portal()`` makes another.

    Mutable state: ``_at_exit`` (what is closed when the process ends), ``_calls`` (that threads wait for),
    ``stopped`` (on purpose: no other is made), ``ended``.
    """

    def __init__(self) -> None:
        self.pid: int = os.getpid()
        # Not the policy's: what a fork does to another loop is not known here.
        self._selector = _Selector()
        self.loop: asyncio.AbstractEventLoop = _Loop(self._selector)
        self.ended: bool = False
        self.stopped: bool = False
        self._signals: set[Any] = set()
        self._at_exit: dict[object, Callable[[], Coroutine[Any, Any, None]]] = {}
        self._calls: set[_Call[Any]] = set()
        self._thread: threading.Thread | None = None
        self._claim = threading.Lock()
        self._gone = threading.Lock()
        self._gone.acquire()

    def start(self) -> None:
        """Start the thread, once: also when a signal handler calls this within the first call."""
        if not self._claim.locked():
            # Not a threading.Thread: a signal handler that raised would leave half of one behind, and
            # the interpreter joins those that are no daemons before it calls what atexit was given.
            start_new_thread(self._run, ())

    def _run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return  # another was started meanwhile
        try:
            self._prepare()
            self._turn()
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(self._settle())
        finally:
            self.ended = True
            for call in tuple(self._calls):
                call.fail(ClientClosed(_GONE))
            with contextlib.suppress(Exception):
                self.loop.close()
            self._gone.release()

    def _prepare(self) -> None:
        if hasattr(signal, "pthread_sigmask"):
            # A signal that arrives here would not wake a main thread that waits for a lock.
            self._signals = signal.pthread_sigmask(
                signal.SIG_BLOCK, signal.valid_signals() - _OWN_SIGNALS
            )
        self._thread = threading.current_thread()
        self._thread.name = "aiodlock.sync"
        sys.settrace(threading.gettrace())
        sys.setprofile(threading.getprofile())

    def _turn(self) -> None:
        while True:
            try:
                self.loop.run_forever()
            except BaseException:  # sys.exit() in a hook or a finalizer ends no thread of ours
                with contextlib.suppress(BaseException):  # logging may raise the same
                    _logger.exception(
                        "the thread of aiodlock.sync goes on after",
                        extra={"event": "thread_goes_on"},
                    )
            if self.stopped or sys.is_finalizing() or self.loop.is_closed():
                return

    async def _settle(self) -> None:
        current = asyncio.current_task()
        others = {task for task in asyncio.all_tasks() if task is not current}
        if others:
            await asyncio.wait(others, timeout=1.0)
        await self.loop.shutdown_asyncgens()

    def call(
        self,
        call: Callable[[], Coroutine[Any, Any, _T]],
        take_back: TakeBack[_T] | None = None,
        *,
        within: float | None = None,
    ) -> _T:
        """Run the coroutine on the loop and return its result in this thread.

        When a signal handler raises meanwhile (KeyboardInterrupt), the coroutine is cancelled and
        awaited; what it returned all the same goes to ``take_back``. The same when it has not ended
        ``within`` that many seconds, and the loop does not turn, or has lost it.

        :raises BackendUnavailable: when the loop does not turn, or has lost the call.
        """
        check_no_loop()
        made = _Call(self.loop, call)
        try:
            made.among(self._calls)
            self._soon(made.start)
            self._wait(made, within)
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

    def _wait(self, made: _Call[Any], within: float | None) -> None:
        if self.ended:
            made.fail(ClientClosed(_GONE))
        pause, next_pause = min((within or 0.0) + _GRACE, threading.TIMEOUT_MAX), _GRACE
        while not made.ended.acquire(timeout=pause):
            # Turned once, it has begun what was handed over before.
            if self._turns():
                if made.is_lost():
                    if made.ended.acquire(blocking=False):
                        return
                    raise BackendUnavailable(_LOST)
            elif within is not None:
                raise BackendUnavailable(_STUCK)
            pause, next_pause = next_pause, min(2 * next_pause, _LONGEST_PAUSE)

    def _turns(self) -> bool:
        turned = threading.Lock()
        turned.acquire()
        self._soon(turned.release)
        return turned.acquire(timeout=_TURNS_WITHIN)

    def _abandon(self, made: _Call[_T], take_back: TakeBack[_T] | None) -> None:
        self._calls.discard(made)  # nobody waits: if it was never begun, it will not end
        undone = _Call(self.loop, lambda: made.undo(take_back))
        with contextlib.suppress(_Ending):
            self._soon(undone.start)
            undone.ended.acquire(timeout=_LEAVE_WITHIN)

    def start_soon(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Run the coroutine on the loop; nobody waits for it. From any thread, the loop's too."""
        with contextlib.suppress(_Ending):
            self._soon(_Call(self.loop, call).start)

    def call_later(self, seconds: float, call: Callable[[], object]) -> None:
        """Call it in the loop's thread. From any thread, in the middle of anything."""
        with contextlib.suppress(_Ending):
            self._soon(lambda: self.loop.call_later(seconds, call))

    def _soon(self, start: Callable[[], object]) -> None:
        # The thread runs no more when the interpreter ends, and whoever waited for it would for ever.
        if sys.is_finalizing() or (self.stopped and self.loop.is_closed()):
            raise _Ending(_ENDING)
        if self.loop.is_closed():
            raise _Ended(_GONE)
        try:
            self._selector.hand(start)
        except OSError:  # it has ended just now
            raise _Ended(_GONE) from None

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

        with contextlib.suppress(_Ending):
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
            self.stopped = True
            self.loop.stop()

        self.start_soon(close)
        if not self._gone.acquire(timeout=_JOIN_WITHIN):
            self.stopped = True


#: The portal of this process, behind those that were lost. Changed by steps that no signal handler divides.
_portals: dict[tuple[int, int], Portal] = {}
_lost = 0


class _Forking(threading.local):
    """What this thread releases when it has forked."""

    go_on: threading.Lock | None = None


_forking = _Forking()
#: What a fork has copied: kept, for what closes itself when it is collected must not be.
_inherited: list[Portal] = []


def portal() -> Portal:
    """Return the portal of this process; the first call makes it, and the first after it was lost."""
    found = _present()
    if found is None or (found.ended and not found.stopped):
        return _make(found)
    if found.ended:
        raise _Ending(_ENDING)
    found.start()
    return found


def _present() -> Portal | None:
    return _portals.get((os.getpid(), _lost))


def _make(before: Portal | None) -> Portal:
    """Make one. Two threads, or a thread and its signal handler, may both: one of both is used."""
    global _lost
    check_no_greenlets()
    if sys.is_finalizing():  # before Python 3.13 a thread that is started now hangs its starter
        raise _Ending(_ENDING)
    key = os.getpid(), _lost + (before is not None)
    made = Portal()
    found = _portals.setdefault(key, made)
    if found is not made:
        made.loop.close()
    elif before is None and (found.pid != _imported_in or _is_child()):
        atexit.register(_at_exit)  # multiprocessing clears the list in its children
        if (util := sys.modules.get("multiprocessing.util")) is not None:
            # Before Python 3.13 these run nothing of atexit, and only their own list, this entry last.
            util.Finalize(None, _at_exit, exitpriority=-100)
    _lost = key[1]
    found.start()
    return found


def _is_child() -> bool:
    """Whether multiprocessing has started this process."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _at_exit() -> None:
    present = _present()
    if present is not None:
        present.stop()


def _before_fork() -> None:
    """Let the portal's thread hold no lock that its copy in the child could never release.

    Such as that of a module that it imports: seen, as a child that waited for ever.
    """
    present = _present()
    if present is not None:
        _forking.go_on = present.stand_still()


def _after_fork_in_parent() -> None:
    go_on, _forking.go_on = _forking.go_on, None
    if go_on is not None:
        go_on.release()


def _after_fork_in_child() -> None:
    _forking.go_on = None
    for key in tuple(_portals):
        if key[0] != os.getpid() and (before := _portals.pop(key, None)) is not None:
            _inherited.append(before)
            if not before.loop.is_closed():  # else it has nothing open, but its cord
                _cut_off(before)


def _cut_off(portal: Portal) -> None:
    """Take the parent's connections out of this process.

    The kernel's list of watched sockets (epoll) is one for both: what asyncio closes here would be taken
    off the parent's list too. So each inherited descriptor becomes one of /dev/null.
    """
    selector = portal._selector
    descriptors = selector.descriptors()
    for one in (getattr(portal.loop, "_csock", None), getattr(selector, "_selector", None)):
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
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent)
_process.after_fork(_after_fork_in_child)
