"""A process whose lease lingers: python -m tests.fault.lingerer URL NAME TTL

It has one body, says its token afterwards, and has another one for each line that it reads.
"""

from __future__ import annotations

import asyncio
import sys

import aiodlock


async def main(url: str, name: str, ttl: float) -> None:
    async with aiodlock.Client(url, ttl=ttl) as client:
        lock = client.lock(name, linger=60.0)
        while True:
            async with lock as lease:
                pass
            # Not in the body: the reader may stop the process at once, and means one whose lease is idle.
            print(lease.token, flush=True)
            if not await asyncio.to_thread(sys.stdin.readline):
                return


if __name__ == "__main__":
    url, name, ttl = sys.argv[1:]
    asyncio.run(main(url, name, float(ttl)))
