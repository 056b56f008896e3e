"""Streams of bytes between processes and servers, in a world's time.

A stream keeps its order in both directions, as TCP does. What a client wrote before it gave the stream up
may still arrive, also long after. A partition holds messages back; when it heals, they go on. Clients come
here by ``loop.create_connection`` and ``loop.getaddrinfo``: nothing of the library is replaced.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from ..network import Path
from ..world import Process, World


class Served(Protocol):
    """A server's side of one stream."""

    def received(self, data: bytes) -> None:
        """Bytes have come."""

    def ended(self) -> None:
        """The client has closed the stream."""


Accept = Callable[["Stream"], Served]


class Wire:
    """All streams of a world, the addresses at which servers listen, and the names of hosts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listening: dict[tuple[str, int], Accept] = {}
        #: Addresses by name; a name that is not here is its own address.
        self.names: dict[str, list[str]] = {}
        #: Between a process and an address.
        self.paths: dict[tuple[Process, str], Path] = {}
        self.streams: list[Stream] = []
        self.opened = 0
        #: How likely it is that what a client wrote comes after it has closed the stream, and how late.
        self.late_share, self.longest_late = 0.5, 3.0
        #: Told of each message that a process sends.
        self.on_send: Callable[[Process], None] = lambda _: None

    def path(self, process: Process, address: str) -> Path:
        path = self.paths.get((process, address))
        if path is None:
            path = self.paths[process, address] = Path(self.world)
        return path

    def paths_of(self, process: Process) -> list[Path]:
        return [path for (whose, _), path in self.paths.items() if whose is process]

    def streams_of(self, process: Process) -> list[Stream]:
        return [stream for stream in self.streams if stream.process is process]

    def released(self) -> None:
        """Some path is free again: what waited goes on."""
        for stream in list(self.streams):
            stream.go_on()

    def close(self, address: str) -> None:
        """Nothing listens there any more: all streams to it break."""
        for stream in list(self.streams):
            if stream.address == address:
                stream.break_off()

    # -- what loops call -----------------------------------------------------------------------------

    async def resolve(self, process: Process, host: str, port: int) -> list[tuple[Any, ...]]:
        """Look a name up, as ``getaddrinfo`` does."""
        found = self.names.get(host, [host])
        if not found:
            raise socket.gaierror(f"simulated: no address of {host}")
        kind = socket.SOCK_STREAM
        return [(socket.AF_INET, kind, 6, "", (address, port)) for address in found]

    async def connect(
        self, process: Process, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        """Open a stream; in a partition nothing ever answers."""
        address = self.names.get(host, [host])[0]
        path = self.path(process, address)
        answered: asyncio.Future[Stream | None] = process.loop.create_future()

        def answer(stream: Stream | None) -> None:
            if not answered.done():
                answered.set_result(stream)
            elif stream is not None:
                stream.transport.abort()

        def arrive() -> None:
            if path.out_blocked or path.in_blocked:
                return
            accept = self.listening.get((address, port))
            stream = None if accept is None else Stream(self, process, address, path)
            if stream is not None and accept is not None:
                stream.served = accept(stream)
            self.world.after(path.latency(), process.deliver, lambda: answer(stream))

        self.world.after(path.latency(), arrive)
        try:
            stream = await answered
        except asyncio.CancelledError:
            if answered.done() and not answered.cancelled() and (opened := answered.result()):
                opened.transport.abort()  # it was opened in the moment of the cancellation
            raise
        if stream is None:
            raise ConnectionRefusedError(f"simulated: nobody listens at {address}:{port}")
        protocol = factory()
        stream.begin(protocol)
        return stream.transport, protocol


class Stream:
    """Both ends of one stream.

    Mutable state: ``served`` (the server's end; None when closed), ``protocol`` (the client's end; None
    when closed), the last delivery each way, what a partition holds back, ``deaf`` and ``mute`` (what the
    client, and what the server says is lost from now on; nothing breaks by itself).
    """

    def __init__(self, wire: Wire, process: Process, address: str, path: Path) -> None:
        self.wire = wire
        self.world = wire.world
        self.process = process
        self.address = address
        self.path = path
        self.served: Served | None = None
        self.protocol: asyncio.Protocol | None = None
        self.transport = Transport(self)
        self.deaf = self.mute = False
        self._early: list[bytes | None] = []
        self._open = True
        self._last_out = self._last_in = 0.0
        self._held_out: deque[bytes | None] = deque()
        self._held_in: deque[bytes | None] = deque()
        wire.opened += 1
        self.serial = wire.opened
        wire.streams.append(self)

    @property
    def is_open(self) -> bool:
        """Whether the client's end is open."""
        return self._open

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        """The client takes its end."""
        assert isinstance(protocol, asyncio.Protocol)
        self.protocol = protocol
        protocol.connection_made(self.transport)
        early, self._early = self._early, []
        for data in early:
            self._deliver(data)

    # -- from the client to the server ---------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self.process.dead or not self._open:
            return
        self.wire.on_send(self.process)
        if not self.deaf:
            self._send_out(data)

    def _send_out(self, data: bytes | None) -> None:
        self._last_out = max(self._last_out, self.world.time + self.path.latency())
        self.world.at(self._last_out, self._arrive_out, data)

    def _arrive_out(self, data: bytes | None) -> None:
        if self.path.out_blocked or self._held_out:
            self._held_out.append(data)
        else:
            self._serve(data)

    def _serve(self, data: bytes | None) -> None:
        served = self.served
        if served is None:
            return
        if data is None:
            self.served = None
            served.ended()
            self._forget()
        else:
            served.received(data)

    def abandon(self) -> None:
        """The client closes its end. What it had sent is lost, or comes late."""
        if not self._open:
            return
        self._open = False
        random = self.world.random
        under_way = self._held_out or self._last_out > self.world.time
        if under_way and random.random() > self.wire.late_share:
            self._held_out.clear()
            self.deaf = True
            self.world.after(self.path.latency(), self._end_served)
        elif under_way:
            self.world.after(random.uniform(0.0, self.wire.longest_late), self._come_late)
        else:
            self._send_out(None)
        self.process.loop.call_soon(self._tell_lost, None)
        self.process.wake()

    def _come_late(self) -> None:
        while self._held_out:
            self._serve(self._held_out.popleft())
        self._serve(None)

    def _end_served(self) -> None:
        self._held_out.clear()
        self._serve(None)

    def die(self, *, power: bool) -> None:
        """The process is dead; with ``power`` the machine too, and the server is never told."""
        self._open = False
        self.protocol = None
        if not power:
            self._send_out(None)

    # -- from the server to the client ---------------------------------------------------------------

    def send(self, data: Any) -> None:
        """The server writes: bytes, or what a client reads that was cut above them."""
        if not self.mute and self.served is not None:
            self._send_in(data)

    def hang_up(self) -> None:
        """The server closes its end, behind what it has written."""
        if self.served is not None:
            self.served = None
            self._send_in(None)

    def break_off(self) -> None:
        """The stream breaks now: what is under way is lost, and both ends are told."""
        served, self.served = self.served, None
        self._held_in.clear()
        self._held_out.clear()
        if served is not None:
            served.ended()
        self.world.after(self.path.latency(), self._arrive_end)

    def _arrive_end(self) -> None:
        if self.path.in_blocked:
            self._held_in.append(None)
        else:
            self._hand_in(None)

    def _send_in(self, data: bytes | None) -> None:
        self._last_in = max(self._last_in, self.world.time + self.path.latency())
        self.world.at(self._last_in, self._arrive_in, data)

    def _arrive_in(self, data: bytes | None) -> None:
        if self.path.in_blocked or self._held_in:
            self._held_in.append(data)
        else:
            self._hand_in(data)

    def _hand_in(self, data: bytes | None) -> None:
        if self._open:
            self.process.deliver(lambda: self._deliver(data), self)

    def _deliver(self, data: bytes | None) -> None:
        if not self._open:
            return
        if self.protocol is None:
            self._early.append(data)
        elif data is None:
            self._open = False
            self._tell_lost(ConnectionResetError("simulated: the server has closed the connection"))
        else:
            self.protocol.data_received(data)

    def _tell_lost(self, reason: Exception | None) -> None:
        protocol, self.protocol = self.protocol, None
        self._forget()
        if protocol is not None:
            protocol.connection_lost(reason)

    def _forget(self) -> None:
        if not self._open and self.served is None and self in self.wire.streams:
            self.wire.streams.remove(self)

    def go_on(self) -> None:
        """The path is free again, in one direction or both."""
        while self._held_out and not self.path.out_blocked:
            self._serve(self._held_out.popleft())
        while self._held_in and not self.path.in_blocked:
            self._hand_in(self._held_in.popleft())


class Transport(asyncio.Transport):
    """The client's end, as protocols use it."""

    def __init__(self, stream: Stream) -> None:
        super().__init__({"peername": (stream.address, 0)})
        self._stream = stream

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._stream.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._stream.protocol is not None
        return self._stream.protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._stream.write(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self._stream.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return not self._stream.is_open

    def close(self) -> None:
        self._stream.abandon()

    def abort(self) -> None:
        self._stream.abandon()

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        raise NotImplementedError

    def resume_reading(self) -> None:
        pass
