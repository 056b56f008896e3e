"""A program ends by cancelling all tasks of its loop, the client's too: what it holds is released."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest

import aiodlock
from aiodlock._clock import now
from aiodlock._model import Left
from aiodlock.backends.memory.backend import MemoryBackend

from ..conftest import MakeClient
from ..scenes import until
from ..servers import MEMORY, Store

NAMES = ("a", "b", "c")
#: Leaving waited for ``close_timeout``, 5 s, and for one second more.
_SOON = 4.0


async def hold(client: aiodlock.Client, name: str, held: list[str]) -> None:
    async with client.lock(name, ttl=60):
        held.append(name)
        await asyncio.sleep(600)


async def wait(client: aiodlock.Client, name: str) -> None:
    async with client.lock(name, ttl=60):
        pass


async def exits() -> None:
    sys.exit(3)


async def is_interrupted() -> None:
    raise KeyboardInterrupt


async def cancels_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


def cancels_from_a_callback() -> None:
    asyncio.get_running_loop().call_soon(lambda: [task.cancel() for task in asyncio.all_tasks()])


def program(
    source: Any, end: Callable[[], object], ended: list[float], known: list[Any]
) -> Callable[[], None]:
    async def main() -> None:
        async with aiodlock.Client(source) as client:
            assert client._core.session is not None
            known.append(client._core.session.requests)
            held: list[str] = []
            tasks = [asyncio.create_task(hold(client, name, held)) for name in NAMES]
            await until(lambda: len(held) == len(NAMES))
            tasks += [asyncio.create_task(wait(client, name)) for name in NAMES]
            bare = await client.lock("bare", ttl=60).acquire()
            assert bare.held
            if asyncio.iscoroutinefunction(end):
                tasks.append(asyncio.create_task(end()))
            else:
                end()
            ended.append(now())
            await asyncio.sleep(600)

    def run() -> None:
        try:
            asyncio.run(main())
        except (SystemExit, KeyboardInterrupt, asyncio.CancelledError):
            pass
        ended.append(now())

    return run


@pytest.mark.parametrize(
    "end",
    [exits, is_interrupted, cancels_all, cancels_from_a_callback],
    ids=lambda end: end.__name__,
)
async def test_what_a_program_holds_is_released_when_all_its_tasks_are_cancelled(
    store: Store, make_client: MakeClient, end: Callable[[], object]
) -> None:
    client = await make_client()
    ended: list[float] = []
    known: list[Any] = []
    await asyncio.to_thread(program(store.source, end, ended, known))
    began, over = ended
    assert known == [{}]  # nobody waited in vain for what could not be left any more
    assert over - began < _SOON
    for name in (*NAMES, "bare"):
        info = await client.inspect(name)
        assert not info.holders, name
        assert not info.waiters, name


@pytest.mark.stores(MEMORY)
async def test_leave_that_is_answered_twice_does_not_keep_others_from_leaving(
    store: Store, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = MemoryBackend.leave
    leaving: list[str] = []

    async def leave_slowly(self: MemoryBackend, request: Any, **how: Any) -> Left:
        leaving.append(request.name)
        await asyncio.sleep(0.1 if request.name == "a" else 0.3)
        return await leave(self, request, **how)

    async def block() -> None:
        async with client.lock("a", ttl=60):
            pass

    monkeypatch.setattr(MemoryBackend, "leave", leave_slowly)
    other = await make_client()
    async with aiodlock.Client(store.source) as client:
        await client.lock("b", ttl=60).acquire()
        task = asyncio.create_task(block())
        await until(lambda: leaving)
        assert client._core.session is not None
        background = client._core.session._main
        assert background is not None
        background.cancel()  # what is on its way goes on, and is repeated when the client is left
        await asyncio.wait({background})
    await task
    assert leaving.count("a") == 2
    for name in ("a", "b"):
        assert not (await other.inspect(name)).holders, name


@pytest.mark.stores(MEMORY)
async def test_store_that_answers_slowly_has_time_to_release_what_is_held(
    store: Store, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = MemoryBackend.run
    runs = 0

    async def connect_slowly(self: MemoryBackend, *given: Any) -> None:
        nonlocal runs
        runs += 1
        await asyncio.sleep(3.0 if runs == 2 else 0.0)
        await run(self, *given)

    other = await make_client()
    monkeypatch.setattr(MemoryBackend, "run", connect_slowly)
    async with aiodlock.Client(store.source) as client:
        await client.lock("a", ttl=60).acquire()
        session = client._core.session
        assert session is not None
        session.backend.store.answers_within = 2.0  # type: ignore[attr-defined]
        background = session._main
        assert background is not None
        background.cancel()
        await asyncio.wait({background})
    assert not (await other.inspect("a")).holders
