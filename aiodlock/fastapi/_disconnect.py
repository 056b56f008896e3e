"""Clients that go away while they wait: servers do not cancel their handlers, so somebody has to look."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias, TypeVar

from starlette.requests import HTTPConnection

from .._errors import LockError
from .._lease import Lease
from .._lock import Lock
from ._problems import ClientGone, told_to

_T = TypeVar("_T")

#: How much of a body that nobody reads is kept while its request waits for a lock.
_MOST_KEPT = 64 * 1024

_Message: TypeAlias = MutableMapping[str, Any]


class Watch:
    """Listens to ``receive`` for a disconnect, and gives every message it took to the next reader.

    It does so for a request, and for a WebSocket, accepted or not.

    Mutable state: ``_gone``; ``_waiting`` (the scope that a disconnect ends); ``_kept`` (what was taken and
    not read yet, also errors: a middleware refuses a large body by one); ``_size`` of the bodies;
    ``_asked`` (a receive on its way, which is not cancelled while its message might be lost).
    """

    def __init__(self, connection: HTTPConnection) -> None:
        self._connection = connection
        either: Any = connection  # a Request or a WebSocket
        self._receive: Callable[[], Awaitable[_Message]] = either._receive
        self._gone = False
        self._waiting: asyncio.Timeout | None = None
        self._kept: deque[asyncio.Task[_Message]] = deque()
        self._size = 0
        self._asked: asyncio.Task[_Message] | None = None
        # Starlette has no public way to put a message back.
        either._receive = self.receive

    async def acquire(self, lock: Lock) -> Lease:
        """Acquire a lock, or leave the queue when the client disconnects."""
        return await self.wait_for(lock.name, lock.acquire, lambda lease: lease.release())

    async def wait_for(
        self,
        name: str,
        acquire: Callable[[], Awaitable[_T]],
        take_back: Callable[[_T], Awaitable[object]],
    ) -> _T:
        """Acquire, or leave the queue when the client disconnects: servers do not cancel a handler.

        The lock is acquired in this task, for reentrancy goes by task; what is cancelled is only the
        waiting, as ``asyncio.timeout`` does it.
        """
        self._waiting = scope = asyncio.Timeout(None)
        gone = told_to(self._connection, ClientGone("The client closed its request.", name=name))
        try:
            async with scope:
                self._ask()
                acquired = await acquire()
        except TimeoutError as error:
            if not self._gone or isinstance(error, LockError):
                raise
            raise gone from None
        finally:
            self._waiting = None
        if self._gone:  # just as the lock was granted
            await take_back(acquired)
            raise gone
        return acquired

    def _ask(self) -> None:
        async def ask() -> _Message:
            return await self._receive()

        self._asked = asyncio.create_task(ask(), name="aiodlock: is the client still there")
        self._asked.add_done_callback(self._on_message)

    def _on_message(self, asked: asyncio.Task[_Message]) -> None:
        if self._asked is asked:
            self._asked = None
        if asked.cancelled():
            return
        self._kept.append(asked)
        if asked.exception() is not None:
            return
        message = asked.result()
        if message["type"] in ("http.disconnect", "websocket.disconnect"):
            self._gone = True
            if self._waiting is not None:
                self._waiting.reschedule(asyncio.get_running_loop().time())
            return
        self._size += sum(len(message.get(part) or "") for part in ("body", "text", "bytes"))
        if self._waiting is not None and self._size < _MOST_KEPT:
            self._ask()

    async def receive(self) -> _Message:
        """Stand in for the request's own ``receive``."""
        while self._asked is not None and not self._kept:
            await asyncio.wait({self._asked})
            await asyncio.sleep(0)  # its callback keeps the message
        if self._kept:
            return self._kept.popleft().result()
        return await self._receive()

    def end(self) -> None:
        """The handler is done: nobody reads any more."""
        if self._asked is not None:
            self._asked.cancel()
