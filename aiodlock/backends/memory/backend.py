"""The client's side of a store in memory: requests become calls of the machine.

Every call is carried out at once. So nothing is ever unanswered, and there is nothing to connect to.
What is awaited gives way once, as with any other store: a task that acquires and releases in a loop lets
the others run, and can be cancelled.
"""

from __future__ import annotations

import asyncio
import fnmatch
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from typing import Any, Literal

from ..._clock import local_deadline, now
from ..._errors import BackendError, BackendUnavailable
from ..._model import (
    Capabilities,
    Gone,
    Granted,
    HolderInfo,
    Kind,
    Left,
    LockInfo,
    RecordedInfo,
    Refused,
    StoreRequest,
    Tokens,
    WaiterInfo,
    Waiting,
    seconds_since,
)
from ..._patience import LEAST
from .._label import make_label
from ..asked import shown
from ..kept import Notices
from . import machine
from .machine import Asked, Message, Name
from .store import Client, Key, Store

#: For how long a late duplicate of an acquire is refused, and a broken lease known, at the least (seconds).
_REMEMBERED = 60.0
#: So many names are compared with a glob in one turn of the event loop: some 5 ms.
_IN_ONE_TURN = 2000


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


CAPABILITIES: Capabilities = Capabilities(hold_at_least=True, resize=True, once=True, linger=True)


