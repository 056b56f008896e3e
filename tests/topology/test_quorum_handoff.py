"""From one holder of a quorum to the next: one message to each node, and what others see meanwhile."""

from __future__ import annotations

import asyncio
import contextvars
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

import aiodlock
from aiodlock.backends.redis.link import Link
from aiodlock.backends.redis.quorum import backend as quorum_backend
from aiodlock.backends.redis.quorum.delays import Delays
from aiodlock.backends.redis.quorum.notices import NodeNotices
from aiodlock.backends.redis.quorum.voter import Voter
from aiodlock.backends.redis.settings import Settings
from aiodlock.backends.redis.source import Source
from aiodlock.backends.redis.wire import Wire

from ..scenes import bounded, is_held, store_of, until, until_waiting

#: Leases last longer than these tests, and so do bodies without an extension.
_LONG = 300.0

Enter = Callable[..., Awaitable[aiodlock.Client]]


@pytest.fixture
async def enter(no_stray_tasks: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Enter]:
    """Give a factory of entered clients of the same five nodes; who was granted is extended late."""
    monkeypatch.setattr(quorum_backend, "_EXTEND_AFTER", _LONG)
    run = uuid4().hex
    nodes = [f"memory://{run}-{node}" for node in range(5)]
    async with AsyncExitStack() as stack:

        async def make() -> aiodlock.Client:
            client = aiodlock.Client(nodes, ttl=_LONG, waiter_ttl=_LONG)
            return await stack.enter_async_context(client)

        yield make


def said(client: aiodlock.Client) -> list[str]:
    """Collect what the client says to nodes by the script ``vote``, once for each node."""
    words: list[str] = []
    for voter in store_of(client).nodes.voters:

        def vote(*arguments: Any, _vote: Any = voter.vote) -> Any:
            words.append(arguments[2])
            return _vote(*arguments)

        voter.vote = vote
    return words


async def hand_over(
    holder: aiodlock.Client, waiter: aiodlock.Client, **options: Any
) -> tuple[aiodlock.Lease, aiodlock.Lease]:
    """Return a lease that was released, and that of the one who waited for it."""
    before = await holder.lock("name").acquire()
    waiting = asyncio.create_task(waiter.lock("name", **options).acquire())
    await until_waiting(holder, "name")
    await before.release()
    return before, await waiting


@pytest.mark.parametrize("timeout", [None, 60.0])
async def test_next_holder_asks_nobody_before_its_body(enter: Enter, timeout: float | None) -> None:
    first, second = await enter(), await enter()
    words = said(second)
    before, after = await hand_over(first, second, timeout=timeout)
    assert after.token == before.token + 1
    assert set(words) == {"ask"}
    await after.release()
    # Without a holder to take over from, a token has to be written.
    async with second.lock("name") as lease:
        assert lease.token > after.token
    assert "fence" in words


@pytest.mark.parametrize("options", [{"lock_delay": 1.0}, {"owner": "several"}], ids=str)
async def test_votes_are_confirmed_first_where_others_depend_on_it(
    enter: Enter, options: dict[str, Any]
) -> None:
    first, second = await enter(), await enter()
    words = said(second)
    before, after = await hand_over(first, second, **options)
    assert after.token > before.token
    assert "fence" in words
    await after.release()


async def test_holder_that_confirmed_nothing_yet_is_seen_and_can_be_broken(enter: Enter) -> None:
    first, second = await enter(), await enter()
    _, lease = await hand_over(first, second)
    await until(lambda: sees(first, lease.token))
    assert await first.break_lock("name") == 1
    assert (await lease.wait_lost()).reason == "broken"
    with pytest.raises(aiodlock.LockLost):
        await lease.release()
    assert not is_held(lease)


async def sees(client: aiodlock.Client, token: int) -> bool:
    holders = (await client.inspect("name")).holders
    return [holder.token for holder in holders] == [token]


@pytest.mark.parametrize("timeout", [None, 60.0])
async def test_holder_that_confirmed_nothing_yet_gets_more_while_others_wait(
    enter: Enter, timeout: float | None
) -> None:
    """A node has to know that its owner holds, or the second request stands behind all others."""
    first, second = await enter(), await enter()
    pair = second.rwlock("name", timeout=timeout)
    before = await first.lock("name").acquire()
    others: list[asyncio.Task[aiodlock.Lease]] = []

    async def write_then_read() -> None:
        async with pair.write as writing:
            others.append(asyncio.create_task(first.lock("name").acquire()))
            await until_waiting(first, "name")
            async with bounded(20), pair.read as reading:
                assert reading.token == writing.token

    writer = asyncio.create_task(write_then_read())
    await until_waiting(first, "name")
    await before.release()
    await writer
    await (await others[0]).release()


