"""A client of the wheel and one of the tree on the same names: either one is first, either one is killed.

Which wheel that is, `beside.py` says. What runs here may run side by side while releases change.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from ..scenes import BRIEF, STARTING, until
from ..servers import OTHERS, REAL, Store
from .beside import Call, Failed, Peer
from .conftest import Peers, enter
from .journal import check, stays

pytestmark = pytest.mark.stores(*REAL, *OTHERS)

Pair = tuple[Peer, Peer]

NAME = "name"
#: Nothing but a death ends a lease here; and a death costs no more than this.
TTL = 2.0


async def until_queued(peer: Peer, number: int, *, kind: str = "lock") -> None:
    async def queued() -> bool:
        return len((await peer.inspect(name=NAME, kind=kind))["waiters"]) == number

    await until(queued, f"{number} waiting for {NAME!r}")


async def held_by(peer: Peer, number: int) -> bool:
    return len((await peer.inspect(name=NAME))["holders"]) == number


async def refused(call: Call, kind: str) -> None:
    with pytest.raises(Failed) as failed:
        await call
    assert failed.value.kind == kind


async def test_the_two_are_what_they_are_called(peers: Peers) -> None:
    wheel, tree = await peers.of("wheel").hello(), await peers.of("tree").hello()
    assert Path(tree["file"]).is_relative_to(Path(__file__).parents[2] / "aiodlock")
    assert not Path(wheel["file"]).is_relative_to(Path(__file__).parents[2] / "aiodlock")


async def test_lock_is_handed_over_and_back(pair: Pair) -> None:
    """Each one waits for the other, which holds; tokens grow."""
    holder, waiter = pair
    tokens = [await holder.acquire(label="turn 0", name=NAME)]
    for turn in range(1, 7):
        called = waiter.acquire(label=f"turn {turn}", name=NAME)
        await until_queued(holder, 1)
        await until_queued(waiter, 1)
        assert not called.done
        await holder.release(label=f"turn {turn - 1}")
        tokens.append(await called)
        holder, waiter = waiter, holder
    assert tokens == sorted(set(tokens))
    await holder.release(label="turn 6")


async def test_queue_of_both_is_in_order_of_arrival(pair: Pair) -> None:
    first, second = pair
    await first.acquire(label="holder", name=NAME)
    calls: list[Call] = []
    for number in range(6):
        calls.append(pair[number % 2].acquire(label=f"{number}", name=NAME))
        await until_queued(first, number + 1)
    cancelled = calls[2]
    await first.cancel(call=cancelled.id)
    await until_queued(second, 5)
    await refused(cancelled, "CancelledError")
    await first.release(label="holder")
    del calls[2]
    for number in (0, 1, 3, 4, 5):
        await calls.pop(0)
        assert not any(later.done for later in calls), number
        await pair[number % 2].release(label=f"{number}")


async def test_wait_of_one_runs_out_while_the_other_holds(pair: Pair) -> None:
    holder, waiter = pair
    await holder.acquire(label="holder", name=NAME)
    await refused(waiter.acquire(label="no", name=NAME, timeout=BRIEF), "AcquireTimeout")
    await refused(waiter.acquire(label="no", name=NAME, timeout=0), "AcquireTimeout")
    await holder.release(label="holder")
    await waiter.acquire(label="yes", name=NAME, timeout=0)


async def test_readers_are_together_and_a_writer_stands_between_them(pair: Pair) -> None:
    first, second = pair
    await first.acquire(label="reads", name=NAME, mode="read")
    await second.acquire(label="reads", name=NAME, mode="read")
    assert await held_by(first, 2)
    writes = second.acquire(label="writes", name=NAME)
    await until_queued(first, 1)
    later = [peer.acquire(label="later", name=NAME, mode="read") for peer in pair]
    await until_queued(second, 3)
    for peer in pair:
        await peer.release(label="reads")
    await writes
    assert not any(call.done for call in later)
    await second.release(label="writes")
    await asyncio.gather(*later)
    assert await held_by(second, 2)


async def test_one_owner_of_both_is_in_at_once_with_the_first_token(pair: Pair) -> None:
    first, second = pair
    token = await first.acquire(label="one", name=NAME, owner="both")
    waits = second.acquire(label="other", name=NAME)
    await until_queued(first, 1)
    assert await second.acquire(label="two", name=NAME, owner="both") == token
    await first.release(label="one")
    assert await held_by(first, 1)
    assert not waits.done
    await second.release(label="two")
    assert await waits > token


async def test_semaphore_has_one_limit_for_both(pair: Pair) -> None:
    first, second = pair
    await first.acquire(label="one", name=NAME, limit=2)
    await second.acquire(label="two", name=NAME, limit=2)
    third = second.acquire(label="three", name=NAME, limit=2)
    await until_queued(first, 1, kind="semaphore")
    await refused(first.acquire(label="other", name=NAME, limit=3, timeout=BRIEF), "ValueError")
    await first.release(label="one")
    await third


async def test_lingering_lease_is_recalled_by_the_other(pair: Pair) -> None:
    first, second = pair
    await first.open(label="body")
    token = await first.body(label="body", name=NAME, linger=300)
    assert await first.body(label="body", name=NAME, linger=300) == token
    assert await held_by(second, 1)
    assert await second.acquire(label="next", name=NAME) > token


async def test_name_stays_closed_for_the_other_at_least_that_long(pair: Pair) -> None:
    first, second = pair
    await first.open(label="body")
    await first.body(label="body", name=NAME, hold_at_least=300)
    assert (await second.inspect(name=NAME))["closed"] > 200
    await refused(second.acquire(label="no", name=NAME, timeout=BRIEF), "AcquireTimeout")
    await second.break_lock(name=NAME)
    await second.acquire(label="yes", name=NAME)


@pytest.mark.parametrize("raw", [False, True], ids=["text", "bytes"])
async def test_success_that_one_records_is_read_by_the_other(pair: Pair, raw: bool) -> None:
    first, second = pair
    await first.keeps_records()
    kind = "bytes" if raw else "str"
    does = first.once(label="first", name=NAME, result="naïve ☂", raw=raw, keep=300)
    await until(lambda: held_by_once(second))
    waits = second.once(label="second", name=NAME, result="again", raw=raw, keep=300)
    await until_queued(first, 1, kind="once")
    await first.open(label="first")
    assert await does == [True, kind, "naïve ☂"]
    assert await waits == [False, kind, "naïve ☂"]
    for peer in pair:  # and who asks when it is over
        assert await peer.once(label="later", name=NAME, result="", raw=raw, keep=300) == [
            *(False, kind),
            "naïve ☂",
        ]
    assert await second.forget(name=NAME)
    assert (await first.inspect(name=NAME, kind="once"))["recorded"] is None


async def held_by_once(peer: Peer) -> bool:
    return bool((await peer.inspect(name=NAME, kind="once"))["holders"])


async def test_what_one_holds_is_seen_checked_and_broken_by_the_other(pair: Pair) -> None:
    first, second = pair
    token = await first.acquire(label="held", name=NAME, note="of the first")
    (holder,) = (await second.inspect(name=NAME))["holders"]
    assert (holder["token"], holder["note"], holder["mode"]) == (token, "of the first", "exclusive")
    assert await second.listed(match="*") == [NAME]
    sequencer = (await first.state(label="held"))["sequencer"]
    assert await second.check_sequencer(sequencer=sequencer)
    assert await second.break_lock(name=NAME) == 1
    assert await first.wait_lost(label="held") == "broken"
    assert not await second.check_sequencer(sequencer=sequencer)


async def test_leader_of_one_is_known_to_the_other(pair: Pair) -> None:
    first, second = pair
    leads = first.lead(label="term", name=NAME, value="host 1")
    assert await second.leader(name=NAME) == "host 1"
    await first.open(label="term")
    await leads


async def test_deadlock_of_both_is_found(pair: Pair) -> None:
    """Each one holds a name and waits for the other's: one gets the error, the other one goes on."""
    first, second = pair
    bodies = [
        first.body(label="body", name="a", inner="b"),
        second.body(label="body", name="b", inner="a"),
    ]
    for name in ("a", "b"):
        await until(lambda name=name: holders(first, name))  # type: ignore[misc]
    for peer in pair:
        await peer.open(label="body")
    ended = await asyncio.gather(*(told(body) for body in bodies))
    assert sorted(ended) == ["DeadlockError", "done"]


