"""The extender alone: what is due when, what the three outcomes do, and that it keeps nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

import pytest

from aiodlock._clock import now
from aiodlock._errors import BackendUnavailable, LossReason
from aiodlock._extender import Extender
from aiodlock._model import Capabilities, Gone, Granted, Request, Waiting
from aiodlock._options import LockOptions
from aiodlock._place import Place, State
from aiodlock._session import Session
from aiodlock._slices import Slices, Woken

from ..scenes import takes, until

Outcome = Granted | Waiting | Gone | Exception


class Answers:
    """A backend that is asked to extend, and answers as the test says."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, float]]] = []
        self.answer: Callable[[Request, float], Outcome] = lambda _, length: Granted(
            1, now() + length
        )
        self.watched: dict[str, bool] = {}
        self.capabilities = Capabilities()

    def extend(
        self, batch: Sequence[tuple[Request, float]]
    ) -> Sequence[Awaitable[Granted | Waiting | Gone]]:
        self.asked.append([(request.id, length) for request, length in batch])
        return [self._one(request, length) for request, length in batch]

    def server_of(self, request: Request) -> object:
        return None

    async def _one(self, request: Request, length: float) -> Granted | Waiting | Gone:
        outcome = self.answer(request, length)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def watch(self, request: Request, watching: bool) -> None:
        self.watched[request.id] = watching

    def lengths(self, id: str) -> list[float]:
        return [length for batch in self.asked for one, length in batch if one == id]


