"""vote and unvote: what one node of a quorum says, whatever the order in which it hears."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError

from aiodlock.backends.redis import scripts
from aiodlock.backends.redis.keys import channel_prefix

from ..servers import Store
from .direct import MARKER_TTL, PREFIX, RETENTION, Direct, Heard

pytestmark = pytest.mark.stores("fakeredis", "valkey9", "redis62", "redis70")


class Node(Direct):
    """The scripts of a quorum's node, on one name."""

    _deadline_of_waiter = 2

    async def vote(
        self,
        id: str,
        what: str = "ask",
        *,
        ticket: int = 1,
        mode: str = "x",
        owner: str | None = None,
        token: int | str = 0,
        length: int = 100_000,
        delay: int = 0,
        client: str = "client",
        known: int | str | None = None,
    ) -> list[Any]:
        """:param known: with "held", the token by which the client knows the vote; the same one if None."""
        arguments: list[str | int] = [id, mode, owner or f"t{id}", length, delay, client, ticket]
        options = (channel_prefix(PREFIX), RETENTION, "PUBLISH")
        names = self._six(id)
        return await self._run(  # type: ignore[no-any-return]
            scripts.VOTE,
            names,
            [*arguments, what, token, *options, "", token if known is None else known],
        )

    async def unvote(
        self, id: str, what: str = "ended", *, token: int | str = 0, late: bool = False
    ) -> list[Any]:
        options = (channel_prefix(PREFIX), RETENTION, "PUBLISH")
        marker = MARKER_TTL if late else 0
        return await self._run(  # type: ignore[no-any-return]
            scripts.UNVOTE, self._six(id), [id, what, marker, token, *options]
        )

    async def hold(self, id: str, **options: Any) -> int:
        """Vote and confirm; return the token."""
        answer = await self.vote(id, **options)
        assert answer[0] == "vote", answer
        answer = await self.vote(id, "fence", token=answer[1], **options)
        assert answer[:1] + answer[3:4] == ["vote", "c"]
        return int(answer[1])

    async def break_votes(self, *ids: str) -> list[str]:
        keys = self.keys
        return await self._run(  # type: ignore[no-any-return]
            scripts.BREAK_VOTES,
            [keys.state, keys.queue, keys.waiters, keys.token, keys.broken],
            [channel_prefix(PREFIX), RETENTION, "PUBLISH", MARKER_TTL, " ".join(ids) or "all"],
        )

    async def seen(self) -> list[Any]:
        keys = self.keys
        return await self._run(  # type: ignore[no-any-return]
            scripts.INSPECT_VOTES, [keys.state, keys.queue, keys.waiters, keys.token], []
        )

    async def line(self) -> list[str]:
        """Return the ids of those that wait, the oldest first."""
        return [str(id) for id in await self.redis.zrange(self.keys.queue, 0, -1)]

    async def stages(self) -> dict[str, str]:
        """Return the stage of each vote that stands."""
        records = await self.redis.hgetall(self.keys.state)
        return {id: text.split(" ")[8] for id, text in records.items()}

    async def deadline_of_waiter(self, id: str) -> int:
        text = await self.redis.hget(self.keys.waiters, id)
        return int(text.split(" ")[self._deadline_of_waiter])

    async def queue_behind(self, holder: str, *ids: str, **options: Any) -> int:
        """Let one hold, and the others wait with a ticket each: 1, 2, 3 …; return the token."""
        token = await self.hold(holder)
        for ticket, id in enumerate(ids, 2):
            answer = await self.vote(id, ticket=ticket, client=f"of-{id}", **options)
            assert answer[0] == "waiting", answer
        return token

    def _six(self, id: str) -> list[str]:
        keys = self.keys
        return [keys.state, keys.queue, keys.waiters, keys.token, keys.marker + id, keys.broken]


@pytest.fixture
async def node(store: Store) -> Node:
    """Give an empty node."""
    return Node(await store.raw())


# -- the order ---------------------------------------------------------------------------------------


async def test_queue_is_by_ticket_and_then_by_id_whatever_the_order_of_arrival(node: Node) -> None:
    await node.hold("holder", ticket=1)
    for id, ticket in [("e", 50), ("b", 20), ("d", 30), ("c", 30), ("a", 99)]:
        assert (await node.vote(id, ticket=ticket))[0] == "waiting"
    assert await node.line() == ["b", "c", "d", "e", "a"]
    order, leaving = [], "holder"
    for _ in range(5):
        await node.unvote(leaving)
        (leaving,) = await node.stages()
        order.append(leaving)
    assert order == ["b", "c", "d", "e", "a"]


async def test_tickets_of_the_present_time_keep_their_order(node: Node) -> None:
    """They have 16 digits, which a double still tells apart."""
    await node.hold("holder", ticket=1)
    now = 1_790_000_000_000_000
    for step in (3, 1, 2, 0):
        await node.vote(f"r{step}", ticket=now + step)
    assert await node.line() == ["r0", "r1", "r2", "r3"]


async def test_repeated_ask_changes_nothing(node: Node) -> None:
    first = await node.vote("a", ticket=5)
    again = await node.vote("a", ticket=5)
    assert (
        (first[0], first[1], first[3]) == (again[0], again[1], again[3]) == ("vote", first[1], "v")
    )
    await node.vote("b", ticket=7)
    await node.vote("b", ticket=7)
    assert await node.line() == ["b"]


async def test_try_leaves_no_place_where_it_gets_no_vote(node: Node) -> None:
    await node.hold("a")
    assert (await node.vote("b", "try", ticket=2))[0] == "busy"
    assert await node.line() == []
    await node.unvote("a")
    assert (await node.vote("b", "try", ticket=2))[0] == "vote"


async def test_try_does_not_pass_an_older_waiter(node: Node) -> None:
    await node.hold("a", length=10_000)
    await node.vote("b", ticket=2)
    await node.age("a", by=20_000)
    assert (await node.vote("c", "try", ticket=3))[0] == "busy"
    assert set(await node.stages()) == {"b"}


