"""The events, over a socket, and what they cost the store: one poll for all, none while nobody looks."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

import aiodlock
import aiodlock.web
from aiodlock._clock import now
from aiodlock._model import Kind
from aiodlock.web import _app, _sightings, _watch

from ..fastapi.conftest import serve_app
from ..scenes import PATIENCE, until, until_waiting
from ..servers import Store
from .test_pages import HOSTILE, check_harmless

pytestmark = pytest.mark.stores("memory")


@contextlib.asynccontextmanager
async def watching(http: httpx.AsyncClient, **query: str) -> AsyncIterator[AsyncIterator[Any]]:
    """Give what the events of a page carry."""
    async with http.stream("GET", "/events", params=query) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-accel-buffering"] == "no"

        async def events() -> AsyncGenerator[Any, None]:
            async for line in answer.aiter_lines():
                assert not line or line.startswith(("retry: ", "event: look", "data: ")), line
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

        async with contextlib.aclosing(events()) as carried:
            yield carried


class Counted:
    """A client's calls to its store, counted."""

    def __init__(self, client: aiodlock.Client, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.names = 0
        inspect = client._core.inspect_many

        async def count(names: Sequence[str], kind: Kind = "lock") -> list[aiodlock.LockInfo]:
            self.calls += 1
            self.names += len(names)
            return await inspect(names, kind)

        monkeypatch.setattr(client._core, "inspect_many", count)


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_watch, "INTERVAL", 0.05)


@pytest.mark.usefixtures("brisk")
async def test_events_show_what_happens(client: aiodlock.Client) -> None:
    async with serve_app(aiodlock.web.app(client)) as http, watching(http) as events:
        rows = (await anext(events))["rows"]
        assert "No lock is held" in rows
        async with client.lock("order:42"):
            async for event in events:
                if "order:42" in event["rows"]:
                    break
        async for event in events:
            if "order:42" not in event["rows"]:
                break


@pytest.mark.usefixtures("brisk")
async def test_events_of_one_name_show_it_at_once_and_when_it_is_free(
    client: aiodlock.Client,
) -> None:
    lease = await client.lock("x").acquire()
    async with serve_app(aiodlock.web.app(client)) as http, watching(http) as others:
        await anext(others)
        async with watching(http, n="x") as events:
            # At once, though the next look may not be due.
            assert "held (exclusive)" in (await anext(events))["one"]
            await lease.release()
            async for event in events:
                if "Nobody holds it" in event["one"]:
                    break


@pytest.mark.usefixtures("brisk")
async def test_hostile_texts_in_events_are_text(client: aiodlock.Client) -> None:
    leases = [await client.lock(name, owner=name).acquire() for name in HOSTILE]
    async with serve_app(aiodlock.web.app(client)) as http:
        async with watching(http) as events:
            for part in (await anext(events)).values():
                check_harmless(part)
        for name in HOSTILE:
            async with watching(http, n=name) as events:
                found = check_harmless((await anext(events))["one"])
                assert "held (exclusive)" in found.text
    for lease in leases:
        await lease.release()


@pytest.mark.usefixtures("brisk")
async def test_viewers_share_one_poll_which_pauses_when_they_leave(
    client: aiodlock.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(client, monkeypatch)
    async with client.lock("x"), serve_app(aiodlock.web.app(client)) as http:
        async with contextlib.AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(watching(http)) for _ in range(20)]
            for events in streams:
                await anext(events)
            before = counted.calls
            for _ in range(5):
                for events in streams:
                    await anext(events)
            # Each look may come between two viewers; twenty of them would make a hundred.
            assert counted.calls - before <= 12

        async def pauses() -> bool:
            before = counted.calls
            await asyncio.sleep(0.5)  # ten looks
            return counted.calls == before

        await until(pauses)


@pytest.mark.usefixtures("brisk")
async def test_of_many_names_a_look_asks_about_a_part_and_about_what_is_seen(
    client: aiodlock.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_watch, "NAMES_PER_LOOK", 100)
    monkeypatch.setattr(_watch, "_AT_ONCE", 50)
    counted = Counted(client, monkeypatch)
    leases = [await client.lock(f"name:{number:03}").acquire() for number in range(450)]
    waiting = asyncio.create_task(client.lock("name:007").acquire())
    await until_waiting(client, "name:007")
    async with serve_app(aiodlock.web.app(client)) as http, watching(http) as events:
        async for event in events:
            if ">450</dd>" in event["summary"]:
                break
        assert "name:007" in event["rows"]
        most = 0
        for _ in range(10):
            before = counted.names
            event = await anext(events)
            most = max(most, counted.names - before)
        assert 100 < most <= 100 + 50  # a part of all, and the rows of the page
        # What is seen is asked about in each look, though a walk through all takes five.
        await client.break_lock("name:007")
        assert "name:007" in event["rows"]
        (await waiting).token  # noqa: B018
        event = await anext(events)
        event = await anext(events)
        position = event["rows"].find(">name:007<")
        assert position < 0 or "waiters" not in event["rows"][position : position + 900]
        await (await waiting).release()
    for lease in leases:
        with contextlib.suppress(aiodlock.LockLost):
            await lease.release()


