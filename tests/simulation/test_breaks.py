"""What the checkers of a quorum excuse when an operator breaks: what a client cannot know, and no more."""

from __future__ import annotations

from aiodlock.backends.redis.scripts import VOTE

from .breaks import Breaks
from .server import Command

ID, TOKEN = "p0.1-1", 7


def vote(id: str = ID) -> Command:
    return Command([b"EVAL", VOTE.source, b"1", b"aiodlock:2:lock:{n}:state", id.encode()])


def broken_at(*nodes: int) -> Breaks:
    breaks = Breaks()
    for node in nodes:
        breaks.broke(node, ID, TOKEN)
    return breaks


def test_break_is_on_its_way_where_that_token_of_that_request_was_broken() -> None:
    breaks = broken_at(0, 2)
    assert breaks.on_their_way(ID, TOKEN) == {0, 2}
    assert not breaks.on_their_way(ID, TOKEN + 1)
    assert not breaks.on_their_way(ID, TOKEN - 1)
    assert not breaks.on_their_way("p0.1-2", TOKEN)


def test_break_is_known_when_one_node_has_told_of_that_token_or_of_a_larger_one() -> None:
    for token, known in ((TOKEN - 1, False), (TOKEN, True), (TOKEN + 1, True)):
        breaks = broken_at(0, 2)
        breaks.noticed(1, ID, token)
        assert breaks.on_their_way(ID, TOKEN) == (set() if known else {0, 2})


def test_of_the_token_of_its_owner_a_client_hears_by_that_very_token() -> None:
    for token, known in ((TOKEN - 1, False), (TOKEN, True), (TOKEN + 1, False)):
        breaks = broken_at(0, 2)
        breaks.noticed(1, ID, token)
        on_their_way = breaks.on_their_way(ID, TOKEN, of_owner=True)
        assert on_their_way == (set() if known else {0, 2})


def test_what_a_node_told_before_it_forgot_does_not_count() -> None:
    breaks = broken_at(0, 2)
    breaks.noticed(1, ID, TOKEN + 1)
    breaks.forgot(0)
    assert not breaks.on_their_way(ID, TOKEN)
    breaks.forgot(1)
    assert breaks.on_their_way(ID, TOKEN) == {0, 2}


def test_answer_to_what_was_asked_after_the_break_tells_that_this_node_votes_no_more() -> None:
    breaks, before, after, other = Breaks(), vote(), vote(), vote("p0.1-2")
    breaks.executed(0, before)
    breaks.broke(0, ID, TOKEN)
    breaks.broke(2, ID, TOKEN)
    breaks.executed(0, after)
    breaks.executed(0, other)
    breaks.answered(before)
    breaks.answered(other)
    assert breaks.on_their_way(ID, TOKEN) == {0, 2}
    breaks.answered(after)
    assert breaks.on_their_way(ID, TOKEN) == {2}
