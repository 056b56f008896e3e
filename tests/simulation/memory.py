"""The same world with the machine of ``memory://`` as the server: no keys, no bytes, no Lua.

Between the client's core and the machine lies the simulated network, with connections of its own: what is
sent are calls and messages instead of bytes. All faults of the network, of processes, of clocks and of lost
data are the same. What only a Redis server can do (forget scripts, refuse writes) is left out.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import anyio

from aiodlock._clock import now
from aiodlock._errors import BackendError, BackendUnavailable
from aiodlock._model import Gone, Granted, Kind, Left, LockInfo, Refused, StoreRequest, Waiting
from aiodlock._patience import LEAST
from aiodlock.backends.base import Unanswered
from aiodlock.backends.kept import Notices
from aiodlock.backends.memory import backend as memory_backend
from aiodlock.backends.memory.machine import Asked, Entry, Message, Seen
from aiodlock.backends.memory.store import Key, Names

from . import checkers
from .checkers import Checkers
from .network import Conn, Network, Path
from .scenario import Simulation
from .server import Said
from .world import Process, World

_EPOCH = 1_700_000_000.0
_PREFIX = "aiodlock"
_MARKER = 60_000
#: A connection is given up when an answer, to a call or a ping, takes so long.
_SILENCE = 1.0
#: Faults that the machine cannot have.
_ONLY_REDIS = {"flush_scripts", "read_only", "out_of_memory"}


class Call:
    """One call of the machine; to the checkers it looks like a command that runs a script."""

    def __init__(self, script: str, key: Key, id: str = "", **options: Any) -> None:
        self.script = script
        self.key = key
        self.id = id
        self.options = options
        end = options.get("end")
        self.lost = end == "lost"
        self.unused = end == "unused"
        asked = options.get("asked")
        self.begins: bool = options.get("begins", asked is not None and asked.begins)
        self.record: tuple[bytes, int] | None = None
        if "result" in options:
            self.record = options["result"], options["keep"]
        self.length: int = options.get("length", 0)
        self.base = checkers.base_key(key.kind, key.name)
        self.forgets = self.base if script == "forget" else ""

    def __str__(self) -> str:
        asked = self.options.get("asked")
        more = "" if asked is None else f" {asked}"
        return f"{self.script} {self.key.name} {self.id}{more}"


def _mode(asked: Asked) -> str:
    if asked.limit:
        return f"s{asked.limit}"
    return "x" if asked.mode == "exclusive" else "s"


class MachineServer:
    """Calls in, replies out, one at a time. Its clock is ``true time + offset``.

    Mutable state as of ``SimServer``; ``names`` are the data, ``listening`` the connections by client.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.name = "server"
        self.offset = _EPOCH
        self.names = Names()
        self.listening: dict[str, Line] = {}
        self.notifies = False
        #: Each command meets all records of its name.
        self.meets_all = True
        self.refuses: str | None = None
        self.read_only = self.out_of_memory = False
        self.up = True
        self.repeats = False
        self.executed: list[Callable[[Any, Any], None]] = []
        self.lost_data: list[Callable[[], None]] = []
        self.published: list[tuple[str, str]] = []
        self.snapshot: Names | None = None
        self._keys: dict[str, Key] = {}
        #: What clients tell of their waits: the serial, the record, its end.
        self.waits: dict[str, tuple[int, bytes, float]] = {}

    def clock_us(self) -> int:
        return round((self.world.time + self.offset) * 1_000_000)

    def now_ms(self) -> int:
        return self.clock_us() // 1000

    def true_time_of(self, deadline_ms: float) -> float:
        return deadline_ms / 1000 - self.offset

    def run(self, line: Line, call: Call) -> Any:
        """Carry a call out; return its reply, as the words of a script's, or an exception."""
        if self.refuses:
            return BackendUnavailable(self.refuses)
        if call.script == "subscribe":
            self.listening[call.id] = line
            return ["subscribed"]
        if call.script == "ping":
            return ["pong"]
        self.published = []
        if call.script == "inspect":
            seen = self.names.get(call.key, self.clock_us()).inspect(
                self.clock_us(), queues=call.options["queues"]
            )
            for tell in self.executed:
                tell(call, seen)
            return seen
        if call.script == "tell":
            serial, record, keep = (call.options[one] for one in ("serial", "record", "keep"))
            if serial >= self.waits.get(call.id, (0,))[0]:
                self.waits[call.id] = serial, record, self.world.time + keep
            return ["told"]
        if call.script == "read":
            _, record, until = self.waits.get(call.id, (0, b"", 0.0))
            return ["read", record if self.world.time < until else b""]
        reply = self._run(call)
        self.world.log(Said(self.name, call, reply))
        for tell in self.executed:
            tell(call, reply)
        return reply

    def _run(self, call: Call) -> list[Any]:
        moment, options = self.clock_us(), call.options
        name = self.names.get(call.key, moment)
        self._keys[call.base] = call.key
        reply: Any
        if call.script == "acquire":
            reply, messages = name.acquire(moment, **options)
            if reply[0] == "gone":
                reply = ("gone",)
        elif call.script == "extend":
            reply, messages = name.extend(moment, call.id, **options)
        elif call.script == "leave" and call.record is not None:
            reply, messages = name.record_success(moment, call.id, **options)
        elif call.script == "leave":
            reply, messages = name.leave(moment, call.id, **options)
        elif call.script == "forget":
            known, messages = name.forget(moment)
            reply = ("forgot", known)
        else:
            broken, messages = name.break_(moment, **options)
            reply = ("broken", len(broken))
        for message in messages:
            self.published.append((message.word, message.id))
            listening = self.listening.get(message.client)
            if listening is not None:
                listening.reply((call.key, message))
        return [reply[0].encode(), *reply[1:]]

    def read_name(self, base: str) -> checkers.Name:
        """Return the records of a name, as the checkers know them."""
        key = self._keys.get(base)
        name = None if key is None else self.names.find(key)
        if name is None:
            return checkers.Name({}, {})
        # A named tuple's own constructor takes twice as long, and this is called for each command.
        holders = {id: _new(checkers.Record, _record(e)) for id, e in name.holders.items()}
        waiters = {id: _new(checkers.Waiter, _waiter(e)) for id, e in name.waiters.items()}
        return checkers.Name(holders, waiters)

    def read_record(self, base: str) -> tuple[str, bytes, int] | None:
        """Return the success on record: whose, its result, and until when it is kept."""
        key = self._keys.get(base)
        name = None if key is None else self.names.find(key)
        if name is None or name.record is None:
            return None
        return (*name.record, name.record_until)

    # -- what else goes on in it -------------------------------------------------------------------

    def sweep(self) -> None:
        """There is nothing to sweep: what is overdue blocks nobody."""

    def save(self) -> None:
        self.world.log(f"{self.name}: a snapshot is taken")
        self.snapshot = copy.deepcopy(self.names)

    def restart(self, data: str) -> None:
        if data == "older" and self.snapshot is not None:
            self.names = copy.deepcopy(self.snapshot)
        elif data != "kept":
            self.names = Names()
        if data != "kept":
            self.waits.clear()
        self.up = True
        if data != "kept":
            for tell in self.lost_data:
                tell()

    def flush_data(self) -> None:
        self.names = Names()
        self.waits.clear()
        for tell in self.lost_data:
            tell()

    def left(self) -> list[str]:
        """Return the names that somebody holds or waits for."""
        now_ms = self.now_ms()
        found = [(key.name, self.names.find(key)) for key in self.names]
        return [
            name
            for name, one in found
            if one is not None
            and any(now_ms < e.closed_until for e in (*one.holders.values(), *one.waiters.values()))
        ]


