"""How long an answer may take is learned from the answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodlock._patience import LEAST, LONGEST, Further, Patience, soon


def test_patience_is_the_least_before_anything_was_answered() -> None:
    assert Patience().learned == LEAST


def test_patience_stays_at_the_floor_while_answers_are_quick() -> None:
    patience = Patience()
    for _ in range(100):
        patience.answered(0.001)
    assert patience.learned == LEAST


def test_late_answers_are_samples() -> None:
    patience = Patience()
    patience.answered(0.001)
    patience.ran_out()
    patience.answered(3.0)
    assert patience.learned > 3.0


def test_patience_doubles_while_nothing_comes_in_time() -> None:
    patience = Patience()
    patience.ran_out()
    assert patience.learned == 2 * LEAST
    patience.ran_out()
    assert patience.learned == 4 * LEAST


def test_patience_shrinks_again_when_the_store_is_quick_again() -> None:
    patience = Patience()
    for _ in range(50):
        patience.answered(3.0)
    for _ in range(100):
        patience.answered(0.01)
    assert patience.learned == LEAST


def test_store_that_becomes_quick_does_not_seem_slower_first() -> None:
    patience = Patience()
    for _ in range(50):
        patience.answered(4.0)
    slow = patience.expected
    for _ in range(8):
        patience.answered(0.01)
        assert patience.expected <= slow
    assert patience.expected < 2.5


@pytest.mark.parametrize(
    ("lease", "expected"), [(None, 8.0), (60.0, 8.0), (15.0, 5.0), (3.0, LEAST), (0.05, LEAST)]
)
def test_a_lease_allows_a_third_of_it_and_the_floor_wins(
    lease: float | None, expected: float
) -> None:
    patience = Patience()
    for _ in range(3):
        patience.ran_out()
    assert patience.within(lease) == expected


@given(st.lists(st.one_of(st.none(), st.floats(0.0, 100.0)), max_size=200))
def test_patience_stays_between_its_bounds(answers: list[float | None]) -> None:
    patience = Patience()
    for took in answers:
        if took is None:
            patience.ran_out()
        else:
            patience.answered(took)
        assert LEAST <= patience.learned <= LONGEST


@given(st.floats(1.0, 10.0), st.integers(20, 200))
def test_an_answer_that_takes_as_long_as_the_last_ones_is_in_time(
    took: float, answers: int
) -> None:
    patience = Patience()
    for _ in range(answers):
        patience.answered(took)
    assert patience.learned > 1.2 * took


@pytest.mark.parametrize(
    ("took", "lease", "silence"),
    [
        (None, 60.0, 3.0),  # nothing is known: one late answer ends nothing
        (None, 6.0, 2.0),  # a third of the lease
        (None, 0.3, 1.0),  # but never before an answer may be late
        (0.001, float("inf"), 3.0),
        (4.0, 6.0, 12.0),
    ],
)
def test_connection_is_given_up_after_silence(
    took: float | None, lease: float, silence: float
) -> None:
    patience = Patience()
    if took is not None:
        patience.answered(took)
    assert patience.silence(lease) == pytest.approx(silence)


def test_what_is_usual_does_not_grow_by_silence() -> None:
    patience = Patience()
    patience.answered(2.0)
    usual = patience.usual
    patience.ran_out()
    patience.ran_out()
    assert patience.usual == usual
    assert patience.learned == 4 * usual
    assert soon(usual) > 2 * 2.0
    assert 1.5 < soon(0.0) < 2.0


def test_only_what_never_came_so_far_before_is_further(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 2.0, 3.0])
    monkeypatch.setattr("aiodlock._patience.now", lambda: next(moments))
    further = Further()
    for _ in range(5):  # refused at the same step again and again
        further.reach(1)
        further.reach(2)
    assert further.at == 2.0
    further.reach(3)
    assert further.at == 3.0


def test_what_does_not_wait_hardly_waits_longer_after_one_late_answer() -> None:
    patience = Patience()
    for _ in range(20):
        patience.answered(0.01)
    patience.answered(3.0)
    assert soon(patience.typical) == soon(0.0)
    for _ in range(20):
        patience.answered(2.0)
    assert 4.0 < soon(patience.typical) < 5.0
