"""extend: never nearer, never revived, and for the head of the queue the look."""

from __future__ import annotations

import pytest

from .direct import Direct, Heard


async def test_extension_pushes_a_holder_into_the_future(direct: Direct) -> None:
    _, token, _ = await direct.acquire("a", ttl=100_000)
    await direct.age("a", by=80_000)
    assert await direct.extend("a", 100_000) == ["held", token, "100000"]


async def test_extension_pushes_a_waiter_into_the_future(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b", waiter_ttl=50_000)
    await direct.age("b", by=30_000)
    word, left, *_ = await direct.extend("b", 50_000)
    assert (word, left) == ("waiting", "50000")


async def test_extension_never_brings_a_holder_nearer(direct: Direct) -> None:
    await direct.acquire("a", ttl=100_000)
    before = (await direct.holders())["a"].deadline
    (word, _, left), moments = await direct.timed(direct.extend("a", 10_000))
    assert word == "held"
    assert before - int(left) in moments
    assert (await direct.holders())["a"].deadline == before


async def test_extension_never_brings_a_waiter_nearer(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b", waiter_ttl=50_000)
    before = (await direct.waiters())["b"].deadline
    (word, left, *_), moments = await direct.timed(direct.extend("b", 5_000))
    assert word == "waiting"
    assert before - int(left) in moments
    assert (await direct.waiters())["b"].deadline == before


async def test_promise_survives_a_shorter_ttl_whoever_looks_later(direct: Direct) -> None:
    """The length of a record bounds its deadline: a shorter length must not cut what was promised."""
    await direct.acquire("a", ttl=100_000)
    promised = (await direct.holders())["a"].deadline
    for _ in range(3):
        await direct.extend("a", 10_000)
    (_, _, until_blocker_ends, _floor), moments = await direct.timed(direct.acquire("b"))
    assert promised - int(until_blocker_ends) in moments
    (_, _, left), moments = await direct.timed(direct.extend("a", 10_000))
    assert promised - int(left) in moments


async def test_shorter_ttl_holds_once_the_longer_promise_is_over(direct: Direct) -> None:
    await direct.acquire("a", ttl=1_000_000)
    await direct.extend("a", 100_000)
    await direct.age("a", by=950_000)
    assert (await direct.extend("a", 100_000))[2] == "100000"


async def test_overdue_holder_is_never_revived(direct: Direct) -> None:
    await direct.acquire("a", ttl=10_000)
    await direct.age("a", by=10_000)
    assert await direct.extend("a") == ["gone", "expired"]
    assert await direct.holders() == {}


async def test_overdue_holder_is_never_revived_within_its_lock_delay(direct: Direct) -> None:
    await direct.acquire("a", ttl=10_000, delay=600_000)
    await direct.age("a", by=10_000)
    before = await direct.holders()
    assert await direct.extend("a") == ["gone", "expired"]
    assert await direct.holders() == before


async def test_overdue_waiter_is_never_revived(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b", waiter_ttl=10_000)
    await direct.age("b", by=10_000)
    assert (await direct.extend("b"))[0] == "gone"
    assert await direct.queue() == []
    assert await direct.waiters() == {}


async def test_waiter_whose_stream_was_evicted_is_gone(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b")
    await direct.redis.delete(direct.keys.queue)
    assert (await direct.extend("b"))[0] == "gone"
    assert await direct.all_keys() == {"state", "token"}


async def test_waiter_of_an_evicted_stream_is_not_the_newcomer_in_its_successor(
    direct: Direct,
) -> None:
    """The stream begins anew and somebody else stands in it: own is only what bears our id."""
    await direct.acquire("a")
    await direct.acquire("b")
    stream_id = (await direct.waiters())["b"].stream_id
    await direct.redis.delete(direct.keys.queue)
    # Ids may repeat within a millisecond once the stream was deleted.
    await direct.redis.xadd(direct.keys.queue, {"id": "c", "r": "x 0 tc client"}, id=stream_id)
    record = f"{stream_id} {await direct.now() + 50_000} 50000"
    await direct.redis.hset(direct.keys.waiters, "c", record)
    assert (await direct.extend("b"))[0] == "gone"
    assert await direct.queue() == ["c"]
    assert (await direct.extend("c"))[0] == "waiting"


async def test_waiter_whose_record_was_evicted_is_gone_and_no_ghost_in_the_stream(
    direct: Direct,
) -> None:
    await direct.acquire("a")
    await direct.acquire("b")
    await direct.acquire("c")
    await direct.redis.hdel(direct.keys.waiters, "b")
    assert (await direct.extend("b"))[0] == "gone"
    assert await direct.queue() == ["c"]
    await direct.leave("a")
    assert set(await direct.holders()) == {"c"}


async def test_waiters_evicted_but_not_the_stream_ask_again_in_their_new_order(
    direct: Direct,
) -> None:
    await direct.acquire("a")
    await direct.acquire("b")
    await direct.acquire("c")
    await direct.redis.delete(direct.keys.waiters)
    assert (await direct.acquire("c"))[0] == "waiting"
    assert (await direct.acquire("b"))[0] == "waiting"
    assert await direct.queue() == ["c", "b"], "one place each, by the order of asking again"
    await direct.leave("a")
    assert set(await direct.holders()) == {"c"}


async def test_waiter_that_lost_its_record_and_asks_again_stands_at_the_end(direct: Direct) -> None:
    for id in "abcd":
        await direct.acquire(id)
    await direct.redis.hdel(direct.keys.waiters, "c")
    assert (await direct.acquire("c"))[0] == "waiting"
    seen: list[str] = []
    while holders := await direct.holders():
        seen += holders
        await direct.leave(seen[-1])
    assert seen == ["a", "b", "d", "c"]


async def test_state_evicted_grants_the_head_and_tells_the_holder_it_is_gone(
    direct: Direct,
) -> None:
    await direct.acquire("a")
    await direct.acquire("b")
    await direct.redis.delete(direct.keys.state)
    assert await direct.extend("a") == ["gone", "taken_over"]
    assert set(await direct.holders()) == {"b"}


async def test_unknown_request_is_gone_and_creates_nothing(direct: Direct) -> None:
    assert await direct.extend("nobody") == ["gone", "gone"]
    assert await direct.all_keys() == set()


async def test_broken_holder_is_told_so(direct: Direct) -> None:
    await direct.acquire("a")
    assert await direct.break_lock() == 1
    assert await direct.extend("a") == ["gone", "broken"]
    assert await direct.leave("a") == ["gone", "broken"]


async def test_only_the_head_learns_when_its_blocker_ends(direct: Direct) -> None:
    await direct.acquire("a", ttl=30_000, delay=20_000)
    await direct.acquire("b")
    await direct.acquire("c")
    head, moments = await direct.timed(direct.extend("b"))
    closed_until = (await direct.holders())["a"].deadline + 20_000
    assert closed_until - int(head[2]) in moments
    assert (await direct.extend("c"))[2] == "-1"


async def test_head_learns_the_earliest_end_of_several_blockers(direct: Direct) -> None:
    await direct.acquire("r1", "s", ttl=90_000)
    await direct.acquire("r2", "s", ttl=20_000)
    await direct.acquire("w")
    (_, _, look, _floor), moments = await direct.timed(direct.extend("w"))
    assert (await direct.holders())["r2"].deadline - int(look) in moments


async def test_extension_of_the_head_grants_it_when_its_blocker_is_dead(direct: Direct) -> None:
    await direct.acquire("a", ttl=10_000)
    await direct.acquire("b", ttl=100_000, waiter_ttl=50_000)
    await direct.age("a", by=10_000)
    word, token, left = await direct.extend("b", 50_000)
    assert (word, left) == ("held", "50000")
    assert (await direct.holders())["b"].token == int(token)
    assert await direct.all_keys() == {"state", "token"}


async def test_granted_waiter_keeps_its_deadline_until_it_extends(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b", ttl=600_000, waiter_ttl=50_000)
    await direct.age("b", by=20_000)
    deadline = (await direct.waiters())["b"].deadline
    await direct.leave("a")
    assert (await direct.holders())["b"].deadline == deadline
    assert (await direct.extend("b", 600_000))[2] == "600000"


async def test_extension_of_a_waiter_behind_grants_the_head(direct: Direct, heard: Heard) -> None:
    await direct.acquire("a", ttl=10_000)
    await direct.acquire("b", client="client-b")
    await direct.acquire("c")
    await direct.age("a", by=10_000)
    assert (await direct.extend("c"))[0] == "waiting"
    assert ("client-b", "granted", "b") in await heard.notices()


async def test_dead_holders_are_swept_in_any_number(direct: Direct) -> None:
    """Lua's unpack takes some thousand values at most."""
    ids = [f"r{number}" for number in range(2_500)]
    deadline = await direct.now() - 10_000
    records = {id: f"s 1 {deadline} 10000 0 t{id} client" for id in ids}
    await direct.redis.hset(direct.keys.state, mapping=records)
    assert (await direct.acquire("a"))[0] == "granted"
    assert set(await direct.holders()) == {"a"}


# -- a clock that was set back -----------------------------------------------------------------------


async def test_clock_set_back_does_not_stretch_a_dead_holder(direct: Direct) -> None:
    await direct.acquire("a", ttl=20_000)
    await direct.set_clock_back("a", by=3_600_000)
    _, _, look, _floor = await direct.acquire("b")
    assert int(look) <= 20_000


async def test_clock_set_back_does_not_stretch_what_a_holder_is_promised(direct: Direct) -> None:
    await direct.acquire("a", ttl=20_000)
    await direct.set_clock_back("a", by=3_600_000)
    assert int((await direct.extend("a", 20_000))[2]) <= 20_000
    assert (await direct.holders())["a"].deadline <= await direct.now() + 20_000


async def test_clock_set_back_does_not_stretch_a_dead_waiter(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b", waiter_ttl=20_000)
    await direct.set_clock_back("b", by=3_600_000)
    await direct.leave("a")
    assert (await direct.holders())["b"].deadline <= await direct.now() + 20_000


@pytest.mark.parametrize("length", [10_000, 200_000])
async def test_clock_set_back_after_an_extension_of_another_length(
    direct: Direct, length: int
) -> None:
    await direct.acquire("a", ttl=100_000)
    await direct.extend("a", length)
    await direct.set_clock_back("a", by=3_600_000)
    _, _, look, _floor = await direct.acquire("b")
    assert int(look) <= max(length, 100_000)
