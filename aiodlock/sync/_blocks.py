"""What each thread holds: its open ``with`` blocks, which of them an exit belongs to, and holds without."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from itertools import count
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

from .._acquire import OwnRequests
from .._body import refuse
from .._clock import now

if TYPE_CHECKING:
    from .._acquisition import Acquisition
    from ._lease import Lease
    from ._running import Running


class _Opened(Protocol):
    def _enter_block(self) -> None:
        """Be inside of it, in this thread."""

    def _begin(self) -> None:
        """Let the body begin, unless it was lost."""

    def _exit(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the block."""

    def _leave_soon(self) -> None:
        """End the block; nobody waits for it. It may have ended already."""


_L = TypeVar("_L", bound=_Opened)
#: An open block: its thread's ``Here``, weakly, what was entered, and the frame that has entered it.
Block: TypeAlias = "tuple[weakref.ref[Here], _L, FrameType]"

_logger = logging.getLogger("aiodlock")
_MANY = 64
#: How often it is looked for holds that nobody releases, and how often each is told of (seconds).
LOOK_EVERY = 1.0
_TELL_EVERY = 600.0
_numbers = count(1)
#: The numbers of the blocks that were entered in the running context. Pools run each of their jobs in a
#: context of its own: a thread that has entered a block in one job is not inside of it in the next.
_inside: ContextVar[tuple[int, ...]] = ContextVar("aiodlock_inside", default=())


_OWNS_NOTHING = OwnRequests({}, ())

#: Of each thread that has used this module.
_everyone: dict[int, weakref.ref[Here]] = {}


class Here:
    """One thread's own, gone with the thread.

    Mutable state: ``blocks`` (leases whose block this thread has entered and nobody has left), ``bare``
    (what it has acquired without a block and nobody has released), ``_holds`` (all leases that it
    acquired, weakly).
    """

    __slots__ = ("__weakref__", "_holds", "bare", "blocks", "ident", "is_of_pool", "ref")

    def __init__(self) -> None:
        self.blocks: list[Lease] = []
        self.bare: dict[Acquisition, Bare] = {}
        self._holds: list[weakref.ref[Lease]] = []
        self.ident = threading.get_ident()
        self.is_of_pool = is_of_pool()
        key = id(self)

        # What is needed stands in the defaults: the interpreter's end takes globals away before.
        def forget(_: object, pop: Callable[..., object] = _everyone.pop) -> None:
            pop(key, None)

        self.ref: weakref.ref[Here] = weakref.ref(self, forget)
        _everyone[key] = self.ref

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the thread. Each in the loop's thread: where warnings are errors, one raises.
        bares = getattr(self, "bare", {})  # a signal handler may have raised before it was made
        for bare in () if is_finalizing() else tuple(bares.values()):
            given = bare.given()
            if given is not None and bare.lease._is_here():  # a forked child's threads are gone
                given._ended = True
            bare.lease._forget()

    def enter(self, lease: Lease) -> None:
        """Be inside of the lease's block, in this context."""
        self._number(lease)
        self.blocks.append(lease)

    def _number(self, lease: Lease) -> None:
        lease._number = next(_numbers)
        lease._job = self._present_job()
        others = self._known() if self.blocks or self.bare else ()
        _inside.set((*others, lease._number))

    def _known(self) -> list[int]:
        """Return the numbers of what this thread holds that this context knows of."""
        known = _inside.get()
        mine = (*self.blocks, *(bare.lease for bare in tuple(self.bare.values())))
        return [other._number for other in mine if other._number in known]

    def _present_job(self) -> object | None:
        return present_job() if self.is_of_pool else None

    def keep(self, lease: Lease, twin: Lease) -> None:
        """Hold what was acquired without a block, also when the caller drops its lease."""
        if len(self.bare) >= _MANY:
            for known, bare in tuple(self.bare.items()):
                if not bare.lease.held and bare.given() is None:
                    self.bare.pop(known, None)
        self._number(twin)
        self.acquired(twin)
        self.bare[lease._acquired] = Bare(twin, weakref.ref(lease), now())

    def acquired(self, lease: Lease) -> None:
        """Remember the lease for ``Lock.release``."""
        holds = self._holds
        if len(holds) >= _MANY:
            holds[:] = [
                ref for ref in holds if (known := ref()) is not None and not known._acquired.is_over
            ]
        holds.append(weakref.ref(lease))

    def released(self, lease: Lease) -> None:
        """Forget it, if it is the latest; else that is done later."""
        holds = self._holds
        while holds and (
            (known := holds[-1]()) is None or known is lease or known._acquired.is_over
        ):
            holds.pop()

    def forget(self, leases: Sequence[Lease]) -> None:
        """Let ``Lock.release`` know nothing of these any more."""
        self._holds[:] = [ref for ref in self._holds if ref() not in leases]
        for lease in leases:
            self.bare.pop(lease._acquired, None)

    def holds(
        self, running: Running, kind: str, name: str, mode: str, owner: str | None
    ) -> list[Lease]:
        """Return the holds of that description that nobody has released, the newest first."""
        found: list[Lease] = []
        for ref in reversed(self._holds):
            lease = ref()
            if lease is None or lease._running is not running or lease._acquired.is_over:
                continue
            request = lease._request
            terms = request.terms
            if (terms.kind, terms.name, terms.mode) != (kind, name, mode):
                continue
            if request.options.owner != owner:
                continue
            found.append(lease)
        return found

    def own(self, running: Running, *names: str) -> OwnRequests:
        """Return what this thread holds of these names, and what its open blocks hold of all."""
        if not self.blocks and not self.bare:
            return _OWNS_NOTHING
        named: dict[str, list[Acquisition]] = {}
        inside: list[Acquisition] = []
        known = _inside.get()
        job = self._present_job()
        for lease in tuple(self.blocks):  # others may leave a block of this thread meanwhile
            if (
                lease._running is not running
                or lease._number not in known
                or lease._acquired.is_over
            ):
                continue
            if lease._job != job:
                continue
            inside.append(lease._acquired)
            request = lease._request
            if request.name in names and request.terms.kind != "semaphore":
                named.setdefault(request.name, []).append(lease._acquired)
        for bare in tuple(self.bare.values()):
            if bare.lease._running is running and bare.lease.name in names and bare.lets_in():
                if bare.lease._number in known and bare.lease._job == job:
                    named.setdefault(bare.lease.name, []).append(bare.lease._acquired)
                else:
                    bare.tell_of_job()
        return OwnRequests(named, tuple(inside))


