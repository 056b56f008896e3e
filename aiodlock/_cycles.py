"""Finding deadlocks: cycles of requests that wait for each other, across names, tasks and processes.

The probe is that of Chandy, Misra and Haas (*Distributed Deadlock Detection*, 1983) for requests that need
all that they wait for. A request that has waited for long sends it along two kinds of edges:

- to what a holder waits for that it conflicts with: the holder's task is inside a block on the name;
- to a conflicting request in front of it in the queue.

A semaphore of one place is like a name that everybody takes exclusively. With more places a request needs
any one of them, so it makes no edge. A request with a timeout ends its wait by itself, so it makes none
either.

A probe that comes back has found a cycle, but each answer was of another moment. So a second pass asks for
every edge again. Each edge is there before and after the moment between the passes, under the same request
id and token. So the whole cycle was there at that moment, and no member can leave a cycle by itself.

A probe looks for cycles whose youngest request is the one that sends it: it passes no younger one. So each
cycle is found by exactly one of its requests, which is the one that gives up.

No I/O: ``probe`` and ``verify`` yield what they ask, and are sent the answer.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field

from ._model import IMPATIENT, HolderInfo, Kind, LockInfo, Mode, WaiterInfo
from ._text import printable

#: A probe that has met so many requests gives up: nobody reads such a cycle.
_MOST_REQUESTS = 1_000


#: A kind and a name of it.
Name = tuple[Kind, str]


@dataclass(frozen=True, slots=True)
class Wait:
    """A request without a timeout whose task is inside blocks, as its client tells it.

    ``owner`` and ``client`` are those that ``inspect`` tells. ``inside``: what each block is on, and its
    token. ``arrived`` orders requests by age; it is the same for everybody who reads it.
    """

    id: str
    name: str
    mode: Mode
    owner: str
    client: str
    arrived: int
    inside: frozenset[tuple[Name, int]]
    note: str = ""
    kind: Kind = "lock"

    @property
    def where(self) -> Name:
        """What it waits for."""
        return self.kind, self.name

    @property
    def age(self) -> tuple[int, str]:
        """What is larger for a younger request."""
        return self.arrived, self.id


@dataclass(frozen=True, slots=True)
class Question:
    """Who holds and waits for these names? Which tasks of these clients wait?"""

    names: frozenset[Name] = frozenset()
    clients: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Answer:
    """What is missing in an answer is not known."""

    names: Mapping[Name, LockInfo] = field(default_factory=dict)
    waits: Mapping[str, tuple[Wait, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Edge:
    """``wait`` cannot end before ``holder`` leaves. The requests ``queued`` stand between them."""

    wait: Wait
    queued: tuple[WaiterInfo, ...]
    holder: HolderInfo


@dataclass(frozen=True, slots=True)
class Cycle:
    """Each edge's holder is the task of the next edge's request; the last one's is that of the first."""

    edges: tuple[Edge, ...]

    def members(self) -> tuple[tuple[str, str, str, str], ...]:
        """Return name, owner, client and note of each request in it, the youngest first."""
        return tuple(
            member
            for edge in self.edges
            for member in (
                (edge.wait.name, edge.wait.owner, edge.wait.client, edge.wait.note),
                *(
                    (edge.wait.name, waiter.owner, waiter.client, _note(waiter))
                    for waiter in edge.queued
                ),
            )
        )

    def words(self) -> str:
        """Tell it to people."""
        return "; ".join(_words(edge) for edge in self.edges)


Asking = Generator[Question, Answer, "Cycle | None"]


def probe(start: Wait) -> Asking:
    """Look for a cycle whose youngest request is ``start``: the first pass."""
    met = {start.id}
    paths: list[tuple[tuple[Edge, ...], Wait]] = [((), start)]
    while paths and len(met) < _MOST_REQUESTS:
        names = yield Question(names=frozenset(wait.where for _, wait in paths))
        blocked = [
            (path, Edge(wait, queued, holder))
            for path, wait in paths
            for queued, holder in _blockers(names.names.get(wait.where), wait)
        ]
        if not blocked:
            return None
        told = yield Question(clients=frozenset(edge.holder.client for _, edge in blocked))
        paths = []
        for path, edge in blocked:
            for wait in _waits_of(edge, told):
                if wait.id == start.id:
                    return Cycle((*path, edge))
                if wait.id not in met and wait.age < start.age:
                    met.add(wait.id)
                    paths.append(((*path, edge), wait))
    return None


