"""The scripts that acquire, extend and leave, called on one server, and what their results mean."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any

from ..._clock import now
from ..._errors import BackendError
from ..._model import Gone, Granted, Left, Refused, StoreRequest, Waiting
from ..base import Unanswered
from ..kept import Notices
from .keys import keys_of, name_of
from .messages import Call, Channels, Messages
from .refusals import ReplyError
from .replicas import ReplicatedWire
from .replies import grants_of, left_in, outcome_of
from .scripts import ACQUIRE, EXTEND, LEAVE
from .server import Server
from .wire import Awaited, Wire


class ClientChannel:
    """The client's own channel, which it has subscribed to before its first request."""

    def __init__(self, words: tuple[str, int, str]) -> None:
        self._words = words

    def words(self, base: str) -> tuple[str, int, str]:
        return self._words

    def on_waiting(self, request: StoreRequest) -> None:
        pass

    def on_leaving(self, request: StoreRequest) -> None:
        pass


class Calls:
    """Acquire, extend and leave on one server; each as ``KeptStore`` says."""

    def __init__(self, server: Server, channels: Channels) -> None:
        self.server: Server = server
        self._channels = channels
        #: Who is told of grants, while the server's connections are kept up.
        self.listener: Notices | None = None
        settings = server.settings
        self._prefix = settings.prefix
        self.messages: Messages = Messages(
            settings.prefix, server.label, settings.description, settings.marker_ms, channels
        )

    # -- acquire -----------------------------------------------------------------------------------

    async def acquire(
        self, request: StoreRequest, *, wait: bool
    ) -> Granted | Waiting | Refused | Gone:
        server = self.server
        link = server.granting
        wire = link.wire or await link.wait_up(hurry=not wait)
        request.sent_on = wire
        sent = now()
        extension = None
        try:
            packed = self.messages.acquire(request, wait)
            first = asyncio.get_running_loop().create_future()
            wire.put(packed, first)
            if request.ambiguous and server.replicated is not None:
                # A repeated acquire may write nothing, and then WAIT would cover nothing.
                extension = self._extend(wire, request, request.terms.waiter_ttl)
            try:
                reply = await first
            except ReplyError as refused:
                reply = await server.run_again(wire, refused, Call(ACQUIRE, packed))
            finally:
                del first  # as in `Server.result`
        except Unanswered:
            # It may be carried out at any time from now on; leaving will have to refuse that.
            request.ambiguous = True
            raise
        request.sent_on = server.refusal = None
        answer = outcome_of(reply, sent)
        if isinstance(answer, Waiting) or (request.lingers and isinstance(answer, Granted)):
            self._channels.on_waiting(request)
        if extension is not None and isinstance(answer, Granted | Waiting):
            answer = await extension
            if isinstance(answer, Granted):  # perhaps a while ago
                return await self._extend(wire, request, request.terms.ttl)
        return answer

    # -- extend ------------------------------------------------------------------------------------

    def extend(
        self, batch: Sequence[tuple[StoreRequest, float]]
    ) -> Sequence[Awaitable[Granted | Waiting | Gone]]:
        wire = self.server.granting_wire
        if wire is None:
            return [Outcome(self._unreachable)] * len(batch)
        return [self._extend(wire, request, length) for request, length in batch]

    def _extend(
        self, wire: Wire | ReplicatedWire, request: StoreRequest, length: float
    ) -> Awaitable[Granted | Waiting | Gone]:
        packed = self.messages.extend(request, length)
        extension = _Extension(self, wire, request, packed)
        # Thousands of waiters of this client may come and go: no lease must be lost for that.
        wire.put(packed, extension, lease=length, urgent=request.granted)
        return extension

    async def _unreachable(self) -> Granted | Waiting | Gone:
        raise self.server.unreachable()

    async def extend_again(
        self, wire: Wire | ReplicatedWire, refused: ReplyError, packed: bytes
    ) -> Any:
        """Repeat an extension that was refused, if the server has forgotten the script."""
        return await self.server.run_again(wire, refused, Call(EXTEND, packed))

    def on_extended(self, request: StoreRequest, answer: object) -> None:
        if isinstance(answer, Waiting) or (request.lingers and isinstance(answer, Granted)):
            self._channels.on_waiting(request)

    # -- leave -------------------------------------------------------------------------------------

    async def leave(
        self, request: StoreRequest, *, lost: bool = False, within: float | None = None
    ) -> Left:
        record = request.end.record
        if record is not None:
            self._channels.on_leaving(request)
            return await self._leave_by(self.messages.record(request, *record))
        link = self.server.link
        wire = link.wire
        if wire is None:
            started = now()
            wire = await link.wait_up()
            if within is not None:
                within = max(0.001, within - (now() - started))
        packed = self._leaving(request, wire)
        release = Awaited(self._on_left)
        give_up_at = wire.put(packed, release, within=within)
        try:
            reply = await release.answered
        except ReplyError as refused:
            if within is not None:
                within = max(0.001, give_up_at - asyncio.get_running_loop().time())
            call = Call(LEAVE, packed)
            reply = await self.server.run_again(wire, refused, call, within, self._on_left)
        finally:
            del release  # as in `Server.result`
        return left_in(reply)

    async def leave_unknown(self, request_id: str, where: str, final: bool) -> Left:
        keys = keys_of(self._prefix, *name_of(where))
        return await self._leave_by(self.messages.leave_unknown(request_id, keys, final))

    async def _leave_by(self, call: Call) -> Left:
        return left_in(await self.server.run_call(call, on_read=self._on_left))

    def leave_later(
        self,
        request: StoreRequest,
        done: Callable[[Left | BackendError], object],
        *,
        lost: bool = False,
    ) -> bool:
        wire = self.server.wire
        if wire is None:
            return False

        def on_result(result: Any) -> None:
            if not isinstance(result, BackendError):
                self._on_left(result)
                try:
                    result = left_in(result)
                except BackendError as wrong:
                    result = wrong
            done(result)

        call = Call(LEAVE, self._leaving(request, wire))
        self.server.call(wire, call, on_result, later=True)
        return True

    def _leaving(self, request: StoreRequest, wire: Wire) -> bytes:
        self._channels.on_leaving(request)
        # An acquire may arrive after this leave; not one on this very wire, which is carried out before.
        late = request.ambiguous or (request.sent_on is not None and request.sent_on is not wire)
        return self.messages.leave(request, late)

    def _on_left(self, reply: Any) -> None:
        """Tell whom a release has granted to among this client's own waiters: no notice does."""
        if type(reply) is bytes and reply.startswith(b"released ") and self.listener is not None:
            for request_id, token, state_key, recalled in grants_of(reply):
                self.listener.on_granted(request_id, token, state_key, recalled)

    # -- messages ----------------------------------------------------------------------------------

    def watch(self, request: StoreRequest, watching: bool) -> None:
        keys = keys_of(self._prefix, request.kind, request.name)
        self.server.watch(keys.state, request.id, watching)

    def announce(self, kind: str, name: str) -> None:
        self.server.announce(keys_of(self._prefix, kind, name).changes)

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        return self.server.observe(keys_of(self._prefix, kind, name).changes, changed)


