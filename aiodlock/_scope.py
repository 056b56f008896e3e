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

    def cancel(self) -> None:
        """Cancel the body at its next await. Repeated, it does nothing."""
        if self._handle is None:
            self._handle = self._task.get_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        self._cancelled = True
        self._task.cancel()

    def leave(self, exc_type: type[BaseException] | None) -> bool:
        """The body has ended; return whether it did by the cancellation that this scope caused."""
        if self._handle is None:
            return False
        self._handle.cancel()
        if not self._cancelled or self._task.uncancel() > self._before:
            return False  # or somebody else has cancelled it too
        return exc_type is not None and issubclass(exc_type, asyncio.CancelledError)