async def test_dead_waiter_is_passed(node: Node) -> None:
    await node.hold("a", ticket=1)
    await node.vote("b", ticket=2)
    await node.vote("c", ticket=3)
    await node.age("b", by=200_000)
    await node.unvote("a")
    assert set(await node.stages()) == {"c"}


# -- votes that are asked back -----------------------------------------------------------------------


async def test_vote_is_asked_back_for_an_older_request_alone(node: Node, heard: Heard) -> None:
    await node.vote("b", ticket=20, client="of-b")
    await node.vote("c", ticket=30)
    assert await heard.notices() == []
    assert (await node.vote("b", ticket=20))[4] == "0"
    await node.vote("a", ticket=10)
    assert ("of-b", "look", "b") in await heard.notices()
    assert (await node.vote("b", ticket=20))[4] == "1", "a lost inquiry repeats itself"


async def test_vote_is_asked_back_for_a_request_that_holds_elsewhere_whatever_its_ticket(
    node: Node, heard: Heard
) -> None:
    token = (await node.vote("a", ticket=10, client="of-a"))[1]
    await node.vote("b", ticket=20, client="of-b")
    await heard.notices()
    assert (await node.vote("c", "held", ticket=30, token=5, client="of-c"))[0] == "waiting"
    assert await node.line() == ["c", "b"]
    assert ("of-a", "look", "a") in await heard.notices()
    assert (await node.vote("a", ticket=10))[4] == "1", "a lost inquiry repeats itself"
    assert (await node.unvote("a", "yield", token=token))[0] == "waiting"
    assert ("of-c", "granted", "c") in await heard.notices()
    assert await node.line() == ["a", "b"]
    given = (await node.vote("c", "held", ticket=30, token=5, known=0))[1]
    later = str(int(given) + 9)
    answer = await node.vote("c", "held", ticket=30, token=later, known=given)
    assert answer[:2] + answer[3:5] == ["vote", later, "c", "0"]


async def test_request_that_held_elsewhere_and_asks_waits_by_its_ticket_again(node: Node) -> None:
    await node.hold("a", ticket=10)
    await node.vote("b", ticket=20)
    await node.vote("c", "held", ticket=30, token=5)
    assert await node.line() == ["c", "b"]
    await node.vote("c", ticket=30)
    assert await node.line() == ["b", "c"]


async def test_confirmed_vote_is_not_asked_back(node: Node, heard: Heard) -> None:
    await node.hold("b", ticket=20, client="of-b")
    await node.vote("a", ticket=10)
    assert [word for client, word, _ in await heard.notices() if client == "of-b"] == []
    assert (await node.vote("b", "held", ticket=20, token=1))[4] == "0"


async def test_yield_goes_to_the_older_request_and_the_younger_waits_on(
    node: Node, heard: Heard
) -> None:
    token = (await node.vote("b", ticket=20, client="of-b"))[1]
    await node.vote("a", ticket=10, client="of-a")
    await heard.notices()
    answer = await node.unvote("b", "yield", token=token)
    assert answer[0] == "waiting"
    assert await node.stages() == {"a": "v"}
    assert await node.line() == ["b"]
    assert ("of-a", "granted", "a") in await heard.notices()
    assert int((await node.holders())["a"].token) > int(token)


async def test_yield_with_nobody_older_keeps_the_vote_under_a_token_of_its_own(node: Node) -> None:
    token = (await node.vote("b", ticket=20))[1]
    await node.vote("c", ticket=30)
    answer = await node.unvote("b", "yield", token=token)
    assert (answer[0], answer[3]) == ("vote", "v")
    assert int(answer[1]) > int(token)
    assert set(await node.stages()) == {"b"}


async def test_late_yield_does_not_take_a_newer_vote(node: Node) -> None:
    token = (await node.vote("b", ticket=20))[1]
    await node.vote("a", ticket=10)
    await node.unvote("b", "yield", token=token)
    await node.unvote("a")
    assert set(await node.stages()) == {"b"}
    await node.vote("a2", ticket=11)
    answer = await node.unvote("b", "yield", token=token)
    assert (answer[0], answer[3], answer[4]) == ("vote", "v", "1")
    assert set(await node.stages()) == {"b"}


async def test_late_yield_does_not_take_a_confirmed_vote(node: Node) -> None:
    token = await node.hold("b", ticket=20)
    await node.vote("a", ticket=10)
    answer = await node.unvote("b", "yield", token=token)
    assert (answer[0], answer[3]) == ("vote", "c")
    assert await node.stages() == {"b": "c"}


async def test_yield_of_a_request_that_is_gone_does_not_queue_it(node: Node) -> None:
    token = (await node.vote("b", ticket=20))[1]
    await node.unvote("b")
    assert (await node.unvote("b", "yield", token=token))[:2] == ["gone", "gone"]
    assert await node.stages() == {}
    assert await node.line() == []


# -- the token that is written back ------------------------------------------------------------------


async def test_fence_writes_the_token_and_later_votes_have_larger_ones(node: Node) -> None:
    token = int((await node.vote("a"))[1])
    larger = token + 5_000_000
    answer = await node.vote("a", "fence", token=larger)
    assert (answer[0], int(answer[1]), answer[3]) == ("vote", larger, "c")
    await node.unvote("a")
    assert int((await node.vote("b"))[1]) > larger


async def test_next_vote_has_the_token_that_the_leaving_holder_wants_for_it(node: Node) -> None:
    wanted = await node.hold("a") + 7
    await node.vote("b", ticket=2)
    await node.vote("c", ticket=3)
    await node.unvote("a", token=wanted)
    assert await node.stages() == {"b": "p"}
    answer = await node.vote("b", ticket=2)
    assert (answer[0], int(answer[1]), answer[3]) == ("vote", wanted, "v")
    await node.unvote("b")
    assert int((await node.vote("c", ticket=3))[1]) > wanted


