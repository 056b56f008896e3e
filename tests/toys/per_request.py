"""A store on a dict, with a lease per request: ``toy-requests://NAME``, for clients of one event loop.

It has the calls of ``KeptStore``; a ``Keeper`` extends what is in it. No semaphores, and no lock-delay.
"""

from __future__ import annotations

import asyncio
import fnmatch
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

from aiodlock._clock import now
from aiodlock._errors import BackendError, BackendUnavailable
from aiodlock._model import (
    Capabilities,
    Gone,
    Granted,
    HolderInfo,
    Left,
    LockInfo,
    Refused,
    StoreRequest,
    WaiterInfo,
    Waiting,
)
from aiodlock.backends.kept import Notices
from aiodlock.backends.kept_backend import KeptBackend
from aiodlock.backends.sources import StoreOptions

_numbers = itertools.count(1)
_worlds: dict[str, World] = {}


@dataclass(slots=True)
class Entry:
    """One request, waiting or holding."""

    request: StoreRequest
    client: str
    ends_at: float
    token: int = 0
    since: float = field(default_factory=now)


@dataclass(slots=True)
class Line:
    """One name: its holders, its waiters in the order of arrival, and what is over."""

    holders: dict[str, Entry] = field(default_factory=dict)
    waiters: dict[str, Entry] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    token: int = 0

    def sweep(self) -> None:
        moment = now()
        for entries in (self.holders, self.waiters):
            for id in [id for id, entry in entries.items() if entry.ends_at <= moment]:
                del entries[id]

    def owned(self, request: StoreRequest) -> Entry | None:
        return next((e for e in self.holders.values() if e.request.owner == request.owner), None)

    def is_free(self, request: StoreRequest) -> bool:
        modes = {entry.request.terms.mode for entry in self.holders.values()}
        return not modes or (request.terms.mode == "shared" and modes == {"shared"})

    def hold(self, entry: Entry, token: int = 0) -> None:
        self.token = entry.token = token or max(self.token + 1, int(now() * 1e6))
        self.holders[entry.request.id] = entry


@dataclass(slots=True)
class World:
    """What outlives a client."""

    lines: dict[tuple[str, str], Line] = field(default_factory=dict)
    clients: dict[str, Notices] = field(default_factory=dict)
    observers: dict[tuple[str, str], list[Callable[[], object]]] = field(default_factory=dict)
    waits: dict[str, tuple[int, bytes, float]] = field(default_factory=dict)

    def line(self, kind: str, name: str) -> Line:
        line = self.lines.setdefault((kind, name), Line())
        line.sweep()
        self.grant(line)
        return line

    def grant(self, line: Line) -> None:
        """Make holders of those at the head of the queue for whom there is room."""
        for entry in list(line.waiters.values()):
            if not line.is_free(entry.request):
                return
            del line.waiters[entry.request.id]
            line.hold(entry)
            client = self.clients.get(entry.client)
            if client is not None:
                request = entry.request
                where = f"{request.kind}:{request.name}"
                asyncio.get_running_loop().call_soon(
                    client.on_granted, request.id, entry.token, where
                )


