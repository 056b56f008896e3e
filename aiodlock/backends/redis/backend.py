"""Locks on one Redis or Valkey server: typed calls of the scripts, and what their results mean."""

from __future__ import annotations

import asyncio
import fnmatch
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any

import anyio

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..._model import (
    Capabilities,
    Gone,
    Granted,
    Left,
    LockInfo,
    Refused,
    Request,
    Waiting,
)
from .._label import make_label as make_label
from ..base import Listener, Unanswered
from . import events
from .keys import (
    Keys,
    base_of,
    channel_prefix,
    keys_of,
    name_of,
    parts_of,
    probe_key,
    state_pattern,
)
from .link import Link
from .packing import Packing, Words, pack_extend
from .permissions import check_permissions
from .replicas import ReplicatedLink, ReplicatedWire, capabilities
from .replies import grants_of, holders_of, left_of, outcome_of, waiters_of, wrong_shape
from .scripts import ACQUIRE, ALL, BREAK, EXTEND, INSPECT, LEAVE, Script
from .source import Source
from .together import Together
from .wakeups import Wakeups
from .wire import ReplyError, Wire, will_pass

_logger = logging.getLogger("aiodlock")

#: For how long a marker refuses late duplicates, at the least (seconds).
_SHORTEST_MARKER = 60.0
_CHECK_AGAIN = 0.5
#: A server may well be busy for so long (seconds).
_SHORTEST_SILENCE = 0.2


#: So many keys a server looks at for one SCAN: some 0.3 ms.
_SCANNED_AT_ONCE = 2000
#: So many names are inspected by one call of the script: some 0.5 ms.
_INSPECTED_AT_ONCE = 50
_INSPECTED_KEYS = ("state", "queue", "waiters", "token")


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


