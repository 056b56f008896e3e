"""A server that says what a test tells it to, in the place of what a Redis would say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tests.listening import Listener
from tests.proxy import command_end, parse_command

#: What a sane server says to the commands of the handshake.
_SANE = {
    b"GET": b"$-1\r\n",
    b"PUBLISH": b":1\r\n",
    b"PING": b"+PONG\r\n",
    b"EXISTS": b":0\r\n",
    b"TIME": b"*2\r\n$1\r\n1\r\n$1\r\n1\r\n",
    b"EVALSHA": b"-NOSCRIPT No matching script.\r\n",
    b"EVAL": b":1\r\n",
    b"UNSUBSCRIBE": b"*3\r\n$11\r\nunsubscribe\r\n$-1\r\n:0\r\n",
}

Answer = Callable[[tuple[bytes, ...]], bytes | None]


class FakeServer:
    """Answers by `answer(command)` and, where that is None, as an empty Redis would.

    Everything that is subscribed to is confirmed; `say` sends bytes to those connections, as PUBLISH does.
    """

    def __init__(self) -> None:
        self.answer: Answer = lambda command: None
        self.commands: list[bytes] = []
        self._subscribed: set[asyncio.StreamWriter] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: Listener | None = None

    @property
    def url(self) -> str:
        assert self._listener is not None
        return f"redis://127.0.0.1:{self._listener.port}/0"

    def say(self, message: bytes) -> None:
        for writer in self._subscribed:
            writer.write(message)

    async def __aenter__(self) -> Self:
        self._listener = Listener(self._serve)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._listener is not None
        await self._listener.close()
        while self._writers:
            for writer in self._writers:
                writer.transport.abort()
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        unread = b""
        try:
            while data := await reader.read(65536):
                unread += data
                while (end := command_end(unread)) is not None:
                    command, unread = parse_command(unread[:end]), unread[end:]
                    writer.write(self._reply(command, writer))
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            self._subscribed.discard(writer)
            writer.close()

    def _reply(self, command: tuple[bytes, ...], writer: asyncio.StreamWriter) -> bytes:
        name = command[0].upper()
        self.commands.append(name)
        if name == b"PUBLISH":
            sizes = len(command[1]), command[1], len(command[2]), command[2]
            self.say(b"*3\r\n$7\r\nmessage\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % sizes)
        given = self.answer((name, *command[1:]))
        if given is not None:
            return given
        if name == b"SUBSCRIBE":
            self._subscribed.add(writer)
            channel = command[1]
            return b"*3\r\n$9\r\nsubscribe\r\n$%d\r\n%b\r\n:1\r\n" % (len(channel), channel)
        if name == b"PING" and writer in self._subscribed:
            return b"*2\r\n$4\r\npong\r\n$0\r\n\r\n"
        return _SANE.get(name, b"+OK\r\n")
