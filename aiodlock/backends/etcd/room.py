"""What this client knows of the names that its requests wait for.

A client whose turn is near watches the name, and not the predecessors of its requests: one watch serves
any number of waiters, and all that a waiter must know comes with the event that makes it the holder. No
message follows the event.

While others stand between, most of that would be about them: with 200 clients, each release would be told
to 200. So a client whose turn is far watches its own keys, and one request in front of it: the last but
one of those that must go before its first waiter holds. When that one is gone the client reads the name
anew, and follows it. So a release is told to the new holder's client, and to the next one's.
Where there are no more clients than these, all of them follow the name.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ..._backoff import pauses
from ..._clock import now
from ..._model import first_request
from . import messages as m
from .following import Following
from .recipe import Keys, Queue, Record, Turn
from .watching import Watches

_logger = logging.getLogger("aiodlock")

#: So many changes are heard in vain before a name is not followed any more.
_UNNEEDED = 2
#: A name of so few clients is followed by all of them. They are told in any case: the client that has
#: released, the new holder's and the next one's.
_FEW = 3
#: A name with more requests is followed by all who wait: reading it anew costs more than its events.
_MANY = 1000


class Waiter(Protocol):
    """A request of this client, as its room knows it."""

    id: str
    owner: str

    def on_turn(self, turn: Turn) -> None:
        """It holds, or may join its owner's other request."""

    def on_vanished(self) -> None:
        """Its key is gone."""

    def on_recorded(self, result: bytes) -> None:
        """A success is on record, so nobody waits any more."""


