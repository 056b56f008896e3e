"""leave: releases or withdraws, hands off, and refuses what comes late."""

from __future__ import annotations

from typing import Any

import pytest

from ..servers import Store
from .direct import MARKER_TTL, Direct, Heard


async def test_release_leaves_only_the_token(direct: Direct) -> None:
    await direct.acquire("a")
    assert await direct.leave("a") == ["released"]
    assert await direct.all_keys() == {"token"}


async def test_withdrawal_leaves_nothing_of_the_waiter(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b")
    assert await direct.leave("b") == ["withdrawn"]
    assert await direct.all_keys() == {"state", "token"}


async def test_queue_that_was_served_leaves_only_the_token(direct: Direct) -> None:
    for id in ("a", "b", "c"):
        await direct.acquire(id)
    for id in ("a", "b"):
        assert await direct.leave(id) == ["released"]
    assert await direct.all_keys() == {"state", "token"}, "nobody waits for the last one"
    assert await direct.leave("c") == ["released"]
    assert await direct.all_keys() == {"token"}


async def test_withdrawals_in_any_place_keep_the_order_of_the_others(direct: Direct) -> None:
    for id in "abcdef":
        await direct.acquire(id)
    for id in "bdf":
        assert await direct.leave(id) == ["withdrawn"]
    assert await direct.queue() == ["c", "e"]
    assert set(await direct.waiters()) == {"c", "e"}


async def test_repeated_leave_finds_the_request_gone_and_harms_nobody(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b")
    await direct.acquire("c")
    await direct.leave("a")
    before = await direct.contents()
    assert await direct.leave("a") == ["gone", "gone"]
    assert await direct.contents() == before


async def test_repeated_withdrawal_finds_the_request_gone_and_harms_nobody(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b")
    await direct.acquire("c")
    await direct.leave("b")
    before = await direct.contents()
    assert await direct.leave("b") == ["gone", "gone"]
    assert await direct.contents() == before


async def test_unknown_request_leaves_without_a_trace(direct: Direct) -> None:
    assert await direct.leave("nobody") == ["gone", "gone"]
    assert await direct.all_keys() == set()


async def test_waiter_that_was_granted_meanwhile_releases(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b")
    await direct.leave("a")
    assert await direct.leave("b") == ["released"]
    assert await direct.all_keys() == {"token"}


async def test_overdue_holder_leaves_too_late(direct: Direct) -> None:
    await direct.acquire("a", ttl=10_000)
    await direct.age("a", by=10_000)
    assert await direct.leave("a") == ["gone", "expired"]


@pytest.mark.parametrize("waited_for", [True, False])
async def test_leaving_late_does_not_open_a_name_before_its_lock_delay_is_over(
    direct: Direct, waited_for: bool
) -> None:
    await direct.acquire("a", ttl=10_000, delay=600_000)
    if waited_for:
        await direct.acquire("b")
    await direct.age("a", by=10_000)
    assert await direct.leave("a") == ["gone", "expired"]
    assert await direct.acquire("c", wait=False) == ["busy"]
    assert set(await direct.holders()) == {"a"}


# -- late duplicates ---------------------------------------------------------------------------------


async def test_late_duplicate_after_an_ordinary_release_is_refused(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.leave("a", ambiguous=True)
    assert await direct.acquire("a") == ["gone"]
    assert await direct.all_keys() == {"token", "marker:a"}


async def test_late_duplicate_after_a_withdrawal_is_refused(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b")
    await direct.leave("b", ambiguous=True)
    assert await direct.acquire("b") == ["gone"]
    assert await direct.queue() == []
    await direct.leave("a")
    assert await direct.all_keys() == {"token", "marker:b"}


async def test_late_duplicate_is_refused_also_after_a_hand_off(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b")
    assert await direct.leave("a", ambiguous=True) == ["released"]
    assert await direct.acquire("a") == ["gone"]
    assert await direct.all_keys() == {"state", "token", "marker:a"}


async def test_request_that_arrives_after_its_own_leave_is_refused(direct: Direct) -> None:
    assert await direct.leave("a", ambiguous=True) == ["gone", "gone"]
    assert await direct.acquire("a") == ["gone"]
    assert await direct.acquire("a", wait=False) == ["gone"]
    assert await direct.all_keys() == {"marker:a"}


async def test_late_duplicate_of_one_request_refuses_no_other(direct: Direct) -> None:
    await direct.leave("a", ambiguous=True)
    assert (await direct.acquire("b"))[0] == "granted"


async def test_marker_expires(direct: Direct) -> None:
    await direct.leave("a", ambiguous=True)
    left = await direct.redis.pttl(direct.keys.marker + "a")
    assert MARKER_TTL - 1_000 <= left <= MARKER_TTL


async def test_leave_without_ambiguity_writes_no_marker(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b")
    await direct.leave("b")
    await direct.leave("a")
    assert await direct.all_keys() == {"token"}


# -- hand-off ----------------------------------------------------------------------------------------


async def test_hand_off_says_so_to_the_one_who_waits_and_to_nobody_else(
    direct: Direct, heard: Heard
) -> None:
    await direct.acquire("a", client="client-a")
    await direct.acquire("b", client="client-b")
    # These will ask by themselves before the new holder's lease ends.
    await direct.acquire("c", client="client-c", waiter_ttl=50_000)
    await direct.acquire("d", client="client-d")
    await heard.notices()
    await direct.leave("a")
    assert await heard.notices() == [("client-b", "granted", "b")]


async def test_what_a_release_grants_to_its_own_client_comes_with_its_reply(
    direct: Direct, heard: Heard
) -> None:
    await direct.acquire("a", client="client-a")
    for id, client in (("b", "client-a"), ("c", "client-c"), ("d", "client-a")):
        await direct.acquire(id, "s", client=client)
    await heard.notices()
    reply = await direct.leave("a")
    tokens = {id: str(holder.token) for id, holder in (await direct.holders()).items()}
    assert reply == ["released", direct.keys.state, "b", tokens["b"], "d", tokens["d"]]
    told = [(channel.rpartition("client:")[2], data) for channel, data in await heard.so_far()]
    state = direct.keys.state
    assert told == [
        ("client-a:own", f"granted {state} b {tokens['b']}"),
        ("client-c", f"granted {state} c {tokens['c']}"),
        ("client-a:own", f"granted {state} d {tokens['d']}"),
    ]


async def test_what_a_release_hands_to_its_own_client_comes_with_its_reply(
    direct: Direct, heard: Heard
) -> None:
    for id in "ab":
        await direct.acquire(id, client="client-a")
    await heard.notices()
    reply = await direct.leave("a")
    token = str((await direct.holders())["b"].token)
    assert reply == ["released", direct.keys.state, "b", token]
    ((channel, _),) = await heard.so_far()
    assert channel == "aiodlock:2:client:client-a:own"


async def test_notice_carries_request_and_token(direct: Direct, heard: Heard) -> None:
    await direct.acquire("a")
    await direct.acquire("b", client="client-b")
    await heard.so_far()
    await direct.leave("a")
    token = (await direct.holders())["b"].token
    (message,) = await heard.so_far()
    assert message == ("aiodlock:2:client:client-b", f"granted {direct.keys.state} b {token}")


async def test_hand_off_to_a_short_lease_hints_the_next_head_once(
    direct: Direct, heard: Heard
) -> None:
    await direct.acquire("a")
    await direct.acquire("b", client="client-b", ttl=9_000, waiter_ttl=9_000)
    for id in ("c", "d"):
        await direct.acquire(id, client=f"client-{id}", waiter_ttl=90_000)
    await heard.notices()
    await direct.leave("a")
    assert await heard.notices() == [("client-b", "granted", "b"), ("client-c", "look", "c")]


async def test_hand_off_hints_nobody_who_asks_within_the_lock_delay(
    direct: Direct, heard: Heard
) -> None:
    await direct.acquire("a")
    await direct.acquire("b", client="client-b", waiter_ttl=9_000, delay=90_000)
    await direct.acquire("c", client="client-c", waiter_ttl=90_000)
    await heard.notices()
    await direct.leave("a")
    assert await heard.notices() == [("client-b", "granted", "b")]


async def test_state_outlives_who_is_handed_the_name_and_its_lock_delay(direct: Direct) -> None:
    await direct.acquire("a", ttl=10_000)
    await direct.acquire("b", waiter_ttl=50_000, delay=30_000)
    await direct.leave("a")
    assert await direct.redis.pttl(direct.keys.state) > 70_000


async def test_ghosts_at_the_head_are_skipped(direct: Direct) -> None:
    for id in "abcd":
        await direct.acquire(id, waiter_ttl=10_000)
    await direct.age("b", "c", by=10_000)
    await direct.leave("a")
    assert set(await direct.holders()) == {"d"}
    assert await direct.all_keys() == {"state", "token"}


async def test_one_ghost_at_the_head_is_skipped(direct: Direct) -> None:
    for id in "abc":
        await direct.acquire(id, waiter_ttl=10_000)
    await direct.age("b", by=10_000)
    await direct.leave("a")
    assert set(await direct.holders()) == {"c"}


async def test_ghosts_in_the_middle_are_skipped(direct: Direct) -> None:
    for id in "abcde":
        await direct.acquire(id, waiter_ttl=10_000)
    await direct.age("c", "d", by=10_000)
    seen: list[str] = []
    for _ in range(3):
        id = next(iter(await direct.holders()), "nobody")
        seen.append(id)
        await direct.leave(id)
    assert seen == ["a", "b", "e"]
    assert await direct.all_keys() == {"token"}


async def test_name_with_only_ghosts_waiting_is_free(direct: Direct) -> None:
    for id in "abc":
        await direct.acquire(id, waiter_ttl=10_000)
    await direct.age("b", "c", by=10_000)
    await direct.leave("a")
    assert await direct.all_keys() == {"token"}


async def test_thousands_of_ghosts_are_skipped_in_one_step(direct: Direct) -> None:
    await direct.acquire("a", ttl=600_000)
    pipe = direct.redis.pipeline(transaction=False)
    overdue = await direct.now() - 1
    for number in range(1, 3_001):
        pipe.xadd(direct.keys.queue, {"id": f"g{number}", "r": "x 0 tg client"}, id=f"1-{number}")
        pipe.hset(direct.keys.waiters, f"g{number}", f"1-{number} {overdue} 10000")
    await pipe.execute()
    await direct.acquire("b", waiter_ttl=600_000)
    await direct.leave("a")
    assert set(await direct.holders()) == {"b"}
    assert await direct.all_keys() == {"state", "token"}


async def test_stream_evicted_but_not_the_waiters_grants_nobody_twice(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b")
    await direct.redis.delete(direct.keys.queue)
    await direct.leave("a")
    assert await direct.holders() == {}
    assert await direct.all_keys() == {"token"}
    assert (await direct.acquire("c", wait=False))[0] == "granted"


async def test_stream_evicted_but_not_the_waiters_does_not_wedge_the_name(direct: Direct) -> None:
    """A waiter that was evicted and repeats itself believes in no place that is not there."""
    await direct.acquire("a")
    await direct.acquire("b")
    await direct.redis.delete(direct.keys.queue)
    assert (await direct.extend("b"))[0] == "gone"
    assert (await direct.acquire("b2"))[0] == "waiting"
    await direct.leave("a")
    assert set(await direct.holders()) == {"b2"}


async def test_waiter_whose_entry_was_evicted_withdraws(direct: Direct) -> None:
    await direct.acquire("a")
    await direct.acquire("b")
    await direct.redis.delete(direct.keys.queue)
    assert await direct.leave("b") == ["withdrawn"]
    assert await direct.all_keys() == {"state", "token"}


async def test_waiter_whose_entry_was_evicted_takes_no_entry_of_the_same_number(
    direct: Direct,
) -> None:
    """The clock was set back by just so much that a newcomer's entry has the number of the evicted one."""
    await direct.acquire("a")
    await direct.acquire("b")
    place = (await direct.waiters())["b"]
    await direct.redis.delete(direct.keys.queue)
    await direct.redis.xadd(
        direct.keys.queue, {"id": "c", "r": "x 0 tc client-of-c"}, id=place.stream_id
    )
    record = f"{place.stream_id} {place.deadline} {place.length}"
    await direct.redis.hset(direct.keys.waiters, "c", record)
    assert await direct.leave("b") == ["withdrawn"]
    assert await direct.queue() == ["c"]


@pytest.mark.parametrize("lost", ["queue", "waiters"])
async def test_release_of_a_name_that_lost_half_its_queue_leaves_only_the_token(
    direct: Direct, lost: str
) -> None:
    await direct.acquire("a")
    await direct.acquire("b")
    await direct.redis.delete(getattr(direct.keys, lost))
    assert await direct.leave("a") == ["released"]
    assert await direct.all_keys() == {"token"}


@pytest.mark.real_store  # fakeredis sends no `del` for a hash whose last field is deleted
async def test_state_key_never_vanishes_in_a_hand_off(direct: Direct, store: Store) -> None:
    await store.notifications(True)
    events = await Heard.on(await store.raw(), f"__keyspace@0__:{direct.keys.state}")
    await direct.acquire("a", ttl=10_000)
    for id in "bcd":
        await direct.acquire(id)
    await events.so_far()
    await direct.leave("a")  # an ordinary hand-off
    await direct.age("b", by=100_000)
    await direct.extend("c")  # the head finds its blocker dead
    await direct.leave("c")
    await direct.acquire("e")
    await direct.age("d", by=100_000)
    await direct.acquire("f")  # a newcomer finds it
    await direct.break_lock()  # an operator
    assert set(await direct.holders()) == {"f"}
    assert "del" not in [event for _, event in await events.so_far()]
    await direct.leave("f")
    assert "del" in [event for _, event in await events.so_far()], "and the last one is heard"
    await events.aclose()


# -- the head changes without a grant ------------------------------------------------------------------


async def _wait_behind(direct: Direct, *ids: str, waiter_ttl: int = 90_000) -> None:
    for id in ids:
        await direct.acquire(id, client=f"client-{id}", waiter_ttl=waiter_ttl)


async def test_head_that_withdraws_gives_the_next_one_hint(direct: Direct, heard: Heard) -> None:
    """The next extension of `c` is due in 3 s, its blocker ends in 2: it has to be told."""
    await direct.acquire("a", ttl=20_000)
    await _wait_behind(direct, "b", "c", "d")
    await heard.notices()
    await direct.leave("b")
    assert await heard.notices() == [("client-c", "look", "c")]


async def test_no_hint_when_the_new_head_will_ask_soon_enough(direct: Direct, heard: Heard) -> None:
    await direct.acquire("a", ttl=40_000)
    await _wait_behind(direct, "b", "c", "d")
    await heard.notices()
    await direct.leave("b")
    assert await heard.notices() == []


async def test_no_hint_when_somebody_in_the_middle_withdraws(direct: Direct, heard: Heard) -> None:
    await direct.acquire("a", ttl=20_000)
    await _wait_behind(direct, "b", "c", "d")
    await heard.notices()
    await direct.leave("c")
    assert await heard.notices() == []


async def test_head_that_dies_gives_the_next_one_hint_from_whoever_looks(
    direct: Direct, heard: Heard
) -> None:
    await direct.acquire("a", ttl=20_000)
    await _wait_behind(direct, "b", "c", "d")
    await direct.age("b", by=90_000)
    await heard.notices()
    await direct.extend("d", 90_000)
    assert await heard.notices() == [("client-c", "look", "c")]


async def test_new_head_that_asks_itself_needs_no_hint(direct: Direct, heard: Heard) -> None:
    await direct.acquire("a", ttl=20_000)
    await _wait_behind(direct, "b", "c", "d")
    await direct.age("b", by=90_000)
    await heard.notices()
    (_, _, look, _floor), moments = await direct.timed(direct.extend("c", 90_000))
    assert (await direct.holders())["a"].deadline - int(look) in moments
    assert await heard.notices() == []


async def test_overdue_head_that_withdraws_gives_the_next_one_hint(
    direct: Direct, heard: Heard
) -> None:
    await direct.acquire("a", ttl=20_000)
    await _wait_behind(direct, "b", "c")
    await direct.age("b", by=90_000)
    await heard.notices()
    await direct.leave("b")
    assert await heard.notices() == [("client-c", "look", "c")]


async def test_overdue_head_that_extends_gives_the_next_one_hint(
    direct: Direct, heard: Heard
) -> None:
    await direct.acquire("a", ttl=20_000)
    await _wait_behind(direct, "b", "c")
    await direct.age("b", by=90_000)
    await heard.notices()
    assert (await direct.extend("b", 90_000))[0] == "gone"
    assert await heard.notices() == [("client-c", "look", "c")]


async def test_overdue_head_that_asks_again_gives_the_next_one_hint(
    direct: Direct, heard: Heard
) -> None:
    await direct.acquire("a", ttl=20_000)
    await _wait_behind(direct, "b", "c")
    await direct.age("b", by=90_000)
    await heard.notices()
    assert (await direct.acquire("b", waiter_ttl=90_000))[0] == "waiting"
    assert await direct.queue() == ["c", "b"]
    assert await heard.notices() == [("client-c", "look", "c")]


async def test_nearer_time_to_look_is_hinted(direct: Direct, heard: Heard) -> None:
    """An owner gets in again for less time than it holds already: the head must look earlier."""
    await direct.acquire("a", "s", owner="uowner", ttl=600_000)
    await _wait_behind(direct, "b")
    await heard.notices()
    await direct.acquire("a2", "s", owner="uowner", ttl=10_000)
    assert await heard.notices() == [("client-b", "look", "b")]


async def test_reader_that_leaves_does_not_disturb_a_head_still_blocked(
    direct: Direct, heard: Heard
) -> None:
    await direct.acquire("r1", "s", ttl=600_000)
    await direct.acquire("r2", "s", ttl=600_000)
    await _wait_behind(direct, "w")
    await heard.notices()
    await direct.leave("r1")
    assert await heard.notices() == []


async def test_break_tells_holders_and_grants_the_head_whatever_the_lock_delay(
    direct: Direct, heard: Heard
) -> None:
    await direct.acquire("a", client="client-a", delay=600_000)
    await _wait_behind(direct, "b")
    await heard.notices()
    assert await direct.break_lock() == 1
    assert await heard.notices() == [("client-a", "broken", "a"), ("client-b", "granted", "b")]
    assert set(await direct.holders()) == {"b"}


# -- the lease ran out for its holder before it did for the server ---------------------------------------


@pytest.mark.parametrize("waited_for", [True, False])
async def test_leaving_a_lease_lost_early_keeps_its_lock_delay(
    direct: Direct, waited_for: bool
) -> None:
    await direct.acquire("a", ttl=10_000, delay=600_000)
    if waited_for:
        await direct.acquire("b")
    before = await direct.holders()
    assert await direct.leave("a", ambiguous=True, end="lost") == ["gone", "expired"]
    assert await direct.holders() == before
    assert "marker:a" in await direct.all_keys(), "a late duplicate is refused all the same"


@pytest.mark.parametrize("waited_for", [True, False])
async def test_lease_lost_early_keeps_its_lock_delay_also_without_a_marker(
    direct: Direct, waited_for: bool
) -> None:
    await direct.acquire("a", ttl=10_000, delay=600_000)
    if waited_for:
        await direct.acquire("b")
    assert await direct.leave("a", end="lost") == ["gone", "expired"]
    assert set(await direct.holders()) == {"a"}


@pytest.mark.parametrize("waited_for", [True, False])
async def test_leaving_a_lease_lost_early_without_a_lock_delay_opens_the_name(
    direct: Direct, waited_for: bool
) -> None:
    await direct.acquire("a", ttl=10_000)
    if waited_for:
        await direct.acquire("b")
    assert await direct.leave("a", end="lost") == ["released"]
    assert set(await direct.holders()) == ({"b"} if waited_for else set())


async def test_overdue_holder_leaves_too_late_also_when_somebody_waits(direct: Direct) -> None:
    for id in "ab":
        await direct.acquire(id)
    await direct.age("a", by=200_000)
    assert await direct.leave("a") == ["gone", "gone"]
    assert set(await direct.holders()) == {"b"}


async def test_hand_off_clamps_what_a_clock_set_back_has_stretched(direct: Direct) -> None:
    for id in "abc":
        await direct.acquire(id, waiter_ttl=10_000)
    await direct.set_clock_back("b", "c", by=3_600_000)
    await direct.leave("a")
    assert (await direct.holders())["b"].deadline <= await direct.now() + 10_000
    assert (await direct.waiters())["c"].deadline <= await direct.now() + 10_000


async def test_clock_set_back_does_not_stretch_what_a_lost_lease_keeps_closed(
    direct: Direct,
) -> None:
    await direct.acquire("a", ttl=10_000, delay=10_000)
    await direct.set_clock_back("a", by=3_600_000)
    assert await direct.leave("a", end="lost") == ["gone", "expired"]
    assert (await direct.holders())["a"].deadline <= await direct.now() + 10_000


async def test_owner_that_is_handed_a_name_has_it_for_its_next_request_too(direct: Direct) -> None:
    await direct.acquire("a")
    for id in ("b", "b2"):
        await direct.acquire(id, owner="uowner")
    await direct.acquire("c")
    await direct.leave("a")
    assert set(await direct.holders()) == {"b", "b2"}
    assert await direct.queue() == ["c"]


@pytest.mark.stores("valkey9")
async def test_time_to_grant_many_readers_grows_with_their_number_not_with_its_square(
    store: Store, direct: Direct
) -> None:
    raw: Any = await store.raw()

    async def computed() -> float:
        """Return what the server has computed: that does not depend on what else runs."""
        used = await raw.info("cpu")
        return float(used["used_cpu_user"] + used["used_cpu_sys"])

    async def time_to_grant(number: int) -> float:
        await raw.flushall()
        await direct.acquire("writer", ttl=600_000)
        for first in range(0, number, 500):
            pipe = raw.pipeline(transaction=False)
            for n in range(first, first + 500):
                await Direct(pipe).acquire(f"reader-{n}", "s", waiter_ttl=600_000)
            await pipe.execute()
        before = await computed()
        await direct.leave("writer")
        needed = await computed() - before
        assert await raw.hlen(direct.keys.state) == number
        return needed

    # A processor is not always equally fast: both are measured right after each other, and once has to do.
    for _ in range(5):
        if 4 * await time_to_grant(1_000) / await time_to_grant(4_000) > 4 / 7:
            return
    pytest.fail("it was at least 7 times as long for 4 times as many")
