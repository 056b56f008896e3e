"""Deadlocks are found, and nobody is hurt without one: random histories of waits beside a global oracle.

Names, tasks, blocks, timeouts, cancellations, losses and breaks, told late and forgotten late. Between any
two answers that a probe gets, the world goes on. The oracle sees the whole world at once.

More histories: ``python -m tests.unit.test_cycles 100000``.
"""

from __future__ import annotations

import asyncio
import random
import sys
import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from aiodlock import HolderInfo, LockInfo, WaiterInfo, _cycles
from aiodlock._cycles import TURN, Answer, Asking, Cycle, Edge, Question, Wait, search, verify
from aiodlock._model import IMPATIENT, Kind, Mode
from aiodlock._waits import decode, encode

HISTORIES = 3_000


@dataclass(eq=False)
class Request:
    """One attempt of a task to get a name."""

    id: str
    name: str
    mode: Mode
    owner: str
    task: Task
    patient: bool
    arrived: int
    bare: bool = False
    token: int = 0


@dataclass(eq=False)
class Task:
    """A task of a client; it waits for one request at a time."""

    client: str
    blocks: list[Request] = field(default_factory=list)
    waiting: Request | None = None


@dataclass(eq=False)
class Name:
    """A name of the store: shared holders together, everybody else in order of arrival.

    ``limit``: how many places a semaphore has; 0 for a lock.
    """

    limit: int = 0
    holders: list[Request] = field(default_factory=list)
    queue: list[Request] = field(default_factory=list)


def conflict(one: Request, other: Request) -> bool:
    return "exclusive" in (one.mode, other.mode)


