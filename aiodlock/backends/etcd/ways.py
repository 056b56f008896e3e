"""Which endpoint is used, and from when on another one is.

A way begins when an endpoint is to be chosen. It has a connection as soon as one was dialled and examined.
When it is over the next way begins, with the next endpoint.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import cast

import anyio

from ..._backoff import pause_after
from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..._patience import Patience
from .._dialer import Dialer, Dialled, Host
from .._tls import Tls
from ..base import Unanswered
from .calls import FIRST_PAUSE, LONGEST_PAUSE
from .connection import Connection, connect
from .exchange import CallFailed, Exchange, Lost

#: How long connecting may take before the next endpoint is dialled, too, and at most (seconds). It takes
#: two round trips: a member sends its settings after it has heard from the client.
_CONNECT_WITHIN, _LONGEST_CONNECT = 1.5, 10.0
_CLOSE_WITHIN = 1.0
#: No more than one change of the endpoint in so many seconds.
_SWITCH_PAUSE = 0.1


class Way:
    """One of them.

    Mutable state: ``endpoint`` (once it was dialled), ``connection`` (done when there is one that was
    examined, or that failed), ``streams`` (calls without an end), ``over`` (done when another endpoint was
    chosen), ``serving`` (the task that keeps the connection), ``logins`` (calls that wait for a token) and
    ``watching`` (looks after its leader meanwhile).
    """

    def __init__(self, delay: float) -> None:
        """:param delay: before the endpoint is dialled (seconds)."""
        loop = asyncio.get_running_loop()
        self.delay: float = delay
        self.endpoint: str = ""
        self.connection: asyncio.Future[Connection] = loop.create_future()
        self.streams: dict[Exchange, Connection] = {}
        self.over: asyncio.Future[object] = loop.create_future()
        self.serving: asyncio.Task[None] | None = None
        self.logins: int = 0
        self.watching: asyncio.Task[None] | None = None

    def end(self, error: Exception) -> None:
        """Another endpoint is used from now on. Streams end; calls on their way may still be answered."""
        if not self.over.done():
            self.over.set_result(None)
        if not self.connection.done():
            self.connection.set_exception(error)
            self.connection.exception()  # it may be that nobody waits for it
            if self.serving is not None and self.serving is not asyncio.current_task():
                self.serving.cancel()
        for call, connection in list(self.streams.items()):
            connection.cancel(call, Lost("another endpoint is used"))


class Ways:
    """All of them, one after the other.

    Mutable state: ``present`` (None while none is used), ``generation`` (it grows with each way),
    ``endpoint`` (the last one to which there was a connection), ``_switches`` (endpoints that were given up
    since the last answer), ``_switched_at``.
    """

    def __init__(
        self,
        endpoints: tuple[str, ...],
        described: str,
        tls: Tls | None,
        *,
        accepted: Callable[[], object],
        connected: Callable[[float], object],
        examine: Callable[[Way, Connection], Awaitable[object]],
        given_up: Callable[[Exception, int], object],
        unreached: Callable[[Exception], object] = lambda _: None,
        was_served: Callable[[], object] = lambda: None,
    ) -> None:
        """
        :param accepted: is called when a machine has answered; whether a member does has to be seen.
        :param connected: is called when there is a connection, with how long it took (seconds).
        :param examine: raises BackendError if a connection must not be used.
        :param given_up: is called when an endpoint was given up, with the reason and how often all of them
            were since the last answer.
        :param unreached: is told why an endpoint could not be reached; others may still be dialled.
        :param was_served: is called when a connection is not used any more that was examined.
        """
        self.present: Way | None = None
        self.generation: int = 0
        self.endpoint: str = endpoints[0]
        self._described = described
        self._tls = tls
        self._accepted = accepted
        self._connected = connected
        self._examine = examine
        self._given_up = given_up
        self._was_served = was_served
        hosts = [_host(endpoint) for endpoint in endpoints]
        first = random.randrange(len(hosts))
        self._dialer = Dialer(
            hosts[first:] + hosts[:first],
            Patience(_CONNECT_WITHIN, _LONGEST_CONNECT),
            self._dial,
            lambda connection: connection.close(Lost("another endpoint was faster")),
            lambda failed: unreached(self._reason(failed)),
        )
        self._endpoints = dict(zip(hosts, endpoints, strict=True))
        self._switches = 0
        self._switched_at = 0.0

    async def run(self, tasks: asyncio.TaskGroup, within: Callable[[], float]) -> None:
        """Keep a connection until cancelled.

        :param within: how long late answers are listened for, on a connection that is given up (seconds).
        """
        self.present = Way(0.0)
        try:
            while True:
                way = self.present
                await asyncio.sleep(way.delay)
                try:
                    dialled = await self._dialer.open(_LONGEST_CONNECT)
                except (OSError, CallFailed) as failed:  # TimeoutError is an OSError
                    self.switch(way, self._reason(failed), tried=self._dialer.number)
                    continue
                if way is not self.present:
                    dialled.connection.close(Lost("another endpoint is used"))
                    continue
                way.endpoint = self.endpoint = self._endpoints[dialled.host]
                self._connected(dialled.took)
                way.serving = tasks.create_task(self._serve(way, dialled, within))
                # What is cancelled before it begins closes nothing.
                way.serving.add_done_callback(partial(_close, dialled.connection))
                await asyncio.wait({way.over})
        finally:
            self._dialer.stop()
            self.present = None

    def _reason(self, failed: Exception) -> BackendUnavailable:
        why = str(failed) or "no answer"
        return BackendUnavailable(f"{self._described} cannot be reached: {why}")

    async def _dial(self, host: Host, address: str) -> Connection:
        context = None if self._tls is None else await self._tls.get_context()
        return await connect(*host, context, address=address, accepted=self._accepted)

    async def _serve(
        self, way: Way, dialled: Dialled[Connection], within: Callable[[], float]
    ) -> None:
        """Examine what answers, and keep the connection until another endpoint is used."""
        connection = dialled.connection
        try:
            try:
                await self._examine(way, connection)
                way.connection.set_result(connection)
                self._dialer.served(dialled)
                await asyncio.wait(
                    (cast("asyncio.Future[object]", connection.over), way.over),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                self._was_served()
                if connection.over.done():
                    self.switch(way, Unanswered(f"{self.where(way)}: {connection.over.result()}"))
            except BackendError as failed:
                self.switch(way, failed)
            await connection.until_idle(within())  # late answers tell how slow the cluster is
        finally:
            self._dialer.addresses.lost(dialled.address)
            _close(connection)
            with anyio.CancelScope(shield=True):
                await connection.until_closed(_CLOSE_WITHIN)

    def where(self, way: Way) -> str:
        """Return in words where a way leads."""
        return f"{self._described} ({way.endpoint})" if way.endpoint else self._described

    def answered(self) -> None:
        """The endpoint is as good as any."""
        self._switches = 0

    def switch(self, way: Way, error: Exception, *, tried: int = 1) -> None:
        """Give an endpoint up, and go on with the next one.

        :param tried: so many endpoints have failed.
        """
        if way is not self.present:
            return
        way.end(error)
        self._switches += tried
        around = self._switches // len(self._endpoints)
        pause = pause_after(around + 1, first=FIRST_PAUSE, longest=LONGEST_PAUSE) if around else 0.0
        delay = max(pause, self._switched_at + _SWITCH_PAUSE - now())
        self._switched_at = now()
        self.generation += 1
        self.present = Way(max(0.0, delay))
        self._given_up(error, around)


def _close(connection: Connection, _: object = None) -> None:
    connection.close(Lost("the client has closed the connection"))


def _host(endpoint: str) -> Host:
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)
