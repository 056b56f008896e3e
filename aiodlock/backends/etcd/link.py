"""The way to the cluster: one endpoint at a time. (Above 400 lines with the table of calls, which all use.)

Every call has a deadline, because a member that was stopped answers nothing and closes nothing. What one
endpoint leaves unanswered is repeated at the next one. That is the caller's decision: ``Unanswered``
says that the message may have been carried out.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import anyio

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from .._addresses import Addresses
from .._tls import Tls
from ..base import Unanswered
from . import exchange as x
from . import messages as m
from .connection import Connection, connect
from .exchange import CallFailed, Exchange, Lost, NotSent, Status

_logger = logging.getLogger("aiodlock")

_Q = TypeVar("_Q", bound=m.Message)
_A = TypeVar("_A", bound=m.Message)

#: For so long an endpoint may be silent before the next one is asked.
CALL_WITHIN = 2.0
#: The same while it is connected to.
_CONNECT_WITHIN = 1.5
_CLOSE_WITHIN = 1.0
#: No more than one change of the endpoint in so many seconds.
_SWITCH_PAUSE = 0.1
#: A reconnection's pauses (seconds): the first, and the longest.
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0

#: How gRPC, and etcd itself, refuse a message for its size.
_TOO_LARGE = re.compile("larger than max|request is too large")
#: How etcd 3.4, and 3.5, refuse what was sent before the last change of users and roles.
_CHANGED = re.compile("revision of auth store is old|revision in header is old")


class LeaseNotFound(BackendError):
    """The lease that a message names has ended."""


class TokenEnded(BackendError):
    """The user's token counts no more: another one is asked for."""


class NoSpace(BackendError):
    """The database is full: the cluster takes deletions alone."""


@dataclass(frozen=True, slots=True)
class Method(Generic[_Q, _A]):
    """A call of the API: its path, and what it answers."""

    path: str
    answer: type[_A]
    request: type[_Q]


def _kv(name: str) -> str:
    return f"/etcdserverpb.KV/{name}"


def _lease(name: str) -> str:
    return f"/etcdserverpb.Lease/{name}"


RANGE = Method(_kv("Range"), m.RangeResponse, m.RangeRequest)
TXN = Method(_kv("Txn"), m.TxnResponse, m.TxnRequest)
LEASE_GRANT = Method(_lease("LeaseGrant"), m.LeaseGrantResponse, m.LeaseGrantRequest)
LEASE_REVOKE = Method(_lease("LeaseRevoke"), m.LeaseRevokeResponse, m.LeaseRevokeRequest)
LEASE_TIME_TO_LIVE = Method(
    _lease("LeaseTimeToLive"), m.LeaseTimeToLiveResponse, m.LeaseTimeToLiveRequest
)
STATUS = Method("/etcdserverpb.Maintenance/Status", m.StatusResponse, m.StatusRequest)
AUTHENTICATE = Method(
    "/etcdserverpb.Auth/Authenticate", m.AuthenticateResponse, m.AuthenticateRequest
)
KEEP_ALIVE = Method(_lease("LeaseKeepAlive"), m.LeaseKeepAliveResponse, m.LeaseKeepAliveRequest)
WATCH = Method("/etcdserverpb.Watch/Watch", m.WatchResponse, m.WatchRequest)


@dataclass(frozen=True, slots=True)
class Access:
    """Where the cluster is, and as whom it is used. ``tls``: paths of files, or None for the system's
    own."""

    endpoints: tuple[str, ...]
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str | None = None


class _Way:
    """One endpoint, from the moment when it is chosen until another one is.

    Mutable state: ``connection`` (done when there is one, or that failed), ``streams`` (calls without an
    end), ``over`` (done when another endpoint was chosen), ``serving`` (the task that keeps it).
    """

    def __init__(self, endpoint: str, delay: float) -> None:
        loop = asyncio.get_running_loop()
        self.endpoint: str = endpoint
        self.delay: float = delay
        self.connection: asyncio.Future[Connection] = loop.create_future()
        self.streams: dict[Exchange, Connection] = {}
        self.over: asyncio.Future[object] = loop.create_future()
        self.serving: asyncio.Task[None] | None = None

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


