"""Who stands behind a holder, and what it owes to them.

A holder that lingers watches the children of its queue. The watch is set by the reading that looks for
those who wait already, so nobody is missed; after a lost connection it looks again. Who is refused without
waiting leaves no node there: it writes the holder's node again, which the holder watches as well.

A semaphore's holder tells the next one in the queue that it is the first now, which watches no other node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..._errors import BackendError
from ..._model import Terms
from . import jute
from .connection import Answer
from .node import QueueNode
from .queue import read_queue

_Children = asyncio.Future[Answer[tuple[list[str], jute.Stat]]]


class Successors:
    """Those of one request. ``recalled`` is called once when others wait for one that holds and lingers.

    Mutable state: ``_lingers`` (until it is recalled, or holds no more), ``_untold`` (of a semaphore: the
    next one has not surely heard that this one holds).
    """

    def __init__(self, node: QueueNode, recalled: Callable[[], object]) -> None:
        self._node = node
        self._recalled = recalled
        self._lingers = False
        self._untold = False

    def begin(self, terms: Terms, *, followed: bool) -> None:
        """The request holds. ``followed``: others stand behind it."""
        self._lingers = terms.linger > 0
        self._untold = bool(terms.limit) and followed
        self.look()

    def look(self) -> None:
        """It holds now, or there is a connection again: see to what is not done yet."""
        self._read()
        self._tell_next()

    def end(self) -> None:
        """It holds no more."""
        self._untold = False
        if self._lingers:
            self._lingers = False
            self._forget_watch()

    def _tell_next(self) -> None:
        """Write the node. The word is repeated after a lost connection."""
        node = self._node
        if not self._untold or not node.session.is_up:
            return
        assert node.path is not None

        def on_answer(answer: asyncio.Future[Answer[jute.Stat]]) -> None:
            if not isinstance(answer.exception(), BackendError):
                self._untold = False

        writing = node.session.submit(jute.set_data(node.path, node.about()))
        writing.add_done_callback(on_answer)

    # -- whether others want the name ----------------------------------------------------------------

    def _read(self) -> None:
        """Read the queue, and watch it from then on; without a connection, when there is one again."""
        session = self._node.session
        if not self._lingers or not session.is_up:
            return
        self._forget_watch()
        reading = session.watches.children(self._node.directory, self._read)
        reading.add_done_callback(self._on_read)

    def _on_read(self, reading: _Children) -> None:
        if not self._lingers or reading.exception() is not None:
            return
        if self._node.asked.is_wanted(read_queue(reading.result().value[0])):
            self.on_wanted()

    def on_wanted(self) -> None:
        """Others wait for it, or one who was refused has written its node."""
        if self._lingers:
            self._lingers = False
            self._forget_watch()
            self._recalled()

    def _forget_watch(self) -> None:
        self._node.session.watches.forget(self._node.directory, self._read)
