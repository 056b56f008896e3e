"""Many workers take jobs; one job, the clean-up, runs in one of them at a time.

AIODLOCK_URL=redis://localhost:6379/0 python -m examples.worker_pool
"""

from __future__ import annotations

import asyncio
import os

import aiodlock

URL = os.environ.get("AIODLOCK_URL", "memory://pool")


class Pool:
    """What several processes would share: a queue of jobs, and what was done."""

    def __init__(self, jobs: int) -> None:
        self.jobs = asyncio.Queue[int]()
        for job in range(jobs):
            self.jobs.put_nowait(job)
        self.done: dict[int, str] = {}
        self.cleaning = 0
        self.cleaned_by: list[str] = []

    async def clean(self, who: str, token: int) -> None:
        """Throw old results away. Two at a time would count, and throw away, twice."""
        self.cleaning += 1
        assert self.cleaning == 1, "two workers clean at the same time"
        try:
            print(f"{who} cleans up, token {token}")
            await asyncio.sleep(0.01)
            self.cleaned_by.append(who)
        finally:
            self.cleaning -= 1  # also if the lock is lost


async def clean_if_nobody_does(client: aiodlock.Client, pool: Pool, who: str) -> bool:
    """The singleton job: whoever comes first does it, the others go on with their work."""
    try:
        # The longest that it may take, in case it hangs: then another worker may try.
        async with client.lock("clean-up", timeout=0, max_hold=60) as lease:
            await pool.clean(who, lease.token)
            return True
    except aiodlock.AcquireTimeout:
        return False  # somebody is at it
    except aiodlock.LockLost as lost:
        print(f"{who} stopped cleaning: {lost.reason}")
        return False


async def worker(who: str, pool: Pool) -> None:
    """Take jobs until there are none; after each third one see to the clean-up."""
    async with aiodlock.Client(URL) as client:
        # At most two workers at a time may use what can bear no more.
        printer = client.semaphore("printer", limit=2)
        for turn in range(1_000_000):
            try:
                job = pool.jobs.get_nowait()
            except asyncio.QueueEmpty:
                return
            async with printer:
                await asyncio.sleep(0.001)
                pool.done[job] = who
            if turn % 3 == 2:
                await clean_if_nobody_does(client, pool, who)


async def main(workers: int = 4, jobs: int = 40) -> Pool:
    """Return what was done, and who cleaned up."""
    pool = Pool(jobs)
    async with asyncio.TaskGroup() as tasks:
        for number in range(workers):
            tasks.create_task(worker(f"worker-{number}", pool))
    print(f"{len(pool.done)} jobs done, cleaned up {len(pool.cleaned_by)} times")
    return pool


if __name__ == "__main__":
    asyncio.run(main())
