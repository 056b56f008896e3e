"""The keeper alone: what is due when, what the three outcomes do, and that it keeps nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from aiodlock._clock import now
from aiodlock._errors import BackendUnavailable, LossReason
from aiodlock._model import Capabilities, Gone, Granted, Refused, StoreRequest, Terms, Waiting
from aiodlock.backends.keeper import Keeper, outcome
from aiodlock.backends.keeper import Outcome as Follows
from aiodlock.backends.kept import Kept as KeptRequest
from aiodlock.backends.kept_place import KeptPlace
from aiodlock.backends.stage import Stage

from ..inside import schedule_of
from ..scenes import takes, until

Outcome = Granted | Waiting | Gone | Exception


@dataclass
class Answer:
    """What the store says of one request. As with a real store, nobody has to wait for it."""

    answer: Callable[[StoreRequest, float], Outcome]
    request: StoreRequest
    length: float

    def __await__(self) -> Generator[Any, None, Granted | Waiting | Gone]:
        yield from ()
        outcome = self.answer(self.request, self.length)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Answers:
    """A store that is asked to extend, and answers as the test says."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, float]]] = []
        self.answer: Callable[[StoreRequest, float], Outcome] = lambda _, length: Granted(
            1, now() + length
        )
        self.first: Granted | Waiting | Refused | Gone = Gone("gone")
        self.watched: dict[str, bool] = {}
        self.capabilities = Capabilities()

    async def run(self, listener: object, ready: Callable[[], None]) -> None:
        ready()
        await asyncio.Event().wait()

    async def acquire(
        self, request: StoreRequest, *, wait: bool
    ) -> Granted | Waiting | Refused | Gone:
        return self.first

    def extend(
        self, batch: Sequence[tuple[StoreRequest, float]]
    ) -> Sequence[Awaitable[Granted | Waiting | Gone]]:
        self.asked.append([(request.id, length) for request, length in batch])
        return [Answer(self.answer, request, length) for request, length in batch]

    def server_of(self, request: StoreRequest) -> object:
        return None

    def watch(self, request: StoreRequest, watching: bool) -> None:
        self.watched[request.id] = watching

    def lengths(self, id: str) -> list[float]:
        return [length for batch in self.asked for one, length in batch if one == id]


class Heard:
    """What a place has told its listener."""

    def __init__(self) -> None:
        self.granted_times = self.recalls = 0
        self.reasons: list[LossReason] = []
        self.results: list[tuple[bytes, bool]] = []
        self.failed: list[Exception] = []
        self.gave_up: list[BackendUnavailable] = []

    def granted(self) -> None:
        self.granted_times += 1

    def gone(self, reason: LossReason) -> None:
        self.reasons.append(reason)

    def recorded(self, result: bytes, *, unsure: bool) -> None:
        self.results.append((result, unsure))

    def extension_failed(self, error: Exception) -> None:
        self.failed.append(error)

    def recalled(self) -> None:
        self.recalls += 1

    def unavailable(self, error: BackendUnavailable) -> None:
        self.gave_up.append(error)


class Kept:
    """A keeper, and places that it keeps."""

    def __init__(self) -> None:
        self.store: Any
        self.store = Answers()
        self.unavailable_after = 0.2
        self.keeper = Keeper(self.store, self.unavailable_after)
        self.heard = Heard()

    async def place(
        self,
        first: Granted | Waiting | Refused | Gone,
        id: str = "a",
        *,
        ttl: float = 0.6,
        waiter_ttl: float = 0.3,
        margin: float = 0.0,
        max_hold: float | None = None,
        auto_extend: bool = True,
    ) -> KeptPlace:
        terms = Terms(
            "lock",
            "n",
            "exclusive",
            0,
            ttl if max_hold is None else min(ttl, max_hold),
            waiter_ttl,
            0.0,
            margin,
            max_hold,
            auto_extend,
        )
        place = KeptPlace(self.keeper, terms, id, "t1", self.heard)
        self.store.first = first
        await place.acquire(wait=True)
        return place

    async def holder(self, id: str = "a", *, ttl: float = 0.6, **options: Any) -> KeptPlace:
        return await self.place(Granted(1, now() + ttl), id, ttl=ttl, **options)

    async def waiter(self, id: str = "a", *, waiter_ttl: float = 0.3, **options: Any) -> KeptPlace:
        first = Waiting(now() + waiter_ttl, None)
        return await self.place(first, id, waiter_ttl=waiter_ttl, **options)


