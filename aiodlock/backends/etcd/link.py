"""The way to the cluster: calls and streams, on the connection to the endpoint in use.

Every call has a deadline, because a member that was stopped answers nothing and closes nothing. How long it
is follows the answers (``Answers``). When it runs out the caller repeats the call, ``Unanswered`` says
that it may have been carried out, and its answer is listened for still: a late answer tells how slow the
cluster is. A connection is given up when nothing of what needs a leader is answered on it; then the next
endpoint is used (``Ways``). Each connection is examined before anything else is asked on it: whether it
leads to the cluster that this client knows (``Acquaintance``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from ..._backoff import pause_after
from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..._patience import Further, Patience
from .._identity import OtherStore
from .._tls import Tls
from ..base import Unanswered
from . import messages as m
from .answers import Answers
from .calls import AUTHENTICATE, CALL_WITHIN, FIRST_PAUSE, LONGEST_PAUSE, RANGE, STATUS, TXN, Method
from .connection import Connection
from .exchange import CallFailed, Exchange, Lost
from .identity import Acquaintance
from .login import Login
from .refusals import Denied, NotNow, TokenEnded, denied, translate
from .ways import Way, Ways

_logger = logging.getLogger("aiodlock")

_Q = TypeVar("_Q", bound=m.Message)
_A = TypeVar("_A", bound=m.Message)
_T = TypeVar("_T")

#: A member need not answer later than this, whoever still listens (seconds).
_LISTENED_FOR = 60.0


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


class Link:
    """What a client has of its cluster's members.

    Mutable state: ``failure`` (why the last call had no answer; None after one that had), ``entered`` (the
    client was let in: refusals are outages from then on), ``_wrote`` (a transaction was carried out),
    ``_down`` (an outage was told), ``_tasks``, ``_login`` (of the user); and what ``acquaintance``,
    ``_answers`` and ``_ways`` know.
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
        self.failure: Exception | None = None
        self.entered: bool = False
        self.acquaintance: Acquaintance = Acquaintance(
            described, silence=silence, may_hold=may_hold
        )
        self._probe = probe
        self._examined = examined
        self._answers = Answers(alone=len(access.endpoints) == 1)
        self._tls: Tls | None = None
        if access.tls:
            self._tls = Tls(
                "etcd", ca=access.ca, cert=access.cert, key=access.key, protocols=["h2"]
            )
        self._ways = Ways(
            access.endpoints,
            described,
            self._tls,
            accepted=self._answers.accepted,
            connected=self._answers.connected,
            examine=self._examine,
            given_up=self._on_given_up,
            unreached=self._on_unreached,
            was_served=self.acquaintance.heard,
        )
        self._tasks: asyncio.TaskGroup | None = None
        self._opened_once = asyncio.Event()
        self._login = Login()
        self._wrote = self._down = False

    @property
    def endpoint(self) -> str:
        """The endpoint in use."""
        return self._ways.endpoint

    @property
    def generation(self) -> int:
        """It grows with each change of the endpoint."""
        return self._ways.generation

    @property
    def patience(self) -> Patience:
        """How long what needs a leader may take."""
        return self._answers.patience

    @property
    def further(self) -> Further:
        """How far entering has come."""
        return self._answers.further

    @property
    def within(self) -> float:
        """How long a call is waited for on which no lease hangs."""
        return max(CALL_WITHIN, self.patience.learned)

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
                using = self._ways.run(self._tasks, lambda: self.within)
                self._tasks.create_task(using)
                self._opened_once.set()
        finally:
            self._tasks = None
            self.entered = False
            self._opened_once.clear()

    async def _read_files(self, tls: Tls) -> None:
        try:
            await asyncio.to_thread(tls.read)
        except OSError as missing:
            raise BackendError(
                f"{self.described}: a file of the TLS options cannot be read: {missing}"
            ) from missing

    async def _examine(self, way: Way, connection: Connection) -> None:
        """See that a connection leads to the cluster that this client knows, and may be used.

        :raises BackendError: it does not, or says nothing.
        """
        failures = 0
        while self._probe is not None:
            sent, known, token = now(), self.acquaintance.revision, self._login.token
            try:
                token = await self._get_token(way, connection, None)
                answer = await self._ask(way, connection, RANGE, self._probe, self.within, token)
                assert answer.header is not None
                self.acquaintance.look_at(answer.header, known, way.endpoint)
                self._examined(answer)
                return
            except TokenEnded as ended:
                self._login.drop(token)
                if failures and not self.entered:
                    raise
                trouble: BackendError = ended
            except Unanswered as silent:
                ran_out = isinstance(silent.__cause__, _RanOut)
                if not ran_out or self._answers.gives_up(sent):
                    raise
                trouble = silent
            except Denied as refused:
                if refused.elsewhere:
                    raise
                trouble = refused
            except OtherStore:
                raise
            except BackendUnavailable as away:
                # Another client has asked for the token, and got none. Else it is this member that is away.
                if (
                    connection.over.done()
                    or way is not self._ways.present
                    or self.access.user is None
                    or self._login.token is not None
                ):
                    raise
                trouble = away
            failures += 1
            self._tell_down(trouble)
            await asyncio.sleep(pause_after(failures, first=FIRST_PAUSE, longest=LONGEST_PAUSE))

    def failed(self, generation: int, error: Exception) -> None:
        """The endpoint in use then did not answer: go on with the next one. All its streams end."""
        self.failure = error
        if generation == self.generation and (way := self._ways.present) is not None:
            self._ways.switch(way, error)

    def _on_unreached(self, error: Exception) -> None:
        self.failure = error

    def _on_given_up(self, error: Exception, around: int) -> None:
        self.failure = error
        level = logging.DEBUG if around else logging.INFO
        _logger.log(level, "etcd: going on with another endpoint: %s", error)
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

    # -- patience --------------------------------------------------------------------------------

    def came_further(self) -> None:
        """An answer came that brings entering further."""
        self._answers.came_further()

    def answered(self, sent: float) -> None:
        """What needs a leader was answered, late or not."""
        self._answers.answered(sent)
        self._ways.answered()

    def ran_out(self, generation: int, sent: float, error: Exception) -> bool:
        """What was sent then had no answer in time. Return whether its endpoint is given up for that."""
        given_up = self._answers.gives_up(sent)
        if given_up:
            self.failed(generation, error)
        elif self._answers.heard_at < sent:
            self._tell_down(error)
        return given_up

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
        way: Way,
        connection: Connection,
        method: Method[_Q, _A],
        request: _Q,
        within: float,
        token: str | None,
    ) -> _A:
        """Ask once, on this connection. When the time runs out the answer is listened for further."""
        sent, known, of_leader = now(), self.acquaintance.revision, method.needs_leader
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
            raise Unanswered(f"{self._ways.where(way)}: an answer to something else")
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

    def _look_at(self, answer: m.RangeResponse | m.TxnResponse, known: int, way: Way) -> None:
        """Reads and transactions see whatever was answered before they began (``known``), unless the
        cluster has lost it."""
        header = answer.header
        assert header is not None
        if header.revision < known and self._probe is not None:
            self.acquaintance.look_at(header, known, way.endpoint)
        self.acquaintance.saw(header.revision)
        self._wrote = self._wrote or isinstance(answer, m.TxnResponse)
        # Renewals are answered, too, while everything else is refused.
        self.failure, self._down = None, False

    async def _connected(self, within: float) -> tuple[Way, Connection]:
        way = self._ways.present
        if way is None:
            raise BackendUnavailable(f"{self.described}: the client is not running")
        if not way.connection.done():
            await asyncio.wait({way.connection}, timeout=max(0.0, within))
        if not way.connection.done():
            why = self.failure or "no answer"
            raise BackendUnavailable(f"{self._ways.where(way)} cannot be reached: {why}")
        if (failed := way.connection.exception()) is not None:
            if isinstance(failed, BackendError) and not isinstance(failed, BackendUnavailable):
                raise type(failed)(str(failed)) from failed
            raise BackendUnavailable(str(failed)) from failed
        return way, way.connection.result()

    def _decode(self, method: Method[_Q, _A], data: bytes, way: Way) -> _A:
        """Return the answer that the bytes are: the only place where what others sent is read.

        :raises Unanswered: they are none of etcd's. :raises OtherStore: they are another cluster's.
        """
        try:
            answer = method.answer.decode(data)
        except m.Malformed as wrong:
            text = f"{self._ways.where(way)}: an answer that is not etcd's: {wrong}"
            raise Unanswered(text) from wrong
        header: m.Header | None = getattr(answer, "header", None)
        if header is None:
            raise Unanswered(
                f"{self._ways.where(way)}: an answer that is not etcd's: it has no header"
            )
        self.acquaintance.compare(header, way.endpoint)
        return answer

    async def _get_token(
        self, way: Way, connection: Connection, within: float | None
    ) -> str | None:
        """Return the user's token. One call asks for it, and the others wait."""
        login, generation = self._login, self.generation
        if self.access.user is None or login.token is not None:
            return login.token
        request = m.AuthenticateRequest(self.access.user, self.access.password or "")

        async def authenticate() -> str:
            patience = login.patience.learned
            try:
                answer = await self._ask(way, connection, AUTHENTICATE, request, patience, None)
            except BackendUnavailable as error:
                if not isinstance(error, Denied):
                    self.failed(generation, error)
                raise
            self._answers.came_further()
            return answer.token

        # One for all calls that wait: there may be thousands.
        way.logins += 1
        try:
            if way.logins == 1:
                way.watching = self._start(self._until_no_leader(way, connection, generation))
            return await login.get(authenticate, within, start=self._start)
        except Denied as refused:
            self._tell_down(refused)
            raise
        finally:
            way.logins -= 1
            if not way.logins and way.watching is not None:
                way.watching.cancel()

    def _start(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run it in the background.

        :raises BackendUnavailable: the client is not running, or ends.
        """
        try:
            if self._tasks is not None:
                return self._tasks.create_task(coroutine)
        except RuntimeError:
            pass  # the group is ending
        coroutine.close()
        raise BackendUnavailable(f"{self.described}: the client is not running")

    async def _until_no_leader(self, way: Way, connection: Connection, generation: int) -> None:
        """While a password is checked, see that it can be: a member without a leader says nothing of that.
        Then go on with another one. While there is a leader, entering goes on."""
        while True:
            try:
                request = m.StatusRequest()
                status = await self._ask(way, connection, STATUS, request, self.within, None)
                if status.leader:
                    self.further.go_on()
                elif not self._answers.alone:
                    raise BackendUnavailable(f"{self._ways.where(way)} has no leader")
            except BackendUnavailable as away:
                if not self._answers.alone:
                    self.failed(generation, away)
                    return
            except BackendError as refused:  # which is an answer, too
                _logger.debug("etcd: %s", refused)
            await asyncio.sleep(CALL_WITHIN)

    def _translate(self, failed: CallFailed, way: Way, method: Method[_Q, _A]) -> BackendError:
        # Who was never let write is told at once: that is no outage.
        entered = self.entered and (self._wrote or method.path != TXN.path)
        logs_in = method.path == AUTHENTICATE.path
        return translate(failed, self._ways.where(way), entered=entered, logs_in=logs_in)

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
                elif isinstance(error, Unanswered | Denied) or (
                    isinstance(error, NotNow) and not self._answers.alone
                ):
                    self.failed(generation, error)
                # Else there is no connection yet, or no token: what is under way goes on.
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
