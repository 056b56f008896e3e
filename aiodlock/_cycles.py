"""Finding deadlocks: cycles of requests that wait for each other, across names, tasks and processes.

A waiting request needs everything that it waits for (the "AND model" of Chandy, Misra and Haas,
*Distributed Deadlock Detection*, 1983). It waits along two kinds of edges:

- for a holder that it conflicts with, whose task is inside a block on the name;
- for a conflicting request in front of it in the queue, which waits for such a holder.

A semaphore of one place is like a name that everybody takes exclusively. With more places a request needs
any one of them, so it makes no edge. A request with a timeout ends its wait by itself, so it makes none
either.

``search`` is the first pass, for all waits of one client together. Each step is linear in what it has read:

1. Follow the waits to the holders of their names, and these to what the holders' tasks wait for. Each name
   and each client is asked about once. Queues are not read: they may be long.
2. Look at the names alone. Who waits for a name depends on each task inside of it, and so on the name that
   this task waits for. Mostly there is no circle of names, and the search ends here.
3. Within each circle, read the queues that matter, and look for cycles of requests.

Each answer is of another moment, so what ``search`` finds may never have stood. ``verify`` is the second
pass: it asks for every edge again. Each edge is there before and after the moment between the passes, under
the same request id and token. So the whole cycle was there at that moment, and no member can leave a cycle
by itself.

The victim of a cycle is its youngest request, and a client gives up only requests of its own. Where a few
requests wait for each other in several ways, some victims are spared: the other victims break their cycles.

No I/O: both yield what they ask, and are sent the answer. Long work yields ``TURN`` between its slices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

from ._model import IMPATIENT, HolderInfo, Kind, LockInfo, Mode, WaiterInfo
from ._text import printable

_T = TypeVar("_T")

#: After so many steps (a few milliseconds) the event loop gets its turn.
_SLICE = 1_000
#: So many steps does a request take, or a name, that is looked at by itself.
_OF_ITS_OWN = 10
#: The search for cycles of requests ends after so many steps. The next search may find the rest.
_MOST_STEPS = 300_000
#: Victims are spared in circles of so many requests at most.
_FEW = 64

#: A kind and a name of it.
Name = tuple[Kind, str]
#: A block: what it is on, and the token of the grant that it relies on.
Block = tuple[Name, int]


@dataclass(frozen=True, slots=True)
class Wait:
    """A request without a timeout whose task is inside blocks, as its client tells it.

    ``owner`` and ``client`` are those that ``inspect`` tells. ``inside``: the task's blocks. ``arrived``
    orders requests by age; it is the same for everybody who reads it.
    """

    id: str
    name: str
    mode: Mode
    owner: str
    client: str
    arrived: int
    inside: frozenset[Block]
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
    """Who holds ``names``? Who holds ``queues``, and who waits for them? What do ``clients`` wait for?"""

    names: frozenset[Name] = frozenset()
    queues: frozenset[Name] = frozenset()
    clients: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Answer:
    """What is missing in an answer is not known. ``waits``: of each client, by the requests' ids."""

    names: Mapping[Name, LockInfo] = field(default_factory=dict)
    waits: Mapping[str, Mapping[str, Wait]] = field(default_factory=dict)


#: Stands for a question: give the event loop its turn.
TURN: Final = Question()
#: Something that asks, and returns a result at its end.
Asking: TypeAlias = Generator[Question, Answer, _T]


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


class _Steps:
    """Counts the steps of a search. Mutable state: ``taken``, ``_next_turn``."""

    def __init__(self) -> None:
        self.taken = 0
        self._next_turn = _SLICE

    def end_slice(self, steps: int = 1) -> bool:
        """Count; return whether the event loop is to have its turn now."""
        self.taken += steps
        if self.taken < self._next_turn:
            return False
        self._next_turn = self.taken + _SLICE
        return True


# -- the first pass ----------------------------------------------------------------------------------


def search(mine: Sequence[Wait], me: str = "") -> Asking[list[Cycle]]:
    """Look for cycles whose youngest request is one of these: the first pass.

    :param me: the client whose waits are known exactly: they need not be looked for in queues.
    """
    steps = _Steps()
    known = _Known(me)
    yield from _follow(known, mine, steps)
    circles = yield from _circles_of(known, steps)
    own = {wait.id for wait in mine}
    meant: list[list[Wait]] = []
    queues: set[Name] = set()
    for waits in (yield from _by_circle(known.reached.values(), circles, steps)):
        if any(wait.id in own for wait in waits):
            meant.append(waits)
            queues.update(wait.where for wait in waits if known.needs_queue(wait))
        if steps.end_slice(len(waits)):
            yield TURN
    if queues:
        answer = yield Question(queues=frozenset(queues))
        known.names |= answer.names
    found: list[Cycle] = []
    for waits in meant:
        victims = yield from _victims_of(_Graph(known, waits), own, steps)
        found += [cycle for id, cycle in victims.items() if id in own]
    return found


