"""What calls do while a password is checked."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest

from aiodlock import BackendUnavailable
from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd.calls import AUTHENTICATE, STATUS
from aiodlock.backends.etcd.link import Link
from aiodlock.backends.etcd.login import Login
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


async def test_client_that_is_left_while_it_asks_for_the_token_keeps_no_other_from_asking() -> None:
    """A task that is cancelled before it began runs nothing, not even what stands in its finally."""
    login = Login()

    async def authenticate() -> str:
        return "token"

    def start_and_leave(asking: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(asking)
        task.cancel()
        return task

    with pytest.raises(BackendUnavailable, match="was left"):
        await login.get(authenticate, 1.0, start=start_and_leave)
    assert await login.get(authenticate, 1.0, start=asyncio.create_task) == "token"


async def test_call_without_a_token_while_the_client_ends_says_so() -> None:
    link, way = Link(*read_url("etcd://ann:secret@one")), Way(0.0)
    async with asyncio.TaskGroup() as link._tasks:
        pass
    with pytest.raises(BackendUnavailable, match="not running"):
        await link._get_token(way, object(), None)  # type: ignore[arg-type]
    assert way.logins == 0
