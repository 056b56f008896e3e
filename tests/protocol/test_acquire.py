"""acquire: granted, queued or refused, in one step, and harmless to repeat."""

from __future__ import annotations

import pytest

from .direct import Direct, Heard, waiting


async def test_free_name_is_granted_for_the_ttl(direct: Direct) -> None:
    before = await direct.now()
    word, token, left = await direct.acquire("a", ttl=100_000)
    assert (word, left) == ("granted", "100000")
    record = (await direct.holders())["a"]
    assert record.token == int(token)
    assert before + 100_000 <= record.deadline <= await direct.now() + 100_000


async def test_known_holder_gets_its_present_state(direct: Direct) -> None:
    _, token, _ = await direct.acquire("a", ttl=100_000)
    await direct.age("a", by=40_000)
    before = await direct.holders()
    (word, again, left), moments = await direct.timed(direct.acquire("a", ttl=100_000))
    assert (word, again) == ("granted", token)
    assert before["a"].deadline - int(left) in moments
    assert await direct.holders() == before


async def test_known_waiter_keeps_its_one_place(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b", waiter_ttl=50_000)
    await direct.acquire("c")
    await direct.age("b", by=20_000)
    before = await direct.contents()
    (word, left, *_), moments = await direct.timed(direct.acquire("b", waiter_ttl=50_000))
    assert word == "waiting"
    assert (await direct.waiters())["b"].deadline - int(left) in moments
    assert await direct.contents() == before


async def test_repeated_acquire_tells_a_waiter_that_it_was_granted(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b", ttl=100_000, waiter_ttl=50_000)
    await direct.leave("a")
    token = (await direct.holders())["b"].token
    word, told, left = await direct.acquire("b", ttl=100_000, waiter_ttl=50_000)
    assert (word, int(told)) == ("granted", token)
    assert int(left) <= 50_000, "a granted waiter keeps the deadline it had"


async def test_known_waiter_is_granted_when_it_repeats_itself_after_its_blocker_died(
    direct: Direct,
) -> None:
    await direct.acquire("a", ttl=10_000)
    await direct.acquire("b")
    await direct.age("a", by=20_000)
    assert (await direct.acquire("b"))[0] == "granted"
    assert set(await direct.holders()) == {"b"}


async def test_overdue_waiter_that_repeats_itself_stands_at_the_end(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b", waiter_ttl=10_000)
    await direct.acquire("c")
    await direct.age("b", by=20_000)
    assert (await direct.acquire("b"))[0] == "waiting"
    assert await direct.queue() == ["c", "b"]


@pytest.mark.parametrize("waited_for", [False, True])
async def test_nowait_is_refused_and_leaves_nothing(direct: Direct, waited_for: bool) -> None:
    await direct.acquire("a")
    if waited_for:
        await direct.acquire("c")
    before = await direct.contents()
    assert await direct.acquire("b", wait=False) == ["busy"]
    assert await direct.contents() == before


async def test_nowait_gets_in_neither_past_a_waiter_nor_when_it_finds_the_name_free(
    direct: Direct,
) -> None:
    await direct.acquire("a", ttl=10_000)
    await direct.acquire("b")
    await direct.age("a", by=20_000)
    assert await direct.acquire("c", wait=False) == ["busy"]
    assert set(await direct.holders()) == {"b"}, "finding the name free, it granted the head"


async def test_newcomer_stands_behind_the_waiters_of_a_name_just_freed(direct: Direct) -> None:
    await direct.acquire("a", ttl=10_000)
    await direct.acquire("b")
    await direct.acquire("c")
    await direct.age("a", by=20_000)
    assert (await direct.acquire("d"))[0] == "waiting"
    assert set(await direct.holders()) == {"b"}
    assert await direct.queue() == ["c", "d"]


async def test_grants_follow_the_order_of_arrival(direct: Direct) -> None:
    order = [f"r{number}" for number in range(20)]
    for id in order:
        await direct.acquire(id)
    seen: list[str] = []
    while holders := await direct.holders():
        (id,) = holders
        seen.append(id)
        assert await direct.leave(id) == ["released"]
    assert seen == order


async def test_overdue_holder_is_gone_for_itself_and_blocks_during_its_lock_delay(
    direct: Direct,
) -> None:
    await direct.acquire("a", ttl=10_000, delay=50_000)
    await direct.age("a", by=20_000)
    assert await direct.acquire("a", ttl=10_000, delay=50_000) == ["gone"]
    (word, _, look, _floor), moments = await direct.timed(direct.acquire("b"))
    assert word == "waiting"
    closed_until = (await direct.holders())["a"].deadline + 50_000
    assert closed_until - int(look) in moments, "the blocker ends with its lock-delay"
    await direct.age("a", by=40_000)
    assert (await direct.extend("b"))[0] == "held"


async def test_lock_delay_keeps_out_its_own_owner_too(direct: Direct) -> None:
    await direct.acquire("a", owner="uowner", ttl=10_000, delay=50_000)
    await direct.age("a", by=20_000)
    assert await direct.acquire("b", owner="uowner", wait=False) == ["busy"]
    assert (await direct.acquire("c", "s", owner="uowner"))[0] == "waiting"


async def test_lock_delay_of_a_reader_keeps_out_writers_but_no_readers(direct: Direct) -> None:
    await direct.acquire("a", "s", ttl=10_000, delay=50_000)
    await direct.age("a", by=20_000)
    assert await direct.acquire("w", wait=False) == ["busy"]
    assert (await direct.acquire("r", "s"))[0] == "granted"


async def test_lock_delay_is_over_with_an_ordinary_release(direct: Direct) -> None:
    await direct.acquire("a", delay=50_000)
    await direct.leave("a")
    assert (await direct.acquire("b", wait=False))[0] == "granted"


async def test_every_grant_after_an_answer_has_a_larger_token_than_it_says(direct: Direct) -> None:
    """So a notice of a grant from before it can be told, of the same id even."""
    _, before, _ = await direct.acquire("a")
    floors = [int((await direct.acquire("b"))[3]), int((await direct.extend("b"))[3])]
    await direct.leave("a")
    token = (await direct.holders())["b"].token
    assert int(before) <= floors[0] <= floors[1] < token


async def test_token_floor_holds_when_the_clock_was_set_back(direct: Direct) -> None:
    ahead = (await direct.now() + 600_000) * 1_000
    await direct.redis.set(direct.keys.token, ahead, px=600_000)
    last = int((await direct.acquire("a"))[1])
    floor = int((await direct.acquire("b"))[3])
    await direct.leave("a")
    assert last <= floor < (await direct.holders())["b"].token


async def test_token_floor_follows_the_clock_when_the_last_token_was_forgotten(
    direct: Direct,
) -> None:
    """It is remembered for its retention, which may be shorter than a hold."""
    await direct.acquire("a")
    await direct.redis.delete(direct.keys.token)
    before = await direct.now() * 1_000
    answers = [await direct.acquire(id) for id in ("b", "c", "b")]
    answers.append(await direct.extend("b"))
    floors = [int(floor) for _, _, _, floor in answers]
    await direct.leave("a")
    token = (await direct.holders())["b"].token
    assert [before, *floors, token] == sorted({before, *floors, token})


# -- shared ------------------------------------------------------------------------------------------


async def test_readers_are_granted_together(direct: Direct) -> None:
    for id in ("r1", "r2", "r3"):
        assert (await direct.acquire(id, "s"))[0] == "granted"


async def test_readers_at_the_head_are_granted_together_up_to_the_first_writer(
    direct: Direct, heard: Heard
) -> None:
    await direct.acquire("w1")
    for id, mode in (("r1", "s"), ("r2", "s"), ("w2", "x"), ("r3", "s")):
        await direct.acquire(id, mode, client=f"client-{id}")
    await heard.notices()
    await direct.leave("w1")
    assert set(await direct.holders()) == {"r1", "r2"}
    assert await direct.queue() == ["w2", "r3"]
    granted = [(client, id) for client, word, id in await heard.notices() if word == "granted"]
    assert granted == [("client-r1", "r1"), ("client-r2", "r2")]


async def test_dead_writer_does_not_part_readers(direct: Direct) -> None:
    await direct.acquire("w1")
    await direct.acquire("r1", "s")
    await direct.acquire("w2", waiter_ttl=10_000)
    await direct.acquire("r2", "s")
    await direct.age("w2", by=20_000)
    await direct.leave("w1")
    assert set(await direct.holders()) == {"r1", "r2"}
    assert await direct.all_keys() == {"state", "token"}


async def test_reader_does_not_pass_a_waiting_writer(direct: Direct) -> None:
    await direct.acquire("r1", "s")
    await direct.acquire("w")
    assert (await direct.acquire("r2", "s"))[0] == "waiting"
    assert await direct.acquire("r3", "s", wait=False) == ["busy"]
    await direct.leave("r1")
    assert set(await direct.holders()) == {"w"}


async def test_readers_behind_a_writer_get_in_when_it_withdraws(direct: Direct) -> None:
    await direct.acquire("r1", "s")
    await direct.acquire("w")
    await direct.acquire("r2", "s")
    await direct.acquire("r3", "s")
    assert await direct.leave("w") == ["withdrawn"]
    assert set(await direct.holders()) == {"r1", "r2", "r3"}


async def test_writer_gets_in_after_the_last_reader(direct: Direct) -> None:
    await direct.acquire("r1", "s")
    await direct.acquire("r2", "s")
    await direct.acquire("w")
    await direct.leave("r1")
    assert set(await direct.holders()) == {"r2"}
    await direct.leave("r2")
    assert set(await direct.holders()) == {"w"}


# -- owners ------------------------------------------------------------------------------------------


async def test_owner_that_holds_gets_in_again_with_its_token_whoever_waits(direct: Direct) -> None:
    _, token, _ = await direct.acquire("a", owner="uowner")
    await direct.acquire("b")
    assert (await direct.acquire("c", owner="uowner"))[:2] == ["granted", token]
    await direct.leave("a")
    assert set(await direct.holders()) == {"c"}, "the last to leave frees the name"
    await direct.leave("c")
    assert set(await direct.holders()) == {"b"}


async def test_exclusive_owner_may_share_and_then_give_up_the_exclusive_hold(
    direct: Direct,
) -> None:
    _, token, _ = await direct.acquire("x", owner="uowner")
    assert (await direct.acquire("s", "s", owner="uowner"))[:2] == ["granted", token]
    await direct.acquire("r", "s")
    assert set(await direct.holders()) == {"x", "s"}
    await direct.leave("x")
    assert set(await direct.holders()) == {"s", "r"}, "a downgrade lets readers in"


async def test_sharing_owner_that_asks_exclusively_is_refused(direct: Direct) -> None:
    await direct.acquire("a", "s", owner="uowner")
    before = await direct.contents()
    assert await direct.acquire("b", "x", owner="uowner") == ["deadlock"]
    assert await direct.contents() == before


async def test_owner_that_lost_its_lease_is_a_stranger(direct: Direct) -> None:
    await direct.acquire("a", owner="uowner", ttl=10_000)
    await direct.acquire("b")
    await direct.age("a", by=20_000)
    assert (await direct.acquire("c", owner="uowner"))[0] == "waiting"
    assert set(await direct.holders()) == {"b"}


# -- semaphores --------------------------------------------------------------------------------------


async def test_semaphore_has_as_many_holders_as_its_limit(direct: Direct) -> None:
    words = [(await direct.acquire(f"r{number}", "s3"))[0] for number in range(5)]
    assert words == ["granted"] * 3 + ["waiting"] * 2
    await direct.leave("r1")
    assert set(await direct.holders()) == {"r0", "r2", "r3"}


@pytest.mark.parametrize("wait", [True, False])
async def test_semaphore_of_another_limit_is_refused(direct: Direct, wait: bool) -> None:
    await direct.acquire("a", "s3")
    before = await direct.contents()
    assert await direct.acquire("b", "s2", wait=wait) == ["limit", "s3"]
    assert await direct.contents() == before


async def test_semaphore_of_another_limit_is_refused_also_when_many_wait(direct: Direct) -> None:
    for id in "abc":
        await direct.acquire(id, "s1")
    assert await direct.acquire("d", "s2") == ["limit", "s1"]


async def test_newcomer_clamps_what_a_clock_set_back_has_stretched(direct: Direct) -> None:
    """Whether somebody waits already, or not; the head's deadline, too."""
    await direct.acquire("a", ttl=20_000)
    await direct.acquire("b", waiter_ttl=10_000)
    await direct.set_clock_back("a", by=3_600_000)
    await direct.acquire("c")
    assert (await direct.holders())["a"].deadline <= await direct.now() + 20_000
    await direct.set_clock_back("b", by=3_600_000)
    await direct.acquire("d")
    assert (await direct.waiters())["b"].deadline <= await direct.now() + 10_000


async def test_marker_refuses_a_late_duplicate_also_when_many_wait(direct: Direct) -> None:
    for id in "abc":
        await direct.acquire(id)
    assert await direct.leave("c", ambiguous=True) == ["withdrawn"]
    assert await direct.acquire("c") == ["gone"]
    assert await direct.queue() == ["b"]


@pytest.mark.parametrize("lost", ["state", "queue", "waiters"])
async def test_marker_refuses_a_late_duplicate_also_when_a_key_was_lost(
    direct: Direct, lost: str
) -> None:
    for id in "abc":
        await direct.acquire(id)
    await direct.leave("c", ambiguous=True)
    await direct.redis.delete(getattr(direct.keys, lost))
    assert await direct.acquire("c") == ["gone"]


@pytest.mark.parametrize("left", ["queue", "waiters"])
async def test_name_that_lost_two_keys_is_granted_and_leaves_nothing_of_the_third(
    direct: Direct, left: str
) -> None:
    for id in "ab":
        await direct.acquire(id)
    lost = {"state", "queue", "waiters"} - {left}
    await direct.redis.delete(*(getattr(direct.keys, key) for key in lost))
    assert (await direct.acquire("c"))[0] == "granted"
    assert await direct.all_keys() == {"state", "token"}


async def test_newcomer_clamps_every_holder_that_a_clock_set_back_has_stretched(
    direct: Direct,
) -> None:
    for id in ("a", "a2"):
        await direct.acquire(id, owner="uowner", ttl=20_000)
    await direct.acquire("b")
    await direct.set_clock_back("a2", by=3_600_000)
    await direct.acquire("c")
    assert (await direct.holders())["a2"].deadline <= await direct.now() + 20_000


async def test_newcomer_behind_a_dead_waiter_is_the_head(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b", waiter_ttl=10_000)
    await direct.age("b", by=10_000)
    assert waiting(await direct.acquire("c"))[1] > 0, "it is told when to look"
    assert await direct.queue() == ["c"]


async def test_newcomer_drops_a_place_that_is_nobodys(direct: Direct) -> None:
    for id in "abc":
        await direct.acquire(id)
    elsewhere = f"0-1 {await direct.now() + 50_000} 50000"
    await direct.redis.hset(direct.keys.waiters, "b", elsewhere)
    await direct.acquire("d")
    assert await direct.queue() == ["c", "d"]