class RedisBackend:
    """One server, two connections: commands of all tasks on one, wake-ups on the other.

    With ``min_replicas`` there is a third, for all that grants and extends; see ``replicas``.
    """

    def __init__(
        self,
        source: Source,
        *,
        prefix: str,
        token_retention: float,
        unavailable_after: float,
        configure_notifications: bool = False,
        min_replicas: int = 0,
        label: str | None = None,
    ) -> None:
        self.capabilities: Capabilities = capabilities(min_replicas)
        self._source = source
        self._min_replicas = min_replicas
        self._prefix = prefix
        self._retention = _ms(token_retention)
        self._marker_ttl = _ms(max(unavailable_after, _SHORTEST_MARKER))
        # So that whoever waits hears in time that nothing answers.
        self._longest_silence = max(_SHORTEST_SILENCE, unavailable_after / 4)
        self._configure = configure_notifications
        self.label: str = label or make_label()
        self._channels = channel_prefix(prefix)
        #: The command that scripts announce grants with.
        self._publish = "PUBLISH"
        self._voting = False
        self._options = (self._channels, self._retention, self._publish)
        self._commands: Link | None = None
        #: Why the server, though it answers, did not do what it was asked; None since it did.
        self._refusal: BackendUnavailable | None = None
        self._wakeups: Wakeups | None = None
        self._replicated: ReplicatedLink | None = None
        self._together = Together(source, self._channels + self.label)
        self._packing = Packing()
        #: Whether keyspace events arrive: unknown (None) until the probe has seen.
        self.notifications: bool | None = None

    def __repr__(self) -> str:
        return f"<RedisBackend {self._source.described}>"

    # -- life ------------------------------------------------------------------------------------

    async def run(self, listener: Listener, ready: Callable[[], None]) -> None:
        peer: object = None

        def on_up(wire: Wire) -> None:
            nonlocal peer
            if peer not in (None, wire.peer):
                listener.on_other_server()
            elif not self._voting:
                # The answer to a release may have been lost, and the grants with it; or all that the
                # server knew.
                listener.on_back()
            if not self._voting:
                wire.on_grants = on_grants
            peer = wire.peer
            together.on_up(wire)

        def on_grants(reply: list[Any]) -> None:
            for request_id, token, state_key in grants_of(reply):
                listener.on_granted(request_id, token, state_key)

        together = self._together = Together(self._source, self._channels + self.label)
        commands = self._commands = Link(
            self._source,
            prepare=self._on_connected,
            on_up=on_up,
            longest_silence=self._longest_silence,
        )
        wakeups = self._wakeups = together.wakeups = Wakeups(
            self._source,
            self._channels + self.label,
            on_up=together.on_up,
            on_moved=self._on_channel_moved,
        )
        wakeups.link.lead = commands
        together.commands.append(commands)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(together.watch)
                tasks.start_soon(commands.run)
                tasks.start_soon(wakeups.run, listener)
                if self._min_replicas:
                    await self._find_replicas(tasks)
                await commands.first_up()
                await wakeups.link.first_up()
                allowed = asyncio.Event()
                async with anyio.create_task_group() as asking:
                    asking.start_soon(self._check_permissions, allowed)
                    if self._configure:
                        await events.turn_on(self._link, self._translate)
                    await self._prepare_to_listen(wakeups, allowed)
                together.entered()
                ready()
                await together.keep_alive()
        finally:
            self._commands = self._wakeups = self._replicated = None

    async def _find_replicas(self, tasks: anyio.abc.TaskGroup) -> None:
        link = Link(
            self._source,
            prepare=load_scripts,
            on_up=self._together.on_up,
            longest_silence=self._longest_silence,
        )
        link.lead = self._commands
        replicated = self._replicated = ReplicatedLink(
            link,
            self._min_replicas,
            self._source.described,
            self._longest_silence,
            suspect=self._source.suspect,
        )
        self._together.commands.append(link)
        tasks.start_soon(link.run)
        await replicated.enough()

    async def _on_connected(self, wire: Wire) -> None:
        await load_scripts(wire)
        # What a cluster's node is told to say may have changed.
        self._packing.forget()

    async def _prepare_to_listen(self, wakeups: Wakeups, allowed: asyncio.Event) -> None:
        # Before anybody can look at the store, who would find the probe's key.
        key = probe_key(self._prefix, self.label)
        self.notifications = await events.arrive(self._link, wakeups, key, allowed)

    @property
    def failure(self) -> Exception | None:
        """Why there is no connection, if there is none."""
        links = (self._commands, self._wakeups.link if self._wakeups else None, self._replicated)
        failures = (link.failure for link in links if link is not None and link.failure)
        return next(failures, self._refusal)

    async def _check_permissions(self, allowed: asyncio.Event) -> None:
        key, channel = probe_key(self._prefix, self.label), f"{self._channels}{self.label}:probe"
        while True:
            try:
                wire = await self._link.wait_up()
                await check_permissions(
                    wire,
                    key=key,
                    channel=channel,
                    prefix=self._prefix,
                    publish=self._publish,
                    voting=self._voting,
                )
                allowed.set()
                return
            except ReplyError as refused:  # a replica takes no writes, until it is the primary
                self._translate(wire, refused)
            except BackendUnavailable:
                pass  # the connection was lost meanwhile
            await asyncio.sleep(_CHECK_AGAIN)

    # -- requests --------------------------------------------------------------------------------

    async def acquire(self, request: Request, *, wait: bool) -> Granted | Waiting | Refused | Gone:
        link = self._granting
        wire = link.wire or await link.wait_up(hurry=not wait)
        request.sent_on = wire
        sent = now()
        extension = None
        try:
            first = wire.send_packed(self._packing.acquire(request, wait, self._acquiring))
            if request.ambiguous and self._replicated is not None:
                # A repeated acquire may write nothing, and then WAIT would look at nothing.
                extension = self._extend(wire, request, request.waiter_ttl)
            try:
                reply = await first
            except ReplyError as refused:
                names, arguments = self._acquiring(request, wait)
                reply = await self._after_refusal(wire, refused, ACQUIRE, names, arguments)
            finally:
                # Its exception knows this frame and so, from Python 3.12 on, all that called it: a lease
                # that a caller has dropped must not have to wait for the collector.
                del first
        except Unanswered:
            # It may be carried out at any time from now on; leaving will have to refuse that.
            request.ambiguous = True
            raise
        request.sent_on = self._refusal = None
        answer = outcome_of(reply, sent)
        if isinstance(answer, Waiting):
            self._on_waiting(request)
        if extension is not None and isinstance(answer, Granted | Waiting):
            answer = await extension
            if isinstance(answer, Granted):  # perhaps a while ago
                return await self._extend(wire, request, request.ttl)
        return answer

    def _acquiring(self, request: Request, wait: bool) -> Words:
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
            *self._speaking(keys.base),
            "wait" if wait else "nowait",
        )
        return names, arguments

    def extend(
        self, batch: Sequence[tuple[Request, float]]
    ) -> Sequence[Awaitable[Granted | Waiting | Gone]]:
        wire = self._granting.wire
        if wire is None:
            return [Outcome(self._unavailable)] * len(batch)
        return [self._extend(wire, request, length) for request, length in batch]

    def server_of(self, request: Request) -> object:
        return None

    def _extend(
        self, wire: Wire | ReplicatedWire, request: Request, length: float
    ) -> Awaitable[Granted | Waiting | Gone]:
        base = base_of(self._prefix, request.kind, request.name)
        packed = pack_extend(base, request, _ms(length), self._speaking(base))
        extension = _Extension(self, wire, request, length)
        wire.carry(packed, extension)
        return extension

    def _extending(self, request: Request, length: float) -> Words:
        keys = self._keys(request)
        names = (keys.state, keys.queue, keys.waiters, keys.token, keys.broken)
        return names, (request.id, _ms(length), request.owner, *self._speaking(keys.base))

    async def leave(
        self, request: Request, *, lost: bool = False, within: float | None = None
    ) -> Left:
        link = self._link
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
            names, arguments = self._leaving(request, late, lost)
            reply = await self._after_refusal(wire, refused, LEAVE, names, arguments, within)
        return left_of(reply)

    def leave_later(
        self, request: Request, done: Callable[[Left | BackendError], object], *, lost: bool = False
    ) -> bool:
        wire = self._commands.wire if self._commands is not None else None
        if wire is None:
            return False

        def on_reply(reply: asyncio.Future[Any]) -> None:
            try:
                result: Left | BackendError = left_of(reply.result())
            except ReplyError as refused:  # NOSCRIPT too: whoever repeats it loads the script
                result = self._translate(wire, refused)
            except BackendError as error:
                result = error
            done(result)

        packed = self._packed_leave(request, self._late(request, wire), lost)
        wire.send_packed(packed, later=True).add_done_callback(on_reply)
        return True

    @staticmethod
    def _late(request: Request, wire: Wire) -> bool:
        """Whether an acquire may still arrive after this leave."""
        # What is in flight on this very wire is carried out before this leave.
        return request.ambiguous or (request.sent_on is not None and request.sent_on is not wire)

    def _packed_leave(self, request: Request, late: bool, lost: bool) -> bytes:
        self._on_leaving(request)
        return self._packing.leave(request, late, lost, self._leaving)

    async def leave_unknown(self, request_id: str, where: str) -> None:
        kind, name = name_of(where)
        link = self._link
        wire = link.wire or await link.wait_up()
        # Its own leave has written a marker where one was needed.
        keys = keys_of(self._prefix, kind, name)
        names = self._leave_names(keys, request_id)
        left_of(
            await self._run(wire, LEAVE, names, request_id, *self._speaking(keys.base), 0, "ended")
        )

    async def settle(self) -> None:
        """Every answer is waited for by a call."""

    def _leaving(self, request: Request, late: bool, lost: bool) -> Words:
        keys = self._keys(request)
        arguments = (
            request.id,
            *self._speaking(keys.base),
            self._marker_ttl if late else 0,
            "lost" if lost else "ended",
        )
        return self._leave_names(keys, request.id), arguments

    @staticmethod
    def _leave_names(keys: Keys, request_id: str) -> tuple[str, ...]:
        marker = keys.marker + request_id
        return keys.state, keys.queue, keys.waiters, keys.token, marker, keys.broken

    def watch(self, request: Request, watching: bool) -> None:
        if self._wakeups is None or self.notifications is False:
            return
        change = self._wakeups.watch if watching else self._wakeups.unwatch
        change(self._keys(request).state, request.id)

    def announce(self, kind: str, name: str) -> None:
        wire = self._commands.wire if self._commands is not None else None
        if wire is not None:
            channel = keys_of(self._prefix, kind, name).changes
            wire.send("PUBLISH", channel, "", later=True).add_done_callback(_ignore)

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        wakeups = self._wakeups
        if wakeups is None:
            return changed
        return wakeups.observe(keys_of(self._prefix, kind, name).changes, changed)

    # -- for people ------------------------------------------------------------------------------

    async def inspect(self, kind: str, name: str) -> LockInfo:
        (info,) = await self.inspect_all(kind, [name])
        return info

    async def inspect_all(self, kind: str, names: Sequence[str]) -> list[LockInfo]:
        link = self._link
        wire = link.wire or await link.wait_up(hurry=True)
        parts = [
            names[at : at + _INSPECTED_AT_ONCE] for at in range(0, len(names), _INSPECTED_AT_ONCE)
        ]
        calls = [self._inspecting(kind, part) for part in parts]
        replies = [wire.send("EVALSHA", INSPECT.sha, len(keys), *keys) for keys in calls]
        infos: list[LockInfo] = []
        for part, keys, reply in zip(parts, calls, replies, strict=True):
            infos += _infos_of(part, await self._settle(wire, reply, INSPECT, keys, ()))
        return infos

    def _inspecting(self, kind: str, names: Sequence[str]) -> tuple[str, ...]:
        bases = (base_of(self._prefix, kind, name) for name in names)
        return tuple(f"{base}:{key}" for base in bases for key in _INSPECTED_KEYS)

    async def names(self, match: str) -> AsyncIterator[str]:
        parts = parts_of(match)
        if None not in parts:
            yield "".join(part for part in parts if part)  # one name: no need to look for it
            return
        wire = await self._link.wait_up(hurry=True)
        seen: set[str] = set()
        pattern = state_pattern(self._prefix, "lock", match)
        cursor = b"0"
        while True:
            reply = await self._ask(
                wire.send("SCAN", cursor, "MATCH", pattern, "COUNT", _SCANNED_AT_ONCE)
            )
            try:
                cursor, keys = reply
                found = [name_of(key.decode())[1] for key in keys]
            except (ValueError, TypeError, AttributeError) as wrong:
                raise wrong_shape("SCAN", reply) from wrong
            for name in found:
                if name not in seen and fnmatch.fnmatchcase(name, match):
                    seen.add(name)
                    yield name
            if cursor == b"0":
                break

    async def break_lock(self, name: str) -> int:
        keys = keys_of(self._prefix, "lock", name)
        link = self._link
        wire = link.wire or await link.wait_up(hurry=True)
        reply = await self._run(
            wire,
            BREAK,
            (keys.state, keys.queue, keys.waiters, keys.token, keys.broken),
            *self._options,
            _ms(_SHORTEST_MARKER),
        )
        if not isinstance(reply, int):
            raise wrong_shape("break", reply)
        return reply

    # -- calls -----------------------------------------------------------------------------------

    @property
    def _link(self) -> Link:
        if self._commands is None:
            raise BackendUnavailable(f"{self._source.described}: the client is not running")
        return self._commands

    @property
    def _granting(self) -> Link | ReplicatedLink:
        """Where what grants and extends is sent."""
        return self._replicated or self._link

    async def _unavailable(self) -> Granted | Waiting | Gone:
        raise BackendUnavailable(f"no connection to {self._source.described}") from self.failure

    # What a node of a cluster does in other ways.

    def _speaking(self, base: str) -> tuple[str | int, ...]:
        """Return what the scripts need to give notices: channel prefix, token retention, command."""
        return self._options

    def _on_waiting(self, request: Request) -> None:
        """The request is queued: be sure to hear of its grant."""

    def _on_leaving(self, request: Request) -> None:
        """The request will not wait any more."""

    def _on_channel_moved(self) -> None:
        """The channel of a name is another node's by now."""

    def _keys(self, request: Request) -> Keys:
        return keys_of(self._prefix, request.kind, request.name)

    async def _run(
        self, wire: Wire, script: Script, keys: tuple[str, ...], *arguments: str | int
    ) -> Any:
        first = wire.send("EVALSHA", script.sha, script.number_of_keys, *keys, *arguments)
        return await self._settle(wire, first, script, keys, arguments)

    async def _settle(
        self,
        wire: Wire | ReplicatedWire,
        first: asyncio.Future[Any],
        script: Script,
        keys: tuple[str, ...],
        arguments: tuple[str | int, ...],
    ) -> Any:
        try:
            return await first
        except ReplyError as refused:
            return await self._after_refusal(wire, refused, script, keys, arguments)
        finally:
            del first  # as in `acquire`

    async def _after_refusal(
        self,
        wire: Wire | ReplicatedWire,
        refused: ReplyError,
        script: Script,
        keys: tuple[str, ...],
        arguments: tuple[str | int, ...],
        within: float | None = None,
    ) -> Any:
        """Run a script that the server has forgotten; raise for any other refusal."""
        call = (len(keys), *keys, *arguments)
        if refused.code == "NOSCRIPT" and script.name in wire.reloaded:
            # Of a batch that was refused only the first has to carry the source.
            try:
                return await wire.send("EVALSHA", script.sha, *call, within=within)
            except ReplyError as again:
                if again.code != "NOSCRIPT":
                    raise self._translate(wire, again) from again
        elif refused.code != "NOSCRIPT":
            raise self._translate(wire, refused) from refused
        reply = await self._ask(wire.send("EVAL", script.source, *call, within=within), wire)
        wire.reloaded.add(script.name)
        return reply

    async def _ask(
        self, reply: asyncio.Future[Any], wire: Wire | ReplicatedWire | None = None
    ) -> Any:
        try:
            return await reply
        except ReplyError as refused:
            raise self._translate(wire, refused) from refused
        finally:
            del reply  # as in `acquire`

    def _translate(self, wire: Wire | ReplicatedWire | None, refused: ReplyError) -> BackendError:
        if refused.code in ("MOVED", "ASK"):
            try:
                return Redirected(self._source.described, str(refused))
            except ValueError:
                return wrong_shape("a script", refused)
        if will_pass(refused):
            if refused.code in ("READONLY", "NOREPLICAS"):
                self._source.suspect()
            if refused.code == "READONLY" and wire is not None:
                wire.close(refused)  # this server was demoted: look for the primary again
            self._refusal = BackendUnavailable(f"{self._source.described} is not ready: {refused}")
            return self._refusal
        if refused.code == "NOPERM":
            return BackendError(
                f"{self._source.described}: the server's ACL does not allow what aiodlock needs: {refused}"
            )
        return BackendError(f"{self._source.described} refused: {refused}")


