"""The way to the cluster: one endpoint at a time, and another when that one does not answer.

Every call has a deadline, because a member that was stopped answers nothing and closes nothing. What one
endpoint leaves unanswered is repeated at the next one. That is the caller's decision: ``Unanswered``
says that the message may have been carried out.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import anyio
import grpc
import grpc.aio

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..base import Unanswered
from . import messages as m

_logger = logging.getLogger("aiodlock")

_Q = TypeVar("_Q", bound=m.Message)
_A = TypeVar("_A", bound=m.Message)

#: For so long an endpoint may be silent before the next one is asked.
CALL_WITHIN = 2.0
_CLOSE_WITHIN = 1.0
#: No more than one change of the endpoint in so many seconds.
_SWITCH_PAUSE = 0.1
#: A reconnection's pauses (seconds): the first, and the longest.
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0

_OPTIONS = (
    # A channel made anew must not get the dead connection of the one before.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


class LeaseNotFound(BackendError):
    """The lease that a message names has ended."""


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


class Link:
    """The connection to the endpoint in use.

    Mutable state: ``_channel`` and ``generation`` (it grows with each change of the endpoint), ``_at`` (the
    endpoint's number), ``_switched_at``, ``_closing`` (channels to close), ``_moved`` (set when
    the endpoint changes), ``_ending`` (tasks of the
    driver that were begun while a stream was open that has ended), ``_token`` (of the user),
    ``failure`` (why the last call had no answer; None after one that had).
    """

    def __init__(self, access: Access, described: str) -> None:
        self.access: Access = access
        self.described: str = described
        self.generation: int = 0
        self.failure: Exception | None = None
        self._at = random.randrange(len(access.endpoints))
        self._channel: grpc.aio.Channel | None = None
        self._credentials: grpc.ChannelCredentials | None = None
        self._switched_at = 0.0
        self._closing: asyncio.Queue[grpc.aio.Channel] = asyncio.Queue()
        self._moved = asyncio.Event()
        self._ending: set[asyncio.Task[Any]] = set()
        self._opened_once = asyncio.Event()
        self._token: str | None = None

    @property
    def endpoint(self) -> str:
        """Return the endpoint in use."""
        return self.access.endpoints[self._at]

    async def opened(self) -> None:
        """Wait until calls can be sent."""
        await self._opened_once.wait()

    # -- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a channel until cancelled."""
        if self.access.tls:
            self._credentials = await asyncio.to_thread(self._read_credentials)
        self._channel = self._open()
        self._opened_once.set()
        try:
            while True:
                # Calls on their way there may still be answered. Streams have ended.
                await (await self._closing.get()).close(grace=CALL_WITHIN)
        finally:
            channels = [self._channel]
            self._channel, self._token = None, None
            self._opened_once.clear()
            while not self._closing.empty():
                channels.append(self._closing.get_nowait())
            for channel in channels:
                await channel.close()
            with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_WITHIN):
                await self._until_driver_ends()

    async def _until_driver_ends(self) -> None:
        """Wait for the tasks that the driver has for streams: each ends a moment after its stream."""
        while self._ending:
            await asyncio.sleep(0.001)
            self._ending = {task for task in self._ending if not task.done()}

    def _read_credentials(self) -> grpc.ChannelCredentials:
        def read(path: str | None) -> bytes | None:
            return None if path is None else Path(path).read_bytes()

        access = self.access
        try:
            return grpc.ssl_channel_credentials(
                read(access.ca), read(access.key), read(access.cert)
            )
        except OSError as missing:
            raise BackendError(
                f"{self.described}: a file of the TLS options cannot be read: {missing}"
            ) from missing

    def _open(self) -> grpc.aio.Channel:
        if self._credentials is not None:
            return grpc.aio.secure_channel(self.endpoint, self._credentials, options=_OPTIONS)
        return grpc.aio.insecure_channel(self.endpoint, options=_OPTIONS)

    def failed(self, generation: int, error: Exception) -> None:
        """The endpoint in use then did not answer: go on with the next one. All its streams end."""
        self.failure = error
        if generation != self.generation or self._channel is None:
            return
        if now() - self._switched_at < _SWITCH_PAUSE:
            return
        self._switched_at = now()
        self.generation += 1
        self._at = (self._at + 1) % len(self.access.endpoints)
        self._closing.put_nowait(self._channel)
        self._channel = self._open()
        self._moved.set()
        self._moved = asyncio.Event()
        _logger.info("etcd: going on with %s: %s", self.endpoint, error)

    # -- calls -----------------------------------------------------------------------------------

    async def call(self, method: Method[_Q, _A], request: _Q, within: float = CALL_WITHIN) -> _A:
        """Return the answer.

        :raises BackendUnavailable: if the message was certainly not carried out, else ``Unanswered``.
        :raises BackendError: if the cluster has refused it.
        """
        for attempt in range(2):
            if self.access.user is not None and self._token is None:
                await self._authenticate(within)
            try:
                return await self._call(method, request, within)
            except _TokenExpired:
                self._token = None
                if attempt:
                    raise
        raise AssertionError("unreachable")

    async def _call(self, method: Method[_Q, _A], request: _Q, within: float) -> _A:
        channel, generation = self._channel, self.generation
        if channel is None:
            raise BackendUnavailable(f"{self.described}: the client is not running")
        call = channel.unary_unary(method.path)(
            request.encode(), timeout=within, metadata=self._metadata()
        )
        # The driver raises cancellations of its own making, in which anyio does not know its scope's again.
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_end(_: object) -> None:
            if not finished.done():
                finished.set_result(None)

        call.add_done_callback(on_end)
        try:
            await finished
        except asyncio.CancelledError:
            call.cancel()
            raise
        try:
            data: bytes = await call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not this task was cancelled, but the call: its channel was closed.
            raise Unanswered(f"{self.described}: the connection was closed") from None
        except grpc.aio.AioRpcError as failed:
            error = self._translate(failed)
            if isinstance(error, BackendUnavailable):
                self.failed(generation, error)
            raise error from failed
        self.failure = None
        return self._decode(method.answer, data)

    def _decode(self, answer: type[_A], data: bytes) -> _A:
        try:
            return answer.decode(data)
        except m.Malformed as wrong:
            raise BackendError(
                f"{self.described}: an answer that is not etcd's: {wrong}"
            ) from wrong

    async def _authenticate(self, within: float) -> None:
        assert self.access.user is not None
        request = m.AuthenticateRequest(self.access.user, self.access.password or "")
        self._token = (await self._call(AUTHENTICATE, request, within)).token

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self._token is None else (("token", self._token),)

    def _translate(self, failed: grpc.aio.AioRpcError) -> BackendError:
        code, text = failed.code(), failed.details() or ""
        where = f"{self.described} ({self.endpoint})"
        match code:
            case grpc.StatusCode.UNAVAILABLE if _never_sent(text):
                return BackendUnavailable(f"{where} cannot be reached: {text}")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return Unanswered(f"{where} did not answer in time")
            case grpc.StatusCode.NOT_FOUND if "lease not found" in text:
                return LeaseNotFound(text)
            case grpc.StatusCode.RESOURCE_EXHAUSTED if "space exceeded" in text:
                return NoSpace(
                    f"{where}: the database is full (alarm NOSPACE), so nothing can be acquired. Compact, "
                    "defragment and disarm the alarm, or raise quota-backend-bytes"
                )
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return BackendUnavailable(f"{where} is too busy: {text}")
            case grpc.StatusCode.UNAUTHENTICATED:
                return _TokenExpired(f"{where}: {text}")
            case (
                grpc.StatusCode.PERMISSION_DENIED
                | grpc.StatusCode.INVALID_ARGUMENT
                | grpc.StatusCode.FAILED_PRECONDITION
                | grpc.StatusCode.UNIMPLEMENTED
                | grpc.StatusCode.OUT_OF_RANGE
                | grpc.StatusCode.NOT_FOUND
            ):
                return BackendError(f"{where} has refused: {text or code.name}")
        return Unanswered(f"{where}: {code.name.lower()}: {text}")

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
        """
        pause = FIRST_PAUSE
        while True:
            generation, began = self.generation, now()
            try:
                await self._stream_once(method, opened, heard)
            except BackendError as error:
                if isinstance(error, _TokenExpired):
                    self._token = None
                if not isinstance(error, BackendUnavailable | _TokenExpired):
                    raise
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
    ) -> None:
        if self.access.user is not None and self._token is None:
            await self._authenticate(CALL_WITHIN)
        moved = self._moved
        async with self._opened_stream(method.path) as call:

            async def send(message: _Q) -> None:
                await call.write(message.encode())

            async def read() -> None:
                while True:
                    data = await call.read()
                    if data is grpc.aio.EOF:
                        raise Unanswered(f"{self.described}: the stream was closed")
                    heard(self._decode(method.answer, data))

            async def end_with_channel() -> None:
                await moved.wait()
                raise Unanswered(f"{self.described}: another endpoint is used")

            try:
                async with asyncio.TaskGroup() as tasks:
                    others = [tasks.create_task(read()), tasks.create_task(end_with_channel())]
                    await opened(send)
                    for other in others:
                        other.cancel()
            except BaseExceptionGroup as group:
                first = _first(group)
                if isinstance(first, BackendError):
                    raise first from None
                if isinstance(first, grpc.aio.AioRpcError):
                    raise self._translate(first) from first
                if isinstance(first, asyncio.InvalidStateError):
                    raise Unanswered(f"{self.described}: the stream was closed") from first
                raise

    @asynccontextmanager
    async def _opened_stream(self, path: str) -> AsyncIterator[Any]:
        if self._channel is None:
            raise BackendUnavailable(f"{self.described}: the client is not running")
        # A member that has lost its leader ends such a stream, instead of being silent.
        metadata = (*self._metadata(), ("hasleader", "true"))
        before = _tasks_of_driver()
        call = self._channel.stream_stream(path)(metadata=metadata)
        try:
            yield call
        finally:
            self._ending = {task for task in self._ending if not task.done()}
            self._ending |= _tasks_of_driver() - before
            call.cancel()


class _TokenExpired(BackendError):
    """The user's token has ended: another one is asked for."""


def _tasks_of_driver() -> set[asyncio.Task[Any]]:
    def is_theirs(task: asyncio.Task[Any]) -> bool:
        return getattr(task.get_coro(), "__qualname__", "").startswith("_AioCall.")

    return {task for task in asyncio.all_tasks() if is_theirs(task)}


def _never_sent(text: str) -> bool:
    return "failed to connect" in text or "no leader" in text or "Name resolution" in text


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