async def holders(peer: Peer, name: str) -> list[Any]:
    return list((await peer.inspect(name=name))["holders"])


async def told(call: Call) -> str:
    try:
        await call
    except Failed as failed:
        return failed.kind
    return "done"


# -- kills -----------------------------------------------------------------------------------------


async def test_holder_of_one_is_killed_and_the_other_is_in_after_its_lease(
    pair: Pair, store: Store
) -> None:
    dies, waits = pair
    token = await dies.acquire(label="held", name=NAME, ttl=TTL)
    next_one = waits.acquire(label="next", name=NAME, ttl=TTL)
    await until_queued(waits, 1)
    dies.kill()
    assert await asyncio.wait_for(next_one, STARTING) > token


async def test_lock_delay_of_a_killed_holder_keeps_the_other_out(pair: Pair) -> None:
    dies, waits = pair
    await dies.acquire(label="held", name=NAME, ttl=TTL, lock_delay=300)
    next_one = waits.acquire(label="next", name=NAME)
    await until_queued(waits, 1)
    dies.kill()

    async def is_closed() -> bool:
        info = await waits.inspect(name=NAME)
        return not info["holders"] and info["closed"] > 200

    await until(is_closed, within=STARTING)
    assert not next_one.done
    await waits.break_lock(name=NAME)
    await next_one


