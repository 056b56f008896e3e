"""The rules that let a storm of reconnecting clients come to an end."""

from __future__ import annotations

import asyncio
import time

import pytest

import aiodlock._clock
from aiodlock.backends.redis import dialing
from aiodlock.backends.redis.dialing import (
    AT_ONCE,
    Attempts,
    Turn,
    Turns,
    logging_in,
    turns_of,
    within,
)

from ..scenes import bounded, until


def test_dial_that_timed_out_has_more_time_the_next_time() -> None:
    patience = logging_in()
    allowed = [patience.learned]
    for _ in range(4):
        patience.ran_out()
        allowed.append(patience.learned)
    assert allowed == [4.0, 8.0, 16.0, 30.0, 30.0]
    patience.answered(0.1)
    assert patience.learned == 2.0


def test_pauses_begin_anew_after_a_connection_that_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    moment, attempts = 1000.0, Attempts()
    monkeypatch.setattr(aiodlock._clock, "_gettime", lambda _: moment)
    for _ in range(3):
        attempts.failed()
    for lasted, failures in ((0.5, 4), (2.0, 1)):
        attempts.came_up()
        moment += lasted
        attempts.failed()
        assert attempts.failures == failures
    moment += 2.0  # without a connection
    attempts.failed()
    assert attempts.failures == 2


def test_first_attempt_after_a_loss_has_a_pause_that_differs() -> None:
    first = [Attempts().failed() for _ in range(100)]
    assert len(set(first)) > 90
    assert 0.0 <= min(first) < max(first) <= 0.05


def test_pauses_grow_to_two_seconds() -> None:
    attempts = Attempts()
    pauses = [attempts.failed() for _ in range(20)]
    assert all(before < after for before, after in zip(pauses[:4:2], pauses[2:6:2], strict=True))
    assert 1.0 <= pauses[-1] <= 2.0


async def test_only_so_many_dial_one_server_at_once_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dialing, "_WORKING", 60.0)
    turns = Turns()
    dialling: list[int] = []

    async def dial(number: int) -> Turn:
        turn = await turns.take()
        dialling.append(number)
        return turn

    tasks = [asyncio.create_task(dial(number)) for number in range(AT_ONCE + 3)]
    await until(lambda: len(dialling) == AT_ONCE)
    await asyncio.sleep(0)
    assert dialling == list(range(AT_ONCE))
    for done in (5, 9, 1):
        tasks[done].result().give_back()
        tasks[done].result().give_back()  # a second time counts for nothing
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert dialling[AT_ONCE:] == [AT_ONCE, AT_ONCE + 1, AT_ONCE + 2]
    for task in tasks:
        (await task).give_back()


async def test_dial_that_waits_long_lets_the_next_one_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dialing, "_WORKING", 0.01)
    turns = Turns()
    held = [await turns.take() for _ in range(AT_ONCE)]  # a server that swallows everything
    async with bounded(5.0):
        held += [await turns.take() for _ in range(AT_ONCE)]
    for turn in held:
        turn.give_back()


@pytest.mark.parametrize("when", ["waiting", "handed over"])
async def test_turn_of_a_cancelled_dial_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(dialing, "_WORKING", 60.0)
    turns = Turns()
    held = [await turns.take() for _ in range(AT_ONCE)]
    cancelled = asyncio.create_task(turns.take())
    await asyncio.sleep(0)
    last = asyncio.create_task(turns.take())
    await asyncio.sleep(0)
    if when == "waiting":
        cancelled.cancel()
        await asyncio.sleep(0)
        held.pop().give_back()
    else:
        held.pop().give_back()
        cancelled.cancel()
    held.append(await asyncio.wait_for(last, 5.0))
    assert cancelled.cancelled()
    for turn in held:
        turn.give_back()
    assert turns._under_way == 0


async def test_servers_and_event_loops_have_turns_of_their_own() -> None:
    assert turns_of("a") is turns_of("a")
    assert turns_of("a") is not turns_of("b")
    here = turns_of("a")
    assert await asyncio.to_thread(lambda: asyncio.run(_turns_of("a"))) is not here


async def _turns_of(server: str) -> Turns:
    return turns_of(server)


async def test_deadline_ends_what_hears_nothing() -> None:
    with pytest.raises(TimeoutError, match=r"no answer within 0.05 s"):
        async with within(0.05):
            await asyncio.sleep(60)


async def test_stall_of_the_process_does_not_use_the_deadline_up() -> None:
    async with within(0.2):
        time.sleep(0.5)
        await asyncio.sleep(0.02)


async def test_answer_begins_the_deadline_anew() -> None:
    answers = 0
    async with within(0.1, lambda: answers):
        for answers in range(1, 20):  # noqa: B007
            await asyncio.sleep(0.02)


async def test_other_errors_and_cancellations_pass_a_deadline() -> None:
    with pytest.raises(TimeoutError, match="another"):
        async with within(5.0):
            raise TimeoutError("another")

    async def body() -> None:
        async with within(5.0):
            await asyncio.sleep(60)

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def test_slow_server_is_not_given_ever_more_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "_WORKING", 0.02)
    turns = Turns()
    slow = await turns.take()
    await asyncio.sleep(0.2)
    slow.succeeded()
    held = [await turns.take() for _ in range(AT_ONCE)]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await turns.take()
    for turn in held:
        turn.give_back()
    assert turns._under_way == 0
