"""The record of a success, as the scripts keep it."""

from __future__ import annotations

from typing import Any

import pytest

from ..servers import Store
from .direct import Direct, Heard

KEPT = 60_000


pytestmark = pytest.mark.scripted


@pytest.fixture
async def once(store: Store) -> Direct:
    return Direct(await store.raw(), kind="once")


def record(result: str = "bfine", kept: int = KEPT) -> tuple[Any, ...]:
    return (result, kept)


async def test_success_is_told_to_whoever_asks_from_then_on(once: Direct) -> None:
    assert (await once.acquire("a"))[0] == "granted"
    assert await once.leave("a", recorded=record()) == ["recorded"]
    for wait in (True, False):
        assert await once.acquire("b", wait=wait) == ["done", "bfine"]
    assert await once.holders() == {}
    assert await once.waiters() == {}
    assert await once.queue() == []


async def test_success_empties_the_queue_with_one_message_per_client(
    once: Direct, heard: Heard
) -> None:
    await once.acquire("a")
    for id, client in (("b", "one"), ("c", "two"), ("d", "one")):
        await once.acquire(id, client=client)
    await heard.notices()
    await once.leave("a", recorded=record())
    assert await heard.notices() == [("one", "done", "b,d"), ("two", "done", "c")]
    assert await once.extend("b") == ["done", "bfine"]


async def test_repeated_leave_is_answered_from_the_record(once: Direct) -> None:
    await once.acquire("a")
    for _ in range(2):
        assert await once.leave("a", ambiguous=True, recorded=record()) == ["recorded"]


@pytest.mark.parametrize("what", ["overdue", "broken", "never held", "left"])
async def test_only_who_holds_records(once: Direct, what: str) -> None:
    if what != "never held":
        await once.acquire("a", ttl=10_000)
    if what == "overdue":
        await once.age("a", by=10_001)
    elif what == "broken":
        await once.break_lock()
    elif what == "left":
        await once.leave("a")
    assert (await once.leave("a", recorded=record()))[0] == "gone"
    assert (await once.acquire("b"))[0] == "granted", "nothing is on record"


async def test_record_of_another_is_not_taken_for_ones_own(once: Direct) -> None:
    await once.acquire("a", ttl=10_000)
    await once.age("a", by=10_001)
    await once.acquire("b")
    await once.leave("b", recorded=record("bb"))
    assert (await once.leave("a", recorded=record("ba")))[0] == "gone"
    assert await once.acquire("c") == ["done", "bb"]


async def test_leave_without_a_record_hands_on(once: Direct) -> None:
    await once.acquire("a")
    await once.acquire("b")
    await once.leave("a")
    assert set(await once.holders()) == {"b"}


async def test_what_was_taken_back_is_to_be_done_again(once: Direct) -> None:
    await once.acquire("a")
    await once.leave("a", recorded=record())
    assert await once.forget()
    assert not await once.forget()
    assert (await once.acquire("b"))[0] == "granted"
    assert (await once.leave("a", recorded=record()))[0] == "gone", "a late repetition"


async def test_record_ends_with_what_it_is_kept_for(once: Direct) -> None:
    await once.acquire("a")
    await once.leave("a", recorded=record())
    assert KEPT - 5_000 < await once.redis.pttl(once.keys.record) <= KEPT


async def test_late_duplicate_of_the_acquire_is_told_the_result(once: Direct) -> None:
    await once.acquire("a")
    await once.leave("a", ambiguous=True, recorded=record())
    assert await once.acquire("a") == ["done", "bfine"]
    await once.forget()
    assert await once.acquire("a") == ["gone"], "and nothing is done a second time"