class MemoryBackend:
    """A ``KeptStore``: one client of a store in memory.

    Mutable state: ``_listener``, while it runs; ``_observers`` of names.
    """

    def __init__(
        self,
        store: Store,
        described: str,
        *,
        prefix: str,
        token_retention: float,
        unavailable_after: float,
        description: str = "",
    ) -> None:
        self.capabilities: Capabilities = CAPABILITIES
        self.label: str = make_label()
        #: Shown to people beside it.
        self.description: str = description
        self.failure: Exception | None = None
        self.further_at: float = 0.0
        self.answers_within: float = LEAST
        self._store = store
        self._described = described
        self._prefix = prefix
        self._retention = _ms(token_retention)
        self._marker = _ms(max(unavailable_after, _REMEMBERED))
        self._listener: Notices | None = None
        self._observers: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        return f"<MemoryBackend {self._described}>"

    # -- life --------------------------------------------------------------------------------------

    async def run(self, listener: Notices, ready: Callable[[], None]) -> None:
        store, self._listener = self._store, listener
        store.clients[self.label] = Client(asyncio.get_running_loop(), self._on_message)
        try:
            ready()
            await asyncio.Event().wait()
        finally:
            del store.clients[self.label]
            self._listener = None
            for changed in tuple(self._observers):
                changed()

    def _on_message(self, key: Key, message: Message) -> None:
        if self._listener is None:
            return
        if message.word == "granted":
            where = f"{key.kind}:{key.name}"
            self._listener.on_granted(message.id, message.token, where, message.recalled)
        elif message.word == "recall":
            self._listener.on_recalled(message.id)
        elif message.word == "look":
            self._listener.on_look(message.id)
        elif message.word == "done":
            for request_id in message.id.split(","):
                self._listener.on_look(request_id)
        else:
            self._listener.on_broken(message.id, message.token)

    def _check_running(self) -> None:
        if self._listener is None:
            raise BackendUnavailable(f"{self._described}: the client is not running")

    # -- requests ----------------------------------------------------------------------------------

    async def acquire(
        self, request: StoreRequest, *, wait: bool
    ) -> Granted | Waiting | Refused | Gone:
        await asyncio.sleep(
            0
        )  # before the call: who sees the grant may rely on the body's having begun
        self._check_running()
        sent = now()
        reply = self._store.call(
            self._key(request.kind, request.name),
            Name.acquire,
            self._asked(request),
            wait=wait,
            retention=self._retention,
        )
        match reply:
            case ("busy" | "deadlock" as why,):
                return Refused(why)
            case ("limit", used):
                return Refused("limit", used)
            case ("done", result):
                return Refused("recorded", result=result)
        return _outcome(reply, sent)

    def extend(
        self, batch: Sequence[tuple[StoreRequest, float]]
    ) -> Sequence[Awaitable[Granted | Waiting | Gone]]:
        return [_Answered(self._extend(request, length)) for request, length in batch]

    def _extend(
        self, request: StoreRequest, length: float
    ) -> Granted | Waiting | Gone | BackendError:
        if self._listener is None:
            return BackendUnavailable(f"{self._described}: the client is not running")
        sent, key = now(), self._key(request.kind, request.name)
        retention = self._retention
        return _outcome(
            self._store.call(
                key,
                Name.extend,
                request.id,
                _ms(length),
                begins=request.begins,
                retention=retention,
            ),
            sent,
        )

    def server_of(self, request: StoreRequest) -> object:
        return None

    async def leave(
        self, request: StoreRequest, *, lost: bool = False, within: float | None = None
    ) -> Left:
        self._check_running()
        left = self._leave(request, lost)
        await asyncio.sleep(0)
        return left

    def leave_later(
        self,
        request: StoreRequest,
        done: Callable[[Left | BackendError], object],
        *,
        lost: bool = False,
    ) -> bool:
        if self._listener is None:
            return False
        asyncio.get_running_loop().call_soon(done, self._leave(request, lost))
        return True

    def _leave(self, request: StoreRequest, lost: bool) -> Left:
        end = request.end
        if end.record is not None:
            result, keep = end.record
            reply = self._store.call(
                self._key(request.kind, request.name),
                Name.record_success,
                request.id,
                result,
                keep=_ms(keep),
                marker=self._marker if request.ambiguous else 0,
                retention=self._retention,
            )
            return Left(*reply)
        reply = self._store.call(
            self._key(request.kind, request.name),
            Name.leave,
            request.id,
            end=end.word,
            marker=self._marker if request.ambiguous else 0,
            retention=self._retention,
        )
        return Left(*reply)

    async def leave_unknown(self, request_id: str, where: str, final: bool) -> Left:
        kind, _, name = where.partition(":")
        reply = self._store.call(
            self._key(kind, name),
            Name.leave,
            request_id,
            end="unused",
            marker=self._marker if final else 0,
            retention=self._retention,
        )
        return Left(*reply)

    async def settle(self) -> None:
        """Do nothing: every call has been answered."""

    def watch(self, request: StoreRequest, watching: bool) -> None:
        """Do nothing: no message tells the end of a lease. The head looks when that is due."""

    def announce(self, kind: str, name: str) -> None:
        self._store.changed(self._key(kind, name))

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        stop = self._store.observe(self._key(kind, name), changed)
        self._observers.append(changed)

        def end() -> None:
            self._observers.remove(changed)
            stop()

        return end

    # -- for people --------------------------------------------------------------------------------

    async def inspect(self, kind: Kind, name: str) -> LockInfo:
        (info,) = await self.inspect_all(kind, [name])
        return info

    async def inspect_all(
        self, kind: Kind, names: Sequence[str], *, queues: bool = True
    ) -> list[LockInfo]:
        found: list[LockInfo] = []
        for name in names:
            await asyncio.sleep(0)
            self._check_running()
            found.append(self._inspect(kind, name, queues))
        return found

    def _inspect(self, kind: Kind, name: str, queues: bool) -> LockInfo:
        seen = self._store.inspect(self._key(kind, name), queues=queues)
        return LockInfo(
            name,
            _holders(seen),
            _waiters(seen),
            seen.token,
            seen.closed / 1000,
            seen.closed_places,
            kind,
            None if seen.recorded is None else RecordedInfo(*(ms / 1000 for ms in seen.recorded)),
        )

    async def tell_waits(self, serial: int, record: bytes, *, keep: float) -> None:
        self._check_running()
        self._store.tell_waits((self._prefix, self.label), serial, record, keep)
        await asyncio.sleep(0)

    async def waits_of(self, labels: Sequence[str]) -> dict[str, bytes]:
        await asyncio.sleep(0)
        self._check_running()
        told = {label: self._store.waits_of((self._prefix, label)) for label in labels}
        return {label: record for label, record in told.items() if record}

    async def names(self, match: str, kind: Kind = "lock") -> AsyncIterator[str]:
        self._check_running()
        for number, (prefix, its_kind, name) in enumerate(self._store.known()):
            if number % _IN_ONE_TURN == 0:
                await asyncio.sleep(0)
            mine = prefix == self._prefix and its_kind == kind
            if mine and fnmatch.fnmatchcase(name, match):
                yield name

    async def break_lock(self, name: str, kind: Kind = "lock", tokens: Tokens | None = None) -> int:
        await asyncio.sleep(0)
        self._check_running()
        broken = self._store.call(
            self._key(kind, name),
            Name.break_,
            tokens,
            remember=_ms(_REMEMBERED),
            retention=self._retention,
        )
        return len(broken)

    async def forget(self, name: str) -> bool:
        await asyncio.sleep(0)
        self._check_running()
        return self._store.call(self._key("once", name), Name.forget)

    # -- parts -------------------------------------------------------------------------------------

    def _key(self, kind: str, name: str) -> Key:
        return Key(self._prefix, kind, name)

    def _asked(self, request: StoreRequest) -> Asked:
        return Asked(
            request.id,
            request.terms.mode,
            request.terms.limit,
            request.owner,
            self.label,
            _ms(request.terms.ttl),
            _ms(request.terms.waiter_ttl),
            _ms(request.terms.lock_delay),
            _ms(request.terms.hold_at_least),
            request.begins,
            request.terms.resize,
            request.lingers,
            request.terms.note,
            self.description,
        )


