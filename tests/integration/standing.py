"""A process of its own, to be killed: python -m tests.integration.standing URL NAME TTL WAITER_TTL MODE...

It asks for the name in each of the modes, one after another, prints a line when it holds or is queued, and
stays. What it holds and waits for it keeps alive until it is killed.
"""

from __future__ import annotations

import asyncio
import sys

import aiodlock
from aiodlock._request import State


async def main(url: str, name: str, ttl: float, waiter_ttl: float, modes: list[str]) -> None:
    async with aiodlock.Client(url, ttl=ttl, waiter_ttl=waiter_ttl) as client:
        pair, session = client.rwlock(name), client._core.session
        assert session is not None
        tasks: list[asyncio.Task[aiodlock.Lease]] = []
        for number, mode in enumerate(modes, 1):
            lock = pair.read if mode == "shared" else pair.write
            tasks.append(asyncio.create_task(lock.acquire()))
            settled = (State.WAITING, State.HELD)
            while sum(place.state in settled for place in session.requests.values()) < number:
                await asyncio.sleep(0.002)
        print("standing", flush=True)
        await asyncio.gather(asyncio.sleep(60), *tasks)


if __name__ == "__main__":
    url, name, ttl, waiter_ttl, *modes = sys.argv[1:]
    asyncio.run(main(url, name, float(ttl), float(waiter_ttl), modes))