class World:
    """The truth, and what clients have told of their waits."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names = {
            name: Name(rng.choice((0, 0, 0, 1, 2))) for name in "abcd"[: rng.randint(2, 4)]
        }
        self.tasks = [Task(f"c{number % 3}") for number in range(rng.randint(2, 6))]
        self.told: list[tuple[Request, Wait]] = []
        self.number = 0
        self.victims = 0

    # -- what happens ------------------------------------------------------------------------------

    def happen(self) -> None:
        """Let one thing happen somewhere."""
        rng = self.rng
        task = rng.choice(self.tasks)
        chance = rng.random()
        if chance < 0.25:
            self.tell(task)
        elif chance < 0.32:
            self.forget()
        elif chance < 0.35:
            held = [request for name in self.names.values() for request in name.holders]
            if held:
                self.drop(rng.choice(held))  # lost or broken: its task learns it later
        elif task.waiting is not None:
            if chance < 0.40 or not task.waiting.patient:
                self.give_up(task)  # a timeout or a cancellation
        elif chance < 0.80 and len(task.blocks) < 3:
            self.ask(task)
        elif task.blocks:
            self.leave(task)

    def ask(self, task: Task) -> None:
        rng = self.rng
        mine = {request.name for request in task.blocks}
        free = [name for name in self.names if name not in mine]
        if not free:
            return
        self.number += 1
        patient = rng.random() < 0.8
        id = f"{task.client}-{self.number}"
        name = rng.choice(free)
        exclusive = rng.random() < 0.6 and not self.names[name].limit
        request = Request(
            id,
            name,
            "exclusive" if exclusive else "shared",
            id if patient else id + IMPATIENT,
            task,
            patient,
            # Clocks of clients differ.
            self.number + rng.randint(-1, 1),
            bare=rng.random() < 0.1,
        )
        task.waiting = request
        self.names[request.name].queue.append(request)
        self.grant(request.name)

    def grant(self, name: str) -> None:
        at = self.names[name]
        while at.queue and self.fits(at):
            request = at.queue.pop(0)
            self.number += 1
            request.token = self.number
            at.holders.append(request)
            request.task.waiting = None
            request.task.blocks.append(request)

    @staticmethod
    def fits(at: Name) -> bool:
        if at.limit:
            return len(at.holders) < at.limit
        return not any(conflict(at.queue[0], holder) for holder in at.holders)

    def drop(self, request: Request) -> None:
        at = self.names[request.name]
        if request in at.holders:
            at.holders.remove(request)
        elif request in at.queue:
            at.queue.remove(request)
        self.grant(request.name)

    def leave(self, task: Task) -> None:
        self.drop(task.blocks.pop(self.rng.randrange(len(task.blocks)) if task.waiting else -1))

    def give_up(self, task: Task) -> None:
        request, task.waiting = task.waiting, None
        assert request is not None
        self.drop(request)
        if self.rng.random() < 0.5:
            while task.blocks:
                self.leave(task)

    # -- what is told ------------------------------------------------------------------------------

    def tell(self, task: Task) -> None:
        request = task.waiting
        # As a client does: of semaphores it tells those with one place.
        inside = frozenset(
            (self.where(one.name), one.token)
            for one in task.blocks
            if not one.bare and self.names[one.name].limit < 2
        )
        if request is None or not request.patient or not inside:
            return
        if self.names[request.name].limit > 1:
            return
        if any(told is request for told, _ in self.told):
            return
        wait = Wait(
            request.id,
            request.name,
            request.mode,
            request.owner,
            task.client,
            request.arrived,
            inside,
            kind=self.where(request.name)[0],
        )
        self.told.append((request, wait))

    def where(self, name: str) -> tuple[Kind, str]:
        return ("semaphore" if self.names[name].limit else "lock"), name

    def forget(self) -> None:
        """What was told of a wait that is over is taken back, later."""
        for entry in self.told:
            if entry[0].task.waiting is not entry[0]:
                self.told.remove(entry)
                return

    def answer(self, question: Question, between: Callable[[], None]) -> Answer:
        names, waits = {}, {}
        for kind, name in sorted(question.names):
            assert (kind, name) == self.where(name)
            names[kind, name] = replace(self.inspect(name), waiters=())
            between()
        for kind, name in sorted(question.queues):
            names[kind, name] = self.inspect(name)
            between()
        for client in sorted(question.clients):
            waits[client] = {wait.id: wait for _, wait in self.told if wait.client == client}
            between()
        return Answer(names, waits)

    def inspect(self, name: str) -> LockInfo:
        at = self.names[name]
        return LockInfo(
            name,
            tuple(
                HolderInfo(one.owner, one.mode, one.token, 1, 1.0, one.task.client)
                for one in at.holders
            ),
            tuple(
                WaiterInfo(one.owner, one.mode, position, 1.0, one.task.client)
                for position, one in enumerate(at.queue)
            ),
            0,
        )

    # -- the oracle --------------------------------------------------------------------------------

    def edges(self, request: Request) -> list[Request]:
        """What a waiting request waits for, by the definition."""
        at = self.names[request.name]
        if at.limit > 1:
            return []
        found = [
            holder.task.waiting
            for holder in at.holders
            if (at.limit or conflict(request, holder))
            and not holder.bare
            and holder in holder.task.blocks
            and holder.task.waiting is not None
        ]
        found += [
            other
            for other in at.queue[: at.queue.index(request)]
            if at.limit or conflict(request, other)
        ]
        return [other for other in found if other.patient]

    def is_in_a_cycle(self, start: Request) -> bool:
        met, to_do = set(), self.edges(start)
        while to_do:
            request = to_do.pop()
            if request is start:
                return True
            if request not in met:
                met.add(request)
                to_do += self.edges(request)
        return False

    def waiting(self) -> list[Request]:
        return [
            task.waiting for task in self.tasks if task.waiting is not None and task.waiting.patient
        ]

    def is_true(self, cycle: Cycle) -> bool:
        """Tell whether exactly this cycle stands at this moment, and its first request is the youngest."""
        waiting = {request.id: request for request in self.waiting()}
        members = [waiting.get(edge.wait.id) for edge in cycle.edges]
        if None in members or len({*members}) != len(members):
            return False
        for edge, request, following in zip(
            cycle.edges, members, (*members[1:], members[0]), strict=True
        ):
            assert request is not None
            assert following is not None
            for queued in edge.queued:
                ahead = [other for other in self.edges(request) if other.owner == queued.owner]
                if not ahead:
                    return False
                request = ahead[0]
            if following not in self.edges(request):
                return False
        first, *others = (edge.wait.age for edge in cycle.edges)
        return all(other < first for other in others)


def ask(world: World, asking: Asking[list[Cycle]], between: Callable[[], None]) -> list[Cycle]:
    question: Question | None = None
    while True:
        try:
            answer = None if question in (None, TURN) else world.answer(question, between)
            question = asking.send(answer)  # type: ignore[arg-type]
        except StopIteration as done:
            found: list[Cycle] = done.value
            return found


def play(seed: int, *, second_pass: bool = True) -> World:
    """Play one history; raise AssertionError if a request without a deadlock is hurt, or one is left."""
    rng = random.Random(seed)
    world = World(rng)

    def between() -> None:
        while rng.random() < 0.5:
            world.happen()

    def check(wait: Wait, request: Request, between: Callable[[], None]) -> None:
        found = ask(world, search([wait]), between)
        if not found:
            return
        was_true = world.is_true(found[0])
        if second_pass:
            between()
            found = ask(world, verify(found), between)
        if not found or request.task.waiting is not request:
            return
        assert was_true, f"seed {seed}: no deadlock: {found[0].words()}"
        world.victims += 1
        world.give_up(request.task)

    for _ in range(rng.randint(10, 80)):
        world.happen()
        if world.told and rng.random() < 0.3:
            request, wait = rng.choice(world.told)
            if request.task.waiting is request:
                check(wait, request, between)
    # Now nothing else happens: whoever waits is told, and every cycle has to go.
    for _ in range(30):
        for task in world.tasks:
            world.tell(task)
        before = world.victims
        for request, wait in list(world.told):
            if request.task.waiting is request:
                check(wait, request, lambda: None)
        if world.victims == before:
            break
    for request in world.waiting():
        assert not world.is_in_a_cycle(request), f"seed {seed}: a deadlock was not found"
    return world


def test_every_deadlock_is_found_and_nobody_else_is_hurt() -> None:
    victims = sum(play(seed).victims for seed in range(HISTORIES))
    assert victims > HISTORIES / 20


def test_without_the_second_pass_somebody_is_hurt_for_nothing() -> None:
    def play_all() -> None:
        for seed in range(HISTORIES):
            play(seed, second_pass=False)

    with pytest.raises(AssertionError, match="no deadlock"):
        play_all()


# -- one by one ------------------------------------------------------------------------------------


def wait_of(number: int, name: str, *inside: tuple[str, int], mode: Mode = "exclusive") -> Wait:
    client = f"c{number}"
    kind: Kind = "lock"
    blocks = frozenset(((kind, one), token) for one, token in inside)
    return Wait(f"{client}-w", name, mode, f"{client}-w", client, number, blocks)


def info(
    name: str, holders: list[tuple[str, Mode, int]], waiters: list[tuple[str, Mode]]
) -> LockInfo:
    return LockInfo(
        name,
        tuple(
            HolderInfo(owner, mode, token, 1, 9.0, owner.partition("-")[0])
            for owner, mode, token in holders
        ),
        tuple(
            WaiterInfo(owner, mode, position, 9.0, owner.partition("-")[0])
            for position, (owner, mode) in enumerate(waiters)
        ),
        0,
    )


def found(start: Wait, infos: list[LockInfo], *waits: Wait) -> Cycle | None:
    answer = Answer(
        {(one.kind, one.name): one for one in infos},
        {wait.client: {wait.id: wait} for wait in waits},
    )
    asking = search([start])
    try:
        next(asking)
        while True:
            asking.send(answer)
    except StopIteration as done:
        cycles: list[Cycle] = done.value
        return cycles[0] if cycles else None


def test_two_names_in_two_orders() -> None:
    one, two = wait_of(1, "b", ("a", 10)), wait_of(2, "a", ("b", 20))
    infos = [
        info("a", [("c1-h", "exclusive", 10)], [("c2-w", "exclusive")]),
        info("b", [("c2-h", "exclusive", 20)], [("c1-w", "exclusive")]),
    ]
    cycle = found(two, infos, one, two)
    assert cycle is not None
    assert cycle.members() == (("a", "c2-w", "c2", ""), ("b", "c1-w", "c1", ""))
    assert cycle.words() == (
        "c2-w on c2 waits for 'a', which c1-h holds; c1-w on c1 waits for 'b', which c2-h holds"
    )
    assert found(one, infos, one, two) is None, "the older one is spared"


@pytest.mark.parametrize("bad", ["\ud800", "", "x" * 513, 7, None])
async def test_waits_that_no_client_can_have_told_are_left_out(bad: Any) -> None:
    good = wait_of(1, "b", ("a", 10))
    told = [
        good,
        replace(good, id="2", name=bad),
        replace(good, id="3", inside=frozenset([(("lock", bad), 10)])),
    ]
    record, _ = await encode(told)
    assert await decode("c1", record) == {good.id: good}


@pytest.mark.parametrize(
    "text",
    [
        b"\0" * 50_000_000,
        b"[" * 100_000 + b"\n",
        b"5\n",
        b"[1,2]\n",
        b'[["lock","a","exclusive",[[["lock"],"b",1]],[["i","",1,""]]]]\n',
        b'[["lock","a","exclusive",[["lock","b",1e999]],[["i","",1,""]]]]\n',
        b'[["lock","a","exclusive",[["lock","b",' + b"9" * 5000 + b']],[["i","",1,""]]]]\n',
    ],
)
async def test_records_that_no_client_can_have_written_are_empty_and_stop_nobody(
    text: bytes,
) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    record = packer.compress(text) + packer.flush()
    assert await decode("c1", record) == {}
    counting.cancel()
    assert turns >= 16 or len(text) < 1_000_000


async def test_a_record_has_the_oldest_waits_as_far_as_they_fit() -> None:
    waits = [
        replace(wait_of(1, "hot", (f"n{at}", at)), id=f"c1-{at}", arrived=at)
        for at in range(20_000)
    ]
    waits = [replace(wait, owner=wait.id) for wait in waits]
    record, named = await encode(waits)
    assert len(record) <= 64 * 1024
    told = list((await decode("c1", record)).values())
    assert told == waits[: len(told)]
    assert named == {block for wait in told for block in wait.inside}
    assert len(told) > 4_000


def calls_in_turns(send: Callable[[Any], Any], answer: Callable[[Any], Any]) -> list[int]:
    """Run something to its end; return how many calls each of its turns of the loop made."""
    turns, calls, told = list[int](), 0, None

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    while True:
        calls = 0
        sys.setprofile(count)
        try:
            asked = send(told)
        except StopIteration:
            return turns
        finally:
            sys.setprofile(None)
            turns.append(calls)
        told = answer(asked)


def test_each_turn_of_the_loop_does_little_for_a_record_of_thousands_of_waits() -> None:
    waits = [replace(wait_of(1, "hot", (f"n{at}", at)), id=f"c1-{at}") for at in range(5_000)]
    turns = calls_in_turns(encode(waits).send, lambda _: None)
    assert len(turns) >= 50
    assert max(turns) < 3_000, "some for each of a hundred waits"


def test_each_turn_of_the_loop_does_little_for_a_thousand_deadlocks() -> None:
    waits, infos = list[Wait](), list[LockInfo]()
    for at in range(1_000):
        for one, other, side in (("a", "b", 0), ("b", "a", 1)):
            mine, its, number = f"{one}{at}", f"{other}{at}", 2 * at + side
            wait = wait_of(1, its, (mine, number))
            waits.append(replace(wait, id=f"c1-{number}", owner=f"c1-{number}", arrived=number))
            infos.append(info(mine, [(f"c1-{number}", "exclusive", number)], []))
    answer = Answer(
        {(one.kind, one.name): one for one in infos}, {"c1": {wait.id: wait for wait in waits}}
    )
    cycles = list[Cycle]()

    def probe() -> Generator[Question, Answer, None]:
        cycles.extend((yield from search(waits, "c1")))
        cycles[:] = yield from verify(cycles, "c1")

    turns = calls_in_turns(probe().send, lambda _: answer)
    assert len(cycles) == 1_000
    assert max(turns) < 10_000, "some for each of the waits, or of a slice of the steps"


def test_number_of_waits_takes_nothing_from_the_steps_of_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a search among very many would find nothing, again and again."""
    monkeypatch.setattr(_cycles, "_MOST_STEPS", 1_000)
    waits, infos = list[Wait](), list[LockInfo]()
    for at in range(500):
        for one, other, side in (("a", "b", 0), ("b", "a", 1)):
            mine, its, number = f"{one}{at}", f"{other}{at}", 2 * at + side
            wait = wait_of(1, its, (mine, number))
            waits.append(replace(wait, id=f"c1-{number}", owner=f"c1-{number}", arrived=number))
            infos.append(info(mine, [(f"c1-{number}", "exclusive", number)], []))
    answer = Answer(
        {(one.kind, one.name): one for one in infos}, {"c1": {wait.id: wait for wait in waits}}
    )
    cycles = list[Cycle]()

    def probe() -> Generator[Question, Answer, None]:
        cycles.extend((yield from search(waits, "c1")))

    calls_in_turns(probe().send, lambda _: answer)
    assert cycles


