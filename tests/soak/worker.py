"""A worker process of a soak: many tasks take what they can get, in every mode, and write it down.

    python -m tests.soak.worker SOURCE JOURNAL SEED TASKS TTL

SOURCE is JSON: a URL or a list of them, and more options of the client. The worker ends, with a line
about what is left of it, when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import aiodlock
from aiodlock import Lease, LockLost
from aiodlock._clock import now
from aiodlock.backends.redis import messages
from aiodlock.backends.redis.keys import keys_of

from .journal import AND, Journal

WAITER_TTL, LIMIT = 2.0, 3
#: A wait in a queue that is longer, without the time in which something is done to servers, is a violation.
#: In a queue of 20 some die, some are stopped for 5 s and some
#: hold for long, one after the other: the longest waits seen were 25 s.
STARVED = 60.0
#: A lease ended otherwise than by its deadline.
FORGOTTEN = "loss on a server that lost nothing"
#: A worker that is told to end, and does not, tells after this time what it waits for.
STUCK = 40.0
#: Waits that are longer than this, in seconds, are written down one by one.
LONG = 1.0
#: For how long a client keeps a lease between two bodies, in seconds.
LINGER = 0.2

Holding = AbstractAsyncContextManager[aiodlock.MultiLease] | AbstractAsyncContextManager[Lease]


class Worker:
    def __init__(
        self, client: aiodlock.Client, journal: Journal, rng: random.Random, ttl: float
    ) -> None:
        self._client = client
        self._journal = journal
        self._rng = rng
        self._ttl = ttl
        self._ending = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self.longest_wait = 0.0

    async def run(self, tasks: int) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._until_told())
            group.create_task(self._tell())
            for _ in range(tasks):
                group.create_task(self._contend())
        self._tell_once()

    async def _until_told(self) -> None:
        await asyncio.to_thread(sys.stdin.read)
        self._ending.set()
        asyncio.get_running_loop().call_later(STUCK, self._tell_what_is_left)

    def _tell_what_is_left(self) -> None:
        """The tasks do not end: tell what they wait for, as far as the client knows."""
        session = self._client._core.session
        for request in list(session.requests.values()) if session is not None else ():
            self._journal.violation(
                f"still {request!r}: {request.place!r} {_state_of(request.place)}"
            )

    async def _tell(self) -> None:
        while not self._ending.is_set():
            self._tell_once()
            await asyncio.sleep(0.5)

    def _tell_once(self) -> None:
        self._journal.totals({**self.counts, "longest wait": self.longest_wait})

    async def _contend(self) -> None:
        turns: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self._exclusive, 8),
            (self._shared, 8),
            (self._several, 3),
            (self._fresh, 3),
            (self._try, 3),
            (self._impatient, 3),
            (self._cancelled, 4),
        ]
        can = self._client._core.store.capabilities
        turns += [(self._lingering, 4)] if can.linger else []
        turns += [(self._semaphore, 4)] if can.semaphores else []
        calls, weights = zip(*turns, strict=True)
        while not self._ending.is_set():
            (turn,) = self._rng.choices(calls, weights)
            try:
                await turn()
            except LockLost as lost:
                self.counts[f"lost: {lost.reason}"] += 1
                if lost.reason != "expired":
                    self._journal.violation(f"{FORGOTTEN}: {lost!r}")
            except aiodlock.LockError as error:
                if "OOM" in str(error):  # a full server refuses what is new: at once, and loudly
                    self.counts["refused: memory full"] += 1
                else:
                    self._journal.violation(f"{turn.__name__}: {error!r}")
            await asyncio.sleep(self._rng.random() * 0.01)

    # -- turns -----------------------------------------------------------------------------------

    async def _exclusive(self) -> None:
        await self._hold(self._client.lock(f"hot-{self._rng.randrange(8)}"))

    async def _shared(self) -> None:
        pair = self._client.rwlock(f"pair-{self._rng.randrange(4)}")
        await self._hold(pair.write if self._rng.random() < 0.3 else pair.read)

    async def _semaphore(self) -> None:
        await self._hold(self._client.semaphore(f"pool-{self._rng.randrange(3)}", LIMIT))

    async def _several(self) -> None:
        names = self._rng.sample([f"part-{n}" for n in range(9)], self._rng.randint(2, 3))
        await self._hold(self._client.multilock(*names))

    async def _lingering(self) -> None:
        await self._hold(self._client.lock(f"warm-{self._rng.randrange(3)}", linger=LINGER))

    async def _fresh(self) -> None:
        await self._hold(self._client.lock(f"once-{self._rng.getrandbits(48):x}"))

    async def _try(self) -> None:
        try:
            lease = await self._client.lock(f"hot-{self._rng.randrange(8)}").acquire_nowait()
        except (aiodlock.WouldBlock, aiodlock.BackendUnavailable) as no:
            self.counts[type(no).__name__] += 1
            return
        async with lease:
            await self._body(lease)

    async def _impatient(self) -> None:
        lock = self._client.lock(f"hot-{self._rng.randrange(8)}", timeout=self._rng.random() * 0.3)
        try:
            await self._hold(lock)
        except (aiodlock.AcquireTimeout, aiodlock.BackendUnavailable) as no:
            self.counts[type(no).__name__] += 1

    async def _cancelled(self) -> None:
        turns = [self._exclusive, self._shared, self._several]
        turns += [self._semaphore] if self._client._core.store.capabilities.semaphores else []
        turn = self._rng.choice(turns)
        task = asyncio.ensure_future(turn())
        await asyncio.wait({task}, timeout=self._rng.random() * 0.1)
        if task.cancel():
            self.counts["cancelled"] += 1
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    # -- holding ---------------------------------------------------------------------------------

    async def _hold(self, lock: Holding) -> None:
        asked = now()
        async with lock as lease:
            waited = now() - asked
            self.longest_wait = max(self.longest_wait, waited)
            if waited > LONG:
                name = lease.name if isinstance(lease, Lease) else AND.join(lease)
                self._journal.waited(name, asked, asked + waited)
            await self._body(lease)

    async def _body(self, lease: Lease | aiodlock.MultiLease) -> None:
        began = now()
        if not lease.held:
            self.counts["late"] += 1
            return
        self.counts["acquisitions"] += 1
        leases = [lease] if isinstance(lease, Lease) else list(lease.values())
        holds = [self._journal.began(one.name, self._mode(one), one.token, began) for one in leases]
        self.counts["holds"] += len(holds)
        try:
            # Mostly short; one in 2,000 needs several extensions.
            left = (
                1.5 * self._ttl if self._rng.random() < 0.0005 else self._rng.expovariate(1 / 0.002)
            )
            until = began + left
            while now() < until:
                await asyncio.sleep(min(0.1, until - now()))
                self._lasts(lease, holds)
        finally:
            self._lasts(lease, holds)

    def _lasts(self, lease: Lease | aiodlock.MultiLease, holds: list[int]) -> None:
        moment = now()
        if lease.held:
            for hold in holds:
                self._journal.lasts(hold, moment)

    @staticmethod
    def _mode(lease: Lease) -> str:
        if lease.name.startswith("pool-"):
            return f"s{LIMIT}"
        if lease.name.startswith("warm-"):
            return "l"
        return "x" if lease.mode == "exclusive" else "s"


def _state_of(place: object) -> dict[str, object]:
    """Return what a place remembers; some have slots, and tell enough by their `repr`."""
    return {name: value for name, value in getattr(place, "__dict__", {}).items() if value}


async def main(source: str, journal: str, seed: str, tasks: str, ttl: str) -> None:
    # What is kept of names has limits: filled at the start, or soon, it does not look like a leak.
    messages._MOST_TEMPLATES = 512
    for number in range(keys_of.cache_info().maxsize or 0):
        keys_of("aiodlock", "lock", f"once-{number:012x}")
    logging.basicConfig(level=logging.ERROR)  # that a connection was lost is no news here
    where, options = json.loads(source)
    async with aiodlock.Client(
        where,
        ttl=float(ttl),
        waiter_ttl=WAITER_TTL,
        token_retention=10.0,
        unavailable_after=120.0,
        **options,
    ) as client:
        worker = Worker(client, Journal(Path(journal)), random.Random(int(seed)), float(ttl))
        print("ready", flush=True)
        await worker.run(int(tasks))
        session = client._core.session
        assert session is not None
        give_up_at = now() + 10 * float(ttl)
        while session.requests and now() < give_up_at:
            await asyncio.sleep(0.05)
        left = {"places": len(session.requests), "beats": len(session.deadlines)}
    left["tasks"] = len(asyncio.all_tasks()) - 1
    print(json.dumps(left), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
