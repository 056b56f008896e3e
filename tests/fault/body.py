"""A process to be stopped: python -m tests.fault.body URL NAME TTL WAITER_TTL

It waits its turn and then acts for as long as its lease is held, printing the moment of every act; in
the end it prints how that came. Moments are of the clock that all processes of the machine share.
"""

from __future__ import annotations

import asyncio
import sys

import aiodlock
from aiodlock._clock import now


async def main(url: str, name: str, ttl: float, waiter_ttl: float) -> None:
    async with aiodlock.Client(url, ttl=ttl, waiter_ttl=waiter_ttl) as client:
        print("waits", flush=True)
        try:
            async with client.lock(name) as lease:
                while True:
                    moment = now()
                    if lease.held:
                        print(f"acts {moment}", flush=True)
                    await asyncio.sleep(0.01)
        except aiodlock.LockLost as lost:
            print(f"lost {lost.reason} {lease.held} {now()}", flush=True)


if __name__ == "__main__":
    url, name, *seconds = sys.argv[1:]
    asyncio.run(main(url, name, *map(float, seconds)))
