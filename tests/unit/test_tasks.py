"""Background tasks are started from wherever the client is when it needs one."""

from __future__ import annotations

import asyncio

import pytest

import aiodlock
from aiodlock._tasks import start_soon

from ..scenes import bounded


async def test_client_starts_a_task_from_a_plain_callback_of_the_loop() -> None:
    """With sniffio installed, anyio 4.14 and later raises NoEventLoopError there."""
    pytest.importorskip("sniffio")
    done = asyncio.Event()
    failed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))

    async def work() -> None:
        done.set()

    async with aiodlock.Client("memory://") as client:
        session = client._core.session
        assert session is not None
        asyncio.get_running_loop().call_soon(session.start_soon, work)
        async with bounded(5):
            await done.wait()
    assert failed == []


async def test_task_is_refused_and_dropped_when_the_group_is_over() -> None:
    async def work() -> None:
        pytest.fail("was run")

    assert not start_soon(None, work())
    async with asyncio.TaskGroup() as group:
        assert start_soon(group, asyncio.sleep(0))
    assert not start_soon(group, work())