class Bare:
    """What a thread has acquired without a block.

    ``lease`` is a twin of the one that the caller got (``given``), for that one keeps the client.

    Mutable state: ``_told_of_job``, ``_tell_at`` (when it is told of next).
    """

    __slots__ = ("_tell_at", "_told_of_job", "given", "lease")

    def __init__(self, lease: Lease, given: weakref.ref[Lease], acquired_at: float) -> None:
        self.lease = lease
        self.given = given
        self._told_of_job = False
        self._tell_at = acquired_at + 3 * lease.ttl

    def lets_in(self) -> bool:
        """Whether its own job may acquire the name again through it."""
        return self.lease._request.terms.kind != "semaphore" and self.lease.held

    def tell_of_job(self) -> None:
        """Warn, once, that a job waits for what another one of the same thread holds."""
        if self._told_of_job or self.lease.mode != "exclusive":
            return
        self._told_of_job = True
        _logger.warning(
            "%r is held by an earlier job of this thread, which has not released it; the job that asks for "
            "it now is another owner: it waits. Use 'with', or release() in the same job",
            self.lease.name,
            extra={"event": "waits_for_job", "lock": self.lease.name},
        )

    def tell_if_long(self, moment: float) -> None:
        """Warn of a lease that nobody references and nobody has released for long."""
        if moment < self._tell_at or self.given() is not None or not self.lease.held:
            return
        self._tell_at = moment + _TELL_EVERY
        _logger.warning(
            "%r (token %d) is held by a thread without a block, nobody references the lease, and it is "
            "extended until the thread ends: release it in that thread, or bound it with max_hold=",
            self.lease.name,
            self.lease.token,
            extra={"event": "held_for_long", "lock": self.lease.name},
        )


def watch(running: Running) -> bool:
    """Tell of holds that nobody releases; return whether any are left. In the loop's thread."""
    moment, left = now(), False
    for ref in tuple(_everyone.values()):
        one = ref()
        for bare in tuple(one.bare.values()) if one is not None else ():
            if bare.lease._running is running:
                left = True
                bare.tell_if_long(moment)
    return left


def is_of_pool() -> bool:
    """Whether the calling thread is one of a pool's."""
    return any(place in _POOLS for place, _ in _frames())


