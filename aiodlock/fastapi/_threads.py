"""Handlers that are not async run in a thread, which no cancellation stops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any

from starlette.requests import HTTPConnection

from .._lease import Lease
from ._handlers import go_around


class HandlerThread:
    """The thread of one request's handler, as its dependencies see it.

    Mutable state, under ``_guard``: ``_runs`` (how many of what is around the handler it is in); ``_left``,
    after which it does not begin any more.
    """

    def __init__(self, scope: object) -> None:
        self.scope = scope
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._guard = threading.Lock()
        self._runs = 0
        self._left = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be the thread."""
        with self._guard:
            if self._left and not self._runs:
                raise RuntimeError("the request was cancelled before its handler began")
            self._runs += 1
        try:
            yield
        finally:
            with self._guard:
                self._runs -= 1
                runs = self._runs
            if not runs:
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    async def leave(self, lease: Lease | None) -> None:
        """Wait in a cancelled request until the handler has ended, or the lease protects it no more."""
        with self._guard:
            self._left = True
            runs = self._runs
        while runs and not self._ended.done() and lease is not None and lease.held:
            with suppress(asyncio.CancelledError):  # the caller raises the first one
                await asyncio.wait([self._ended], timeout=1.0)


_thread: ContextVar[HandlerThread | None] = ContextVar("aiodlock_thread", default=None)


@contextmanager
def handler_thread(connection: HTTPConnection) -> Iterator[HandlerThread]:
    """Give the thread that will run the handler of this request: the same to each of its dependencies."""
    around = _thread.get()
    if around is not None and around.scope is connection.scope:
        yield around
        return
    go_around(connection, "tells_its_thread", in_thread)
    made = HandlerThread(connection.scope)
    _thread.set(made)
    try:
        yield made
    finally:
        _thread.set(around)


def in_thread(handler: Callable[[], Any]) -> Any:
    """Call the handler, or what is around it, as the thread of the request that is handled here."""
    thread = _thread.get()
    with nullcontext() if thread is None else thread.running():
        return handler()  # what is async returns at once, and is cancelled with its request