@pytest.fixture
async def kept() -> AsyncIterator[Kept]:
    kept = Kept()
    ready = asyncio.Event()
    runner = asyncio.create_task(kept.keeper.run(ready.set))
    await ready.wait()
    yield kept
    runner.cancel()
    await asyncio.wait([runner])


async def test_holder_is_extended_to_its_ttl_at_a_third_of_it(kept: Kept) -> None:
    async with takes(at_least=0.47, at_most=0.6):  # on a grid, never later than a third
        await kept.holder(ttl=1.5)
        await until(lambda: kept.store.asked)
    assert kept.store.asked[0] == [("a", 1.5)]
    await until(lambda: len(kept.store.asked) >= 3)
    assert not kept.heard.reasons


async def test_holder_is_extended_by_a_keeper_that_runs_once_more() -> None:
    """The store is run again when a session that has died leaves what it held."""
    kept = Kept()
    for _ in range(2):
        ready = asyncio.Event()
        runner = asyncio.create_task(kept.keeper.run(ready.set))
        await ready.wait()
        if not kept.keeper.places:
            await kept.holder(ttl=1.5)
            await until(lambda: kept.keeper._timer)
            runner.cancel()
            await asyncio.wait([runner])
    await until(lambda: kept.store.asked)
    runner.cancel()
    await asyncio.wait([runner])


async def test_waiter_is_extended_to_the_length_of_its_own_lease(kept: Kept) -> None:
    kept.store.answer = lambda _, length: Waiting(now() + length, None)
    await kept.waiter(ttl=0.6, waiter_ttl=0.15)
    await until(lambda: len(kept.store.asked) >= 2)
    assert set(kept.store.lengths("a")) == {0.15}


async def test_what_is_due_together_is_sent_together(kept: Kept) -> None:
    for number in range(20):
        await kept.holder(str(number))
    await until(lambda: len({id for batch in kept.store.asked for id, _ in batch}) == 20)
    assert len(kept.store.asked) <= 3


async def test_what_began_at_about_the_same_time_is_due_together(kept: Kept) -> None:
    began = now()
    places = [await kept.holder(str(number), ttl=64.0) for number in range(100)]
    spent = now() - began
    kept.keeper._plan_fresh()  # as when its timer comes
    assert len({round(schedule_of(place).beat, 6) for place in places}) <= 2 + spent
    for place in places:
        assert began + 64 / 3 - 1.001 <= schedule_of(place).beat <= began + spent + 64 / 3


async def test_thousands_that_are_new_are_looked_at_in_slices(kept: Kept) -> None:
    number = 3000
    keeper, looked_at = kept.keeper, 0
    first_beat = keeper._first_beat

    def counted(place: KeptRequest) -> float:
        nonlocal looked_at
        looked_at += 1
        return first_beat(place)

    keeper._first_beat = counted  # type: ignore[method-assign]
    for id in range(number):
        await kept.place(Granted(1, now() + 8.05), str(id), ttl=12.0)
    places = list(keeper.places.values())
    in_each = [0]
    while looked_at < number:
        await asyncio.sleep(0)
        in_each.append(looked_at - sum(in_each))
    assert max(in_each) <= 400, "a timer and the task may have a slice each"
    await until(
        lambda: all(place.deadline > now() + 10 for place in places), "an extension of each"
    )


async def test_processes_do_not_ask_in_step(kept: Kept) -> None:
    phase, beats = kept.keeper._phase, set()
    for number in range(8):
        kept.keeper._phase = Keeper(kept.store, 1.0)._phase
        place = await kept.holder(str(number), ttl=64.0)
        kept.keeper._plan_fresh()
        beats.add(round(schedule_of(place).beat % 1.0, 6))
    assert len(beats) > 4
    kept.keeper._phase = phase


async def test_answer_that_leaves_little_is_followed_by_an_extension_at_once(kept: Kept) -> None:
    place = await kept.place(Granted(1, now() + 1.5), ttl=6.0)
    await until(lambda: kept.store.asked)
    await until(lambda: place.deadline > now() + 5)


async def test_deadline_never_comes_nearer(kept: Kept) -> None:
    place = await kept.holder(ttl=0.6)
    before = place.deadline
    kept.store.answer = lambda *_: Granted(1, before - 0.2)
    kept.keeper.extend_now(place)
    await until(lambda: kept.store.asked)
    await asyncio.sleep(0)
    assert place.deadline == before


async def test_lease_ends_with_its_own_deadline_although_its_place_in_the_queue_had_more_time(
    kept: Kept,
) -> None:
    """On a quorum, the nodes that kept the place may be others than those that keep the lease."""
    end = now() + 2.0
    kept.store.answer = lambda *_: Granted(1, end)
    place = await kept.waiter(ttl=30.0, waiter_ttl=3.0)
    kept.keeper.extend_now(place)
    await until(lambda: kept.heard.granted_times)
    assert place.deadline == end


