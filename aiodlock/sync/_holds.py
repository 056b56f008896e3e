"""What each thread holds: its open ``with`` blocks, and what it has acquired without one."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import partial
from itertools import count
from typing import NamedTuple

from .._acquire import OwnRequests
from .._acquisition import Acquisition
from .._clock import now
from .._model import Terms
from .._request import Request
from .._scope import BodyScope
from ._jobs import is_of_pool, present_job
from ._running import Running

_logger = logging.getLogger("aiodlock")
_MANY = 64
#: How often each hold that nobody releases is told of (seconds).
_TELL_EVERY = 600.0
_numbers = count(1)
#: The numbers of what was taken in the running context. Pools run each of their jobs in a context of its
#: own: a thread that has entered a block in one job is not inside of it in the next.
_inside: ContextVar[tuple[int, ...]] = ContextVar("aiodlock_inside", default=())

_OWNS_NOTHING = OwnRequests({}, ())

#: Of each thread that has used this module.
_everyone: dict[int, weakref.ref[Here]] = {}


class NoScope(BodyScope):
    """Stands for a body that cannot be cancelled."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    def cancel(self) -> None:
        """A thread looks at ``lease.held`` itself."""


class Mark(NamedTuple):
    """Where in a thread something was taken: in a context, which knows the number, and a job of a pool."""

    number: int
    job: object | None

    def is_in(self, known: Iterable[int], job: object | None) -> bool:
        """Whether it is that context and job."""
        return self.number in known and self.job == job


class Hold:
    """One acquisition, in the process that has acquired. Keeps no client: one that is collected is closed.

    Mutable state: ``_inside`` (the thread that has entered its block; a dict, because ``setdefault`` is one
    step), ``_keeper`` (the one that has acquired it without), ``_given`` (the lease that the caller got,
    weakly), ``ended`` (its thread has ended without releasing it), ``_is_reported`` (its loss was raised by
    ``Lock.release``), ``_told_of_job``, ``_tell_at`` (when it is told of next).
    """

    __slots__ = (
        *("_given", "_inside", "_is_reported", "_keeper", "_scope", "_tell_at", "_told_of_job"),
        *("core", "ended", "request", "running"),
    )

    def __init__(self, running: Running, acquired: Acquisition, scope: NoScope) -> None:
        self.running: Running = running
        self.core: Acquisition = acquired
        self.request: Request = acquired.request
        self.ended: bool = False
        self._scope = scope
        self._inside: dict[None, weakref.ref[Here]] = {}
        self._keeper: weakref.ref[Here] | None = None
        self._given: weakref.ref[object] | None = None
        self._is_reported = self._told_of_job = False
        self._tell_at = 0.0

    @property
    def is_place(self) -> bool:
        """Whether it is one of a semaphore's, which lets nobody in again."""
        return self.request.terms.kind == "semaphore"

    def is_of(self, running: Running, terms: Terms, owner: str | None) -> bool:
        """Whether it is a hold of that description that nobody has released."""
        mine = self.request.terms
        return (
            self.running is running
            and (mine.kind, mine.name, mine.mode) == (terms.kind, terms.name, terms.mode)
            and self.request.options.owner == owner
            and not self._is_reported
            and not self.core.is_over
        )

    # -- in the loop's thread ----------------------------------------------------------------------

    def wait_for_thread(self) -> None:
        """Take no body for begun before its thread says so."""
        if self.request.handles == (
            self.core.serial,
        ):  # else a re-entry, and the first body has begun
            self.request.used = False

    def arm(self) -> None:
        """Let leaving the client wait for the body."""
        if self.request.armed is None:
            self.request.armed = {}
        self.request.armed[self._scope] = self._scope  # type: ignore[index]

    def disarm(self) -> None:
        """Let it wait no more."""
        if self.request.armed:
            self.request.armed.pop(self._scope, None)  # type: ignore[call-overload]

    # -- whose it is -------------------------------------------------------------------------------

    def enter(self) -> bool:
        """Let this thread's acquisitions of the name be re-entries, until the block is left.

        :returns: False, when another thread is in a block on it; then nothing is done.
        """
        me = here()
        me.blocks[self] = me.mark()  # first: who comes second looks for it
        self._inside.setdefault(None, me.ref)
        inside = self.inside()
        if inside is None:  # who was has left it, or has ended
            self._inside[None] = me.ref
        elif inside is not me:
            me.blocks.pop(self, None)
            return False
        return True

    def leave(self) -> None:
        """End the block, whichever thread has entered it."""
        thread = (
            self.inside() or here()
        )  # a signal handler may have raised in the middle of ``enter``
        thread.blocks.pop(self, None)

    def give_up(self) -> None:
        """Be not in its block, in this thread; another one may be."""
        here().blocks.pop(self, None)

    def inside(self) -> Here | None:
        """Return the thread that is in its block."""
        entered_by = self._inside.get(None)
        thread = entered_by() if entered_by is not None else None
        return thread if thread is not None and self in thread.blocks else None

    def keep(self, given: object) -> None:
        """Be this thread's until it is released, also when the caller drops the lease."""
        me = here()
        me.tidy()
        self._given = weakref.ref(given)
        self._tell_at = now() + 3 * self.request.ttl
        self._keeper = me.ref
        me.bare[self] = me.mark()

    def let_go(self) -> None:
        """Be no thread's any more: it was released, or is in a block now."""
        thread = self._keeper() if self._keeper is not None else None
        if thread is not None:
            thread.bare.pop(self, None)

    def report(self) -> None:
        """Its loss is raised: ``Lock.release`` is to know nothing of it any more."""
        self._is_reported = True
        self.let_go()

    def forget(self) -> None:
        """Its thread has ended: release it, in the background, with a warning."""
        if self.running.is_here():  # a forked child's threads are gone
            self.ended = True
            forgotten = self.core.session.forgotten
            drop = partial(forgotten.left_by_thread, self.request, self.core.serial)
            self.running.portal.call_later(0, drop)

    # -- what is told of it ------------------------------------------------------------------------

    def tell_of_job(self) -> None:
        """Warn, once, that a job waits for what another one of the same thread holds."""
        if self._told_of_job or self.request.terms.mode != "exclusive":
            return
        self._told_of_job = True
        _logger.warning(
            "%r is held by an earlier job of this thread, which has not released it; the job that asks for "
            "it now is another owner: it waits. Use 'with', or release() in the same job",
            self.request.name,
            extra={"event": "waits_for_job", "lock": self.request.name},
        )

    def is_dropped(self) -> bool:
        """Whether nobody references the lease that was acquired without a block."""
        return self._given is not None and self._given() is None

    def tell_if_long(self, moment: float) -> None:
        """Warn of what nobody references and nobody has released for long."""
        if moment < self._tell_at or not self.is_dropped() or not self.core.held:
            return
        self._tell_at = moment + _TELL_EVERY
        _logger.warning(
            "%r (token %d) is held by a thread without a block, nobody references the lease, and it is "
            "extended until the thread ends: release it in that thread, or bound it with max_hold=",
            self.request.name,
            self.request.token,
            extra={"event": "held_for_long", "lock": self.request.name},
        )