class _Known:
    """What was read.

    Mutable state: ``names``, ``_relying`` (of each client that was asked about: its waits, by the blocks of
    their tasks), ``reached`` (by id: one's own waits, and those that they depend on).
    """

    def __init__(self, me: str) -> None:
        self.me = me
        self.names: dict[Name, LockInfo] = {}
        self.reached: dict[str, Wait] = {}
        self._relying: dict[str, dict[Block, list[Wait]]] = {}

    def add(self, client: str, waits: Iterable[Wait], steps: _Steps) -> Asking[None]:
        """Take in what a client waits for."""
        index = self._relying[client] = {}
        for wait in waits:
            for block in wait.inside:
                index.setdefault(block, []).append(wait)
            if steps.end_slice(len(wait.inside)):
                yield TURN

    def lacks(self, client: str) -> bool:
        """Whether this client was not asked about yet."""
        return client not in self._relying

    def relying_on(self, where: Name, holder: HolderInfo) -> Sequence[Wait]:
        """Return the waits of tasks inside a block that this holder stands for."""
        return self._relying.get(holder.client, {}).get((where, holder.token), ())

    def needs_queue(self, wait: Wait) -> bool:
        """Whether the queue matters: another client's wait may be over, and a reader may wait for a writer
        in front of it."""
        info = self.names.get(wait.where)
        if info is None or wait.client != self.me:
            return True
        return not all(_conflict(wait.kind, wait, holder) for holder in info.holders)


def _follow(known: _Known, mine: Iterable[Wait], steps: _Steps) -> Asking[None]:
    """Read the holders of what is waited for, what their tasks wait for, the holders of that, and so on."""
    new = list(mine)
    while new:
        known.reached.update((wait.id, wait) for wait in new)
        asked = {wait.where for wait in new} - known.names.keys()
        if not asked:
            return
        answer = yield Question(names=frozenset(asked))
        holders: list[tuple[Name, HolderInfo]] = []
        for where in asked:
            info = answer.names.get(where) or LockInfo(where[1], (), (), 0, kind=where[0])
            known.names[where] = info
            holders += [(where, holder) for holder in info.holders]
        clients = {holder.client for _, holder in holders if known.lacks(holder.client)}
        if clients:
            told = yield Question(clients=frozenset(clients))
            for client in clients:
                yield from known.add(client, told.waits.get(client, {}).values(), steps)
        new = []
        for where, holder in holders:
            for wait in known.relying_on(where, holder):
                if wait.id not in known.reached:
                    known.reached[wait.id] = wait
                    new.append(wait)
            if steps.end_slice():
                yield TURN


def _circles_of(known: _Known, steps: _Steps) -> Asking[dict[Name, int]]:
    """Return each name that depends on itself, with the number of its circle."""
    edges: dict[Name, set[Name]] = {}
    for where, info in known.names.items():
        for holder in info.holders:
            for wait in known.relying_on(where, holder):
                edges.setdefault(where, set()).add(wait.where)
                if steps.end_slice():
                    yield TURN
    return (yield from _components(edges, steps))


def _components(edges: Mapping[Name, Collection[Name]], steps: _Steps) -> Asking[dict[Name, int]]:
    """Number the strongly connected components that have a cycle (Tarjan, 1972, without recursion)."""
    order: dict[Name, int] = {}
    lowest: dict[Name, int] = {}
    numbers: dict[Name, int] = {}
    path: list[Name] = []
    on_path: set[Name] = set()
    to_do: list[tuple[Name, Iterator[Name]]] = []

    def enter(name: Name) -> None:
        order[name] = lowest[name] = len(order)
        path.append(name)
        on_path.add(name)
        to_do.append((name, iter(edges.get(name, ()))))

    for root in edges:
        if root not in order:
            enter(root)
        while to_do:
            if steps.end_slice():
                yield TURN
            name, targets = to_do[-1]
            target = next(targets, None)
            if target is None:
                to_do.pop()
                if to_do:
                    above = to_do[-1][0]
                    lowest[above] = min(lowest[above], lowest[name])
                if lowest[name] == order[name]:
                    members = [path.pop()]
                    while members[-1] != name:
                        members.append(path.pop())
                    on_path.difference_update(members)
                    if len(members) > 1 or name in edges.get(name, ()):
                        numbers.update(dict.fromkeys(members, order[name]))
            elif target not in order:
                enter(target)
            elif target in on_path:
                lowest[name] = min(lowest[name], order[target])
    return numbers


