"""A proxy between a client and a ZooKeeper server that loses one message, and the connection with it."""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Self

from aiodlock.backends.zookeeper import jute

from ..listening import Listener


@dataclass(eq=False)
class Loss:
    """What will be lost: the nth request of these opcodes from now on, or its answer."""

    what: Literal["request", "answer"]
    opcodes: frozenset[int]
    nth: int
    happened: asyncio.Event = field(default_factory=asyncio.Event)


class FrameProxy:
    """Listens on a loopback port and forwards to a server's.

    Mutable state: ``counted`` (requests seen, by opcode), ``refuses`` (new connections), and the plan.
    """

    def __init__(self, to: int) -> None:
        self._to = to
        self._plan: Loss | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: Listener | None = None
        self.refuses: bool = False
        self.port: int = 0
        self.opcodes: list[int] = []

    async def __aenter__(self) -> Self:
        self._listener = Listener(self._accept)
        self.port = self._listener.port
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        await self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports close their sockets in the next turn

    @property
    def url(self) -> str:
        return f"zookeeper://127.0.0.1:{self.port}"

    def lose(self, what: Literal["request", "answer"], *opcodes: int, nth: int = 1) -> Loss:
        """Lose the nth request of these opcodes, or the answer to it, and cut that connection."""
        self._plan = Loss(what, frozenset(opcodes), nth)
        return self._plan

    def cut(self) -> None:
        """Reset all connections."""
        for writer in self._writers:
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.transport.abort()
            return
        try:
            onward, out = await asyncio.open_connection("127.0.0.1", self._to)
        except BaseException:
            writer.transport.abort()
            raise
        self._writers |= {writer, out}
        lost: dict[int, Loss] = {}
        pumps = [
            asyncio.ensure_future(self._requests(reader, out, lost)),
            asyncio.ensure_future(self._answers(onward, writer, lost)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            writer.transport.abort()
            out.transport.abort()
            self._writers -= {writer, out}
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _requests(
        self, reader: asyncio.StreamReader, out: asyncio.StreamWriter, lost: dict[int, Loss]
    ) -> None:
        first = True
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                frame = await _frame(reader)
                if not first:
                    xid, opcode = struct.unpack_from(">ii", frame, 4)
                    self.opcodes.append(opcode)
                    plan = self._plan
                    if plan is not None and opcode in plan.opcodes:
                        plan.nth -= 1
                        if plan.nth == 0:
                            self._plan = None
                            if plan.what == "request":
                                plan.happened.set()
                                return
                            lost[xid] = plan
                first = False
                out.write(frame)
                await out.drain()

    async def _answers(
        self, reader: asyncio.StreamReader, out: asyncio.StreamWriter, lost: dict[int, Loss]
    ) -> None:
        first = True
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                frame = await _frame(reader)
                if not first:
                    (xid,) = struct.unpack_from(">i", frame, 4)
                    if xid in lost:
                        lost[xid].happened.set()
                        return
                first = False
                out.write(frame)
                await out.drain()


async def _frame(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(4)
    (length,) = struct.unpack(">i", head)
    return head + await reader.readexactly(length)


#: What changes something, or reads a queue, on the way to a lock and back.
ON_THE_WAY = (
    jute.MULTI,
    jute.GET_CHILDREN2,
    jute.GET_DATA,
    jute.CREATE,
    jute.CREATE_CONTAINER,
    jute.DELETE,
    jute.SYNC,
)
