"""One session: a connection that is replaced when it is lost, heartbeats, and watches that outlive it.

Over 400 lines: connecting, replies, watches and the end of a session share their state.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..._patience import LEAST, Further, Patience
from .._addresses import Addresses
from .._tls import Tls
from . import jute
from .connection import Answer, Connection, connect
from .identity import Acquaintance, Seen, read_mark, write_mark
from .lifetime import Lifetime
from .sasl import DigestMd5, SaslError
from .transactions import Transactions

T = TypeVar("T")

_logger = logging.getLogger("aiodlock")

#: Heartbeats per timeout of the session.
_BEATS = 8
_SHORTEST_PAUSE = 0.005
#: How many members see to themselves at each heartbeat.
_AT_ONCE = 100
#: For how long a server may be silent, and how long connecting to it may take (seconds, and shares of the
#: timeout).
_LONGEST_SILENCE, _SHORTEST_SILENCE, _SILENCE = 5.0, 0.2, 1 / 3
_CONNECT_WITHIN = 1.0
#: However slow servers are known to be, no step is waited for longer (seconds).
_LONGEST_PATIENCE = 10.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
_CLOSE_WITHIN = 0.5
#: Servers refuse messages of a megabyte.
_WATCHES_AT_ONCE = 100_000


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who a client says it is: by ZooKeeper's own ``digest``, or by SASL (DIGEST-MD5)."""

    mechanism: Literal["digest", "sasl"]
    user: str
    password: str


@dataclass(frozen=True, slots=True)
class Ensemble:
    """Where the servers are, and how they are used."""

    hosts: tuple[tuple[str, int], ...]
    #: The node under which everything is kept.
    root: str
    #: tickTime of the servers, in seconds.
    tick: float
    credentials: Credentials | None
    tls: Tls | None
    #: The source as text, without secrets.
    described: str

    @property
    def acl(self) -> tuple[jute.Acl, ...]:
        """Return who may do what with our nodes."""
        return (jute.ANYONE,) if self.credentials is None else (jute.CREATOR,)


class Member(Protocol):
    """What lives in a session, and ends with it."""

    def on_up(self) -> None:
        """There is a connection again, in the same session. Watches are set again."""

    def on_down(self, error: BackendUnavailable, silent: float) -> None:
        """There is no connection, for so many seconds now."""

    def on_over(self) -> None:
        """The session has expired."""

    def look_after(self) -> None:
        """Once per timeout or so: see whether something was missed. There may be no connection."""