def _outcome(
    reply: machine.Held | machine.Waits | machine.Gone | machine.Done, sent: float
) -> Granted | Waiting | Gone:
    match reply:
        case ("held" | "recalled" as word, token, left):
            return Granted(token, local_deadline(sent, left), word == "recalled")
        case ("waiting", left, look, floor):
            look_at = None if look is None else now() + look / 1000
            return Waiting(local_deadline(sent, left), look_at, floor)
        case ("gone", reason):
            return Gone(reason)
        case ("done", result):
            return Gone("gone", result)


def _holders(seen: machine.Seen) -> tuple[HolderInfo, ...]:
    """One entry per owner and mode, with the number of its acquisitions that the store counts."""
    found: dict[tuple[str, Literal["exclusive", "shared"]], HolderInfo] = {}
    for asked, token, left, length in seen.holders:
        before = found.get((asked.owner, asked.mode))
        found[asked.owner, asked.mode] = HolderInfo(
            owner=shown(asked.owner),
            mode=asked.mode,
            token=token,
            count=before.count + 1 if before else 1,
            remaining=max(left / 1000, (before and before.remaining) or 0.0),
            client=asked.client,
            note=asked.note,
            description=asked.description,
            holding=seconds_since(token, seen.now_us),
            ttl=max(length / 1000, (before and before.ttl) or 0.0),
        )
    return tuple(found.values())


def _waiters(seen: machine.Seen) -> tuple[WaiterInfo, ...]:
    return tuple(
        WaiterInfo(
            shown(asked.owner),
            asked.mode,
            position,
            waited / 1000,
            asked.client,
            asked.note,
            asked.description,
        )
        for position, (asked, waited) in enumerate(seen.waiters)
    )


class _Answered:
    """An awaitable that, unlike a coroutine, may be dropped."""

    __slots__ = ("_answer",)

    def __init__(self, answer: Granted | Waiting | Gone | BackendError) -> None:
        self._answer = answer

    async def _get(self) -> Granted | Waiting | Gone:
        if isinstance(self._answer, BackendError):
            raise self._answer
        return self._answer

    def __await__(self) -> Generator[Any, None, Granted | Waiting | Gone]:
        return self._get().__await__()