def _record(entry: Entry) -> tuple[Any, ...]:
    asked = entry.asked
    delay = entry.rest or asked.delay
    until = entry.hold_until if entry.began and not entry.rest else 0
    times = (entry.deadline, entry.length, delay)
    return (
        asked.id,
        _mode(asked),
        entry.token,
        *times,
        asked.owner,
        asked.client,
        asked.hold,
        until,
    )


def _waiter(entry: Entry) -> tuple[Any, ...]:
    asked = entry.asked
    place = entry.since  # another one when it queues again
    return (asked.id, _mode(asked), asked.owner, entry.deadline, entry.length, place)


_new: Any = tuple.__new__


class Line(Conn):
    """One connection whose messages are objects. ``heard`` and ``ended`` are its client's."""

    def __init__(self, network: Network, process: Process, path: Path) -> None:
        self.network = network
        self.world = network.world
        self.process = process
        self.path = path
        self.open = True
        self.server: Any = network.server
        self.stuck = self.lost = self.mute = False
        self.in_flight: deque[tuple[Any, float]] = deque()
        self.heard: Callable[[Any], None] = lambda _: None
        self.ended: Callable[[], None] = lambda: None
        self._last_out = self._last_in = 0.0
        self._held_out: deque[Any] = deque()
        self._held_in: deque[Any] = deque()
        network.connections.append(self)

    def send(self, call: Call) -> None:
        self.network.on_ask(call.id)
        if self.process.dead or not self.open or (self.mute and self.stuck):
            return
        self.in_flight.append((call, self.process.boot()))
        self._send_out(call)  # type: ignore[arg-type]

    def _serve(self, call: Any) -> None:
        if self.server is None or self.lost:
            return
        if call is None:
            self._close_server_end()
            return
        reply = self.server.run(self, call)
        share = self.network.duplicate_share
        if share and self.world.random.random() < share:
            self.world.log("network: that call arrives twice")
            server = self.network.server
            server.repeats = True
            self.server.run(self, call)
            server.repeats = False
        self.reply((call, reply))

    def reply(self, data: Any) -> None:
        if not self.mute and self.server is not None:
            self._send_in(data)

    def _receive(self, data: Any) -> None:
        if not self.open:
            return
        if data is None:
            self.open = False
            self._close_server_end()
            self.ended()
            return
        what, answer = data
        if isinstance(answer, Message):
            if answer.word == "broken":
                self.network.on_broken(answer.id, answer.token)
            elif answer.word == "recall" or answer.recalled:
                self.network.on_recalled(answer.id)
            if answer.word in ("look", "granted", "done"):
                for id in answer.id.split(","):
                    self.network.on_hint(self.process, id)
            self.heard(data)
            return
        call, sent = self.in_flight.popleft()
        assert call is what
        if call.script in ("acquire", "extend", "leave"):
            self.network.on_reply(self.process, call, sent, answer)
        elif call.script == "subscribe" and not isinstance(answer, Exception):
            self.network.on_listening(self.process)
        self.heard(data)

    def _close_server_end(self) -> None:
        server, self.server = self.server, None
        if server is not None:
            server.listening = {k: one for k, one in server.listening.items() if one is not self}
        if not self.open and self in self.network.connections:
            self.network.connections.remove(self)