async def test_gone_holder_is_told_with_the_reason_of_the_store(kept: Kept) -> None:
    kept.store.answer = lambda *_: Gone("taken_over")
    place = await kept.holder()
    kept.keeper.extend_now(place)
    await until(lambda: kept.heard.reasons)
    assert kept.heard.reasons == ["taken_over"]
    assert len(kept.keeper) == 0


async def test_gone_waiter_is_told(kept: Kept) -> None:
    kept.store.answer = lambda *_: Gone("gone")
    place = await kept.waiter()
    await until(lambda: kept.heard.reasons)
    assert kept.heard.reasons == ["gone"]
    assert place.token == 0
    assert len(kept.keeper) == 0


async def test_unknown_is_retried_until_the_local_deadline_and_never_after(kept: Kept) -> None:
    kept.store.answer = lambda *_: BackendUnavailable("cut")
    place = await kept.holder(ttl=1.5)
    await until(lambda: len(kept.keeper) == 0)
    asked = len(kept.store.asked)
    assert now() >= place.deadline
    assert len(kept.heard.failed) >= 2
    assert asked < 30, "retries pause"
    await asyncio.sleep(0.3)
    assert len(kept.store.asked) == asked, "a lease that is over does not come back to life"


async def test_store_that_cannot_even_send_costs_no_other_lease(kept: Kept) -> None:
    """What a store raises instead of an answer for each is unknown for all of them."""
    place = await kept.holder(ttl=5.0)
    extend = kept.store.extend

    def refusing(batch: Sequence[tuple[StoreRequest, float]]) -> None:
        raise BackendUnavailable("nothing runs")

    kept.store.extend = refusing
    kept.keeper.extend_now(place)
    await until(lambda: kept.heard.failed)
    kept.store.extend = extend
    deadline = place.deadline
    await until(lambda: place.deadline > deadline, "an extension by a keeper that lives on")


async def test_waiter_gives_up_when_nothing_answers_for_long(kept: Kept) -> None:
    kept.store.answer = lambda *_: BackendUnavailable("cut")
    await kept.waiter(waiter_ttl=0.15)
    await until(lambda: kept.heard.gave_up)
    assert "no answer about 'n'" in str(kept.heard.gave_up[0])


async def test_without_auto_extend_nothing_is_due(kept: Kept) -> None:
    await kept.holder(ttl=0.2, auto_extend=False)
    await asyncio.sleep(0.4)
    assert not kept.store.asked


async def test_granted_waiter_is_extended_to_the_full_ttl_at_once(kept: Kept) -> None:
    place = await kept.waiter(ttl=5.0, waiter_ttl=3.0, auto_extend=False)
    kept.keeper.hold(place, 1, place.deadline)
    await until(lambda: kept.store.asked)
    assert kept.store.lengths("a") == [5.0]
    assert (place.stage, place.token, kept.heard.granted_times) == (Stage.HELD, 1, 1)
    await until(lambda: place.deadline > now() + 4.5)


async def test_grant_without_time_left_is_told_when_its_extension_is_answered(kept: Kept) -> None:
    place = await kept.waiter(ttl=5.0, waiter_ttl=3.0)
    kept.keeper.hold(place, 1, now() - 0.01)
    assert kept.heard.granted_times == 0
    await until(lambda: kept.heard.granted_times)
    assert place.deadline > now() + 4.5


async def test_grant_that_is_too_late_again_is_told_as_expired(kept: Kept) -> None:
    kept.store.answer = lambda *_: Granted(1, now() - 0.01)
    place = await kept.waiter(ttl=5.0, waiter_ttl=3.0)
    kept.keeper.hold(place, 1, now() - 0.01)
    await until(lambda: kept.heard.reasons)
    assert (kept.heard.reasons, kept.heard.granted_times) == (["expired"], 0)
    assert place.token == 1


async def test_notice_that_overtakes_the_reply_is_what_acquire_returns(kept: Kept) -> None:
    place = KeptPlace(
        kept.keeper,
        Terms("lock", "n", "exclusive", 0, 5.0, 3.0, 0.0, 0.0, None, True),
        "a",
        "t1",
        kept.heard,
    )

    async def acquire(request: StoreRequest, *, wait: bool) -> Waiting:
        kept.keeper.on_granted("a", 7, "where")
        return Waiting(now() + 3.0, None)

    kept.store.acquire = acquire
    answer = await place.acquire(wait=True)
    assert isinstance(answer, Granted)
    assert (answer.token, place.token, kept.heard.granted_times) == (7, 7, 0)


