"""A connection to the newest primary of the hosts in a URL, made again when it is lost.

A call that has no answer in time puts the connection in doubt. It is kept, for the answer may only be late.
Meanwhile another one is made. Whichever comes first is used, and the other one is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import asyncpg

from ..._backoff import pause_after
from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from .connection import FAILURES, POOLED, Connection, ask, sqlstate_of, will_pass, words_of
from .dialing import FIRST_ANSWER, Dialer, Prepared, Reached
from .history import History

_logger = logging.getLogger("aiodlock")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
#: A connection that lasted so long was a good one: the pauses begin anew, and the log tells of its loss.
_GOOD = 5.0
#: How long a call waits for the connection; its caller decides whether to try again.
_WAIT_UP = 0.5
#: A session that was given up may wait for a lock or a standby for as long as the server runs.
_END_SESSION = """
select pg_catalog.pg_terminate_backend(pid) from pg_catalog.pg_stat_activity
where pid = $1 and backend_start = $2 and usename = session_user
"""


class Link:
    """One connection, made again when it is lost.

    ``on_up`` is called when it is up (with what was prepared, and with False the first time). Mutable
    state: ``connection`` (None while there is none), ``failure`` (why there is none), ``where`` (the host
    that it leads to), ``was_up``, ``_doubted`` (a connection that has not answered in time), ``_session``
    and ``_given_up`` (the server's session of the present connection, and of one that is to be ended),
    ``history`` (of the present connection), ``_good_until`` (no loss is told before), and the events
    ``_up``, ``_changed`` and ``_hurry``.
    """

    def __init__(
        self, described: str, dialer: Dialer, on_up: Callable[[Prepared, bool], object]
    ) -> None:
        self.described: str = described
        self.dialer: Dialer = dialer
        self.connection: Connection | None = None
        self.failure: Exception | None = None
        self.where: str = ""
        self.history: History | None = None
        self.was_up: bool = False
        self._on_up = on_up
        self._doubted: Connection | None = None
        self._session: tuple[int, Any] | None = None
        self._given_up: tuple[int, Any] | None = None
        self._good_until = 0.0
        self._up = asyncio.Event()
        self._changed = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Keep the connection up until cancelled.

        :raises BackendError: the server refuses for good, before it was ever up.
        """
        self.failure = TimeoutError("no answer in time")
        try:
            await self._keep_up()
        finally:
            await self.dialer.close()

    async def _keep_up(self) -> None:
        tries = 0
        while True:
            began = now()
            try:
                reached: Reached | None = await self.dialer.dial()
            except (*FAILURES, BackendError) as failed:
                self._fail(failed)
            else:
                while reached is not None:
                    began = now()
                    reached = await self._stay(reached)
                if now() - began >= _GOOD:
                    tries = 0
            tries += 1
            pause = pause_after(tries, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE)
            self._hurry.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._hurry.wait()

    def _fail(self, failed: Exception) -> None:
        """Remember why there is no connection. Raise unless the next try may succeed, or was up before."""
        self.failure = failed
        if self.was_up or isinstance(failed, BackendUnavailable):
            return
        if isinstance(failed, BackendError):
            raise failed
        if isinstance(failed, asyncpg.ClientConfigurationError):
            raise BackendError(f"{self.described} cannot be used: {words_of(failed)}") from failed
        if not will_pass(failed) and not sqlstate_of(failed).startswith(POOLED):
            raise BackendError(f"{self.described} refused: {words_of(failed)}") from failed

    async def _stay(self, reached: Reached) -> Reached | None:
        """Use a connection until it is lost; return another one that was made meanwhile."""
        connection = reached.connection
        connection.add_termination_listener(self._on_terminated)
        try:
            await self._end_given_up(connection)
            if connection.is_closed():
                return None  # while other hosts were waited for
            self._session, self.where = reached.prepared.session, reached.where
            self.history = reached.prepared.history
            self._take(connection)
            before, self.was_up = self.was_up, True
            self._on_up(reached.prepared, before)
            while self._is_mine(connection):
                await self._changed.wait()
                self._changed.clear()
                if self._doubted is connection:
                    other = await self._another(connection)
                    if other is not None:
                        self._give_up_session()
                        self._log_loss()
                        return other
            self._log_loss()
            return None
        finally:
            self._let_go(connection)

    def _is_mine(self, connection: Connection) -> bool:
        return self.connection is connection or self._doubted is connection

    def _take(self, connection: Connection) -> None:
        self.connection, self.failure, self._doubted = connection, None, None
        self._up.set()

    async def _another(self, doubted: Connection) -> Reached | None:
        """Return another connection, or None when the doubted one has answered, or was lost."""
        making = asyncio.create_task(self._make_another())
        changed: asyncio.Task[Any] | None = None
        try:
            while self._doubted is doubted and not making.done():
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait({making, changed}, return_when=asyncio.FIRST_COMPLETED)
                self._changed.clear()
                changed.cancel()
            if self._doubted is doubted:
                return making.result()
            if making.done():
                making.result().connection.terminate()
            return None
        finally:
            for task in (making, changed):
                if task is not None:
                    task.cancel()
                    await asyncio.wait({task})

    async def _make_another(self) -> Reached:
        tries = 0
        while True:
            try:
                return await self.dialer.dial()
            except (*FAILURES, BackendError) as failed:
                self.failure = failed
            tries += 1
            await asyncio.sleep(pause_after(tries, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE))

    async def _end_given_up(self, connection: Connection) -> None:
        """End the session of a connection that was given up: at this server, if it is there."""
        session, self._given_up = self._given_up, None
        if session is None or self.dialer.pooled:
            return
        with suppress(*FAILURES):
            await ask(connection, connection.fetch(_END_SESSION, *session), FIRST_ANSWER)

    def _give_up_session(self) -> None:
        self._given_up, self._session = self._session, None

    def _log_loss(self) -> None:
        lost, moment = self._good_until, now()
        self._good_until = moment + _GOOD
        if moment < lost:
            return  # it was told a moment ago
        # The driver tells in its own words of what it was about when the connection ended.
        mute = self.failure is None or isinstance(self.failure, asyncpg.InternalClientError)
        why = words_of(self.failure) if self.failure and not mute else "closed by the server"
        extra = {"event": "no_connection"}
        _logger.warning("the connection to %s was lost: %s", self.described, why, extra=extra)

    def _let_go(self, connection: Connection) -> None:
        if self._is_mine(connection):
            self._up.clear()
            self.connection = self._doubted = None
        if self.failure is None:
            self.failure = ConnectionError("the connection was lost")
        if self.history is not None:
            self.dialer.was_connected()
        connection.terminate()

    def _on_terminated(self, connection: Any) -> None:
        if self._is_mine(connection):
            self._up.clear()
            self.connection = self._doubted = None
            self._changed.set()

    def give_up(self, why: Exception) -> None:
        """Close the present connection; another one is made."""
        connection = self.connection or self._doubted
        if connection is not None:
            self.failure = why
            if sqlstate_of(why).startswith(POOLED):
                self.dialer.pooled = True
            self._give_up_session()
            self._on_terminated(connection)
            connection.terminate()

    def doubt(self, connection: Connection, why: Exception) -> None:
        """The connection has not answered in time: use it no more until it does, and make another one."""
        if self.connection is connection:
            self.failure, self.connection, self._doubted = why, None, connection
            self._up.clear()
            self._changed.set()

    def trust(self, connection: Connection) -> None:
        """The connection has answered, though late."""
        if self._doubted is connection:
            self._take(connection)
            self._changed.set()

    async def wait_up(self, *, hurry: bool = False) -> None:
        """Return when it is up, or raise BackendUnavailable after half a second.

        :param hurry: try to connect at once.
        """
        if hurry:
            self._hurry.set()
        try:
            async with asyncio.timeout(_WAIT_UP):
                while self.connection is None:
                    await self._up.wait()
        except TimeoutError:
            raise self.unavailable() from self.failure

    def unavailable(self) -> BackendUnavailable:
        """Return the error of a call that was not sent."""
        why = "not answered yet" if self.failure is None else words_of(self.failure)
        if why.startswith(self.described):  # it names the server by itself
            return BackendUnavailable(f"no connection: {why}")
        return BackendUnavailable(f"no connection to {self.described}: {why}")

    async def first_up(self) -> None:
        """Return when it is up."""
        await self._up.wait()