class MachineNetwork(Network):
    """Connections of objects."""

    connection_class = Line


class MachineBackend:
    """A store's client across the simulated network.

    Mutable state: ``_line`` (of calls), ``_asked`` (what is in flight on it, in order: a future, and since
    when), ``_up``.
    """

    def __init__(self, network: Network, process: Process, label: str, **options: Any) -> None:
        self.capabilities = memory_backend.CAPABILITIES
        self.label = label
        self.failure: Exception | None = None
        self.further_at, self.answers_within = 0.0, LEAST
        self._network = network
        self._process = process
        self._retention = round(options["token_retention"] * 1000)
        self._listener: Notices | None = None
        self._line: Line | None = None
        self._asked: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._up = asyncio.Event()

    # -- life --------------------------------------------------------------------------------------

    async def run(self, listener: Notices, ready: Callable[[], None]) -> None:
        self._listener = listener
        listening = asyncio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_calling)
            tasks.start_soon(self._keep_listening, listening)
            await self._up.wait()
            await listening.wait()
            ready()

    async def _keep_calling(self) -> None:
        while True:
            line = await self._connect()
            self._line = line
            line.heard = self._on_reply
            self._up.set()
            self.failure = None
            self.further_at = now()
            if self._listener is not None:
                self._listener.on_look(None)
            try:
                await self._until_silent(line)
            finally:
                line.abandon()
                self._line = None
                self._up.clear()
                self.failure = BackendUnavailable("simulated: the connection is lost")
                asked, self._asked = self._asked, deque()
                for reply, _ in asked:
                    if not reply.done():
                        reply.set_exception(Unanswered("simulated: the connection was lost"))
                        reply.exception()

    async def _until_silent(self, line: Line) -> None:
        """Return when the connection is over, or has not answered for long."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        timer: asyncio.TimerHandle | None = None

        def end() -> None:
            if not over.done():
                over.set_result(None)

        def look() -> None:
            nonlocal timer
            # By what the client has sent. What a dead connection swallows, the network knows nothing of.
            age = now() - self._asked[0][1] if self._asked else _SILENCE / 2
            if age > _SILENCE:
                end()
            else:
                timer = loop.call_later(_SILENCE - age + 0.01, look)

        line.ended = end
        if not line.open:
            end()  # cut in the turn in which it came
        look()
        try:
            await over
        finally:
            if timer is not None:
                timer.cancel()

    async def _keep_listening(self, listening: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        while True:
            line = await self._connect()
            over: asyncio.Future[None] = loop.create_future()

            def end(over: asyncio.Future[None] = over) -> None:
                if not over.done():
                    over.set_result(None)

            timer = loop.call_later(_SILENCE, end)

            def ping(line: Line = line, end: Callable[[], None] = end) -> None:
                nonlocal timer
                line.send(Call("ping", Key("", "", "")))
                timer = loop.call_later(_SILENCE, end)

            def hear(data: Any, ping: Callable[[], None] = ping) -> None:
                nonlocal timer
                if not isinstance(data[1], Message):
                    listening.set()
                    timer.cancel()
                    timer = loop.call_later(1.0, ping)
                self._on_message(data)

            line.heard, line.ended = hear, end
            if not line.open:
                end()
            try:
                line.send(Call("subscribe", Key("", "", ""), self.label))
                await over
            finally:
                timer.cancel()
                line.abandon()

    def _on_message(self, data: Any) -> None:
        what, message = data
        listener = self._listener
        assert listener is not None
        if not isinstance(message, Message):
            if isinstance(what, Call) and what.script == "subscribe":
                listener.on_look(None)
        elif message.word == "granted":
            where = f"{what.kind}:{what.name}"
            listener.on_granted(message.id, message.token, where, message.recalled)
        elif message.word == "recall":
            listener.on_recalled(message.id)
        elif message.word == "look":
            listener.on_look(message.id)
        elif message.word == "done":
            for request_id in message.id.split(","):
                listener.on_look(request_id)
        else:
            listener.on_broken(message.id, message.token)

    async def _connect(self) -> Line:
        pause = 0.02
        while True:
            answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

            def answer(line: Any, answered: asyncio.Future[Any] = answered) -> None:
                if not answered.done():
                    answered.set_result(line)
                elif line is not None:
                    line.abandon()

            self._network.dial(self._process, answer)
            with anyio.move_on_after(_SILENCE):
                line: Line | None = await answered
                if line is not None:
                    return line
            answered.cancel()
            self.failure = BackendUnavailable("simulated: connection refused")
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.5)

    # -- calls -------------------------------------------------------------------------------------

    def _send(self, line: Line, call: Call) -> asyncio.Future[Any]:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not line.open:
            reply.set_exception(BackendUnavailable("simulated: no connection"))
            reply.exception()
            return reply
        self._asked.append((reply, now()))
        line.send(call)
        return reply

    def _on_reply(self, data: Any) -> None:
        reply, _ = self._asked.popleft()
        if reply.done():
            return
        if isinstance(data[1], Exception):
            reply.set_exception(data[1])
            reply.exception()
        else:
            reply.set_result(data[1])

    async def _wait_up(self) -> Line:
        with anyio.move_on_after(1.0):
            await self._up.wait()
        if self._line is None:
            raise BackendUnavailable("simulated: no connection")
        return self._line

    def _key(self, request: StoreRequest) -> Key:
        return Key(_PREFIX, request.kind, request.name)

    async def acquire(
        self, request: StoreRequest, *, wait: bool
    ) -> Granted | Waiting | Refused | Gone:
        line = self._line or await self._wait_up()
        request.sent_on = line
        sent = now()
        asked = Asked(
            request.id,
            request.terms.mode,
            request.terms.limit,
            request.owner,
            self.label,
            round(request.terms.ttl * 1000),
            round(request.terms.waiter_ttl * 1000),
            round(request.terms.lock_delay * 1000),
            round(request.terms.hold_at_least * 1000),
            request.begins,
            request.terms.resize,
            request.lingers,
            request.terms.note,
        )
        call = Call(
            "acquire", self._key(request), request.id,
            asked=asked, wait=wait, retention=self._retention,
        )  # fmt: skip
        try:
            reply = await self._send(line, call)
        except Unanswered:
            request.ambiguous = True
            raise
        request.sent_on = None
        word = reply[0].decode()
        if word == "done":
            return Refused("recorded", result=reply[1])
        if word in ("busy", "deadlock", "limit"):
            return Refused(word, *reply[1:])
        return self.outcome(word, reply, sent)

    @staticmethod
    def outcome(word: str, reply: list[Any], sent: float) -> Granted | Waiting | Gone:
        if word == "gone" and len(reply) == 1:
            return Gone("gone")
        found: Granted | Waiting | Gone = memory_backend._outcome((word, *reply[1:]), sent)
        return found

    def extend(
        self, batch: Sequence[tuple[StoreRequest, float]]
    ) -> Sequence[Awaitable[Granted | Waiting | Gone]]:
        return [_Outcome(self, *self._extend(request, length)) for request, length in batch]

    def _extend(self, request: StoreRequest, length: float) -> tuple[asyncio.Future[Any], float]:
        if self._line is None:
            reply = asyncio.get_running_loop().create_future()
            reply.set_exception(BackendUnavailable("simulated: no connection"))
            reply.exception()
            return reply, 0.0
        options = {
            "length": round(length * 1000),
            "begins": request.begins,
            "retention": self._retention,
        }
        call = Call("extend", self._key(request), request.id, **options)
        return self._send(self._line, call), now()

    def server_of(self, request: StoreRequest) -> object:
        return None

    def _leaving(self, line: Line, request: StoreRequest, lost: bool) -> Call:
        other = request.sent_on is not None and request.sent_on is not line
        marker = _MARKER if request.ambiguous or other else 0
        options: dict[str, Any] = {"marker": marker, "retention": self._retention}
        if request.end.record is not None:
            result, keep = request.end.record
            options |= {"result": result, "keep": round(keep * 1000)}
            return Call("leave", self._key(request), request.id, **options)
        options["end"] = request.end.word
        return Call("leave", self._key(request), request.id, **options)

    async def leave(
        self, request: StoreRequest, *, lost: bool = False, within: float | None = None
    ) -> Left:
        try:
            async with asyncio.timeout(within):
                line = self._line or await self._wait_up()
                reply = await self._send(line, self._leaving(line, request, lost))
        except TimeoutError:
            raise Unanswered("simulated: no answer in time") from None
        return Left(reply[0].decode(), *reply[1:])

    def leave_later(
        self,
        request: StoreRequest,
        done: Callable[[Left | BackendError], object],
        *,
        lost: bool = False,
    ) -> bool:
        if self._line is None:
            return False

        def on_reply(reply: asyncio.Future[Any]) -> None:
            error = reply.exception()
            if isinstance(error, BackendError):
                done(error)
            else:
                done(Left(reply.result()[0].decode(), *reply.result()[1:]))

        sent = self._send(self._line, self._leaving(self._line, request, lost))
        sent.add_done_callback(on_reply)
        return True

    async def leave_unknown(self, request_id: str, where: str, final: bool) -> Left:
        line = self._line or await self._wait_up()
        kind, _, name = where.partition(":")
        marker = _MARKER if final else 0
        options = {"end": "unused", "marker": marker, "retention": self._retention}
        reply = await self._send(
            line, Call("leave", Key(_PREFIX, kind, name), request_id, **options)
        )
        return Left(reply[0].decode(), *reply[1:])

    async def settle(self) -> None:
        pass

    def watch(self, request: StoreRequest, watching: bool) -> None:
        pass

    def announce(self, kind: str, name: str) -> None:
        pass

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        return changed

    async def inspect(self, kind: Kind, name: str) -> LockInfo:
        (info,) = await self.inspect_all(kind, [name])
        return info

    async def inspect_all(
        self, kind: Kind, names: Sequence[str], *, queues: bool = True
    ) -> list[LockInfo]:
        line = self._line or await self._wait_up()
        calls = [Call("inspect", Key(_PREFIX, kind, name), queues=queues) for name in names]
        sent = [self._send(line, call) for call in calls]
        return [_info(kind, name, await reply) for name, reply in zip(names, sent, strict=True)]

    async def tell_waits(self, serial: int, record: bytes, *, keep: float) -> None:
        line = self._line or await self._wait_up()
        options: dict[str, Any] = {"serial": serial, "record": record, "keep": keep}
        await self._send(line, Call("tell", Key("", "", ""), self.label, **options))

    async def waits_of(self, labels: Sequence[str]) -> dict[str, bytes]:
        line = self._line or await self._wait_up()
        sent = [self._send(line, Call("read", Key("", "", ""), label)) for label in labels]
        found = {label: (await reply)[1] for label, reply in zip(labels, sent, strict=True)}
        return {label: record for label, record in found.items() if record}

    async def names(self, match: str, kind: Kind = "lock") -> AsyncIterator[str]:
        nobody: tuple[str, ...] = ()
        for name in nobody:
            yield name

    async def break_lock(
        self, name: str, kind: Kind = "lock", tokens: frozenset[int] | None = None
    ) -> int:
        line = self._line or await self._wait_up()
        options = {"remember": _MARKER, "retention": self._retention}
        reply = await self._send(
            line, Call("break", Key(_PREFIX, kind, name), tokens=tokens, **options)
        )
        broken: int = reply[1]
        return broken

    async def forget(self, name: str) -> bool:
        line = self._line or await self._wait_up()
        reply = await self._send(line, Call("forget", Key(_PREFIX, "once", name)))
        return bool(reply[1])


def _info(kind: Kind, name: str, seen: Seen) -> LockInfo:
    holders, waiters = memory_backend._holders(seen), memory_backend._waiters(seen)
    closed = seen.closed / 1000
    return LockInfo(name, holders, waiters, seen.token, closed, seen.closed_places, kind)


class _Outcome:
    def __init__(self, backend: MachineBackend, reply: asyncio.Future[Any], sent: float) -> None:
        self._backend, self._reply, self._sent = backend, reply, sent

    async def _get(self) -> Granted | Waiting | Gone:
        reply = await self._reply
        return self._backend.outcome(reply[0].decode(), reply, self._sent)

    def __await__(self) -> Generator[Any, None, Granted | Waiting | Gone]:
        return self._get().__await__()


class MachineCheckers(Checkers):
    """The machine has no keys whose end could come early."""

    def _check_keys(self, base: str, after: checkers.Name, now: int) -> None:
        pass


class MachineSimulation(Simulation):
    """One seed on the machine."""

    def make_world(self) -> None:
        faults = tuple(name for name in self.style.faults if name not in _ONLY_REDIS)
        self.style = replace(self.style, faults=faults, notifies=False)
        server: Any = MachineServer(self.world)
        self.server = server
        self.network: Network = MachineNetwork(self.world, server)
        self.checkers: Checkers = MachineCheckers(
            self.world, server, forgetful=self.style.forgetful
        )

    def make_store(self, process: Process, label: str, **options: Any) -> Any:
        return MachineBackend(self.network, process, label, **options)

    def names_left(self) -> list[str]:
        server: Any = self.server
        left: list[str] = server.left()
        return left
