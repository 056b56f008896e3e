"""What follows from the answers of a quorum's nodes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from aiodlock import BackendError
from aiodlock._clock import now
from aiodlock._model import Gone, StoreRequest, Terms
from aiodlock.backends.redis.quorum.broadcast import Broadcast
from aiodlock.backends.redis.quorum.notices import NodeNotices
from aiodlock.backends.redis.quorum.votes import Answer, Ballot, Queued, Tally, Voted, read_answer


def voted(token: int, stage: str = "v", *, lasting: float = 60.0) -> Voted:
    return Voted(token, now() + lasting, stage, False)  # type: ignore[arg-type]


def counts(ballot: Ballot) -> bool:
    return ballot.counts_at(now())


def test_vote_counts_while_its_lease_lasts() -> None:
    ballot = Ballot(0)
    assert not counts(ballot)
    ballot.take(voted(5))
    assert counts(ballot)
    overdue = Ballot(1)
    overdue.take(voted(5, lasting=-1.0))
    assert not counts(overdue)


def test_vote_that_was_given_back_does_not_count_whatever_late_answers_say() -> None:
    ballot = Ballot(0)
    ballot.take(voted(5))
    ballot.given_back = 5
    assert not counts(ballot)
    ballot.take(voted(5))
    assert not counts(ballot)
    ballot.notice(5)
    assert not counts(ballot)
    ballot.take(voted(6))
    assert counts(ballot), "a new vote"


def test_answer_that_a_notice_has_overtaken_does_not_take_the_vote_away() -> None:
    ballot = Ballot(0)
    ballot.take(Queued(now() + 60, None, 5))
    ballot.notice(7)
    ballot.take(Queued(now() + 60, None, 6))
    assert counts(ballot)
    assert ballot.token == 7
    ballot.take(Queued(now() + 60, None, 7))
    assert not counts(ballot), "that vote was over when the node said so"


def test_answer_takes_a_vote_away_that_an_answer_gave_whatever_the_tokens_say() -> None:
    """A node that came back empty begins with its own clock, which may be behind the token."""
    ballot = Ballot(0)
    ballot.take(voted(60_000_000, "c"))
    ballot.take(Queued(now() + 60, None, 5))
    assert ballot.stage == "q"
    assert not counts(ballot)
    noticed = Ballot(1)
    noticed.take(Queued(now() + 60, None, 5))
    noticed.notice(60_000_000)
    noticed.take(voted(60_000_000))
    noticed.take(Queued(now() + 60, None, 6))
    assert not counts(noticed), "an answer has told of the vote by then"


def test_nothing_is_left_of_what_a_node_said_before_it_was_restarted() -> None:
    ballot = Ballot(0)
    ballot.take(Queued(now() + 60, None, 60_000_000))
    ballot.notice(60_000_001)
    ballot.given_back = 60_000_000
    ballot.restarted()
    assert (ballot.stage, ballot.deadline) == (None, 0.0)
    ballot.take(Queued(now() + 60, None, 5))
    ballot.notice(6)
    assert counts(ballot), "its clock is slower than the old one's"


def test_broken_vote_does_not_count_and_its_notice_is_stale() -> None:
    ballot = Ballot(0)
    ballot.take(Queued(now() + 60, None, 5))
    ballot.notice(7)
    ballot.lose(7)
    assert not counts(ballot)
    ballot.notice(7)
    assert not counts(ballot)
    ballot.take(voted(7, "c"))
    assert not counts(ballot), "the break has overtaken this answer"
    ballot.take(Queued(now() + 60, None, 7))
    ballot.notice(8)
    assert counts(ballot), "it has queued again, and has another vote"


def test_notice_that_an_answer_has_overtaken_gives_no_vote() -> None:
    ballot = Ballot(0)
    ballot.take(Queued(now() + 60, None, 7))
    ballot.notice(7)
    assert not counts(ballot)
    ballot.notice(8)
    assert counts(ballot)


def tally_of(tokens: list[int], *, owner: str = "tr", lock_delay: float = 0.0) -> Tally:
    terms = Terms("lock", "name", "exclusive", 0, 10.0, 10.0, lock_delay, 0.0, None, True)
    request = StoreRequest("r", terms, owner)
    tally = Tally(request, 1, 5)
    for ballot, token in zip(tally.ballots, tokens, strict=False):
        ballot.take(Queued(now() + 10, None, 3))
        ballot.notice(token)
    return tally


def agreed(tally: Tally) -> list[int]:
    return [vote.token for vote in tally.agreed(tally.votes(lambda node: True))]


def test_majority_that_gave_the_same_token_is_agreed() -> None:
    assert agreed(tally_of([7, 7, 7])) == [7, 7, 7]
    assert agreed(tally_of([8, 7, 9, 7, 7])) == [7, 7, 7]
    assert agreed(tally_of([7, 7, 8])) == []
    assert agreed(tally_of([7, 7])) == []
    assert agreed(tally_of([8, 9, 7, 7, 6])) == []


def test_token_that_a_question_has_named_is_not_held_with() -> None:
    """Whenever that question arrives, it opens what was confirmed with the token."""
    tally = tally_of([7, 7, 7])
    tally.fence.renounced = 7
    assert agreed(tally) == []
    assert tally.least_token == 8
    tally.ballots[0].lose(9)
    assert tally.least_token == 10


def test_votes_are_not_agreed_once_one_of_them_was_broken() -> None:
    tally = tally_of([7, 7, 7, 7])
    tally.ballots[0].lose(7)
    assert agreed(tally) == [], "the operator breaks it at the other nodes too"
    assert agreed(tally_of([8, 8, 8, 7])) == [8, 8, 8]
    later = tally_of([8, 8, 8, 7])
    later.ballots[3].lose(7)
    assert agreed(later) == [8, 8, 8], "an older token was broken"


def test_what_was_broken_at_any_node_is_known() -> None:
    tally = tally_of([7, 7, 7])
    assert tally.broken == 0
    tally.ballots[1].lose(7)
    assert tally.broken == 7


def test_token_of_the_owner_is_not_held_with_once_a_vote_with_it_was_broken() -> None:
    """What was broken with another token, larger or not, is no news of the owner's hold."""
    for broken, token in ((6, 7), (7, 0), (8, 7)):
        tally = tally_of([7, 7, 7, 7])
        tally.ballots[3].lose(broken)
        counting = tally.ballots[:3]
        for ballot in counting:
            ballot.take(voted(7, "a"))
        assert tally.token_of_owner(counting) == token


