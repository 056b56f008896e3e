"""Proxies in front of members, and between them, that a test can cut without a word: nothing arrives,
nothing is closed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress

from ..listening import Listener

_READ = 65_536
#: Members tell each other who they are.
_FROM = re.compile(rb"X-Server-From: ([0-9a-f]+)", re.IGNORECASE)


class Cut:
    """A proxy to one port.

    Mutable state: ``cut`` (whether nothing gets through) and ``_open`` (its opposite, to wait for),
    ``_writers``. ``is_cut`` may cut single connections: it is asked with the number of the member that
    has opened one.
    """

    def __init__(self, port: int, target: int) -> None:
        self.port: int = port
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self._listener: Listener | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.is_cut: Callable[[bytes], bool] = lambda _: False

    async def __aenter__(self) -> Cut:
        self._listener = Listener(self._serve, self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        await self._listener.close()
        self._open.set()
        self.drop()
        while self._writers:
            await asyncio.sleep(0.001)

    def cut(self) -> None:
        """Let nothing through from now on."""
        self._open.clear()

    def heal(self) -> None:
        """Let everything through again, also what was sent meanwhile."""
        self._open.set()

    def drop(self) -> None:
        """Close every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with suppress(OSError):
                await self._carry(reader, writer)
        finally:
            writer.transport.abort()
            self._writers.discard(writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            sender = b""

            async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                nonlocal sender
                while data := await source.read(_READ):
                    if not sender and (found := _FROM.search(data)):
                        sender = found[1]
                    await self._open.wait()
                    while sender and self.is_cut(sender):
                        await asyncio.sleep(0.01)
                    sink.write(data)
                    await sink.drain()

            pumps = [
                asyncio.ensure_future(pump(reader, back)),
                asyncio.ensure_future(pump(there, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in pumps:
                    one.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            back.transport.abort()
