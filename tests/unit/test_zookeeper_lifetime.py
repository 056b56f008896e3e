"""Until when a session certainly lives: what proves what."""

from __future__ import annotations

import pytest

from aiodlock._clock import local_deadline
from aiodlock.backends.zookeeper.lifetime import Lifetime

TICK = 2.0
TIMEOUT = 30_000


def _attached(sent: float = 0.5) -> Lifetime:
    lifetime = Lifetime(TICK)
    lifetime.attached(sent, TIMEOUT)
    return lifetime


def test_nothing_is_certain_before_a_write_is_committed() -> None:
    assert _attached().deadline == 0.0


def test_new_connection_counts_once_a_write_is_committed_on_it() -> None:
    lifetime = _attached(sent=0.5)
    lifetime.committed(0.6, 0.7)
    assert lifetime.deadline == local_deadline(0.5, TIMEOUT)


def test_write_alone_or_two_prove_nothing() -> None:
    lifetime = _attached(sent=0.5)
    for moment in (1.0, 1.1, 1.2, 2.4):
        lifetime.committed(moment, moment + 0.05)
    assert lifetime.deadline == local_deadline(0.5, TIMEOUT)


def test_third_write_proves_the_first_when_the_leader_has_asked_in_between() -> None:
    lifetime = _attached(sent=0.5)
    lifetime.committed(1.0, 1.1)
    lifetime.committed(2.7, 2.8)  # more than 0.75 ticks after the answer
    assert lifetime.deadline == local_deadline(0.5, TIMEOUT)
    lifetime.committed(2.8, 2.9)
    assert lifetime.deadline == local_deadline(1.0, TIMEOUT)


def test_third_write_that_was_sent_before_the_second_was_answered_proves_nothing() -> None:
    lifetime = _attached(sent=0.5)
    lifetime.committed(1.0, 1.1)
    lifetime.committed(2.7, 2.9)
    lifetime.committed(2.8, 3.0)
    assert lifetime.deadline == local_deadline(0.5, TIMEOUT)


def test_chain_begins_again_with_a_new_connection() -> None:
    lifetime = _attached(sent=0.5)
    lifetime.committed(1.0, 1.1)
    lifetime.committed(2.7, 2.8)
    lifetime.attached(2.9, TIMEOUT)
    lifetime.committed(3.0, 3.1)
    assert lifetime.deadline == local_deadline(2.9, TIMEOUT)
    lifetime.committed(3.2, 3.3)
    assert lifetime.deadline == local_deadline(2.9, TIMEOUT)


@pytest.mark.parametrize("beat", [0.01, 0.3, 1.0, 3.75])
def test_deadline_follows_within_three_beats_and_a_gap(beat: float) -> None:
    lifetime = _attached(sent=0.5)
    moment = 1.0
    while moment < 60.0:
        lifetime.committed(moment, moment + 0.001)
        moment += beat
        lag = moment - (lifetime.deadline - (local_deadline(0.0, TIMEOUT)))
        if moment > 10.0 + 4 * beat:
            assert lag <= 0.75 * TICK * 1.2 + 4 * beat


def test_deadline_never_comes_nearer() -> None:
    lifetime = _attached(sent=5.0)
    lifetime.committed(5.1, 5.2)
    before = lifetime.deadline
    lifetime.attached(5.3, 4_000)
    lifetime.committed(5.4, 5.5)
    assert lifetime.deadline == before
