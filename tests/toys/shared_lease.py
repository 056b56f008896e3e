"""A store where one lease serves all requests of a client: ``toy-lease://NAME``, on one event loop.

Leases are whole seconds long. How long others' leases have left is unknown. Notices may be lost, and every
third is. This is the shape of etcd: it has no keeper, and implements ``Backend`` and ``Place`` itself.
"""

from __future__ import annotations

import asyncio
import fnmatch
import itertools
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

from aiodlock._clock import now
from aiodlock._errors import BackendError, BackendUnavailable, LossReason
from aiodlock._model import (
    Capabilities,
    End,
    Gone,
    Granted,
    HolderInfo,
    Left,
    LockInfo,
    Refused,
    Terms,
    WaiterInfo,
    Waiting,
)
from aiodlock.backends.base import Listener
from aiodlock.backends.sources import StoreOptions

_numbers = itertools.count(1)
_worlds: dict[str, World] = {}
#: How often waiters look by themselves.
_LOOK_EVERY = 0.5

LeaseId = tuple[str, int]


@dataclass(slots=True, eq=False)
class Entry:
    """A key in the queue of a name. It is gone when its lease has ended."""

    id: str
    terms: Terms
    owner: str
    lease: LeaseId
    token: int


@dataclass(slots=True)
class World:
    """What outlives a client: queues of keys, leases, and who watches."""

    revision: int = 0
    queues: dict[tuple[str, str], list[Entry]] = field(default_factory=dict)
    leases: dict[LeaseId, float] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    watchers: list[Callable[[tuple[str, str]], object]] = field(default_factory=list)
    observers: dict[tuple[str, str], list[Callable[[], object]]] = field(default_factory=dict)
    waits: dict[str, tuple[int, bytes, float]] = field(default_factory=dict)
    notices: int = 0

    def queue(self, kind: str, name: str) -> list[Entry]:
        moment = now()
        self.leases = {lease: end for lease, end in self.leases.items() if end > moment}
        queue = self.queues.setdefault((kind, name), [])
        queue[:] = [entry for entry in queue if entry.lease in self.leases]
        return queue

    def remove(self, entry: Entry) -> None:
        """Delete a key, and notify those who watch: not always."""
        key = (entry.terms.kind, entry.terms.name)
        self.queues[key].remove(entry)
        self.notices += 1
        if self.notices % 3:
            for watcher in self.watchers:
                asyncio.get_running_loop().call_soon(watcher, key)

    @staticmethod
    def holds(queue: list[Entry], entry: Entry) -> bool:
        """Whether nothing that stands in front of it conflicts with it."""
        for other in queue:
            if other is entry:
                return True
            both_shared = other.terms.mode == entry.terms.mode == "shared"
            if not both_shared and other.owner != entry.owner:
                return False
        return False


@dataclass(slots=True, eq=False)
class Lease:
    """One lease of a client. ``deadline``: when it was last kept alive + its length, on our clock."""

    id: LeaseId
    deadline: float
    places: set[LeasePlace] = field(default_factory=set)


