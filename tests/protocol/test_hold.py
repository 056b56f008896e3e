"""hold_at_least: what a body closes behind it, as the scripts keep it."""

from __future__ import annotations

import pytest

from ..scenes import until
from .direct import Direct, Heard, waiting

HOLD = 60_000


async def acquire(
    direct: Direct, id: str, *, how: str = "begins", **options: object
) -> list[object]:
    return await direct.acquire(id, words=f" h={HOLD}", how=how, **options)  # type: ignore[arg-type]


async def closed(direct: Direct) -> int:
    return int((await direct.inspect())[1])


async def test_body_that_ends_early_leaves_the_name_closed_for_the_rest(direct: Direct) -> None:
    assert (await acquire(direct, "a"))[0] == "granted"
    assert await direct.leave("a") == ["released"]
    assert HOLD - 5_000 < await closed(direct) <= HOLD
    assert await direct.acquire("b", wait=False) == ["busy"]
    assert await direct.acquire("again", owner="ta", wait=False) == ["busy"], "its own owner too"


async def test_leave_that_is_repeated_is_answered_as_the_first(direct: Direct) -> None:
    await acquire(direct, "a")
    for _ in range(2):
        assert await direct.leave("a", ambiguous=True) == ["released"]
    await direct.acquire("b")
    assert await direct.leave("a", ambiguous=True) == ["released"]
    assert await direct.leave("a", end="unused") == ["released"]
    assert await closed(direct) > 0, "what is said of no body is too late"


async def test_body_that_ends_later_than_that_closes_nothing(direct: Direct) -> None:
    await direct.acquire("a", words=" h=1", how="begins")
    await direct.acquire("b")
    granted_by = await direct.now()

    async def hold_is_over() -> bool:
        return await direct.now() > granted_by + 1

    await until(hold_is_over)
    reply = await direct.leave("a")
    assert reply[0] == "released"
    assert set(await direct.holders()) == {"b"}


async def test_unused_grant_closes_nothing(direct: Direct) -> None:
    await acquire(direct, "a")
    await direct.acquire("b")
    assert (await direct.leave("a", end="unused"))[0] == "released"
    assert set(await direct.holders()) == {"b"}


async def test_holder_that_dies_in_its_body_keeps_the_name_closed(direct: Direct) -> None:
    await acquire(direct, "a", ttl=10_000)
    await direct.acquire("b")
    await direct.age("a", by=10_001)
    assert (await direct.extend("b"))[0] == "waiting"
    assert HOLD - 5_000 < await closed(direct) <= HOLD


async def test_ghost_that_is_granted_closes_nothing(direct: Direct) -> None:
    await direct.acquire("a")
    await acquire(direct, "ghost", waiter_ttl=10_000)
    await direct.leave("a")
    await direct.age("ghost", by=10_001)
    assert (await direct.acquire("b"))[0] == "granted"


async def test_waiter_that_is_granted_and_begins_closes_from_its_grant_on(direct: Direct) -> None:
    await direct.acquire("a")
    await acquire(direct, "b", waiter_ttl=10_000)
    await direct.leave("a")
    assert (await direct.extend("b", 10_000, begins=True))[0] == "held"
    await direct.age("b", by=20_001)
    assert await direct.acquire("c", wait=False) == ["busy"]
    assert HOLD - 5_000 < await closed(direct) <= HOLD


async def test_grant_for_later_closes_when_its_body_has_begun(direct: Direct) -> None:
    """As one of several names of a multilock."""
    await acquire(direct, "a", how="later", ttl=10_000)
    await direct.extend("a", 10_000)
    await direct.age("a", by=10_001)
    assert await closed(direct) == 0
    await acquire(direct, "b", how="later", ttl=10_000)
    await direct.extend("b", 10_000, begins=True)
    await direct.age("b", by=10_001)
    assert await closed(direct) > HOLD - 5_000


async def test_grant_that_came_too_late_closes_nothing(direct: Direct) -> None:
    await acquire(direct, "a", ttl=10_000)
    await direct.age("a", by=10_001)
    assert (await direct.leave("a", end="unused"))[0] == "gone"
    assert (await direct.acquire("b"))[0] == "granted"


