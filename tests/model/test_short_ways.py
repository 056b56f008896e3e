"""The short ways of the scripts, held against the general ones behind them.

The same history runs on two nodes, of which one takes no short way; nobody can tell them apart.

``AIODLOCK_MODEL_STEPS`` sets how many steps are taken, about (default 2,000).
"""

from __future__ import annotations

from typing import ClassVar

import pytest

from aiodlock.backends.redis import scripts
from aiodlock.backends.redis.scripts import Script

from ..protocol.test_guards import SHORT_WAYS, SHORT_WAYS_OF_A_QUORUM, Mutation
from .pairs import KEYS, OPTIONS, Pair, Request, Sources, Words, hold_against_each_other
from .test_scripts import STEPS

#: How many steps are taken at the most to notice a missing condition.
BUDGET = 15_000


def _with(script: Script, *changes: tuple[str, str]) -> Sources:
    source = script.source.decode()
    for old, new in changes:
        assert source.count(old) == 1, f"this is not in the script any more: {old}"
        source = source.replace(old, new)
    return {script.name: source}


def _told(way: str, answer: str) -> tuple[str, str]:
    """Return a change: a message that no client hears, in front of a way's answer."""
    return answer, f"redis.call('PUBLISH', 'test', 'short - {way} -') {answer}"


class OneServer(Pair):
    """What acquire and leave answer, whatever extend and break have done in between."""

    words = Words(
        modes=(*["xxxxs"] * 6, ("s3",), ("s1", "s1", "s1", "s2")),
        asked=("wait", "wait", "wait", "wait", "nowait"),
        asked_again=("wait", "wait", "extend", "extend", "nowait"),
        heard="extend",
        left=("ended", "ended", "ended", "ended", "lost"),
    )
    general: ClassVar[Sources] = {
        **_with(
            scripts.ACQUIRE,
            ("if present == 0 and how == '' then", "if false then"),
            ("if present == 3 then", "if false then"),
        ),
        **_with(
            scripts.LEAVE,
            ("if quiet and ARGV[5] == '0'", "if false and ARGV[5] == '0'"),
            ("if not quiet and ARGV[5] == '0'", "if false and ARGV[5] == '0'"),
        ),
    }
    telling: ClassVar[Sources] = {
        **_with(
            scripts.ACQUIRE,
            _told("grant", "return 'granted ' .. token"),
            _told("queue", "return ARGV[11] == 'nowait' and 'busy' or queue_up('-1')"),
        ),
        **_with(
            scripts.LEAVE,
            _told("release", "redis.call('HDEL', state, id)\n    return 'released'\n  end\nend\n"),
            _told("hand-off", "return own and 'released ' .. "),
        ),
    }
    breaks = scripts.BREAK

    def ask(self, request: Request, what: str, length: int, token: int) -> None:
        id, owner = request.id, request.owner
        if what == "extend":
            self.call(scripts.EXTEND, [*KEYS[:4], KEYS.broken], id, length, owner, *OPTIONS)
            return
        # Two lengths, so that they are told apart.
        about = (id, request.mode, owner, length, length + 2_000, request.delay, request.client)
        self.call(scripts.ACQUIRE, [*KEYS[:4], KEYS.marker + id], *about, *OPTIONS, what, "", "")

    def leave(self, id: str, what: str, marker: int, token: int, ahead: int) -> None:
        keys = [*KEYS[:4], KEYS.marker + id, KEYS.broken]
        self.call(scripts.LEAVE, keys, id, *OPTIONS, marker, what)


class NodeOfAQuorum(Pair):
    """What vote and unvote answer."""

    words = Words(
        modes=("xxxxs",),
        asked=("ask", "ask", "ask", "ask", "try"),
        asked_again=("ask", "ask", "ask", "fence", "fence", "held"),
        heard="ask",
        left=("ended", "ended", "ended", "ended", "lost", "yield"),
    )
    general: ClassVar[Sources] = {
        **_with(scripts.VOTE, ("if what == 'ask' and redis.call(", "if false and redis.call(")),
        **_with(
            scripts.UNVOTE,
            ("if is_queue and what == 'ended' and ARGV[3] == '0' then", "if false then"),
        ),
    }
    telling: ClassVar[Sources] = {
        **_with(scripts.VOTE, _told("vote", "return {'waiting', ARGV[4], ")),
        **_with(scripts.UNVOTE, _told("unvote", "return {'released'}")),
    }
    breaks = scripts.BREAK_VOTES

    def ask(self, request: Request, what: str, length: int, token: int) -> None:
        id, mode, owner = request.id, request.mode, request.owner
        about = (id, mode, owner, length, request.delay, request.client, request.ticket)
        named = 0 if what == "try" else token
        known = token if what == "held" else 0
        self.call(scripts.VOTE, self._six(id), *about, what, named, *OPTIONS, "", known)

    def leave(self, id: str, what: str, marker: int, token: int, ahead: int) -> None:
        if what == "yield":
            about = (what, 0, max(0, token + ahead))
        else:
            about = (what, marker, max(0, self.last_token() + ahead))
        self.call(scripts.UNVOTE, self._six(id), id, *about, *OPTIONS)

    @staticmethod
    def _six(id: str) -> list[str]:
        return [*KEYS[:4], KEYS.marker + id, KEYS.broken]


def test_short_ways_of_a_server_answer_and_write_and_say_what_the_general_ones_do() -> None:
    taken = hold_against_each_other(OneServer, OneServer.telling, STEPS)
    for way in ("grant", "queue", "release", "hand-off"):
        assert taken[way] > taken["steps"] / 200, way


def test_so_do_those_of_a_quorums_node() -> None:
    taken = hold_against_each_other(NodeOfAQuorum, NodeOfAQuorum.telling, STEPS)
    assert taken["vote"] > taken["steps"] / 20
    assert taken["unvote"] > taken["steps"] / 50


CONDITIONS = [
    *((OneServer, mutation) for mutation in SHORT_WAYS),
    *((NodeOfAQuorum, mutation) for mutation in SHORT_WAYS_OF_A_QUORUM),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("pair", "mutation"),
    [(pair, mutation) for pair, mutation in CONDITIONS if not mutation.rare],
    ids=lambda value: value.guard if isinstance(value, Mutation) else value.__name__,
)
def test_condition_of_a_short_way_taken_out_is_noticed(
    pair: type[Pair], mutation: Mutation
) -> None:
    # TypeError: what the simulated server says of a command that a real one refuses.
    with pytest.raises((AssertionError, TypeError)):
        hold_against_each_other(pair, mutation.sources(), BUDGET)
