"""A cache that many read and one refreshes. Readers never see half of it, and it is loaded once.

AIODLOCK_URL=redis://localhost:6379/0 python -m examples.cache_refresh
"""

from __future__ import annotations

import asyncio
import os

import aiodlock

URL = os.environ.get("AIODLOCK_URL", "memory://cache")


class Catalogue:
    """Prices in two places that have to agree; loading them is slow and dear."""

    def __init__(self, client: aiodlock.Client) -> None:
        self._lock = client.rwlock("catalogue", ttl=10, timeout=30)
        self._prices: dict[str, int] = {}
        self._total = 0
        self._changes = 1  # known of
        self._loaded = 0  # as many of them are in the prices
        self.loads = 0

    def invalidate(self) -> None:
        """Say that the prices have changed where they come from."""
        self._changes += 1

    async def read(self) -> int:
        """Return the sum of the prices. Any number of readers at a time."""
        while True:
            async with self._lock.read:
                if self._loaded == self._changes:
                    await asyncio.sleep(0)  # whatever takes time
                    assert self._total == sum(self._prices.values()), "half of a refresh was seen"
                    return self._total
            # Not inside the block: a reader that asks for the write lock would wait for itself,
            # and is told so with DeadlockError.
            await self._refresh()

    async def _refresh(self) -> None:
        async with self._lock.write as lease:
            if self._loaded == self._changes:
                return  # another one did it while this one waited: look again, load once
            self.loads += 1
            changes = self._changes  # one that comes while this loads is not in what it loads
            self._loaded = 0  # until all of it is there, also if this is cancelled
            self._prices.clear()
            for number in range(10):
                await asyncio.sleep(0.001)  # the slow part, with a half-filled cache
                lease.ensure_held()
                self._prices[f"thing {number}"] = number + self.loads
            self._total = sum(self._prices.values())
            self._loaded = changes


async def main(readers: int = 50, changes: int = 3) -> Catalogue:
    """Let many read while the prices change; return the catalogue."""
    async with aiodlock.Client(URL) as client:
        catalogue = Catalogue(client)
        for _ in range(changes):
            catalogue.invalidate()
            totals = await asyncio.gather(*(catalogue.read() for _ in range(readers)))
            print(f"{readers} readers saw {set(totals)} after {catalogue.loads} loads")
    return catalogue


if __name__ == "__main__":
    asyncio.run(main())
