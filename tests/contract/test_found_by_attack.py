"""Promises that an attack on the code found broken."""

from __future__ import annotations

import asyncio
import warnings

import pytest

import aiodlock

from ..scenes import until_free


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