async def test_waiters_of_one_are_killed_and_the_others_behind_them_go_on(pair: Pair) -> None:
    dies, stays = pair
    await stays.acquire(label="held", name=NAME)
    for number in range(3):
        dies.begin("acquire", label=f"dead {number}", name=NAME)
        await until_queued(stays, number + 1)
    behind = stays.acquire(label="behind", name=NAME)
    await until_queued(stays, 4)
    dies.kill()
    await stays.release(label="held")
    await asyncio.wait_for(behind, STARTING)


async def test_body_of_a_killed_one_is_done_again_by_the_other(pair: Pair) -> None:
    dies, stays = pair
    await dies.keeps_records()
    dies.begin("once", label="dies", name=NAME, result="", raw=False, keep=300, ttl=TTL)
    await until(lambda: held_by_once(stays))
    again = stays.once(label="stays", name=NAME, result="done", raw=False, keep=300, ttl=TTL)
    await stays.open(label="stays")
    await until_queued(stays, 1, kind="once")
    dies.kill()
    assert await asyncio.wait_for(again, STARTING) == [True, "str", "done"]


# -- load ------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)  # a busy machine is slow, and that is no matter here
@pytest.mark.parametrize(
    "kills", [0, pytest.param(4, marks=pytest.mark.long)], ids=["alive", "killed"]
)
async def test_both_under_load_never_overlap(
    peers: Peers, store: Store, tmp_path: Path, kills: int
) -> None:
    """Two processes of each release; of those, one after the other is killed, and another one begins."""
    journal = tmp_path / "journal"
    journal.touch()
    seeds = itertools.count()
    killed: dict[int, float] = {}
    running: list[tuple[str, Peer]] = []
    works: dict[Peer, Call] = {}

    async def start(*releases: str) -> None:
        began = [(release, peers.start(release)) for release in releases]
        running.extend(began)
        for _, peer in began:
            await enter(peer, store, waiter_ttl=3.0)
        for _, peer in began:
            works[peer] = peer.work(
                journal=str(journal), names=["a", "b"], tasks=4, seed=next(seeds), ttl=4.0
            )

    async def until_worked(how_much: int) -> None:
        """Wait until the processes that run have written so many bytes more."""
        size = journal.stat().st_size
        await until(lambda: journal.stat().st_size > size + how_much, within=120.0)

    try:
        await start("wheel", "tree", "wheel", "tree")
        await until_worked(6_000)
        for _ in range(kills):
            release, peer = running.pop(0)
            peer.kill()
            killed[peer.pid] = time.monotonic()
            await start(release)
            await until_worked(6_000)
        for _, peer in running:
            await peer.finish()
        turns = [await works[peer] for _, peer in running]
        for _, peer in running:
            await peer.leave()
    finally:
        for _, peer in running:
            peer.stop()
    assert all(turns)
    for those in stays(journal, killed).values():
        check(those)
