"""Who holds a name, as the names of the nodes in its queue tell it. Pure: no I/O, no clock.

Each request has one node in the queue's directory: ``MODE:REQUEST:OWNER:NUMBER``.

- ``MODE``: ``x`` (exclusive), ``s`` (shared), or the limit of a semaphore in decimals.
- ``REQUEST``: the request's id. It is made by the client, so a repeated request is known again.
- ``OWNER``: a short hash of the owner; empty for a task's first request, whose owner is the request itself.
- ``NUMBER``: ten digits, which the server adds in order of arrival.

A *seat* is what has one number. An owner that holds, and asks again, gets a node in its own seat: a node
that is not sequential, made only if the seat's node still exists. So the hold goes on when the first
one's client dies.

The first seat holds. While it is shared, so do all shared seats up to the first exclusive one. Of a
semaphore, the first ``limit`` seats hold. Nodes go, and new ones come at the end, so whoever holds keeps
holding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

#: Numbers are 32-bit counters that begin again below zero.
_HALF, _WHOLE = 2**31, 2**32
_MOST_DIGITS = 19


class Entry(NamedTuple):
    """One node in a queue."""

    number: int
    mode: str
    request: str
    owner: str
    node: str

    @property
    def limit(self) -> int:
        """How many may hold, of a semaphore; else 0."""
        return int(self.mode) if _is_decimal(self.mode) else 0


class Queue(list[Entry]):
    """The entries in order of arrival.

    Mutable state: ``zxid``, the newest transaction of which they tell (0: not known).
    """

    zxid: int = 0

    @cached_property
    def positions(self) -> dict[str, int]:
        """Where each request stands. Made once for all that look at the same reading."""
        return {entry.request: at for at, entry in enumerate(self)}

    @cached_property
    def odd(self) -> int:
        """Where the first one stands, of a semaphore's, that has another limit than the head."""
        return next((at for at, one in enumerate(self) if one.limit != self[0].limit), len(self))


class Holds(NamedTuple):
    """The request holds. ``followed``: somebody waits behind it."""

    followed: bool


class Blocked(NamedTuple):
    """The request waits until one of these nodes is changed or goes.

    ``hears``: the node's request has not held yet, and writes its node when it does.
    """

    by: tuple[str, ...]
    hears: bool = False


class Joins(NamedTuple):
    """The request's owner holds by another request: this is its node."""

    entry: Entry


class Barred(NamedTuple):
    """The request is refused: its owner would wait for itself, or the semaphore has another limit."""

    limit: int


class Asked(NamedTuple):
    """A request, as the name of its node tells of it. ``limit``: of a semaphore, else 0."""

    request: str
    mode: str
    owner: str
    limit: int

    @property
    def node_name(self) -> str:
        """The node's name without the number, which the server adds."""
        return f"{self.mode}:{self.request}:{self.owner}:"

    @property
    def is_plain(self) -> bool:
        """Whether the queue alone decides: it is no semaphore's, and its owner cannot hold already."""
        return not self.limit and not self.owner

    def find(self, entries: Queue) -> Entry | None:
        """Return its node."""
        at = entries.positions.get(self.request)
        return None if at is None else entries[at]

    def where(self, entries: Queue, *, joined: bool) -> Holds | Blocked | Joins | Barred | None:
        """Tell where it stands; None if it is not there. ``joined``: it has its owner's seat."""
        mine = self.find(entries)
        return None if mine is None else standing(entries, mine, joined=joined)

    def is_taken(self, entries: Queue) -> bool:
        """Tell whether a node at the end of the queue would have to wait, its owner's other nodes apart."""
        if not entries or self.owner:
            return False
        if self.limit:
            seats = {entry.number for entry in entries}
            return entries[0].limit == self.limit and len(seats) >= self.limit
        return self.mode == "x" or any(entry.mode == "x" for entry in entries)

    def is_wanted(self, entries: Queue) -> bool:
        """Tell whether another owner waits for its node, which holds."""
        mine = self.find(entries)
        if mine is None:
            return False
        waiting, owner = entries[len(holders(entries)) :], _owner_of(mine)
        return any(
            "x" in (entry.mode, self.mode) and _owner_of(entry) != owner for entry in waiting
        )

    def blocked_by(self, entries: Queue) -> list[str]:
        """Return the nodes that hold, and are why its own would have to wait."""
        return [entry.node for entry in holders(entries) if "x" in (entry.mode, self.mode)]


