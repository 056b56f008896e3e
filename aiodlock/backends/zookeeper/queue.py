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


def node_name(mode: str, request: str, owner: str) -> str:
    """Return a node's name without the number, which the server adds."""
    return f"{mode}:{request}:{owner}:"


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


def is_wanted(entries: Queue, mine: Entry) -> bool:
    """Tell whether another owner waits for this one, which holds."""
    waiting = entries[len(holders(entries)) :]
    owner = _owner_of(mine)
    return any(_conflict(entry, mine) and _owner_of(entry) != owner for entry in waiting)


def _conflict(one: Entry, other: Entry) -> bool:
    return "x" in (one.mode, other.mode)


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
    earlier = entries[:seat]
    if mine.limit:
        return _standing_of_a_semaphore(earlier, mine, followed)
    if mine.owner and not joined:
        own = [entry for entry in holders(earlier) if _owner_of(entry) == mine.owner]
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
    earlier: list[Entry], mine: Entry, followed: bool
) -> Holds | Blocked | Barred:
    other = next((entry.limit for entry in earlier if entry.limit != mine.limit), None)
    if other is not None:
        return Barred(other)
    if len(earlier) < mine.limit:
        return Holds(followed)
    if len(earlier) == mine.limit:
        return Blocked(tuple(entry.node for entry in earlier))
    # It is the turn of the one in front first, which tells when it has come (by writing its node).
    return Blocked((earlier[-1].node,), hears=True)


def _owner_of(entry: Entry) -> str:
    return entry.owner or _tag(f"t{entry.request}")
