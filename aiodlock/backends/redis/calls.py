"""The scripts that acquire, extend and leave, called on one server, and what their results mean."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, Protocol

from ..._clock import now
from ..._errors import BackendError
from ..._model import Gone, Granted, Left, Refused, StoreRequest, Waiting
from ..base import Unanswered
from .keys import Keys, base_of, keys_of, name_of
from .packing import KeysAndArguments, Packing, how_of, pack_call, pack_extend, words_of
from .refusals import ReplyError
from .replicas import ReplicatedWire
from .replies import left_of, outcome_of
from .scripts import ACQUIRE, EXTEND, LEAVE, Words
from .server import Server
from .wire import Wire


class Channels(Protocol):
    """The channels that waiters are notified on."""

    def words(self, base: str) -> Words:
        """Return what scripts need to notify waiters of a name: channel, token retention, command."""

    def on_waiting(self, request: StoreRequest) -> None:
        """The request is queued, or lingers: be sure that its notice arrives, or that it is recalled."""

    def on_leaving(self, request: StoreRequest) -> None:
        """The request does not wait any more."""


class ClientChannel:
    """The client's own channel, which it has subscribed to before its first request."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def words(self, base: str) -> Words:
        return self._words

    def on_waiting(self, request: StoreRequest) -> None:
        pass

    def on_leaving(self, request: StoreRequest) -> None:
        pass


