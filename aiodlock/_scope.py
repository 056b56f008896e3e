"""What cancels a body when its lease is lost."""

from __future__ import annotations

import asyncio
from typing import Any


class BodyScope:
    """Cancels one body, once, and knows that cancellation again when the body is left.

    As ``asyncio.timeout`` does it, so the body's own clean-up may await; with less around it, since one is
    made for every ``async with lock`` and hardly any is used.
    """

    __slots__ = ("_before", "_cancelled", "_handle", "_task")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self._before = task.cancelling()
        self._handle: asyncio.Handle | None = None
        self._cancelled = False

    def use_again(self, task: asyncio.Task[Any]) -> None:
        """Stand for a later body, after it was put aside."""
        self._task = task
        self._before = task.cancelling()

    def put_aside(self) -> bool:
        """The body has ended; return whether this may be used again: nobody has cancelled it."""
        if self._cancelled or self._handle is not None:
            return False
        del self._task  # it may have ended long before the next body
        return True

    def cancel(self) -> None:
        """Cancel the body before its next step. Repeated, it does nothing."""
        if self._cancelled or self._handle is not None:
            return
        loop = self._task.get_loop()
        # An eager task that the body starts is the current one, and the body runs all the same.
        runs = getattr(self._task.get_coro(), "cr_running", False)
        if runs or asyncio.current_task(loop) is self._task:
            # The body runs at this moment: a callback cancels it at its next await. (Before Python 3.13
            # nobody can take a cancellation back from a body that ends without another await.)
            self._handle = loop.call_soon(self._cancel)
        else:
            self._cancel()

    def _cancel(self) -> None:
        self._cancelled = True
        self._task.cancel()

    def leave(self, exc_type: type[BaseException] | None) -> bool:
        """The body has ended; return whether a loss is all that there is to say.

        So it is when the cancellation that this scope caused has ended it; and when a generator is closed,
        perhaps because that cancellation has ended who read it.
        """
        if self._handle is not None:
            self._handle.cancel()
        requests = self._task.uncancel() if self._cancelled else self._task.cancelling()
        if exc_type is None:
            return False
        by_other = asyncio.current_task(self._task.get_loop()) is not self._task
        if exc_type is GeneratorExit:
            return by_other or requests <= self._before
        if not self._cancelled or requests > self._before or by_other:
            return False  # somebody else has cancelled it, too; or whoever ends the block here
        return issubclass(exc_type, asyncio.CancelledError)
