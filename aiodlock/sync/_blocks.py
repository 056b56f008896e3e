"""What each thread is inside of: its open ``with`` blocks, and which of them an exit belongs to."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

from .._bodies import refuse
from .._lock import OwnRequests

if TYPE_CHECKING:
    from .. import _lease as core
    from ._client import Running
    from ._lease import Lease


class _Enterable(Protocol):
    def _leave_soon(self) -> None:
        """End the block; nobody waits for it. It may have ended already."""


_L = TypeVar("_L", bound=_Enterable)
#: An open block: its thread's ``Here``, weakly, what was entered, and the frame that has entered it.
Block: TypeAlias = "tuple[weakref.ref[Here], _L, FrameType]"

_MANY = 64
_numbers = count(1)
#: The numbers of the blocks that were entered in the running context. Pools run each of their jobs in a
#: context of its own: a thread that has entered a block in one job is not inside of it in the next.
_inside: ContextVar[tuple[int, ...]] = ContextVar("aiodlock_inside", default=())


class Here:
    """One thread's own, gone with the thread.

    Mutable state: ``blocks`` (leases whose block this thread has entered and nobody has left), ``_holds``
    (all leases that it acquired, weakly).
    """

    __slots__ = ("__weakref__", "_holds", "blocks", "ref")

    def __init__(self) -> None:
        self.blocks: list[Lease] = []
        self._holds: list[weakref.ref[Lease]] = []
        self.ref: weakref.ref[Here] = weakref.ref(self)

    def enter(self, lease: Lease) -> None:
        """Be inside of the lease's block, in this context."""
        lease._number, known = next(_numbers), _inside.get()
        others = [other._number for other in tuple(self.blocks) if other._number in known]
        _inside.set((*others, lease._number))
        self.blocks.append(lease)

    def acquired(self, lease: Lease) -> None:
        """Remember the lease for ``Lock.release``."""
        holds = self._holds
        if len(holds) >= _MANY:
            holds[:] = [
                ref for ref in holds if (known := ref()) is not None and not known._is_over()
            ]
        holds.append(weakref.ref(lease))

    def released(self, lease: Lease) -> None:
        """Forget it, if it is the latest; else that is done later."""
        holds = self._holds
        if holds and holds[-1]() is lease:
            holds.pop()

    def forget(self, leases: Sequence[Lease]) -> None:
        """Let ``Lock.release`` know nothing of these any more."""
        self._holds[:] = [ref for ref in self._holds if ref() not in leases]

    def holds(
        self, running: Running, kind: str, name: str, mode: str, owner: str | None
    ) -> list[Lease]:
        """Return the holds of that description that nobody has released, the newest first."""
        found: list[Lease] = []
        for ref in reversed(self._holds):
            lease = ref()
            if lease is None or lease._running is not running or lease._is_over():
                continue
            request = lease._core._request
            terms = request.terms
            if (terms.kind, terms.name, terms.mode) != (kind, name, mode):
                continue
            if request.options.owner != owner:
                continue
            found.append(lease)
        return found

    def own(self, running: Running, *names: str) -> OwnRequests:
        """Return what the open blocks of this thread hold, of these names and of all."""
        named: dict[str, list[core.Lease]] = {}
        inside: list[core.Lease] = []
        known = _inside.get()
        for lease in tuple(self.blocks):  # others may leave a block of this thread meanwhile
            if lease._running is not running or lease._number not in known or lease._is_over():
                continue
            inside.append(lease._core)
            request = lease._core._request
            if request.name in names and request.terms.kind != "semaphore":
                named.setdefault(request.name, []).append(lease._core)
        return OwnRequests(named, tuple(inside))


class _Local(threading.local):
    def __init__(self) -> None:
        self.here: Here = Here()


_local = _Local()


def here() -> Here:
    """Return the calling thread's own."""
    return _local.here


class Entered(Generic[_L]):
    """The open blocks of one object, any thread's.

    A signal handler may raise between any two steps of entering or leaving. So entering undoes what it has
    done, and leaving goes on in the background: see ``__enter__`` and ``__exit__`` of ``Acquirable``. Out
    of reach is the first instruction of ``__exit__``.

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
