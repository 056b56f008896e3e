"""A lock on three independent servers; one is killed while the lock is held, and the work goes on.

python -m examples.quorum                                      # starts three servers of its own
AIODLOCK_URL=redis://a,redis://b,redis://c python -m examples.quorum    # yours: nothing is killed
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager

import aiodlock
from aiodlock._embedded import EmbeddedServer

URLS = [url for url in os.environ.get("AIODLOCK_URL", "").split(",") if url]


@asynccontextmanager
async def servers() -> AsyncIterator[tuple[Sequence[str], EmbeddedServer | None]]:
    """Give the URLs, and the server that may be killed."""
    if URLS:
        yield URLS, None
        return
    with ExitStack() as stack:
        started = [stack.enter_context(EmbeddedServer()) for _ in range(3)]
        yield [server.url for server in started], started[0]


async def work(client: aiodlock.Client, name: str, seen: list[str], started: asyncio.Event) -> int:
    """Hold the lock for longer than its lease, so that the servers have to extend it."""
    async with client.lock("report", ttl=3) as lease:
        seen.append(f"{name} works")
        started.set()
        began = time.monotonic()
        while time.monotonic() - began < 4:
            lease.ensure_held()
            await asyncio.sleep(0.1)
        seen.append(f"{name} is done, and held the lock all the time")
        return lease.token


async def main() -> tuple[list[str], list[int]]:
    """Return what was seen, and the tokens in the order of the turns."""
    seen: list[str] = []
    started = asyncio.Event()
    # Two processes in real life. restart_delay is the longest ttl that any of them uses.
    async with (
        servers() as (urls, victim),
        aiodlock.Client(urls, restart_delay=3) as one,
        aiodlock.Client(urls, restart_delay=3) as other,
        asyncio.TaskGroup() as tasks,
    ):
        first = tasks.create_task(work(one, "the first", seen, started))
        await started.wait()
        second = tasks.create_task(work(other, "the second", seen, started))
        await asyncio.sleep(0.5)  # it waits for its turn now
        if victim is not None:
            victim.kill()
            seen.append("a server is dead")
    tokens = [first.result(), second.result()]
    print("\n".join(seen))
    print("tokens grow:", tokens[0] < tokens[1])
    return seen, tokens


if __name__ == "__main__":
    asyncio.run(main())
