"""A client never stays dead: a session that died is followed by another one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

import aiodlock
from aiodlock import BackendError, BackendUnavailable, Client, LockLost, NotHeld
from aiodlock import _clock as clock
from aiodlock._session import Session

from ..conftest import MakeClient
from ..scenes import bounded, settled, until, until_cancelled

#: Longer than any test takes: only a release frees a name.
_LONG = 60.0


async def bug() -> None:
    raise ZeroDivisionError("a bug of ours")


def kill(client: Client) -> None:
    """Let a background task of the client die."""
    assert client._core.session is not None
    assert client._core.session.start_soon(bug)


async def until_dead(client: Client) -> None:
    session = client._core.session
    assert session is not None
    await until(lambda: session.death is not None, "death")


async def test_later_calls_work_after_a_background_task_died(client: Client) -> None:
    kill(client)
    await until_dead(client)
    async with client.lock("x", ttl=_LONG) as lease:
        assert lease.held
    assert (await client.inspect("x")).holders == ()


async def test_names_that_the_dead_session_held_are_free_again(client: Client) -> None:
    async def body() -> None:
        async with client.lock("x", ttl=_LONG):
            kill(client)
            await until_cancelled()

    with pytest.raises(BackendError):
        await body()
    async with bounded(20):
        async with client.lock("x", ttl=_LONG):
            pass


async def test_nothing_is_kept_of_a_dead_session_when_its_leases_are_over(client: Client) -> None:
    goes_on, is_over = asyncio.Event(), asyncio.Event()

    async def block() -> None:
        async with client.lock("x", ttl=_LONG):
            goes_on.set()
            await until_cancelled()

    async def bare() -> None:
        await client.lock("y", ttl=_LONG).acquire()

    async def both() -> None:
        await bare()
        with pytest.raises(BackendError):
            await block()
        await is_over.wait()

    task = asyncio.create_task(both())
    await goes_on.wait()
    kill(client)
    await until_dead(client)
    async with client.lock("z"):
        pass  # the dead one has left what it held
    is_over.set()
    await task
    del task
    session = client._core.session
    assert session is not None
    await until(lambda: not session.register.holds_of, "the end of what is known")


@pytest.mark.parametrize("turns", [0, 3, 6])
async def test_client_that_is_left_in_the_moment_of_a_death_releases_what_it_holds(
    make_client: MakeClient, turns: int
) -> None:
    client, other = await make_client(close_timeout=_LONG), await make_client()
    await client.lock("x", ttl=_LONG).acquire()
    session = client._core.session
    assert session is not None
    kill(client)
    for _ in range(turns):
        await asyncio.sleep(0)
    async with bounded(20):
        await client.__aexit__(None, None, None)
        assert not session.requests
        async with other.lock("x"):
            pass


@pytest.mark.parametrize("turns", [1, 2, 3, 4, 6])
async def test_listing_lets_the_loop_turn_when_the_session_dies(
    client: Client, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """A dead session may refuse at once: asked again without a pause, it kept the loop for 0.5 s."""
    assert client._core.session is not None
    backend, asked = client._core.session.backend, 0
    names = backend.names

    def count(*args: Any) -> AsyncIterator[str]:
        nonlocal asked
        asked += 1
        return names(*args)

    monkeypatch.setattr(backend, "names", count)
    kill(client)
    for _ in range(turns):
        await asyncio.sleep(0)
    async with bounded(20):
        with suppress(BackendUnavailable):
            assert [info.name async for info in client.locks()] == []
    assert asked <= 12


async def test_client_outlives_one_death_after_the_other(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(4):
        kill(client)
        await until_dead(client)
        async with client.lock("x"):
            pass
    events = [getattr(record, "event", None) for record in caplog.records]
    assert events.count("client_died") == events.count("session_renewed") == 4
    levels = {r.levelno for r in caplog.records if getattr(r, "event", "") == "session_renewed"}
    assert levels == {logging.WARNING}


async def test_what_a_backend_does_not_expect_ends_its_session_and_not_the_client(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = client._core.session
    assert session is not None
    dead = asyncio.Event()
    once = iter([True])

    async def serve() -> None:
        if next(once, False):
            dead.set()
            raise KeyError("a field that nobody expected")
        await asyncio.Event().wait()

    session.start_soon(serve)
    async with bounded(20):
        await dead.wait()
    await until_dead(client)
    async with client.lock("x"):
        pass
    assert client._core.session is not session
    assert client._core.session is not None
    assert client._core.session.backend is not session.backend
    assert client._core.session.backend.label != session.backend.label


async def test_call_that_does_not_wait_works_again_soon(client: Client) -> None:
    kill(client)
    await until_dead(client)
    async with bounded(20):
        while True:
            try:
                lease = await client.lock("x").acquire_nowait()
            except BackendUnavailable:
                continue
            break
    await lease.release()


@pytest.mark.stores("memory")
async def test_what_tries_once_finds_the_next_session(client: Client) -> None:
    """A lock did; several names as one, and what is done once, were refused at once."""
    kill(client)
    await until_dead(client)
    async with client.multilock("a", "b", timeout=0) as leases:
        assert leases.held
    kill(client)
    await until_dead(client)
    async with client.once("c", keep=_LONG, timeout=0) as once:
        assert once.first


@pytest.mark.stores("memory")
@pytest.mark.parametrize("kind", ["multilock", "once"])
async def test_wait_for_the_next_session_is_a_part_of_the_timeout(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    client, other = await make_client(), await make_client()
    shift, waited_for = 0.0, asyncio.Event()
    ready, start = client._core.ready, Session.start

    async def wait(name: str | None = None, within: float | None = None) -> Session:
        nonlocal shift
        waited_for.set()
        session = await ready(name, within)
        shift = _LONG - 0.5
        return session

    async def start_late(session: Session) -> None:
        await waited_for.wait()
        await start(session)

    monkeypatch.setattr(client._core, "ready", wait)
    monkeypatch.setattr(Session, "start", start_late)
    monkeypatch.setattr("aiodlock._patience.now", lambda: clock.now() + shift)

    async def acquire() -> None:
        if kind == "once":
            async with client.once("x", keep=_LONG, timeout=_LONG):
                pass
        else:
            await client.multilock("x", "y", timeout=_LONG).acquire()

    held = other.once("x", keep=_LONG) if kind == "once" else other.lock("x")
    async with held:
        kill(client)
        await until_dead(client)
        async with bounded(20):
            with pytest.raises(aiodlock.AcquireTimeout):
                await acquire()


async def test_client_is_left_while_a_new_session_begins(make_client: MakeClient) -> None:
    client = await make_client()
    kill(client)
    await until_dead(client)
    await client.__aexit__(None, None, None)
    with pytest.raises(aiodlock.ClientClosed):
        await client.lock("x").acquire()
    async with client:
        async with client.lock("x"):
            pass


async def test_session_that_was_cancelled_from_outside_is_replaced_at_the_next_call(
    client: Client,
) -> None:
    session = client._core.session
    assert session is not None
    assert session._main is not None
    session._main.cancel()
    await until_dead(client)
    for _ in range(10):
        await asyncio.sleep(0)
    assert client._core.session is session
    async with client.lock("x"):
        pass
    assert client._core.session is not session


async def test_name_is_not_had_again_inside_the_block_whose_session_died(client: Client) -> None:
    async def body() -> None:
        async with client.lock("x"):
            kill(client)
            try:
                await until_cancelled()
            except asyncio.CancelledError:
                pass
            async with client.lock("y"):
                pass  # another name is had
            await client.lock("x").acquire()

    with pytest.raises((LockLost, BackendError)):
        await body()
    async with client.lock("x"):
        pass


async def test_loss_of_a_bare_lease_is_told_once(client: Client) -> None:
    lock = client.lock("x")
    lease = await lock.acquire()
    kill(client)
    await lease.wait_lost()
    async with client.lock("y"):
        pass
    with pytest.raises((LockLost, BackendError)):
        await lock.release()
    with pytest.raises(NotHeld):
        await lock.release()


async def test_leader_is_observed_across_a_death(client: Client) -> None:
    election = client.election("e")
    leaders = election.observe(interval=_LONG)
    async with election.lead("one"):
        assert await anext(leaders) == "one"
    following = asyncio.ensure_future(anext(leaders))
    kill(client)
    await until_dead(client)
    async with election.lead("two"):
        async with bounded(20):
            assert await following == "two"
    await leaders.aclose()


async def test_leader_is_observed_when_the_client_was_left_and_entered_again(
    make_client: MakeClient,
) -> None:
    client = await make_client()
    election = client.election("e")
    leaders = election.observe(interval=_LONG)
    async with election.lead("one"):
        assert await anext(leaders) == "one"
    await client.__aexit__(None, None, None)
    async with client:
        following = asyncio.ensure_future(anext(leaders))
        await settled(client)
        async with election.lead("two"):
            async with bounded(20):
                assert await following == "two"
        await leaders.aclose()


async def test_observer_is_cancelled_while_no_new_session_begins(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = asyncio.Event()
    ready = client._core.ready

    async def wait(name: str | None = None, within: float | None = None) -> Session:
        session = client._core.session
        if within is None and session is not None and session.death is not None:
            waits.set()
        return await ready(name, within)

    async def start(session: Session) -> None:
        raise BackendUnavailable("the server refuses")

    monkeypatch.setattr(client._core, "ready", wait)
    monkeypatch.setattr(Session, "start", start)
    following = asyncio.ensure_future(anext(client.election("e").observe(interval=0.01)))
    await asyncio.sleep(0)
    kill(client)
    await waits.wait()
    following.cancel()
    await asyncio.wait({following})
    assert following.cancelled()


@pytest.mark.stores("memory")
async def test_store_that_cannot_be_entered_anew_is_told_once(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="aiodlock")
    refusals = iter([True] * 3)

    async def start(session: Session) -> None:
        if next(refusals, False):
            raise BackendUnavailable("the server refuses")
        await started(session)

    started = Session.start
    monkeypatch.setattr(Session, "start", start)
    kill(client)
    await until_dead(client)
    async with client.lock("x"):
        pass
    levels = [r.levelno for r in caplog.records if getattr(r, "event", "") == "no_session"]
    assert levels == [logging.WARNING, logging.DEBUG, logging.DEBUG]
