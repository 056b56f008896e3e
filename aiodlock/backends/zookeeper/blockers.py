"""What a waiter waits for: nodes that its session watches, or another place of the same client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from . import jute
from .connection import Answer
from .node import QueueNode
from .queue import Blocked, request_of
from .queues import Queues
from .stands import Behind, Stand


class Blockers:
    """Those of one waiter.

    ``look`` is called when one of them has gone or was written, ``ahead_gone`` when the place that it
    follows has gone, ``refused`` when the servers do not let this client watch one of them.

    Mutable state: ``_watched`` (the paths of nodes), ``_ahead`` (the one that is followed, if it is this
    client's), ``_known`` (what these are for, unless one of them was changed since).
    """

    def __init__(
        self,
        queues: Queues,
        node: QueueNode,
        look: Callable[[], object],
        ahead_gone: Behind,
        refused: Callable[[jute.ZooKeeperError], object],
    ) -> None:
        self._queues = queues
        self._node = node
        self._look = look
        self._ahead_gone = ahead_gone
        self._refused = refused
        self._watched: list[str] = []
        self._ahead: Stand | None = None
        self._known: Blocked | None = None

    def __repr__(self) -> str:
        ahead = None if self._ahead is None else self._ahead.node
        return f"<Blockers watched={self._watched} ahead={ahead}>"

    def wait_for(self, blocked: Blocked) -> None:
        """Wait for these, and no others."""
        if blocked == self._known and not blocked.hears:
            return
        self.clear()
        self._known = blocked
        directory = self._node.directory
        for node in blocked.by:
            ahead = None if self._node.asked.limit else self._queues.stands.find(directory, node)
            if ahead is not None:
                self.follow(ahead)
            else:
                self._watch(f"{directory}/{node}", hears=blocked.hears)

    def follow(self, ahead: Stand) -> None:
        """Wait for another place of this client: it tells when it has gone."""
        self._ahead = ahead
        ahead.behind.append(self._on_ahead_gone)

    def _on_ahead_gone(self, held_until: int) -> None:
        self._ahead = self._known = None
        self._ahead_gone(held_until)

    def _on_changed(self) -> None:
        self._known = None  # a watch tells once
        self._look()

    def _watch(self, path: str, *, hears: bool) -> None:
        self._watched.append(path)

        def on_answer(answer: asyncio.Future[Answer[tuple[bytes, jute.Stat]]]) -> None:
            error = answer.exception()
            if isinstance(error, jute.ZooKeeperError):
                if error.code == jute.NO_NODE:
                    self._on_changed()  # it has gone already
                elif path in self._watched:
                    self._refused(error)
            elif error is None and hears and answer.result().value[1].version > 0:
                self._on_changed()  # it was written after the queue was read, and before it was watched

        self._node.session.watches.data(path, self._on_changed).add_done_callback(on_answer)

    def clear(self) -> None:
        """Wait for none any more."""
        ahead, self._ahead, self._known = self._ahead, None, None
        if ahead is not None and self._on_ahead_gone in ahead.behind:
            ahead.behind.remove(self._on_ahead_gone)
        watched, self._watched = self._watched, []
        for path in watched:
            self._node.session.watches.forget(path, self._on_changed)

    def look_after(self) -> None:
        """Ask whether they are there still, and somebody's: a small message for each. The queue, which may
        be long, is read when one is not."""
        paths = list(self._watched)
        if self._ahead is not None:
            paths.append(f"{self._node.directory}/{self._ahead.node}")
        for path in paths:
            asked = self._node.session.submit(jute.exists(path))
            asked.add_done_callback(partial(self._on_looked_after, path))
        if not paths:
            self._look()

    def _on_looked_after(self, path: str, answer: asyncio.Future[Answer[jute.Stat]]) -> None:
        error = answer.exception()
        if isinstance(error, jute.ZooKeeperError):
            self._on_changed()
        elif error is None:
            own = answer.result().value.ephemeral_owner == self._node.session.id
            if own and request_of(path) not in self._queues.live:
                self._on_changed()  # who reads the queue deletes it