def _by_circle(
    waits: Iterable[Wait], circles: Mapping[Name, int], steps: _Steps
) -> Asking[list[list[Wait]]]:
    """Return the waits along each circle of names."""
    found: dict[int, list[Wait]] = {}
    for wait in waits:
        number = circles.get(wait.where)
        if number is not None and any(circles.get(at) == number for at, _ in wait.inside):
            found.setdefault(number, []).append(wait)
        if steps.end_slice():
            yield TURN
    return list(found.values())


def _victims_of(graph: _Graph, own: Collection[str], steps: _Steps) -> Asking[dict[str, Cycle]]:
    """Return a cycle of each request that is the youngest in one, without those that can be spared."""
    waits = sorted(graph.waits.values(), key=lambda wait: wait.age)
    few = len(waits) <= _FEW
    if steps.end_slice(_OF_ITS_OWN * len(waits)):  # there may be thousands of circles
        yield TURN
    victims: dict[str, Cycle] = {}
    most = steps.taken + _MOST_STEPS  # what came before is linear
    for start in waits:
        if steps.taken > most:
            break
        if few or start.id in own:
            cycle = yield from graph.cycle_of(start, steps)
            if cycle is not None:
                victims[start.id] = cycle
    if few and len(victims) > 1:
        edges = {wait.id: graph.successors(wait) for wait in waits}
        for candidate in list(victims):  # the oldest first
            others = victims.keys() - {candidate}
            if not _has_cycle({id: to - others for id, to in edges.items() if id not in others}):
                del victims[candidate]
            if steps.end_slice(len(waits)):
                yield TURN
    return victims


def _has_cycle(edges: dict[str, set[str]]) -> bool:
    """Whether something is left when all that leads nowhere is taken away, again and again."""
    while True:
        ends = {id for id, to in edges.items() if not to}
        if not ends:
            return bool(edges)
        edges = {id: to - ends for id, to in edges.items() if id not in ends}


class _Graph:
    """The requests along one circle of names. An edge leads through a holder to its tasks' requests."""

    def __init__(self, known: _Known, waits: Iterable[Wait]) -> None:
        self.waits = {wait.id: wait for wait in waits}
        self._known = known
        self._queues: dict[Name, _Queue] = {}

    def cycle_of(self, start: Wait, steps: _Steps) -> Asking[Cycle | None]:
        """Return a shortest cycle whose youngest request this is."""
        came: dict[str, Edge | None] = {start.id: None}
        left: dict[Name, _Unmet] = {}
        to_do = deque([start])
        while to_do:
            wait = to_do.popleft()
            for edge in self._edges(wait, left):
                for other in self._behind(edge):
                    if other.id == start.id:
                        return Cycle(_path(came, edge))
                    if other.id not in came and other.age < start.age:
                        came[other.id] = edge
                        to_do.append(other)
                    if steps.end_slice():
                        yield TURN
                if steps.end_slice():
                    yield TURN
        return None

    def successors(self, wait: Wait) -> set[str]:
        """Return the ids of the requests that this one waits for."""
        return {other.id for edge in self._edges(wait, {}) for other in self._behind(edge)}

    def _behind(self, edge: Edge) -> Iterator[Wait]:
        for wait in self._known.relying_on(edge.wait.where, edge.holder):
            if wait.id in self.waits:
                yield wait

    def _edges(self, wait: Wait, left: dict[Name, _Unmet]) -> Iterator[Edge]:
        """Return the edges of a request, without holders that were met before.

        :param left: those that were not, of each name that was come by.
        """
        where = wait.where
        if (queue := self._queues.get(where)) is None:
            if (info := self._known.names.get(where)) is None:
                return
            queue = self._queues[where] = _Queue(where[0], info)
        place = queue.place_of(wait, self._known)
        if place is None:
            return
        if where not in left:
            left[where] = queue.unmet()
        for queued, holder in queue.blockers(place, left[where]):
            yield Edge(wait, queued, holder)


def _path(came: Mapping[str, Edge | None], last: Edge) -> tuple[Edge, ...]:
    """Return the edges that lead from the start to the last one."""
    edges: list[Edge] = []
    edge: Edge | None = last
    while edge is not None:
        edges.append(edge)
        edge = came[edge.wait.id]
    return tuple(reversed(edges))


#: Holders that a search has not met yet: those that hold exclusively, and the others.
_Unmet: TypeAlias = tuple[list[HolderInfo], list[HolderInfo]]