async def test_recall_of_an_earlier_grant_does_not_hide_a_later_one(kept: Kept) -> None:
    """An id whose reply was lost may be granted, recalled, dropped, queued and granted again."""
    place = KeptPlace(
        kept.keeper,
        Terms("lock", "n", "exclusive", 0, 5.0, 3.0, 0.0, 0.0, None, True, linger=1.0),
        "a",
        "t1",
        kept.heard,
    )

    async def acquire(request: StoreRequest, *, wait: bool) -> Waiting:
        kept.keeper.on_recalled("a")
        return Waiting(now() + 3.0, None)

    kept.store.acquire = acquire
    assert isinstance(await place.acquire(wait=True), Waiting)
    assert kept.heard.recalls == 0  # nothing is told before the answer
    place.hold(7, now() + 3.0)
    assert kept.heard.recalls == 1
    kept.keeper.on_recalled("a")
    assert kept.heard.recalls == 2


async def test_recalled_by_the_answer_to_an_extension(kept: Kept) -> None:
    place = await kept.holder(ttl=5.0)
    kept.keeper.on_answer(place, Granted(1, now() + 5.0, recalled=True), 5.0, True)
    assert kept.heard.recalls == 1
    assert place.deadline > now() + 4.0


async def test_extension_may_wait_where_many_servers_would_be_asked(kept: Kept) -> None:
    kept.store.capabilities = Capabilities(extend_after=0.3)
    gone, stays = [await kept.waiter(id, ttl=5.0, waiter_ttl=3.0) for id in "ab"]
    for place in (gone, stays):
        kept.keeper.hold(place, 1, place.deadline)
        assert place.stage is Stage.HELD
    gone.run_out()
    await until(lambda: kept.store.asked)
    assert kept.store.asked == [[("b", 5.0)]]
    await until(lambda: stays.deadline > now() + 4.0)


async def test_extension_does_not_wait_for_the_end_of_the_lease(kept: Kept) -> None:
    kept.store.capabilities = Capabilities(extend_after=60.0)
    place = await kept.waiter(ttl=5.0, waiter_ttl=2.0)
    kept.keeper.hold(place, 1, place.deadline)
    await until(lambda: kept.store.asked)
    assert place.stage is Stage.HELD


async def test_max_hold_is_never_extended_past(kept: Kept) -> None:
    began = now()
    place = await kept.holder(ttl=0.3, max_hold=0.5)
    await until(lambda: place.capped and schedule_of(place).beat == float("inf"))
    assert place.deadline <= began + 0.5 + 0.1
    assert all(length <= 0.41 for length in kept.store.lengths("a"))


async def test_head_looks_when_its_blockers_lease_ends(kept: Kept) -> None:
    kept.store.answer = lambda _, length: Waiting(now() + length, None)
    place = await kept.waiter(waiter_ttl=3.0)
    async with takes(at_least=0.1, at_most=0.2):
        kept.keeper.look_at(place, now() + 0.1)
        assert kept.store.watched == {"a": True}
        await until(lambda: kept.store.asked)


@pytest.mark.parametrize("head", [False, True])
async def test_look_is_not_forgotten_for_an_older_answer_of_the_same_turn(
    kept: Kept, head: bool
) -> None:
    kept.store.answer = lambda _, length: Waiting(now() + length, None)
    place = await kept.waiter(waiter_ttl=300.0)
    kept.keeper.on_look("a")
    await until(lambda: kept.store.asked)
    older = Waiting(now() + 300.0, now() + 200.0 if head else None)
    kept.keeper.on_look("a")
    kept.keeper.on_answer(place, older, 300.0, False)
    await until(lambda: len(kept.store.asked) == 2)
    kept.keeper.on_answer(place, older, 300.0, False)
    assert schedule_of(place).due > now() + 5.0  # once is enough


async def test_look_is_not_forgotten_for_an_older_failure_of_the_same_turn(kept: Kept) -> None:
    """A look says that there is something to see now; how long to wait after a failure is older."""

    def fail_once(_: StoreRequest, length: float) -> Outcome:
        if len(kept.store.asked) > 1:
            return Waiting(now() + length, None)
        kept.keeper.on_look("a")
        return BackendUnavailable("busy")

    kept.store.answer = fail_once
    place = await kept.waiter(waiter_ttl=300.0)
    schedule_of(place).failures = 10  # the next pause takes long
    kept.keeper.on_look("a")
    for _ in range(20):
        await asyncio.sleep(0)
    assert kept.heard.failed
    assert len(kept.store.asked) == 2
    assert schedule_of(place).due > now() + 5.0  # once is enough