async def test_wanted_token_that_is_not_larger_than_all_before_is_not_taken(node: Node) -> None:
    last = await node.hold("a")
    await node.vote("b", ticket=2)
    await node.unvote("a", token=last)
    assert await node.stages() == {"b": "v"}
    assert int((await node.vote("b", ticket=2))[1]) > last


async def test_wanted_token_is_not_taken_by_a_node_that_lost_the_last_one(node: Node) -> None:
    last = await node.hold("a")
    await node.vote("b", ticket=2)
    await node.redis.delete(node.keys.token)
    await node.unvote("a", token=last + 1)
    assert int((await node.vote("b", ticket=2))[1]) > last + 1, "the clock decides"


async def test_only_one_vote_has_the_wanted_token(node: Node) -> None:
    wanted = await node.hold("a") + 1
    await node.vote("b", mode="s", ticket=2)
    await node.vote("c", mode="s", ticket=3)
    await node.unvote("a", token=wanted)
    tokens = [int((await node.vote(id, mode="s"))[1]) for id in "bc"]
    assert tokens[0] == wanted < tokens[1]


async def test_wanted_token_is_left_to_the_next_one_by_an_owner_that_has_a_token(
    node: Node,
) -> None:
    first = (await node.vote("first", mode="s", owner="uowner"))[1]
    wanted = await node.hold("leaving", mode="s", ticket=2) + 7
    await node.vote("dead", ticket=3)
    await node.vote("second", mode="s", owner="uowner", ticket=4)
    await node.vote("next", mode="s", ticket=5)
    await node.vote("first", "fence", mode="s", owner="uowner", token=first)
    await node.age("dead", by=200_000)
    await node.unvote("leaving", token=wanted)
    assert await node.stages() == {"first": "c", "second": "a", "next": "p"}
    tokens = {id: vote.token for id, vote in (await node.holders()).items()}
    assert tokens["second"] == tokens["first"] == int(first)
    assert tokens["next"] == wanted


async def test_vote_with_a_wanted_token_goes_back_to_an_older_request(node: Node) -> None:
    wanted = await node.hold("a") + 1
    await node.vote("c", ticket=30)
    await node.unvote("a", token=wanted)
    assert (await node.vote("b", ticket=20))[0] == "waiting"
    assert (await node.vote("c", ticket=30))[4] == "1"
    assert (await node.unvote("c", "yield", token=wanted))[0] == "waiting"
    assert await node.stages() == {"b": "v"}
    assert int((await node.vote("b", ticket=20))[1]) > wanted


async def test_who_waits_is_told_which_tokens_are_old(node: Node) -> None:
    token = await node.hold("a")
    assert int((await node.vote("b", ticket=2))[3]) == token
    await node.unvote("a")
    assert int((await node.vote("b", ticket=2))[1]) > token


async def test_fence_is_refused_when_the_vote_is_gone(node: Node) -> None:
    token = (await node.vote("a"))[1]
    await node.unvote("a")
    assert (await node.vote("a", "fence", token=token))[:2] == ["gone", "gone"]
    assert await node.stages() == {}
    assert await node.line() == []


async def test_fence_is_refused_when_the_vote_was_given_back(node: Node) -> None:
    token = (await node.vote("b", ticket=20))[1]
    await node.vote("a", ticket=10)
    await node.unvote("b", "yield", token=token)
    assert (await node.vote("b", "fence", ticket=20, token=token))[0] == "gone"
    assert await node.stages() == {"a": "v"}
    assert await node.line() == ["b"], "it waits on"


async def test_fence_with_a_smaller_token_than_the_nodes_own_does_not_count(node: Node) -> None:
    token = int((await node.vote("a"))[1])
    answer = await node.vote("a", "fence", token=token - 1)
    assert (answer[0], int(answer[1]), answer[3]) == ("vote", token, "v")


async def test_fence_of_a_vote_whose_lease_is_over_is_refused(node: Node) -> None:
    token = (await node.vote("a", length=10_000))[1]
    await node.age("a", by=20_000)
    assert (await node.vote("a", "fence", token=token))[:2] == ["gone", "expired"]


async def test_two_readers_never_take_the_same_token(node: Node) -> None:
    one = int((await node.vote("a", mode="s"))[1])
    two = int((await node.vote("b", mode="s", ticket=2))[1])
    top = max(one, two) + 1_000
    assert (await node.vote("a", "fence", mode="s", token=top))[3] == "c"
    answer = await node.vote("b", "fence", mode="s", ticket=2, token=top)
    assert answer[3] == "v"
    assert int(answer[1]) > top
    again = await node.vote("b", "fence", mode="s", ticket=2, token=answer[1])
    assert (again[1], again[3]) == (answer[1], "c")


# -- held --------------------------------------------------------------------------------------------


async def test_held_extends_and_is_harmless_to_repeat(node: Node) -> None:
    token = await node.hold("a")
    await node.age("a", by=60_000)
    for _ in range(2):
        answer = await node.vote("a", "held", token=token)
        assert (int(answer[1]), answer[3]) == (token, "c")
        assert int(answer[2]) > 90_000


async def test_held_on_a_node_that_forgot_it_queues_again_and_takes_it_when_free(
    node: Node,
) -> None:
    answer = await node.vote("a", "held", token=77)
    assert (answer[0], answer[3]) == ("vote", "v"), "a vote of a free node, not yet confirmed"
    answer = await node.vote("a", "held", token=answer[1])
    assert answer[3] == "c"


async def test_held_does_not_push_another_out(node: Node) -> None:
    token = await node.hold("b", ticket=20)
    assert (await node.vote("a", "held", ticket=10, token=5))[0] == "waiting"
    assert await node.stages() == {"b": "c"}
    assert (await node.holders())["b"].token == token
    assert await node.line() == ["a"]


async def test_held_does_not_revive_an_overdue_lease(node: Node) -> None:
    token = await node.hold("a", length=10_000)
    await node.age("a", by=20_000)
    assert (await node.vote("a", "held", token=token))[:2] == ["gone", "expired"]
    assert (await node.vote("b", ticket=2))[0] == "vote"


