"""Making a connection to the newest primary of the hosts in a URL.

All hosts are asked at once. Of those that can be written to, the newest history counts (``history``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
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
)
from .history import History

#: How long a host may take to let a client in (seconds): it may hash a password for longer than it works on
#: anything else, and that is several round trips. And how long to answer the first questions after that.
_LET_IN, _LONGEST_LET_IN = 20.0, 30.0
#: So many round trips a host takes for that at the most: TLS, and a password.
_LET_IN_TRIPS = 6
FIRST_ANSWER = 2.0
#: How long the other hosts are waited for when one has let the client in (seconds).
OTHERS_WITHIN = 1.0
#: While some say nothing, the others are asked so often: one may be started again, or promoted (seconds).
_ASK_AGAIN = 1.0


class Prepared(NamedTuple):
    """A connection that can be used.

    :param history: None: it was not told.
    :param session: the server's process and when it began; None where a pooler lends it to others.
    :param took: how long the server took to answer (seconds).
    """

    history: History | None = None
    session: tuple[int, Any] | None = None
    took: float = 0.0


class Reached(NamedTuple):
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
        self.patience: Patience = Patience(FIRST_ANSWER)
        self._let_in = Patience(_LET_IN, _LONGEST_LET_IN)
        self._dialing: set[asyncio.Task[Connection]] = set()

    async def connect(self, further: Further | None = None) -> Connection:
        """Connect.

        :param further: is told how far it has come.
        :raises asyncpg.PostgresError, OSError, TimeoutError: see ``FAILURES``.
        """
        sent = now()

        steps = count(1)

        def on_answer() -> None:
            if further is not None:
                further.reach(next(steps), _LET_IN_TRIPS * (now() - sent))

        dialing = asyncio.create_task(connect(self.url, self._let_in.learned, on_answer))
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


class Dialer:
    """Connects to the host that counts.

    ``prepare`` runs on each new connection before it is chosen, and is told whether a pooler is between.
    Mutable state: ``pooled`` (that is so), ``further`` (when a new connection came further than ever).

    :param sessions: the user says that a session is this client's alone.
    """

    def __init__(
        self,
        source: str,
        *,
        pooled: bool,
        sessions: bool,
        known: Known[History],
        prepare: Callable[[Connection, Host, bool], Awaitable[Prepared]],
    ) -> None:
        self.hosts: list[Host] = [Host(url) for url in one_host_each(source)]
        self.further: Further = Further()
        self.pooled: bool = pooled
        self._known = known
        self._prepare = prepare
        self._sessions = sessions

    async def close(self) -> None:
        """End what is being connected to still."""
        for host in self.hosts:
            await host.close()

    def was_connected(self) -> None:
        """The known database was there until now, though it may have been asked nothing for long."""
        self._known.heard()

    async def dial(self) -> Reached:
        """Return the best connection of all hosts that let this client in."""
        silent, told = set(self.hosts), asyncio.Event()
        tasks = [asyncio.create_task(self._reach(host, silent, told)) for host in self.hosts]
        kept: Connection | None = None
        try:
            reached, failures = await _first_and_others(tasks)
            if not reached:
                raise _most_telling(failures)
            chosen = self._choose(reached)
            kept = chosen.connection
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

    async def _reach(
        self, host: Host, silent: set[Host], told: asyncio.Event
    ) -> Reached | Exception:
        """Return a connection, or why there is none once no other host is silent.

        :param silent: the hosts that have not answered yet.
        :param told: set when there are none.
        """
        while True:
            reached = await self._ask(host)
            silent.discard(host)
            if not silent:
                told.set()
            if isinstance(reached, Reached):
                return reached
            try:
                async with asyncio.timeout(_ASK_AGAIN):
                    await told.wait()
                return reached
            except TimeoutError:
                continue

    async def _ask(self, host: Host) -> Reached | Exception:
        try:
            return await self._let_in(host)
        except (*FAILURES, BackendError) as failed:
            if sqlstate_of(failed).startswith(POOLED):
                self.pooled = True
            if not str(failed):
                return TimeoutError(f"{host.where}: no answer in time")
            return failed

    async def _let_in(self, host: Host) -> Reached:
        connection = await host.connect(self.further)
        try:
            if not self._sessions and not self.pooled:
                if not await ask(connection, direct(connection), host.patience.learned):
                    self.pooled = True
                self.further.reach(4, host.patience.expected)
            prepared = await self._prepare(connection, host, self.pooled)
            self.further.reach(5, host.patience.expected)
            known, history = self._known, prepared.history
            if known.value is not None and history is not None and not known.may_be_replaced:
                # An old primary may be near, and must not cut short what a far one takes to answer.
                known.meet(history, host.where)
            return Reached(host.where, connection, prepared)
        except BaseException:
            connection.terminate()
            raise

    def _choose(self, reached: Sequence[Reached]) -> Reached:
        """Return the one that counts. The log tells of those that do not.

        :raises OtherStore: none does.
        """
        told = [one for one in reached if one.prepared.history is not None]
        if not told:
            return reached[0]

        def rank(one: Reached) -> tuple[object, ...]:
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


async def _first_and_others(
    tasks: Sequence[asyncio.Task[Reached | Exception]],
) -> tuple[list[Reached], list[Exception]]:
    """Wait for all hosts, but not for long when one has let the client in. In the order of the hosts."""
    pending = set(tasks)
    until: float | None = None
    while pending:
        left = None if until is None else max(0.0, until - now())
        done, pending = await asyncio.wait(
            pending, timeout=left, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            break
        if until is None and any(isinstance(task.result(), Reached) for task in done):
            until = now() + OTHERS_WITHIN
    results = [task.result() for task in tasks if task.done()]
    return (
        [one for one in results if isinstance(one, Reached)],
        [one for one in results if isinstance(one, Exception)],
    )


def _close_unless(kept: Connection | None, task: asyncio.Task[Reached | Exception]) -> None:
    """Close what a host was reached by. A task that was cancelled has closed it by itself."""
    if not task.cancelled() and task.exception() is None:
        reached = task.result()
        if isinstance(reached, Reached) and reached.connection is not kept:
            reached.connection.terminate()


def _most_telling(failures: Sequence[Exception]) -> Exception:
    """Return what to tell if no host can be used: rather a refusal than a silence."""

    def rank(failed: Exception) -> int:
        if isinstance(failed, BackendUnavailable):
            return 1
        return 2 if isinstance(failed, OSError | asyncpg.InternalClientError) else 0

    return min(failures, key=rank)