class Here:
    """One thread's own, gone with the thread.

    Mutable state: ``blocks`` (whose block this thread has entered and nobody has left), ``bare`` (what it
    has acquired without a block and nobody has released). Other threads change them, too.
    """

    __slots__ = ("__weakref__", "_is_of_pool", "bare", "blocks", "ident", "ref")

    def __init__(self) -> None:
        self.blocks: dict[Hold, Mark] = {}
        self.bare: dict[Hold, Mark] = {}
        self.ident: int = threading.get_ident()
        self._is_of_pool = is_of_pool()
        key = id(self)

        # What is needed stands in the defaults: the interpreter's end takes globals away before.
        def forget(_: object, pop: Callable[..., object] = _everyone.pop) -> None:
            pop(key, None)

        self.ref: weakref.ref[Here] = weakref.ref(self, forget)
        _everyone[key] = self.ref

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the thread. Each in the loop's thread: where warnings are errors, one raises.
        bare = getattr(self, "bare", ())  # a signal handler may have raised before it was made
        for hold in () if is_finalizing() else tuple(bare):
            hold.forget()

    def mark(self) -> Mark:
        """Return the mark of what is taken now, which this context knows from now on."""
        number = next(_numbers)
        if self.blocks or self.bare:
            known = _inside.get()
            mine = (*self.blocks.values(), *self.bare.values())
            _inside.set((*[mark.number for mark in mine if mark.number in known], number))
        else:
            _inside.set((number,))
        return Mark(number, self._job())

    def _job(self) -> object | None:
        return present_job() if self._is_of_pool else None

    def tidy(self) -> None:
        """Forget what was lost and nobody references, if there is much of it."""
        if len(self.bare) >= _MANY:
            for hold in tuple(self.bare):
                if not hold.core.held and hold.is_dropped():
                    hold.let_go()

    def holds(self, running: Running, terms: Terms, owner: str | None) -> list[Hold]:
        """Return the holds of that description that nobody has released, the newest first."""
        found = {
            hold: mark.number
            for hold, mark in (*self.bare.items(), *self.blocks.items())
            if hold.is_of(running, terms, owner)
        }
        return sorted(found, key=found.__getitem__, reverse=True)

    def own(self, running: Running, names: Iterable[str]) -> OwnRequests:
        """Return what this thread holds of these names, and what its open blocks hold of all."""
        if not self.blocks and not self.bare:
            return _OWNS_NOTHING
        known, job = _inside.get(), self._job()
        named: dict[str, list[Acquisition]] = {}
        inside: list[Acquisition] = []
        for hold, mark in tuple(
            self.blocks.items()
        ):  # others may leave a block of this thread meanwhile
            if hold.running is running and mark.is_in(known, job) and not hold.core.is_over:
                inside.append(hold.core)
                if hold.request.name in names and not hold.is_place:
                    named.setdefault(hold.request.name, []).append(hold.core)
        for hold, mark in tuple(self.bare.items()):
            if hold.running is not running or hold.request.name not in names or hold.is_place:
                continue
            if hold.core.held and mark.is_in(known, job):
                named.setdefault(hold.request.name, []).append(hold.core)
            elif hold.core.held:
                hold.tell_of_job()
        return OwnRequests(named, tuple(inside))


def tell_of_long_holds(running: Running) -> bool:
    """Tell of holds that nobody releases; return whether any are left. In the loop's thread."""
    moment, left = now(), False
    for one in _threads():
        for hold in tuple(one.bare):
            if hold.running is running:
                left = True
                hold.tell_if_long(moment)
    return left


def holding_threads(running: Running, terms: Terms, owner: str | None) -> list[str]:
    """Return the names of the threads of this process that hold something of that description."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        names.get(one.ident, str(one.ident))
        for one in _threads()
        if one.holds(running, terms, owner)
    ]


def _threads() -> list[Here]:
    return [one for ref in tuple(_everyone.values()) if (one := ref()) is not None]


class _Local(threading.local):
    def __init__(self) -> None:
        self.here: Here = Here()


_local = _Local()


def here() -> Here:
    """Return the calling thread's own."""
    return _local.here
