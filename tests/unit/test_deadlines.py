"""The timer that marks what has ended, on loops that are not asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import aiodlock
from aiodlock import _clock
from aiodlock._clock import now

from ..scenes import until_cancelled


class _Handle:
    """What any loop's ``call_later`` gives: uvloop's has no ``when()`` if the pause rounds to nothing."""

    def __init__(self, handle: asyncio.TimerHandle) -> None:
        self.cancel = handle.cancel


async def test_bodies_are_told_on_a_loop_whose_timers_are_plain_and_come_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def early(delay: float, call: Callable[..., object], *args: Any) -> Any:
        # In whole milliseconds, as uvloop's.
        return _Handle(call_later(int(delay * 1000) / 1000, call, *args))

    async with aiodlock.Client("memory://") as client:
        monkeypatch.setattr(loop, "call_later", early)
        for extra in range(5):
            with pytest.raises(aiodlock.LockLost) as lost:
                async with client.lock("x", max_hold=0.06 + extra / 7000):
                    await until_cancelled()
            assert lost.value.reason == "max_hold"
        monkeypatch.undo()
        async with client.lock("y"):
            pass


async def test_body_takes_no_third_step_on_a_loop_whose_timers_come_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By half a millisecond, as uvloop's. (A second one: see ``contract/test_losing.py``.)

    Time goes on with the steps of the body alone: else a busy machine would stop it between two of them.
    """
    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    passed, boot, monotonic = 0.0, now(), loop.time()

    def late(delay: float, call: Callable[..., object], *args: Any) -> Any:
        return _Handle(call_later(round(delay * 1000) / 1000, call, *args))

    async with aiodlock.Client("memory://") as client:
        monkeypatch.setattr(loop, "call_later", late)
        monkeypatch.setattr(loop, "time", lambda: monotonic + passed)
        monkeypatch.setattr(_clock, "_gettime", lambda _: boot + passed)
        for extra in range(10):
            steps_after = 0
            with suppress(aiodlock.LockLost):
                async with client.lock("x", max_hold=0.06 + extra / 10_000) as lease:
                    while steps_after < 100:
                        await asyncio.sleep(0)
                        passed += 0.00002
                        steps_after += not lease.held
            assert lease.lost is not None
            assert steps_after <= 2
        monkeypatch.undo()


async def test_body_that_runs_below_an_eager_task_is_cancelled_at_its_next_await() -> None:
    factory = getattr(asyncio, "eager_task_factory", None)
    if factory is None:
        pytest.skip("this Python has no eager tasks")
    loop = asyncio.get_running_loop()
    async with aiodlock.Client("memory://") as client:
        loop.set_task_factory(factory)
        try:
            with pytest.raises(aiodlock.LockLost):
                await _lose_in_an_eager_task(client)
            await asyncio.sleep(0)  # nothing of the cancellation is left
        finally:
            loop.set_task_factory(None)


async def _lose_in_an_eager_task(client: aiodlock.Client) -> None:
    """End the body without another await after a task that it has started has noticed the loss."""
    tasks: list[asyncio.Task[None]] = []
    async with client.lock("x", max_hold=0.05) as lease:

        async def notice() -> None:
            while lease.held:
                pass
            with pytest.raises(aiodlock.LockLost):
                lease.ensure_held()

        tasks.append(asyncio.create_task(notice()))
