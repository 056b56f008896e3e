"""Leases that nobody references any more and nobody has released."""

from __future__ import annotations

import asyncio
import os
import warnings
from contextlib import suppress
from typing import Any

from ._departure import Departure
from ._home import Home
from ._request import HELD, Request
from ._tasks import running_loop
from ._telling import Telling


class Forgotten:
    """Releases them when their task has ended, with a ResourceWarning."""

    def __init__(self, home: Home, departure: Departure, telling: Telling) -> None:
        self._home = home
        self._loop = home.loop
        self._departure = departure
        self._telling = telling

    def dropped(self, request: Request, serial: int) -> None:
        """Nobody references a lease any more that was not left. Called by the collector, on any thread."""
        if os.getpid() != self._home.pid or self._loop.is_closed():
            return  # after a fork the lease is the parent's
        if request.task is None or running_loop() is self._loop:
            self._on_dropped(request, serial)
        else:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._on_dropped, request, serial)

    def left_by_thread(self, request: Request, serial: int) -> None:
        """The thread that has acquired it without a block has ended. In the loop's thread."""
        if serial in request.handles:
            self._forget(
                request,
                serial,
                f"lease on {request.name!r} (token {request.token}) was held when the thread that "
                "acquired it ended: it is released; release it in that thread, or use it in a with block",
            )

    def _on_dropped(self, request: Request, serial: int) -> None:
        """The hold lives on as long as its task, which can still release it."""
        if serial not in request.handles:
            return
        task = request.task() if request.task is not None else None
        reported = request.loss is not None and request.loss.reported
        if task is None or task.done() or reported:
            self._forget(request, serial)
            return
        request.dropped += (serial,)
        if request.on_task_end is None:

            def forget(_: asyncio.Task[Any]) -> None:
                # Each by itself: where warnings are errors, one raises.
                for left in request.dropped:
                    self._loop.call_soon(self._forget, request, left)

            request.on_task_end = forget
            task.add_done_callback(forget)

    def _forget(self, request: Request, serial: int, text: str | None = None) -> None:
        """The task of a hold has ended, and nobody can release it any more. Called on any thread."""
        held = request.state is HELD and serial in request.handles
        # Later: this may be in the middle of anything. The warning may be turned into an error.
        text = text or _forgotten(request)
        self._loop.call_soon_threadsafe(self._leave_forgotten, request, serial, text, held)
        if held:  # else there is nothing that the holder should have released
            warnings.warn(text, ResourceWarning, stacklevel=2)

    def _leave_forgotten(self, request: Request, serial: int, text: str, held: bool) -> None:
        if held:
            self._telling.forgotten(request, text)
        self._departure.give_up(request, serial)


def _forgotten(request: Request) -> str:
    block = "an async with" if request.task is not None else "a with block"
    return (
        f"lease on {request.name!r} (token {request.token}) was forgotten while held, and nobody "
        f"references it any more: release it, or use it in {block}"
    )
