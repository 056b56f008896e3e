"""Which of a client's servers is dialled, and when the next one beside it.

A server that is far takes as long to accept a connection as to answer, and one that is dark never does:
nobody can tell them apart in time. So a slow one is dialled further, and the next one beside it. The first
connection is used, and the others are given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from .._clock import now
from .._patience import Patience
from ._addresses import Addresses

ConnectionT = TypeVar("ConnectionT")

Host = tuple[str, int]


class Dialled(NamedTuple, Generic[ConnectionT]):
    """A connection, where it leads, and how long it took to make (seconds)."""

    host: Host
    address: str
    connection: ConnectionT
    took: float


class Dialer(Generic[ConnectionT]):
    """Dials servers in turn.

    Mutable state: ``patience`` (with one that is dialled alone), ``addresses`` (of all of them), ``_hosts``
    (the next one first).
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        patience: Patience,
        dial: Callable[[Host, str], Awaitable[ConnectionT]],
        give_up: Callable[[ConnectionT], object],
    ) -> None:
        """
        :param dial: connects to a host, at one of its addresses.
        :param give_up: closes a connection that nobody needs.
        """
        self.patience: Patience = patience
        self.addresses: Addresses = Addresses()
        self._hosts = deque(hosts)
        self._dial = dial
        self._give_up = give_up

    @property
    def number(self) -> int:
        """How many places there are to dial: servers, or addresses of the only one."""
        return max(len(self._hosts), self.addresses.number)

    async def open(self, within: float) -> Dialled[ConnectionT]:
        """Return the first connection. Each place is dialled once.

        :param within: how long each is dialled at most (seconds).
        :raises Exception: what the last one failed with, if all have.
        """
        first: asyncio.Future[Dialled[ConnectionT]] = asyncio.get_running_loop().create_future()
        failures: list[Exception] = []
        dials: set[asyncio.Task[None]] = set()
        dialled, beside = 0, self.patience.learned
        try:
            async with asyncio.TaskGroup() as tasks:
                while not first.done() and (dials or dialled < self.number):
                    if dialled < self.number:
                        dialled += 1
                        dials.add(tasks.create_task(self._dial_next(within, first, failures)))
                    _, dials = await asyncio.wait(
                        dials, timeout=beside, return_when=asyncio.FIRST_COMPLETED
                    )
                for dial in dials:
                    dial.cancel()
        except BaseException:
            if first.done():
                self._give_up(first.result().connection)
            raise
        if first.done():
            return first.result()
        if isinstance(failures[-1], TimeoutError):
            self.patience.ran_out()
        raise failures[-1]

    async def _dial_next(
        self,
        within: float,
        first: asyncio.Future[Dialled[ConnectionT]],
        failures: list[Exception],
    ) -> None:
        host = self._hosts[0]
        self._hosts.rotate(-1)
        began = now()
        try:
            async with asyncio.timeout(within):
                address = await self.addresses.choose(*host)
                connection = await self._dial(host, address)
        except Exception as failed:
            failures.append(failed)
            return
        took = now() - began
        self.patience.answered(took)
        if first.done():  # another one was faster by a moment
            self._give_up(connection)
            return
        first.set_result(Dialled(host, address, connection, took))
        # When it is lost, it is the last one to be dialled again.
        self._hosts.remove(host)
        self._hosts.append(host)
