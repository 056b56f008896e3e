"""Two processes take two locks in opposite orders. One of them learns that they wait for each other.

python -m examples.deadlock
"""

from __future__ import annotations

import asyncio
import os
import sys

import aiodlock
from aiodlock._embedded import EmbeddedServer

AFTER = 1.0


async def transfer(url: str, source: str, target: str) -> None:
    """Move money from one account to another: lock both, one after the other."""
    async with aiodlock.Client(url, deadlock_after=AFTER) as client:
        async with client.lock(source):
            print(f"{source} is mine", flush=True)
            await asyncio.to_thread(sys.stdin.readline)  # until the other process has its lock, too
            try:
                async with client.lock(target):
                    print(f"moved from {source} to {target}", flush=True)
            except aiodlock.DeadlockError as deadlock:
                print(f"gave up: {deadlock}", flush=True)


async def main() -> list[str]:
    """Start both, and return what they said at the end."""
    with EmbeddedServer() as server:
        accounts = ["account:1", "account:2"]
        both = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "examples.deadlock", *order),
                env={**os.environ, "AIODLOCK_URL": server.url},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            for order in (accounts, accounts[::-1])
        ]
        for process in both:
            assert process.stdout is not None
            print((await process.stdout.readline()).decode().strip())
        said = [out.decode().strip() for out, _ in await asyncio.gather(*map(go_on, both))]
    for line in said:
        print(line)
    return said


async def go_on(process: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
    """Let a process ask for its second lock; return what it prints."""
    return await process.communicate(b"\n")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        asyncio.run(transfer(os.environ["AIODLOCK_URL"], *sys.argv[1:]))
    else:
        asyncio.run(main())
