"""Whether a request's own node is there still, and whether others have written it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..._errors import BackendUnavailable
from . import jute
from .connection import Answer
from .node import QueueNode

#: A request's node is watched after this time, so that short leases and waits are spared the message.
_WATCH_AFTER = 0.05


class OwnWatch:
    """The watch of one request's node.

    ``gone`` is called when others have deleted it, ``written`` when they have written it.

    Mutable state: ``_wanted`` (from ``begin`` to ``end``), ``_path`` (of the node, while it is watched).
    """

    def __init__(
        self, node: QueueNode, gone: Callable[[], object], written: Callable[[], object]
    ) -> None:
        self._node = node
        self._gone = gone
        self._written = written
        self._wanted = False
        self._path: str | None = None

    def begin(self) -> None:
        """Watch it from a moment later on."""
        self._wanted = True
        self.renew()

    def renew(self) -> None:
        """There is a connection again, or it is known only now which node is to be watched."""
        if self._wanted:
            asyncio.get_running_loop().call_later(_WATCH_AFTER, self._watch)

    def end(self) -> None:
        """Hear of it no more."""
        self._wanted = False
        self._forget()

    def _watch(self) -> None:
        """Watch the node, unless it is watched, and see whether it was written already."""
        path, session = self._node.path, self._node.session
        if not self._wanted or path is None or self._path is not None or not session.is_up:
            return
        self._path = path

        def on_answer(answer: asyncio.Future[Answer[tuple[bytes, jute.Stat]]]) -> None:
            error = answer.exception()
            if isinstance(error, jute.ZooKeeperError) and error.code == jute.NO_NODE:
                self._gone()
            elif isinstance(error, BackendUnavailable) and self._path == path:
                # The next connection sets the watch, but what was written before is not told by that.
                self._forget()
            elif error is None and answer.result().value[1].version > 0:
                self._written()

        session.watches.data(path, self._on_changed).add_done_callback(on_answer)

    def _on_changed(self) -> None:
        """The node was changed or has gone."""
        self._path = None
        self._watch()

    def _forget(self) -> None:
        path, self._path = self._path, None
        if path is not None:
            self._node.session.watches.forget(path, self._on_changed)