def test_crossed_readers_and_writers_lose_as_few_as_are_needed() -> None:
    # Two read a and want to write b, two read b and want to write a: r1, s1, r2, s2 in this order.
    waits = [
        wait_of(1, "b", ("a", 11)),
        wait_of(2, "a", ("b", 12)),
        wait_of(3, "b", ("a", 13)),
        wait_of(4, "a", ("b", 14)),
    ]
    infos = [
        info(
            "a",
            [("c1-h", "shared", 11), ("c3-h", "shared", 13)],
            [("c2-w", "exclusive"), ("c4-w", "exclusive")],
        ),
        info(
            "b",
            [("c2-h", "shared", 12), ("c4-h", "shared", 14)],
            [("c1-w", "exclusive"), ("c3-w", "exclusive")],
        ),
    ]
    victims = [wait.client for wait in waits if found(wait, infos, *waits) is not None]
    assert victims == ["c2", "c4"]


def test_what_others_have_written_breaks_no_line_of_the_log() -> None:
    bad = "x\nERROR \x1b[2Jforged\u202e"
    waiter = WaiterInfo(bad, "exclusive", 0, 9.0, "c2")
    wait = Wait("2", bad, "exclusive", bad, bad, 2, frozenset(), bad)
    words = Cycle((Edge(wait, (waiter,), HolderInfo(bad, "exclusive", 1, 1, 9.0, "c1")),)).words()
    assert words.isprintable()
    assert "forged" in words


