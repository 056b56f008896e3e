"""Locks on one Redis or Valkey server: typed calls of the scripts, and what their results mean."""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any
from urllib.parse import quote, unquote

import anyio
from redis.exceptions import RedisError

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..._model import (
    Capabilities,
    Gone,
    Granted,
    HolderInfo,
    Left,
    LockInfo,
    Mode,
    Refused,
    Request,
    WaiterInfo,
    Waiting,
)
from ..base import Listener, Unanswered
from .keys import Keys, channel_prefix, keys_of, name_of, probe_key, state_patterns
from .link import Link
from .scripts import ACQUIRE, BREAK, EXTEND, INSPECT, LEAVE, Script
from .source import Source
from .wakeups import Wakeups
from .wire import ReplyError, Wire

_logger = logging.getLogger("aiodlock")

#: Refusals of a server that will pass: nothing was carried out.
_PASSING = frozenset(
    (
        "LOADING",
        "BUSY",
        "READONLY",
        "MASTERDOWN",
        "CLUSTERDOWN",
        "TRYAGAIN",
        "MISCONF",
        "NOREPLICAS",
    )
)
#: For how long a marker refuses late duplicates, at the least (seconds).
_SHORTEST_MARKER = 60.0
#: How far this process's clock and the server's may drift apart within one lease.
_DRIFT_SHARE, _DRIFT = 0.01, 0.002
#: Classes of keyspace events that are used: channel per key, generic, expired, evicted.
_EVENT_CLASSES = "Kgxe"
_RELEASED = Left("released")
_PROBE_AGAIN = 0.5


def local_deadline(sent: float, left_ms: int) -> float:
    """Return until when a lease certainly lives that had ``left_ms`` when a message sent at ``sent``
    was answered."""
    left = left_ms / 1000
    return sent + left - (left * _DRIFT_SHARE + _DRIFT)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


