"""All connections of one client to a server are to the same server, and alive.

They are made at different times, and an address may lead elsewhere by then: after a failover, a change of
a name, behind a proxy. Requests at one server and notices of another one would never meet. So whenever a
connection comes up, the others are compared with it.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from ..._errors import BackendUnavailable
from .link import Link
from .source import Source
from .wakeups import Wakeups
from .wire import Wire

#: How often a connection that may be idle is asked whether it is still alive (seconds).
PING_EVERY = 10.0
#: A service of many servers behind one address may count none of its own connections: after so many
#: comparisons that all failed, they tell nothing.
_GIVE_UP_AFTER = 3

_logger = logging.getLogger("aiodlock")


class Together:
    """The connections of one client to one server: for wake-ups, and for commands of either kind.

    Mutable state: ``wakeups`` and ``commands`` (added once, while a client is entered), ``_comparable``
    (whether a message was ever heard), ``_unheard`` (how often it was not, before that).
    """

    def __init__(self, source: Source, channel: str) -> None:
        self._source = source
        self._channel = channel
        self.wakeups: Wakeups | None = None
        self.commands: list[Link] = []
        self._comparable = False
        self._unheard = 0

    @property
    def links(self) -> list[Link]:
        """All connections, up or not."""
        return [*self.commands, self.wakeups.link] if self.wakeups is not None else self.commands

    def wires(self) -> list[Wire]:
        """Return the connections that are up."""
        return [link.wire for link in self.links if link.wire is not None]

    def entered(self) -> None:
        """From now on a refusal of this user is an outage."""
        for link in self.links:
            link.entering = False

    async def watch(self) -> None:
        """Leave a server that is not the primary any more, where somebody can tell."""
        await self._source.watch(self.wires)

    async def keep_alive(self) -> None:
        """Notice connections that are open and dead: the next command, or a notice, would find out late."""
        while True:
            await asyncio.sleep(PING_EVERY)
            for link in self.commands:
                if link.wire is not None:
                    link.wire.send("PING", later=True).add_done_callback(_ignore)
            if self.wakeups is not None and self.wakeups.link.wire is not None:
                await self.wakeups.ping()

    def on_up(self, newest: Wire) -> None:
        """Compare a connection that has come up with the others.

        A server tells how many of its own connections hear a message: none, if the one for wake-ups is on
        another server.
        """
        ear = self.wakeups.link.wire if self.wakeups is not None else None
        if ear is None or self._unheard >= _GIVE_UP_AFTER:
            return
        for link in self.commands:
            wire = link.wire
            if wire is not None and newest in (wire, ear):
                heard = wire.send("PUBLISH", self._channel, b"")
                heard.add_done_callback(partial(self._on_heard, wire, ear, newest))

    def _on_heard(self, wire: Wire, ear: Wire, newest: Wire, heard: asyncio.Future[Any]) -> None:
        if heard.exception() is not None:
            return
        if heard.result() != 0:
            self._comparable, self._unheard = True, 0
            return
        if not self._comparable:
            self._unheard += 1
            if self._unheard == _GIVE_UP_AFTER:
                _logger.info(
                    "%s does not count who hears a message: connections are not compared",
                    self._source.described,
                    extra={"event": "connections_not_compared"},
                )
                return
        # The newest one was made with the newest knowledge of where the server is.
        older = wire if newest is ear else ear
        older.close(BackendUnavailable("another connection of this client is on another server"))
        self._source.suspect()


def _ignore(reply: asyncio.Future[Any]) -> None:
    reply.exception()
