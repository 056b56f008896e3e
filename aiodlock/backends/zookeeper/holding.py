"""How a request holds: until when, and who hears of it that stands behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..._errors import BackendError
from ..._model import Terms
from ..hold_end import HoldEnd
from . import jute
from .connection import Answer
from .node import QueueNode
from .successors import Successors


class Holding:
    """That of one request.

    Mutable state: ``limits`` (its end by its own terms), ``_successors`` (of one that lingers), ``_untold``
    (of a semaphore: the next one has not surely heard that this one holds).

    :param recalled: is called when others want what a holder has that was to linger.
    """

    def __init__(self, node: QueueNode, recalled: Callable[[], object]) -> None:
        self.limits: HoldEnd = HoldEnd()
        self._node = node
        self._recalled = recalled
        self._successors: Successors | None = None
        self._untold = False

    def begin(self, terms: Terms, *, followed: bool) -> None:
        """It holds from now on. ``followed``: others stand behind it."""
        self.limits.extended(terms, terms.ttl)
        self.limits.begin(terms)
        if terms.linger:
            self._successors = Successors(self._node, self._recalled)
        self._untold = bool(terms.limit) and followed
        self._tell_next()

    def _tell_next(self) -> None:
        """Write a semaphore's node: the next one in the queue learns that it is the first now.

        It watches no other node. So the word is repeated after a lost connection.
        """
        node = self._node
        if not self._untold or not node.session.is_up:
            return
        assert node.path is not None

        def on_answer(answer: asyncio.Future[Answer[jute.Stat]]) -> None:
            if not isinstance(answer.exception(), BackendError):
                self._untold = False

        writing = node.session.submit(jute.set_data(node.path, node.about()))
        writing.add_done_callback(on_answer)

    def on_up(self) -> None:
        """There is a connection again."""
        if self._successors is not None:
            self._successors.look()
        self._tell_next()

    def on_written(self) -> None:
        """One who was refused has written its node."""
        if self._successors is not None:
            self._successors.tell()

    def end(self) -> None:
        """It holds no more."""
        self._untold = False
        if self._successors is not None:
            self._successors.end()
