"""Three workers, one of them leads; when it resigns or is deposed, the next one does.

AIODLOCK_URL=redis://localhost:6379/0 python -m examples.leader_election
"""

from __future__ import annotations

import asyncio
import os

import aiodlock

URL = os.environ.get("AIODLOCK_URL", "memory://election")


async def worker(name: str, terms: list[str]) -> None:
    """Stand until elected; lead for a moment; resign."""
    async with aiodlock.Client(URL, ttl=5) as client:
        election = client.election("scheduler")
        try:
            async with election.lead(f"http://{name}:8080") as lease:
                terms.append(name)
                print(f"{name} leads, token {lease.token}")
                if name == "worker-2":  # an operator removes it
                    await client.break_lock("scheduler")
                    await asyncio.sleep(60)  # ends here: its body is cancelled
                await asyncio.sleep(0.5)  # what only the leader does
            print(f"{name} has resigned")
        except aiodlock.LockLost as lost:
            print(f"{name} was deposed: {lost.reason}")


async def observe(leaders: list[str], count: int) -> None:
    """Follow the leaders, as a client that must find them does."""
    async with aiodlock.Client(URL) as client:
        async for address in client.election("scheduler").observe(interval=0.01):
            print(f"the leader is at {address}")
            leaders.append(address)
            if len(leaders) == count:
                return


async def main() -> tuple[list[str], list[str]]:
    """Return who led, and who was seen to."""
    terms: list[str] = []
    leaders: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        # The second is deposed at once, so the observer may miss it.
        tasks.create_task(observe(leaders, 1))
        for number in (1, 2, 3):
            tasks.create_task(worker(f"worker-{number}", terms))
    return terms, leaders


if __name__ == "__main__":
    asyncio.run(main())
