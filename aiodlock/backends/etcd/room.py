"""What this client knows of the names that its requests wait for.

A client watches a name, and not the predecessors of its requests: one watch serves any number of
waiters, and all that a waiter must know comes with the event that makes it the holder. No message
follows the event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ..._clock import now
from . import messages as m
from .recipe import Keys, Queue, Turn
from .watching import Watch, Watches

_logger = logging.getLogger("aiodlock")

#: So many changes are heard in vain before a name is not followed any more.
_UNNEEDED = 10


class Waiter(Protocol):
    """A request of this client, as its room knows it."""

    id: str
    owner: str

    def on_turn(self, turn: Turn) -> None:
        """It holds, or may join its owner's other request."""

    def on_vanished(self) -> None:
        """Its key is gone."""


class Room:
    """One name. Mutable state: ``queue`` (as of the last event; None while it is not known),
    ``waiters`` of this client by request id, ``_by_owner`` (those whose owner may hold by another
    request), ``_watch``, ``_expected`` (who waits for a revision), ``_opening`` (requests on their way
    that read the name, too), ``unused_since``, ``_unneeded`` (how often something was heard while
    nobody waited).
    """

    def __init__(
        self,
        keys: Keys,
        watches: Watches,
        read: Callable[[Keys], Awaitable[Queue]],
        reread: Callable[[Room], object],
    ) -> None:
        self.keys: Keys = keys
        self.queue: Queue | None = None
        self.waiters: dict[str, Waiter] = {}
        self.unused_since: float = now()
        self._by_owner: dict[str, dict[str, Waiter]] = {}
        self._watches = watches
        self._read = read
        self._reread = reread
        self._opening = 0
        self._lock = asyncio.Lock()
        self._unneeded = 0
        self._watch: Watch | None = None
        self._expected: list[tuple[int, asyncio.Future[None]]] = []

    # -- who waits here --------------------------------------------------------------------------

    def add(self, waiter: Waiter) -> None:
        """A request of this client is about to queue."""
        self.waiters[waiter.id] = waiter
        if waiter.owner != f"t{waiter.id}":
            self._by_owner.setdefault(waiter.owner, {})[waiter.id] = waiter

    def remove(self, waiter: Waiter) -> None:
        """It waits no more."""
        if self.waiters.pop(waiter.id, None) is None:
            return
        if (mates := self._by_owner.get(waiter.owner)) is not None:
            mates.pop(waiter.id, None)
            if not mates:
                del self._by_owner[waiter.owner]
        if not self.waiters:
            self.unused_since = now()

    # -- what is known ---------------------------------------------------------------------------

    @contextmanager
    def opening(self) -> Iterator[bool]:
        """Tell whether the caller is the one who reads the name with its request.

        Of a thousand requests that come together only one reads all of them.
        """
        opens = self.queue is None and not self._opening
        self._opening += opens
        try:
            yield opens
        finally:
            self._opening -= opens

    async def open(self) -> None:
        """Read the name, unless it is known."""
        if self.queue is None:
            async with self._lock:
                if self.queue is None:
                    self.begin(await self._read(self.keys))

    def begin(self, queue: Queue) -> None:
        """This was read; from here on the room follows the changes."""
        self.queue = queue
        if self._watch is not None:
            self._watches.end(self._watch)
        self._watch = self._watches.watch(
            self.keys.base, self.keys.end, queue.revision + 1, self._heard, self._missed
        )
        self._advance()
        for id, waiter in list(self.waiters.items()):
            if queue.find(id) is None:
                waiter.on_vanished()
        self._look()

    def close(self) -> None:
        """Stop following."""
        if self._watch is not None:
            self._watches.end(self._watch)
            self._watch = None
        self.queue = None
        for _, waiting in self._expected:
            waiting.cancel()

    async def reached(self, revision: int) -> Queue:
        """Return the queue once it is known up to this revision of the name."""
        while self.queue is None or self.queue.revision < revision:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._expected.append((revision, waiting))
            await waiting
        return self.queue

    def _advance(self) -> None:
        assert self.queue is not None
        expected, self._expected = self._expected, []
        for revision, waiting in expected:
            if revision > self.queue.revision:
                self._expected.append((revision, waiting))
            elif not waiting.done():
                waiting.set_result(None)

    def _heard(self, events: list[m.Event], revision: int) -> None:
        queue = self.queue
        if queue is None:
            return
        vanished: list[str] = []
        for event in events:
            assert event.kv is not None
            try:
                if event.type == m.DELETE:
                    id = queue.delete(event.kv.key)
                    if id is not None and id in self.waiters:
                        vanished.append(id)
                else:
                    queue.put(event.kv)
            except ValueError as foreign:
                _logger.warning("a key that is not aiodlock's was ignored: %s", foreign)
        queue.revision = max(queue.revision, revision)
        if self._expected:
            self._advance()
        for id in vanished:
            waiter = self.waiters.get(id)
            if waiter is not None and queue.find(id) is None:
                waiter.on_vanished()
        self._look()

    def _look(self) -> None:
        """Tell those of this client whose turn it is."""
        if not self.waiters or self.queue is None:
            self._unneeded += 1
            if self._unneeded >= _UNNEEDED:
                self.close()  # who comes next reads it anew
            return
        self._unneeded = 0
        holders = list(self.queue.holders())
        turns: list[tuple[Waiter, Turn]] = []
        for record in holders:
            waiter = self.waiters.get(record.id)
            if waiter is not None:
                turns.append((waiter, self.queue.turn_among(record, holders)))
            for mate in self._by_owner.get(record.owner, {}).values():
                found = self.queue.find(mate.id)
                if found is not None and mate is not waiter:
                    turn = self.queue.turn_among(found, holders)
                    if turn.what == "joins":
                        turns.append((mate, turn))
        for waiter, turn in turns:
            waiter.on_turn(turn)

    def _missed(self) -> None:
        """The store has forgotten the changes since the last event, or refuses to tell."""
        self._watch = None
        self._reread(self)


class Rooms:
    """The names that requests of this client wait for, and for a moment those they have waited for.

    Mutable state: ``_rooms`` by the keys' base.
    """

    def __init__(
        self, watches: Watches, read: Callable[[Keys], Awaitable[Queue]], start: Callable[..., bool]
    ) -> None:
        self._watches = watches
        self._read = read
        self._start = start
        self._rooms: dict[bytes, Room] = {}

    def of(self, keys: Keys) -> Room:
        """Return the room of a name."""
        room = self._rooms.get(keys.base)
        if room is None:
            room = self._rooms[keys.base] = Room(keys, self._watches, self._read, self._begin_again)
        return room

    def find(self, keys: Keys) -> Room | None:
        """Return the room of a name if there is one."""
        return self._rooms.get(keys.base)

    def close_unused(self, after: float) -> None:
        """Stop following names that nobody has waited for of late."""
        moment = now()
        for base, room in list(self._rooms.items()):
            if not room.waiters and moment - room.unused_since >= after:
                room.close()
                del self._rooms[base]

    def _begin_again(self, room: Room) -> None:
        self._start(self._read_again, room)

    async def _read_again(self, room: Room) -> None:
        while self._rooms.get(room.keys.base) is room:
            try:
                queue = await self._read(room.keys)
            except Exception as failed:
                _logger.debug("reading a name anew failed: %r", failed)
                await asyncio.sleep(0.2)
            else:
                room.begin(queue)
                return
