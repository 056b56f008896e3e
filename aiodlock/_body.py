"""What a block gives to its body, and which block an ``__aexit__`` ends."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from types import CoroutineType, FrameType, TracebackType
from typing import Any, Generic, NoReturn, Protocol, Self, TypeVar

import anyio
import anyio.lowlevel

from . import _process
from ._errors import BackendError, LockLost
from ._request import Block
from ._session import Session
from ._tasks import running_loop, task_of

_Task = asyncio.Task[Any]
_F = TypeVar("_F", bound=Callable[..., Any])


class Body:
    """What a block gives to its body, inside of a Lease or a MultiLease: entered and left in one way.

    Mutable state: ``tasks`` (of its open blocks, each of the task that entered it).
    """

    __slots__ = ()

    session: Session
    tasks: tuple[_Task, ...]

    @property
    def acquisitions(self) -> Sequence[Block]:
        """What a body of it relies on."""
        raise NotImplementedError

    def ensure_held(self) -> None:
        raise NotImplementedError

    async def leave(self, *, wait: bool) -> LockLost | BackendError | None:
        """End this acquisition as its body ends; return the loss, if it was lost."""
        raise NotImplementedError

    async def enter(self) -> None:
        """Begin a block on what was acquired before."""
        self.session.check_here()
        try:
            self.ensure_held()
        except (LockLost, BackendError):
            await self.leave(wait=False)  # there is no body, and nobody will leave it later
            raise
        self.arm()

    def arm(self, task: _Task | None = None) -> _Task:
        """Make a loss cancel the current task's body, once, however often it is nested; return the task.

        With ``on_lost="flag"`` too: nothing is cancelled then, but leaving the client waits for it.

        :param task: the current task, if the caller knows it.
        """
        if task is None:
            task = asyncio.current_task()
            assert task is not None
        if self.tasks and any(other is not task and not other.done() for other in self.tasks):
            raise RuntimeError(f"{self!r} is the body of another task already: enter it once")
        self.session.bodies.enter(task, self.acquisitions)
        self.tasks += (task,)  # type: ignore[misc]  # a slot of the heirs
        return task

    async def exit(self, exc_type: type[BaseException] | None, exc: BaseException | None) -> None:
        """End the block that is meant."""
        error, index = self.session.foreign(), block_meant(self.tasks)
        if error is not None or index is None:
            refuse(exc, error or not_clear(self, len(self.tasks)))
            return
        await self.end_block(self.tasks[index], exc_type, exc)

    async def end_block(
        self, task: _Task, exc_type: type[BaseException] | None, exc: BaseException | None
    ) -> None:
        """End the block that the task has entered."""
        if task not in self.tasks:
            left = RuntimeError(f"{self!r}: its block was left before, by a call of __aexit__")
            refuse(exc, left)
            return
        at, entered = self.tasks.index(task), self.acquisitions
        self.tasks = self.tasks[:at] + self.tasks[at + 1 :]  # type: ignore[misc]
        loss_alone = self.session.bodies.leave(task, entered, exc_type)
        try:
            # A coroutine that is being closed cannot await.
            loss = await self.leave(wait=exc_type is not GeneratorExit)
        finally:
            deadlocks = self.session.deadlocks
            if deadlocks is not None and task is not task_of(self.session.loop):
                deadlocks.left_block(task)
        if loss is None and loss_alone:
            # Its own was released inside the body, and what else the task had of it was lost.
            lost = (request.error() for request, _ in entered if request.loss is not None)
            loss = next(lost, None)
        if loss is not None:
            if not loss_alone and isinstance(exc, asyncio.CancelledError):
                await _say_again(exc)
            raise_loss(exc, loss, loss_alone)


_B = TypeVar("_B", bound=Body)


class AsyncBlock(Generic[_B]):
    """What can be entered that was acquired before: ``async with lease``."""

    __slots__ = ()

    _acquired: _B

    async def __aenter__(self) -> Self:
        await self._acquired.enter()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._acquired.exit(exc_type, exc)


async def _say_again(cancelled: asyncio.CancelledError) -> None:
    """Let an anyio scope that has ended say so again: it knows its own cancellation by the message. That is
    lost when a lease is lost in the same turn of the loop, whose cancellation has none."""
    if not cancelled.args and anyio.current_effective_deadline() == float("-inf"):
        await anyio.lowlevel.checkpoint_if_cancelled()


class HasSession(Protocol):
    """What a block gives to its body, or what stands for it."""

    @property
    def session(self) -> Session: ...


_L = TypeVar("_L", bound=HasSession)
#: Frames that stand for what enters and leaves a block: a coroutine's or a generator's, which is in it
#: until it leaves it. Another one may be the event loop's own. The frame itself is kept, not its id, which
#: another one would get when an exit stack's has ended.
OF_ITS_OWN = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Blocks(Generic[_L]):
    """The open blocks of one object that several tasks may share.

    Mutable state: ``open`` (the task, the body, and the frame that has entered it, if that is known; in the
    order of entering). Only the frame tells apart the generators that enter one object: the loop closes
    those that were dropped in a task of its own, which has entered none.
    """

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open: list[tuple[_Task, _L, FrameType | None]] = []

    def enter(self, task: _Task, body: _L) -> None:
        """Called by an ``__aenter__``: a block begins in the frame that has called that."""
        frame = sys._getframe(2)
        self.open.append((task, body, frame if frame.f_code.co_flags & OF_ITS_OWN else None))

    def take(self, what: object, exc: BaseException | None) -> tuple[_Task, _L] | None:
        """Called by an ``__aexit__``: take out the block that is meant.

        It is the one that the calling frame has entered (a generator's, when it is
        collected, is left in another task). Else this task's latest, the only one, or the only one whose
        task has ended. Else None, and an error: any other may be the body of a task that goes on.
        """
        index = len(self.open) - 1
        if index > 0:
            index = self._index_of(sys._getframe(2))
        if index < 0:
            # What comes out of a generator that is closed nobody sees, with its notes.
            seen = None if isinstance(exc, GeneratorExit) else exc
            refuse(seen, not_clear(what, len(self.open)))
            return None
        task, body, _ = self.open[index]
        session = body.session
        loop = session.loop
        if running_loop() is not loop or task_of(loop) is not task or session.pid != _process.pid:
            foreign = session.foreign()
            if foreign is not None:
                refuse(exc, foreign)
                return None
        del self.open[index]
        return task, body

    def _index_of(self, frame: FrameType) -> int:
        """Return the block that is meant; -1 for none."""
        for index in range(len(self.open) - 1, -1, -1):
            if self.open[index][2] is frame:
                return index
        meant = block_meant([task for task, _, _ in self.open])
        return -1 if meant is None else meant


class _Nothing(Coroutine[Any, Any, None]):
    """There is nothing to wait for. One for all: a coroutine would have to be made each time."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, None]:
        return iter(())  # type: ignore[return-value]

    def send(self, value: object) -> NoReturn:
        raise StopIteration

    def throw(self, *error: Any) -> NoReturn:
        raise error[0] if len(error) == 1 else error[1] or error[0]

    def close(self) -> None:
        """There is nothing to close."""


