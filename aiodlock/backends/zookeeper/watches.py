"""What is called when a node changes: set on one connection, and set again on the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from . import jute
from .connection import Answer

#: Servers refuse messages of a megabyte.
_BYTES_AT_ONCE = 100_000

_Calls = dict[str, list[Callable[[], object]]]


class Watches:
    """Those of one session. Each fires once.

    :param submit: sends a request; raises BackendUnavailable when there is no connection.

    Mutable state: ``seen`` (the newest transaction that the last connection told of), ``_data`` and
    ``_children`` (what is called, by path).
    """

    def __init__(self, submit: Callable[[jute.Call[Any]], asyncio.Future[Answer[Any]]]) -> None:
        self.seen: int = 0
        self._submit = submit
        self._data: _Calls = {}
        self._children: _Calls = {}

    def data(
        self, path: str, changed: Callable[[], object]
    ) -> asyncio.Future[Answer[tuple[bytes, jute.Stat]]]:
        """Read a node, and have ``changed`` called once when it is changed or deleted."""
        answer = self._submit(jute.get_data(path, watch=True))
        self._data.setdefault(path, []).append(changed)

        def on_answer(answer: asyncio.Future[Answer[tuple[bytes, jute.Stat]]]) -> None:
            # Without a node there is no watch. After a lost connection the next one sets it.
            if isinstance(answer.exception(), jute.ZooKeeperError):
                self.forget(path, changed)

        answer.add_done_callback(on_answer)
        return answer

    def children(
        self, path: str, changed: Callable[[], object]
    ) -> asyncio.Future[Answer[tuple[list[str], jute.Stat]]]:
        """List a node's children, and have ``changed`` called once when one comes or goes, or the node
        itself goes."""
        answer = self._submit(jute.get_children(path, watch=True))
        self._children.setdefault(path, []).append(changed)
        return answer

    def creation(self, path: str, changed: Callable[[], object]) -> None:
        """Have ``changed`` called once when a node is made, or if it is there already."""

        def on_answer(answer: asyncio.Future[Answer[jute.Stat]]) -> None:
            if answer.exception() is None:
                self.forget(path, changed)
                changed()

        answer = self._submit(jute.exists(path, watch=True))
        self._data.setdefault(path, []).append(changed)
        answer.add_done_callback(on_answer)

    def forget(self, path: str, changed: Callable[[], object]) -> None:
        """Do not call this about a node any more. (The server still tells, once, and nobody listens.)"""
        _remove(self._data, path, changed)
        _remove(self._children, path, changed)

    def clear(self) -> None:
        """The session is over, and what it watched nodes for.

        Whoever watches children is told by the session, and may watch on in the next one.
        """
        self.seen = 0
        self._data.clear()

    def on_event(self, event: jute.Event) -> None:
        """A server tells of a change."""
        told: list[Callable[[], object]] = []
        if event.kind != jute.CHILDREN_CHANGED:
            told += self._data.pop(event.path, ())
        if event.kind in (jute.CHILDREN_CHANGED, jute.DELETED):
            told += self._children.pop(event.path, ())
        for changed in told:
            changed()

    def of_before(self) -> list[jute.Call[None]]:
        """Return what sets the watches of the last connection, in messages that are not too long."""
        calls = []
        data: list[str] = []
        children: list[str] = []
        size = 0
        for paths, into in ((self._data, data), (self._children, children)):
            for path in paths:
                into.append(path)
                size += 4 + len(path.encode())
                if size > _BYTES_AT_ONCE:
                    calls.append(jute.set_watches(self.seen, tuple(data), (), tuple(children)))
                    data.clear()
                    children.clear()
                    size = 0
        if size:
            calls.append(jute.set_watches(self.seen, data, (), children))
        return calls


def _remove(watches: _Calls, path: str, changed: Callable[[], object]) -> None:
    watching = watches.get(path)
    if watching is not None and changed in watching:
        watching.remove(changed)
        if not watching:
            del watches[path]
