"""One session: a connection that is replaced when it is lost, heartbeats, and what they prove."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeVar

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..._patience import LEAST, Further, Patience
from . import jute
from .connection import Answer, Connection
from .identity import Acquaintance
from .lifetime import Lifetime
from .members import BEATS, Members
from .servers import NO_SESSION, Ensemble, Greeting, Servers, SessionExpired
from .transactions import Transactions
from .watches import Watches

T = TypeVar("T")

_SHORTEST_PAUSE = 0.005
#: For how long a server may be silent (seconds, and a share of the timeout).
_LONGEST_SILENCE, _SHORTEST_SILENCE, _SILENCE = 5.0, 0.2, 1 / 3
#: However slow servers are known to be, no step is waited for longer (seconds).
_LONGEST_PATIENCE = 10.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
_CLOSE_WITHIN = 0.5


class Pace(NamedTuple):
    """What a session of some length needs: for how long a server may be ``silent`` while it owes answers,
    and the ``pause`` between heartbeats (seconds)."""

    silent: float
    pause: float

    @classmethod
    def of(cls, timeout: float) -> Self:
        """Return that of a session with this timeout (seconds)."""
        silent = min(_LONGEST_SILENCE, max(_SHORTEST_SILENCE, timeout * _SILENCE))
        return cls(silent, max(_SHORTEST_PAUSE, min(silent, timeout / BEATS)))


class Session:
    """One session at a time, with one timeout. When it has expired, the next one is made.

    Mutable state: ``lifetime`` (of the present session), ``members``, ``watches``, ``returned`` (called
    when there is a connection again in the same session, after the members), ``told`` (called with why
    there is no connection, and with None when there is one), ``failure``; ``_welcome`` (the session, as the
    servers granted it last), ``_number`` (of the present session), ``_pace``, ``_answers`` (patience with
    writes), ``_connection`` (None while there is none, or it is not ready), ``_up`` (resolved while there
    is one), ``_down_since`` and ``_telling`` (from when on there is none, and what tells so again),
    ``_seen`` (the newest transaction that the last connection told of), ``_running``, ``_beating`` (the
    heartbeat on its way), ``_transactions`` (of this turn of the loop).
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
        self.told: Callable[[Exception | None], object] = lambda _: None
        self.failure: Exception | None = None
        self._ensemble = ensemble
        self._label = label
        self._acquaintance = acquaintance or Acquaintance(
            ensemble.described, silence=0.0, may_hold=lambda: now() < self.lifetime.deadline
        )
        self._servers = Servers(
            ensemble,
            self._acquaintance,
            self.watches.on_event,
            self._on_commit,
            self._on_failure,
        )
        self._welcome = NO_SESSION
        self._number = 0
        self._pace = Pace.of(timeout)
        self._answers = Patience(_SHORTEST_PAUSE, _LONGEST_PATIENCE)
        self._connection: Connection | None = None
        self._up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._seen = 0
        self._down_since = 0.0
        self._telling: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[Any] | None = None
        self._beating: asyncio.Future[Answer[jute.Stat]] | None = None
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
        return since is not None and now() - since > self._pace.pause

    async def wait_up(self, within: float) -> None:
        """Wait for a connection, or raise BackendUnavailable."""
        if self.is_up:
            return
        try:
            async with asyncio.timeout(within):
                while not self.is_up:
                    if self._up.done():
                        await asyncio.sleep(0)  # the connection was lost just now
                    else:
                        await asyncio.shield(self._up)
        except TimeoutError:
            raise self._unavailable() from self.failure

    def submit(self, call: jute.Call[T]) -> asyncio.Future[Answer[T]]:
        """Send a request. Raises BackendUnavailable when there is no connection."""
        if self._connection is None:
            raise self._unavailable() from self.failure
        self._transactions.flush()
        return self._connection.submit(call)

    def transact(
        self, calls: Sequence[jute.Call[Any]], *, once: str = ""
    ) -> asyncio.Future[Answer[list[object]]]:
        """Do all of these calls or none, perhaps in one transaction with what others ask for in this turn.

        :param once: at most one with this text is in a transaction.
        """
        if self._connection is None:
            raise self._unavailable() from self.failure
        return self._transactions.add(self._connection, calls, once)

    async def ask(self, call: jute.Call[T]) -> Answer[T]:
        """Send a request and return its answer. Cancelling does not take it back."""
        return await asyncio.shield(self.submit(call))

    def _unavailable(self) -> BackendUnavailable:
        described, failure = self._ensemble.described, self.failure
        return BackendUnavailable(
            f"no connection to {described}" + (f": {failure}" if failure else "")
        )

    async def heartbeat(self) -> None:
        """Send a heartbeat, and return when it is answered."""
        try:
            await self.ask(self._beat_of_heart())
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
        return self.submit(self._enrol())

    async def make_root(self) -> None:
        """Make the nodes under which everything is kept anew, after somebody has deleted them."""
        if self._connection is None:
            raise self._unavailable()
        await self._servers.make_root(self._connection)

    # -- life ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """End it: nothing lives in it."""
        if self._running is not None:
            self._running.cancel()

    @property
    def answers_within(self) -> float:
        """How long the next answer may take (seconds)."""
        return max(LEAST, self._answers.typical)

    async def run(self, *, in_use: bool = False) -> None:
        """Keep the session up until cancelled, then close it.

        :param in_use: the client was up already. What one server refuses, the next one may accept.
        :raises BackendError: when the servers do not accept the client, and it was never up.
        """
        self._running = asyncio.current_task()
        pause, self._down_since = _FIRST_PAUSE, now()
        try:
            while True:
                try:
                    connection = await self._connect()
                except (OSError, TimeoutError, BackendError, jute.ZooKeeperError) as failed:
                    refused = isinstance(failed, BackendError)
                    if refused and not isinstance(failed, BackendUnavailable) and not in_use:
                        raise
                    self._on_failure(failed)
                    if in_use and self._servers.all_failed:
                        self.told(self.failure)
                    self._tell_down()
                    await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                    pause = min(2 * pause, _LONGEST_PAUSE, max(_FIRST_PAUSE, self._pace.pause))
                    continue
                pause, in_use = _FIRST_PAUSE, True
                await self._beat(connection)
                self._on_down()
        finally:
            await self._close()

    async def _connect(self) -> Connection:
        """Connect, with the session or for a new one."""
        before = self.id
        try:
            connection = await self._servers.connect(
                self._welcome, self.timeout, self._pace.silent, self._take_over
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
        welcome, fresh = greeting.welcome, greeting.fresh
        if not fresh and welcome.timeout < self._welcome.timeout:
            # The session may end before what leases count on: they end now, while it lives.
            self.lifetime.shortened(greeting.sent, welcome.timeout)
            raise SessionExpired(f"sessions are {welcome.timeout / 1000:g} s long now")
        self._welcome, self._pace = welcome, Pace.of(welcome.timeout / 1000)
        self.lifetime.attached(greeting.sent, welcome.timeout)
        if not fresh and connection.last_zxid < greeting.before:
            # Nodes are there again that were deleted since, and would be for as long as the session lives.
            await connection.submit(jute.CLOSE_CALL)
            raise SessionExpired("the servers were restored from a backup")
        for watches in self.watches.of_before(self._seen):
            connection.submit(watches)
        try:
            if fresh:
                self._number += 1
                await connection.submit(self._enrol())
            else:
                await connection.submit(self._beat_of_heart())
        except jute.ZooKeeperError as refused:
            if refused.code != jute.NO_NODE:
                raise self._servers.denied(refused) from refused
            await self._servers.make_root(connection)
            await connection.submit(self._enrol())

    @property
    def _node(self) -> str:
        return f"{self._ensemble.root}/clients/{self._label}-{self._number}"

    def _enrol(self) -> jute.Call[str]:
        return jute.create(self._node, b"", jute.EPHEMERAL, self._ensemble.acl)

    def _beat_of_heart(self) -> jute.Call[jute.Stat]:
        return jute.set_data(self._node, b"")

    def _on_ready(self, connection: Connection) -> None:
        self._connection, self.failure = connection, None
        self._tell_no_more()
        self.told(None)
        if not self._up.done():
            self._up.set_result(None)
        self.members.on_up()

    def _on_failure(self, failed: Exception) -> None:
        self.failure = _worded(failed)

    def _on_down(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._seen = connection.last_zxid
            self._servers.lost(connection)
        self._up = asyncio.get_running_loop().create_future()
        self._down_since = now()
        self._tell_down()

    def _tell_down(self) -> None:
        """Tell the members now, and again until there is a connection: to dial may take long."""
        self._tell_no_more()
        if self.members:
            error = self._unavailable()
            error.__cause__ = self.failure
            self.members.on_down(error, now() - self._down_since)
        loop = asyncio.get_running_loop()
        self._telling = loop.call_later(_LONGEST_PAUSE, self._tell_down)

    def _tell_no_more(self) -> None:
        if self._telling is not None:
            self._telling.cancel()

    def _expire(self) -> None:
        """The session is no more, or not to be used any more, and with it whatever lived in it."""
        self.lifetime.over = True
        self._welcome, self._seen = NO_SESSION, 0
        self.lifetime = Lifetime(self._ensemble.tick)
        self.watches.clear()
        self.members.on_over()

    async def _close(self) -> None:
        """End the session: its nodes vanish at once."""
        self._servers.stop()
        self._tell_no_more()
        connection = self._connection
        self._transactions.flush()
        self._connection, self.failure = None, BackendUnavailable("the client was closed")
        if self._up.done():
            # Who waits for a connection must not spin.
            self._up = asyncio.get_running_loop().create_future()
        if connection is not None and connection.is_open:
            try:
                async with asyncio.timeout(_CLOSE_WITHIN):
                    await connection.submit(jute.CLOSE_CALL)
                self.lifetime.over = True  # what lived in it need not be left
            except (TimeoutError, BackendError, jute.ZooKeeperError):
                pass  # it expires by itself
            connection.abort(BackendUnavailable("closed"))
            await connection.closed

    # -- heartbeats ----------------------------------------------------------------------------------

    async def _beat(self, connection: Connection) -> None:
        """Write a little, often, until the connection is lost."""
        while True:
            pause, since = self._pace.pause, connection.waiting_since
            if since is not None:
                since = max(since, connection.heard_at)
                pause = min(pause, max(_SHORTEST_PAUSE, since + self._silence - now()))
            done, _ = await asyncio.wait([connection.closed], timeout=pause)
            if done:
                return
            since = connection.waiting_since
            silent = 0.0 if since is None else now() - max(since, connection.heard_at)
            if silent > self._silence:
                connection.abort(
                    BackendUnavailable(f"{connection.server} has not answered for {silent:.1f} s")
                )
            elif self._beating is None or self._beating.done():
                self._beating = connection.submit(self._beat_of_heart())
                self._beating.add_done_callback(self._on_beat)
                self.members.on_beat()

    def _on_beat(self, answer: asyncio.Future[Answer[jute.Stat]]) -> None:
        error = answer.exception()
        if isinstance(error, jute.ZooKeeperError) and error.code == jute.NO_NODE and self.is_up:
            self._enrol_again()

    @property
    def _silence(self) -> float:
        """For how long a server may say nothing while it owes answers: longer if it is known to be slow."""
        return max(self._pace.silent, self._answers.learned)

    def _on_commit(self, sent: float) -> None:
        self._answers.answered(now() - sent)
        if self._connection is not None:
            self._acquaintance.told_of(self._connection.last_zxid)
        self.lifetime.committed(sent, now())


def _worded(failed: Exception) -> Exception:
    """Return the reason of a failed attempt in words."""
    if str(failed):
        return failed
    if isinstance(failed, TimeoutError):
        return TimeoutError("no answer in time")
    return ConnectionError("the server closed the connection")
