"""Where Redis's clients are cut: a connection of redis-py is dialled in the world, and nobody logs in.

Above it, all is the library's: links, wires, subscriptions, the bytes of commands and of answers.
"""

from __future__ import annotations

import asyncio
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from aiodlock.backends.redis.source import Source


class Dialled:
    """As much of a connection of redis-py as the library uses."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._reader: Any = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def is_connected(self) -> bool:
        return self._writer is not None

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            transport, _ = await loop.create_connection(lambda: protocol, self._host, self._port)
        except OSError as refused:
            raise RedisConnectionError(str(refused)) from refused
        self._reader = reader
        self._writer = asyncio.StreamWriter(transport, protocol, reader, loop)

    async def read_response(self) -> None:
        raise AssertionError("nobody logs in")

    async def disconnect(self, nowait: bool = False) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = self._reader = None


def make_connection(source: Source) -> Any:
    """Stand in for ``Source.make_connection``."""
    return Dialled(str(source._kwargs["host"]), int(source._kwargs["port"]))