class RedisBackend:
    """One server, two connections: commands of all tasks on one, wake-ups on the other."""

    capabilities = Capabilities()

    def __init__(
        self,
        source: Source,
        *,
        prefix: str,
        token_retention: float,
        unavailable_after: float,
        configure_notifications: bool = False,
    ) -> None:
        self._source = source
        self._prefix = prefix
        self._retention = _ms(token_retention)
        self._marker_ttl = _ms(max(unavailable_after, _SHORTEST_MARKER))
        self._configure = configure_notifications
        host = quote(socket.gethostname(), safe="")
        self.label = f"{host}-{os.getpid()}-{secrets.token_hex(6)}"
        self._channels = channel_prefix(prefix)
        self._options = (self._channels, self._retention, "PUBLISH")
        self._commands: Link | None = None
        self._wakeups: Wakeups | None = None
        #: Whether keyspace events arrive: unknown (None) until the probe has seen.
        self.notifications: bool | None = None

    def __repr__(self) -> str:
        return f"<RedisBackend {self._source.described}>"

    # -- life ------------------------------------------------------------------------------------

    async def run(self, listener: Listener, ready: Callable[[], None]) -> None:
        commands = self._commands = Link(self._source)
        wakeups = self._wakeups = Wakeups(self._source, self._channels + self.label)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(commands.run)
                tasks.start_soon(wakeups.run, listener)
                await commands.first_up()
                await wakeups.link.first_up()
                if self._configure:
                    await self._turn_notifications_on()
                ready()
                tasks.start_soon(wakeups.keep_alive)
                await self._probe_notifications(wakeups)
        finally:
            self._commands = self._wakeups = None

    @property
    def failure(self) -> Exception | None:
        """Why there is no connection, if there is none."""
        links = (self._commands, self._wakeups.link if self._wakeups else None)
        return next((link.failure for link in links if link is not None and link.failure), None)

    async def _turn_notifications_on(self) -> None:
        key = "notify-keyspace-events"
        wire = await self._link.wait_up()
        try:
            reply = await wire.send("CONFIG", "GET", key)
            present = reply[1].decode()
            missing = "".join(c for c in _EVENT_CLASSES if c not in present.replace("A", "gxe"))
            if missing:
                await wire.send("CONFIG", "SET", key, present + missing)
        except ReplyError as refused:
            raise BackendError(
                f"configure_notifications=True, but the server refuses CONFIG: {refused}; set "
                f"{key} to {_EVENT_CLASSES} on the server, or leave the option out"
            ) from refused

    async def _probe_notifications(self, wakeups: Wakeups) -> None:
        """See whether keyspace events arrive; a subscription alone succeeds also when they do not."""
        while self.notifications is None:
            try:
                self.notifications = await self._hears_of_an_expiry(wakeups)
            except (TimeoutError, ReplyError) as why:
                self._do_without_notifications(why)
            except (BackendUnavailable, RedisError, OSError):
                await asyncio.sleep(_PROBE_AGAIN)  # a connection was lost meanwhile
            except BackendError as why:
                self._do_without_notifications(why)

    def _do_without_notifications(self, why: Exception) -> None:
        self.notifications = False
        _logger.info("no keyspace events (%r): heads look when their blocker's lease ends", why)

    async def _hears_of_an_expiry(self, wakeups: Wakeups) -> bool:
        key = probe_key(self._prefix, self.label)
        try:
            heard = await wakeups.expect(key)
            wire = await self._link.wait_up()
            await wire.send("SET", key, "1", "PX", 1)
            async with asyncio.timeout(0.5):
                while not heard.is_set():
                    await asyncio.sleep(0.005)
                    await wire.send("EXISTS", key)  # touching it makes an expired key fire
                    if not await wire.send("EXISTS", key):
                        await heard.wait()
            return True
        finally:
            wakeups.stop_expecting(key)

    # -- requests --------------------------------------------------------------------------------

    async def acquire(self, request: Request, *, wait: bool) -> Granted | Waiting | Refused | Gone:
        link = self._link
        wire = link.wire or await link.wait_up()
        keys = self._keys(request)
        names = (keys.state, keys.queue, keys.waiters, keys.token, keys.marker + request.id)
        arguments = (
            request.id,
            _wire_mode(request),
            request.owner,
            _ms(request.ttl),
            _ms(request.waiter_ttl),
            _ms(request.lock_delay),
            self.label,
            *self._options,
            "wait" if wait else "nowait",
        )
        request.sent_on = wire
        sent = now()
        try:
            try:
                reply = await wire.send(
                    "EVALSHA", ACQUIRE.sha, ACQUIRE.number_of_keys, *names, *arguments
                )
            except ReplyError as refused:
                reply = await self._after_refusal(wire, refused, ACQUIRE, names, arguments)
        except Unanswered:
            # It may be carried out at any time from now on; leaving will have to refuse that.
            request.ambiguous = True
            raise
        request.sent_on = None
        return _parse(reply, sent)

    def extend(
        self, batch: Sequence[tuple[Request, float]]
    ) -> Sequence[Awaitable[Granted | Waiting | Gone]]:
        wire = self._link.wire
        if wire is None:
            return [_Outcome(self._unavailable)] * len(batch)
        return [self._extend(wire, request, length) for request, length in batch]

    def _extend(
        self, wire: Wire, request: Request, length: float
    ) -> Awaitable[Granted | Waiting | Gone]:
        keys = self._keys(request)
        sent = now()
        names = (keys.state, keys.queue, keys.waiters, keys.token, keys.broken)
        arguments = (request.id, _ms(length), request.owner, *self._options)
        first = wire.send("EVALSHA", EXTEND.sha, EXTEND.number_of_keys, *names, *arguments)

        async def outcome() -> Granted | Waiting | Gone:
            reply = await self._settle(wire, first, EXTEND, names, arguments)
            return _parse(reply, sent)  # type: ignore[return-value]

        return _Outcome(outcome)

    async def leave(self, request: Request, *, within: float | None = None) -> Left:
        link = self._link
        wire = link.wire
        if wire is None:
            started = now()
            wire = await link.wait_up()
            if within is not None:
                within = max(0.001, within - (now() - started))
        names, arguments = self._leaving(request, wire)
        try:
            reply = await wire.send(
                "EVALSHA", LEAVE.sha, LEAVE.number_of_keys, *names, *arguments, within=within
            )
        except ReplyError as refused:
            reply = await self._after_refusal(wire, refused, LEAVE, names, arguments, within)
        return _left(reply)

    def leave_later(self, request: Request, done: Callable[[Left | BackendError], object]) -> bool:
        wire = self._commands.wire if self._commands is not None else None
        if wire is None:
            return False
        names, arguments = self._leaving(request, wire)

        def on_reply(reply: asyncio.Future[Any]) -> None:
            try:
                result: Left | BackendError = _left(reply.result())
            except ReplyError as refused:  # NOSCRIPT too: whoever repeats it loads the script
                result = self._translate(wire, refused)
            except BackendError as error:
                result = error
            done(result)

        wire.send(
            "EVALSHA", LEAVE.sha, LEAVE.number_of_keys, *names, *arguments, later=True
        ).add_done_callback(on_reply)
        return True

    async def leave_unknown(self, request_id: str, where: str) -> None:
        kind, name = name_of(where)
        link = self._link
        wire = link.wire or await link.wait_up()
        # Its own leave has written a marker where one was needed.
        names = self._leave_names(keys_of(self._prefix, kind, name), request_id)
        _left(await self._run(wire, LEAVE, names, request_id, *self._options, 0))

    def _leaving(
        self, request: Request, wire: Wire
    ) -> tuple[tuple[str, ...], tuple[str | int, ...]]:
        # What is in flight on this very wire is carried out before this leave.
        late = request.ambiguous or (request.sent_on is not None and request.sent_on is not wire)
        arguments = (request.id, *self._options, self._marker_ttl if late else 0)
        return self._leave_names(self._keys(request), request.id), arguments

    @staticmethod
    def _leave_names(keys: Keys, request_id: str) -> tuple[str, ...]:
        marker = keys.marker + request_id
        return keys.state, keys.queue, keys.waiters, keys.token, marker, keys.broken

    def watch(self, request: Request, watching: bool) -> None:
        if self._wakeups is None or self.notifications is False:
            return
        change = self._wakeups.watch if watching else self._wakeups.unwatch
        change(self._keys(request).state, request.id)

    # -- for people ------------------------------------------------------------------------------

    async def inspect(self, kind: str, name: str) -> LockInfo:
        keys = keys_of(self._prefix, kind, name)
        link = self._link
        wire = link.wire or await link.wait_up()
        reply = await self._run(wire, INSPECT, (keys.state, keys.queue, keys.waiters, keys.token))
        try:
            token, closed_ms, holding, waiting = reply
            return LockInfo(
                name, _holders(holding), _waiters(waiting), int(token), int(closed_ms) / 1000
            )
        except (ValueError, TypeError, AttributeError) as wrong:
            raise _wrong_shape("inspect", reply) from wrong

    async def names(self, match: str) -> AsyncIterator[str]:
        wire = await self._link.wait_up()
        seen: set[str] = set()
        for pattern in state_patterns(self._prefix, "lock"):
            cursor = b"0"
            while True:
                cursor, keys = await self._ask(
                    wire.send("SCAN", cursor, "MATCH", pattern, "COUNT", 500)
                )
                for key in keys:
                    name = name_of(key.decode())[1]
                    if name not in seen and fnmatch.fnmatchcase(name, match):
                        seen.add(name)
                        yield name
                if cursor == b"0":
                    break

    async def break_lock(self, name: str) -> int:
        keys = keys_of(self._prefix, "lock", name)
        link = self._link
        wire = link.wire or await link.wait_up()
        reply = await self._run(
            wire,
            BREAK,
            (keys.state, keys.queue, keys.waiters, keys.token, keys.broken),
            *self._options,
            _ms(_SHORTEST_MARKER),
        )
        if not isinstance(reply, int):
            raise _wrong_shape("break", reply)
        return reply

    # -- calls -----------------------------------------------------------------------------------

    @property
    def _link(self) -> Link:
        if self._commands is None:
            raise BackendUnavailable(f"{self._source.described}: the client is not running")
        return self._commands

    async def _unavailable(self) -> Granted | Waiting | Gone:
        raise BackendUnavailable(f"no connection to {self._source.described}") from self.failure

    def _keys(self, request: Request) -> Keys:
        return keys_of(self._prefix, request.kind, request.name)

    async def _run(
        self, wire: Wire, script: Script, keys: tuple[str, ...], *arguments: str | int
    ) -> Any:
        first = wire.send("EVALSHA", script.sha, script.number_of_keys, *keys, *arguments)
        return await self._settle(wire, first, script, keys, arguments)

    async def _settle(
        self,
        wire: Wire,
        first: asyncio.Future[Any],
        script: Script,
        keys: tuple[str, ...],
        arguments: tuple[str | int, ...],
    ) -> Any:
        try:
            return await first
        except ReplyError as refused:
            return await self._after_refusal(wire, refused, script, keys, arguments)

    async def _after_refusal(
        self,
        wire: Wire,
        refused: ReplyError,
        script: Script,
        keys: tuple[str, ...],
        arguments: tuple[str | int, ...],
        within: float | None = None,
    ) -> Any:
        """Load a script that the server does not know; raise for any other refusal."""
        if refused.code != "NOSCRIPT":
            raise self._translate(wire, refused) from refused
        command = ("EVAL", script.source, script.number_of_keys, *keys, *arguments)
        return await self._ask(wire.send(*command, within=within), wire)

    async def _ask(self, reply: asyncio.Future[Any], wire: Wire | None = None) -> Any:
        try:
            return await reply
        except ReplyError as refused:
            raise self._translate(wire, refused) from refused

    def _translate(self, wire: Wire | None, refused: ReplyError) -> BackendError:
        if refused.code in _PASSING:
            if refused.code == "READONLY" and wire is not None:
                wire.close(refused)  # this server was demoted: look for the primary again
            return BackendUnavailable(f"{self._source.described} is not ready: {refused}")
        if refused.code == "NOPERM":
            return BackendError(
                f"{self._source.described}: the server's ACL does not allow what aiodlock needs: {refused}"
            )
        return BackendError(f"{self._source.described} refused: {refused}")