class _Queue:
    """One name: its holders, and the queue as far as it was read.

    Two writers matter, since only one of them can have the owner of a holder.
    """

    def __init__(self, kind: Kind, info: LockInfo) -> None:
        self._kind = kind
        self._info = info
        self._places: dict[tuple[str, str, Mode], WaiterInfo] = {}
        for waiter in reversed(info.waiters):
            self._places[waiter.owner, waiter.client, waiter.mode] = waiter
        self._writers = [
            waiter for waiter in info.waiters if waiter.mode == "exclusive" and is_patient(waiter)
        ][:2]
        self._holders: dict[tuple[str, int], list[HolderInfo]] = {}
        for holder in info.holders:
            self._holders.setdefault((holder.owner, holder.token), []).append(holder)

    def unmet(self) -> _Unmet:
        """Return all holders."""
        holders = self._info.holders
        if self._kind == "semaphore" and not _has_one_place(self._info):
            return [], []
        return (
            [holder for holder in holders if holder.mode == "exclusive"],
            [holder for holder in holders if holder.mode != "exclusive"],
        )

    def place_of(self, wait: Wait, known: _Known) -> WaiterInfo | None:
        """Return where a request waits; None if it does not wait any more."""
        place = self._places.get((wait.owner, wait.client, wait.mode))
        if place is None and not known.needs_queue(wait):
            place = WaiterInfo(wait.owner, wait.mode, 0, None, wait.client)
        return place

    def blockers(
        self, place: WaiterInfo, unmet: _Unmet
    ) -> Iterator[tuple[tuple[WaiterInfo, ...], HolderInfo]]:
        """Return the holders that a request waits for, each with the queued request that leads to it, if
        one does. They are taken from ``unmet``."""
        kind = self._kind
        ahead = [
            writer
            for writer in self._writers
            if writer.position < place.position and _conflict(kind, place, writer)
        ]
        reads = kind != "semaphore" and place.mode == "shared" and not ahead
        for holders in unmet[:1] if reads else unmet:
            found, holders[:] = holders[:], []
            for holder in found:
                if _conflict(kind, place, holder):
                    yield (), holder
                elif leads := [one for one in ahead if _conflict(kind, one, holder)]:
                    yield (leads[0],), holder
                else:
                    holders.append(holder)

    def has(self, edge: Edge, me: str) -> bool:
        """Tell whether a request still waits for this holder, and in the same way."""
        wait, holder = edge.wait, edge.holder
        if wait.kind == "semaphore" and not _has_one_place(self._info):
            return False
        place = self._places.get((wait.owner, wait.client, wait.mode))
        if place is None and (edge.queued or wait.client != me):
            return False
        one: Wait | WaiterInfo = wait
        for writer in edge.queued:
            there = self._places.get((writer.owner, writer.client, writer.mode))
            if there is None or place is None or there.position >= place.position:
                return False
            one = there
        return any(
            _conflict(wait.kind, one, other)
            for other in self._holders.get((holder.owner, holder.token), ())
        )


# -- the second pass ---------------------------------------------------------------------------------


def verify(found: Sequence[Cycle], me: str = "") -> Asking[list[Cycle]]:
    """Ask for every edge again: the second pass. Return the cycles of which all edges are still there."""
    edges = [edge for cycle in found for edge in cycle.edges]
    queues = {edge.wait.where for edge in edges if edge.queued or edge.wait.client != me}
    answer = yield Question(
        frozenset(edge.wait.where for edge in edges) - queues,
        frozenset(queues),
        frozenset(edge.wait.client for edge in edges),
    )
    steps = _Steps()
    names: dict[Name, _Queue] = {}
    for where, info in answer.names.items():
        names[where] = _Queue(where[0], info)
        if steps.end_slice(_OF_ITS_OWN):
            yield TURN
    there: list[Cycle] = []
    for cycle in found:
        if steps.end_slice(_OF_ITS_OWN * len(cycle.edges)):
            yield TURN
        if all(
            # A wait that was told anew, since its task has left a block, is not equal.
            edge.wait == answer.waits.get(edge.wait.client, {}).get(edge.wait.id)
            and edge.wait.where in names
            and names[edge.wait.where].has(edge, me)
            and (edge.wait.where, edge.holder.token) in following.wait.inside
            for edge, following in zip(cycle.edges, (*cycle.edges[1:], cycle.edges[0]), strict=True)
        ):
            there.append(cycle)
    return there


def _has_one_place(info: LockInfo) -> bool:
    """Whether a waiter needs the one place that is taken. The limit in use may be another than its own."""
    (holder, *others) = info.holders or (None,)
    return holder is not None and holder.count == 1 and not others and not info.closed_places


def _conflict(kind: Kind, one: Wait | WaiterInfo, other: WaiterInfo | HolderInfo) -> bool:
    if kind == "semaphore":
        return True  # also of one owner: it is not reentrant
    return one.owner != other.owner and "exclusive" in (one.mode, other.mode)


def is_patient(waiter: WaiterInfo) -> bool:
    """Tell whether a queued request has certainly no timeout. Of owners with names nobody knows."""
    own = waiter.owner.startswith(f"{waiter.client}-")
    return own and not waiter.owner.endswith(IMPATIENT)


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
