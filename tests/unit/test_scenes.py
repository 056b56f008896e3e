"""The scenes themselves: what a test may take, and what it is forgiven."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from .. import scenes
from ..scenes import bounded, stalls, takes, until


@asynccontextmanager
async def no_stalls() -> AsyncIterator[Callable[[], float]]:
    yield lambda: 0.0


@pytest.fixture
def nothing_else_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what the machine tells of others: on a busy one it may be anything."""
    monkeypatch.setattr(scenes, "_queued", dict)
    monkeypatch.setattr(scenes, "_stolen", lambda: 0.0)


async def test_block_that_waits_too_long_or_not_long_enough_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scenes, "stalls", no_stalls)
    with pytest.raises(AssertionError, match="took"):
        async with takes(at_most=0.05):
            await asyncio.sleep(0.2)
    with pytest.raises(AssertionError, match="took"):
        async with takes(at_least=10, at_most=20):
            await asyncio.sleep(0)


async def test_time_in_which_the_process_could_not_run_is_forgiven() -> None:
    async with takes(at_most=0.05), stalls() as stalled:
        await asyncio.sleep(0)
        time.sleep(0.2)  # for the event loop as if the machine had done something else
        assert stalled() > 0.15


@pytest.mark.usefixtures("nothing_else_waits")
async def test_time_in_which_the_process_computed_is_not_forgiven() -> None:
    began, until_computed = time.monotonic(), time.process_time() + 0.1
    async with stalls() as stalled:
        await asyncio.sleep(0)
        while time.process_time() < until_computed:
            pass
        assert stalled() <= time.monotonic() - began - 0.1 + 0.02


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only Linux tells")
async def test_time_in_which_a_process_that_we_started_could_not_run_is_forgiven() -> None:
    """A server that waits for its turn answers late, however idle this process is."""
    busy = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(busy) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        async with stalls() as stalled:
            await until(lambda: stalled() > 0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def test_state_that_never_comes_is_told_by_its_name() -> None:
    with pytest.raises(AssertionError, match="the moon"):
        await until(lambda: False, "the moon", within=0.01)


@pytest.mark.usefixtures("nothing_else_waits")
async def test_block_is_ended_after_its_time_and_what_the_machine_stalled() -> None:
    steps = []

    async def body() -> None:
        async with bounded(0.05):
            time.sleep(0.2)  # as if the machine had done something else
            await asyncio.sleep(0.01)
            steps.append("goes on")
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await body()
    assert steps == ["goes on"]
