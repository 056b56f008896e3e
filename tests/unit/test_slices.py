"""Slices: calls of one turn of the loop that run in several."""

from __future__ import annotations

import asyncio
import functools

import pytest

from aiodlock._slices import Slices, Woken


async def turns() -> None:
    """Let the loop run often enough for a thousand calls."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("size", [1, 84, 99, 100, 101, 199, 200, 201, 300])
async def test_bursts_of_one_size_run_in_order_one_after_the_other(size: int) -> None:
    slices = Slices(asyncio.get_running_loop())
    ran: list[int] = []
    for number in range(3 * size):
        slices.run(functools.partial(ran.append, number))
        if number % size == size - 1:
            await turns()
            assert ran == list(range(number + 1))


async def test_no_turn_runs_more_than_a_slice() -> None:
    slices = Slices(asyncio.get_running_loop())
    ran: list[int] = []
    for number in range(500):
        slices.run(functools.partial(ran.append, number))
    in_each = [len(ran)]
    while len(ran) < 500:
        await asyncio.sleep(0)
        in_each.append(len(ran) - sum(in_each))
    assert max(in_each) <= 100


@pytest.mark.parametrize(
    ("messages", "kept"), [((None, "b"), ("b",)), (("a", None), ("a",)), ((None, None), ())]
)
async def test_cancellation_that_waits_for_its_turn_takes_a_message_that_comes_meanwhile(
    messages: tuple[str | None, ...], kept: tuple[str, ...]
) -> None:
    """By its message anyio knows a cancellation again, which may come behind that of a timeout."""
    slices = Slices(asyncio.get_running_loop())
    while slices.take():
        pass
    woken = Woken()
    woken.slices, woken.cancelled_with = slices, None
    for message in messages:
        assert woken.cancel(message)
    with pytest.raises(asyncio.CancelledError) as ended:
        await woken
    assert ended.value.args == kept