class LeasePlace:
    """One request's place: a key on one of the client's leases."""

    capped = False
    silent = False
    #: The store never ends a request while its client lives.
    surely_over_at = math.inf

    def __init__(
        self, backend: LeaseBackend, terms: Terms, id: str, owner: str, listener: Listener
    ) -> None:
        self._backend = backend
        self._terms = terms
        self._id = id
        self._owner = owner
        self._listener = listener
        self._lease: Lease | None = None
        self._waits = False
        #: Without ``auto_extend`` the lease goes on, and the place does not.
        self._until = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self.token = 0

    @property
    def key(self) -> tuple[str, str]:
        return self._terms.kind, self._terms.name

    @property
    def deadline(self) -> float:
        return 0.0 if self._lease is None else min(self._lease.deadline, self._until)

    async def acquire(self, *, wait: bool) -> Granted | Waiting | Refused | Gone:
        await self._backend.turn()
        world, queue = self._backend.world, self._backend.world.queue(*self.key)
        if self._id in world.left:
            return Gone("gone")
        entry = self._entry()
        if entry is None:
            mine = [one for one in queue if one.owner == self._owner and world.holds(queue, one)]
            if mine and self._terms.mode == "exclusive" and mine[0].terms.mode == "shared":
                return Refused("deadlock")
            self._lease = self._backend.lease_of(self._terms.ttl)
            world.revision += 1
            entry = Entry(self._id, self._terms, self._owner, self._lease.id, world.revision)
            queue.insert(queue.index(mine[0]) + 1 if mine else len(queue), entry)
        if not world.holds(queue, entry):
            if not wait:
                world.remove(entry)
                return Refused("busy")
            self._join(waits=True)
            return Waiting(self.deadline)
        self._hold(entry)
        return Granted(self.token, self.deadline)

    def look(self) -> None:
        """See whether the place holds by now, or is gone."""
        entry = self._entry()
        if entry is None:
            self.gone("broken" if self._id in self._backend.world.broken else "gone")
        elif self._waits and World.holds(self._backend.world.queue(*self.key), entry):
            self._hold(entry)
            self._listener.granted()

    def gone(self, reason: LossReason) -> None:
        """Tell that nothing is left of it."""
        if self._stop():
            self._listener.gone(reason)

    def _entry(self) -> Entry | None:
        queue = self._backend.world.queue(*self.key)
        return next((entry for entry in queue if entry.id == self._id), None)

    def _hold(self, entry: Entry) -> None:
        self.token = entry.token
        if not self._terms.auto_extend:
            self._until = now() + self._terms.ttl
        self._join(waits=False)

    def _join(self, *, waits: bool) -> None:
        assert self._lease is not None
        self._waits = waits
        self._lease.places.add(self)
        self._backend.places.add(self)

    def _stop(self) -> bool:
        """Hear of nothing more; return whether anything was heard of."""
        if self._timer is not None:
            self._timer.cancel()
        known = self in self._backend.places
        self._backend.places.discard(self)
        if self._lease is not None:
            self._lease.places.discard(self)
        return known

    async def extend(self, ttl: float | None) -> None:
        await self._backend.turn()
        entry = self._entry()
        if entry is None or self._lease is None:
            self.look()
            return
        if not self._terms.auto_extend:
            self._until = max(self._until, now() + (ttl or self._terms.ttl))
        self._lease.places.discard(self)
        self._lease = self._backend.lease_of(ttl or self._lease.id[1])
        self._lease.places.add(self)
        entry.lease = self._lease.id

    async def leave(self, end: End, *, within: float | None = None) -> Left:
        await self._backend.turn()
        return self._leave()

    def leave_soon(self, end: End, done: Callable[[Left | BackendError], object]) -> bool:
        if self._backend.runs:
            asyncio.get_running_loop().call_soon(done, self._leave())
        return self._backend.runs

    def _leave(self) -> Left:
        world, entry = self._backend.world, self._entry()
        self._stop()
        world.left.add(self._id)
        if entry is None:
            return Left("gone", "broken" if self._id in world.broken else "gone")
        held = world.holds(world.queue(*self.key), entry)
        world.remove(entry)
        return Left("released" if held else "withdrawn")

    def reuse(self, terms: Terms) -> None:
        """Never: a lease does not linger here."""

    async def begin(self) -> None:
        """Nothing depends on it: names are not kept closed here."""

    def run_out(self) -> None:
        left = self.deadline - now()
        self._stop()
        # Nobody else ends it while this client lives.
        self._timer = asyncio.get_running_loop().call_later(max(0.0, left), self._leave)

    def abandon(self) -> None:
        self._stop()


