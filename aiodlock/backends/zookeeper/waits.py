"""What clients tell of their waits: an ephemeral node for each client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

from ..._errors import BackendError
from . import jute
from .queues import Queues
from .session import Session

_WAIT_UP = 1.0


class Waits:
    """Tells and reads records, on the client's main session: the servers carry out its messages in order.

    Mutable state: ``_told`` (the serial of the last acknowledged record, and the session it was told on).
    """

    def __init__(self, queues: Queues, session: Callable[[], Session]) -> None:
        self._queues = queues
        self._session = session
        self._told = (0, 0)

    async def tell_waits(self, serial: int, record: bytes, *, keep: float) -> None:
        """Write this client's record, unless the servers have it."""
        session = self._session()
        await session.wait_up(_WAIT_UP)
        if self._told == (serial, session.id):
            return  # it lives as long as the session
        path, told = self._path(self._queues.label), (serial, session.id)
        try:
            if record:
                await self._write(session, path, record)
            else:
                await session.ask(jute.delete(path))
        except jute.ZooKeeperError as refused:
            if refused.code != jute.NO_NODE or record:
                raise self._refused(refused) from refused
        self._told = told

    async def _write(self, session: Session, path: str, record: bytes) -> None:
        try:
            stat = (await session.ask(jute.set_data(path, record))).value
        except jute.ZooKeeperError as refused:
            if refused.code != jute.NO_NODE:
                raise
        else:
            if stat.ephemeral_owner == session.id:
                return
            await session.ask(jute.delete(path))  # of a session of before, which is ending
        create: jute.Call[Any] = jute.create(path, record, jute.EPHEMERAL, self._queues.acl)
        try:
            await session.ask(create)
        except jute.ZooKeeperError as refused:
            if refused.code != jute.NO_NODE:
                raise
            await session.make_root()  # somebody has deleted what is above
            await session.ask(create)

    async def waits_of(self, labels: Sequence[str]) -> dict[str, bytes]:
        """Return the records of these clients, as they are now."""
        session = self._session()
        await session.wait_up(_WAIT_UP)
        paths = [self._path(label) for label in labels]
        # One's own server may be behind.
        reading = [
            (session.submit(jute.sync(path)), session.submit(jute.get_data(path))) for path in paths
        ]
        found: dict[str, bytes] = {}
        for label, (_, answer) in zip(labels, reading, strict=True):
            try:
                found[label] = (await asyncio.shield(answer)).value[0]
            except jute.ZooKeeperError as refused:
                if refused.code != jute.NO_NODE:
                    raise self._refused(refused) from refused
        return found

    def _path(self, label: str) -> str:
        return f"{self._queues.root}/waits/{quote(label, safe='')}"

    def _refused(self, refused: jute.ZooKeeperError) -> BackendError:
        return BackendError(f"{self._queues.described}: {refused}")
