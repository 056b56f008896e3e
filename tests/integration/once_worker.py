"""A worker that goes through all keys, and does each once; it may be killed or stopped at any moment.

python -m tests.integration.once_worker URL SOCKET SEED KEYS
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
from collections.abc import Iterator

import aiodlock

TTL, KEEP = 1.0, 3600.0
TASKS = 6


class Failed(Exception):
    """A body that raises: nothing is recorded."""


class Telling:
    """The connection to the witness."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._one_at_a_time = asyncio.Lock()

    async def __call__(self, word: str, key: int, value: object = "-") -> None:
        async with self._one_at_a_time:
            self._writer.write(f"{os.getpid()} {word} {key} {value}\n".encode())
            await self._reader.readline()


async def do_all(
    client: aiodlock.Client, tell: Telling, keys: Iterator[int], rng: random.Random
) -> None:
    for key in keys:
        done = False
        while not done:
            done = await do(client, tell, key, rng)


async def do(client: aiodlock.Client, tell: Telling, key: int, rng: random.Random) -> bool:
    """Return whether the key is done for this worker: it has its result."""
    await tell("enters", key)
    try:
        async with client.once(f"key:{key}", keep=KEEP) as once:
            if once.lease is not None:
                await tell("effect", key, once.lease.token)
                await asyncio.sleep(rng.random() * 0.05)
                if rng.random() < 0.02:
                    raise Failed
                once.result = str(once.lease.token)
    except aiodlock.LockLost as lost:
        await tell("lost", key, lost.reason)
        return False
    except Failed:
        await tell("failed", key)
        return False
    await tell("confirmed" if once.first else "got", key, once.result)
    return True


async def main(url: str, socket: str, seed: int, number: int) -> None:
    rng = random.Random(seed)
    keys = iter(rng.sample(range(number), number))
    tell = Telling(*await asyncio.open_unix_connection(socket))
    async with (
        aiodlock.Client(url, ttl=TTL, waiter_ttl=TTL) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(TASKS):
            tasks.create_task(do_all(client, tell, keys, rng))


if __name__ == "__main__":
    logging.getLogger("aiodlock").setLevel(logging.ERROR)  # losses are told to the witness
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