class LeaseBackend:
    """One client: its leases, and a task that keeps them alive."""

    capabilities = Capabilities(
        semaphores=False,
        lock_delay=False,
        shortest_ttl=1.0,
        granularity=1.0,
        remaining_known=False,
        waiting_known=False,
    )
    failure: Exception | None = None
    further_at = 0.0
    answers_within = 1.0

    def __init__(self, world: World) -> None:
        self.label = f"lease-{next(_numbers)}"
        self.world = world
        self.runs = False
        self.places: set[LeasePlace] = set()
        self._leases: dict[int, Lease] = {}

    async def run(self, ready: Callable[[], None]) -> None:
        self.runs = True
        self.world.watchers.append(self._on_removed)
        try:
            ready()
            while True:
                await asyncio.sleep(min(_LOOK_EVERY, *(ttl / 4 for ttl in (1, *self._leases))))
                self._keep_alive()
                for place in tuple(self.places):
                    place.look()
        finally:
            self.runs = False
            self.world.watchers.remove(self._on_removed)
            for lease in self._leases.values():
                self.world.leases.pop(lease.id, None)
            for changed in itertools.chain(*self.world.observers.values()):
                changed()

    def _keep_alive(self) -> None:
        for seconds, lease in tuple(self._leases.items()):
            sent = now()
            if self.world.leases.get(lease.id, 0.0) <= sent:
                del self._leases[seconds]
                for place in tuple(lease.places):
                    place.gone("expired")
            elif lease.places:
                self.world.leases[lease.id] = sent + seconds
                lease.deadline = sent + seconds * 0.99
            else:
                del self._leases[seconds], self.world.leases[lease.id]

    def lease_of(self, ttl: float) -> Lease:
        """Return the client's lease of that length, rounded up, kept alive just now."""
        seconds, sent = math.ceil(ttl), now()
        lease = self._leases.get(seconds)
        if lease is None or self.world.leases.get(lease.id, 0.0) <= sent:
            lease = Lease((f"{self.label}.{next(_numbers)}", seconds), 0.0)
            self._leases[seconds] = lease
        self.world.leases[lease.id] = sent + seconds
        lease.deadline = sent + seconds * 0.99
        return lease

    def _on_removed(self, key: tuple[str, str]) -> None:
        for place in tuple(self.places):
            if place.key == key:
                place.look()

    def place(self, terms: Terms, request_id: str, owner: str, listener: Listener) -> LeasePlace:
        return LeasePlace(self, terms, request_id, owner, listener)

    async def turn(self) -> None:
        """Give way once, as a message would."""
        await asyncio.sleep(0)
        if not self.runs:
            raise BackendUnavailable("the client is not running")

    async def settle(self) -> None:
        """Every call has been answered."""

    def announce(self, kind: str, name: str) -> None:
        for changed in self.world.observers.get((kind, name), []):
            changed()

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        observers = self.world.observers.setdefault((kind, name), [])
        observers.append(changed)
        return lambda: observers.remove(changed)

    async def inspect(self, kind: str, name: str) -> LockInfo:
        await self.turn()
        queue = self.world.queue(kind, name)
        holders: dict[tuple[str, str], HolderInfo] = {}
        waiters: list[WaiterInfo] = []
        for entry in queue:
            owner, mode = unquote(entry.owner[1:]), entry.terms.mode
            client = entry.lease[0].partition(".")[0]
            if self.world.holds(queue, entry):
                before = holders.get((owner, mode))
                count = 1 + (before.count if before else 0)
                holders[owner, mode] = HolderInfo(owner, mode, entry.token, count, None, client)
            else:
                waiters.append(WaiterInfo(owner, mode, len(waiters), None, client))
        token = max((holder.token for holder in holders.values()), default=0)
        return LockInfo(name, tuple(holders.values()), tuple(waiters), token)

    async def holds(self, kind: str, name: str, mode: str, token: int) -> bool:
        info = await self.inspect(kind, name)
        return any(held.token == token and held.mode == mode for held in info.holders)

    async def inspect_all(
        self, kind: str, names: Sequence[str], *, queues: bool = True
    ) -> list[LockInfo]:
        return [await self.inspect(kind, name) for name in names]

    async def tell_waits(self, serial: int, record: bytes, *, keep: float) -> None:
        await self.turn()
        if serial >= self.world.waits.get(self.label, (0,))[0]:
            self.world.waits[self.label] = serial, record, now() + keep

    async def waits_of(self, labels: Sequence[str]) -> dict[str, bytes]:
        await self.turn()
        told = {label: self.world.waits.get(label, (0, b"", 0.0)) for label in labels}
        return {
            label: record for label, (_, record, until) in told.items() if record and now() < until
        }

    async def names(self, match: str, kind: str = "lock") -> AsyncIterator[str]:
        for known, name in list(self.world.queues):
            if known == kind and self.world.queue(known, name) and fnmatch.fnmatchcase(name, match):
                yield name

    async def break_lock(
        self, name: str, kind: str = "lock", tokens: frozenset[int] | None = None
    ) -> int:
        await self.turn()
        queue = self.world.queue(kind, name)
        holding = [entry for entry in queue if self.world.holds(queue, entry)]
        broken = [entry for entry in holding if tokens is None or entry.token in tokens]
        for entry in broken:
            self.world.broken.add(entry.id)
            self.world.remove(entry)
        return len(broken)

    async def forget(self, name: str) -> bool:
        """Keep no records: the capabilities say so."""
        return False


class Opener:
    """``toy-lease://NAME``."""

    capabilities = LeaseBackend.capabilities

    def __init__(self, url: str, options: StoreOptions) -> None:
        self.described = url

    def open(self) -> LeaseBackend:
        """Make a client of the world of that name."""
        return LeaseBackend(_worlds.setdefault(self.described, World()))
