"""Transactions that are asked for in one turn of the loop go out as one.

Each commit costs the servers a write to the disk. A client that releases one name while it asks for
another needs one commit for both, if both are calls of one transaction. If one of them cannot be done, none
is: then each is sent alone, and gets its own answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..._errors import BackendUnavailable
from . import jute
from .connection import Answer, Connection

Done: TypeAlias = Answer[list[object]]

#: Servers refuse messages of a megabyte.
_BYTES_AT_ONCE = 200_000
_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class _Part:
    calls: Sequence[jute.Call[Any]]
    answer: asyncio.Future[Done]


class Transactions:
    """Those that a session is about to send.

    Mutable state: ``_parts``, ``_size`` (in bytes), ``_once`` (texts that are in it already),
    ``_connection`` (which they were asked for on).
    """

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._size = 0
        self._once: set[str] = set()
        self._connection: Connection | None = None

    def add(
        self, connection: Connection, calls: Sequence[jute.Call[Any]], once: str
    ) -> asyncio.Future[Done]:
        """Send these calls at the end of this turn of the loop, together with others."""
        size = sum(len(call.body) for call in calls)
        full = self._size + size > _BYTES_AT_ONCE or len(self._parts) >= _AT_ONCE
        if full or (once and once in self._once) or connection is not self._connection:
            self.flush()
        loop = asyncio.get_running_loop()
        if not self._parts:
            self._connection = connection
            loop.call_soon(self.flush)
        if once:
            self._once.add(once)
        part = _Part(calls, loop.create_future())
        self._parts.append(part)
        self._size += size
        return part.answer

    def flush(self) -> None:
        """Send what there is: what is sent from now on comes behind it."""
        if not self._parts:
            return
        parts, self._parts = self._parts, []
        connection, self._connection = self._connection, None
        self._size = 0
        self._once.clear()
        assert connection is not None
        _send(connection, parts)


def _send(connection: Connection, parts: Sequence[_Part]) -> None:
    try:
        answer = connection.submit(jute.multi([call for part in parts for call in part.calls]))
    except BackendUnavailable as unavailable:
        for part in parts:
            _fail(part, unavailable)
        return
    answer.add_done_callback(lambda answer: _share(connection, parts, answer))


def _share(connection: Connection, parts: Sequence[_Part], answer: asyncio.Future[Done]) -> None:
    """Give each part its share of the answer."""
    error = answer.exception()
    if isinstance(error, jute.Aborted) and len(parts) > 1:
        for part in parts:
            _send(connection, [part])
        return
    if error is not None:
        for part in parts:
            _fail(part, error)
        return
    results, zxid = answer.result()
    first = 0
    for part in parts:
        last = first + len(part.calls)
        if not part.answer.done():
            part.answer.set_result(Answer(results[first:last], zxid))
        first = last


def _fail(part: _Part, error: BaseException) -> None:
    if not part.answer.done():
        if isinstance(error, BackendUnavailable):
            # Each gets one of its own: several tasks raise it.
            own = type(error)(*error.args)
            own.__cause__ = error.__cause__
            error = own
        part.answer.set_exception(error)
        part.answer.exception()  # it may be that nobody awaits it
