"""Handlers that are not async run in a thread, which no cancellation stops."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import HTTPConnection

from .._lease import Lease


class HandlerThread:
    """The thread of one request's handler, as its dependencies see it.

    Mutable state, under ``_guard``: ``_runs``; ``_left``, after which it does not begin any more.
    """

    def __init__(self, scope: object) -> None:
        self.scope = scope
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._guard = threading.Lock()
        self._runs = self._left = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be the thread."""
        with self._guard:
            if self._left:
                raise RuntimeError("the request was cancelled before its handler began")
            self._runs = True
        try:
            yield
        finally:
            with self._guard:
                self._runs = False
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
    route = connection.scope.get("route")
    if isinstance(route, APIRoute):
        handler = route.dependant.call
        if (
            handler is not None
            and not _is_async(handler)
            and not hasattr(handler, "tells_its_thread")
        ):
            route.dependant.call = _telling(handler)
    made = HandlerThread(connection.scope)
    _thread.set(made)
    try:
        yield made
    finally:
        _thread.set(around)


def _is_async(handler: Callable[..., Any]) -> bool:
    from starlette._utils import is_async_callable

    return bool(is_async_callable(handler))


def _telling(handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(handler)
    def handled(*args: Any, **kwargs: Any) -> Any:
        thread = _thread.get()
        if thread is None:
            return handler(*args, **kwargs)
        with thread.running():
            return handler(*args, **kwargs)

    handled.tells_its_thread = True  # type: ignore[attr-defined]
    return handled
