"""Whether others want the name of a lease that lingers.

A holder that lingers watches the children of its queue. The watch is set by the reading that looks for
those who wait already, so nobody is missed; after a lost connection it looks again. Who is refused without
waiting leaves no node there: it writes the holder's node again, which the holder watches as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from . import jute
from .connection import Answer
from .node import QueueNode
from .queue import read_queue

_Children = asyncio.Future[Answer[tuple[list[str], jute.Stat]]]


class Successors:
    """Calls ``recalled`` once when others wait for a node that holds.

    Mutable state: ``_unwatch`` (ends the watch), ``_over``.
    """

    __slots__ = ("_node", "_over", "_recalled", "_unwatch")

    def __init__(self, node: QueueNode, recalled: Callable[[], object]) -> None:
        self._node = node
        self._recalled = recalled
        self._unwatch: Callable[[], None] | None = None
        self._over = False
        self.look()

    def look(self) -> None:
        """Read the queue, and watch it from then on; without a connection, when there is one again."""
        if self._over or not self._node.session.is_up:
            return
        self._forget_watch()
        self._unwatch = self._node.session.watches.children(self._node.directory, self.look)
        reading = self._node.session.submit(jute.get_children(self._node.directory, watch=True))
        reading.add_done_callback(self._on_read)

    def _on_read(self, reading: _Children) -> None:
        if self._over or reading.exception() is not None:
            return
        if self._node.asked.is_wanted(read_queue(reading.result().value[0])):
            self.tell()

    def tell(self) -> None:
        if not self._over:
            self.end()
            self._recalled()

    def end(self) -> None:
        """It holds no more, or lingers no more."""
        self._over = True
        self._forget_watch()

    def _forget_watch(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