@pytest.mark.parametrize(("last", "deadlock"), [("", True), (IMPATIENT, False)])
def test_a_writer_between_two_readers(last: str, deadlock: bool) -> None:
    # The reader waits only because a writer stands in front of it; a writer with a timeout goes away.
    reader, holder = wait_of(2, "a", ("b", 20), mode="shared"), wait_of(1, "b", ("a", 10))
    infos = [
        info(
            "a",
            [("c1-h", "shared", 10)],
            [(f"c3-w{last}", "exclusive"), ("c2-w", "shared")],
        ),
        info("b", [("c2-h", "exclusive", 20)], [("c1-w", "exclusive")]),
    ]
    cycle = found(reader, infos, reader, holder)
    assert (cycle is not None) is deadlock
    if cycle is not None:
        assert [member[1] for member in cycle.members()] == ["c2-w", "c3-w", "c1-w"]


def test_readers_and_one_owner_do_not_wait_for_each_other() -> None:
    one, two = wait_of(1, "b", ("a", 10)), wait_of(2, "a", ("b", 20), mode="shared")
    held = info("b", [("c2-h", "exclusive", 20)], [("c1-w", "exclusive")])
    shared = info("a", [("c1-h", "shared", 10)], [("c2-w", "shared")])
    assert found(two, [shared, held], one, two) is None
    same = info("a", [("c2-w", "exclusive", 10)], [("c2-w", "shared")])
    assert found(two, [same, held], one, two) is None


def test_a_task_that_waits_for_itself() -> None:
    mine = wait_of(1, "a", ("a", 10))
    cycle = found(mine, [info("a", [("billing", "exclusive", 10)], [("c1-w", "exclusive")])], mine)
    assert cycle is None  # the holder's client is unknown
    held = LockInfo(
        "a",
        (HolderInfo("billing", "exclusive", 10, 1, 9.0, "c1"),),
        (WaiterInfo("c1-w", "exclusive", 0, 9.0, "c1"),),
        0,
    )
    assert found(mine, [held], mine) is not None


def test_bare_leases_and_unknown_names_make_no_edge() -> None:
    one, two = wait_of(1, "b"), wait_of(2, "a", ("b", 20))
    infos = [
        info("a", [("c1-h", "exclusive", 10)], [("c2-w", "exclusive")]),
        info("b", [("c2-h", "exclusive", 20)], [("c1-w", "exclusive")]),
    ]
    assert found(two, infos, one, two) is None
    assert found(two, infos[1:], one, two) is None


if __name__ == "__main__":
    played = [play(seed) for seed in range(int(sys.argv[1]))]
    print(f"{len(played)} histories, {sum(one.victims for one in played)} victims, 0 violations")