class Outcome:
    """An awaitable that, unlike a coroutine, may be dropped."""

    __slots__ = ("_get",)

    def __init__(self, get: Callable[[], Coroutine[Any, Any, Granted | Waiting | Gone]]) -> None:
        self._get = get

    def __await__(self) -> Generator[Any, None, Granted | Waiting | Gone]:
        return self._get().__await__()


class _Extension:
    """One extension on its way. It reads the reply, and is awaited for the outcome.

    Thousands are on their way at once, and Python's collector visits each object of each. So this is one
    object instead of a future, a coroutine and a closure. Only the first that is awaited needs a future.
    """

    __slots__ = ("_calls", "_packed", "_reply", "_request", "_sent", "_wire", "_woken")

    def __init__(
        self, calls: Calls, wire: Wire | ReplicatedWire, request: StoreRequest, packed: bytes
    ) -> None:
        self._calls = calls
        self._wire = wire
        self._request = request
        self._packed = packed
        self._sent = now()
        self._reply: Any = None
        self._woken: asyncio.Future[None] | None = None

    def done(self) -> bool:
        return self._reply is not None

    def set_result(self, reply: Any, /) -> None:
        self._reply = reply
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    set_exception = set_result

    def __await__(self) -> Generator[Any, None, Granted | Waiting | Gone]:
        if self._reply is None:
            self._woken = asyncio.get_running_loop().create_future()
            yield from self._woken
        reply, calls, request = self._reply, self._calls, self._request
        if isinstance(reply, ReplyError):
            again = calls.extend_again(self._wire, reply, self._packed)
            reply = yield from again.__await__()
        elif isinstance(reply, Exception):
            raise reply
        answer = outcome_of(reply, self._sent)
        calls.on_extended(request, answer)
        if isinstance(answer, Refused):
            return Gone("gone", answer.result)
        return answer
