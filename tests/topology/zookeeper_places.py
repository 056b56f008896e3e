"""Places of the ZooKeeper store without a client in front: what tests of its sessions and queues need."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from aiodlock._clock import now
from aiodlock._model import ENDED, Granted, Left, Terms, Waiting
from aiodlock.backends.zookeeper.address import read_url
from aiodlock.backends.zookeeper.place import ZooKeeperPlace
from aiodlock.backends.zookeeper.store import ZooKeeperBackend

_numbers = itertools.count(1)

TERMS = Terms(
    kind="lock",
    name="order/42",
    mode="exclusive",
    limit=0,
    ttl=2.0,
    waiter_ttl=2.0,
    lock_delay=0.0,
    margin=0.0,
    max_hold=None,
    auto_extend=True,
)


class Heard:
    """A listener that notes what it is told, and when last. ``changed`` is set whenever it is."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.at = 0.0
        self.changed = asyncio.Event()

    def _note(self, what: str) -> None:
        self.told.append(what)
        self.at = now()
        self.changed.set()

    def granted(self) -> None:
        self._note("granted")

    def gone(self, reason: str) -> None:
        self._note(reason)

    def recorded(self, result: bytes, *, unsure: bool) -> None:
        self._note("recorded")

    def extension_failed(self, error: Exception) -> None:
        """Not of interest: each round of a reconnection is one."""

    def recalled(self) -> None:
        """Nothing lingers here."""

    def unavailable(self, error: Exception) -> None:
        self._note("unavailable")


class Asker:
    """One request: its place, and what was told of it."""

    def __init__(self, backend: ZooKeeperBackend, terms: Terms, owner: str | None) -> None:
        request_id = self.request_id = f"{backend.label}-{next(_numbers)}"
        self.heard = Heard()
        self.place: ZooKeeperPlace = backend.place(
            terms, request_id, owner or f"t{request_id}", self.heard
        )

    async def acquire(self, within: float = 20.0) -> Granted:
        """Wait for the turn."""
        answer = await self.place.acquire(wait=True)
        if isinstance(answer, Waiting):
            await asyncio.wait_for(self.heard.changed.wait(), within)
            assert self.heard.told == ["granted"], self.heard.told
            return Granted(self.place.token, self.place.deadline)
        assert isinstance(answer, Granted), answer
        return answer

    async def queue(self) -> None:
        """Begin to wait."""
        answer = await self.place.acquire(wait=True)
        assert isinstance(answer, Waiting), answer

    async def leave(self) -> Left:
        return await self.place.leave(ENDED, within=10.0)


def asker(backend: ZooKeeperBackend, owner: str | None = None, **terms: object) -> Asker:
    """Make a request that differs from TERMS in these."""
    return Asker(backend, replace(TERMS, **terms), owner)  # type: ignore[arg-type]


@asynccontextmanager
async def running(
    url: str, *, tick: float, ttl: float = TERMS.ttl, unavailable_after: float = 30.0
) -> AsyncIterator[ZooKeeperBackend]:
    """Give a backend that can be asked."""
    ensemble = read_url(f"{url}?tick_time={tick}", "aiodlock")
    backend = ZooKeeperBackend(ensemble, ttl=ttl, unavailable_after=unavailable_after)
    ready = asyncio.Event()
    task = asyncio.create_task(backend.run(ready.set))
    try:
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED, timeout=30.0)
        if task.done():
            waiting.cancel()
            await task
        assert ready.is_set(), backend.failure
        yield backend
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
