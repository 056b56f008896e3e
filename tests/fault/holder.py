"""A process of its own, to be killed: python -m tests.fault.holder URL NAME TTL WAITERS WAITER_TTL

It holds the name and waits for it so many times more, prints a line when all is so, and stays.
"""

from __future__ import annotations

import asyncio
import sys

import aiodlock


async def main(url: str, name: str, ttl: float, waiters: int, waiter_ttl: float) -> None:
    async with aiodlock.Client(url, ttl=ttl, waiter_ttl=waiter_ttl) as client:
        await client.lock(name).acquire()
        tasks = [asyncio.create_task(client.lock(name).acquire()) for _ in range(waiters)]
        while len((await client.inspect(name)).waiters) < waiters:
            await asyncio.sleep(0.005)
        print("ready", flush=True)
        await asyncio.gather(asyncio.sleep(60), *tasks)


if __name__ == "__main__":
    url, name, ttl, waiters, waiter_ttl = sys.argv[1:]
    asyncio.run(main(url, name, float(ttl), int(waiters), float(waiter_ttl)))
