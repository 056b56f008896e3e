"""Which of etcd's endpoints is used: what comes of connections that may not be, or that nobody keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiodlock._errors import BackendUnavailable
from aiodlock.backends.etcd import ways
from aiodlock.backends.etcd.ways import Way, Ways


class Fake:
    """A connection that nothing is said on."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.over: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.closed = False

    def close(self, error: Exception) -> None:
        self.closed = True

    async def until_idle(self, within: float) -> None: ...

    async def until_closed(self, within: float) -> None: ...


class Endpoints:
    """The first is near. The second is far: by the time it accepts, the first could do so four times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ways, "connect", self._connect)
        monkeypatch.setattr(ways, "_CONNECT_WITHIN", 0.001)
        monkeypatch.setattr("random.randrange", lambda _: 0)
        self.near = 0
        self.made: list[Fake] = []
        self.given_up: list[str] = []

    async def _connect(self, host: str, *_: object, **__: object) -> Fake:
        if host == "10.0.0.1":
            self.near += 1
        else:
            accepts = self.near + 4
            while self.near < accepts:
                await asyncio.sleep(0.001)
        self.made.append(Fake(host))
        return self.made[-1]

    @asynccontextmanager
    async def used(
        self,
        examine: Callable[[Way, Any], Awaitable[object]],
        group: type[asyncio.TaskGroup] = asyncio.TaskGroup,
    ) -> AsyncIterator[Ways]:
        found = Ways(
            ("10.0.0.1:1", "10.0.0.2:1"),
            "etcd",
            None,
            accepted=lambda: None,
            connected=lambda _: None,
            examine=examine,
            given_up=lambda error, _: self.given_up.append(str(error)),
        )

        async def run() -> None:
            async with group() as tasks:
                await found.run(tasks, lambda: 0.0)

        running = asyncio.create_task(run())
        async with asyncio.timeout(5.0):
            yield found
            running.cancel()
            await asyncio.wait({running})


async def test_near_member_that_may_not_be_used_does_not_keep_off_a_far_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoints = Endpoints(monkeypatch)

    async def examine(_: Way, connection: Fake) -> None:
        if connection.host == "10.0.0.1":
            raise BackendUnavailable("no leader")

    async with endpoints.used(examine) as found:
        while found.present is None or not found.present.connection.done():
            await asyncio.sleep(0.001)
        assert found.endpoint == "10.0.0.2:1"
    assert all(connection.closed for connection in endpoints.made)


async def test_connection_is_closed_whose_client_ends_in_the_turn_in_which_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was to keep it has not begun yet, and never begins."""
    endpoints = Endpoints(monkeypatch)

    class Ending(asyncio.TaskGroup):
        def create_task(self, *args: Any, **options: Any) -> asyncio.Task[Any]:
            task = super().create_task(*args, **options)
            task.cancel()
            return task

    async def examine(_: Way, connection: Fake) -> None:
        raise AssertionError("it has begun")

    async with endpoints.used(examine, Ending) as found:
        while found.present is None or found.present.serving is None:
            await asyncio.sleep(0)
    assert [connection.closed for connection in endpoints.made] == [True]
