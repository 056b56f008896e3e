"""A proxy between a client and a server that does to connections what networks do.

    async with FaultProxy(server.url) as proxy:
        lost = proxy.drop_reply(named("EVALSHA"))
        async with aiodlock.Client(proxy.url) as client:
            ...                          # the first script runs, its reply never arrives
            await lost.happened.wait()

It understands just enough RESP to know where a command and a reply begin and end, so it can lose
exactly one reply out of a pipeline. Everything it saw is counted, per connection and in all.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self
from urllib.parse import parse_qs, urlsplit

from .listening import Listener

_READ_SIZE = 65536
_SUBSCRIBING = frozenset(
    ["SUBSCRIBE", "UNSUBSCRIBE", "PSUBSCRIBE", "PUNSUBSCRIBE", "SSUBSCRIBE", "SUNSUBSCRIBE"]
)
_PUSHED = frozenset(word.encode() for word in [*map(str.lower, _SUBSCRIBING)]) | {
    b"message",
    b"pmessage",
    b"smessage",
}


@dataclass(frozen=True)
class Command:
    """One command as a client sent it.

    `connection` is the connection's number (from 0), `index` the command's number on it (from 0).
    """

    args: tuple[bytes, ...]
    raw: bytes
    connection: int
    index: int

    @property
    def name(self) -> str:
        return self.args[0].decode("latin-1").upper() if self.args else ""


Predicate = Callable[[Command], bool]


def named(name: str, nth: int = 1) -> Predicate:
    """Match the nth command of that name (from 1, counted from now on) and later ones."""
    seen = itertools.count(1)
    wanted = name.upper()
    return lambda command: command.name == wanted and next(seen) >= nth


def containing(part: bytes) -> Predicate:
    """Match commands whose bytes contain `part`."""
    return lambda command: part in command.raw


What = Literal["drop_command", "drop_reply", "hold_command", "hold_reply"]


@dataclass(eq=False)
class Fault:
    """Something that will happen to the next `times` commands that match.

    `happened` is set when it first did, `command` is the last one it happened to. `release()` lets
    go what a hold holds, and makes the fault match nothing any more. `answered` is set when the
    server has replied to a command that was held back, whether its client still listens or not.
    """

    what: What
    predicate: Predicate
    times: int = 1
    happened: asyncio.Event = field(default_factory=asyncio.Event)
    command: Command | None = None
    released: asyncio.Event = field(default_factory=asyncio.Event)
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    def release(self) -> None:
        self.times = 0
        self.released.set()

    def takes(self, command: Command) -> bool:
        if self.times <= 0 or not self.predicate(command):
            return False
        self.times -= 1
        return True

    def strike(self, command: Command) -> None:
        self.command = command
        self.happened.set()


class ProxyConnection:
    """One client's connection through the proxy, and what was seen on it."""

    def __init__(
        self,
        proxy: FaultProxy,
        number: int,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.number = number
        self.commands: Counter[str] = Counter()
        self.bytes_from_client = 0
        self.bytes_from_server = 0
        self.open = True
        self._proxy = proxy
        self._client_reader, self._client = client
        self._server: asyncio.StreamWriter | None = None
        # What to do to replies: (number of the ordinary reply, fault, command), oldest first.
        self._faulty_replies: deque[tuple[int, Fault, Command]] = deque()
        self._faulty_push: tuple[Fault, Command] | None = None
        self._commands_seen = 0
        self._replies_expected = 0
        self._replies_seen = 0
        self._subscribed = False
        self._holding = False
        self._swallowed = False

    @property
    def command_count(self) -> int:
        """How many commands the client has sent."""
        return self._commands_seen

    def __repr__(self) -> str:
        state = "open" if self.open else "closed"
        return f"<ProxyConnection {self.number} {state}, {self._commands_seen} commands>"

    def cut(self) -> None:
        """Abort towards the client, and towards the server unless a command is held back for it."""
        self.open = False
        self._client.transport.abort()
        if self._server is not None and not self._holding:
            self._server.transport.abort()

    async def run(self) -> None:
        try:
            reader, self._server = await self._proxy._connect()
        except OSError:
            self.cut()
            return
        commands = asyncio.create_task(self._pump_commands(self._server))
        replies = asyncio.create_task(self._pump_replies(reader))
        try:
            await asyncio.wait([commands, replies], return_when=asyncio.FIRST_COMPLETED)
            if self._holding and not commands.done():
                # The client's side is over, but a command is still "in the network".
                await commands
        finally:
            self._holding = False
            for task in (commands, replies):
                task.cancel()
            await asyncio.gather(commands, replies, return_exceptions=True)
            self.cut()
        for task in (commands, replies):
            if not task.cancelled() and (exc := task.exception()) is not None:
                raise exc

    async def _pump_commands(self, server: asyncio.StreamWriter) -> None:
        unread = bytearray()
        with suppress(ConnectionError):
            while data := await self._client_reader.read(_READ_SIZE):
                self.bytes_from_client += len(data)
                unread += data
                out = bytearray()
                while (end := command_end(unread)) is not None:
                    raw = bytes(unread[:end])
                    del unread[:end]
                    if raw.strip():
                        out += await self._forwarded(self._seen(raw), server, out)
                await self._proxy._flow.wait()
                if out and self._may_pass():
                    server.write(bytes(out))
                    await server.drain()

    async def _forwarded(
        self, command: Command, server: asyncio.StreamWriter, before: bytearray
    ) -> bytes:
        """Return what goes on to the server for this command, or wait, or cut."""
        fault = self._proxy._fault_for(command)
        if fault is not None and fault.what in ("drop_command", "hold_command"):
            server.write(bytes(before))  # what came first is not to suffer
            before.clear()
            fault.strike(command)
            if fault.what == "drop_command":
                await server.drain()
                raise ConnectionAbortedError
            self._holding = True
            await fault.released.wait()
            self._count_reply(command, fault)
            server.write(command.raw)
            await server.drain()
            if not self.open or self._client.transport.is_closing():
                # Closing now might take the command back out of the server's hands.
                await fault.answered.wait()
            self._holding = False
            return b""
        self._count_reply(command, fault)
        return command.raw

    def _seen(self, raw: bytes) -> Command:
        command = Command(parse_command(raw), raw, self.number, self._commands_seen)
        self._commands_seen += 1
        self.commands[command.name] += 1
        self._proxy._note(command)
        return command

    def _count_reply(self, command: Command, fault: Fault | None) -> None:
        if command.name in _SUBSCRIBING:
            # Confirmed by pushes (RESP3) or by what looks like one (RESP2), never by a reply.
            self._subscribed = True
            if fault is not None:
                self._faulty_push = (fault, command)
            return
        if fault is not None:
            self._faulty_replies.append((self._replies_expected, fault, command))
        self._replies_expected += 1

    async def _pump_replies(self, server: asyncio.StreamReader) -> None:
        unread = bytearray()
        late: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()
        delivery = asyncio.create_task(self._deliver(late))
        clock = asyncio.get_running_loop().time
        try:
            with suppress(ConnectionError):
                while data := await server.read(_READ_SIZE):
                    self.bytes_from_server += len(data)
                    unread += data
                    out = bytearray()
                    while (end := reply_end(unread)) is not None:
                        raw = bytes(unread[:end])
                        del unread[:end]
                        due = clock() + self._proxy._delay
                        fault = self._reply_fault(raw)
                        if fault is None:
                            out += raw
                            continue
                        found, command = fault
                        if found.what == "hold_command":
                            found.answered.set()
                            out += raw
                            continue
                        late.put_nowait((due, bytes(out)))
                        out.clear()
                        found.strike(command)
                        if found.what == "drop_reply":
                            late.put_nowait(None)
                            await delivery
                            return
                        await found.released.wait()
                        out += raw
                    late.put_nowait((clock() + self._proxy._delay, bytes(out)))
            late.put_nowait(None)
            await delivery
        finally:
            delivery.cancel()
            await asyncio.gather(delivery, return_exceptions=True)

    async def _deliver(self, late: asyncio.Queue[tuple[float, bytes] | None]) -> None:
        clock = asyncio.get_running_loop().time
        with suppress(ConnectionError):
            while (item := await late.get()) is not None:
                due, data = item
                if (wait := due - clock()) > 0:
                    await asyncio.sleep(wait)
                await self._proxy._flow.wait()
                if data and self._may_pass():
                    await self._write_to_client(data)

    async def _write_to_client(self, data: bytes) -> None:
        pause = self._proxy._trickle_pause
        if pause is None:
            self._client.write(data)
            await self._client.drain()
            return
        for byte in data:
            self._client.write(bytes([byte]))
            await self._client.drain()
            await asyncio.sleep(pause)

    def _reply_fault(self, raw: bytes) -> tuple[Fault, Command] | None:
        if self._is_push(raw):
            fault, self._faulty_push = self._faulty_push, None
            return fault
        number = self._replies_seen
        self._replies_seen += 1
        if self._faulty_replies and self._faulty_replies[0][0] == number:
            _, found, command = self._faulty_replies.popleft()
            return found, command
        return None

    def _is_push(self, raw: bytes) -> bool:
        if raw.startswith(b">"):
            return True
        # On RESP2 a push is an array whose first word says so: *3, $7, message, ...
        lines = raw.split(b"\r\n", 3)
        return self._subscribed and raw.startswith(b"*") and len(lines) > 2 and lines[2] in _PUSHED

    def _may_pass(self) -> bool:
        if self._proxy._swallowing:
            self._swallowed = True
        return not self._swallowed


class FaultProxy:
    """Listens on a loopback port and forwards to `upstream`, a `redis://` or `unix://` URL.

    All faults work on open and on future connections. `heal()` undoes the lasting ones (delay,
    refuse, swallow, stall, trickle).
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream)
        if self._upstream.scheme not in ("redis", "unix"):
            raise ValueError(f"a proxy needs a redis:// or unix:// URL, not {upstream!r}")
        self.connections: list[ProxyConnection] = []
        self.commands: Counter[str] = Counter()
        self.log: deque[Command] = deque(maxlen=10_000)
        self._listener: Listener | None = None
        self._port = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self._faults: list[Fault] = []
        self._delay = 0.0
        self._trickle_pause: float | None = None
        self._swallowing = False
        self._flow = asyncio.Event()
        self._flow.set()

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        """The `redis://` URL of the proxy, with the database of the upstream."""
        if self._upstream.scheme == "unix":
            database = parse_qs(self._upstream.query).get("db", ["0"])[0]
        else:
            database = self._upstream.path.strip("/") or "0"
        return f"redis://127.0.0.1:{self._port}/{database}"

    @property
    def accepted(self) -> int:
        """How many connections were made so far."""
        return len(self.connections)

    @property
    def open_connections(self) -> list[ProxyConnection]:
        return [connection for connection in self.connections if connection.open]

    @property
    def command_count(self) -> int:
        """How many commands were seen so far, on all connections, since forget()."""
        return self.commands.total()

    def forget(self) -> None:
        """Set the counts of commands and the log back; connections keep their own."""
        self.commands.clear()
        self.log.clear()

    # Once: to the next command that matches.

    def drop_reply(self, predicate: Predicate, *, times: int = 1) -> Fault:
        """Let the server run the command, then cut that connection instead of replying."""
        return self._plan("drop_reply", predicate, times)

    def drop_command(self, predicate: Predicate, *, times: int = 1) -> Fault:
        """Cut that connection instead of forwarding the command."""
        return self._plan("drop_command", predicate, times)

    def hold_command(self, predicate: Predicate, *, times: int = 1) -> Fault:
        """Keep the command back until `release()`, then forward it: even when the client is gone.

        So a late duplicate is made: hold, cut(), let the client send again, release.
        """
        return self._plan("hold_command", predicate, times)

    def hold_reply(self, predicate: Predicate, *, times: int = 1) -> Fault:
        """Let the server run the command, and keep its reply (and later ones) until `release()`."""
        return self._plan("hold_reply", predicate, times)

    drop_replies_after = drop_reply

    # Lasting: until heal().

    def delay(self, seconds: float) -> None:
        """Deliver every reply that much later; replies do not wait for each other."""
        self._delay = seconds

    def trickle(self, pause: float = 0.0) -> None:
        """Deliver replies byte by byte, with a pause after each."""
        self._trickle_pause = pause

    def half_open(self) -> None:
        """Swallow everything, both ways, without closing; also on connections made from now on."""
        self._swallowing = True

    def stall(self) -> None:
        """Deliver nothing, both ways, until heal(); then everything, as TCP does."""
        self._flow.clear()

    async def refuse(self) -> None:
        """Refuse new connections (nothing listens); open ones live on."""
        if self._listener is not None:
            listener, self._listener = self._listener, None
            await listener.close()

    async def accept(self) -> None:
        """Accept new connections again, on the same port."""
        if self._listener is None:
            self._listener = Listener(self._accepted, self._port)
            self._port = self._listener.port

    def lead_to(self, upstream: str) -> None:
        """Forward connections that are accepted from now on to another server."""
        self._upstream = urlsplit(upstream)

    async def heal(self) -> None:
        """End delay, trickle, half_open, stall and refuse.

        Connections that lost bytes in half_open() are cut: nothing sensible can follow on them.
        """
        self._delay = 0.0
        self._trickle_pause = None
        self._swallowing = False
        self._flow.set()
        for connection in self.open_connections:
            if connection._swallowed:
                connection.cut()
        await self.accept()

    def cut(self) -> int:
        """Abort all open connections at once; return how many there were."""
        victims = self.open_connections
        for connection in victims:
            connection.cut()
        return len(victims)

    async def __aenter__(self) -> Self:
        await self.accept()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.refuse()
        for fault in self._faults:
            fault.release()
        self._flow.set()
        self.cut()
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self.connections:
            connection._holding = False
            connection.cut()
        await asyncio.sleep(0)  # aborted transports close their sockets in the next turn
        for result in results:
            if isinstance(result, Exception):
                raise result

    def _plan(self, what: What, predicate: Predicate, times: int) -> Fault:
        fault = Fault(what, predicate, times)
        self._faults.append(fault)
        return fault

    def _fault_for(self, command: Command) -> Fault | None:
        return next((fault for fault in self._faults if fault.takes(command)), None)

    def _note(self, command: Command) -> None:
        self.commands[command.name] += 1
        self.log.append(command)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = ProxyConnection(self, next(self._numbers), (reader, writer))
        self.connections.append(connection)
        task = asyncio.get_running_loop().create_task(connection.run(), name="fault-proxy")
        # Kept until __aexit__ when it failed, so that a fault of the proxy itself fails the test.
        self._tasks.add(task)
        task.add_done_callback(self._forget_if_fine)

    def _forget_if_fine(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            self._tasks.discard(task)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._upstream.scheme == "unix":
            return await asyncio.open_unix_connection(self._upstream.path)
        return await asyncio.open_connection(
            self._upstream.hostname or "127.0.0.1", self._upstream.port or 6379
        )


def parse_command(raw: bytes) -> tuple[bytes, ...]:
    """Split one whole command, an array of bulk strings or an inline line, into its words."""
    if not raw.startswith(b"*"):
        return tuple(raw.split())
    args: list[bytes] = []
    count, at = _number_line(raw, 0) or (0, len(raw))
    for _ in range(count):
        line = _number_line(raw, at)
        assert line is not None
        length, start = line
        args.append(raw[start : start + length])
        at = start + length + 2
    return tuple(args)


def command_end(buffer: bytes | bytearray) -> int | None:
    """Return where the first command in `buffer` ends, or None when it is not all there."""
    if buffer.startswith(b"*"):
        return reply_end(buffer)
    end = buffer.find(b"\n")
    return end + 1 if end >= 0 else None


def reply_end(buffer: bytes | bytearray, at: int = 0) -> int | None:
    """Return where the RESP2 or RESP3 value at `at` ends, or None when it is not all there."""
    end: int | None = at
    values = 1
    while values > 0:
        assert end is not None
        line_end = buffer.find(b"\r\n", end)
        if line_end < 0:
            return None
        kind = buffer[end : end + 1]
        values -= 1
        if kind in (b"$", b"!", b"=", b"*", b"~", b">", b"%", b"|"):
            count = int(buffer[end + 1 : line_end])
            end = line_end + 2
            if kind in (b"$", b"!", b"="):
                end += count + 2 if count >= 0 else 0
            elif kind == b"%":
                values += 2 * count
            elif kind == b"|":
                values += 2 * count + 1  # an attribute stands before the value it belongs to
            else:
                values += max(count, 0)
        else:
            end = line_end + 2
        if end > len(buffer):
            return None
    return end


def _number_line(raw: bytes, at: int) -> tuple[int, int] | None:
    """Return the number after the type byte at `at`, and where the next line starts."""
    end = raw.find(b"\r\n", at)
    return (int(raw[at + 1 : end]), end + 2) if end >= 0 else None
