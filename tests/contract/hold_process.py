"""A process that holds or waits for names with ``hold_at_least``, until it is killed.

python -m tests.contract.hold_process URL NAME NAME…
"""

from __future__ import annotations

import asyncio
import sys

import aiodlock


async def main(url: str, *names: str) -> None:
    async with aiodlock.Client(url, ttl=1.0, waiter_ttl=1.0) as client:
        if names[1:]:
            async with client.multilock(*names, hold_at_least=60):
                print("began", flush=True)
                await asyncio.Event().wait()
        async with client.lock(names[0], hold_at_least=60):
            print("began", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
