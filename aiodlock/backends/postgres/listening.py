"""The connection that hears what PostgreSQL notifies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from .._identity import Known
from .connection import FAILURES, SILENT_MOST, Connection, ask
from .dialing import Dialer, Host, Prepared
from .history import History, history_at
from .link import Link

#: How often the listening connection is asked whether it is there.
_WATCH_EVERY = 5.0


class Listening:
    """The connection that hears notifications. It is watched, because a listener may die without a sign.

    A pooler lends its sessions to others, too. So nothing is listened to through one, unless the user says
    that a session is this client's alone.

    Mutable state: ``_heard_by`` (whom the payloads of each channel go to), ``_listened`` (the channels that
    the connection ``_on`` listens to), ``_examined`` (the connection of which ``on_up`` knows),
    ``_changed`` (set when there is something to do).
    """

    def __init__(
        self,
        source: str,
        described: str,
        *,
        known: Known[History],
        sessions: bool,
        on_up: Callable[[], Awaitable[None]],
    ) -> None:
        dialer = Dialer(source, pooled=False, sessions=sessions, known=known, prepare=self._prepare)
        self.link: Link = Link(described, dialer, lambda *_: None)
        self._known = known
        self._on_up = on_up
        self._heard_by: dict[str, list[Callable[[str], object]]] = {}
        self._listened: set[str] = set()
        self._on: Connection | None = None
        self._examined: Connection | None = None
        self._changed = asyncio.Event()

    def listen(self, channel: str, heard: Callable[[str], object]) -> Callable[[], None]:
        """Have ``heard`` called with each payload, and with an empty one when the server listens from now
        on (what was sent before is not told) or nobody does any more. Return what ends that."""
        self._heard_by.setdefault(channel, []).append(heard)
        self._changed.set()

        def stop() -> None:
            hearers = self._heard_by.get(channel, [])
            if heard in hearers:
                hearers.remove(heard)
            if not hearers and self._heard_by.pop(channel, None) is not None:
                self._changed.set()

        return stop

    def examine(self) -> None:
        """Have ``on_up`` called again, as for a new connection."""
        self.examine_later()
        self._changed.set()

    def examine_later(self) -> None:
        """The same, within some seconds."""
        self._examined = None

    async def _prepare(self, connection: Connection, host: Host, pooled: bool) -> Prepared:
        if len(self.link.dialer.hosts) == 1 or pooled:
            # What is heard counts only where a notification of our own arrives, too.
            return Prepared()
        known = self._known.value
        return Prepared(await history_at(connection, host.patience.learned, known, direct=True))

    async def _listen_to_all(self, connection: Connection) -> None:
        if self.link.dialer.pooled:
            return
        for channel in self._heard_by.keys() - self._listened:
            await ask(connection, connection.add_listener(channel, self._hear), SILENT_MOST)
            self._listened.add(channel)
            self._hear(None, 0, channel, "")
        for channel in self._listened - self._heard_by.keys():
            await ask(connection, connection.remove_listener(channel, self._hear), SILENT_MOST)
            self._listened.discard(channel)

    def _hear(self, _: object, __: int, channel: str, payload: object) -> None:
        for heard in list(self._heard_by.get(channel, ())):
            heard(str(payload))

    async def run(self) -> None:
        """Watch until cancelled. ``link.run`` runs beside it."""
        try:
            await self._watch()
        finally:
            for channel in tuple(self._heard_by):
                self._hear(None, 0, channel, "")

    async def _watch(self) -> None:
        while True:
            await self.link.first_up()
            connection = self.link.connection
            if connection is None:
                await asyncio.sleep(0)
                continue
            try:
                self._changed.clear()
                if self._on is not connection:
                    self._on, self._listened = connection, set()
                await self._listen_to_all(connection)
                if self._examined is not connection:
                    self._examined = connection
                    await self._on_up()
                if self.link.connection is not connection:
                    continue
                await self._listen_to_all(connection)
                await ask(connection, connection.execute("select 1"), SILENT_MOST)
            except FAILURES as failed:
                self.link.give_up(failed)
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout(_WATCH_EVERY):
                    await self._changed.wait()
            except TimeoutError:
                pass
