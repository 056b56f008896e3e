"""One session: a connection that is replaced when it is lost, and what ends with the session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..._backoff import pause_after
from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..._patience import LEAST, Further
from . import jute
from .connection import Answer, Connection
from .heartbeats import Heartbeats, OwnNode, Pace
from .identity import Acquaintance
from .lifetime import Lifetime
from .members import Members
from .outage import Outage
from .servers import NO_SESSION, Ensemble, Greeting, Servers, SessionExpired
from .transactions import Transactions
from .watches import Watches

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
_CLOSE_WITHIN = 0.5


class Session:
    """One session at a time, with one timeout. When it has expired, the next one is made.

    Mutable state: ``lifetime`` (of the present session), ``members``, ``watches``, ``outage`` (while there
    is no connection), ``returned`` (called when there is a connection again in the same session, after the
    members); ``_welcome`` (the session, as the servers granted it last), ``_heartbeats`` (and the present
    session's node), ``_connection`` (None while there is none, or it is not ready), ``_up`` (set while
    there is one), ``_running``, ``_transactions`` (of this turn of the loop).
    """

    def __init__(
        self,
        ensemble: Ensemble,
        timeout: float,
        label: str,
        acquaintance: Acquaintance | None = None,
    ) -> None:
        """:param acquaintance: what other sessions of the client know of the servers."""
        self.timeout: float = timeout
        self.lifetime: Lifetime = Lifetime(ensemble.tick)
        self.members: Members = Members()
        self.watches: Watches = Watches(self.submit)
        self.returned: Callable[[], object] | None = None
        self.outage: Outage = Outage(ensemble.described, self.members)
        self._ensemble = ensemble
        self._heartbeats = Heartbeats(
            OwnNode(ensemble, label), timeout, self.members.on_beat, self._on_node_gone
        )
        self._acquaintance = acquaintance or Acquaintance(
            ensemble.described, silence=0.0, may_hold=lambda: now() < self.lifetime.deadline
        )
        self._servers = Servers(
            ensemble,
            self._acquaintance,
            self.watches.on_event,
            self._on_commit,
            self.outage.note,
        )
        self._welcome = NO_SESSION
        self._connection: Connection | None = None
        self._up = asyncio.Event()
        self._running: asyncio.Task[Any] | None = None
        self._transactions = Transactions()

    def __repr__(self) -> str:
        return f"<Session {self.id:#x} of {self.timeout:g} s at {self._ensemble.described}>"

    # -- for those who use it ------------------------------------------------------------------------

    @property
    def id(self) -> int:
        """The session's id: nodes tell it as their ``ephemeral_owner``."""
        return self._welcome.session

    @property
    def granted(self) -> float:
        """The timeout that the servers granted (seconds); 0 without a session, which is never ``is_up``."""
        return self._welcome.timeout / 1000

    @property
    def further(self) -> Further:
        """How far entering has come."""
        return self._servers.further

    @property
    def tick(self) -> float:
        """The servers' tickTime in seconds."""
        return self._ensemble.tick

    @property
    def is_up(self) -> bool:
        """Whether there is a connection that requests can be sent on."""
        return self._connection is not None and self._connection.is_open

    @property
    def is_silent(self) -> bool:
        """Whether the server owes answers for longer than a heartbeat takes."""
        if self._connection is None:
            return True
        since = self._connection.waiting_since
        return since is not None and now() - since > self._heartbeats.pace.pause

    async def wait_up(self, within: float) -> None:
        """Wait for a connection, or raise BackendUnavailable."""
        if self.is_up:
            return
        try:
            async with asyncio.timeout(within):
                while not self.is_up:
                    if self._up.is_set():
                        await asyncio.sleep(0)  # the connection was lost just now
                    else:
                        await self._up.wait()
        except TimeoutError:
            raise self.outage.error() from self.outage.failure

    def submit(self, call: jute.Call[T]) -> asyncio.Future[Answer[T]]:
        """Send a request. Raises BackendUnavailable when there is no connection."""
        if self._connection is None:
            raise self.outage.error() from self.outage.failure
        self._transactions.flush()
        return self._connection.submit(call)

    def transact(
        self, calls: Sequence[jute.Call[Any]], *, once: str = ""
    ) -> asyncio.Future[Answer[list[object]]]:
        """Do all of these calls or none, perhaps in one transaction with what others ask for in this turn.

        :param once: at most one with this text is in a transaction.
        """
        if self._connection is None:
            raise self.outage.error() from self.outage.failure
        return self._transactions.add(self._connection, calls, once)

    async def ask(self, call: jute.Call[T]) -> Answer[T]:
        """Send a request and return its answer. Cancelling does not take it back."""
        return await asyncio.shield(self.submit(call))

    async def heartbeat(self) -> None:
        """Send a heartbeat, and return when it is answered."""
        try:
            await self.ask(self._heartbeats.node.heartbeat())
        except jute.ZooKeeperError as refused:
            if refused.code != jute.NO_NODE:
                raise
            try:
                await asyncio.shield(self._enrol_again())
            except jute.ZooKeeperError as refused:
                # The next heartbeat by itself may be making it, too.
                if refused.code != jute.NODE_EXISTS:
                    raise

    def _enrol_again(self) -> asyncio.Future[Answer[str]]:
        """Somebody has deleted the session's node, and perhaps what it stands in."""
        for making in self._servers.making():
            self.submit(making)
        return self.submit(self._heartbeats.node.creation())

    async def make_root(self) -> None:
        """Make the nodes under which everything is kept anew, after somebody has deleted them."""
        if self._connection is None:
            raise self.outage.error()
        await self._servers.make_root(self._connection)

    # -- life ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """End it: nothing lives in it."""
        if self._running is not None:
            self._running.cancel()

    @property
    def answers_within(self) -> float:
        """How long the next answer may take (seconds)."""
        return max(LEAST, self._heartbeats.answers.typical)

    async def run(self, *, in_use: bool = False) -> None:
        """Keep the session up until cancelled, then close it.

        :param in_use: the client was up already. What one server refuses, the next one may accept.
        :raises BackendError: when the servers do not accept the client, and it was never up.
        """
        self._running = asyncio.current_task()
        failures = 0
        self.outage.begin()
        try:
            while True:
                try:
                    connection = await self._connect()
                except (OSError, TimeoutError, BackendError, jute.ZooKeeperError) as failed:
                    refused = isinstance(failed, BackendError)
                    if refused and not isinstance(failed, BackendUnavailable) and not in_use:
                        raise
                    self.outage.note(failed)
                    if in_use and self._servers.all_failed:
                        self.outage.told(self.outage.failure)
                    self.outage.tell()
                    # Who says that the session is over has answered.
                    failures = 1 if isinstance(failed, SessionExpired) else failures + 1
                    # A session that may live yet must be found in time; one that is over need not.
                    hurried = now() < self.lifetime.deadline
                    pace = self._heartbeats.pace.pause if hurried else _LONGEST_PAUSE
                    longest = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, pace))
                    await asyncio.sleep(pause_after(failures, first=_FIRST_PAUSE, longest=longest))
                    continue
                failures, in_use = 0, True
                await self._heartbeats.run(connection)
                self._on_down()
        finally:
            await self._close()

    async def _connect(self) -> Connection:
        """Connect, with the session or for a new one."""
        before = self.id
        try:
            connection = await self._servers.connect(
                self._welcome, self.timeout, self._heartbeats.pace.silent, self._take_over
            )
        except SessionExpired:
            self._expire()
            raise
        self._on_ready(connection)
        if self.returned is not None and self.id == before:
            self.returned()
        return connection

    async def _take_over(self, connection: Connection, greeting: Greeting) -> None:
        """Use a connection: note what was granted, set the old watches, and have a write committed."""
        welcome, fresh, node = greeting.welcome, greeting.fresh, self._heartbeats.node
        if not fresh and welcome.timeout < self._welcome.timeout:
            # The session may end before what leases count on: they end now, while it lives.
            self.lifetime.shortened(greeting.sent, welcome.timeout)
            raise SessionExpired(f"sessions are {welcome.timeout / 1000:g} s long now")
        self._welcome, self._heartbeats.pace = welcome, Pace.of(welcome.timeout / 1000)
        self.lifetime.attached(greeting.sent, welcome.timeout)
        if not fresh and connection.last_zxid < greeting.before:
            # Nodes are there again that were deleted since, and would be for as long as the session lives.
            await connection.submit(jute.CLOSE_CALL)
            raise SessionExpired("the servers were restored from a backup")
        for watches in self.watches.of_before():
            connection.submit(watches)
        try:
            if fresh:
                node.number += 1
                await connection.submit(node.creation())
            else:
                await connection.submit(node.heartbeat())
        except jute.ZooKeeperError as refused:
            if refused.code != jute.NO_NODE:
                raise self._servers.denied(refused) from refused
            await self._servers.make_root(connection)
            await connection.submit(node.creation())

    def _on_ready(self, connection: Connection) -> None:
        self._connection = connection
        self.outage.end()
        self._up.set()
        self.members.on_up()

    def _on_down(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self.watches.seen = connection.last_zxid
            self._acquaintance.heard()  # though nothing may have been told for long
            self._servers.lost(connection)
        self._up.clear()
        self.outage.begin()
        self.outage.tell()

    def _expire(self) -> None:
        """The session is no more, or not to be used any more, and with it whatever lived in it."""
        self.lifetime.end()
        self._welcome = NO_SESSION
        self.lifetime = Lifetime(self._ensemble.tick)
        self.watches.clear()
        self.members.on_over()

    async def _close(self) -> None:
        """End the session: its nodes vanish at once."""
        self.lifetime.end()  # what lived in it need not be left
        self._servers.stop()
        self.outage.stop()
        connection = self._connection
        self._transactions.flush()
        self._connection = None
        self._up.clear()  # who waits for a connection must not spin
        if connection is not None and connection.is_open:
            try:
                async with asyncio.timeout(_CLOSE_WITHIN):
                    await connection.submit(jute.CLOSE_CALL)
            except (TimeoutError, BackendError, jute.ZooKeeperError):
                pass  # it expires by itself
            connection.abort(BackendUnavailable("closed"))
            await connection.closed

    # -- what connections tell -----------------------------------------------------------------------

    def _on_node_gone(self) -> None:
        if self.is_up:
            self._enrol_again()

    def _on_commit(self, sent: float) -> None:
        self._heartbeats.answers.answered(now() - sent)
        if self._connection is not None:
            self._acquaintance.told_of(self._connection.last_zxid)
        self.lifetime.committed(sent, now())