async def test_held_raises_the_token_of_a_node_that_was_not_asked_to_fence(node: Node) -> None:
    own = int((await node.vote("a"))[1])
    larger = own + 5_000_000
    await node.vote("a", "held", token=larger, known=own)
    await node.unvote("a")
    assert int((await node.vote("b", ticket=2))[1]) > larger


async def test_held_confirms_no_vote_that_its_client_has_not_heard_of(node: Node) -> None:
    """Two extensions come when their client is dead, and its lease is over: the first one gets a vote."""
    late = await node.vote("a", "held", token=5)
    again = await node.vote("a", "held", token=5)
    assert (again[1], again[3]) == (late[1], "v")
    assert (await node.vote("a", "held", token=5, known=late[1]))[1:4:2] == ["5", "c"]


# -- leaving -----------------------------------------------------------------------------------------


async def test_leaving_hands_the_vote_to_the_oldest(node: Node, heard: Heard) -> None:
    await node.hold("a")
    await node.vote("c", ticket=3, client="of-c")
    await node.vote("b", ticket=2, client="of-b")
    await heard.notices()
    assert await node.unvote("a") == ["released"]
    assert ("of-b", "granted", "b") in await heard.notices()
    assert await node.unvote("c") == ["withdrawn"]
    assert await node.unvote("b") == ["released"]
    assert await node.all_keys() == {"token"}
    assert await node.unvote("b") == ["gone", "gone"]


@pytest.mark.parametrize("what", ["ask", "try", "fence", "held"])
async def test_late_duplicate_after_a_leave_with_a_marker_is_refused(node: Node, what: str) -> None:
    token = await node.hold("a")
    await node.unvote("a", late=True)
    assert (await node.vote("a", what, token=token))[:2] == ["gone", "gone"]
    assert await node.all_keys() == {"token", "marker:a"}


async def test_leave_that_overtakes_its_request_keeps_it_out(node: Node) -> None:
    assert await node.unvote("a", late=True) == ["gone", "gone"]
    assert (await node.vote("a"))[0] == "gone"
    assert (await node.vote("b", ticket=2))[0] == "vote"


# -- lock-delay --------------------------------------------------------------------------------------


async def test_lock_delay_is_for_those_alone_who_held(node: Node) -> None:
    await node.vote("a", delay=50_000, length=10_000)
    await node.age("a", by=20_000)
    assert (await node.vote("b", ticket=2))[0] == "vote", "a vote that was never confirmed"


async def test_lock_delay_after_a_confirmed_holder_keeps_the_name_closed(node: Node) -> None:
    await node.hold("a", delay=50_000, length=10_000)
    await node.age("a", by=20_000)
    word, _, look, _, _ = await node.vote("b", ticket=2)
    assert word == "waiting"
    assert 30_000 < int(look) <= 40_000
    assert await node.unvote("a", "lost") == ["gone", "expired"]
    assert (await node.vote("b", ticket=2))[0] == "waiting"
    await node.age("a", by=50_000)
    assert (await node.vote("b", ticket=2))[0] == "vote"


async def test_lock_delay_is_kept_when_the_holder_lost_it_while_the_node_had_it_still(
    node: Node,
) -> None:
    await node.hold("a", delay=50_000)
    assert await node.unvote("a", "lost") == ["gone", "expired"]
    assert (await node.vote("b", ticket=2))[0] == "waiting"


# -- owners and readers ------------------------------------------------------------------------------


async def test_named_owner_enters_again_with_its_token_past_all_who_wait(node: Node) -> None:
    token = await node.hold("a", owner="uowner")
    await node.vote("b", ticket=2)
    answer = await node.vote("a2", ticket=3, owner="uowner")
    assert (answer[0], int(answer[1]), answer[3]) == ("vote", token, "a")
    await node.unvote("a")
    assert set(await node.stages()) == {"a2"}, "the second hold keeps the name"
    await node.unvote("a2")
    assert set(await node.stages()) == {"b"}


async def test_unconfirmed_vote_of_its_owner_lets_nobody_in(node: Node) -> None:
    await node.vote("a", owner="uowner")
    assert (await node.vote("a2", ticket=2, owner="uowner"))[0] == "waiting"


async def test_owner_of_a_shared_hold_is_told_of_its_deadlock(node: Node) -> None:
    await node.hold("a", mode="s", owner="uowner")
    assert (await node.vote("a2", ticket=2, owner="uowner"))[0] == "deadlock"
    assert await node.line() == []


async def test_readers_enter_together_up_to_the_writer_that_waits(node: Node) -> None:
    await node.hold("w1", ticket=1)
    for id, mode, ticket in [("r1", "s", 2), ("w2", "x", 4), ("r2", "s", 3), ("r3", "s", 5)]:
        assert (await node.vote(id, mode=mode, ticket=ticket))[0] == "waiting"
    await node.unvote("w1")
    assert await node.stages() == {"r1": "v", "r2": "v"}
    assert await node.line() == ["w2", "r3"]


async def test_every_reader_in_the_way_of_an_older_writer_is_asked_back(
    node: Node, heard: Heard
) -> None:
    for number in (3, 4):
        await node.vote(f"r{number}", mode="s", ticket=number, client=f"of-r{number}")
    await node.vote("r1", mode="s", ticket=1, client="of-r1")
    await heard.notices()
    await node.vote("w", ticket=2)
    looks = {client for client, word, _ in await heard.notices() if word == "look"}
    assert looks == {"of-r3", "of-r4"}


# -- many wait ---------------------------------------------------------------------------------------
# Who asks then, and who leaves, is answered in a short way where that is plain. Here is also what is not.


async def test_try_leaves_no_place_also_when_many_wait(node: Node) -> None:
    await node.queue_behind("a", "b")
    assert (await node.vote("c", "try", ticket=3))[0] == "busy"
    assert await node.line() == ["b"]


