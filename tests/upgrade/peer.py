"""A client in a process of its own, of whichever aiodlock its Python has. Does what standard input says.

Each line in is a JSON object: an ``id``, what to ``do``, and the arguments of that method of ``Peer``. The
line out that answers it has the ``id`` and a ``value`` or an ``error``. Calls run side by side.
Releases that are older than this file run it, so it uses what 0.1.0 had.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import aiodlock


class Peer:
    """Mutable state: the client, its leases by their labels, what bodies wait for, whether work is to end,
    and the running calls."""

    def __init__(self) -> None:
        self._client: aiodlock.Client | None = None
        self._leases: dict[str, aiodlock.Lease] = {}
        self._gates: dict[str, asyncio.Event] = {}
        self._finishes = False
        self.calls: dict[int, asyncio.Task[None]] = {}

    @property
    def client(self) -> aiodlock.Client:
        assert self._client is not None
        return self._client

    # -- what can be asked for -------------------------------------------------------------------

    async def hello(self) -> dict[str, str]:
        return {"file": str(aiodlock.__file__), "version": version("aiodlock")}

    async def enter(self, source: str | list[str], options: dict[str, Any]) -> None:
        await self.leave()
        client = aiodlock.Client(source, **options)
        await client.__aenter__()
        self._client = client

    async def leave(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.__aexit__(None, None, None)
        self._leases.clear()
        self._gates.clear()

    async def acquire(self, label: str, name: str, **options: Any) -> int:
        lease = await self._described(name, **options).acquire()
        self._leases[label] = lease
        return lease.token

    async def release(self, label: str) -> None:
        await self._leases.pop(label).release()

    async def state(self, label: str) -> dict[str, Any]:
        lease = self._leases[label]
        reason = None if lease.lost is None else lease.lost.reason
        return {"held": lease.held, "lost": reason, "sequencer": lease.sequencer}

    async def wait_lost(self, label: str) -> str:
        return (await self._leases[label].wait_lost()).reason

    async def body(self, label: str, name: str, inner: str = "", **options: Any) -> int:
        """Hold until `open` is called; then take the inner name, too, if there is one."""
        async with self._described(name, **options) as lease:
            await self._gate(label).wait()
            if inner:
                async with self.client.lock(inner):
                    pass
        return int(lease.token)

    async def once(self, label: str, name: str, result: str, raw: bool, **options: Any) -> Any:
        """Return whether it was first, and the result on record."""
        async with self.client.once(name, **options) as once:
            if once.first:
                await self._gate(label).wait()
                once.result = result.encode() if raw else result
        found = once.result
        return [once.first, type(found).__name__, found.decode() if raw else found]  # type: ignore[union-attr]

    async def keeps_records(self) -> None:
        """Raise if the store keeps none."""
        self.client.once("name", keep=1)

    async def lead(self, label: str, name: str, value: str) -> None:
        async with self.client.election(name).lead(value):
            await self._gate(label).wait()

    async def leader(self, name: str) -> str:
        leaders = self.client.election(name).observe()
        try:
            return await anext(leaders)
        finally:
            await leaders.aclose()

    async def finish(self) -> None:
        self._finishes = True

    async def open(self, label: str) -> None:
        self._gate(label).set()

    async def cancel(self, call: int) -> None:
        self.calls[call].cancel()

    async def inspect(self, name: str, kind: Any = "lock") -> dict[str, Any]:
        return dataclasses.asdict(await self.client.inspect(name, kind=kind))

    async def listed(self, match: str) -> list[str]:
        return [info.name async for info in self.client.locks(match)]

    async def break_lock(self, name: str) -> int:
        return await self.client.break_lock(name)

    async def check_sequencer(self, sequencer: str) -> bool:
        return await self.client.check_sequencer(sequencer)

    async def forget(self, name: str) -> bool:
        return await self.client.forget(name)

    async def work(self, journal: str, names: list[str], tasks: int, seed: int, ttl: float) -> int:
        """Take turns on the names until `finish` is called, and interrupt a third; note who was in when."""
        rng = random.Random(seed)
        lines = os.open(journal, os.O_WRONLY | os.O_APPEND)
        turns = 0

        async def turn(name: str) -> None:
            nonlocal turns
            mode = rng.choice(["read", "write", "write"])
            async with self._described(name, mode=mode, ttl=ttl) as lease:
                note(lines, "in", name, lease)
                try:
                    await asyncio.sleep(rng.random() * 0.01)
                finally:
                    note(lines, "out" if lease.held else "lost", name, lease)
                turns += 1

        async def worker() -> None:
            while not self._finishes:
                one = asyncio.create_task(turn(rng.choice(names)))
                await asyncio.wait([one], timeout=rng.choice([rng.random() * 0.05, None, None]))
                one.cancel()
                await asyncio.wait([one])
                error = None if one.cancelled() else one.exception()
                if error is not None and not isinstance(error, aiodlock.LockLost):
                    raise error

        workers = [asyncio.create_task(worker()) for _ in range(tasks)]
        await asyncio.wait(workers)
        os.close(lines)
        for one in workers:
            one.result()
        return turns

    # -- the rest --------------------------------------------------------------------------------

    def _described(
        self, name: str, *, mode: str = "write", limit: int = 0, **options: Any
    ) -> aiodlock.Lock | aiodlock.Semaphore:
        if limit:
            return self.client.semaphore(name, limit, **options)
        pair = self.client.rwlock(name, **options)
        return pair.read if mode == "read" else pair.write

    def _gate(self, label: str) -> asyncio.Event:
        return self._gates.setdefault(label, asyncio.Event())


def note(lines: int, what: str, name: str, lease: aiodlock.Lease) -> None:
    """Write one line at once: of a process that is killed, all that it did is there."""
    fields = (time.monotonic(), what, os.getpid(), name, lease.mode, lease.token, id(lease))
    os.write(lines, (" ".join(map(str, fields)) + "\n").encode())


@asynccontextmanager
async def standard_input() -> AsyncIterator[asyncio.StreamReader]:
    reader = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        yield reader
    finally:
        transport.close()


def tell(id: int, **answer: Any) -> None:
    sys.stdout.write(json.dumps({"id": id, **answer}) + "\n")
    sys.stdout.flush()


async def main() -> None:
    peer = Peer()

    async def call(id: int, do: str, arguments: dict[str, Any]) -> None:
        try:
            tell(id, value=await getattr(peer, do)(**arguments))
        except BaseException as error:
            tell(id, error=type(error).__name__, message=str(error))
        finally:
            del peer.calls[id]

    async with standard_input() as lines:
        while line := await lines.readline():
            order = json.loads(line)
            id, do = order.pop("id"), order.pop("do")
            peer.calls[id] = asyncio.create_task(call(id, do, order))
    await peer.leave()


if __name__ == "__main__":
    asyncio.run(main())
