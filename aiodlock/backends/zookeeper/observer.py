"""Whoever wants to know when a queue changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..._errors import BackendUnavailable
from . import jute
from .connection import Answer
from .session import Session


class Observer:
    """One of them. A member of the session: connections come and go.

    Mutable state: ``_stopped``, ``_unwatch`` (ends the watch that is set).
    """

    def __init__(self, session: Session, path: str, changed: Callable[[], object]) -> None:
        self._session = session
        self._path = path
        self._changed = changed
        self._stopped = False
        self._unwatch: Callable[[], None] | None = None
        session.members.add(self)
        self._arm()

    def stop(self) -> None:
        self._stopped = True
        self._session.members.discard(self)
        self._forget_watch()

    def _arm(self) -> None:
        session = self._session
        if self._stopped or not session.is_up:
            return
        self._forget_watch()
        unwatch = self._unwatch = session.watches.children(self._path, self._fire)

        def on_answer(answer: asyncio.Future[Answer[tuple[list[str], jute.Stat]]]) -> None:
            if isinstance(answer.exception(), jute.ZooKeeperError) and self._unwatch is unwatch:
                self._forget_watch()  # there is no queue yet
                if session.is_up:
                    self._unwatch = session.watches.creation(self._path, self._fire)

        session.submit(jute.get_children(self._path, watch=True)).add_done_callback(on_answer)

    def _forget_watch(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None

    def _fire(self) -> None:
        if not self._stopped:
            self._changed()
            self._arm()

    def on_up(self) -> None:
        self._fire()

    def on_down(self, error: BackendUnavailable, silent: float) -> None:
        """What was missed is looked for when there is a connection."""

    def on_over(self) -> None:
        self._session.members.add(self)  # on to the next session

    def look_after(self) -> None:
        """What is missed is told with the next change."""