def present_job() -> object | None:
    """Return what equals itself while the same job of a pool runs: many run their jobs in one context."""
    for place, frame in _frames():
        if place == _EXECUTOR:
            return weakref.ref(frame.f_locals["self"])
        if place == _THREAD_POOL:
            return frame.f_locals.get("job"), frame.f_locals.get("i")
    return None


_EXECUTOR = ("concurrent.futures.thread", "run")
_THREAD_POOL = ("multiprocessing.pool", "worker")
_POOLS = (_EXECUTOR, _THREAD_POOL)


def _frames() -> Iterator[tuple[tuple[object, str], FrameType]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield (frame.f_globals.get("__name__"), frame.f_code.co_name), frame
        frame = frame.f_back


def holding_threads(
    running: Running, kind: str, name: str, mode: str, owner: str | None
) -> list[str]:
    """Return the names of the threads of this process that hold something of that description."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    every = [one for ref in tuple(_everyone.values()) if (one := ref()) is not None]
    return [
        names.get(one.ident, str(one.ident))
        for one in every
        if one.holds(running, kind, name, mode, owner)
    ]


class _Local(threading.local):
    def __init__(self) -> None:
        self.here: Here = Here()


_local = _Local()


def here() -> Here:
    """Return the calling thread's own."""
    return _local.here


class Entered(Generic[_L]):
    """The open blocks of one object, any thread's.

    Mutable state: ``_open`` (in order of entering).
    """

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: list[Block[_L]] = []

    def add(self, lease: _L, frame: FrameType) -> None:
        self._open.append((here().ref, lease, frame))

    def discard(self, lease: _L) -> None:
        """Forget a block that was never begun."""
        for entry in tuple(self._open):  # in place: other threads enter meanwhile
            if entry[1] is lease:
                self._open.remove(entry)

    def remove(self, block: Block[_L]) -> None:
        self._open.remove(block)

    def leave_soon(self, block: Block[_L] | None, frame: FrameType) -> None:
        """Leave a block in the background whose leaving was interrupted; None: before it was found."""
        if block is None:
            block = self._own(frame)
        if block is not None:
            if block in self._open:
                self._open.remove(block)
            block[1]._leave_soon()

    def find(self, what: object, exc: BaseException | None, frame: FrameType) -> Block[_L] | None:
        """Return which block is left: the one that this frame has entered (a generator's may be closed in
        any block or thread), else this thread's latest, else the only one, else the only one whose thread
        has ended. Else none is: RuntimeError, or a note to what comes out of the body. (Of a generator that
        is closed nothing comes out that could have a note.)"""
        own = self._own(frame)
        if own is not None:
            return own
        entries = self._open
        gone = [entry for entry in entries if entry[0]() is None]
        if len(entries) == 1:
            return entries[0]
        if len(gone) == 1:
            return gone[0]
        error = RuntimeError(
            f"{what!r}: {len(entries)} blocks of other threads are open, and it is not clear which "
            "of them is left here: enter the lease instead, 'with lock.acquire() as lease'"
        )
        refuse(None if isinstance(exc, GeneratorExit) else exc, error)
        return None

    def _own(self, frame: FrameType) -> Block[_L] | None:
        me, latest = here().ref, None
        for entry in reversed(self._open):
            if entry[2] is frame:
                return entry
            if latest is None and entry[0] is me:
                latest = entry
        return latest


class Enterable(ABC, Generic[_L]):
    """What ``with`` opens a block of, in any number of threads.

    A signal handler may raise between any two steps of entering or leaving. So entering undoes what it has
    done, and leaving goes on in the background. Out of reach is the first instruction of ``__exit__``.
    """

    def __init__(self) -> None:
        self._entered: Entered[_L] = Entered()

    @abstractmethod
    def _take(self) -> _L:
        """Acquire what a block holds."""

    def __enter__(self) -> _L:
        entered = self._take()
        try:
            entered._enter_block()
            self._entered.add(entered, sys._getframe(1))
            entered._begin()
        except BaseException as error:  # a signal handler raised
            self._entered.discard(entered)
            entered._exit(type(error), error, None)
            raise
        return entered

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        block: Block[_L] | None = None
        try:
            block = self._entered.find(self, exc, sys._getframe(1))
            if block is not None:
                self._entered.remove(block)
                block[1]._exit(exc_type, exc, traceback)
        except BaseException:  # a signal handler raised, or there was a loss
            self._entered.leave_soon(block, sys._getframe(1))
            raise
