"""Connections whose bytes take their time, wait behind a partition, or come when nobody wants them.

A connection keeps its order in both directions, as TCP does; different connections overtake each other.
What a client wrote before it gave a connection up may still arrive, also long after: that is the late
duplicate which the protocol has to refuse.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import hiredis
from redis.asyncio import ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError

from aiodlock.backends.redis import Source

from .server import Command, SimServer, SimSocket, words_in
from .world import Process, World

_NOTHING = False
_BROKEN = re.compile(rb"broken \S+ (\S+) (\d+)")
_HINT = re.compile(rb"(?:look|granted|done) \S+ (\S+)")
#: The client's own channel is subscribed to: what was said meanwhile is lost.
_LISTENS = re.compile(rb"\bsubscribe\r\n\$\d+\r\naiodlock:2:client:")
#: A message of its own, or the notice of a grant that is recalled at once.
_RECALLED = re.compile(rb"recall \S+ (\S+) \d|granted \S+ (\S+) \d+r")


class Path:
    """What lies between one machine and the server."""

    def __init__(self, world: World) -> None:
        self._random = world.random
        self.usual = self._random.uniform(0.0001, 0.002)
        #: How likely a message is to be slow, and how slow then.
        self.slow_share = 0.0
        self.slow = 0.0
        #: Nothing passes in this direction, and waits.
        self.out_blocked = False
        self.in_blocked = False

    def latency(self) -> float:
        if self.slow_share and self._random.random() < self.slow_share:
            return self._random.uniform(0.0, self.slow)
        return self.usual * (0.5 + 1.5 * self._random.random())

    def calm(self) -> None:
        self.slow_share = self.slow = 0.0
        self.out_blocked = self.in_blocked = False


class Network:
    """Every connection there is. ``late``: how likely abandoned messages come through after all."""

    connection_class: type[Conn]

    def __init__(self, world: World, server: SimServer) -> None:
        self.world = world
        self.server = server
        self.paths: dict[Process, Path] = {}
        self.connections: list[Conn] = []
        self.late_share = 0.5
        self.longest_late = 5.0
        self.duplicate_share = 0.0
        self.stalled_until = 0.0
        #: Told of each reply that reaches a client: whose, to what, sent when (by its clock), the reply.
        self.on_reply: Callable[[Process, Command, float, Any], None] = lambda *_: None
        #: Told which grants reach a client as broken: the request's id, and the token.
        self.on_broken: Callable[[str, int], None] = lambda *_: None
        #: Told which requests a client hears are recalled: the request's id.
        self.on_recalled: Callable[[str], None] = lambda _: None
        #: Told who hears that a request should ask, or was granted; and for which request a client asks.
        self.on_hint: Callable[[Process, str], None] = lambda *_: None
        self.on_ask: Callable[[str], None] = lambda _: None
        #: Told whose client listens (again) from now on.
        self.on_listening: Callable[[Process], None] = lambda _: None
        #: Told of what reaches a client on a connection that subscribes.
        self.on_message: Callable[[bytes], None] = lambda _: None

    def path(self, process: Process) -> Path:
        path = self.paths.get(process)
        if path is None:
            path = self.paths[process] = Path(self.world)
        return path

    def released(self, process: Process | None = None) -> None:
        """A partition has healed: what waited goes on."""
        for conn in list(self.connections):
            if process is None or conn.process is process:
                conn.go_on()

    def connections_of(self, process: Process) -> list[Conn]:
        return [conn for conn in self.connections if conn.process is process]

    def stall(self, until: float) -> None:
        """The server reads nothing until then."""
        self.stalled_until = max(self.stalled_until, until)
        self.world.at(self.stalled_until, self.released)

    def stop_server(self) -> None:
        self.server.up = False
        for conn in list(self.connections):
            conn.cut_by_server()

    def dial(self, process: Process, answer: Callable[[Conn | None], None]) -> None:
        """Open a connection; ``answer`` gets None when it is refused, and nothing in a partition."""
        path = self.path(process)
        there = path.latency()

        def arrive() -> None:
            if path.out_blocked or path.in_blocked:
                return
            conn = self.connection_class(self, process, path) if self.server.up else None
            self.world.after(path.latency(), process.deliver, lambda: answer(conn))

        self.world.after(there, arrive)


class Conn:
    """Both ends of one connection.

    Mutable state: ``open`` (the client's end), ``socket`` (the server's end, None when closed), the times
    of the last delivery each way (order), what is held back by a partition, and the commands in flight.
    """

    #: By how much what comes back takes longer than on other connections of the same process.
    behind = 0.0

    def __init__(self, network: Network, process: Process, path: Path) -> None:
        self.network = network
        self.world = network.world
        self.process = process
        self.path = path
        self.open = True
        self.transport: SimTransport | None = None
        self.socket: SimSocket | None = SimSocket(network.server, self.reply)
        #: Requests go no further, for now; requests, or replies, get lost. Nothing breaks by itself.
        self.stuck = False
        self.lost = False
        self.mute = False
        self._sent = hiredis.Reader(notEnoughData=_NOTHING)
        self._heard = hiredis.Reader(notEnoughData=_NOTHING)
        self.in_flight: deque[tuple[Command, float]] = deque()
        self._subscribes = False
        self._last_out = self._last_in = 0.0
        self._held_out: deque[list[Command] | None] = deque()
        self._held_in: deque[bytes | None] = deque()
        network.connections.append(self)

    # -- from the client to the server -------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """The client sends. None of it is lost unless the connection is."""
        if self.process.dead or not self.open:
            return
        if self.mute and self.stuck:
            return  # cut, and not yet told
        self._sent.feed(data)
        commands: list[Command] = []  # of which these bytes are the last ones
        while (fields := self._sent.gets()) is not _NOTHING:
            command = Command(fields)
            commands.append(command)
            self.network.on_ask(command.id)
            self._subscribes = self._subscribes or command.name == b"SUBSCRIBE"
            if not self._subscribes:
                self.in_flight.append((command, self.process.boot()))
        self._send_out(commands)

    def _send_out(self, data: list[Command] | None) -> None:
        self._last_out = max(self._last_out, self.world.time + self.path.latency())
        self.world.at(self._last_out, self._arrive_out, data)

    def _arrive_out(self, data: list[Command] | None) -> None:
        if self._is_held_back() or self._held_out:
            self._held_out.append(data)
        else:
            self._serve(data)

    def _is_held_back(self) -> bool:
        stalled = self.world.time < self.network.stalled_until
        return self.stuck or self.path.out_blocked or stalled

    def _serve(self, data: list[Command] | None) -> None:
        socket = self.socket
        if socket is None or self.lost:
            return
        if data is None:
            self._close_server_end()
            return
        together = b""
        for command in data:
            reply = self.network.server.run(socket, command)
            if command.name == b"GET" and command.fields[1].endswith(b":versions"):
                together = reply or b""  # it comes with the next reply, as it was asked for
                continue
            share = self.network.duplicate_share
            if share and command.fields[0] == b"EVALSHA" and self.world.random.random() < share:
                self.world.log("network: that command arrives twice")
                self.network.server.repeats = True
                self.network.server.run(socket, command)
                self.network.server.repeats = False
            if reply is not None:
                self.reply(together + reply)
                together = b""

    def abandon(self) -> None:
        """The client's end is closed. What it had sent and is still under way is lost, or comes late."""
        if not self.open:
            return
        self.open = False
        self._end_out()

    def _end_out(self) -> None:
        under_way = self._held_out or self._last_out > self.world.time
        if not under_way:
            self._send_out(None)
        elif self.world.random.random() < self.network.late_share:
            self.stuck = True
            late = self.world.random.uniform(0.0, self.network.longest_late)
            self.world.log(
                f"network: what {self.process} sent comes {late:.3f} s after its connection"
            )
            self.world.after(late, self._come_late)
        else:
            self.lost = True
            self._held_out.clear()
            self.world.after(self.path.latency(), self._close_server_end)

    def _come_late(self) -> None:
        self.stuck = False
        while self._held_out:
            self._serve(self._held_out.popleft())
        self._close_server_end()

    # -- from the server to the client -------------------------------------------------------------

    def reply(self, data: bytes) -> None:
        if self.mute or self.socket is None:
            return
        self._send_in(data)

    def _send_in(self, data: bytes | None) -> None:
        there = self.path.latency() + self.behind
        self._last_in = max(self._last_in, self.world.time + there)
        self.world.at(self._last_in, self._arrive_in, data)

    def _arrive_in(self, data: bytes | None) -> None:
        if self.path.in_blocked or self._held_in:
            self._held_in.append(data)
        else:
            self.process.deliver(partial(self._receive, data), self)

    def _receive(self, data: bytes | None) -> None:
        transport = self.transport
        if not self.open or transport is None:
            return
        if data is None:
            self._lost(ConnectionResetError("simulated"))
            return
        if self._subscribes:
            self.network.on_message(data)
            for id, token in _BROKEN.findall(data):
                self.network.on_broken(id.decode(), int(token))
            for one, other in _RECALLED.findall(data):
                self.network.on_recalled((one or other).decode())
            if _LISTENS.search(data):
                self.network.on_listening(self.process)
            for ids in _HINT.findall(data):
                for id in ids.decode().split(","):
                    self.network.on_hint(self.process, id)
        else:
            self._heard.feed(data)
            while (reply := self._heard.gets()) is not _NOTHING:
                command, sent = self.in_flight.popleft()
                self.network.on_reply(self.process, command, sent, words_in(command, reply))
        transport.protocol.data_received(data)

    def _lost(self, reason: Exception) -> None:
        if self.open and self.transport is not None:
            self.open = False
            self._close_server_end()
            self.transport.protocol.connection_lost(reason)

    # -- faults ------------------------------------------------------------------------------------

    def go_on(self) -> None:
        while self._held_out and not self._is_held_back():
            self._serve(self._held_out.popleft())
        while self._held_in and not self.path.in_blocked:
            self.process.deliver(partial(self._receive, self._held_in.popleft()), self)

    def cut(self) -> None:
        """A reset somewhere in between: both ends learn it; of what is under way a part comes through."""
        self._end_out()
        self.mute = True
        self._held_in.clear()
        self.process.deliver(lambda: self._receive(None), self)

    def cut_by_server(self) -> None:
        self._close_server_end()
        self._send_in(None)

    def close_by_kernel(self) -> None:
        """The process is gone; its kernel sends what was written, and the end."""
        self.open = False
        self._send_out(None)

    def _close_server_end(self) -> None:
        socket, self.socket = self.socket, None
        if socket is not None:
            fake = socket._server
            socket._cleanup(fake)
            if socket in fake.sockets:
                fake.sockets.remove(socket)
        if not self.open and self in self.network.connections:
            self.network.connections.remove(self)