class Session:
    """One session at a time, with one timeout. When it has expired, the next one is made.

    Mutable state: ``lifetime`` (of the present session), ``members``, ``looking`` (called at each
    heartbeat), ``returned`` (called when there is a connection again in the same session, after the
    members), ``told`` (called with why there is no connection, and with None when there is one),
    ``used_at`` (when a member last left), ``negotiated`` (the timeout that the servers granted, 0
    before), ``failure``; ``_hosts`` (that of the next connection first), ``_failures`` (to connect, since
    there was a connection), ``_pause`` (between heartbeats), ``_patience`` (with a server that is
    silent), ``_connection`` (None while there is none, or it is not ready), ``_up`` (resolved while there
    is one), ``_id``, ``_password``, ``_number`` (of the present session), ``_seen`` (the newest
    transaction that the last connection told of), ``_data_watches`` and ``_child_watches`` (by path),
    ``_progress`` (who waits for the deadline to move), ``_beating`` (the heartbeat on its way),
    ``_beats`` (since all members were put on the round) and ``_round`` (those that have not looked after
    themselves in it yet), ``_transactions`` (of this turn of the loop).
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
        self.members: set[Member] = set()
        self.looking: set[Callable[[], object]] = set()
        self.returned: Callable[[], object] | None = None
        self.told: Callable[[Exception | None], object] = lambda _: None
        self.used_at: float = now()
        self.negotiated: float = 0.0
        self.failure: Exception | None = None
        self._ensemble = ensemble
        self._label = label
        self._hosts = list(ensemble.hosts)
        random.shuffle(self._hosts)
        self._addresses = Addresses()
        self._failures = 0
        self._acquaintance = acquaintance or Acquaintance(
            ensemble.described, silence=0.0, may_hold=lambda: now() < self.lifetime.deadline
        )
        self._answers = Patience(_SHORTEST_PAUSE, _LONGEST_PATIENCE)
        self.further: Further = Further()
        self._dialing = Patience(_CONNECT_WITHIN, _LONGEST_PATIENCE)
        self._set_pace(timeout)
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._up: asyncio.Future[None] = self._loop.create_future()
        self._id = 0
        self._password = bytes(16)
        self._number = 0
        self._seen = 0
        self._data_watches: dict[str, list[Callable[[], object]]] = {}
        self._child_watches: dict[str, list[Callable[[], object]]] = {}
        self._progress: list[Callable[[], object]] = []
        self._running: asyncio.Task[Any] | None = None
        self._beating: asyncio.Future[Answer[jute.Stat]] | None = None
        self._beats = 0
        self._round: list[Member] = []
        self._transactions = Transactions()

    def __repr__(self) -> str:
        return f"<Session {self._id:#x} of {self.timeout:g} s at {self._ensemble.described}>"

    # -- for those who use it ------------------------------------------------------------------------

    @property
    def id(self) -> int:
        """The session's id: nodes tell it as their ``ephemeral_owner``."""
        return self._id

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
        return since is not None and now() - since > self._pause

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

    def watch(
        self, path: str, changed: Callable[[], object]
    ) -> asyncio.Future[Answer[tuple[bytes, jute.Stat]]]:
        """Read a node, and have ``changed`` called once when it is changed or deleted."""
        answer = self.submit(jute.get_data(path, watch=True))
        watching = self._data_watches.setdefault(path, [])
        watching.append(changed)

        def on_answer(answer: asyncio.Future[Answer[tuple[bytes, jute.Stat]]]) -> None:
            # Without a node there is no watch. After a lost connection the next one sets it.
            if isinstance(answer.exception(), jute.ZooKeeperError):
                self.unwatch(path, changed)

        answer.add_done_callback(on_answer)
        return answer

    def unwatch(self, path: str, changed: Callable[[], object]) -> None:
        """Call it no more. (The server still tells, once, and nobody listens.)"""
        _remove(self._data_watches, path, changed)

    def watch_children(self, path: str, changed: Callable[[], object]) -> Callable[[], None]:
        """Have ``changed`` called once when a child comes or goes, or the node itself goes.

        The caller lists the children with ``watch``, and calls what this returns to end it.
        """
        self._child_watches.setdefault(path, []).append(changed)
        return lambda: _remove(self._child_watches, path, changed)

    def watch_creation(self, path: str, changed: Callable[[], object]) -> Callable[[], None]:
        """Have ``changed`` called once when a node is made, or if it is there already; return what ends
        that."""

        def on_answer(answer: asyncio.Future[Answer[jute.Stat]]) -> None:
            if answer.exception() is None:
                self.unwatch(path, changed)
                changed()

        answer = self.submit(jute.exists(path, watch=True))
        self._data_watches.setdefault(path, []).append(changed)
        answer.add_done_callback(on_answer)
        return lambda: self.unwatch(path, changed)

    def on_progress(self, moved: Callable[[], object]) -> None:
        """Have ``moved`` called once when the deadline has moved."""
        self._progress.append(moved)

    async def heartbeat(self) -> None:
        """Send a heartbeat, and return when it is answered."""
        try:
            await self.ask(jute.set_data(self._node, b""))
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
        for path in self._directories():
            self.submit(jute.create(path, b"", jute.PERSISTENT, self._ensemble.acl))
        if self._acquaintance.id:
            self.submit(self._making_of_id(self._acquaintance.id))
        return self.submit(self._enrol())

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
        pause, down_since = _FIRST_PAUSE, now()
        try:
            while True:
                try:
                    connection = await self._connect()
                except (OSError, TimeoutError, BackendError, jute.ZooKeeperError) as failed:
                    refused = isinstance(failed, BackendError)
                    if refused and not isinstance(failed, BackendUnavailable) and not in_use:
                        raise
                    self.failure = _worded(failed)
                    self._failures += 1
                    if isinstance(failed, TimeoutError):
                        self._dialing.ran_out()
                    self._switch()
                    if in_use and self._failures >= len(self._hosts):
                        self.told(self.failure)
                    self._tell_down(now() - down_since)
                    await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                    pause = min(2 * pause, _LONGEST_PAUSE, max(_FIRST_PAUSE, self._pause))
                    continue
                pause, in_use, self._failures = _FIRST_PAUSE, True, 0
                await self._beat(connection)
                down_since = now()
                self._on_down()
        finally:
            await self._close()

    async def _connect(self) -> Connection:
        """Connect to the first of the hosts, with the session or for a new one."""
        host, port = self._hosts[0]
        tls = self._ensemble.tls
        context = None if tls is None else await tls.get_context()
        longest = max(self._patience, self._dialing.learned)
        # A server that says nothing must not take all the time of entering: there may be others, or another
        # address of its name.
        first_round = self._failures < len(self._hosts)
        within = max(longest / 2, _CONNECT_WITHIN) if first_round else longest
        async with asyncio.timeout(within) as limit:
            sent = now()
            address = await self._addresses.choose(host, port)
            if len(self._hosts) * self._addresses.number == 1:
                limit.reschedule(self._loop.time() + longest)
            connection = await connect(
                host, port, context, self._on_event, self._on_commit, address=address
            )

            def further(within: float = longest) -> None:
                self.further.reach(1 + connection.frames)
                if not limit.expired():
                    limit.reschedule(self._loop.time() + within)

            # The way there and back: whoever is that far may be as slow to answer.
            further(max(within, 2 * (now() - sent)))
            connection.on_frames = further
            try:
                welcome = await self._greet(connection, self._id, self._password)
                if not welcome.timeout:
                    # Who knows no such session may know nothing of this client.
                    await self._ask_apart(address)
                    self._expire()
                    raise BackendUnavailable("the session has expired")
                fresh = welcome.session != self._id
                before = self._acquaintance.zxid
                await self._authenticate(connection)
                await self._identify(connection, fresh)
                if not fresh and welcome.timeout < round(self.negotiated * 1000):
                    # The session may end before what leases count on: they end now, while it lives.
                    self.lifetime.shortened(sent, welcome.timeout)
                    self._expire()
                    raise BackendUnavailable(f"sessions are {welcome.timeout / 1000:g} s long now")
                self._id, self._password = welcome.session, welcome.password
                if welcome.timeout != round(self.negotiated * 1000):
                    self.negotiated = welcome.timeout / 1000
                    self._set_pace(self.negotiated)
                self.lifetime.attached(sent, welcome.timeout)
                if not fresh and connection.last_zxid < before:
                    await self._end_set_back(connection)
                await self._prepare(connection, fresh)
            except BaseException as failed:
                connection.abort(failed)
                raise
            finally:
                connection.on_frames = lambda: None
        self._dialing.answered(now() - sent)
        self._addresses.served(connection.address)
        self._on_ready(connection)
        if self.returned is not None and not fresh:
            self.returned()
        return connection

    async def _greet(self, connection: Connection, id: int, password: bytes) -> jute.Welcome:
        least = self._acquaintance.least
        timeout = min(round(self.timeout * 1000), jute.LONGEST_TIMEOUT)
        try:
            return await connection.hello(least, timeout, id, password)
        except BackendUnavailable as closed:
            # Servers that have seen less close the connection: they lag behind, or are in an older state.
            text = f"{closed} (it may have seen less than this client: transaction {least:#x})"
            raise BackendUnavailable(text if least else str(closed)) from closed

    async def _ask_apart(self, address: str) -> None:
        """See on another connection, and in a session of a moment, whether these are the known servers."""
        host, port = self._hosts[0]
        tls = self._ensemble.tls
        context = None if tls is None else await tls.get_context()
        connection = await connect(
            host, port, context, lambda _: None, lambda _: None, address=address
        )
        try:
            await self._greet(connection, 0, bytes(16))
            await self._authenticate(connection)
            await self._identify(connection, fresh=True)
            await connection.submit(jute.CLOSE_CALL)
        finally:
            connection.abort(BackendUnavailable("asked for a moment"))

    async def _identify(self, connection: Connection, fresh: bool) -> None:
        """See whether these are the servers that this client knows, before anything else is asked.

        :raises OtherStore: they are not.
        """
        acquaintance = self._acquaintance
        floor, id = acquaintance.zxid, acquaintance.id
        connection.submit(jute.sync(self._ensemble.root))  # a follower may lag behind
        if id is None or not fresh:
            found = await self._read_id(connection, make=id)
        else:
            found = await self._read_id(connection)
        seen = Seen(found, connection.last_zxid, floor)
        acquaintance.meet(seen, f"{connection.server} ({connection.address})")

    async def _read_id(self, connection: Connection, *, make: str | None = "") -> str:
        """Return the id in the servers; "" if there is none.

        :param make: the one that is written if there is none (None: a new one), unless it is "".
        """
        for _ in range(2):
            try:
                data = (await connection.submit(jute.get_data(self._id_node))).value[0]
                return read_mark(data, self._ensemble.described)
            except jute.ZooKeeperError as refused:
                if refused.code != jute.NO_NODE:
                    raise self._denied(refused) from refused
            if make == "":
                return ""
            await self._make_root(connection)
            try:
                await connection.submit(self._making_of_id(make))
            except jute.ZooKeeperError as refused:
                if refused.code == jute.NO_AUTH:
                    return ""
                if refused.code != jute.NODE_EXISTS:
                    raise
        return ""

    @property
    def _id_node(self) -> str:
        return f"{self._ensemble.root}/store"

    def _making_of_id(self, id: str | None) -> jute.Call[str]:
        return jute.create(self._id_node, write_mark(id), jute.PERSISTENT, self._ensemble.acl)

    async def _end_set_back(self, connection: Connection) -> None:
        """The servers were restored from a backup: nodes are there again that were deleted since, and would
        be for as long as the session lives. It ends, and a new one begins."""
        await connection.submit(jute.CLOSE_CALL)
        self._expire()
        raise BackendUnavailable("the servers were restored from a backup")

    async def _authenticate(self, connection: Connection) -> None:
        credentials = self._ensemble.credentials
        try:
            if credentials is not None and credentials.mechanism == "digest":
                proof = f"{credentials.user}:{credentials.password}".encode()
                await connection.submit(jute.auth("digest", proof))
            elif credentials is not None:
                await self._authenticate_by_sasl(connection, credentials)
        except (jute.ZooKeeperError, SaslError) as refused:
            raise BackendError(
                f"{self._ensemble.described} does not accept the user or the password: {refused}"
            ) from refused

    def _denied(self, refused: jute.ZooKeeperError) -> Exception:
        """Return a refusal in words; what is refused for a moment alone stays what it is."""
        described = self._ensemble.described
        if refused.code == jute.NO_AUTH:
            return BackendError(
                f"{described}: the ACL of {self._ensemble.root} does not admit this client; another "
                "user may have made the node"
            )
        if refused.code in jute.FOR_NOW:
            return refused
        return BackendError(f"{described} does not let this client begin: {refused}")

    async def _prepare(self, connection: Connection, fresh: bool) -> None:
        """Set the watches of before, and have a write committed."""
        for watches in self._watches_of_before():
            connection.submit(watches)
        try:
            if fresh:
                self._number += 1
                await connection.submit(self._enrol())
            else:
                await connection.submit(jute.set_data(self._node, b""))
        except jute.ZooKeeperError as refused:
            if refused.code != jute.NO_NODE:
                raise self._denied(refused) from refused
            await self._make_root(connection)
            await connection.submit(self._enrol())

    async def _authenticate_by_sasl(self, connection: Connection, credentials: Credentials) -> None:
        exchange = DigestMd5(credentials.user, credentials.password)
        challenge = await connection.submit(jute.sasl(b""))
        proof = await connection.submit(jute.sasl(exchange.respond(challenge.value)))
        exchange.check(proof.value)

    @property
    def _node(self) -> str:
        return f"{self._ensemble.root}/clients/{self._label}-{self._number}"

    def _enrol(self) -> jute.Call[str]:
        return jute.create(self._node, b"", jute.EPHEMERAL, self._ensemble.acl)

    def _directories(self) -> list[str]:
        """Return the nodes under which everything is kept, from the top."""
        path = ""
        paths = [path := f"{path}/{step}" for step in self._ensemble.root.strip("/").split("/")]
        parts = ("clients", "ids", "locks", "semaphores", "waits")
        return paths + [f"{path}/{part}" for part in parts]

    async def _make_root(self, connection: Connection) -> None:
        """Make the nodes under which everything is kept; those that exist stay."""
        barred = ""
        made = [
            (path, connection.submit(jute.create(path, b"", jute.PERSISTENT, self._ensemble.acl)))
            for path in self._directories()
        ]
        for path, making in made:
            try:
                await making
            except jute.ZooKeeperError as refused:
                if refused.code == jute.NO_NODE and barred:
                    raise BackendError(
                        f"{self._ensemble.described}: {barred} does not exist, and the ACL of the node "
                        "above does not let this client create it"
                    ) from refused
                # Above the root others may have decided who creates what.
                if refused.code not in (jute.NODE_EXISTS, jute.NO_AUTH):
                    raise
                if refused.code == jute.NO_AUTH:
                    barred = path

    async def make_root(self) -> None:
        """Make the nodes under which everything is kept anew, after somebody has deleted them."""
        if self._connection is None:
            raise self._unavailable()
        await self._make_root(self._connection)

    def _on_ready(self, connection: Connection) -> None:
        self._connection, self.failure = connection, None
        self.told(None)
        if not self._up.done():
            self._up.set_result(None)
        for member in list(self.members):
            member.on_up()

    def _on_down(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._seen = connection.last_zxid
            self._addresses.lost(connection.address)
        self._up = self._loop.create_future()
        self._switch()
        self._tell_down(0.0)

    def _set_pace(self, timeout: float) -> None:
        """Beat as often as a session of this length needs, and wait for answers as long as it allows."""
        self._patience = min(_LONGEST_SILENCE, max(_SHORTEST_SILENCE, timeout * _SILENCE))
        self._pause = max(_SHORTEST_PAUSE, min(self._patience, timeout / _BEATS))

    def _switch(self) -> None:
        """Take the next host for the next connection."""
        self._hosts.append(self._hosts.pop(0))

    def _tell_down(self, silent: float) -> None:
        if self.members:
            error = self._unavailable()
            error.__cause__ = self.failure
            for member in list(self.members):
                member.on_down(error, silent)

    def _expire(self) -> None:
        """The session is no more, or not to be used any more, and with it whatever lived in it."""
        self.lifetime.over = True
        self._id, self._password, self._seen = 0, bytes(16), 0
        self.lifetime = Lifetime(self._ensemble.tick)
        self._data_watches.clear()
        members, self.members = self.members, set()
        for member in members:
            member.on_over()

    async def _close(self) -> None:
        """End the session: its nodes vanish at once."""
        connection = self._connection
        self._transactions.flush()
        self._connection, self.failure = None, BackendUnavailable("the client was closed")
        if self._up.done():
            self._up = self._loop.create_future()  # who waits for a connection must not spin
        if connection is not None and connection.is_open:
            try:
                async with asyncio.timeout(_CLOSE_WITHIN):
                    await connection.submit(jute.CLOSE_CALL)
            except (TimeoutError, BackendError, jute.ZooKeeperError):
                pass  # it expires by itself
            connection.abort(BackendUnavailable("closed"))
            await connection.closed

    # -- heartbeats ----------------------------------------------------------------------------------

    async def _beat(self, connection: Connection) -> None:
        """Write a little, often, until the connection is lost."""
        while True:
            pause, since = self._pause, connection.waiting_since
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
                self._beating = connection.submit(jute.set_data(self._node, b""))
                self._beating.add_done_callback(self._on_beat)
                for look in list(self.looking):
                    look()
                self._look_after_some()

    def _look_after_some(self) -> None:
        """Have some members see to themselves: each once per timeout, unless they are thousands."""
        self._beats += 1
        if not self._round and self._beats >= _BEATS:
            self._beats, self._round = 0, list(self.members)
        for _ in range(min(_AT_ONCE, len(self._round))):
            member = self._round.pop()
            if member in self.members:
                member.look_after()

    def _on_beat(self, answer: asyncio.Future[Answer[jute.Stat]]) -> None:
        error = answer.exception()
        if isinstance(error, jute.ZooKeeperError) and error.code == jute.NO_NODE and self.is_up:
            self._enrol_again()

    @property
    def _silence(self) -> float:
        """For how long a server may say nothing while it owes answers: longer if it is known to be slow."""
        return max(self._patience, self._answers.learned)

    def _on_commit(self, sent: float) -> None:
        lifetime = self.lifetime
        self._answers.answered(now() - sent)
        if self._connection is not None:
            self._acquaintance.told_of(self._connection.last_zxid)
        before = lifetime.deadline
        lifetime.committed(sent, now())
        if self._progress and lifetime.deadline > before:
            waiting, self._progress = self._progress, []
            for moved in waiting:
                moved()

    # -- watches -------------------------------------------------------------------------------------

    def _on_event(self, event: jute.Event) -> None:
        told: list[Callable[[], object]] = []
        if event.kind != jute.CHILDREN_CHANGED:
            told += self._data_watches.pop(event.path, ())
        if event.kind in (jute.CHILDREN_CHANGED, jute.DELETED):
            told += self._child_watches.pop(event.path, ())
        for changed in told:
            changed()

    def _watches_of_before(self) -> list[jute.Call[None]]:
        """Return what sets the watches of the last connection, in messages that are not too long."""
        calls = []
        data: list[str] = []
        children: list[str] = []
        size = 0
        for paths, into in ((self._data_watches, data), (self._child_watches, children)):
            for path in paths:
                into.append(path)
                size += 4 + len(path.encode())
                if size > _WATCHES_AT_ONCE:
                    calls.append(jute.set_watches(self._seen, tuple(data), (), tuple(children)))
                    data.clear()
                    children.clear()
                    size = 0
        if size:
            calls.append(jute.set_watches(self._seen, data, (), children))
        return calls


def _remove(
    watches: dict[str, list[Callable[[], object]]], path: str, changed: Callable[[], object]
) -> None:
    watching = watches.get(path)
    if watching is not None and changed in watching:
        watching.remove(changed)
        if not watching:
            del watches[path]


def _worded(failed: Exception) -> Exception:
    """Return the reason of a failed attempt in words."""
    if str(failed):
        return failed
    if isinstance(failed, TimeoutError):
        return TimeoutError("no answer in time")
    return ConnectionError("the server closed the connection")