class _Outcome:
    """An awaitable that, unlike a coroutine, may be dropped."""

    __slots__ = ("_get",)

    def __init__(self, get: Callable[[], Coroutine[Any, Any, Granted | Waiting | Gone]]) -> None:
        self._get = get

    def __await__(self) -> Generator[Any, None, Granted | Waiting | Gone]:
        return self._get().__await__()


def _wire_mode(request: Request) -> str:
    if request.limit:
        return f"s{request.limit}"
    return "x" if request.mode == "exclusive" else "s"


def _mode(wire_mode: bytes) -> Mode:
    return "exclusive" if wire_mode == b"x" else "shared"


def _owner(wire_owner: bytes) -> str:
    text = wire_owner.decode()
    return unquote(text[1:]) if text.startswith("u") else text[1:]


def _parse(reply: Any, sent: float) -> Granted | Waiting | Refused | Gone:
    try:
        match reply:
            case [b"granted" | b"held", token, left]:
                return Granted(int(token), local_deadline(sent, int(left)))
            case [b"waiting", left, look, floor]:
                look_ms = int(look)
                look_at = now() + look_ms / 1000 if look_ms >= 0 else None
                return Waiting(local_deadline(sent, int(left)), look_at, int(floor))
            case [b"busy"]:
                return Refused("busy")
            case [b"deadlock"]:
                return Refused("deadlock")
            case [b"limit", bytes(used)]:
                return Refused("limit", int(used[1:] or 0))
            case [b"gone"]:
                return Gone("gone")
            case [b"gone", b"broken" | b"expired" | b"taken_over" | b"gone" as reason]:
                return Gone(reason.decode())
    except (ValueError, TypeError) as wrong:
        raise _wrong_shape("script", reply) from wrong
    raise _wrong_shape("script", reply)