async def test_fence_leaves_no_place_also_when_many_wait(node: Node) -> None:
    await node.queue_behind("a", "b")
    assert (await node.vote("c", "fence", ticket=3, token=9))[:2] == ["gone", "gone"]
    assert await node.line() == ["b"]


@pytest.mark.parametrize("leaving", ["a", "c"])
async def test_late_duplicate_is_refused_also_when_many_wait(node: Node, leaving: str) -> None:
    await node.queue_behind("a", "b", "c", "d")
    await node.unvote(leaving, late=True)
    assert (await node.vote(leaving, ticket=9))[:2] == ["gone", "gone"]
    assert leaving not in await node.line()


async def test_broken_hold_is_refused_also_when_many_wait(node: Node) -> None:
    token = await node.queue_behind("a", "b", "c", "d")
    await node.break_votes()
    assert await node.line() == ["c", "d"]
    for what in ("held", "fence"):
        assert (await node.vote("a", what, token=token))[:2] == ["gone", "broken"]
    assert await node.line() == ["c", "d"]


@pytest.mark.parametrize("key", ["state", "queue", "waiters"])
async def test_late_duplicate_is_refused_also_by_a_node_that_lost_a_key(
    node: Node, key: str
) -> None:
    await node.queue_behind("a", "b", "c")
    await node.unvote("c", late=True)
    await node.redis.delete(getattr(node.keys, key))
    assert (await node.vote("c", ticket=3))[:2] == ["gone", "gone"]


async def test_waiter_that_asks_for_less_keeps_its_deadline(node: Node) -> None:
    await node.queue_behind("a", "b", "c")
    before = await node.deadline_of_waiter("c")
    answer = await node.vote("c", ticket=3, length=10_000)
    assert int(answer[1]) > 90_000
    assert await node.deadline_of_waiter("c") >= before


async def test_newcomer_with_an_older_ticket_is_told_when_to_look(node: Node) -> None:
    await node.queue_behind("a", "c", "d")
    for ticket, id in [
        (2, "b"),
        (1, "e"),
    ]:  # the one has the ticket of the oldest, the other an older one
        word, _, look, *_ = await node.vote(id, ticket=ticket)
        assert word == "waiting"
        assert 90_000 < int(look) <= 100_000
    assert await node.line() == ["e", "b", "c", "d"]


async def test_newcomer_hands_an_overdue_vote_on(node: Node, heard: Heard) -> None:
    await node.queue_behind("a", "b")
    await node.age("a", by=200_000)
    await heard.notices()
    assert (await node.vote("c", ticket=3))[0] == "waiting"
    assert await node.stages() == {"b": "v"}
    assert ("of-b", "granted", "b") in await heard.notices()


async def test_newcomer_behind_a_dead_waiter_is_the_oldest(node: Node) -> None:
    await node.queue_behind("a", "b")
    await node.age("b", by=200_000)
    word, _, look, *_ = await node.vote("c", ticket=3)
    assert word == "waiting"
    assert 90_000 < int(look) <= 100_000
    assert await node.line() == ["c"]


async def test_newcomer_clamps_what_a_clock_set_back_has_stretched(node: Node) -> None:
    """The only vote, another of the same owner, and the oldest waiter."""
    await node.hold("a", owner="uowner")
    await node.vote("b", ticket=2)
    await node.set_clock_back("a", by=3_600_000)
    await node.vote("c", ticket=3)
    latest = await node.now() + 100_000
    assert (await node.holders())["a"].deadline <= latest
    await node.set_clock_back("b", by=3_600_000)
    await node.vote("d", ticket=4)
    assert await node.deadline_of_waiter("b") <= await node.now() + 100_000
    assert (await node.vote("a2", ticket=5, owner="uowner"))[0] == "vote"
    await node.set_clock_back("a2", by=3_600_000)
    await node.vote("e", ticket=6)
    assert (await node.holders())["a2"].deadline <= await node.now() + 100_000


async def test_newcomer_lets_in_a_reader_whose_writer_died(node: Node) -> None:
    await node.hold("r1", mode="s")
    await node.vote("w", ticket=3)
    await node.vote("r2", mode="s", ticket=4)
    await _die_unnoticed(node, "w")
    assert (await node.vote("r3", mode="s", ticket=5))[0] == "vote"
    assert set(await node.stages()) == {"r1", "r2", "r3"}


async def test_hold_that_ran_out_lets_its_owner_in_no_more(node: Node) -> None:
    """Its lock-delay keeps the name closed, for its own owner too."""
    await node.hold("a", owner="uowner", delay=50_000)
    await node.age("a", by=100_000)
    assert (await node.vote("a2", ticket=2, owner="uowner"))[0] == "waiting"


async def test_lock_delay_of_a_vote_by_owner_is_kept_when_its_owners_hold_is_over(
    node: Node,
) -> None:
    await node.hold("a", owner="uowner")
    assert (await node.vote("b", ticket=2, owner="uowner", delay=50_000))[3] == "a"
    await node.age("b", by=100_000)
    await node.unvote("a")
    assert (await node.vote("c", ticket=3))[0] == "waiting"


async def test_writer_that_waits_does_not_get_in_when_its_owner_comes_to_read(node: Node) -> None:
    await node.hold("a")
    await node.vote("reader", ticket=2, mode="s", owner="uowner")
    await node.vote("writer", ticket=3, owner="uowner")
    await node.unvote("a")
    token = (await node.holders())["reader"].token
    await node.vote("reader", "held", ticket=2, mode="s", owner="uowner", token=token)
    assert (await node.vote("writer", ticket=3, owner="uowner"))[0] == "waiting"
    assert set(await node.holders()) == {"reader"}


async def test_owner_that_writes_and_reads_may_write_again(node: Node) -> None:
    token = await node.hold("a", owner="uowner")
    await node.vote("b", ticket=2, mode="s", owner="uowner")
    await node.vote("b", "held", ticket=2, mode="s", owner="uowner", token=token)
    answer = await node.vote("c", ticket=3, owner="uowner")
    assert answer[:2] == ["vote", str(token)]


