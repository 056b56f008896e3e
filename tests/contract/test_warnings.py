"""What is worth a line in the log: a loop that is blocked, and tasks that may wait for each other."""

from __future__ import annotations

import asyncio
import logging
import time
import warnings

import pytest

import aiodlock
from aiodlock import AcquireTimeout, Client

from ..scenes import until, until_free


def events(caplog: pytest.LogCaptureFixture, event: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "event", "") == event]


async def test_loop_that_was_blocked_for_more_than_half_a_lease_is_worth_a_warning(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    async with client.lock("x", ttl=3.0) as lease:
        time.sleep(1.7)
        await until(lambda: events(caplog, "loop_blocked"))
        assert lease.held
    (record,) = events(caplog, "loop_blocked")
    assert record.levelname == "WARNING"
    assert "this process was paused, or its event loop was blocked" in record.getMessage()
    assert "3.00 s" in record.getMessage()


async def test_loop_that_was_blocked_for_a_small_part_of_every_lease_is_not(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    async with client.lock("brief", ttl=0.5):
        pass
    async with client.lock("x", ttl=30.0):
        time.sleep(0.6)
        await asyncio.sleep(0.1)
    assert not events(caplog, "loop_blocked")


async def test_two_tasks_that_take_two_names_in_opposite_order_are_warned_of_once_each(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    inside = asyncio.Barrier(2)

    async def take(first: str, second: str) -> None:
        async with client.lock(first):
            await inside.wait()
            with pytest.raises(AcquireTimeout):
                await client.lock(second, ttl=0.4).acquire(timeout=3.0)
            await inside.wait()

    await asyncio.gather(take("a", "b"), take("b", "a"))
    told = events(caplog, "waits_inside")
    assert sorted((record.__dict__["lock"], *record.__dict__["held"]) for record in told) == [
        ("a", "b"),
        ("b", "a"),
    ]
    assert all(record.levelname == "WARNING" for record in told)


async def test_long_wait_of_a_task_that_holds_nothing_else_is_not_worth_a_warning(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    async with client.lock("a"):

        async def wait() -> None:
            with pytest.raises(AcquireTimeout):
                await client.lock("a", ttl=0.3).acquire(timeout=1.5)

        await asyncio.create_task(wait())
    assert not events(caplog, "waits_inside")


@pytest.mark.parametrize("times", [1, 3])
async def test_holds_whose_task_ended_are_released_also_when_warnings_are_errors(
    client: aiodlock.Client, times: int
) -> None:
    async def forgetful() -> None:
        for _ in range(times):
            await client.lock("x").acquire()

    told: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        await asyncio.create_task(forgetful())
        await until_free(client, "x")
    assert len(told) == times
    assert all(isinstance(error, ResourceWarning) for error in told)


async def test_forgotten_lease_is_released_also_when_warnings_are_errors(
    client: aiodlock.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", ignored.append)
    lease: aiodlock.Lease | None = await asyncio.create_task(client.lock("x").acquire())
    assert lease is not None
    await asyncio.sleep(0)  # the loop has handed the task on, and forgets it
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        lease = None
    assert len(ignored) == 1
    await until_free(client, "x")