def _left(reply: Any) -> Left:
    match reply:
        case [b"released"]:
            return _RELEASED
        case [b"withdrawn"]:
            return Left("withdrawn")
        case [b"gone", bytes(reason)]:
            return Left("gone", reason.decode())  # type: ignore[arg-type]
    raise _wrong_shape("leave", reply)


def _wrong_shape(what: str, reply: object) -> BackendError:
    return BackendError(f"the server's answer to {what} has the wrong shape: {reply!r:.200}")


def _holders(flat: Sequence[bytes]) -> tuple[HolderInfo, ...]:
    """One entry per owner and mode, with the number of its acquisitions that the server counts."""
    found: dict[tuple[bytes, bytes], HolderInfo] = {}
    for owner, mode, token, left, client in zip(*[iter(flat)] * 5, strict=True):
        before = found.get((owner, mode))
        found[owner, mode] = HolderInfo(
            owner=_owner(owner),
            mode=_mode(mode),
            token=int(token),
            count=before.count + 1 if before else 1,
            remaining=max(int(left) / 1000, before.remaining if before else 0.0),
            client=client.decode(),
        )
    return tuple(found.values())


def _waiters(flat: Sequence[bytes]) -> tuple[WaiterInfo, ...]:
    rows = zip(*[iter(flat)] * 4, strict=True)
    return tuple(
        WaiterInfo(_owner(owner), _mode(mode), position, int(waited) / 1000, client.decode())
        for position, (owner, mode, waited, client) in enumerate(rows)
    )
