"""What calls do while a password is checked."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd.calls import AUTHENTICATE, STATUS
from aiodlock.backends.etcd.link import Link
from aiodlock.backends.etcd.sources import read_url
from aiodlock.backends.etcd.ways import Way


async def test_member_is_asked_for_its_leader_once_however_many_calls_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link, way = Link(*read_url("etcd://ann:secret@one")), Way(0.0)
    asked: Counter[str] = Counter()
    answer = asyncio.Event()

    async def ask(way: Way, connection: object, method: Any, *about: object) -> object:
        asked[method.path] += 1
        if method is AUTHENTICATE:
            await answer.wait()
            return m.AuthenticateResponse(token="token")
        await asyncio.sleep(0)
        return m.StatusResponse(leader=1)

    monkeypatch.setattr(link, "_ask", ask)
    async with asyncio.TaskGroup() as tasks:
        link._tasks = tasks
        calls: list[asyncio.Task[str | None]] = [
            tasks.create_task(link._get_token(way, object(), None))  # type: ignore[arg-type]
            for _ in range(50)
        ]
        while not asked[STATUS.path]:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert asked == {AUTHENTICATE.path: 1, STATUS.path: 1}
        answer.set()
    assert {call.result() for call in calls} == {"token"}
