"""The way to the cluster: one endpoint at a time. (Above 400 lines with the table of calls, which all use.)

Every call has a deadline, because a member that was stopped answers nothing and closes nothing. How long it
is follows the answers (``Patience``). When it runs out the caller repeats the call, ``Unanswered`` says
that it may have been carried out, and its answer is listened for still: a late answer tells how slow the
cluster is. A connection is given up when nothing of what needs a leader is answered on it; then the next
endpoint is used. Each connection is examined before anything else is asked on it: whether it leads to the
cluster that this client knows (``_identity``).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar, cast

import anyio

from ..._backoff import pause_after
from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..._patience import Further, Patience
from .._addresses import Addresses
from .._identity import Known, OtherStore
from .._tls import Tls
from ..base import Unanswered
from . import messages as m
from .connection import Connection, connect
from .exchange import CallFailed, Exchange, Lost
from .login import Login
from .refusals import Denied, TokenEnded, denied, translate

_logger = logging.getLogger("aiodlock")

_Q = TypeVar("_Q", bound=m.Message)
_A = TypeVar("_A", bound=m.Message)

#: A call is waited for so long at least (seconds; a renewal shorter, see ``Patience.within``).
CALL_WITHIN = 2.0
#: The only endpoint is given up after so much silence: there is no other one, but its connection may be
#: dead.
_ALONE = 5.0
#: How long connecting may take at least: where there are others to try, and where there are none; and at
#: most.
_CONNECT_WITHIN, _CONNECT_ALONE, _LONGEST_CONNECT = 1.5, 4.5, 5.0
_CLOSE_WITHIN = 1.0
#: A member need not answer later than this, whoever still listens.
_LISTENED_FOR = 60.0
#: No more than one change of the endpoint in so many seconds.
_SWITCH_PAUSE = 0.1
#: How far entering has come with a connection. Each answer that counts is a step more.
_CONNECTED = 1
#: A reconnection's pauses (seconds): the first, and the longest.
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0


@dataclass(frozen=True, slots=True)
class Method(Generic[_Q, _A]):
    """A call of the API: its path, and what it answers."""

    path: str
    answer: type[_A]
    request: type[_Q]
    #: Whether its answer proves that there is a leader, and how fast that is.
    needs_leader: bool = True


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
STATUS = Method(
    "/etcdserverpb.Maintenance/Status", m.StatusResponse, m.StatusRequest, needs_leader=False
)
#: To check a password takes much longer than anything else.
AUTHENTICATE = Method(
    "/etcdserverpb.Auth/Authenticate",
    m.AuthenticateResponse,
    m.AuthenticateRequest,
    needs_leader=False,
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


class _RanOut(Lost):
    """Nothing came in time. The connection may be as good as ever."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A cluster at a moment. ``floor``: the revision that was known when it was asked, which it must
    have."""

    cluster: int
    revision: int
    floor: int = 0

    def conflict(self, known: Self) -> str:
        """Say why this is another cluster, or an older state of it."""
        if self.cluster != known.cluster:
            return f"cluster id {self.cluster:x}, known is {known.cluster:x}"
        if self.revision < self.floor:
            return f"revision {self.revision}, known is {self.floor}"
        return ""

    def after(self, known: Self) -> Self:
        """Return the newer one of both."""
        return replace(self, revision=max(self.revision, known.revision))


class _Way:
    """One endpoint, from the moment when it is chosen until another one is.

    Mutable state: ``connection`` (done when there is one that was examined, or that failed), ``streams``
    (calls without an end), ``over`` (done when another endpoint was chosen), ``serving`` (the task that
    keeps it), ``logins`` (calls that wait for a token) and ``watching`` (looks after its leader meanwhile).
    """

    def __init__(self, endpoint: str, delay: float) -> None:
        loop = asyncio.get_running_loop()
        self.endpoint: str = endpoint
        self.delay: float = delay
        self.connection: asyncio.Future[Connection] = loop.create_future()
        self.streams: dict[Exchange, Connection] = {}
        self.over: asyncio.Future[object] = loop.create_future()
        self.serving: asyncio.Task[None] | None = None
        self.logins: int = 0
        self.watching: asyncio.Task[None] | None = None

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
    endpoint since the last answer), ``_tasks``, ``_login`` (of the user), ``failure`` (why the last call
    had no answer; None after one that had), ``entered`` (the client was let in: refusals are outages from
    then on), ``_wrote`` (a transaction was carried out), ``_down`` (an outage was told), ``known`` (the
    cluster), ``_revision`` (the largest that an answer had). What needs a leader: ``patience``,
    ``_heard_at`` (when the last answer came), ``_silent_since`` (when the first call was sent that ran
    out without any answer since), ``_ran_out_at``; ``_dialing`` (patience with a connection that is
    made).
    """

    def __init__(
        self,
        access: Access,
        described: str,
        *,
        probe: m.RangeRequest | None = None,
        examined: Callable[[m.RangeResponse], object] = lambda _: None,
        silence: float = 0.0,
        may_hold: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        :param probe: what each connection is examined with; None: connections are not examined.
        :param examined: is called with what that has read; what it raises refuses the connection.
        :param silence: seconds for which the cluster must have been silent before another is believed.
        :param may_hold: whether a lease of this client can still be held.
        """
        self.access: Access = access
        self.described: str = described
        self.generation: int = 0
        self.failure: Exception | None = None
        self.entered: bool = False
        self.patience: Patience = Patience()
        self.further: Further = Further()
        self._answers = 0
        self.known: Known[Seen] = Known(described, silence=silence, may_hold=may_hold)
        self._probe = probe
        self._examined = examined
        self._alone = len(access.endpoints) == 1
        least = _CONNECT_ALONE if self._alone else _CONNECT_WITHIN
        self._dialing = Patience(least, _LONGEST_CONNECT)
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
        self._login = Login()
        self._wrote = self._down = False
        self._revision = 0
        self._heard_at = self._silent_since = self._ran_out_at = 0.0
        #: Called with the revision when another cluster, or an older state, is believed from now on.
        self.on_set_back: Callable[[int], object] = lambda _: None

    @property
    def endpoint(self) -> str:
        """Return the endpoint in use."""
        return self.access.endpoints[self._at]

    @property
    def within(self) -> float:
        """How long a call is waited for on which no lease hangs."""
        return max(CALL_WITHIN, self.patience.learned)

    def follow(self, dead: Link) -> None:
        """Know the cluster that a dead session's link knew."""
        self.known.follow(dead.known)
        self._revision = dead._revision

    async def opened(self) -> None:
        """Wait until calls can be sent."""
        await self._opened_once.wait()

    # -- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a connection until cancelled."""
        if self._tls is not None:
            await self._read_files(self._tls)
        self._login = Login.of(self.access)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._choose(0.0)
                self._opened_once.set()
                await asyncio.Event().wait()
        finally:
            self._way = self._tasks = None
            self.entered = False
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
        """Connect, examine what answers, and keep the connection until another endpoint is used."""
        await asyncio.sleep(way.delay)
        host, _, port = way.endpoint.rpartition(":")
        began, loop = now(), asyncio.get_running_loop()
        slow = loop.call_later(self._dialing.learned, self._on_slow, way)
        try:
            async with asyncio.timeout(_LONGEST_CONNECT):
                context = None if self._tls is None else await self._tls.get_context()
                address = await self._addresses.choose(host.strip("[]"), int(port))
                connection = await connect(host.strip("[]"), int(port), context, address=address)
        except (OSError, CallFailed) as failed:  # TimeoutError is an OSError
            self._switch(way, self._unreachable(way, str(failed) or "no answer"))
            return
        finally:
            slow.cancel()
        self._dialing.answered(now() - began)
        self.further.reach(_CONNECTED)
        way = self._return_to(way)
        self._addresses.served(address)
        try:
            if way.over.done():
                return  # another endpoint was faster
            try:
                await self._examine(way, connection)
                way.connection.set_result(connection)
                await asyncio.wait(
                    (cast("asyncio.Future[object]", connection.over), way.over),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if connection.over.done():
                    self._switch(way, Unanswered(f"{self._where(way)}: {connection.over.result()}"))
            except BackendError as failed:
                self._switch(way, failed)
            await connection.until_idle(self.within)  # late answers tell how slow the cluster is
        finally:
            self._addresses.lost(address)
            connection.close(Lost("the client has closed the connection"))
            with anyio.CancelScope(shield=True):
                await connection.until_closed(_CLOSE_WITHIN)

    def _unreachable(self, way: _Way, why: str) -> BackendUnavailable:
        return BackendUnavailable(f"{self._where(way)} cannot be reached: {why}")

    def _on_slow(self, way: _Way) -> None:
        """It may be far: it is dialled further, beside the next one."""
        self._dialing.ran_out()
        way.serving = None
        self._switch(way, self._unreachable(way, "no answer"))

    def _return_to(self, way: _Way) -> _Way:
        """A connection has come, perhaps late: use its endpoint, unless another one was faster."""
        present = self._way
        if present is None or present is way or present.connection.done():
            return way
        present.end(self._unreachable(present, "another endpoint was faster"))
        self.generation += 1
        self._at = self.access.endpoints.index(way.endpoint)
        self._way = way = _Way(way.endpoint, 0.0)
        way.serving = asyncio.current_task()
        return way

    async def _examine(self, way: _Way, connection: Connection) -> None:
        """See that a connection leads to the cluster that this client knows, and may be used.

        :raises BackendError: it does not, or says nothing.
        """
        failures = 0
        while self._probe is not None:
            sent, known, token = now(), self._revision, self._login.token
            try:
                token = await self._get_token(way, connection, None)
                answer = await self._ask(way, connection, RANGE, self._probe, self.within, token)
                assert answer.header is not None
                header = answer.header
                self._meet(Seen(header.cluster_id, header.revision, known), way)
                self._examined(answer)
                return
            except TokenEnded as ended:
                self._login.drop(token)
                if failures and not self.entered:
                    raise
                trouble: BackendError = ended
            except Unanswered as silent:
                ran_out = isinstance(silent.__cause__, _RanOut)
                if not ran_out or self._gives_up(sent):
                    raise
                trouble = silent
            except Denied as refused:
                if refused.elsewhere:
                    raise
                trouble = refused
            except OtherStore:
                raise
            except BackendUnavailable as away:
                # Another client has asked for the token, and got none.
                if connection.over.done() or way is not self._way or self._login.token is not None:
                    raise
                trouble = away
            failures += 1
            self._tell_down(trouble)
            await asyncio.sleep(pause_after(failures, first=FIRST_PAUSE, longest=LONGEST_PAUSE))

    def _meet(self, seen: Seen, way: _Way) -> None:
        """Compare an answer with what is known; raise OtherStore if it is not this client's cluster."""
        before = self.known.value
        # It grows, unless another store was believed: what was asked for before is an answer of that one.
        seen = replace(seen, floor=min(seen.floor, self._revision))
        self.known.meet(seen, way.endpoint)
        if before is not None and seen.conflict(before):  # it is believed from now on
            self._revision = seen.revision
            self.on_set_back(seen.revision if seen.cluster == before.cluster else 0)
        self._revision = max(self._revision, seen.revision)

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
        if around:
            self._tell_down(error)

    def _tell_down(self, error: Exception) -> None:
        """No endpoint answers, or what answers refuses this client: told once per outage."""
        self.failure = error
        level = logging.DEBUG if self._down or not self.entered else logging.WARNING
        self._down = self.entered
        extra = {"event": "no_connection"}
        _logger.log(level, "no connection to %s: %s", self.described, error, extra=extra)

    def silence(self, what: str) -> Unanswered:
        """Return the error that something had no answer that counts, with what stands in its way."""
        why = f": {self.failure}" if self.failure else ""
        error = Unanswered(f"{self.described}: {what}{why}")
        error.__cause__ = self.failure
        return error

    def _where(self, way: _Way) -> str:
        return f"{self.described} ({way.endpoint})"

    # -- patience --------------------------------------------------------------------------------

    def came_further(self, took: float = 0.0) -> None:
        """An answer came that brings entering further."""
        self._answers += 1
        self.further.reach(_CONNECTED + self._answers, took)

    def answered(self, sent: float) -> None:
        """What needs a leader was answered, late or not."""
        self._heard_at = now()
        self.came_further(self._heard_at - sent)
        self.patience.answered(self._heard_at - sent)
        self._switches = 0

    def ran_out(self, generation: int, sent: float, error: Exception) -> bool:
        """What was sent then had no answer in time. Return whether its endpoint is given up for that."""
        given_up = self._gives_up(sent)
        if given_up:
            self.failed(generation, error)
        elif self._heard_at < sent:
            self._tell_down(error)
        return given_up

    def _gives_up(self, sent: float) -> bool:
        """Count that a call ran out; tell whether that is the end of the connection: nothing was answered
        since it was sent, and there are other endpoints, or this one has been silent for long."""
        if self._heard_at >= sent:
            return False
        if self._silent_since <= self._heard_at:
            self._silent_since = sent
        if sent >= self._ran_out_at:  # what was sent together runs out once
            self._ran_out_at = now()
            self.patience.ran_out()
        return not self._alone or now() - self._silent_since >= _ALONE

    # -- calls -----------------------------------------------------------------------------------

    async def call(self, method: Method[_Q, _A], request: _Q, within: float | None = None) -> _A:
        """Return the answer.

        :param within: how long it is waited for (seconds); None: as was learned.
        :raises BackendUnavailable: if the message was certainly not carried out, else ``Unanswered``.
        :raises BackendError: if the cluster has refused it.
        """
        give_up_at = now() + (self.within if within is None else within)
        for attempt in range(2):
            generation = self.generation
            way, connection = await self._connected(give_up_at - now())
            token = await self._get_token(way, connection, give_up_at - now())
            sent = now()
            try:
                return await self._ask(way, connection, method, request, give_up_at - sent, token)
            except TokenEnded as ended:
                self._login.drop(token)
                if attempt:
                    raise denied(str(ended), entered=self.entered, elsewhere=False) from ended
            except BackendUnavailable as error:
                if isinstance(error.__cause__, _RanOut):
                    self.ran_out(generation, sent, error)
                elif isinstance(error, Denied) and not error.elsewhere:
                    self._tell_down(error)
                else:
                    self.failed(generation, error)
                raise
        raise AssertionError("unreachable")

    async def _ask(
        self,
        way: _Way,
        connection: Connection,
        method: Method[_Q, _A],
        request: _Q,
        within: float,
        token: str | None,
    ) -> _A:
        """Ask once, on this connection. When the time runs out the answer is listened for further."""
        sent, known, of_leader = now(), self._revision, method.needs_leader
        answers: list[bytes] = []
        try:
            call = connection.begin(
                method.path,
                answers.append,
                request.encode(),
                within=_LISTENED_FOR,
                metadata=_with_token(token),
            )
            timer = asyncio.get_running_loop().call_later(
                within, self._leave_behind, call, answers, sent, of_leader
            )
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
            raise self._translate(failed, way, method) from failed
        answer = self._decode(method, answers[0], way)
        if not m.fits(request, answer):
            raise Unanswered(f"{self._where(way)}: an answer to something else")
        if isinstance(answer, m.RangeResponse | m.TxnResponse):
            self._look_at(answer, known, way)
        if of_leader:
            self.answered(sent)
        return answer

    def _leave_behind(
        self, call: Exchange, answers: list[bytes], sent: float, of_leader: bool
    ) -> None:
        """Its time has run out: wait no more, and learn from what comes late."""
        if call.ended.done():
            return
        call.leave_behind(_RanOut(f"no answer within {now() - sent:.1f} s"))

        def on_late(_: object) -> None:
            if answers and of_leader:
                self.answered(sent)

        call.ended.add_done_callback(on_late)

    def _look_at(self, answer: m.RangeResponse | m.TxnResponse, known: int, way: _Way) -> None:
        """Reads and transactions see whatever was answered before they began (``known``), unless the
        cluster has lost it."""
        header = answer.header
        assert header is not None
        if header.revision < known and self._probe is not None:
            self._meet(Seen(header.cluster_id, header.revision, known), way)
        self._revision = max(self._revision, header.revision)
        self._wrote = self._wrote or isinstance(answer, m.TxnResponse)
        # Renewals are answered, too, while everything else is refused.
        self.failure, self._down = None, False
        self.known.heard()

    async def _connected(self, within: float) -> tuple[_Way, Connection]:
        way = self._way
        if way is None:
            raise BackendUnavailable(f"{self.described}: the client is not running")
        if not way.connection.done():
            await asyncio.wait({way.connection}, timeout=max(0.0, within))
        if not way.connection.done():
            why = self.failure or "no answer"
            raise BackendUnavailable(f"{self._where(way)} cannot be reached: {why}")
        if (failed := way.connection.exception()) is not None:
            if isinstance(failed, BackendError) and not isinstance(failed, BackendUnavailable):
                raise type(failed)(str(failed)) from failed
            raise BackendUnavailable(str(failed)) from failed
        return way, way.connection.result()

    def _decode(self, method: Method[_Q, _A], data: bytes, way: _Way) -> _A:
        """Return the answer that the bytes are: the only place where what others sent is read.

        :raises Unanswered: they are none of etcd's. :raises OtherStore: they are another cluster's.
        """
        try:
            answer = method.answer.decode(data)
        except m.Malformed as wrong:
            text = f"{self._where(way)}: an answer that is not etcd's: {wrong}"
            raise Unanswered(text) from wrong
        header: m.Header | None = getattr(answer, "header", None)
        if header is None:
            raise Unanswered(f"{self._where(way)}: an answer that is not etcd's: it has no header")
        known = self.known.value
        if known is not None and header.cluster_id != known.cluster:
            self._meet(Seen(header.cluster_id, header.revision), way)
        return answer

    async def _get_token(
        self, way: _Way, connection: Connection, within: float | None
    ) -> str | None:
        """Return the user's token. One call asks for it, and the others wait."""
        login, tasks, generation = self._login, self._tasks, self.generation
        if self.access.user is None or login.token is not None:
            return login.token
        if tasks is None:
            raise BackendUnavailable(f"{self.described}: the client is not running")
        request = m.AuthenticateRequest(self.access.user, self.access.password or "")

        async def authenticate() -> str:
            patience = login.patience.learned
            try:
                answer = await self._ask(way, connection, AUTHENTICATE, request, patience, None)
            except BackendUnavailable as error:
                if not isinstance(error, Denied):
                    self.failed(generation, error)
                raise
            self.came_further()
            return answer.token

        # One for all calls that wait: there may be thousands.
        way.logins += 1
        if way.logins == 1:
            way.watching = tasks.create_task(self._until_no_leader(way, connection, generation))
        try:
            return await login.get(authenticate, within, start=tasks.create_task)
        except Denied as refused:
            self._tell_down(refused)
            raise
        finally:
            way.logins -= 1
            if not way.logins and way.watching is not None:
                way.watching.cancel()

    async def _until_no_leader(self, way: _Way, connection: Connection, generation: int) -> None:
        """While a password is checked, see that it can be: a member without a leader says nothing of that.
        Then go on with another one. While there is a leader, entering goes on."""
        while True:
            try:
                request = m.StatusRequest()
                status = await self._ask(way, connection, STATUS, request, self.within, None)
                if status.leader:
                    self.further.go_on()
                elif not self._alone:
                    raise BackendUnavailable(f"{self._where(way)} has no leader")
            except BackendUnavailable as away:
                if not self._alone:
                    self.failed(generation, away)
                    return
            except BackendError as refused:  # which is an answer, too
                _logger.debug("etcd: %s", refused)
            await asyncio.sleep(CALL_WITHIN)

    def _translate(self, failed: CallFailed, way: _Way, method: Method[_Q, _A]) -> BackendError:
        # Who was never let write is told at once: that is no outage.
        entered = self.entered and (self._wrote or method.path != TXN.path)
        logs_in = method.path == AUTHENTICATE.path
        return translate(failed, self._where(way), entered=entered, logs_in=logs_in)

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
        :param heard: called with each answer. It raises ``TokenEnded`` if the stream has to be opened anew,
            perhaps with another token.
        :raises BackendError: it is refused, and the client was never let in.
        """
        failures = 0
        while True:
            generation, began = self.generation, now()
            try:
                await self._stream_once(method, opened, heard)
            except TokenEnded as ended:
                _logger.debug("etcd: %s", ended)
                await self._look_at_token()
            except BackendUnavailable as error:
                if isinstance(error, Denied) and not error.elsewhere:
                    self._tell_down(error)
                elif isinstance(error, Unanswered | Denied):
                    self.failed(generation, error)
            except BackendError as refused:
                if not self.entered:
                    raise
                self.failed(generation, refused)
            failures = 1 if now() - began > LONGEST_PAUSE else failures + 1
            await asyncio.sleep(pause_after(failures, first=FIRST_PAUSE, longest=LONGEST_PAUSE))

    async def _look_at_token(self) -> None:
        """A stream was refused. etcd does not say whether its token has ended, which a call finds out, or
        whether the user may not do this any more, which a new token would not change."""
        if self._probe is None:
            return
        try:
            await self.call(RANGE, self._probe)
        except BackendUnavailable as error:
            _logger.debug("etcd: %s", error)

    async def _stream_once(
        self,
        method: Method[_Q, _A],
        opened: Callable[[Callable[[_Q], Awaitable[None]]], Awaitable[None]],
        heard: Callable[[_A], None],
    ) -> None:
        way, connection = await self._connected(self.within)
        token = await self._get_token(way, connection, self.within)

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
                lambda data: heard(self._decode(method, data, way)),
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
            raise self._translate(failed, way, method) from failed


def _with_token(token: str | None) -> tuple[tuple[str, str], ...]:
    return (("token", token),) if token else ()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