async def test_reader_that_waited_behind_a_writer_has_its_owners_token(node: Node) -> None:
    token = await node.hold("a", mode="s", owner="uowner")
    await node.vote("writer", ticket=2)
    await node.redis.zadd(node.keys.queue, {"reader": 3})
    text = (await node.redis.hget(node.keys.waiters, "writer")).replace("twriter", "uowner")
    await node.redis.hset(node.keys.waiters, "reader", text.replace("x 0", "s 0", 1))
    await node.unvote("writer")
    assert (await node.holders())["reader"].token == token


async def test_node_that_forgot_its_token_says_with_its_clock_which_are_stale(node: Node) -> None:
    await node.hold("a")
    await node.redis.delete(node.keys.token)
    answer = await node.vote("b", ticket=2)
    assert answer[0] == "waiting"
    assert int(answer[3]) == int(answer[4]) - 1


async def test_token_that_is_held_is_remembered_for_as_long_as_the_last_one(node: Node) -> None:
    token = await node.hold("a")
    await node.redis.pexpire(node.keys.token, 10 * RETENTION)
    await node.vote("a", "held", token=token + 1)
    assert await node.redis.pttl(node.keys.token) > 9 * RETENTION


async def test_inspect_passes_over_a_place_that_lost_its_record(node: Node) -> None:
    await node.hold("a")
    await node.vote("b", ticket=2)
    await node.redis.delete(node.keys.waiters, node.keys.token)
    assert (await node.seen())[0] == "0"
    assert (await node.seen())[3] == []


async def test_newcomer_lets_in_an_owner_that_holds_when_who_was_before_it_died(node: Node) -> None:
    await node.vote("a", owner="uowner")
    await node.vote("w", ticket=3)
    await node.vote("a2", ticket=4, owner="uowner")
    await node.vote("a", "fence", owner="uowner", token=(await node.holders())["a"].token)
    await _die_unnoticed(node, "w")
    assert (await node.vote("c", ticket=5))[0] == "waiting"
    assert await node.stages() == {"a": "c", "a2": "a"}


async def _die_unnoticed(node: Node, id: str) -> None:
    """Let the oldest waiter die; who tries and goes again drops it, and lets nobody else in."""
    await node.age(id, by=200_000)
    assert (await node.vote("t", "try", ticket=2))[0] == "busy"
    assert id not in await node.line()


async def test_place_of_a_newcomer_lives_as_long_as_it(node: Node) -> None:
    await node.queue_behind("a", "b", length=10_000)
    await node.vote("c", ticket=3, length=100_000)
    for key in (node.keys.queue, node.keys.waiters):
        assert await node.redis.pttl(key) > 90_000


async def test_last_reader_to_leave_leaves_no_record_of_one_that_died(node: Node) -> None:
    """It would be kept as long as the longest lease of any reader."""
    await node.hold("dead", mode="s")
    await node.hold("reader", mode="s", length=86_400_000)
    await node.age("dead", by=200_000)
    assert await node.unvote("reader") == ["released"]
    assert await node.all_keys() == {"token"}


async def test_overdue_holder_leaves_too_late_also_when_somebody_waits(node: Node) -> None:
    await node.hold("a", delay=50_000, length=10_000)
    await node.vote("b", ticket=2)
    await node.age("a", by=20_000)
    assert await node.unvote("a") == ["gone", "expired"]
    assert set(await node.stages()) == {"a"}
    assert await node.line() == ["b"]


async def test_lease_lost_early_keeps_its_lock_delay_also_when_somebody_waits(node: Node) -> None:
    await node.hold("a", delay=50_000)
    await node.vote("b", ticket=2)
    assert await node.unvote("a", "lost") == ["gone", "expired"]
    assert set(await node.stages()) == {"a"}


async def test_waiter_that_withdraws_hands_nothing_on(node: Node) -> None:
    await node.queue_behind("a", "b", "c")
    assert await node.unvote("c") == ["withdrawn"]
    assert await node.stages() == {"a": "c"}
    assert await node.line() == ["b"]


async def test_dead_waiter_behind_the_next_one_is_dropped(node: Node) -> None:
    await node.queue_behind("a", "b", "c", "d")
    await node.age("c", by=200_000)
    await node.unvote("a")
    assert await node.stages() == {"b": "v"}
    assert await node.line() == ["d"]


async def test_holder_whose_followers_lost_their_place_leaves_none(node: Node) -> None:
    """Whose queue is gone waits no more, nor does the one whose record is."""
    await node.queue_behind("a", "b", "c")
    await node.redis.delete(node.keys.queue)
    assert await node.unvote("a") == ["released"]
    assert await node.all_keys() == {"token"}
    await node.queue_behind("a", "b", "c")
    await node.redis.delete(node.keys.waiters)
    assert await node.unvote("a") == ["released"]
    assert await node.all_keys() == {"token"}


async def test_last_waiter_to_be_followed_leaves_no_record_of_those_whose_place_was_lost(
    node: Node,
) -> None:
    await node.queue_behind("a", "b", "c")
    await node.redis.delete(node.keys.queue)
    await node.vote("d", ticket=4)
    await node.unvote("a")
    assert await node.stages() == {"d": "v"}
    assert await node.all_keys() == {"state", "token"}


@pytest.mark.parametrize("id", ["b", "c"])
async def test_hand_off_clamps_what_a_clock_set_back_has_stretched(node: Node, id: str) -> None:
    await node.queue_behind("a", "b", "c")
    await node.set_clock_back(id, by=3_600_000)
    await node.unvote("a")
    latest = await node.now() + 100_000
    assert (await node.holders())["b"].deadline <= latest
    assert await node.deadline_of_waiter("c") <= latest


async def test_given_vote_keeps_the_deadline_its_waiter_had(node: Node) -> None:
    await node.queue_behind("a", "b", "c")
    await node.age("b", by=60_000)
    await node.unvote("a")
    assert (await node.holders())["b"].deadline <= await node.now() + 40_000
    assert 39_000 < await node.redis.pttl(node.keys.state) <= 40_002