def _ignore(reply: asyncio.Future[Any]) -> None:
    reply.exception()


class Redirected(BackendError):
    """A node of a cluster says that a name is another node's."""

    def __init__(self, described: str, reply: str) -> None:
        super().__init__(
            f"{described} is one node of a cluster: use redis+cluster:// to reach all ({reply})"
        )
        word, _, address = reply.split(" ")[:3]
        host, _, port = address.rpartition(":")
        self.asking: bool = word == "ASK"
        self.address: tuple[str, int] = (host, int(port))


def _infos_of(names: Sequence[str], reply: Any) -> list[LockInfo]:
    try:
        return [
            LockInfo(
                name,
                holders_of(holding),
                waiters_of(waiting),
                int(token),
                int(closed_ms) / 1000,
                int(closed_places),
            )
            for name, (token, closed_ms, holding, waiting, closed_places) in zip(
                names, reply, strict=True
            )
        ]
    except (ValueError, TypeError, AttributeError, OverflowError) as wrong:
        raise wrong_shape("inspect", reply) from wrong


async def load_scripts(wire: Wire, scripts: Sequence[Script] = ALL) -> None:
    """Spare the first calls, and a batch of thousands of extensions, the refusal of an unknown script.

    The server is asked which scripts it has. They are 60 KB, and to load them costs it more than the
    rest of a new connection. What is missing is on its way when this returns, in front of every call.
    """
    known: Any = None
    try:
        known = await wire.send("SCRIPT", "EXISTS", *(script.sha for script in scripts))
    except ReplyError as refused:  # by an ACL, or for now
        _logger.debug("SCRIPT EXISTS was refused: %s", refused)
    if not isinstance(known, list) or len(known) != len(scripts):
        known = [0] * len(scripts)
    for script, is_known in zip(scripts, known, strict=True):
        if is_known != 1:
            wire.send("SCRIPT", "LOAD", script.source).add_done_callback(_on_loaded)