@pytest.mark.usefixtures("brisk")
async def test_names_beyond_the_most_are_counted_and_not_kept(
    client: aiodlock.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_watch, "MOST_NAMES", 10)
    leases = [await client.lock(f"name:{number}").acquire() for number in range(25)]
    async with serve_app(aiodlock.web.app(client)) as http:
        assert "15 more names" in (await http.get("/")).text
    for lease in leases:
        await lease.release()


@pytest.mark.usefixtures("brisk")
async def test_hand_overs_and_losses_are_seen(client: aiodlock.Client) -> None:
    busy = True

    async def hand_over() -> None:
        while busy:
            async with client.lock("busy"):
                await asyncio.sleep(0.005)

    app = aiodlock.web.app(client)
    watch = app.state.pages.watch
    tasks = [asyncio.create_task(hand_over()) for _ in range(3)]
    # Extended by nobody: its lease runs out on the store.
    forgotten = await client.lock("forgotten", ttl=1.0, auto_extend=False, on_lost="flag").acquire()
    async with serve_app(app) as http, watching(http) as events:
        while True:
            # On a busy machine an event may be read when there was another look already.
            event = await anext(events)
            if (
                watch.seen.history.hand_overs_per_second(now()) > 2
                and "forgotten" in event["losses"]
            ):
                break
    assert {loss.key for loss in watch.seen.losses} == {("lock", "forgotten")}
    assert not forgotten.held
    busy = False
    await asyncio.gather(*tasks)


@pytest.mark.usefixtures("brisk")
async def test_released_leases_are_no_losses(client: aiodlock.Client) -> None:
    app = aiodlock.web.app(client)
    async with serve_app(app) as http, watching(http) as events:
        for number in range(5):
            async with client.lock(f"x:{number}", ttl=2.0):
                for _ in range(3):
                    await anext(events)
        for _ in range(50):  # longer than a lease
            await anext(events)
    assert not app.state.pages.watch.seen.losses


async def test_too_many_viewers_are_refused(
    client: aiodlock.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_app, "MOST_VIEWERS", 1)
    async with serve_app(aiodlock.web.app(client)) as http, watching(http) as events:
        await anext(events)
        assert (await http.get("/events")).status_code == 503


async def test_stream_ends_after_a_while_so_that_the_login_is_asked_again(
    client: aiodlock.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_app, "_STREAM_LASTS", 0.2)
    async with serve_app(aiodlock.web.app(client)) as http, watching(http) as events:
        assert len([event async for event in events]) >= 1


async def test_viewer_who_reads_no_more_is_forgotten_with_its_stream(
    client: aiodlock.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_app, "_STREAM_LASTS", 0.2)
    app = aiodlock.web.app(client)
    scope = {
        **{"type": "http", "method": "GET", "path": "/events", "query_string": b""},
        "headers": [(b"host", b"localhost")],
    }
    stuck = asyncio.Event()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            stuck.set()
            await asyncio.Event().wait()

    stream = asyncio.create_task(app(scope, receive, send))
    try:
        await stuck.wait()
        assert app.state.pages.watch.viewers == 1
        await until(lambda: app.state.pages.watch.viewers == 0)
        await stream
    finally:
        stream.cancel()
        await asyncio.wait([stream])


async def test_head_of_the_events_is_answered_at_once(client: aiodlock.Client) -> None:
    app = aiodlock.web.app(client)
    async with serve_app(app) as http, asyncio.timeout(PATIENCE):
        for _ in range(3):  # on one connection
            answer = await http.head("/events")
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert app.state.pages.watch.viewers == 0


@pytest.mark.usefixtures("brisk")
async def test_viewer_who_leaves_is_forgotten(client: aiodlock.Client) -> None:
    app = aiodlock.web.app(client)
    async with serve_app(app) as http:
        async with watching(http) as events:
            await anext(events)
            assert app.state.pages.watch.viewers == 1
        await until(lambda: app.state.pages.watch.viewers == 0)


@pytest.mark.usefixtures("brisk")
async def test_deadlock_that_stands_is_shown(
    store: Store, client: aiodlock.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sightings, "_LONG", 0.1)
    # Nobody gives up, so the cycle stands.
    monkeypatch.setattr("aiodlock._deadlocks.Deadlocks._found", lambda self, found: None)
    both = asyncio.Barrier(2)

    async def take(one: aiodlock.Client, first: str, second: str) -> None:
        async with one.lock(first):
            await both.wait()
            async with one.lock(second):
                pass

    async with aiodlock.Client(store.source, **{**store.options, "deadlock_after": 0.2}) as other:
        tasks = [
            asyncio.create_task(take(other, "a", "b")),
            asyncio.create_task(take(other, "b", "a")),
        ]
        async with serve_app(aiodlock.web.app(client)) as http, watching(http) as events:
            async for event in events:
                if "Deadlocks" in event["losses"]:
                    break
            assert "waits for &#39;a&#39;" in event["losses"]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