class Link:
    """The connection to the endpoint in use.

    Mutable state: ``_way`` (None while it does not run) and ``generation`` (it grows with each change of
    the endpoint), ``_at`` (the endpoint's number), ``_switched_at``, ``_switches`` (changes of the
    endpoint since the last answer), ``_tasks``, ``_token`` (of the user),
    ``_asking`` (held while it is asked for), ``failure`` (why the last call had no answer; None after one
    that had), ``_revision`` (the largest that an answer had), ``_cluster`` (that has given the last one).
    """

    def __init__(self, access: Access, described: str) -> None:
        self.access: Access = access
        self.described: str = described
        self.generation: int = 0
        self.failure: Exception | None = None
        self._at = random.randrange(len(access.endpoints))
        self._way: _Way | None = None
        self._addresses = Addresses()
        self._tls: Tls | None = None
        if access.tls:
            self._tls = Tls(
                "etcd", ca=access.ca, cert=access.cert, key=access.key, protocols=["h2"]
            )
        self._switched_at = 0.0
        self._switches = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._opened_once = asyncio.Event()
        self._token: str | None = None
        self._asking = asyncio.Lock()
        self._revision = self._cluster = 0
        #: Called with the revision when that is smaller than what was known before.
        self.on_set_back: Callable[[int], object] = lambda _: None

    @property
    def endpoint(self) -> str:
        """Return the endpoint in use."""
        return self.access.endpoints[self._at]

    async def opened(self) -> None:
        """Wait until calls can be sent."""
        await self._opened_once.wait()

    # -- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a connection until cancelled."""
        if self._tls is not None:
            await self._read_files(self._tls)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._choose(0.0)
                self._opened_once.set()
                await asyncio.Event().wait()
        finally:
            self._way = self._tasks = self._token = None
            self._opened_once.clear()

    async def _read_files(self, tls: Tls) -> None:
        try:
            await asyncio.to_thread(tls.read)
        except OSError as missing:
            raise BackendError(
                f"{self.described}: a file of the TLS options cannot be read: {missing}"
            ) from missing

    def _choose(self, delay: float) -> None:
        """Go on with the endpoint that ``_at`` says."""
        assert self._tasks is not None
        self._way = way = _Way(self.endpoint, delay)
        serving = self._serve(way)
        try:
            way.serving = self._tasks.create_task(serving)
        except RuntimeError:  # the client is being left: what ends with it must not begin anew
            serving.close()
            way.end(BackendUnavailable(f"the client of {self.described} is being left"))

    async def _serve(self, way: _Way) -> None:
        """Connect, and keep the connection until another endpoint is used."""
        await asyncio.sleep(way.delay)
        host, _, port = way.endpoint.rpartition(":")
        try:
            async with asyncio.timeout(_CONNECT_WITHIN):
                context = None if self._tls is None else await self._tls.get_context()
                address = await self._addresses.choose(host.strip("[]"), int(port))
                connection = await connect(host.strip("[]"), int(port), context, address=address)
        except (OSError, CallFailed) as failed:  # TimeoutError is an OSError
            text = str(failed) or "no answer"
            self._switch(way, BackendUnavailable(f"{self._where(way)} cannot be reached: {text}"))
            return
        self._addresses.served(address)
        try:
            way.connection.set_result(connection)
            await asyncio.wait(
                (cast("asyncio.Future[object]", connection.over), way.over),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if connection.over.done():
                self._switch(way, Unanswered(f"{self._where(way)}: {connection.over.result()}"))
            await connection.until_idle(CALL_WITHIN)
        finally:
            self._addresses.lost(address)
            connection.close(Lost("the client has closed the connection"))
            with anyio.CancelScope(shield=True):
                await connection.until_closed(_CLOSE_WITHIN)

    def failed(self, generation: int, error: Exception) -> None:
        """The endpoint in use then did not answer: go on with the next one. All its streams end."""
        self.failure = error
        if generation == self.generation and self._way is not None:
            self._switch(self._way, error)

    def _switch(self, way: _Way, error: Exception) -> None:
        if way is not self._way:
            return
        self.failure = error
        way.end(error)
        endpoints = self.access.endpoints
        self._switches += 1
        around = self._switches // len(endpoints)
        pause = min(FIRST_PAUSE * 2 ** min(around, 10), LONGEST_PAUSE) if around else 0.0
        delay = max(random.uniform(0.5, 1.0) * pause, self._switched_at + _SWITCH_PAUSE - now())
        self._switched_at = now()
        self.generation += 1
        self._at = (self._at + 1) % len(endpoints)
        self._choose(max(0.0, delay))
        level = logging.INFO if self._switches == 1 else logging.DEBUG
        _logger.log(level, "etcd: going on with %s: %s", self.endpoint, error)

    def _where(self, way: _Way) -> str:
        return f"{self.described} ({way.endpoint})"

    # -- calls -----------------------------------------------------------------------------------

    async def call(self, method: Method[_Q, _A], request: _Q, within: float = CALL_WITHIN) -> _A:
        """Return the answer.

        :raises BackendUnavailable: if the message was certainly not carried out, else ``Unanswered``.
        :raises BackendError: if the cluster has refused it.
        """
        for attempt in range(2):
            token = await self._get_token(within)
            try:
                return await self._call(method, request, within, token)
            except TokenEnded:
                self._drop(token)
                if attempt:
                    raise
        raise AssertionError("unreachable")

    async def _call(
        self, method: Method[_Q, _A], request: _Q, within: float, token: str | None
    ) -> _A:
        generation, began, known = self.generation, now(), self._revision
        way, connection = await self._connected(within)
        answers: list[bytes] = []
        loop = asyncio.get_running_loop()
        try:
            call = connection.begin(
                method.path,
                answers.append,
                request.encode(),
                within=within,
                metadata=_with_token(token),
            )
            patience = within - (now() - began)
            timer = loop.call_later(patience, connection.cancel, call, Lost("no answer in time"))
            try:
                await call.ended
            except asyncio.CancelledError:
                connection.cancel(call)
                raise
            finally:
                timer.cancel()
            if len(answers) != 1:
                raise Lost(f"{len(answers)} messages as an answer")
        except CallFailed as failed:
            error = self._translate(failed, way)
            if isinstance(error, BackendUnavailable):
                self.failed(generation, error)
            raise error from failed
        self.failure = None
        self._switches = 0
        answer = self._decode(method.answer, answers[0])
        if isinstance(answer, m.RangeResponse | m.TxnResponse) and answer.header is not None:
            self._look_at(answer.header, known)
        return answer

    def _look_at(self, header: m.Header, known: int) -> None:
        """Reads and transactions see whatever was answered before they began (``known``), unless the
        cluster has lost it."""
        revision, before = header.revision, self._cluster
        self._cluster = header.cluster_id
        if before not in (0, header.cluster_id):
            _logger.error(
                "%s is another cluster than before: restored from a backup, or the endpoints belong to "
                "several clusters, which do not know of each other's holders",
                self.described,
                extra={"event": "store_set_back"},
            )
            self._revision = revision
            self.on_set_back(0)
        elif revision >= known:
            self._revision = max(self._revision, revision)
        elif known <= self._revision:  # else another answer has told it already
            _logger.error(
                "%s was at revision %d and is at %d: it was restored from a backup. What it was told "
                "since is lost, and new tokens may be smaller than earlier ones",
                self.described,
                known,
                revision,
                extra={"event": "store_set_back"},
            )
            self._revision = revision
            self.on_set_back(revision)

    async def _connected(self, within: float) -> tuple[_Way, Connection]:
        way, generation = self._way, self.generation
        if way is None:
            raise BackendUnavailable(f"{self.described}: the client is not running")
        if not way.connection.done():
            await asyncio.wait({way.connection}, timeout=within)
        if not way.connection.done():
            error = BackendUnavailable(f"{self._where(way)} cannot be reached: no answer")
            self.failed(generation, error)
            raise error
        if (failed := way.connection.exception()) is not None:
            raise BackendUnavailable(str(failed)) from failed
        return way, way.connection.result()

    def _decode(self, answer: type[_A], data: bytes) -> _A:
        try:
            return answer.decode(data)
        except m.Malformed as wrong:
            raise BackendError(
                f"{self.described}: an answer that is not etcd's: {wrong}"
            ) from wrong

    async def _get_token(self, within: float) -> str | None:
        """Return the user's token. One call asks for it, and the others wait: to check a password takes a
        member a tenth of a second of its processor."""
        if self.access.user is None or self._token is not None:
            return self._token
        generation = self.generation
        try:
            async with asyncio.timeout(within), self._asking:
                if self._token is None:
                    request = m.AuthenticateRequest(self.access.user, self.access.password or "")
                    answer = await self._call(AUTHENTICATE, request, within, None)
                    self._token = answer.token
        except TimeoutError as silent:
            # A member that is cut off from the others may answer much, and give no token.
            error = BackendUnavailable(f"{self.described}: no token in time")
            self.failed(generation, error)
            raise error from silent
        return self._token

    def _drop(self, token: str | None) -> None:
        if self._token == token:  # else another call has asked for a new one already
            self._token = None

    def _translate(self, failed: CallFailed, way: _Way) -> BackendError:
        text, where = str(failed), self._where(way)
        if isinstance(failed, NotSent):
            return BackendUnavailable(f"{where} cannot be reached: {text}")
        if not isinstance(failed, Status):
            return Unanswered(f"{where} did not answer: {text}")
        match failed.code:
            case x.UNAVAILABLE if "no leader" in text:
                return BackendUnavailable(f"{where} cannot be reached: {text}")
            case x.DEADLINE_EXCEEDED:
                return Unanswered(f"{where} did not answer in time")
            case x.NOT_FOUND if "lease not found" in text:
                return LeaseNotFound(text)
            case x.RESOURCE_EXHAUSTED if "space exceeded" in text:
                return NoSpace(
                    f"{where}: the database is full (alarm NOSPACE), so nothing can be acquired. Compact, "
                    "defragment and disarm the alarm, or raise quota-backend-bytes"
                )
            case x.RESOURCE_EXHAUSTED | x.INVALID_ARGUMENT if _TOO_LARGE.search(text):
                return BackendError(
                    f"{where} takes no message as large as this one: {text}. Its --max-request-bytes says "
                    "how large one may be"
                )
            case x.RESOURCE_EXHAUSTED:
                return BackendUnavailable(f"{where} is too busy: {text}")
            case x.UNAUTHENTICATED:
                return TokenEnded(f"{where}: {text}")
            case x.INVALID_ARGUMENT | x.UNKNOWN if _CHANGED.search(text):
                # Somebody has changed a user or a role: no token of before counts, if it is a JWT.
                return TokenEnded(f"{where} has refused: {text}")
            case (
                x.PERMISSION_DENIED
                | x.INVALID_ARGUMENT
                | x.FAILED_PRECONDITION
                | x.UNIMPLEMENTED
                | x.OUT_OF_RANGE
                | x.NOT_FOUND
            ):
                return BackendError(f"{where} has refused: {text or failed.code}")
        return Unanswered(f"{where}: {text} (status {failed.code})")

    # -- streams ---------------------------------------------------------------------------------

    async def stream(
        self,
        method: Method[_Q, _A],
        opened: Callable[[Callable[[_Q], Awaitable[None]]], Awaitable[None]],
        heard: Callable[[_A], None],
    ) -> None:
        """Keep one stream open until cancelled, at whichever endpoint is in use.

        :param opened: called each time with what sends a message; while it runs, answers are heard. When it
            returns or the stream breaks, the stream is opened anew.
        :param heard: called with each answer. It raises ``TokenEnded`` if the stream has to be opened anew
            with a token that counts.
        """
        pause = FIRST_PAUSE
        while True:
            generation, began = self.generation, now()
            token = self._token
            try:
                token = await self._get_token(CALL_WITHIN)
                await self._stream_once(method, opened, heard, token)
            except TokenEnded as ended:
                _logger.debug("etcd: %s", ended)
                self._drop(token)
            except BackendUnavailable as error:
                self.failed(generation, error)
            if now() - began > LONGEST_PAUSE:
                pause = FIRST_PAUSE
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _stream_once(
        self,
        method: Method[_Q, _A],
        opened: Callable[[Callable[[_Q], Awaitable[None]]], Awaitable[None]],
        heard: Callable[[_A], None],
        token: str | None,
    ) -> None:
        way, connection = await self._connected(CALL_WITHIN)

        async def send(message: _Q) -> None:
            connection.send(call, message.encode())

        async def until_ended() -> None:
            await call.ended
            raise Lost("the stream was closed")

        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        try:
            # A member that has lost its leader ends such a stream, instead of being silent.
            call = connection.begin(
                method.path,
                lambda data: heard(self._decode(method.answer, data)),
                metadata=(*_with_token(token), ("hasleader", "true")),
            )
            way.streams[call] = connection
            try:
                async with asyncio.TaskGroup() as tasks:
                    reading = tasks.create_task(until_ended())
                    await opened(send)
                    reading.cancel()
            except BaseExceptionGroup as group:
                # Until Python 3.13 a group that fails while its task is cancelled keeps that to itself.
                if task.cancelling() > before:
                    raise asyncio.CancelledError from None
                raise _first(group) from None
            finally:
                way.streams.pop(call, None)
                connection.cancel(call)
        except CallFailed as failed:
            raise self._translate(failed, way) from failed


def _with_token(token: str | None) -> tuple[tuple[str, str], ...]:
    return () if token is None else (("token", token),)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
