"""Which of a client's servers is dialled, and when the next one beside it.

A server that is far takes as long to accept a connection as to answer, and one that is dark never does:
nobody can tell them apart in time. So a slow one is dialled further, and the next one beside it. The first
connection is tried, and the dials beside it go on until one has served: the nearest server may be one that
must not be used, and it would be the first each time.
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
    """Dials servers in turn. Whoever uses it has to ``stop`` it.

    Mutable state: ``patience`` (with one that is dialled alone), ``addresses`` (of all of them), ``_hosts``
    (the next one first), ``_dials`` (on their way), ``_came`` (connections that were not tried yet),
    ``_failures`` (of the dials, in this ``open``) and ``_silent`` (one that has run out since that was
    learned from).
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        patience: Patience,
        dial: Callable[[Host, str], Awaitable[ConnectionT]],
        give_up: Callable[[ConnectionT], object],
        failed: Callable[[Exception], object] = lambda _: None,
    ) -> None:
        """
        :param dial: connects to a host, at one of its addresses.
        :param give_up: closes a connection that nobody needs.
        :param failed: is told why a dial fails, also while others go on; not of silence.
        """
        self.patience: Patience = patience
        self.addresses: Addresses = Addresses()
        self._hosts = deque(hosts)
        self._dial = dial
        self._give_up = give_up
        self._failed = failed
        self._dials: dict[asyncio.Task[None], Host] = {}
        self._came: deque[Dialled[ConnectionT]] = deque()
        self._failures: list[Exception] = []
        self._silent: TimeoutError | None = None

    @property
    def number(self) -> int:
        """How many places there are to dial: servers, or addresses of the only one."""
        return max(len(self._hosts), self.addresses.number)

    async def open(self, within: float) -> Dialled[ConnectionT]:
        """Return the next connection. Each place is dialled once, unless it is being dialled already.

        :param within: how long each is dialled at most (seconds).
        :raises Exception: what the last one failed with, if all have, or the others say nothing: they are
            dialled further, for who has failed may be back before. Silence only if none tells more.
        """
        self._failures = []
        dialled, beside = len(self._dials), self.patience.usual
        while not self._came and (self._dials or dialled < self.number):
            news: object = None
            if self._dials:
                news, _ = await asyncio.wait(
                    self._dials, timeout=beside, return_when=asyncio.FIRST_COMPLETED
                )
            if not self._came and dialled < self.number:
                dialled += 1
                self._dial_next(within)
            elif self._failures and not news:
                break
        if self._came:
            return self._came.popleft()
        silent, self._silent = self._silent, None
        if silent is not None:
            self.patience.ran_out()
        raise self._failures[-1] if self._failures else silent or TimeoutError()

    def served(self, dialled: Dialled[ConnectionT]) -> None:
        """This connection is used: nobody needs another one."""
        self.addresses.served(dialled.address)
        self.stop()

    def stop(self) -> None:
        """Dial no more, and close what nobody has taken."""
        for dial in self._dials:
            dial.cancel()
        self._dials.clear()
        self._silent = None
        while self._came:
            self._give_up(self._came.popleft().connection)

    def _dial_next(self, within: float) -> None:
        dialled = self._dials.values()
        host = next((host for host in self._hosts if host not in dialled), self._hosts[0])
        self._put_last(host)
        dial = asyncio.get_running_loop().create_task(self._dial_host(host, within))
        self._dials[dial] = host
        dial.add_done_callback(lambda _: self._dials.pop(dial, None))

    async def _dial_host(self, host: Host, within: float) -> None:
        began = now()
        try:
            async with asyncio.timeout(within):
                address = await self.addresses.choose(*host)
                connection = await self._dial(host, address)
        except TimeoutError as silent:
            self._silent = silent
            self._put_last(host)  # those that have said something may be back before
            return
        except Exception as failed:
            self._failures.append(failed)
            self._failed(failed)
            return
        took = now() - began
        self.patience.answered(took)
        self._came.append(Dialled(host, address, connection, took))
        self._put_last(host)  # when it is lost, it is the last one to be dialled again

    def _put_last(self, host: Host) -> None:
        self._hosts.remove(host)
        self._hosts.append(host)
