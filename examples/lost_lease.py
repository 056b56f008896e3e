"""What a body sees when its lock is lost, and how it cleans up.

AIODLOCK_URL=redis://localhost:6379/0 python -m examples.lost_lease
"""

from __future__ import annotations

import asyncio
import os

import aiodlock

URL = os.environ.get("AIODLOCK_URL", "memory://")


async def write_report(client: aiodlock.Client, said: list[str], started: asyncio.Event) -> None:
    """Write until done, or until the lock is lost."""
    try:
        # A second before the store lets another in, the body is cancelled: time for the clean-up.
        async with client.lock("report", ttl=5, margin=1) as lease:
            said.append(f"writing with token {lease.token}")
            started.set()
            try:
                await asyncio.sleep(60)  # the work
            finally:
                await asyncio.sleep(0.01)  # the clean-up may await: it is cancelled once
                said.append("rolled back")
    except aiodlock.LockLost as lost:
        said.append(f"lost: {lost.reason}")


async def main() -> list[str]:
    """Return what was said."""
    said: list[str] = []
    started = asyncio.Event()
    async with aiodlock.Client(URL) as client, asyncio.TaskGroup() as tasks:
        tasks.create_task(write_report(client, said, started))
        await started.wait()
        await client.break_lock("report")  # an operator, as with: aiodlock break report
    print("\n".join(said))
    return said


if __name__ == "__main__":
    asyncio.run(main())