NOTHING: CoroutineType[Any, Any, None] = _Nothing()  # type: ignore[assignment]


def coroutine_function(function: _F) -> _F:
    """Mark what returns a coroutine without being ``async``, for ``unittest.mock``: else a mock of its
    class cannot be entered."""
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(function)
    function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]
    return function


def block_meant(tasks: Sequence[_Task]) -> int | None:
    """Return the index of the block that the current task is leaving; None if that is not clear.

    :param tasks: which task has entered each open block of one object.
    """
    current = current_task()
    for index in range(len(tasks) - 1, -1, -1):
        if tasks[index] is current:
            return index
    if len(tasks) == 1:
        return 0
    ended = [index for index, task in enumerate(tasks) if task.done()]
    return ended[0] if len(ended) == 1 else None


def not_clear(what: object, blocks: int) -> RuntimeError:
    """Say why no block is ended, and what to do instead."""
    return RuntimeError(
        f"{what!r}: {blocks} blocks of it are open, and it is not clear which one this task leaves, for it "
        "has entered none: enter the lease instead, with "
        "stack.enter_async_context(await lock.acquire())"
    )


def refuse(exc: BaseException | None, error: RuntimeError) -> None:
    """Raise the error, or add it to what comes out of the body: that must not be hidden."""
    if exc is None:
        raise error
    _note(exc, error)


def raise_loss(exc: BaseException | None, loss: LockLost | BackendError, alone: bool) -> None:
    """An outer cancellation first; then the body's own exception; then the loss.

    :param alone: what comes out of the body is only what the loss has caused, or a generator's close.
    """
    if exc is None or alone:
        raise loss from loss.__cause__
    # A loss of the same name is this one, told by a block in this one.
    told = isinstance(exc, LockLost) and exc.name == loss.name
    if not told and not isinstance(exc, asyncio.CancelledError | GeneratorExit):
        _note(exc, loss)


def _note(exc: BaseException, error: BaseException) -> None:
    """Add the error to what comes out of the body, if that can have a note (a frozen dataclass cannot)."""
    with suppress(Exception):
        exc.add_note(str(error))


def current_task() -> _Task | None:
    """Return the running task; None also where no loop runs, as when a generator is collected."""
    loop = running_loop()
    return task_of(loop) if loop is not None else None