class RequestsStore:
    """One client of a world."""

    capabilities = Capabilities(semaphores=False, lock_delay=False)
    failure: Exception | None = None
    further_at = 0.0
    answers_within = 1.0

    def __init__(self, world: World) -> None:
        self.label = f"toy-{next(_numbers)}"
        self._world = world
        self._running = False

    async def run(self, listener: Notices, ready: Callable[[], None]) -> None:
        self._world.clients[self.label], self._running = listener, True
        try:
            ready()
            await asyncio.Event().wait()
        finally:
            self._running = False
            del self._world.clients[self.label]
            for changed in itertools.chain(*self._world.observers.values()):
                changed()

    async def acquire(
        self, request: StoreRequest, *, wait: bool
    ) -> Granted | Waiting | Refused | Gone:
        await self._turn()
        line = self._world.line(request.kind, request.name)
        if request.id in line.left:
            return Gone("gone")
        if request.id not in line.holders and request.id not in line.waiters:
            mine, entry = line.owned(request), Entry(request, self.label, 0.0)
            if mine is not None:
                if request.terms.mode == "exclusive" != mine.request.terms.mode:
                    return Refused("deadlock")
                entry.ends_at = now() + request.terms.ttl
                line.hold(entry, mine.token)
            elif line.is_free(request) and not line.waiters:
                entry.ends_at = now() + request.terms.ttl
                line.hold(entry)
            elif not wait:
                return Refused("busy")
            else:
                entry.ends_at = now() + request.terms.waiter_ttl
                line.waiters[request.id] = entry
        return self._state(line, request)

    def extend(
        self, batch: Sequence[tuple[StoreRequest, float]]
    ) -> Sequence[Awaitable[Granted | Waiting | Gone]]:
        return [self._extend(request, length) for request, length in batch]

    async def _extend(self, request: StoreRequest, length: float) -> Granted | Waiting | Gone:
        await self._turn()
        line = self._world.line(request.kind, request.name)
        entry = line.holders.get(request.id) or line.waiters.get(request.id)
        if entry is not None:
            entry.ends_at = max(entry.ends_at, now() + length)
        return self._state(line, request)

    @staticmethod
    def _state(line: Line, request: StoreRequest) -> Granted | Waiting | Gone:
        # The client's deadline is the earlier one.
        if request.id in line.holders:
            entry = line.holders[request.id]
            return Granted(entry.token, entry.ends_at - 0.005)
        if request.id in line.waiters:
            entry = line.waiters[request.id]
            is_head = next(iter(line.waiters)) == request.id
            looks = [one.ends_at for one in line.holders.values()] if is_head else []
            return Waiting(entry.ends_at - 0.005, min(looks, default=None), line.token)
        return Gone("broken" if request.id in line.broken else "gone")

    async def leave(
        self, request: StoreRequest, *, lost: bool = False, within: float | None = None
    ) -> Left:
        await self._turn()
        return self._leave(request)

    def leave_later(
        self,
        request: StoreRequest,
        done: Callable[[Left | BackendError], object],
        *,
        lost: bool = False,
    ) -> bool:
        if self._running:
            asyncio.get_running_loop().call_soon(done, self._leave(request))
        return self._running

    def _leave(self, request: StoreRequest) -> Left:
        line = self._world.line(request.kind, request.name)
        line.left.add(request.id)
        left = Left("gone", "broken" if request.id in line.broken else "gone")
        if line.holders.pop(request.id, None):
            left = Left("released")
        elif line.waiters.pop(request.id, None):
            left = Left("withdrawn")
        self._world.grant(line)
        return left

    async def leave_unknown(self, request_id: str, where: str, final: bool) -> Left:
        kind, _, name = where.partition(":")
        line = self._world.line(kind, name)
        if final:
            line.left.add(request_id)
        held = line.holders.pop(request_id, None)
        self._world.grant(line)
        return Left("released" if held else "gone")

    def server_of(self, request: StoreRequest) -> object:
        return None

    def watch(self, request: StoreRequest, watching: bool) -> None:
        """Nothing tells the end of a lease: the head looks when it is due."""

    async def settle(self) -> None:
        """Every call has been answered."""

    def announce(self, kind: str, name: str) -> None:
        for changed in self._world.observers.get((kind, name), []):
            changed()

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        observers = self._world.observers.setdefault((kind, name), [])
        observers.append(changed)
        return lambda: observers.remove(changed)

    async def inspect(self, kind: str, name: str) -> LockInfo:
        await self._turn()
        line = self._world.line(kind, name)
        holders: dict[tuple[str, str], HolderInfo] = {}
        for entry in line.holders.values():
            request = entry.request
            before = holders.get((request.owner, request.terms.mode))
            holders[request.owner, request.terms.mode] = HolderInfo(
                owner=unquote(request.owner[1:]),
                mode=request.terms.mode,
                token=entry.token,
                count=1 + (before.count if before else 0),
                remaining=entry.ends_at - now(),
                client=entry.client,
            )
        waiters = tuple(
            WaiterInfo(
                unquote(entry.request.owner[1:]),
                entry.request.terms.mode,
                position,
                now() - entry.since,
                entry.client,
            )
            for position, entry in enumerate(line.waiters.values())
        )
        return LockInfo(name, tuple(holders.values()), waiters, line.token)

    async def inspect_all(
        self, kind: str, names: Sequence[str], *, queues: bool = True
    ) -> list[LockInfo]:
        return [await self.inspect(kind, name) for name in names]

    async def tell_waits(self, serial: int, record: bytes, *, keep: float) -> None:
        await self._turn()
        if serial >= self._world.waits.get(self.label, (0,))[0]:
            self._world.waits[self.label] = serial, record, now() + keep

    async def waits_of(self, labels: Sequence[str]) -> dict[str, bytes]:
        await self._turn()
        told = {label: self._world.waits.get(label, (0, b"", 0.0)) for label in labels}
        return {
            label: record for label, (_, record, until) in told.items() if record and now() < until
        }

    async def names(self, match: str, kind: str = "lock") -> AsyncIterator[str]:
        for known, name in list(self._world.lines):
            line = self._world.line(known, name)
            if (
                known == kind
                and (line.holders or line.waiters)
                and fnmatch.fnmatchcase(name, match)
            ):
                yield name

    async def break_lock(
        self, name: str, kind: str = "lock", tokens: frozenset[int] | None = None
    ) -> int:
        await self._turn()
        line = self._world.line(kind, name)
        broken = [e for e in line.holders.values() if tokens is None or e.token in tokens]
        for entry in broken:
            del line.holders[entry.request.id]
            line.broken.add(entry.request.id)
            client = self._world.clients.get(entry.client)
            if client is not None:
                client.on_broken(entry.request.id, entry.token)
        self._world.grant(line)
        return len(broken)

    async def _turn(self) -> None:
        await asyncio.sleep(0)
        if not self._running:
            raise BackendUnavailable("the client is not running")

    async def forget(self, name: str) -> bool:
        """Keep no records: the capabilities say so."""
        return False


class Opener:
    """``toy-requests://NAME``."""

    capabilities = RequestsStore.capabilities

    def __init__(self, url: str, options: StoreOptions) -> None:
        self.described = url
        self._patience = options.unavailable_after

    def open(self) -> KeptBackend:
        """Make a client of the world of that name."""
        world = _worlds.setdefault(self.described, World())
        return KeptBackend(RequestsStore(world), unavailable_after=self._patience)
