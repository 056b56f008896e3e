"""Elections: one leader at a time, and those who watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import aiodlock

from ..conftest import MakeClient


async def next_value(values: AsyncIterator[str]) -> str:
    async with asyncio.timeout(5):
        return await anext(values)


async def until_waiting(client: aiodlock.Client, number: int) -> None:
    async with asyncio.timeout(5):
        while len((await client.inspect("boss")).waiters) != number:
            await asyncio.sleep(0.005)


async def test_leaders_follow_each_other_in_order_and_leaving_resigns(
    make_client: MakeClient,
) -> None:
    first, second = await make_client(), await make_client()
    order: list[str] = []
    resign = asyncio.Event()

    async def stand(client: aiodlock.Client, value: str) -> None:
        async with client.election("boss").lead(value) as lease:
            order.append(value)
            assert lease.held
            assert (await client.inspect("boss")).token == lease.token
            if value == "a":
                await resign.wait()

    async with asyncio.TaskGroup() as tasks:
        for number, value in enumerate("abc"):
            tasks.create_task(stand((first, second)[number % 2], value))
            if value != "a":
                await until_waiting(first, number)
            else:
                while not order:
                    await asyncio.sleep(0.005)
        assert order == ["a"]
        resign.set()
    assert order == ["a", "b", "c"]


async def test_observer_sees_the_present_leader_and_then_the_changes(
    make_client: MakeClient,
) -> None:
    leader, watcher = await make_client(), await make_client()
    election = leader.election("boss")
    values = watcher.election("boss").observe(interval=0.02)
    nasty = "http://[::1]:80/ö {x}\x00\n%3A:"
    async with election.lead(nasty):
        assert await next_value(values) == nasty
    async with election.lead(nasty):
        assert await next_value(values) == nasty
    async with election.lead():
        assert await next_value(values) == ""
    await values.aclose()


async def test_observer_waits_while_nobody_leads_and_ignores_plain_locks(
    client: aiodlock.Client,
) -> None:
    values = client.election("boss").observe(interval=0.02)
    async with client.lock("boss"):
        waiting = asyncio.ensure_future(anext(values))
        done, _ = await asyncio.wait({waiting}, timeout=0.1)
        assert not done
    async with client.election("boss").lead("x"):
        assert await asyncio.wait_for(waiting, 5) == "x"
    await values.aclose()


async def test_one_candidacy_used_by_two_tasks_makes_two_candidates(
    client: aiodlock.Client,
) -> None:
    candidacy = client.election("boss").lead("same")
    leading = 0

    async def stand() -> None:
        nonlocal leading
        async with candidacy:
            leading += 1
            assert leading == 1
            await asyncio.sleep(0.01)
            leading -= 1

    async with asyncio.timeout(5):
        await asyncio.gather(stand(), stand(), stand())


async def test_deposed_leader_is_cancelled(client: aiodlock.Client) -> None:
    async def lead() -> None:
        async with client.election("boss").lead("x"):
            assert await client.break_lock("boss") == 1
            await asyncio.sleep(5)

    with pytest.raises(aiodlock.LockLost) as caught:
        await lead()
    assert caught.value.reason == "broken"


async def test_candidate_gives_up_at_its_timeout(client: aiodlock.Client) -> None:
    async with client.election("boss").lead("x"):
        with pytest.raises(aiodlock.AcquireTimeout):
            async with client.election("boss", timeout=0.05).lead("y"):
                raise AssertionError("two leaders")


async def test_observer_is_told_when_its_client_is_left(make_client: MakeClient) -> None:
    client = await make_client()
    values = client.election("boss").observe(interval=0.02)
    waiting = asyncio.ensure_future(anext(values))
    await asyncio.sleep(0)
    await client.__aexit__(None, None, None)
    with pytest.raises(aiodlock.ClientClosed):
        async with asyncio.timeout(5):
            await waiting


def test_bad_input_is_refused() -> None:
    client = aiodlock.Client("memory://")
    with pytest.raises(ValueError):
        client.election("")
    with pytest.raises(ValueError):
        client.election("x", owner="me")
    with pytest.raises(TypeError):
        client.election("x", no_such=1)
    with pytest.raises(TypeError):
        client.election("x").lead(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        client.election("x").lead("v" * 401)
