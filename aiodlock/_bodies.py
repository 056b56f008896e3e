"""The open ``async with`` blocks: which bodies a loss cancels, and which task is inside which block."""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ._request import Block, Request, held_in
from ._scope import BodyScope

_Task = asyncio.Task[Any]

#: The task that was last inside a block, here or in a task that has created this one.
_here: contextvars.ContextVar[weakref.ref[asyncio.Task[Any]] | None] = contextvars.ContextVar(
    "aiodlock_here", default=None
)


def enter(task: asyncio.Task[Any]) -> None:
    """A task is inside a block: the tasks that it creates from now on know it."""
    known = _here.get()
    if known is None or known() is not task:
        _here.set(weakref.ref(task))


def creator() -> weakref.ref[asyncio.Task[Any]] | None:
    """Return the task that was last inside a block, here or in a task that has created this one."""
    return _here.get()


class Bodies:
    """The blocks of a client's tasks, and the scopes that cancel their bodies.

    A body stays armed until its task has left its last block on that lease, in whatever order.

    Mutable state: ``open`` (the blocks that each task is in, in the order of entering), and
    ``Request.armed``.
    """

    def __init__(self) -> None:
        self.open: dict[_Task, list[Block]] = {}

    def enter_first(self, task: _Task, request: Request, serial: int) -> None:
        """The task is in its only block, on a request that nobody else relies on."""
        scope, request.scope = request.scope, None
        if scope is None:
            enter(task)
            scope = BodyScope(task)
        else:  # the same task's
            scope.use_again(task)
        self.open[task] = [(request, serial)]
        if request.armed is None:
            request.armed = {}
        request.armed[task] = scope

    def leave_only(self, task: _Task, request: Request) -> bool:
        """End the only block of the task, if nothing has cancelled its body; else do nothing."""
        blocks, armed = self.open.get(task), request.armed
        if blocks is None or len(blocks) != 1 or not armed or len(armed) != 1:
            return False
        scope = armed.get(task)
        if scope is None or not scope.put_aside():
            return False
        request.scope = scope
        del self.open[task]
        armed.clear()
        return True

    def of(self, task: _Task | None) -> Sequence[Request]:
        """Return the request of each block that the task is in; one is there twice when entered twice."""
        blocks = self.open.get(task) if task is not None else None
        return () if blocks is None else [request for request, _ in blocks]

    def held(self, task: _Task | None) -> list[Request]:
        """Return what the task's blocks hold themselves."""
        return held_in(self.open.get(task, ())) if task is not None else []

    def enter(self, task: _Task, entered: Sequence[Block]) -> None:
        """The task is in one more block on these requests: their losses cancel it, together once."""
        enter(task)
        if len(entered) == 1 and task not in self.open:  # as nearly always
            self.open[task] = [entered[0]]
            request = entered[0][0]
            if request.armed is None:
                request.armed = {}
            request.armed[task] = BodyScope(task)
            return
        blocks = self.open.get(task)
        if blocks is None:
            blocks = self.open[task] = []
        scope: BodyScope | None = None
        for block in entered:
            blocks.append(block)
            request = block[0]
            armed = request.armed
            if armed is None:
                armed = request.armed = {}
            if task not in armed:  # else an outer body of this task is cancelled, with ours in it
                if scope is None:
                    scope = BodyScope(task)
                armed[task] = scope

    def leave(
        self, task: _Task, left: Sequence[Block], exc_type: type[BaseException] | None
    ) -> bool:
        """A block is left; return whether a loss is all that there is to say; see ``BodyScope.leave``."""
        blocks = self.open[task]
        if len(blocks) == 1:  # as nearly always
            del self.open[task]
            armed = blocks[0][0].armed
            return armed.pop(task).leave(exc_type) if armed else False
        gone = Counter(left)
        rest: list[Block] = []
        for block in blocks:  # there may be thousands, of a multilock
            if gone[block]:
                gone[block] -= 1
            else:
                rest.append(block)
        if rest:
            self.open[task] = rest
        else:
            del self.open[task]
        entered = {request for request, _ in rest}
        disarmed: list[BodyScope] = []
        for request in dict.fromkeys(request for request, _ in left):
            if request.armed and request not in entered:
                scope = request.armed.pop(task)
                if scope not in disarmed:
                    disarmed.append(scope)
        in_use = {request.armed[task] for request in entered if request.armed}
        ended = [scope.leave(exc_type) for scope in disarmed if scope not in in_use]
        return any(ended)