def request_of(path: str) -> str:
    """Return whose node this is in a queue."""
    return path.rpartition("/")[2].split(":")[1]


def owner_tag(owner: str, request: str) -> str:
    """Return what stands for an owner in names: as long as needed, for two owners to differ surely."""
    return "" if owner == f"t{request}" else _tag(owner)


def _tag(owner: str) -> str:
    return hashlib.blake2b(owner.encode(), digest_size=12).hexdigest()


def read_queue(nodes: Iterable[str]) -> Queue:
    """Return the entries in order of arrival. What others may have put there is left out."""
    entries = Queue()
    for node in nodes:
        parts = node.split(":")
        if len(parts) == 4 and _is_decimal(parts[3].removeprefix("-")):
            entries.append(Entry(int(parts[3]), parts[0], parts[1], parts[2], node))
    if entries:
        reference = entries[0].number
        entries.sort(key=lambda entry: (_after(entry.number, reference), entry.mode, entry.request))
    return entries


def _is_decimal(text: str) -> bool:
    """Whether it is a number that a server, or a limit, can be. Python refuses to read 5,000 digits."""
    return len(text) <= _MOST_DIGITS and text.isdecimal()


def _after(number: int, reference: int) -> int:
    return (number - reference + _HALF) % _WHOLE


def holders(entries: Iterable[Entry]) -> list[Entry]:
    """Return those that hold."""
    held: list[Entry] = []
    shared = True
    for seats, (_, seat) in enumerate(groupby(entries, key=attrgetter("number"))):
        nodes = list(seat)
        alone = any(entry.mode == "x" for entry in nodes)
        limit = nodes[0].limit
        fits = seats < limit if limit else not seats or (shared and not alone)
        if not fits:
            break
        held += nodes
        shared = shared and not alone
    return held


def standing(
    entries: Queue, mine: Entry, *, joined: bool = False
) -> Holds | Blocked | Joins | Barred:
    """Tell where a request stands. ``joined``: it has its owner's seat."""
    seat = entries.positions[mine.request]
    while seat and entries[seat - 1].number == mine.number:
        seat -= 1
    followed = entries[-1].number != mine.number
    if not mine.limit and not mine.owner:
        return _standing_alone(entries, seat, mine, followed)
    if mine.limit:
        return _standing_of_a_semaphore(entries, seat, mine, followed)
    if mine.owner and not joined:
        own = [entry for entry in holders(entries[:seat]) if _owner_of(entry) == mine.owner]
        # The move is made only if this node is there still: when the last exclusive one has gone, others
        # may hold beside the shared ones.
        fit = own if mine.mode == "s" else [entry for entry in own if entry.mode == "x"]
        if fit:
            return Joins(fit[0])
        if own:
            return Barred(0)
    return _standing_alone(entries, seat, mine, followed)


def _standing_alone(entries: Queue, seat: int, mine: Entry, followed: bool) -> Holds | Blocked:
    """Look for the nearest one that conflicts. What is in front of that one is looked for when it goes."""
    for at in range(seat - 1, -1, -1):
        if mine.mode == "x" or entries[at].mode == "x":
            return Blocked((entries[at].node,))
    return Holds(followed)


def _standing_of_a_semaphore(
    entries: Queue, seat: int, mine: Entry, followed: bool
) -> Holds | Blocked | Barred:
    # Thousands may look at the same reading: each looks at a few of its entries.
    odd = 0 if entries[0].limit != mine.limit else entries.odd
    if odd < seat:
        return Barred(entries[odd].limit)
    if seat < mine.limit:
        return Holds(followed)
    if seat == mine.limit:
        return Blocked(tuple(entry.node for entry in entries[:seat]))
    # It is the turn of the one in front first, which tells when it has come (by writing its node).
    return Blocked((entries[seat - 1].node,), hears=True)


def _owner_of(entry: Entry) -> str:
    return entry.owner or _tag(f"t{entry.request}")