Network.connection_class = Conn


class SimTransport(asyncio.Transport):
    """The client's end, as asyncio and the library's wire know it."""

    def __init__(self, conn: Conn, protocol: asyncio.BaseProtocol) -> None:
        super().__init__({"peername": (conn.network.server.name, 6379)})
        self._conn = conn
        self.protocol: Any = protocol
        conn.transport = self

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol  # type: ignore[no-any-return]

    def resume_reading(self) -> None:
        pass

    def write(self, data: Any) -> None:
        self._conn.write(bytes(data))

    def is_closing(self) -> bool:
        return not self._conn.open

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        self._conn.abandon()


class SimConnection:
    """As much of a redis-py connection as the library uses: it connects, and has a StreamWriter."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process
        self._reader: Any = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def is_connected(self) -> bool:
        return self._writer is not None

    async def connect(self) -> None:
        loop = self._process.loop
        answered: asyncio.Future[Conn | None] = loop.create_future()

        def answer(conn: Conn | None) -> None:
            if not answered.done():
                answered.set_result(conn)
            elif conn is not None:
                conn.abandon()

        self._network.dial(self._process, answer)
        conn = await answered
        if conn is None:
            raise RedisConnectionError("simulated: connection refused")
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport = SimTransport(conn, protocol)
        self._reader = reader
        self._writer = asyncio.StreamWriter(transport, protocol, reader, loop)

    async def read_response(self) -> None:
        raise AssertionError("nobody logs in")

    async def disconnect(self, nowait: bool = False) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = self._reader = None


class SimSource(Source):
    """Where the simulated server is, for the clients of one process."""

    def __init__(self, network: Network, process: Process) -> None:
        super().__init__(ConnectionPool(), "simulated")
        self._network = network
        self._process = process

    async def look_up(self) -> None:
        """There is no name."""

    def make_connection(self) -> Any:
        return SimConnection(self._network, self._process)
