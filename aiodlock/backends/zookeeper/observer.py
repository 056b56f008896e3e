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

    Mutable state: ``_stopped``, ``_reading`` (the last one, which has set a watch).
    """

    def __init__(self, session: Session, path: str, changed: Callable[[], object]) -> None:
        self._session = session
        self._path = path
        self._changed = changed
        self._stopped = False
        self._reading: object = None
        session.members.add(self)
        self._arm()

    def stop(self) -> None:
        self._stopped = True
        self._session.members.discard(self)
        self._session.watches.forget(self._path, self._fire)

    def _arm(self) -> None:
        session = self._session
        if self._stopped or not session.is_up:
            return
        session.watches.forget(self._path, self._fire)
        reading = self._reading = session.watches.children(self._path, self._fire)
        reading.add_done_callback(self._on_read)

    def _on_read(self, reading: asyncio.Future[Answer[tuple[list[str], jute.Stat]]]) -> None:
        if isinstance(reading.exception(), jute.ZooKeeperError) and self._reading is reading:
            session = self._session
            session.watches.forget(self._path, self._fire)  # there is no queue yet
            if session.is_up and not self._stopped:
                session.watches.creation(self._path, self._fire)

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
