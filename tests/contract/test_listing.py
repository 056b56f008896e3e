"""``Client.locks`` on many names: what it yields for each glob, and how many round trips that takes."""

from __future__ import annotations

import asyncio
import fnmatch
from contextlib import AsyncExitStack

import pytest

import aiodlock
from aiodlock._client import core_of
from aiodlock.backends.redis.keys import parts_of, state_pattern

from ..proxy import FaultProxy
from ..servers import Store

NAMES = [
    "order:1",
    "order:22",
    "order",
    "ключ:1",
    "a*b",
    "a[b",
    "a]b",
    "x{y}",
    "space d",
    "🔒",
    "50%",
]
GLOBS = [
    *("*", "order:*", "order:?", "order:??", "order", "o*:[12]", "[ok]*", "ключ:*", "?", "a[*]b"),
    *(
        "a[[]b",
        "a[]]b",
        "a[",
        "x{*",
        "* d",
        "*%",
        "????????",
        "*r*d*e*r*:*",
        "[!o]*",
        "no",
        "[!]",
        "",
    ),
]


@pytest.mark.parametrize("match", GLOBS)
async def test_locks_yields_what_the_glob_matches(client: aiodlock.Client, match: str) -> None:
    async with AsyncExitStack() as stack:
        for name in NAMES:
            await stack.enter_async_context(client.lock(name))
        found = [info.name async for info in client.locks(match)]
    assert sorted(found) == sorted(name for name in NAMES if fnmatch.fnmatchcase(name, match))


async def test_literal_name_is_not_searched_for(real_store: Store) -> None:
    async with FaultProxy(real_store.url) as proxy, aiodlock.Client(proxy.url) as client:
        async with client.lock("order:42"):
            found = [info.name async for info in client.locks("order:42")]
        assert found == ["order:42"]
        assert not any(connection.commands["SCAN"] for connection in proxy.connections)


async def test_thousands_of_names_take_few_round_trips(real_store: Store) -> None:
    async with (
        aiodlock.Client(real_store.url) as holder,
        FaultProxy(real_store.url) as proxy,
        aiodlock.Client(proxy.url) as client,
    ):
        leases = [await holder.lock(f"order:{number}").acquire() for number in range(2000)]
        trips = 0
        backend = client._core.session.backend  # type: ignore[union-attr]
        inspect_all = backend.inspect_all

        async def counted(*arguments: object) -> object:
            nonlocal trips
            trips += 1
            return await inspect_all(*arguments)  # type: ignore[arg-type]

        backend.inspect_all = counted  # type: ignore[method-assign]
        found = [info async for info in client.locks("order:*")]
        trips += sum(connection.commands["SCAN"] for connection in proxy.connections)
        assert len(found) == 2000
        assert trips <= 12  # at this rate 10,000 names take fewer than 60
        for lease in leases:
            await lease.release()


def test_wrong_arguments_are_told_by_the_call() -> None:
    client = aiodlock.Client("memory://")
    with pytest.raises(TypeError, match="match"):
        client.locks(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind"):
        client.locks(kind="wait")  # type: ignore[arg-type]


def test_pattern_for_the_server_keeps_what_is_literal() -> None:
    def inner(match: str) -> str:
        return state_pattern("p", "lock", match).removeprefix("p:2:lock:{")

    ends = "}:[sq][tu][ae][tu]e"
    assert inner("order:*") == f"order%3A*{ends}"
    assert inner("a?c") == f"a*c{ends}"
    assert inner("[[]*") == f"%5B*{ends}"
    assert inner("a*b*c*d*e").count("*") <= 4
    assert parts_of("a[b") == ["a[b"]


async def test_glob_may_be_longer_than_a_name(client: aiodlock.Client) -> None:
    name = "n" * 512
    async with client.lock(name):
        assert [info.name async for info in client.locks(name + "*")] == [name]


async def test_listing_many_names_gives_others_their_turns() -> None:
    """Extensions are sent in such turns."""
    async with aiodlock.Client("memory://") as client:
        for number in range(2000):
            await client.lock(str(number)).acquire()
        turns, over, loop = 0, False, asyncio.get_running_loop()

        def turn() -> None:
            nonlocal turns
            if not over:
                turns += 1
                loop.call_soon(turn)

        turn()
        found = await core_of(client).held_names()
        over = True
        assert len(found["lock"]) == 2000
        assert turns > 20