async def test_hand_off_to_a_short_lease_hints_the_next_one_once(node: Node, heard: Heard) -> None:
    await node.hold("a")
    await node.vote("b", ticket=2, client="of-b", length=9_000)
    for ticket, id in enumerate("cd", 3):
        await node.vote(id, ticket=ticket, client=f"of-{id}", length=90_000)
    await heard.notices()
    await node.unvote("a")
    assert await heard.notices() == [("of-b", "granted", "b"), ("of-c", "look", "c")]


async def test_hand_off_hints_nobody_who_asks_soon_enough(node: Node, heard: Heard) -> None:
    await node.queue_behind("a", "b", "c")
    await heard.notices()
    await node.unvote("a")
    assert await heard.notices() == [("of-b", "granted", "b")]


@pytest.mark.stores("valkey9", "redis62", "redis70")
async def test_state_key_never_vanishes_in_a_hand_off(node: Node, store: Store) -> None:
    await store.notifications(True)
    events = await Heard.on(await store.raw(), f"__keyspace@0__:{node.keys.state}")
    await node.queue_behind("a", "b", "c")
    await node.unvote("a")
    await node.unvote("b")
    assert "del" not in [event for _, event in await events.so_far()]
    await node.unvote("c")
    assert "del" in [event for _, event in await events.so_far()], "and the last one is heard"
    await events.aclose()


# -- for people --------------------------------------------------------------------------------------


async def test_break_releases_those_that_hold_and_no_others(node: Node, heard: Heard) -> None:
    await node.hold("a", delay=50_000, client="of-a")
    await node.vote("b", ticket=2, client="of-b")
    await heard.notices()
    assert await node.break_votes() == ["a"]
    said = await heard.notices()
    assert ("of-a", "broken", "a") in said
    assert ("of-b", "granted", "b") in said
    assert await node.stages() == {"b": "v"}
    assert (await node.vote("a", "held", token=9))[:2] == ["gone", "broken"]
    assert await node.unvote("a") == ["gone", "broken"]
    assert await node.break_votes() == [], "a vote is not a hold"
    assert await node.stages() == {"b": "v"}


async def test_break_releases_who_may_hold_by_a_wanted_token(node: Node, heard: Heard) -> None:
    wanted = await node.hold("a") + 1
    await node.vote("b", ticket=2, client="of-b")
    await node.unvote("a", token=wanted)
    await heard.notices()
    assert await node.break_votes() == ["b"]
    assert ("of-b", "broken", "b") in await heard.notices()
    assert (await node.vote("b", "held", ticket=2, token=wanted))[:2] == ["gone", "broken"]


async def test_waiter_whose_vote_was_broken_waits_on_in_its_place(node: Node) -> None:
    """It may have been a holder, which only its client knows; and who asks says that it is none."""
    wanted = await node.queue_behind("a", "b", "c", "d") + 1
    await node.unvote("a", token=wanted)
    assert await node.break_votes() == ["b"]
    assert (await node.vote("b", ticket=2))[0] == "waiting"
    assert await node.line() == ["b", "d"]
    await node.unvote("c")
    token = int((await node.vote("b", ticket=2))[1])
    assert token > wanted
    assert (await node.vote("b", "held", ticket=2, token=wanted))[:2] == ["gone", "broken"]
    assert (await node.vote("b", "fence", ticket=2, token=token))[3] == "c"
    assert (await node.vote("b", "held", ticket=2, token=token))[3] == "c"


async def test_inspect_tells_votes_with_their_stages_and_waiters_in_order(node: Node) -> None:
    token = await node.hold("a", client="of-a", ticket=7)
    await node.vote("c", ticket=9, owner="uc")
    await node.vote("b", mode="s", ticket=8)
    before = await node.contents()
    last, closed, votes, waiters, _ = await node.seen()
    assert (int(last), int(closed)) == (token, 0)
    left = int(votes.pop(4))
    assert votes == ["a", "ta", "x", str(token), "of-a", "c", "7", "", "100000"]
    assert 90_000 < left <= 100_000
    assert waiters == ["b", "tb", "s", "client", "8", "", "c", "uc", "x", "client", "9", ""]
    assert await node.contents() == before


async def test_inspect_tells_for_how_long_lock_delay_keeps_the_name_closed(node: Node) -> None:
    await node.hold("a", delay=50_000, length=10_000)
    await node.age("a", by=20_000)
    _, closed, votes, _, _ = await node.seen()
    assert votes == []
    assert 30_000 < int(closed) <= 40_000


# -- a node in want ----------------------------------------------------------------------------------


@pytest.mark.stores("valkey9")
async def test_node_out_of_memory_keeps_extends_and_releases_its_holders(
    node: Node, store: Store
) -> None:
    token = await node.hold("a")
    raw = await store.raw()
    await raw.config_set("maxmemory", "1")
    assert (await node.vote("a", "held", token=token))[3] == "c"
    with pytest.raises(OutOfMemoryError):
        await node.vote("b", ticket=2)
    assert await node.unvote("a") == ["released"]


@pytest.mark.stores("valkey9")
async def test_node_out_of_memory_hands_its_vote_on(node: Node, store: Store) -> None:
    await node.queue_behind("a", "b", "c")
    raw = await store.raw()
    await raw.config_set("maxmemory", "1")
    assert await node.unvote("a") == ["released"]
    assert await node.stages() == {"b": "v"}
    assert await node.line() == ["c"]


@pytest.mark.stores("valkey9")
async def test_node_out_of_memory_takes_back_who_holds_and_extends_who_waits(
    node: Node, store: Store
) -> None:
    await node.queue_behind("a", "b", "c")
    raw = await store.raw()
    await raw.config_set("maxmemory", "1")
    assert (await node.vote("c", ticket=3))[0] == "waiting"
    assert (await node.vote("holds-elsewhere", "held", ticket=4, token=9))[0] == "waiting"
    with pytest.raises(OutOfMemoryError):
        await node.vote("d", ticket=5)