async def test_granted_head_is_no_longer_watching(kept: Kept) -> None:
    place = await kept.waiter(waiter_ttl=3.0)
    kept.keeper.look_at(place, now() + 5)
    kept.keeper.hold(place, 7, place.deadline)
    assert kept.store.watched == {"a": False}


async def test_place_that_has_run_out_is_never_asked_about_again(kept: Kept) -> None:
    place = await kept.holder(ttl=2.0)
    place.run_out()
    await kept.holder("b", ttl=2.0)
    await until(lambda: len(kept.store.lengths("b")) >= 2)
    assert not kept.store.lengths("a")
    assert not kept.heard.reasons


async def test_batch_whose_places_have_all_left_is_forgotten(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where tasks start eagerly: then nothing of the batch is left when its task was made."""

    def start_eagerly(group: object, coroutine: Coroutine[Any, Any, Any]) -> bool:
        with pytest.raises(StopIteration):  # the store answers at once, so it never waits
            coroutine.send(None)
        return True

    monkeypatch.setattr("aiodlock.backends.keeper.start_soon", start_eagerly)
    places = [await kept.holder(str(number), ttl=30.0) for number in range(500)]
    kept.keeper._collect(now() + 15.0)  # they are due
    for place in places:
        place.run_out()
    kept.keeper._due.set()
    await kept.holder("after", ttl=0.6)
    await until(lambda: kept.store.lengths("after"), "an extension of what came after")
    assert {id for batch in kept.store.asked for id, _ in batch} == {"after"}
    assert not kept.keeper._sender._held_back


async def test_holders_are_extended_before_waiters_when_many_are_on_their_way(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiters = [await kept.waiter(str(number), waiter_ttl=30.0) for number in range(300)]
    holder = await kept.holder("holder", ttl=30.0)
    server = kept.keeper.store.server_of(holder)
    with monkeypatch.context() as many:
        many.setattr("aiodlock.backends.sender._WINDOW", 0)
        kept.keeper._sender.send([*waiters, holder])
    assert not kept.store.asked
    kept.keeper._sender._send_held_back(server)
    await until(lambda: len(kept.store.asked) >= 3)
    assert [id for id, _ in kept.store.asked[0]] == ["holder"]


async def test_refused_request_leaves_nothing(kept: Kept) -> None:
    await kept.place(Refused("busy"))
    assert kept.keeper.places == {}


async def test_heap_does_not_grow_with_places_that_are_gone(kept: Kept) -> None:
    for number in range(5000):
        (await kept.holder(str(number), ttl=30.0)).abandon()
    assert len(kept.keeper) == 0
    assert kept.keeper.places == {}
    assert len(kept.keeper._agenda._heap) <= 200


@pytest.mark.parametrize(
    ("known", "answer", "as_holder", "follows"),
    [
        ("waits", Waiting(9.0), False, "go on"),
        ("waits", Gone("gone"), False, Gone("gone")),
        ("waits", Granted(7, 9.0), False, "hold"),
        ("waits", Granted(5, 9.0), False, "again"),  # a break has overtaken it
        ("was granted", Waiting(9.0), False, "outdated"),
        ("was granted", Waiting(9.0), True, Gone("gone")),  # lost in a failover
        ("was granted", Granted(7, 9.0), True, "hold"),
        ("was granted", Granted(7, 1.0), True, Gone("expired")),
        ("holds", Granted(7, 9.0), True, "go on"),
        ("holds", Granted(8, 9.0), True, Gone("gone")),  # granted anew
        ("holds", Waiting(9.0), False, "outdated"),
        ("is over", Waiting(9.0), False, "over"),
        ("is over", Gone("broken"), True, "over"),
    ],
)
async def test_what_follows_from_an_answer(
    kept: Kept, known: str, answer: Granted | Waiting | Gone, as_holder: bool, follows: Follows
) -> None:
    place = await (kept.holder() if known == "holds" else kept.waiter())
    place.token, place.broken = 7, 5
    place.granted = known in ("holds", "was granted")
    if known == "is over":
        place.run_out()
    assert outcome(place, answer, place.length, as_holder, 2.0) == follows


async def test_extension_that_was_too_short_is_asked_for_again(kept: Kept) -> None:
    place = await kept.holder()
    granted = Granted(place.token, now() + 9.0)
    assert outcome(place, granted, place.length / 2, True, now()) == "again"