def verify(found: Cycle) -> Asking:
    """Ask for every edge again: the second pass. Return the cycle if all of them are still there."""
    edges = found.edges
    answer = yield Question(
        frozenset(edge.wait.where for edge in edges),
        frozenset(edge.wait.client for edge in edges),
    )
    for edge, following in zip(edges, (*edges[1:], edges[0]), strict=True):
        told = answer.waits.get(edge.wait.client, ())
        there = any(
            holder.token == edge.holder.token
            and holder.owner == edge.holder.owner
            and [waiter.owner for waiter in queued] == [waiter.owner for waiter in edge.queued]
            for queued, holder in _blockers(answer.names.get(edge.wait.where), edge.wait)
        )
        if not there or edge.wait not in told:
            return None
        if (edge.wait.where, edge.holder.token) not in following.wait.inside:
            return None
    return found


def _blockers(
    info: LockInfo | None, wait: Wait
) -> Iterator[tuple[tuple[WaiterInfo, ...], HolderInfo]]:
    """Return the holders that a request waits for, each with the queued requests that lead to it."""
    mine = None if info is None else _place_of(info, wait)
    if info is None or mine is None:
        return
    if wait.kind == "semaphore" and not _has_one_place(info):
        return
    reached: set[tuple[str, int]] = set()
    met = {mine.position}
    leads: list[tuple[tuple[WaiterInfo, ...], WaiterInfo]] = [((), mine)]
    for queued, waiter in leads:
        for holder in info.holders:
            key = (holder.owner, holder.token)
            if key not in reached and _conflict(wait.kind, waiter, holder):
                reached.add(key)
                yield queued, holder
        for other in info.waiters[: waiter.position]:
            blocks = other.position not in met and _conflict(wait.kind, waiter, other)
            if blocks and is_patient(other):
                met.add(other.position)
                leads.append(((*queued, other), other))


def _has_one_place(info: LockInfo) -> bool:
    """Whether a waiter needs the one place that is taken. The limit in use may be another than its own."""
    (holder, *others) = info.holders or (None,)
    return holder is not None and holder.count == 1 and not others and not info.closed_places


def _place_of(info: LockInfo, wait: Wait) -> WaiterInfo | None:
    """Return the request in the queue of its name; None if it does not wait any more."""
    for waiter in info.waiters:
        if (waiter.owner, waiter.client, waiter.mode) == (wait.owner, wait.client, wait.mode):
            return waiter
    return None


def _conflict(kind: Kind, one: WaiterInfo, other: WaiterInfo | HolderInfo) -> bool:
    if kind == "semaphore":
        return True  # also of one owner: it is not reentrant
    return one.owner != other.owner and "exclusive" in (one.mode, other.mode)


def is_patient(waiter: WaiterInfo) -> bool:
    """Tell whether a queued request has certainly no timeout. Of owners with names nobody knows."""
    own = waiter.owner.startswith(f"{waiter.client}-")
    return own and not waiter.owner.endswith(IMPATIENT)


def _waits_of(edge: Edge, told: Answer) -> Iterator[Wait]:
    """Return what the holder's tasks wait for."""
    held = (edge.wait.where, edge.holder.token)
    for wait in told.waits.get(edge.holder.client, ()):
        if held in wait.inside:
            yield wait


def _note(one: WaiterInfo) -> str:
    return str(getattr(one, "note", "") or "")


def _words(edge: Edge) -> str:
    # Owners and notes come from other clients, and this goes to the log and to terminals.
    who = f"{printable(edge.wait.owner)} on {printable(edge.wait.client)}"
    if edge.wait.note:
        who += f" ({printable(edge.wait.note)})"
    behind = "".join(f" behind {printable(waiter.owner)}" for waiter in edge.queued)
    holder = printable(edge.holder.owner)
    return f"{who} waits for {edge.wait.name!r}{behind}, which {holder} holds"
