"""One connection to one server: frames, answers in order, and what watches tell."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar, cast

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..base import Unanswered
from . import jute

T = TypeVar("T")

_LARGEST_XID = 2**31 - 1


class Answer(NamedTuple, Generic[T]):
    """What a server answered, and the newest transaction that it had seen then: for a write, its own."""

    value: T
    zxid: int


class _Asked(NamedTuple):
    xid: int
    call: jute.Call[Any]
    sent: float
    answer: asyncio.Future[Any]


class Connection(asyncio.Protocol):
    """Bytes to and from one server. Answers come in the order of the requests.

    ``closed`` is resolved when it is over; what has no answer by then is ``Unanswered``.

    Mutable state: ``address`` (the one that was dialled, of those that the server's name has),
    ``last_zxid`` (the newest transaction that the server told of), ``heard_at`` (when anything was
    received last), ``on_frame`` (called for each frame that was), ``_asked`` (oldest
    first), ``_out`` (what is sent at the end of this turn of the loop), ``_unread``, ``_welcome`` (before
    the first answer), ``_xid``, ``_failure``.
    """

    def __init__(
        self,
        server: str,
        on_event: Callable[[jute.Event], None],
        on_commit: Callable[[float], None],
    ) -> None:
        self.server: str = server
        self.address: str = ""
        self._on_event = on_event
        self._on_commit = on_commit
        loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.last_zxid: int = 0
        self.heard_at: float = 0.0
        self.on_frame: Callable[[], object] = lambda: None
        self._transport: asyncio.Transport | None = None
        self._welcome: asyncio.Future[jute.Welcome] = loop.create_future()
        self._asked: deque[_Asked] = deque()
        self._out: list[bytes] = []
        self._unread = bytearray()
        self._xid = 0
        self._failure: BaseException | None = None

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return not self.closed.done()

    @property
    def waiting_since(self) -> float | None:
        """When the oldest request was sent that has no answer yet."""
        return self._asked[0].sent if self._asked else None

    # -- requests ----------------------------------------------------------------------------------

    async def hello(
        self, last_seen: int, timeout: int, session: int, password: bytes
    ) -> jute.Welcome:
        """Begin: a new session (0), or go on with one."""
        assert self._transport is not None
        self._transport.write(jute.hello(last_seen, timeout, session, password))
        return await self._welcome

    def submit(self, call: jute.Call[T]) -> asyncio.Future[Answer[T]]:
        """Send a request at the end of this turn of the loop. Cancelling the future changes nothing."""
        if self.closed.done():
            raise BackendUnavailable(f"no connection to ZooKeeper at {self.server}")
        special = _SPECIAL.get(call.opcode)
        if special is None:
            self._xid = special = self._xid % _LARGEST_XID + 1
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer[T]] = loop.create_future()
        self._asked.append(_Asked(special, call, now(), answer))
        if not self._out:
            loop.call_soon(self._flush)
        self._out.append(jute.frame(special, call))
        return answer

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and out:
            self._transport.write(b"".join(out))

    def abort(self, failure: BaseException) -> None:
        """Close at once, for this reason."""
        if self._failure is None:
            self._failure = failure
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        self.heard_at = now()
        try:
            for frame in jute.split(self._unread):
                self._receive(frame)
                self.on_frame()
        except jute.Unreadable as wrong:
            self.abort(
                BackendError(f"ZooKeeper at {self.server} sent what cannot be read: {wrong}")
            )

    def connection_lost(self, exc: Exception | None) -> None:
        cause = self._failure or exc
        text = f"the connection to ZooKeeper at {self.server} was lost"
        asked, self._asked = self._asked, deque()
        if not self.closed.done():
            self.closed.set_result(None)
        for one in asked:
            if not one.answer.done():
                unanswered = Unanswered(f"{text}: {cause}" if cause else text)
                unanswered.__cause__ = cause
                _fail(one.answer, unanswered)
        if not self._welcome.done():
            why = f": {cause}" if cause else ""
            _fail(self._welcome, BackendUnavailable(f"{text} before it began{why}"))

    # -- answers -----------------------------------------------------------------------------------

    def _receive(self, frame: bytes) -> None:
        if not self._welcome.done():
            self._welcome.set_result(jute.decoded(jute.read_welcome, jute.Reader(frame)))
            return
        xid, zxid, code, body = jute.decoded(jute.read_reply, jute.Reader(frame))
        if xid == jute.EVENT_XID:
            self._on_event(jute.decoded(jute.read_event, body))
            return
        if not self._asked or self._asked[0].xid != xid:
            self.abort(BackendError(f"ZooKeeper at {self.server} answered what was not asked"))
            return
        asked = self._asked.popleft()
        self.last_zxid = max(self.last_zxid, zxid)
        if code:
            self._refuse(asked, jute.ZooKeeperError(code))
            return
        try:
            value = jute.decoded(asked.call.read, body)
        except jute.Aborted as aborted:
            self._refuse(asked, aborted)
            return
        except jute.Unreadable:
            # It has no answer: who waits for it is told when this is closed.
            self._asked.appendleft(asked)
            raise
        if asked.call.commits:
            self._on_commit(asked.sent)
        if not asked.answer.done():
            asked.answer.set_result(Answer(value, zxid))

    def _refuse(self, asked: _Asked, error: jute.ZooKeeperError) -> None:
        if error.code in (jute.SESSION_EXPIRED, jute.SESSION_MOVED, jute.CONNECTION_LOSS):
            # Nobody is to take this for an answer about a node: another connection will tell.
            self._asked.appendleft(asked)
            self.abort(BackendUnavailable(f"ZooKeeper at {self.server}: {error}"))
        elif not asked.answer.done():
            _fail(asked.answer, error)


_SPECIAL = {
    jute.PING: jute.PING_XID,
    jute.AUTH: jute.AUTH_XID,
    jute.SET_WATCHES: jute.SET_WATCHES_XID,
}


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    future.set_exception(error)
    future.exception()  # it may be that nobody awaits it


async def connect(
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    on_event: Callable[[jute.Event], None],
    on_commit: Callable[[float], None],
    *,
    address: str | None = None,
) -> Connection:
    """Open a connection; nothing is said yet.

    :param address: the one to dial, of those of the host's name.
    """
    loop = asyncio.get_running_loop()
    server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    _, connection = await loop.create_connection(
        lambda: Connection(server, on_event, on_commit),
        address or host,
        port,
        ssl=tls,
        server_hostname=host if tls is not None else None,
    )
    connection.address = address or host
    return connection
