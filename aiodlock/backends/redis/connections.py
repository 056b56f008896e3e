"""The connections of one client to one server: all are to the same server, and all are alive.

They are opened at different times, and an address may lead to another server by then: after a failover,
after a change of a name, behind a proxy. Requests on one server and notices from another one would never
meet. So each new connection is compared with the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from ..._errors import BackendUnavailable
from . import versions
from .link import Link
from .source import Source
from .wakeups import Wakeups
from .wire import Wire

#: How often a connection that may be idle is checked with a PING (seconds).
PING_EVERY = 10.0
#: A service of many servers behind one address may count no subscribers. After so many comparisons that all
#: failed, connections are not compared any more.
_GIVE_UP_AFTER = 3

_logger = logging.getLogger("aiodlock")


class Connections:
    """The connections of one client to one server: for wake-ups, and for commands of either kind.

    Mutable state: ``wakeups`` and ``commands`` (added once, while a client is entered), ``_comparable``
    (whether the server ever counted a subscriber), ``_uncounted`` (how often it did not, before that).
    """

    def __init__(self, source: Source, channel: str, prefix: str) -> None:
        self._source = source
        self._prefix = prefix
        self._channel = channel
        self.wakeups: Wakeups | None = None
        self.commands: list[Link] = []
        self._comparable = False
        self._uncounted = 0

    @property
    def links(self) -> list[Link]:
        """All connections, up or not."""
        return [*self.commands, self.wakeups.link] if self.wakeups is not None else self.commands

    def wires(self) -> list[Wire]:
        """Return the connections that are up."""
        return [link.wire for link in self.links if link.wire is not None]

    def entered(self) -> None:
        """From now on, a refusal of this user is treated as an outage."""
        for link in self.links:
            link.entering = False

    async def watch(self, may_hold: Callable[[], bool], silence: float) -> None:
        """Close connections to a server that is not the primary any more, where Sentinel tells that."""
        await self._source.watch(self.wires, may_hold, silence)

    async def keep_alive(self) -> None:
        """Notice connections that are open and dead, before the next command or a missing notice does."""
        while True:
            await asyncio.sleep(PING_EVERY)
            for link in self.commands:
                if link.wire is not None:
                    link.wire.send("PING", later=True).add_done_callback(_ignore)
            if self.wakeups is not None and self.wakeups.link.wire is not None:
                await self.wakeups.ping()

    def on_up(self, newest: Wire) -> None:
        """Compare a new connection with the others, and read the mark of versions again.

        A later version writes the mark, and then looks for the channels of this one. The mark that was read
        before this client was subscribed may have been written since.

        The answer to PUBLISH is the number of subscribers on that very server. It is 0 if the connection
        for wake-ups is on another server.
        """
        subscribed = self.wakeups.link.wire if self.wakeups is not None else None
        if subscribed is None:
            return
        asked = self.commands[0].wire
        if asked is not None and newest in (asked, subscribed):
            versions.ask(asked, self._prefix).add_done_callback(self._on_mark)
        if self._uncounted >= _GIVE_UP_AFTER:
            return
        for link in self.commands:
            wire = link.wire
            if wire is not None and newest in (wire, subscribed):
                counting = wire.send("PUBLISH", self._channel, b"")
                counting.add_done_callback(partial(self._on_counted, wire, subscribed, newest))

    def _on_mark(self, answer: asyncio.Future[Any]) -> None:
        wrong = versions.objection(answer, self._prefix)
        for wire in self.wires() if wrong is not None else ():
            wire.close(wrong)

    def _on_counted(
        self, wire: Wire, subscribed: Wire, newest: Wire, counting: asyncio.Future[Any]
    ) -> None:
        if counting.exception() is not None:
            return
        if counting.result() != 0:
            self._comparable, self._uncounted = True, 0
            return
        if not self._comparable:
            self._uncounted += 1
            if self._uncounted == _GIVE_UP_AFTER:
                _logger.info(
                    "%s does not count subscribers: connections are not compared",
                    self._source.described,
                    extra={"event": "connections_not_compared"},
                )
                return
        # The newest connection was opened with the newest address.
        older = wire if newest is subscribed else subscribed
        older.close(BackendUnavailable("another connection of this client is on another server"))
        self._source.suspect()


def _ignore(reply: asyncio.Future[Any]) -> None:
    reply.exception()