class Calls:
    """Acquire, extend and leave on one server; each as ``Backend`` says."""

    def __init__(self, server: Server, channels: Channels) -> None:
        self._server = server
        self._channels = channels
        self._prefix = server.settings.prefix
        self._marker_ms = server.settings.marker_ms
        self._packing = Packing()

    def forget_packed(self) -> None:
        """Pack all messages anew: what scripts need to notify waiters may have changed."""
        self._packing.forget()

    # -- acquire -----------------------------------------------------------------------------------

    async def acquire(
        self, request: StoreRequest, *, wait: bool
    ) -> Granted | Waiting | Refused | Gone:
        server = self._server
        link = server.granting
        wire = link.wire or await link.wait_up(hurry=not wait)
        request.sent_on = wire
        sent = now()
        extension = None
        try:
            first = wire.send_packed(self._packing.acquire(request, wait, self._acquiring))
            if request.ambiguous and server.replicated is not None:
                # A repeated acquire may write nothing, and then WAIT would cover nothing.
                extension = self._extend(wire, request, request.terms.waiter_ttl)
            try:
                reply = await first
            except ReplyError as refused:
                keys, arguments = self._acquiring(request, wait)
                reply = await server.after_refusal(wire, refused, ACQUIRE, keys, arguments)
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

    def _acquiring(self, request: StoreRequest, wait: bool) -> KeysAndArguments:
        keys = self.keys(request)
        marker = keys.marker + request.id
        names = (
            keys.state,
            keys.queue,
            keys.waiters,
            keys.token,
            marker,
            *_record_of(request, keys),
        )
        arguments = (
            request.id,
            wire_mode(request),
            request.owner,
            _ms(request.terms.ttl),
            _ms(request.terms.waiter_ttl),
            _ms(request.terms.lock_delay),
            self._server.label,
            *self._channels.words(keys.base),
            "wait" if wait else "nowait",
            words_of(request, self._server.settings.description),
            how_of(request),
        )
        return names, arguments

    # -- extend ------------------------------------------------------------------------------------

    def extend(
        self, batch: Sequence[tuple[StoreRequest, float]]
    ) -> Sequence[Awaitable[Granted | Waiting | Gone]]:
        wire = self._server.granting_wire
        if wire is None:
            return [Outcome(self._unreachable)] * len(batch)
        return [self._extend(wire, request, length) for request, length in batch]

    def _extend(
        self, wire: Wire | ReplicatedWire, request: StoreRequest, length: float
    ) -> Awaitable[Granted | Waiting | Gone]:
        if request.terms.hold_at_least or request.kind == "once":
            packed = pack_call(EXTEND, *self._extending(request, length))
        else:
            base = base_of(self._prefix, request.kind, request.name)
            packed = pack_extend(base, request, _ms(length), self._channels.words(base))
        extension = _Extension(self, wire, request, length)
        # Thousands of waiters of this client may come and go: no lease must be lost for that.
        wire.carry(packed, extension, lease=length, urgent=request.granted)
        return extension

    async def _unreachable(self) -> Granted | Waiting | Gone:
        raise self._server.unreachable()

    async def extend_again(
        self, wire: Wire | ReplicatedWire, refused: ReplyError, request: StoreRequest, length: float
    ) -> Any:
        """Repeat an extension that was refused because the server has forgotten the script."""
        keys, arguments = self._extending(request, length)
        return await self._server.after_refusal(wire, refused, EXTEND, keys, arguments)

    def _extending(self, request: StoreRequest, length: float) -> KeysAndArguments:
        keys = self.keys(request)
        names = (keys.state, keys.queue, keys.waiters, keys.token, keys.broken)
        begins = ["begins"] if request.terms.hold_at_least and request.begins else []
        words = self._channels.words(keys.base)
        return (*names, *_record_of(request, keys)), (
            request.id,
            _ms(length),
            request.owner,
            *words,
            *begins,
        )

    def on_extended(self, request: StoreRequest, answer: object) -> None:
        if isinstance(answer, Waiting) or (request.lingers and isinstance(answer, Granted)):
            self._channels.on_waiting(request)

    # -- leave -------------------------------------------------------------------------------------

    async def leave(
        self, request: StoreRequest, *, lost: bool = False, within: float | None = None
    ) -> Left:
        if request.end.record is not None:
            return await self._record(request, *request.end.record)
        link = self._server.link
        wire = link.wire
        if wire is None:
            started = now()
            wire = await link.wait_up()
            if within is not None:
                within = max(0.001, within - (now() - started))
        late = self._late(request, wire)
        sent = now()
        try:
            reply = await wire.send_packed(self._packed_leave(request, late, lost), within=within)
        except ReplyError as refused:
            if within is not None:
                within = max(0.001, within - (now() - sent))
            keys, arguments = self._leaving(request, late, lost)
            reply = await self._server.after_refusal(wire, refused, LEAVE, keys, arguments, within)
        return left_of(reply)

    def leave_later(
        self,
        request: StoreRequest,
        done: Callable[[Left | BackendError], object],
        *,
        lost: bool = False,
    ) -> bool:
        wire = self._server.wire
        if wire is None:
            return False

        def on_reply(reply: Any) -> None:
            result: Left | BackendError
            if isinstance(reply, ReplyError):  # NOSCRIPT too: a repetition loads the script
                result = self._server.translated(wire, reply)
            elif isinstance(reply, BackendError):
                result = reply
            else:
                try:
                    result = left_of(reply)
                except BackendError as wrong:
                    result = wrong
            done(result)

        packed = self._packed_leave(request, self._late(request, wire), lost)
        wire.call(packed, on_reply, later=True)
        return True

    async def _record(self, request: StoreRequest, result: bytes, keep: float) -> Left:
        keys = self.keys(request)
        arguments = (
            request.id,
            *self._channels.words(keys.base),
            self._marker_ms if request.ambiguous else 0,
            "recorded",
            result,
            _ms(keep),
        )
        self._channels.on_leaving(request)
        names = (*_leave_keys(keys, request.id), keys.record)
        return left_of(await self._server.eval(LEAVE, names, arguments))

    async def forget(self, name: str) -> bool:
        """Take the record of a success back; return whether there was one."""
        server = self._server
        wire = server.link.wire or await server.link.wait_up(hurry=True)
        key = keys_of(self._prefix, "once", name).record
        return bool(await server.answer(wire.send("DEL", key)))

    @staticmethod
    def _late(request: StoreRequest, wire: Wire) -> bool:
        """Whether an acquire may still arrive after this leave."""
        # What is in flight on this very wire is carried out before this leave.
        return request.ambiguous or (request.sent_on is not None and request.sent_on is not wire)

    def _packed_leave(self, request: StoreRequest, late: bool, lost: bool) -> bytes:
        self._channels.on_leaving(request)
        return self._packing.leave(request, late, lost, self._leaving)

    async def leave_unknown(self, request_id: str, where: str, final: bool) -> Left:
        keys = keys_of(self._prefix, *name_of(where))
        marker_ms = self._marker_ms if final else 0
        arguments = (request_id, *self._channels.words(keys.base), marker_ms, "unused")
        return left_of(await self._server.eval(LEAVE, _leave_keys(keys, request_id), arguments))

    def _leaving(self, request: StoreRequest, late: bool, lost: bool) -> KeysAndArguments:
        keys = self.keys(request)
        arguments = (
            request.id,
            *self._channels.words(keys.base),
            self._marker_ms if late else 0,
            request.end.word,
        )
        return (*_leave_keys(keys, request.id), *_record_of(request, keys)), arguments

    # -- messages ----------------------------------------------------------------------------------

    def watch(self, request: StoreRequest, watching: bool) -> None:
        self._server.watch(self.keys(request).state, request.id, watching)

    def announce(self, kind: str, name: str) -> None:
        self._server.announce(keys_of(self._prefix, kind, name).changes)

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        return self._server.observe(keys_of(self._prefix, kind, name).changes, changed)

    def keys(self, request: StoreRequest) -> Keys:
        """Return the keys of the request's name."""
        return keys_of(self._prefix, request.kind, request.name)


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

    __slots__ = ("_calls", "_length", "_reply", "_request", "_sent", "_wire", "_woken")

    def __init__(
        self, calls: Calls, wire: Wire | ReplicatedWire, request: StoreRequest, length: float
    ) -> None:
        self._calls = calls
        self._wire = wire
        self._request = request
        self._length = length
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
            again = calls.extend_again(self._wire, reply, request, self._length)
            reply = yield from again.__await__()
        elif isinstance(reply, Exception):
            raise reply
        answer = outcome_of(reply, self._sent)
        calls.on_extended(request, answer)
        if isinstance(answer, Refused):
            return Gone("gone", answer.result)
        return answer


def wire_mode(request: StoreRequest) -> str:
    """Return the mode as scripts read it: ``x`` exclusive, ``s`` shared, ``s5`` a semaphore for five."""
    if request.terms.limit:
        return f"s{request.terms.limit}"
    return "x" if request.terms.mode == "exclusive" else "s"


def _record_of(request: StoreRequest, keys: Keys) -> tuple[str, ...]:
    return (keys.record,) if request.kind == "once" else ()


def _leave_keys(keys: Keys, request_id: str) -> tuple[str, ...]:
    marker = keys.marker + request_id
    return keys.state, keys.queue, keys.waiters, keys.token, marker, keys.broken


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
