"""Elections: one leader at a time, and those who watch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import aiodlock
from aiodlock._model import Kind
from aiodlock.backends.etcd.store import EtcdBackend

from ..conftest import MakeClient
from ..proxy import FaultProxy
from ..scenes import BRIEF, bounded, until, until_cancelled, until_waiting
from ..servers import ETCD, POSTGRES


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
                await until_waiting(first, "boss", number)
            else:
                await until(lambda: order)
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
        assert await anext(values) == nasty
    async with election.lead(nasty):
        assert await anext(values) == nasty
    async with election.lead():
        assert await anext(values) == ""
    await values.aclose()


async def test_observer_waits_while_nobody_leads_and_ignores_plain_locks(
    client: aiodlock.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    async def look(kind: Kind, name: str) -> aiodlock.LockInfo:
        nonlocal looks
        info = await inspect(kind, name)
        looks += 1
        return info

    inspect = client._core.inspect
    monkeypatch.setattr(client._core, "inspect", look)
    values = client.election("boss").observe(interval=0.01)
    waiting = asyncio.ensure_future(anext(values))
    await until(lambda: looks >= 2)
    async with client.lock("boss"):
        seen = looks
        await until(lambda: looks >= seen + 2)
        assert not waiting.done()
    async with client.election("boss").lead("x"):
        assert await waiting == "x"
    await values.aclose()


async def test_observer_hears_of_a_leader_without_looking_for_one(make_client: MakeClient) -> None:
    leading, watching = await make_client(), await make_client()
    values = watching.election("boss").observe(interval=600)
    waiting = asyncio.ensure_future(anext(values))
    for value in ("a", "b"):
        async with bounded(10), leading.election("boss").lead(value):
            assert await waiting == value
        waiting = asyncio.ensure_future(anext(values))
    waiting.cancel()
    await asyncio.wait({waiting})
    await values.aclose()


def _listens_late(client: aiodlock.Client) -> Callable[[], object]:
    """Keep what the client wants to listen to from its server; return what lets it go."""
    assert client._core.session is not None
    backend: Any = client._core.session.backend
    if isinstance(backend, EtcdBackend):
        unsent, kept = backend.cluster.watches._unsent, asyncio.Queue[Any]()
        put, unsent.put_nowait = unsent.put_nowait, kept.put_nowait  # type: ignore[method-assign]
        return lambda: [put(kept.get_nowait()) for _ in range(kept.qsize())]
    listening, may_listen = backend.store._listening, asyncio.Event()
    listen_to_all = listening._listen_to_all

    async def listen_late(connection: object) -> None:
        await may_listen.wait()
        await listen_to_all(connection)

    listening._listen_to_all = listen_late
    return may_listen.set


@pytest.mark.stores(*POSTGRES, *ETCD)
async def test_observer_looks_again_when_the_server_listens(make_client: MakeClient) -> None:
    leading, watching = await make_client(), await make_client()
    listen = _listens_late(watching)
    values = watching.election("boss").observe(interval=600)
    waiting = asyncio.ensure_future(anext(values))
    await asyncio.sleep(0)
    await watching.inspect("boss")  # behind the observer's own look
    async with bounded(10), leading.election("boss").lead("a"):
        listen()
        assert await waiting == "a"
    await values.aclose()


async def test_observer_looks_again_after_its_connection_was_lost(
    make_client: MakeClient, proxy: FaultProxy
) -> None:
    leading, watching = await make_client(), await make_client(proxy.url)
    values = watching.election("boss").observe(interval=600)
    waiting = asyncio.ensure_future(anext(values))
    await asyncio.sleep(0)
    await proxy.refuse()
    proxy.cut()
    async with bounded(10), leading.election("boss").lead("a"):
        await proxy.heal()
        assert await waiting == "a"
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
            await client.inspect("boss")  # time enough for another to come in
            leading -= 1

    await asyncio.gather(stand(), stand(), stand())


async def test_deposed_leader_is_cancelled(client: aiodlock.Client) -> None:
    async def lead() -> None:
        async with client.election("boss").lead("x"):
            assert await client.break_lock("boss") == 1
            await until_cancelled()

    with pytest.raises(aiodlock.LockLost) as caught:
        await lead()
    assert caught.value.reason == "broken"


async def test_candidate_gives_up_at_its_timeout(client: aiodlock.Client) -> None:
    async with client.election("boss").lead("x"):
        with pytest.raises(aiodlock.AcquireTimeout):
            async with client.election("boss", timeout=BRIEF).lead("y"):
                raise AssertionError("two leaders")


async def test_observer_is_told_when_its_client_is_left(make_client: MakeClient) -> None:
    client = await make_client()
    values = client.election("boss").observe(interval=600)
    waiting = asyncio.ensure_future(anext(values))
    await asyncio.sleep(0)
    await client.__aexit__(None, None, None)
    with pytest.raises(aiodlock.ClientClosed):
        await waiting


def test_bad_input_is_refused() -> None:
    client = aiodlock.Client("memory://")
    with pytest.raises(ValueError):
        client.election("")
    for owner in ("me", ""):
        with pytest.raises(ValueError, match="owner"):
            client.election("x", owner=owner)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        client.election("x", no_such=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        client.election("x").lead(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        client.election("x").lead("v" * 401)
    with pytest.raises(ValueError):
        client.election("x").observe(interval=0)  # told by the call