async def test_lock_delay_counts_where_it_is_later(direct: Direct) -> None:
    await acquire(direct, "a", ttl=10_000, delay=600_000)
    await direct.age("a", by=10_001)
    assert await closed(direct) > 500_000
    await direct.leave("a", end="lost")
    assert await closed(direct) > 500_000


async def test_lease_that_ran_out_early_stays_closed(direct: Direct) -> None:
    await acquire(direct, "a", ttl=10_000)
    await direct.acquire("b")
    assert await direct.leave("a", end="lost") == ["gone", "expired"]
    assert (await direct.extend("b"))[0] == "waiting"


async def test_lease_lost_just_before_its_deadline_keeps_what_is_left_of_its_hold(
    direct: Direct,
) -> None:
    """Its deadline is later than the end of the hold, and no lock-delay follows it."""
    await acquire(direct, "a", ttl=HOLD + 10_000)
    await direct.acquire("b")
    assert await direct.leave("a", end="lost") == ["gone", "expired"]
    assert (await direct.extend("b"))[0] == "waiting"
    await direct.age("a", by=HOLD + 10_001)
    assert (await direct.extend("b"))[0] == "waiting", "the hold still counts"


async def test_lease_lost_after_its_hold_is_over_opens_at_once(direct: Direct) -> None:
    await direct.acquire("a", words=" h=1", how="begins")
    await direct.acquire("b")
    granted_by = await direct.now()

    async def hold_is_over() -> bool:
        return await direct.now() > granted_by + 1

    await until(hold_is_over)
    assert (await direct.leave("a", end="lost"))[0] == "released"
    assert set(await direct.holders()) == {"b"}


async def test_head_knows_when_the_name_opens(direct: Direct, heard: Heard) -> None:
    await acquire(direct, "a", ttl=500_000)
    assert waiting(await direct.acquire("b", waiter_ttl=300_000, client="b"))[1] > 400_000
    await heard.notices()
    await direct.leave("a")
    assert await heard.notices() == [("b", "look", "b")], "its time to look comes nearer"
    assert HOLD - 5_000 < waiting(await direct.extend("b", 300_000))[1] <= HOLD


async def test_break_opens_the_name(direct: Direct) -> None:
    await acquire(direct, "a")
    await direct.leave("a")
    assert await direct.break_lock() == 0
    assert (await direct.acquire("b"))[0] == "granted"


async def test_clock_set_back_costs_one_hold(direct: Direct) -> None:
    await acquire(direct, "a", ttl=10_000)
    text = await direct.redis.hget(direct.keys.state, "a")
    until = int(text.split(" u=")[1].split(" ")[0])
    await direct.redis.hset(direct.keys.state, "a", text.replace(str(until), str(until + 10**9)))
    await direct.age("a", by=10_001)
    assert await direct.acquire("b", wait=False) == ["busy"]
    assert await closed(direct) <= HOLD
    (kept,) = [word for word in (await direct.holders())["a"].words if word.startswith("u=")]
    assert int(kept[2:]) <= await direct.now() + HOLD, "whoever meets it writes it"


async def test_state_outlives_what_is_closed(direct: Direct) -> None:
    await acquire(direct, "a", ttl=1_000)
    assert await direct.redis.pttl(direct.keys.state) > HOLD - 5_000
    await direct.leave("a")
    assert await direct.redis.pttl(direct.keys.state) > HOLD - 5_000


@pytest.mark.parametrize("ended", ["ended", "unused"])
async def test_place_of_a_semaphore_is_closed_alike(direct: Direct, ended: str) -> None:
    await acquire(direct, "a", mode="s2")
    await direct.acquire("b", "s2")
    await direct.leave("a", end=ended)
    free = ended == "unused"
    assert (await direct.acquire("c", "s2", wait=False))[0] == ("granted" if free else "busy")
    assert (await direct.inspect())[4] == (0 if free else 1)