def test_votes_are_not_agreed_where_others_have_to_be_told_first() -> None:
    assert agreed(tally_of([7, 7, 7], owner="umine")) == []
    assert agreed(tally_of([7, 7, 7], lock_delay=1.0)) == []


def test_token_for_who_comes_next_is_larger_than_all_that_nodes_told() -> None:
    tally = tally_of([])
    assert tally.next_token == 0
    tally.ballots[1].notice(9)
    tally.ballots[0].take(voted(5, "c"))
    tally.ballots[1].take(Gone("expired"))
    assert tally.next_token == 10


def test_node_that_says_gone_does_not_count() -> None:
    ballot = Ballot(0)
    ballot.take(voted(5, "c"))
    ballot.take(Gone("expired"))
    assert not counts(ballot)
    assert ballot.deadline == 0


@pytest.mark.parametrize(
    "reply",
    [
        None,
        [],
        [b"vote"],
        [b"vote", b"x", 1, b"v", b"0", b"1"],
        [b"vote", b"1", 1, b"z", b"0", b"1"],
        [b"gone", b"nonsense", b"1"],
        [b"busy"],
        [b"waiting", b"1000", b"-1", b"1", b"9" * 400],
    ],
)
def test_answers_of_the_wrong_shape_are_refused(reply: object) -> None:
    with pytest.raises(BackendError, match="wrong shape"):
        read_answer(reply, now())


async def test_round_settles_a_moment_after_a_majority_has_answered() -> None:
    round = Broadcast[Answer](3, 2, lambda _: False, grace=0.01)
    round.take(0, voted(1))
    await asyncio.sleep(0.03)
    assert not round.settled.done()
    round.take(1, voted(1))
    assert not round.settled.done()
    await asyncio.wait_for(round.settled, 5)
    round.take(2, voted(1))
    assert set(round.answers) == {0, 1, 2}, "one that is late is noted"


async def test_round_settles_at_once_when_the_answers_suffice_or_all_are_in() -> None:
    enough = Broadcast[Answer](3, 2, lambda _: True, grace=60.0)
    enough.take(0, voted(1))
    assert enough.settled.done()
    everything = Broadcast[Answer](2, 2, lambda _: False, grace=60.0)
    everything.take(0, OSError())
    everything.take(1, OSError())
    assert everything.settled.done()
    assert len(everything.failures) == 2


def test_late_notice_of_a_lost_lease_gives_no_vote_back() -> None:
    """The vote closes the name for its lock-delay at this node. A larger token is another grant."""
    given_back: list[Any] = []
    listener: Any = SimpleNamespace(was_lost=lambda request_id, token: token <= 7)
    requests: Any = SimpleNamespace(get=lambda request_id: None, listener=listener)
    leaving: Any = SimpleNamespace(
        leave_unknown_soon=lambda voter, id, where: given_back.append(id)
    )
    nothing: Any = None
    notices = NodeNotices(nothing, requests, nothing, leaving)
    for token in (6, 7, 8):
        notices.on_granted(f"p{token}", token, "lock:name")
    assert given_back == ["p8"]
