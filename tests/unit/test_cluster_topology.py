"""How a cluster's client goes on with a node that refuses it. On servers: tests/topology."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from aiodlock import BackendError
from aiodlock.backends.kept import Notices
from aiodlock.backends.redis.cluster import topology
from aiodlock.backends.redis.server import Server
from aiodlock.backends.redis.settings import Settings
from aiodlock.backends.redis.source import Source

from ..scenes import until


async def test_pauses_begin_anew_when_a_refusing_node_was_of_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comes_up = {4, 6}  # at these attempts
    attempts = 0
    failures_in_a_row: list[int] = []

    async def run(self: Server, listener: Notices, ready: Callable[[], None]) -> None:
        nonlocal attempts
        attempts += 1
        if attempts in comes_up:
            ready()
        raise BackendError("refused")

    def pause_after(failures: int, *, first: float, longest: float) -> float:
        failures_in_a_row.append(failures)
        return 0.0

    monkeypatch.setattr(Server, "run", run)
    monkeypatch.setattr(topology, "pause_after", pause_after)
    settings = Settings("p", token_retention=60.0, unavailable_after=30.0)
    cluster = topology.Topology([Source.from_url("redis://localhost:1")], settings, "label")
    cluster._listener, cluster._entering = object(), False  # type: ignore[assignment]
    async with asyncio.TaskGroup() as tasks:
        cluster._tasks = tasks
        node = cluster.start(("localhost", 1))
        await until(lambda: len(failures_in_a_row) >= 7)
        node.scope.cancel()
    assert failures_in_a_row[:7] == [1, 2, 3, 1, 2, 1, 2]
