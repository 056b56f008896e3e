"""How a session gets to a server: who is dialled, and what is said before anything else.

That is the hello, who the client is, and whether these are the servers that it knows. What a session says
then is its own matter.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..._patience import Further, Patience
from .._dialer import Dialer, Host
from .._tls import Tls
from . import jute
from .connection import Connection, connect
from .identity import Acquaintance, Seen, read_mark, write_mark
from .sasl import DigestMd5, SaslError

#: How long connecting, and each answer of a server that was not used yet, may take at least, and at most
#: (seconds).
_WITHIN, _LONGEST = 1.0, 10.0
#: A session that there is not yet.
NO_SESSION = jute.Welcome(0, 0, bytes(16))


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


class SessionExpired(BackendUnavailable):
    """The session is no more, or not to be used any more."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """How a connection began. ``before``: the newest transaction that the client knew of then."""

    welcome: jute.Welcome
    fresh: bool
    sent: float
    before: int


class Servers:
    """Those of the ensemble, as one session meets them.

    Mutable state: ``further`` (how far entering has come), ``_failures`` (to get to one, since the last
    success), ``_patience`` (with the answers to a greeting).
    """

    def __init__(
        self,
        ensemble: Ensemble,
        acquaintance: Acquaintance,
        on_event: Callable[[jute.Event], None],
        on_commit: Callable[[float], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """
        :param acquaintance: what all sessions of the client know of the servers.
        :param on_failure: is told why a server could not be reached; others may still be dialled.
        """
        self.further: Further = Further()
        self._ensemble = ensemble
        self._acquaintance = acquaintance
        hosts = list(ensemble.hosts)
        random.shuffle(hosts)
        self._dialer = Dialer(
            hosts,
            Patience(_WITHIN, _LONGEST),
            lambda host, address: self._connect(host, address, on_event, on_commit),
            lambda connection: connection.abort(BackendUnavailable("another server was faster")),
            on_failure,
        )
        self._failures = 0
        self._patience = Patience(_WITHIN, _LONGEST)

    @property
    def all_failed(self) -> bool:
        """Whether each of them was tried since the last success."""
        return self._failures >= self._dialer.number

    def lost(self, connection: Connection) -> None:
        """The connection to a server is over: another address of its name is tried first."""
        self._dialer.addresses.lost(connection.address)

    async def connect(
        self,
        session: jute.Welcome,
        timeout: float,
        silence: float,
        use: Callable[[Connection, Greeting], Awaitable[None]],
    ) -> Connection:
        """Return a connection to the first server that answers, with the session or for a new one.

        :param timeout: of the session that is asked for (seconds).
        :param silence: how long a server may say nothing, judging by the session's length (seconds).
        :param use: what the session says before the connection is used; the server is waited for alike.
        :raises SessionExpired: the session is over.
        """
        try:
            dialled = await self._dialer.open(max(silence, self._dialer.patience.learned))
        except Exception:
            self._failures += self._dialer.number
            raise
        connection, took = dialled.connection, dialled.took
        longest = max(silence, self._patience.learned)
        # A server that says nothing must not take all the time of entering: there may be others, or another
        # address of its name.
        hurried = self._dialer.number > 1 and not self.all_failed
        first = max(longest / 2, _WITHIN) if hurried else longest
        # The way there and back: whoever is that far may be as slow to answer.
        first, longest = max(first, 2 * took), max(longest, 2 * took)
        began, loop, steps = now(), asyncio.get_running_loop(), 1
        self.further.reach(steps)  # the machine has answered; whether a server does has to be seen
        try:
            async with asyncio.timeout(first) as limit:

                def heard() -> None:
                    nonlocal steps
                    steps += 1
                    self.further.reach(steps, took)
                    if not limit.expired():
                        limit.reschedule(loop.time() + longest)

                connection.on_frame = heard
                greeting = await self._greet(connection, session, timeout)
                if not greeting.welcome.timeout:
                    # Who knows no such session may know nothing of this client.
                    await self._ask_apart(dialled.host, dialled.address, timeout)
                    raise SessionExpired("the session has expired")
                await self._introduce(connection, greeting.fresh)
                await use(connection, greeting)
        except BaseException as failed:
            self._failures += 1
            if isinstance(failed, TimeoutError):
                self._patience.ran_out()
            connection.abort(failed)
            raise
        finally:
            connection.on_frame = lambda: None
        self._failures = 0
        self._patience.answered(now() - began)
        self._dialer.served(dialled)
        return connection

    def stop(self) -> None:
        """Dial nobody any more."""
        self._dialer.stop()

    async def _connect(
        self,
        host: Host,
        address: str,
        on_event: Callable[[jute.Event], None] = lambda _: None,
        on_commit: Callable[[float], None] = lambda _: None,
    ) -> Connection:
        tls = self._ensemble.tls
        context = None if tls is None else await tls.get_context()
        return await connect(*host, context, on_event, on_commit, address=address)

    # -- who is there --------------------------------------------------------------------------------

    async def _greet(
        self, connection: Connection, session: jute.Welcome, timeout: float
    ) -> Greeting:
        least, sent = self._acquaintance.least, now()
        milliseconds = min(round(timeout * 1000), jute.LONGEST_TIMEOUT)
        try:
            welcome = await connection.hello(least, milliseconds, session.session, session.password)
        except BackendUnavailable as closed:
            # Servers that have seen less close the connection: they lag behind, or are in an older state.
            text = f"{closed} (it may have seen less than this client: transaction {least:#x})"
            raise BackendUnavailable(text if least else str(closed)) from closed
        return Greeting(welcome, welcome.session != session.session, sent, self._acquaintance.zxid)

    async def _introduce(self, connection: Connection, fresh: bool) -> None:
        """Say who the client is, and see whom it talks to, before anything else is asked.

        :raises OtherStore: these are not the servers that the client knows.
        """
        await self._authenticate(connection)
        acquaintance = self._acquaintance
        floor, id = acquaintance.zxid, acquaintance.id
        connection.submit(jute.sync(self._ensemble.root))  # a follower may lag behind
        if id is None or not fresh:
            found = await self._read_id(connection, make=id)
        else:
            found = await self._read_id(connection)
        seen = Seen(found, connection.last_zxid, floor)
        acquaintance.meet(seen, f"{connection.server} ({connection.address})")

    async def _ask_apart(self, host: Host, address: str, timeout: float) -> None:
        """See on another connection, and in a session of a moment, whether these are the known servers."""
        connection = await self._connect(host, address)
        try:
            await self._greet(connection, NO_SESSION, timeout)
            await self._introduce(connection, fresh=True)
            await connection.submit(jute.CLOSE_CALL)
        finally:
            connection.abort(BackendUnavailable("asked for a moment"))

    async def _authenticate(self, connection: Connection) -> None:
        credentials = self._ensemble.credentials
        try:
            if credentials is not None and credentials.mechanism == "digest":
                proof = f"{credentials.user}:{credentials.password}".encode()
                await connection.submit(jute.auth("digest", proof))
            elif credentials is not None:
                exchange = DigestMd5(credentials.user, credentials.password)
                challenge = await connection.submit(jute.sasl(b""))
                answer = await connection.submit(jute.sasl(exchange.respond(challenge.value)))
                exchange.check(answer.value)
        except (jute.ZooKeeperError, SaslError) as refused:
            raise BackendError(
                f"{self._ensemble.described} does not accept the user or the password: {refused}"
            ) from refused

    def denied(self, refused: jute.ZooKeeperError) -> Exception:
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

    # -- what everything stands in -------------------------------------------------------------------

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
                    raise self.denied(refused) from refused
            if make == "":
                return ""
            await self.make_root(connection)
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

    def _making_of_root(self) -> list[tuple[str, jute.Call[str]]]:
        """Return the nodes under which everything is kept, from the top, and what makes them."""
        path = ""
        paths = [path := f"{path}/{step}" for step in self._ensemble.root.strip("/").split("/")]
        paths += [f"{path}/{part}" for part in ("clients", "ids", "locks", "semaphores", "waits")]
        acl = self._ensemble.acl
        return [(path, jute.create(path, b"", jute.PERSISTENT, acl)) for path in paths]

    def making(self) -> list[jute.Call[str]]:
        """Return what makes anew what somebody has deleted; what is there stays."""
        calls = [call for _, call in self._making_of_root()]
        id = self._acquaintance.id
        return [*calls, self._making_of_id(id)] if id else calls

    async def make_root(self, connection: Connection) -> None:
        """Make the nodes under which everything is kept; those that exist stay."""
        barred = ""
        made = [(path, connection.submit(call)) for path, call in self._making_of_root()]
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