class FakeSession:
    """What the extender uses of a session."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.backend = Answers()
        self.places: dict[str, Place] = {}
        self.unavailable_after = 30.0
        self.lost: list[Place] = []
        self.failed: list[Place] = []
        self.telling = self
        self.extender = Extender(cast(Session, self))
        self._tasks: set[asyncio.Task[Any]] = set()

    def start_soon(self, call: Callable[..., Any], *args: object) -> bool:
        task = asyncio.ensure_future(call(*args))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def lose(self, place: Place, reason: LossReason) -> None:
        if place.state is State.HELD:
            place.lose(reason)
            self.extender.forget(place)
            self.lost.append(place)

    def lose_if_overdue(self, place: Place) -> None:
        if place.state is State.HELD and now() >= place.ends_at:
            self.lose(place, place.overdue_error().reason)

    def waits_long(self, place: Place) -> None:
        pass

    def blocked(self, late: float, ttl: float) -> None:
        pass

    def extension_failed(self, place: Place, error: Exception) -> None:
        self.failed.append(place)

    def place(
        self, id: str = "a", *, ttl: float = 0.6, waiter_ttl: float = 0.3, **rest: Any
    ) -> Place:
        request = Request(id, "lock", "n", "exclusive", 0, "t1", ttl, waiter_ttl, 0.0)
        place = Place(request, LockOptions(ttl, **rest), None)
        self.places[id] = place
        return place

    def holder(self, id: str = "a", **options: Any) -> Place:
        place = self.place(id, **options)
        place.grant(1, now() + place.ttl)
        self.extender.add(place)
        return place

    def waiter(self, id: str = "a", **options: Any) -> Place:
        place = self.place(id, **options)
        place.queue(now() + place.request.waiter_ttl, 0)
        place.woken = woken = Woken(loop=self.loop)
        woken.slices, woken.cancelled_with = Slices(self.loop), None
        self.extender.add(place)
        return place


@pytest.fixture
async def session() -> AsyncIterator[FakeSession]:
    session = FakeSession()
    runner = asyncio.create_task(session.extender.run())
    yield session
    runner.cancel()
    await asyncio.wait([runner])


async def test_holder_is_extended_to_its_ttl_at_a_third_of_it(session: FakeSession) -> None:
    async with takes(at_least=0.47, at_most=0.6):  # on a grid, never later than a third
        session.holder(ttl=1.5)
        await until(lambda: session.backend.asked)
    assert session.backend.asked[0] == [("a", 1.5)]
    await until(lambda: len(session.backend.asked) >= 3)
    assert not session.lost


async def test_waiter_is_extended_to_the_length_of_its_own_lease(session: FakeSession) -> None:
    session.backend.answer = lambda _, length: Waiting(now() + length, None)
    session.waiter(ttl=0.6, waiter_ttl=0.15)
    await until(lambda: len(session.backend.asked) >= 2)
    assert set(session.backend.lengths("a")) == {0.15}


async def test_what_is_due_together_is_sent_together(session: FakeSession) -> None:
    for number in range(20):
        session.holder(str(number))
    await until(lambda: len({id for batch in session.backend.asked for id, _ in batch}) == 20)
    assert len(session.backend.asked) <= 3


async def test_what_began_at_about_the_same_time_is_due_together(session: FakeSession) -> None:
    began = now()
    places = [session.holder(str(number), ttl=64.0) for number in range(100)]
    spent = now() - began
    assert len({round(place.beat, 6) for place in places}) <= 2 + spent
    for place in places:
        assert began + 64 / 3 - 1.001 <= place.beat <= began + spent + 64 / 3


async def test_processes_do_not_ask_in_step(session: FakeSession) -> None:
    beats = set()
    for _ in range(8):
        session.extender = Extender(cast(Session, session))
        beats.add(round(session.holder(ttl=64.0).beat % 1.0, 6))
    assert len(beats) > 4


async def test_answer_that_leaves_little_is_followed_by_an_extension_at_once(
    session: FakeSession,
) -> None:
    place = session.place(ttl=6.0)
    place.grant(1, now() + 1.5)
    session.extender.add(place)
    await until(lambda: session.backend.asked)
    assert place.deadline > now() + 5


async def test_deadline_never_comes_nearer(session: FakeSession) -> None:
    place = session.holder(ttl=0.6)
    before = place.deadline
    session.backend.answer = lambda *_: Granted(1, before - 0.2)
    session.extender.extend_now(place)
    await until(lambda: session.backend.asked)
    await asyncio.sleep(0)
    assert place.deadline == before


async def test_gone_holder_is_lost_with_the_reason_of_the_store(session: FakeSession) -> None:
    session.backend.answer = lambda *_: Gone("taken_over")
    place = session.holder()
    session.extender.extend_now(place)
    await until(lambda: session.lost)
    assert place.lost is not None
    assert place.lost.reason == "taken_over"
    assert len(session.extender) == 0


async def test_gone_waiter_is_woken_to_begin_again(session: FakeSession) -> None:
    session.backend.answer = lambda *_: Gone("gone")
    place = session.waiter()
    assert place.woken is not None
    await place.woken
    assert place.state is State.ASKING
    assert len(session.extender) == 0


async def test_unknown_is_retried_and_lost_at_the_local_deadline(session: FakeSession) -> None:
    session.backend.answer = lambda *_: BackendUnavailable("cut")
    async with takes(at_least=1.49, at_most=1.6):
        place = session.holder(ttl=1.5)
        await until(lambda: session.lost)
    assert now() >= place.deadline
    assert place.lost is not None
    assert place.lost.reason == "expired"
    assert len(session.failed) >= 2
    assert len(session.backend.asked) < 30, "retries pause"


async def test_extension_that_never_answers_does_not_hide_the_loss(session: FakeSession) -> None:
    never = asyncio.get_running_loop().create_future()

    def extend(batch: Sequence[tuple[Request, float]]) -> Sequence[Awaitable[Any]]:
        return [asyncio.shield(never) for _ in batch]

    session.backend.extend = extend  # type: ignore[method-assign]
    place = session.holder(ttl=0.2)
    await until(lambda: session.lost)
    assert place.lost is not None
    assert place.lost.reason == "expired"
    never.set_result(Gone("gone"))


async def test_waiter_gives_up_when_nothing_answers_for_long(session: FakeSession) -> None:
    session.unavailable_after = 0.2
    session.backend.answer = lambda *_: BackendUnavailable("cut")
    place = session.waiter(waiter_ttl=0.15)
    assert place.woken is not None
    with pytest.raises(BackendUnavailable, match="no answer about 'n'"):
        await place.woken


async def test_without_auto_extend_only_the_end_is_due(session: FakeSession) -> None:
    place = session.holder(ttl=0.2, auto_extend=False)
    await until(lambda: session.lost)
    assert not session.backend.asked
    assert place.lost is not None
    assert place.lost.reason == "expired"


async def test_granted_waiter_is_extended_to_the_full_ttl_at_once(session: FakeSession) -> None:
    place = session.waiter(ttl=5.0, waiter_ttl=3.0, auto_extend=False)
    session.extender.granted(place, 1, place.deadline)
    await until(lambda: session.backend.asked)
    assert session.backend.lengths("a") == [5.0]
    assert (place.state, place.token) == (State.HELD, 1)
    await until(lambda: place.deadline > now() + 4.5)


async def test_extension_may_wait_where_many_servers_would_be_asked(session: FakeSession) -> None:
    session.backend.capabilities = Capabilities(extend_after=0.3)
    gone, stays = (session.waiter(id, ttl=5.0, waiter_ttl=3.0) for id in "ab")
    for place in (gone, stays):
        session.extender.granted(place, 1, place.deadline)
        assert place.state is State.HELD
    session.extender.forget(gone)
    await until(lambda: session.backend.asked)
    assert session.backend.asked == [[("b", 5.0)]]
    await until(lambda: stays.deadline > now() + 4.0)


async def test_extension_does_not_wait_for_the_end_of_the_lease(session: FakeSession) -> None:
    session.backend.capabilities = Capabilities(extend_after=60.0)
    place = session.waiter(ttl=5.0, waiter_ttl=2.0)
    session.extender.granted(place, 1, place.deadline)
    await until(lambda: session.backend.asked)
    assert place.state is State.HELD


async def test_max_hold_is_never_extended_past(session: FakeSession) -> None:
    async with takes(at_least=0.49, at_most=0.6):
        place = session.holder(ttl=0.3, max_hold=0.5)
        await until(lambda: session.lost)
    assert place.lost is not None
    assert place.lost.reason == "max_hold"
    assert all(length <= 0.41 for length in session.backend.lengths("a"))


async def test_margin_ends_the_lease_earlier(session: FakeSession) -> None:
    session.backend.answer = lambda *_: BackendUnavailable("cut")
    async with takes(at_least=0.19, at_most=0.3):
        place = session.holder(ttl=0.5, margin=0.3)
        await until(lambda: session.lost)
    assert place.deadline > now()


async def test_head_looks_when_its_blockers_lease_ends(session: FakeSession) -> None:
    session.backend.answer = lambda _, length: Waiting(now() + length, None)
    place = session.waiter(waiter_ttl=3.0)
    async with takes(at_least=0.1, at_most=0.2):
        session.extender.look_at(place, now() + 0.1)
        assert session.backend.watched == {"a": True}
        await until(lambda: session.backend.asked)


async def test_granted_head_is_no_longer_watching(session: FakeSession) -> None:
    place = session.waiter(waiter_ttl=3.0)
    session.extender.look_at(place, now() + 5)
    session.extender.granted(place, 7, place.deadline)
    assert session.backend.watched == {"a": False}


async def test_forgotten_place_is_never_asked_about_again(session: FakeSession) -> None:
    place = session.holder(ttl=2.0)
    session.extender.forget(place)
    session.holder("b", ttl=2.0)
    await until(lambda: len(session.backend.lengths("b")) >= 2)
    assert not session.backend.lengths("a")
    assert not session.lost


async def test_heap_does_not_grow_with_places_that_are_gone(session: FakeSession) -> None:
    for number in range(5000):
        session.extender.forget(session.holder(str(number), ttl=30.0))
    assert len(session.extender) == 0
    assert len(session.extender._heap) <= 200