class Room:
    """One name. Mutable state: ``queue`` (as of the last event; None while it is not known),
    ``waiters`` of this client by request id, ``_by_owner`` (those whose owner may hold by another
    request), ``_following`` (what is watched of it), ``_rereading``, ``_expected`` (who waits for a
    revision), ``_opening`` (requests on their way that read the name, too), ``unused_since``, ``_unneeded``
    (how often something was heard while nobody waited).
    """

    def __init__(
        self,
        keys: Keys,
        label: str,
        watches: Watches,
        read: Callable[[Keys], Awaitable[Queue]],
        reread: Callable[[Room], object],
    ) -> None:
        self.keys: Keys = keys
        self._label = label
        self.queue: Queue | None = None
        self.waiters: dict[str, Waiter] = {}
        self.unused_since: float = now()
        self._by_owner: dict[str, dict[str, Waiter]] = {}
        self._following = Following(keys, label, watches)
        self._read = read
        self._reread = reread
        self._opening = 0
        self._lock = asyncio.Lock()
        self._unneeded = 0
        self._rereading = False
        self._expected: list[tuple[int, asyncio.Future[int]]] = []

    # -- who waits here --------------------------------------------------------------------------

    def add(self, waiter: Waiter) -> None:
        """A request of this client is about to queue."""
        self.waiters[waiter.id] = waiter
        if first_request(waiter.owner) != waiter.id:
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

    def left(self, id: str) -> bool:
        """A request of this client has left. Its key can only go: for this client it is gone already. Tell
        whether its own requests alone wait for that, as far as is known.

        So the next one is let in before that is written, and several may come and go meanwhile. All others
        stand behind both keys.
        """
        queue = self.queue
        if queue is None or not self._following.is_near or not self.waiters:
            return False
        if queue.find(id) is None:
            return False
        queue.delete(self.keys.request(id))
        holders = list(queue.holders())
        self._look()
        self._follow()
        return all(holder.client == self._label for holder in holders)

    # -- what is known ---------------------------------------------------------------------------

    @contextmanager
    def opening(self) -> Iterator[bool]:
        """Tell whether the caller is the one who reads the name with its request.

        Of a thousand requests that come together only one reads all of them.
        """
        opens = (self.queue is None or self._following.is_far) and not self._opening
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
        self._rereading = False
        if self.queue is not None and queue.revision < self.queue.revision:
            return  # more is known already
        self.queue = queue
        self._following.end()
        self._advance()
        self._tell_success()
        for id, waiter in list(self.waiters.items()):
            if queue.find(id) is None:
                waiter.on_vanished()
        self._look()
        self._follow()

    def close(self) -> None:
        """Stop following."""
        self._following.end()
        self.queue = None
        for _, waiting in self._expected:
            waiting.cancel()

    def _follow(self) -> None:
        """Watch what is needed now, which may be less or more than before."""
        queue = self.queue
        if queue is None:
            return
        start, signal = queue.revision + 1, self._signal()
        if signal is None:
            self._following.near(start, self._heard, self._missed)
            return
        self._following.far(start, signal, self._heard_far, self._missed)
        if self._expected:
            self._read_anew()  # nothing else will tell it

    def _signal(self) -> str | None:
        """Return the request that goes before the turn of this client is near; None if it is near."""
        assert self.queue is not None
        requests = self.queue.requests
        # A request that joins its owner's stands in front of others that came before it.
        if self.queue.joined or len(requests) > _MANY or len(self.queue.clients) <= _FEW:
            return None
        if self._by_owner and self._may_join():
            return None
        earlier: deque[str] = deque(maxlen=2)
        writers: deque[str] = deque(maxlen=2)
        for id, record in requests.items():
            if id in self.waiters:
                # A semaphore's places are freed in any order.
                before = writers if record.mode == "shared" else earlier
                return before[0] if len(before) == 2 and not record.limit else None
            earlier.append(id)
            if record.mode == "exclusive":
                writers.append(id)
        return None

    def _may_join(self) -> bool:
        """Whether one that waits here may get in beside a request of its owner that came before it. (One
        that comes later holds later.)"""
        assert self.queue is not None
        owners: set[str] = set()
        for id, record in self.queue.requests.items():
            if id in self.waiters and record.owner in owners:
                return True
            owners.add(record.owner)
        return False

    async def reached(self, revision: int) -> Queue:
        """Return the queue once it is known up to this revision of the name, or to what is left of it."""
        while self.queue is None or self.queue.revision < revision:
            if self._following.is_far:
                self._read_anew()
            waiting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._expected.append((revision, waiting))
            revision = await waiting
        return self.queue

    def _advance(self) -> None:
        assert self.queue is not None
        expected, self._expected = self._expected, []
        for revision, waiting in expected:
            if revision > self.queue.revision:
                self._expected.append((revision, waiting))
            elif not waiting.done():
                waiting.set_result(revision)

    def set_back(self, revision: int) -> None:
        """The store has lost what it was told after this revision: nobody is to wait for that."""
        self._expected = [(min(known, revision), waiting) for known, waiting in self._expected]
        if self.queue is not None:
            self._advance()

    def _heard(self, events: list[m.Event], revision: int) -> None:
        queue = self.queue
        if queue is None:
            return
        vanished: list[str] = []
        for event in events:
            assert event.kv is not None
            if event.type == m.DELETE:
                id = queue.delete(event.kv.key)
                if id is not None and id in self.waiters:
                    vanished.append(id)
            else:
                queue.put(event.kv)
                if event.kv.key in queue.foreign:
                    _logger.warning(
                        "etcd: the key %r is not aiodlock's, or was written over: nobody is let in "
                        "behind it",
                        event.kv.key,
                    )
        queue.revision = max(queue.revision, revision)
        if self._expected:
            self._advance()
        self._tell_success()
        for id in vanished:
            waiter = self.waiters.get(id)
            if waiter is not None and queue.find(id) is None:
                waiter.on_vanished()
        self._look()
        self._follow()

    def _heard_far(self, events: list[m.Event], revision: int) -> None:
        """Something is gone that was watched while the turn was far."""
        if any(event.type == m.DELETE for event in events):
            self._read_anew()

    def _read_anew(self) -> None:
        if not self.waiters:
            self.close()  # who comes next reads it
        elif not self._rereading:
            self._rereading = True
            self._reread(self)

    def _tell_success(self) -> None:
        if self.queue is not None and (success := self.queue.success) is not None:
            for waiter in list(self.waiters.values()):
                waiter.on_recorded(success.result)

    def _look(self) -> None:
        """Tell those of this client whose turn it is."""
        if not self.waiters or self.queue is None:
            self._unneeded += 1
            if self._unneeded >= _UNNEEDED:
                self.close()  # who comes next reads it anew
            return
        self._unneeded = 0
        # Others of the same owner alone have a say in how one gets in.
        by_owner: dict[str, list[Record]] = {}
        for record in self.queue.holders():
            by_owner.setdefault(record.owner, []).append(record)
        turns: list[tuple[Waiter, Turn]] = []
        for owner, mates in by_owner.items():
            ids = dict.fromkeys(record.id for record in mates if record.id in self.waiters)
            for id in ids | self._by_owner.get(owner, {}):
                found = self.queue.find(id)
                if found is not None:
                    turn = self.queue.turn_among(found, mates)
                    if turn.what in ("holds", "joins"):
                        turns.append((self.waiters[id], turn))
        for waiter, turn in turns:
            waiter.on_turn(turn)

    def _missed(self) -> None:
        """The store has forgotten the changes since the last event, or was set back."""
        self._following.end()
        self.queue = None  # restored from a backup, it has a smaller revision, which counts
        self._read_anew()


class Rooms:
    """The names that requests of this client wait for, and for a moment those they have waited for.

    Mutable state: ``_rooms`` by the keys' base.
    """

    def __init__(
        self,
        label: str,
        watches: Watches,
        read: Callable[[Keys], Awaitable[Queue]],
        start: Callable[..., bool],
    ) -> None:
        self._label = label
        self._watches = watches
        self._read = read
        self._start = start
        self._rooms: dict[bytes, Room] = {}

    def of(self, keys: Keys) -> Room:
        """Return the room of a name."""
        room = self._rooms.get(keys.base)
        if room is None:
            room = self._rooms[keys.base] = Room(
                keys, self._label, self._watches, self._read, self._begin_again
            )
        return room

    def find(self, keys: Keys) -> Room | None:
        """Return the room of a name if there is one."""
        return self._rooms.get(keys.base)

    def set_back(self, revision: int) -> None:
        """The store was restored from a backup, to this revision."""
        for room in list(self._rooms.values()):
            room.set_back(revision)

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
        pause = pauses()
        while self._rooms.get(room.keys.base) is room:
            try:
                queue = await self._read(room.keys)
            except Exception as failed:
                _logger.debug("reading a name anew failed: %r", failed)
                await asyncio.sleep(next(pause))
            else:
                room.begin(queue)
                return
