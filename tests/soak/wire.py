"""A proxy that knows no protocol: what a network does to bytes, in front of any server.

Its faults have the names of those of `proxy.FaultProxy`, which knows Redis's protocol.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Literal, Self

from ..listening import Listener

_READ = 65_536

Way = Literal["there", "back"]


class Wire:
    """Listens on a port of a loopback address and forwards to another one. Faults work on all connections.

    Mutable state: ``_links`` (open connections), ``_losses`` (chunks still to be lost, by way), and what
    lasts until `heal`: ``_flow``, ``_delay``, ``_pause``, ``_swallowing``, ``_listener`` (None: refusing).
    """

    def __init__(self, target: int, port: int = 0, *, host: str = "127.0.0.1") -> None:
        self.port: int = port
        self.target = target
        self.host = host
        self._listener: Listener | None = None
        self._links: set[_Link] = set()
        self._losses: dict[Way, int] = {"there": 0, "back": 0}
        self._flow = asyncio.Event()
        self._flow.set()
        self._delay = 0.0
        self._pause: float | None = None
        self._swallowing = False

    async def __aenter__(self) -> Self:
        self._accept()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()
        self._flow.set()
        self.cut()
        while self._links:
            self.cut()
            await asyncio.sleep(0.001)

    def cut(self) -> None:
        """Reset all connections."""
        for link in self._links:
            link.cut()

    def lose_commands(self, times: int) -> None:
        """Lose what is sent next, and the connection with it."""
        self._losses["there"] = times

    def lose_replies(self, times: int) -> None:
        """Lose what is answered next, and the connection with it."""
        self._losses["back"] = times

    def delay(self, seconds: float) -> None:
        """Deliver answers that much later."""
        self._delay = seconds

    def trickle(self, pause: float = 0.0) -> None:
        """Deliver answers byte by byte."""
        self._pause = pause

    def half_open(self) -> None:
        """Swallow everything, both ways, and close nothing."""
        self._swallowing = True

    def stall(self) -> None:
        """Deliver nothing until `heal`; then everything."""
        self._flow.clear()

    async def refuse(self) -> None:
        """Refuse new connections; open ones live on."""
        if self._listener is not None:
            listener, self._listener = self._listener, None
            await listener.close()

    async def heal(self) -> None:
        """End what lasts. Connections that lost bytes are cut."""
        self._delay, self._pause, self._swallowing = 0.0, None, False
        self._losses = {"there": 0, "back": 0}
        self._flow.set()
        for link in self._links:
            if link.swallowed:
                link.cut()
        self._accept()

    def _accept(self) -> None:
        if self._listener is None:
            self._listener = Listener(self._serve, self.port, host=self.host)
            self.port = self._listener.port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(writer)
        self._links.add(link)
        try:
            with suppress(OSError):
                onward, link.out = await asyncio.open_connection("127.0.0.1", self.target)
                there = asyncio.ensure_future(self._pump(link, reader, link.out, "there"))
                back = asyncio.ensure_future(self._pump(link, onward, writer, "back"))
                try:
                    await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in (there, back):
                        pump.cancel()
                    await asyncio.gather(there, back, return_exceptions=True)
        finally:
            link.cut()
            self._links.discard(link)

    async def _pump(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(_READ):
                if self._losses[way]:
                    self._losses[way] -= 1
                    return
                if way == "back" and self._delay:
                    await asyncio.sleep(self._delay)
                await self._flow.wait()
                link.swallowed |= self._swallowing
                if link.swallowed:
                    continue
                pieces = [data]
                if way == "back" and self._pause is not None:
                    pieces = [data[at : at + 1] for at in range(len(data))]
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    if self._pause is not None:
                        await asyncio.sleep(self._pause)


class _Link:
    """One connection on its way through."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.out: asyncio.StreamWriter | None = None
        #: Bytes of it were swallowed: nothing sensible can follow.
        self.swallowed: bool = False

    def cut(self) -> None:
        self.writer.transport.abort()
        if self.out is not None:
            self.out.transport.abort()
