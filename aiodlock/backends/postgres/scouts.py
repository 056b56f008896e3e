"""Looking at the other hosts of the URL every few seconds: one of them may have become the primary.

Without that, a client would stay with an old primary that goes on, or that was started again, for as long
as its connection lasts.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from .._identity import Known, OtherStore
from .connection import FAILURES, Connection, one_host_each, without_attributes
from .dialing import Host
from .history import History, history_at
from .link import Link

_logger = logging.getLogger("aiodlock")

#: How often each other host is asked (seconds).
LOOK_EVERY = 2.0


class Scouts:
    """A connection to each host of the URL but the one that is used.

    :param on_newer: called when the connections in use may lead to an older history.
    """

    def __init__(
        self, source: str, link: Link, known: Known[History], on_newer: Callable[[], object]
    ) -> None:
        urls = one_host_each(without_attributes(source))
        self._hosts = [Host(url) for url in urls] if len(urls) > 1 else []
        self._link = link
        self._known = known
        self._on_newer = on_newer

    async def run(self) -> None:
        """Look until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for host in self._hosts:
                tasks.create_task(self._look_at(host))

    async def _look_at(self, host: Host) -> None:
        connection: Connection | None = None
        try:
            while True:
                await asyncio.sleep(LOOK_EVERY * random.uniform(0.75, 1.0))
                if self._link.connection is not None:
                    self._known.heard()  # who asks it nothing must not take it for silent
                if self._link.where == host.where and self._link.connection is not None:
                    if connection is not None:
                        connection.terminate()
                        connection = None
                    continue
                try:
                    if connection is None or connection.is_closed():
                        connection = await host.connect()
                    history = await history_at(connection, host.patience.learned, self._known.value)
                except FAILURES as failed:
                    _logger.debug("%s cannot be asked: %s", host.where, failed)
                    continue
                if history is not None:
                    self._meet(history, host.where)
        finally:
            if connection is not None:
                connection.terminate()
            await host.close()

    def _meet(self, history: History, where: str) -> None:
        try:
            self._known.meet(history, where)
        except OtherStore:
            return  # the log has told
        self._on_newer()