async def test_client_that_is_left_leaves_no_vote_at_the_slowest_node(enter: Enter) -> None:
    other = await enter()
    client = await enter()
    backends: list[Any] = [store_of(each) for each in (client, other)]
    slowest = backends[0].nodes.voters[4]

    def later(*arguments: Any, _call: Any = slowest._call, **options: Any) -> None:
        asyncio.get_running_loop().call_later(0.2, partial(_call, *arguments, **options))

    async def votes() -> object:
        return (await backends[1].nodes.voters[4].inspect("lock", "name")).votes

    slowest._call = later
    async with client.lock("name"):
        await until(votes, "the vote of the slowest node")
    await client.__aexit__(None, None, None)
    assert not await votes()


def _nobody(voter: Voter) -> NodeNotices:
    return NodeNotices(voter, None, None, None)  # type: ignore[arg-type]


async def test_node_that_is_away_is_tried_by_one_connection_of_a_client_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[Link] = []

    async def refused(self: Link) -> Wire:
        tries.append(self)
        raise ConnectionRefusedError

    monkeypatch.setattr(Link, "_connect", refused)
    voter = Voter(
        0,
        Source.from_url("redis://nowhere"),
        Settings("aiodlock", token_retention=60.0, unavailable_after=30.0),
        "label",
        Delays(0.0),
    )
    running = asyncio.create_task(voter.server.run(_nobody(voter), lambda: None))
    await until(lambda: len(tries) >= 6)
    running.cancel()
    await asyncio.wait({running})
    wakeups = min(map(tries.count, tries))
    assert wakeups <= 2, "after its first try, or one that has begun, it waits for the other link"


async def test_turns_leave_nothing_to_the_collector(enter: Enter) -> None:
    """What is over goes by itself: a collection now and then would be a tenth of a turn's time."""
    clients = [await enter() for _ in range(2)]
    held = await (await enter()).lock("held").acquire()

    async def take_turns(client: aiodlock.Client) -> None:
        for _ in range(20):
            async with client.lock("name"):
                await asyncio.sleep(0)
            with pytest.raises(aiodlock.WouldBlock):
                await client.lock("held").acquire_nowait()

    await asyncio.gather(*map(take_turns, clients))
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await asyncio.gather(*map(take_turns, clients))
        gc.collect()
        ours = [each for each in gc.garbage if type(each).__module__.startswith("aiodlock")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not ours
    await held.release()


async def forget(client: aiodlock.Client, name: str) -> None:
    """Acquire, and drop the lease: it is released in the background."""
    lease = await asyncio.create_task(client.lock(name).acquire())
    await asyncio.sleep(0)  # the loop forgets what it has handed on
    with pytest.warns(ResourceWarning):
        del lease


async def test_hook_that_ends_in_a_cancellation_harms_nobody(enter: Enter) -> None:
    """It is called while the reply to a release is read that nobody awaits."""
    heard: list[str] = []

    class Cancelling(aiodlock.Hooks):
        def released(self, request: aiodlock.RequestInfo, held: float) -> None:
            heard.append(request.name)
            if request.name == "forgotten":
                raise asyncio.CancelledError

    client = await enter()
    async with client.lock("another") as lease:
        client.add_hooks(Cancelling())
        await forget(client, "forgotten")
        await until(lambda: "forgotten" in heard)
        await lease.extend()
        assert is_held(lease)


async def test_hooks_of_a_release_that_nobody_awaits_run_in_the_context_of_who_left(
    enter: Enter,
) -> None:
    who = contextvars.ContextVar("who", default="nobody")
    heard: list[str] = []

    class Telling(aiodlock.Hooks):
        def released(self, request: aiodlock.RequestInfo, held: float) -> None:
            heard.append(who.get())

    client = await enter()
    client.add_hooks(Telling())
    who.set("me")
    await forget(client, "name")
    await until(lambda: heard == ["me"])
