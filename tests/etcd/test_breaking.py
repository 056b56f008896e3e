"""Breaking many holders on etcd: a transaction takes no more than some."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aiodlock._model import ENDED, Granted, Waiting

from .conftest import Direct
from .servers import EtcdCluster

MakeDirect = Callable[..., Coroutine[Any, Any, Direct]]


async def test_many_holders_are_broken_and_who_is_let_in_meanwhile_is_not(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)

    async def ask() -> tuple[Any, Any]:
        place, heard = direct.place(kind="semaphore", limit=25, ttl=20.0, waiter_ttl=20.0)
        return place, (await place.acquire(wait=True), heard)

    holders = [await ask() for _ in range(25)]
    waiters = [await ask() for _ in range(3)]
    assert all(isinstance(answer, Granted) for _, (answer, _) in holders)
    assert all(isinstance(answer, Waiting) for _, (answer, _) in waiters)
    assert await direct.store.break_lock("name", kind="semaphore") == 25
    for _, (_, heard) in holders:
        await heard.until("gone: broken")
    for _, (_, heard) in waiters:
        await heard.until("granted")
    await asyncio.sleep(0.2)
    assert [heard.words for _, (_, heard) in waiters] == [["granted"]] * 3
    for place, _ in (*waiters, *holders):
        await place.leave(ENDED)


async def test_end_of_a_hold_is_told_once_though_a_message_on_its_way_finds_it_too(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = await make_direct(one_node)
    place, heard = direct.place()
    assert isinstance(await place.acquire(wait=True), Granted)
    transact, on_its_way, goes_on = direct.store.cluster.transact, asyncio.Event(), asyncio.Event()

    async def slow(*about: Any, **how: Any) -> Any:
        on_its_way.set()
        await goes_on.wait()
        return await transact(*about, **how)

    monkeypatch.setattr(direct.store.cluster, "transact", slow)
    lease, _ = await place.own.wanted(granted=True)
    value = place.value(place.token)
    writing = asyncio.create_task(place.own.write(place.value(), value, lease, None))
    await on_its_way.wait()
    monkeypatch.setattr(direct.store.cluster, "transact", transact)
    assert await direct.store.break_lock("name") == 1
    await heard.until("gone: broken")
    goes_on.set()
    assert not await writing
    assert heard.words == ["gone: broken"]
    assert (await place.leave(ENDED)).what == "gone"
