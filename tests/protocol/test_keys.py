"""Keys: what is stored outlives what it says, and nothing is stored for ever."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import pytest
from fakeredis.aioredis import FakeRedis
from redis import ResponseError

from ..servers import Store
from .direct import RETENTION, Direct


async def assert_ttls_cover_the_records(direct: Direct) -> None:
    """Every key has a TTL, and none ends before a record in it does."""
    keys, redis = direct.keys, direct.redis
    # Looked at in this order, time passing in between cannot make a TTL look too short: records, TTL,
    # clock.
    ends = {
        keys.state: [h.deadline + h.delay for h in (await direct.holders()).values()],
        keys.waiters: [w.deadline for w in (await direct.waiters()).values()],
    }
    ends[keys.queue] = ends[keys.waiters]
    names = await redis.keys("*")
    async with redis.pipeline(transaction=False) as pipe:
        for key in names:
            pipe.pttl(key)
        *all_left, (seconds, microseconds) = await pipe.time().execute()
    now = seconds * 1000 + microseconds // 1000
    for key, left in zip(names, all_left, strict=True):
        if left == -2:  # gone since
            continue
        assert left >= 0, f"{key} has no TTL"
        ends_at = now + left
        if isinstance(redis, FakeRedis):
            ends_at += 250  # it counts a TTL from the call of the script, not from its TIME
        assert ends_at >= max(ends.get(key, [0])), f"{key} ends before a record of it"


async def test_every_key_has_a_ttl_that_covers_its_records(direct: Direct) -> None:
    await direct.acquire("r1", "s", ttl=10_000, delay=30_000)
    await assert_ttls_cover_the_records(direct)
    await direct.acquire("r2", "s", ttl=300_000)
    await assert_ttls_cover_the_records(direct)
    await direct.acquire("w1", ttl=600_000, waiter_ttl=70_000)
    await direct.acquire("w2", waiter_ttl=20_000)
    await assert_ttls_cover_the_records(direct)
    await direct.extend("r1", 500_000)
    await direct.extend("w2", 200_000)
    await assert_ttls_cover_the_records(direct)
    await direct.leave("r1", ambiguous=True)
    await direct.leave("r2")
    await assert_ttls_cover_the_records(direct)
    await direct.extend("w1", 600_000)
    await assert_ttls_cover_the_records(direct)
    await direct.break_lock()
    await assert_ttls_cover_the_records(direct)
    await direct.leave("w2")
    assert await direct.all_keys() == {"token", "broken", "marker:r1"}
    await assert_ttls_cover_the_records(direct)


@pytest.mark.parametrize("met_by", ["a newcomer", "itself", "another", "one that leaves", "break"])
async def test_waiter_that_finds_no_state_any_more_holds_for_its_whole_lease(
    direct: Direct, met_by: str
) -> None:
    await direct.acquire("a")
    await direct.acquire("b")
    await direct.acquire("c")
    await direct.redis.delete(direct.keys.state)  # as when the lease of `a` has ended
    match met_by:
        case "a newcomer":
            await direct.acquire("d")
        case "itself":
            await direct.extend("b")
        case "another":
            await direct.extend("c")
        case "one that leaves":
            await direct.leave("c")
        case _:
            await direct.break_lock()
    assert set(await direct.holders()) == {"b"}
    await assert_ttls_cover_the_records(direct)


@pytest.mark.parametrize("seed", range(5))
async def test_any_history_keeps_the_store_in_order(direct: Direct, seed: int) -> None:
    chance = random.Random(seed)
    known: dict[str, tuple[str, str]] = {}
    tokens: dict[str, int] = {}
    for step in range(120):
        id = chance.choice(list(known)) if known and chance.random() < 0.7 else f"r{step}"
        mode, owner = known.setdefault(id, (chance.choice("xs"), chance.choice(("", "uo"))))
        match chance.randrange(6):
            case 0 | 1:
                ttl, delay = chance.choice((5_000, 50_000)), chance.choice((0, 0, 40_000))
                await direct.acquire(id, mode, owner=owner or None, ttl=ttl, delay=delay)
            case 2:
                await direct.extend(
                    id, chance.choice((5_000, 50_000, 200_000)), owner=owner or None
                )
            case 3:
                await direct.leave(id, ambiguous=chance.random() < 0.3)
                del known[id]
            case 4:
                alive = [*await direct.holders(), *await direct.waiters()]
                if alive:
                    await direct.age(chance.choice(alive), by=chance.choice((4_000, 300_000)))
            case 5:
                if chance.random() < 0.1:
                    await direct.break_lock()
        await assert_ttls_cover_the_records(direct)
        await _assert_holders_are_compatible(direct)
        for id, holder in (await direct.holders()).items():
            if id not in tokens and holder.owner != "uo":
                assert holder.token > max(tokens.values(), default=0)
            tokens.setdefault(id, holder.token)
        assert set(await direct.waiters()) <= set(await direct.queue())


async def _assert_holders_are_compatible(direct: Direct) -> None:
    now = await direct.now()
    live = [holder for holder in (await direct.holders()).values() if holder.deadline > now]
    if any(holder.mode == "x" for holder in live):
        assert len({holder.owner for holder in live}) == 1, (
            f"two owners of an exclusive name: {live}"
        )


# -- tokens ------------------------------------------------------------------------------------------


async def test_token_follows_the_servers_clock(direct: Direct) -> None:
    before = await direct.now()
    token = int((await direct.acquire("a"))[1])
    assert before * 1_000 <= token <= (await direct.now() + 1) * 1_000
    assert token < 2**53


async def test_token_grows_with_every_grant_of_a_name(direct: Direct) -> None:
    tokens = []
    for number in range(20):
        tokens.append(int((await direct.acquire(f"r{number}"))[1]))
        await direct.leave(f"r{number}")
    assert tokens == sorted(set(tokens))


async def test_token_grows_within_readers_granted_together(direct: Direct) -> None:
    await direct.acquire("w")
    for number in range(20):
        await direct.acquire(f"r{number}", "s")
    await direct.leave("w")
    tokens = {id: holder.token for id, holder in (await direct.holders()).items()}
    in_order = [tokens[f"r{number}"] for number in range(20)]
    assert in_order == sorted(set(in_order))


async def test_token_grows_across_the_expiry_of_its_key(direct: Direct) -> None:
    first = int((await direct.acquire("a"))[1])
    await direct.leave("a")
    await direct.redis.delete(direct.keys.token)
    assert int((await direct.acquire("b"))[1]) > first


async def test_token_grows_when_the_clock_was_set_back(direct: Direct) -> None:
    ahead = (await direct.now() + 600_000) * 1_000
    await direct.redis.set(direct.keys.token, ahead, px=600_000)
    assert (await direct.acquire("a"))[1] == str(ahead + 1)
    await direct.leave("a")
    assert (await direct.acquire("b"))[1] == str(ahead + 2)


async def test_token_is_remembered_until_its_own_time_is_over(direct: Direct) -> None:
    """With the clock set back by ten minutes it must last for these, and the retention."""
    ahead = (await direct.now() + 600_000) * 1_000
    await direct.redis.set(direct.keys.token, ahead, px=100)
    await direct.acquire("a")
    left = await direct.redis.pttl(direct.keys.token)
    assert 600_000 + RETENTION - 1_000 <= left <= 600_000 + RETENTION + 2_000


async def test_token_is_never_forgotten_earlier_than_promised_before(direct: Direct) -> None:
    await direct.acquire("a", retention=3_600_000)
    await direct.leave("a")
    await direct.acquire("b", retention=10_000)
    assert await direct.redis.pttl(direct.keys.token) >= 3_600_000 - 1_000


async def test_token_is_a_plain_decimal_also_beyond_fourteen_digits(direct: Direct) -> None:
    """Lua prints 1e+15 unless told otherwise."""
    token = (await direct.acquire("a"))[1]
    assert token.isdecimal()
    assert len(token) >= 16
    assert await direct.redis.get(direct.keys.token) == token


async def test_names_share_no_token(direct: Direct) -> None:
    other = Direct(direct.redis, "other")
    await direct.acquire("a")
    await other.acquire("a")
    await direct.leave("a")
    assert set(await other.holders()) == {"a"}


# -- out of memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        "acquire of a free name",
        "acquire of a name whose holder is dead",
        "acquire that queues",
        "acquire that finds the holder dead",
        "acquire that finds the holder dead and others waiting",
    ],
)
async def test_acquire_refused_for_want_of_memory_has_done_nothing(
    real_store: Store, direct: Direct, step: str
) -> None:
    if step != "acquire of a free name":
        await direct.acquire("a", ttl=10_000)
    if "waiting" in step:
        await direct.acquire("b")
    if "dead" in step:
        await direct.age("a", by=100_000)
    before = await direct.contents()
    async with _out_of_memory(direct):
        assert await _is_refused(direct.acquire("new"))
    assert await direct.contents() == before


@pytest.mark.parametrize("ambiguous", [False, True])
async def test_server_out_of_memory_still_extends_hands_off_withdraws_and_breaks(
    real_store: Store, direct: Direct, ambiguous: bool
) -> None:
    await direct.acquire("a", ttl=10_000)
    for id in ("b", "c", "d", "e"):
        await direct.acquire(id)
    async with _out_of_memory(direct):
        assert (await direct.extend("a"))[0] == "held"
        assert (await direct.extend("b"))[0] == "waiting"
        assert await direct.leave("a", ambiguous=ambiguous) == ["released"]
        assert set(await direct.holders()) == {"b"}
        assert await direct.leave("c", ambiguous=ambiguous) == ["withdrawn"]
    await direct.age("b", by=200_000)
    async with _out_of_memory(direct):
        assert (await direct.extend("d"))[0] == "held"
        assert await direct.break_lock() == 1
        assert set(await direct.holders()) == {"e"}
        await assert_ttls_cover_the_records(direct)
        assert await direct.leave("e", ambiguous=ambiguous) == ["released"]
    markers = {"marker:a", "marker:c", "marker:e"} if ambiguous else set()
    assert await direct.all_keys() == {"token", "broken"} | markers


@pytest.mark.parametrize("set_back", ["a", "b"])
async def test_server_out_of_memory_still_answers_after_its_clock_was_set_back(
    real_store: Store, direct: Direct, set_back: str
) -> None:
    """It refuses to write the deadline that is nearer now. The answer does not depend on that."""
    await direct.acquire("a")
    await direct.acquire("b")
    await direct.set_clock_back(set_back, by=600_000)
    before = await direct.contents()
    async with _out_of_memory(direct):
        assert await direct.acquire("c", wait=False) == ["busy"]
    assert await direct.contents() == before


async def _is_refused(call: Awaitable[object]) -> bool:
    try:
        await call
    except ResponseError as refused:
        # Older servers answer with the line of the script in front.
        return "OOM" in str(refused) or "maxmemory" in str(refused)
    return False


@asynccontextmanager
async def _out_of_memory(direct: Direct) -> AsyncIterator[None]:
    await direct.redis.config_set("maxmemory", "1")
    try:
        yield
    finally:
        await direct.redis.config_set("maxmemory", "0")


# -- looking -----------------------------------------------------------------------------------------


async def test_inspect_writes_nothing(direct: Direct) -> None:
    await direct.acquire("a", ttl=10_000, delay=600_000)
    await direct.acquire("b", waiter_ttl=10_000)
    await direct.acquire("c", waiter_ttl=10_000)
    await direct.age("a", "b", by=10_000)
    before = await direct.contents()
    token, closed, holding, waiting, closed_places, _ = await direct.inspect()
    assert closed_places == 1
    assert int(token) > 0
    assert 590_000 <= int(closed) <= 600_000
    assert holding == [], "an overdue holder holds nothing"
    assert [waiting[i] for i in range(0, len(waiting), 5)] == ["tc"], "a ghost is no waiter"
    assert await direct.contents() == before


async def test_inspect_writes_what_it_clamps_when_the_clock_was_set_back(direct: Direct) -> None:
    """Else a dead holder would have its whole length left at each look."""
    await direct.acquire("a", ttl=10_000)
    await direct.acquire("b", waiter_ttl=10_000)
    await direct.set_clock_back("a", "b", by=600_000)
    keys = (direct.keys.state, direct.keys.waiters)
    before = [await direct.redis.hgetall(key) for key in keys]
    _, _, holding, waiting, _, _ = await direct.inspect()
    assert int(holding[3]) == 10_000
    assert waiting[0] == "tb"
    for key, records in zip(keys, before, strict=True):
        assert await direct.redis.hgetall(key) != records
    clamped = await direct.contents()
    await direct.inspect()
    assert await direct.contents() == clamped, "written once"


async def test_refusal_writes_nothing_whoever_holds(real_store: Store, direct: Direct) -> None:
    """Else each one would be sent to the replicas, with all holders of the name."""
    await direct.acquire("a", "s")
    await direct.acquire("b", "s")
    before = await _writes(direct)
    assert await direct.acquire("w", wait=False) == ["busy"]
    assert await _writes(direct) == before


async def _writes(direct: Direct) -> int:
    """Count those that the server carried out, also of what was there already."""
    return int((await direct.redis.info("persistence"))["rdb_changes_since_last_save"])


async def test_inspect_passes_over_entries_whose_records_were_evicted(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b")
    await direct.redis.delete(direct.keys.waiters)
    _, _, holding, waiting, _, _ = await direct.inspect()
    assert holding[0] == "ta"
    assert waiting == []


async def test_inspect_of_an_unknown_name_creates_nothing(direct: Direct) -> None:
    assert await direct.inspect() == ["0", "0", [], [], 0, []]
    assert await direct.all_keys() == set()
