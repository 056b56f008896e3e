"""A connection to the newest primary of the hosts in a URL, made again when it is lost.

All hosts are asked at once. Of those that can be written to, the newest history counts (``history``).

A call that has no answer in time puts the connection in doubt. It is kept, for the answer may only be late.
Meanwhile another one is made. Whichever comes first is used, and the other one is closed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import asyncpg

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..._patience import Further, Patience
from .._identity import Known, OtherStore
from .connection import (
    FAILURES,
    POOLED,
    Connection,
    ask,
    connect,
    direct,
    one_host_each,
    sqlstate_of,
    will_pass,
)
from .history import History

_logger = logging.getLogger("aiodlock")

#: How long a host may take to let a client in (seconds): it may hash a password for longer than it works on
#: anything else, and that is several round trips. And how long to answer the first questions after that.
_LET_IN, _LONGEST_LET_IN = 20.0, 30.0
#: So many round trips a host takes for that at the most: TLS, and a password.
_LET_IN_TRIPS = 6
_FIRST_ANSWER = 2.0
#: How long the other hosts are waited for when one has let the client in (seconds).
OTHERS_WITHIN = 1.0
#: The same where one has answered that it is not to be used, as a standby does: at least so long, and as
#: long again as that took. A dark host must not delay that others are asked again: one may be promoted.
_BESIDE = 10.0
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


class Prepared(NamedTuple):
    """A connection that can be used.

    :param history: None: it was not told.
    :param session: the server's process and when it began; None where a pooler lends it to others.
    :param took: how long the server took to answer (seconds).
    """

    history: History | None = None
    session: tuple[int, Any] | None = None
    took: float = 0.0


class _Reached(NamedTuple):
    where: str
    connection: Connection
    prepared: Prepared


class Host:
    """One host of a URL, and how long it may take: ``patience``, to answer what is asked on a new
    connection. That begins with what the connection has taken, which is several round trips.
    """

    def __init__(self, url: str) -> None:
        self.url: str = url
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        self.where: str = parts.netloc.rpartition("@")[2] or query.get("host", "")
        self.patience: Patience = Patience(_FIRST_ANSWER)
        self._let_in = Patience(_LET_IN, _LONGEST_LET_IN)
        self._dialing: set[asyncio.Task[Connection]] = set()

    async def connect(self, further: Further | None = None, **options: object) -> Connection:
        """Connect.

        :param further: is told how far it has come.
        :raises asyncpg.PostgresError, OSError, TimeoutError: see ``FAILURES``.
        """
        sent = now()

        steps = count(1)

        def on_answer() -> None:
            if further is not None:
                further.reach(next(steps), _LET_IN_TRIPS * (now() - sent))

        dialing = asyncio.create_task(connect(self.url, self._let_in.learned, on_answer, **options))
        self._dialing.add(dialing)
        dialing.add_done_callback(self._dialing.discard)
        try:
            # asyncpg may leave an exception behind when it is cancelled. So it ends by itself.
            connection = await asyncio.shield(dialing)
        except asyncio.CancelledError:
            dialing.add_done_callback(_hang_up)
            raise
        except TimeoutError:
            self._let_in.ran_out()
            raise
        took = now() - sent
        self._let_in.answered(took)
        self.patience.answered(took)
        if further is not None:
            further.reach(3, self.patience.expected)
        return connection

    async def close(self) -> None:
        """End what is being connected to still."""
        dialing = list(self._dialing)
        for task in dialing:
            task.cancel()
        if dialing:
            await asyncio.wait(dialing)


def _hang_up(dialing: asyncio.Task[Connection]) -> None:
    if not dialing.cancelled() and dialing.exception() is None:
        dialing.result().terminate()


class Link:
    """One connection, made again when it is lost.

    ``prepare`` runs on each new connection before it counts as up, ``on_up`` after that (with what it has
    returned, and with False the first time). Mutable state: ``connection`` (None while there is none),
    ``failure`` (why there is none),
    ``where`` (the host that it leads to), ``pooled`` (it goes through a pooler), ``was_up``, ``_doubted``
    (a connection that has not answered in time), ``_session`` and ``_given_up`` (the server's session of
    the present connection, and of one that is to be ended), ``history`` (of the present connection),
    ``_good_until`` (no loss is told before), ``_beside`` (how long silent hosts are waited for beside one
    that has refused; twice as long when that was in vain), and the events ``_up``,
    ``_changed`` and ``_hurry``, ``further`` (when a new connection came further than ever).

    :param sessions: the user says that a session is this client's alone.
    """

    def __init__(
        self,
        source: str,
        described: str,
        *,
        pooled: bool,
        known: Known[History],
        prepare: Callable[[Connection, Host], Awaitable[Prepared]],
        on_up: Callable[[Prepared, bool], object],
        sessions: bool = False,
    ) -> None:
        self.described: str = described
        self.connection: Connection | None = None
        self.failure: Exception | None = None
        self.where: str = ""
        self.history: History | None = None
        self.pooled: bool = pooled
        self.was_up: bool = False
        self._beside = _BESIDE
        self.hosts: list[Host] = [Host(url) for url in one_host_each(source)]
        self.further: Further = Further()
        self._known = known
        self._prepare = prepare
        self._on_up = on_up
        self._sessions = sessions
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
            for host in self.hosts:
                await host.close()

    async def _keep_up(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            began = now()
            try:
                reached: _Reached | None = await self._connect()
            except (*FAILURES, BackendError) as failed:
                self._fail(failed)
            else:
                while reached is not None:
                    began = now()
                    reached = await self._stay(reached)
                if now() - began >= _GOOD:
                    pause = _FIRST_PAUSE
            self._hurry.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause * random.uniform(0.5, 1.0)):
                    await self._hurry.wait()
            pause = min(2 * pause, _LONGEST_PAUSE)

    # -- making one --------------------------------------------------------------------------------

    async def _connect(self) -> _Reached:
        """Return the best connection of all hosts that let this client in."""
        tasks = [asyncio.create_task(self._reach(host)) for host in self.hosts]
        kept: Connection | None = None
        try:
            reached, failures = await _first_and_others(tasks, self._beside)
            if not reached:
                if len(failures) < len(tasks):
                    self._beside = min(2 * self._beside, _LONGEST_LET_IN)
                raise _most_telling(failures)
            chosen = self._choose(reached)
            kept = chosen.connection
            self._beside = _BESIDE
            return chosen
        finally:
            for task in tasks:
                task.cancel()
                task.add_done_callback(partial(_close_unless, kept))
            try:
                await asyncio.wait(tasks)
            except asyncio.CancelledError:
                if kept is not None:
                    kept.terminate()
                raise

    async def _reach(self, host: Host) -> _Reached | Exception:
        try:
            return await self._let_in(host)
        except (*FAILURES, BackendError) as failed:
            if sqlstate_of(failed).startswith(POOLED):
                self.pooled = True
            if not str(failed):
                return TimeoutError(f"{host.where}: no answer in time")
            return failed

    async def _let_in(self, host: Host) -> _Reached:
        while True:
            pooled = self.pooled
            options = {"statement_cache_size": 0} if pooled else {}
            connection = await host.connect(self.further, **options)
            try:
                connection.add_termination_listener(self._on_terminated)
                if not self._sessions and not pooled:
                    self.pooled = not await ask(
                        connection, direct(connection), host.patience.learned
                    )
                    self.further.reach(4, host.patience.expected)
                if self.pooled == pooled:
                    prepared = await self._prepare(connection, host)
                    self.further.reach(5, host.patience.expected)
                    return _Reached(host.where, connection, prepared)
            except BaseException:
                connection.terminate()
                raise
            connection.terminate()  # and another one, which keeps nothing in the pooler's sessions

    def _choose(self, reached: Sequence[_Reached]) -> _Reached:
        """Return the one that counts. The log tells of those that do not.

        :raises OtherStore: none does.
        """
        told = [one for one in reached if one.prepared.history is not None]
        if not told:
            return reached[0]

        def rank(one: _Reached) -> tuple[object, ...]:
            assert one.prepared.history is not None
            return *one.prepared.history.rank, one.prepared.history.flushed

        known = self._known.value or told[0].prepared.history
        assert known is not None
        counting = [
            one for one in told if one.prepared.history and not one.prepared.history.conflict(known)
        ]
        best = max(counting or told, key=rank)
        for one in (best, *(other for other in told if other is not best)):
            assert one.prepared.history is not None
            try:
                self._known.meet(one.prepared.history, one.where)
            except OtherStore:
                if one is best:
                    raise
        return best

    def _fail(self, failed: Exception) -> None:
        """Remember why there is no connection. Raise unless the next try may succeed, or was up before."""
        self.failure = failed
        if self.was_up or isinstance(failed, BackendUnavailable):
            return
        if isinstance(failed, BackendError):
            raise failed
        if isinstance(failed, asyncpg.ClientConfigurationError):
            raise BackendError(f"{self.described} cannot be used: {failed}") from failed
        if not will_pass(failed) and not sqlstate_of(failed).startswith(POOLED):
            raise BackendError(f"{self.described} refused: {failed}") from failed

    # -- having one --------------------------------------------------------------------------------

    async def _stay(self, reached: _Reached) -> _Reached | None:
        """Use a connection until it is lost; return another one that was made meanwhile."""
        connection = reached.connection
        try:
            await self._end_given_up(connection)
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

    async def _another(self, doubted: Connection) -> _Reached | None:
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

    async def _make_another(self) -> _Reached:
        pause = _FIRST_PAUSE
        while True:
            try:
                return await self._connect()
            except (*FAILURES, BackendError) as failed:
                self.failure = failed
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _end_given_up(self, connection: Connection) -> None:
        """End the session of a connection that was given up: at this server, if it is there."""
        session, self._given_up = self._given_up, None
        if session is None or self.pooled:
            return
        with suppress(*FAILURES):
            await ask(connection, connection.fetch(_END_SESSION, *session), _FIRST_ANSWER)

    def _give_up_session(self) -> None:
        self._given_up, self._session = self._session, None

    def _log_loss(self) -> None:
        lost, moment = self._good_until, now()
        self._good_until = moment + _GOOD
        if moment < lost:
            return  # it was told a moment ago
        # The driver tells in its own words of what it was about when the connection ended.
        mute = self.failure is None or isinstance(self.failure, asyncpg.InternalClientError)
        why = "closed by the server" if mute else self.failure
        extra = {"event": "no_connection"}
        _logger.warning("the connection to %s was lost: %s", self.described, why, extra=extra)

    def _let_go(self, connection: Connection) -> None:
        if self._is_mine(connection):
            self._up.clear()
            self.connection = self._doubted = None
        if self.failure is None:
            self.failure = ConnectionError("the connection was lost")
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
                self.pooled = True
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
        return BackendUnavailable(
            f"no connection to {self.described}: {self.failure or 'not answered yet'}"
        )

    async def first_up(self) -> None:
        """Return when it is up."""
        await self._up.wait()


async def _first_and_others(
    tasks: Sequence[asyncio.Task[_Reached | Exception]], beside: float
) -> tuple[list[_Reached], list[Exception]]:
    """Wait for all hosts, but not for long when one has let the client in. In the order of the hosts.

    :param beside: how long at least, if one has answered that it is not to be used (seconds).
    """
    pending, began = set(tasks), now()
    until: float | None = None
    let_in = False
    while pending:
        left = None if until is None else max(0.0, until - now())
        done, pending = await asyncio.wait(
            pending, timeout=left, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            break
        if not let_in and any(isinstance(task.result(), _Reached) for task in done):
            let_in, until = True, now() + OTHERS_WITHIN
        elif until is None and any(isinstance(task.result(), BackendError) for task in done):
            until = began + max(beside, 2 * (now() - began))
    results = [task.result() for task in tasks if task.done()]
    return (
        [one for one in results if isinstance(one, _Reached)],
        [one for one in results if isinstance(one, Exception)],
    )


def _close_unless(kept: Connection | None, task: asyncio.Task[_Reached | Exception]) -> None:
    """Close what a host was reached by. A task that was cancelled has closed it by itself."""
    if not task.cancelled() and task.exception() is None:
        reached = task.result()
        if isinstance(reached, _Reached) and reached.connection is not kept:
            reached.connection.terminate()


def _most_telling(failures: Sequence[Exception]) -> Exception:
    """Return what to tell if no host can be used: rather a refusal than a silence."""

    def rank(failed: Exception) -> int:
        if isinstance(failed, BackendUnavailable):
            return 1
        return 2 if isinstance(failed, OSError | asyncpg.InternalClientError) else 0

    return min(failures, key=rank)
