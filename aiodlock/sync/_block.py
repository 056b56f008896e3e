"""The open blocks of one object that many threads may use, and which of them an exit belongs to."""

from __future__ import annotations

import inspect
import sys
import weakref
from abc import ABC, abstractmethod
from types import FrameType, TracebackType
from typing import Generic, Protocol, TypeAlias, TypeVar

from .._body import refuse
from ._holds import Here, here


class Opened(Protocol):
    """What a block holds, until it is left."""

    def enter(self) -> None:
        """Be inside of it, in this thread."""

    def begin(self) -> None:
        """Let the body begin, unless it was lost."""

    def exit(self, exc: BaseException | None) -> None:
        """End the block."""

    def leave_soon(self) -> None:
        """End the block; nobody waits for it. It may have ended already."""


_L = TypeVar("_L")
#: An open block: its thread's ``Here``, weakly, what it holds, and the generator that has entered it.
Block: TypeAlias = "tuple[weakref.ref[Here], Opened, FrameType | None]"


#: Of code that may stop in the middle, and go on in any block.
_PAUSES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def generator() -> FrameType | None:
    """Return the frame that enters or leaves a block, if it is a generator's or a coroutine's.

    Nothing else tells whose block is left: a generator may be closed in any block, and collected in any
    thread. (The frame itself, not its id, which another one would get when the generator's has ended.)
    """
    frame = sys._getframe(2)
    return frame if frame.f_code.co_flags & _PAUSES else None


class Entered:
    """The open blocks of one object, any thread's.

    Mutable state: ``_open`` (in order of entering).
    """

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: list[Block] = []

    def add(self, opened: Opened, inside: FrameType | None) -> None:
        """One was entered, in this thread, inside of this generator if there is one."""
        self._open.append((here().ref, opened, inside))

    def discard(self, opened: Opened) -> None:
        """Forget a block that was never begun."""
        for entry in tuple(self._open):  # in place: other threads enter meanwhile
            if entry[1] is opened:
                self._open.remove(entry)

    def remove(self, block: Block) -> None:
        """It is left."""
        self._open.remove(block)

    def leave_soon(self, block: Block | None, inside: FrameType | None) -> None:
        """Leave a block in the background whose leaving was interrupted; None: before it was found."""
        if block is None:
            block = self._own(inside)
        if block is not None:
            if block in self._open:
                self._open.remove(block)
            block[1].leave_soon()

    def find(
        self, what: object, exc: BaseException | None, inside: FrameType | None
    ) -> Block | None:
        """Return which block is left: the one that this generator has entered, else this thread's latest,
        else the only one, else the only one whose thread has ended. Else none is: RuntimeError, or a note
        to what comes out of the body. (Of a generator that is closed nothing comes out to have a note.)
        """
        own = self._own(inside)
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

    def _own(self, inside: FrameType | None) -> Block | None:
        me, latest = here().ref, None
        for entry in reversed(self._open):
            if inside is not None and entry[2] is inside:
                return entry
            # A generator's goes last: it may be open still.
            if entry[0] is me and (latest is None or (latest[2] is not None and entry[2] is None)):
                latest = entry
        return latest


class Enterable(ABC, Generic[_L]):
    """What ``with`` opens a block of, in any number of threads.

    A signal handler may raise between any two steps of entering or leaving. So entering undoes what it has
    done, and leaving goes on in the background. Out of reach is the first instruction of ``__exit__``.
    """

    def __init__(self) -> None:
        self._entered = Entered()

    @abstractmethod
    def _take(self) -> tuple[_L, Opened]:
        """Acquire what a block gives to its body, and what it holds."""

    def __enter__(self) -> _L:
        given, opened = self._take()
        try:
            opened.enter()
            self._entered.add(opened, generator())
            opened.begin()
        except BaseException as error:  # a signal handler raised
            self._entered.discard(opened)
            opened.exit(error)
            raise
        return given

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        block: Block | None = None
        try:
            block = self._entered.find(self, exc, generator())
            if block is not None:
                self._entered.remove(block)
                block[1].exit(exc)
        except BaseException:  # a signal handler raised, or there was a loss
            self._entered.leave_soon(block, generator())
            raise