async def test_clock_that_was_set_back_does_not_make_a_vote_last(node: Node) -> None:
    await node.hold("a", length=10_000)
    await node.set_clock_back("a", by=3_600_000)
    answer = await node.vote("b", ticket=2)
    assert answer[0] == "waiting"
    assert int(answer[2]) <= 10_000


# -- votes by owner ----------------------------------------------------------------------------------


async def test_vote_by_owner_can_be_asked_back_when_its_owners_hold_is_over(
    node: Node, heard: Heard
) -> None:
    await node.hold("a", owner="uann")
    await node.vote("other", ticket=2)
    by_owner = await node.vote("b", ticket=3, owner="uann", client="of-b")
    assert by_owner[3] == "a"
    await heard.notices()
    await node.unvote("a")
    assert await node.stages() == {"b": "v"}
    answer = await node.vote("b", ticket=3, owner="uann", client="of-b")
    assert int(answer[1]) > int(by_owner[1]), "a token of its own, which a yield can mean"
    assert answer[3:5] == ["v", "1"], "it is asked back"
    await node.vote("other", ticket=2)
    assert ("of-b", "look", "b") in await heard.notices()
    await node.unvote("b", "yield", token=answer[1])
    assert await node.stages() == {"other": "v"}


async def test_vote_by_owner_stays_one_when_its_client_asks_again(node: Node) -> None:
    token = await node.hold("a", owner="uann")
    await node.vote("b", ticket=2, owner="uann")
    assert (await node.vote("b", ticket=2, owner="uann", token=token + 1))[3] == "a"


async def test_vote_by_owner_stays_one_while_its_owner_holds_and_nobody_waits(node: Node) -> None:
    """Then the scripts look at it alone: they must not take its owner's hold for over."""
    token = await node.hold("a", owner="uann")
    asked: dict[str, Any] = {"ticket": 2, "owner": "uann", "delay": 100_000}
    await node.vote("b", **asked)
    late = await node.vote("b", "fence", token=token - 1, **asked)
    assert late[1:4:2] == [str(token), "a"]
    others = [f"b{number}" for number in range(8)]  # of a few votes, all are looked at
    for id in others:
        await node.vote(id, **asked)
    assert await node.unvote("b", "lost") == ["gone", "expired"]
    by_owner = dict.fromkeys(["b", *others], "a")
    assert await node.stages() == {"a": "c", **by_owner}, "its lock-delay is kept"


async def test_vote_by_owner_rests_on_no_other_vote_by_owner(node: Node) -> None:
    await node.hold("a", owner="uann")
    await node.vote("b", ticket=2, owner="uann")
    await node.unvote("a")
    assert (await node.vote("c", ticket=3, owner="uann"))[0] == "waiting"


async def test_vote_by_owner_is_confirmed_by_who_has_heard_of_it(node: Node) -> None:
    """Else it is a message from before the owner's hold was over here: another may have held since."""
    token = await node.hold("a", owner="uann")
    await node.vote("b", ticket=2, owner="uann")
    await node.unvote("a")
    await node.vote("c", ticket=3)
    answer = await node.vote("b", "held", ticket=2, owner="uann", token=token, known=token)
    assert answer[3] == "v"
    answer = await node.vote("b", "held", ticket=2, owner="uann", token=token, known=answer[1])
    assert answer[1:4:2] == [str(token), "c"]


# -- tickets -----------------------------------------------------------------------------------------


async def test_ticket_from_a_nodes_future_is_told_to_those_who_come_later(node: Node) -> None:
    await node.hold("a")
    second, minute = 1_000_000, 60_000_000
    clock = int((await node.vote("b", ticket=1))[-1])
    usual = await node.vote("c", ticket=clock + second // 2)
    assert int(usual[3]) < clock, "the last token"
    ahead = clock + minute
    for id in ("d", "d"):
        assert int((await node.vote(id, ticket=ahead))[3]) == ahead
    assert int((await node.vote("e", ticket=clock))[3]) == ahead, "by the short way, too"
    await node.unvote("a")
    assert int((await node.vote("b", ticket=1))[1]) > ahead, "tokens stay larger than floors"


async def test_later_ticket_counts_and_an_earlier_one_does_not(node: Node) -> None:
    await node.queue_behind("a", "b", "c")
    await node.vote("b", ticket=9)
    assert await node.line() == ["c", "b"]
    await node.vote("b", ticket=2)
    assert await node.line() == ["c", "b"], "a late duplicate"


async def test_vote_whose_ticket_became_later_is_asked_back(node: Node) -> None:
    await node.vote("a", ticket=1)
    assert (await node.vote("b", ticket=2))[0] == "waiting"
    assert (await node.vote("a", ticket=3))[3:5] == ["v", "1"]


async def test_equal_tickets_are_told_apart_by_the_bytes_of_ids(node: Node) -> None:
    """As the sorted set does; a locale may have another order."""
    await node.vote("B", ticket=1)
    assert (await node.vote("a", ticket=1))[0] == "waiting"
    assert (await node.vote("B", ticket=1))[4] == "0"
    await node.vote("A", ticket=1)
    assert await node.line() == ["A", "a"]
    assert (await node.vote("B", ticket=1))[4] == "1"
    await node.vote("Aé", ticket=1)
    assert await node.line() == ["A", "Aé", "a"]


async def test_question_opens_a_vote_that_was_confirmed_with_a_token_that_it_names(
    node: Node,
) -> None:
    """A late one was sent on a connection that its client gave up, before the token was written."""
    token = await node.hold("a", delay=5000)
    for renounced in (0, token - 1):
        late = await node.vote("a", delay=5000, token=renounced)
        assert late[3] == "c", "its lock-delay and a break by an operator count on that"
    assert (await node.vote("a", delay=5000, token=token))[3] == "v"
