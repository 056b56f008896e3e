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
from itertools import groupby, takewhile
from operator import attrgetter
from typing import NamedTuple

#: Numbers are 32-bit counters that begin again below zero.
_HALF, _WHOLE = 2**31, 2**32


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
        return int(self.mode) if self.mode.isdecimal() else 0


class Holds(NamedTuple):
    """The request holds. ``followed``: somebody waits behind it."""

    followed: bool


class Blocked(NamedTuple):
    """The request waits until one of these nodes is changed or goes."""

    by: tuple[str, ...]


class Joins(NamedTuple):
    """The request's owner holds by another request: this is its node."""

    entry: Entry


class Barred(NamedTuple):
    """The request is refused: its owner would wait for itself, or the semaphore has another limit."""

    limit: int


def node_name(mode: str, request: str, owner: str) -> str:
    """Return a node's name without the number, which the server adds."""
    return f"{mode}:{request}:{owner}:"


def owner_tag(owner: str, request: str) -> str:
    """Return what stands for an owner in names: as long as needed, for two owners to differ surely."""
    return "" if owner == f"t{request}" else _tag(owner)


def _tag(owner: str) -> str:
    return hashlib.blake2b(owner.encode(), digest_size=12).hexdigest()


def read_queue(nodes: Iterable[str]) -> list[Entry]:
    """Return the entries in order of arrival. What others may have put there is left out."""
    entries = []
    for node in nodes:
        parts = node.split(":")
        if len(parts) == 4 and _is_number(parts[3]):
            entries.append(Entry(int(parts[3]), parts[0], parts[1], parts[2], node))
    if entries:
        reference = entries[0].number
        entries.sort(key=lambda entry: (_after(entry.number, reference), entry.mode, entry.request))
    return entries


def _is_number(text: str) -> bool:
    return text.isdecimal() or (text.startswith("-") and text[1:].isdecimal())


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
    entries: list[Entry], mine: Entry, *, joined: bool = False
) -> Holds | Blocked | Joins | Barred:
    """Tell where a request stands. ``joined``: it has its owner's seat."""
    earlier = list(takewhile(lambda entry: entry.number != mine.number, entries))
    followed = entries[-1].number != mine.number
    if mine.limit:
        return _standing_of_a_semaphore(earlier, mine, followed)
    if mine.owner and not joined:
        own = [entry for entry in holders(earlier) if _owner_of(entry) == mine.owner]
        if own and (mine.mode == "s" or any(entry.mode == "x" for entry in own)):
            return Joins(own[0])
        if own:
            return Barred(0)
    blockers = [entry for entry in earlier if mine.mode == "x" or entry.mode == "x"]
    if not blockers:
        return Holds(followed)
    # Whoever is in front of the nearest blocker has gone before it.
    return Blocked((blockers[-1].node,))


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
    return Blocked((earlier[-1].node,))


def _owner_of(entry: Entry) -> str:
    return entry.owner or _tag(f"t{entry.request}")