def _on_loaded(loading: asyncio.Future[Any]) -> None:
    refused = loading.exception()
    if refused is not None:  # EVAL does it when it is needed
        _logger.debug("SCRIPT LOAD was refused: %s", refused)


class Outcome:
    """An awaitable that, unlike a coroutine, may be dropped."""

    __slots__ = ("_get",)

    def __init__(self, get: Callable[[], Coroutine[Any, Any, Granted | Waiting | Gone]]) -> None:
        self._get = get

    def __await__(self) -> Generator[Any, None, Granted | Waiting | Gone]:
        return self._get().__await__()


class _Extension:
    """One extension on its way. It reads the reply, and is awaited for the outcome.

    Thousands are on their way at once, and Python's collector looks at each object of each: so this is one
    object instead of a future, a coroutine and a closure. Only the first that is awaited needs a future.
    """

    __slots__ = ("_backend", "_length", "_reply", "_request", "_sent", "_wire", "_woken")

    def __init__(
        self, backend: RedisBackend, wire: Wire | ReplicatedWire, request: Request, length: float
    ) -> None:
        self._backend = backend
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
        reply, backend, request = self._reply, self._backend, self._request
        if isinstance(reply, ReplyError):
            names, arguments = backend._extending(request, self._length)
            again = backend._after_refusal(self._wire, reply, EXTEND, names, arguments)
            reply = yield from again.__await__()
        elif isinstance(reply, Exception):
            raise reply
        answer = outcome_of(reply, self._sent)
        if isinstance(answer, Waiting):
            backend._on_waiting(request)
        return answer  # type: ignore[return-value]


def _wire_mode(request: Request) -> str:
    if request.limit:
        return f"s{request.limit}"
    return "x" if request.mode == "exclusive" else "s"
