"""The account of what a server did notices what it is for."""

from __future__ import annotations

import pytest

from .history import History, Life


def history(*lives: Life) -> History:
    return History(lives={life.id: life for life in lives})


def holder(id: str, mode: str, arrived: float, granted: float, left: float, token: int = 1) -> Life:
    return Life(id, mode, arrived, until=left + 1, granted=granted, left=left, token=token)


@pytest.mark.parametrize(("first", "second"), ["xx", "xs", "sx"])
def test_overlap_with_a_writer_is_noticed(first: str, second: str) -> None:
    overlapping = history(holder("a", first, 1, 1, 3), holder("b", second, 1.5, 2, 4))
    assert len(overlapping.overlaps()) == 1
    assert history(holder("a", first, 1, 1, 3), holder("b", second, 1.5, 3, 4)).overlaps() == []


def test_overlap_that_another_grant_stands_between_is_noticed() -> None:
    lives = holder("a", "s", 1, 1, 9), holder("b", "s", 1.1, 2, 3), holder("c", "x", 1.2, 4, 5)
    assert len(history(*lives).overlaps()) == 1


def test_readers_may_be_together() -> None:
    assert history(holder("a", "s", 1, 1, 3), holder("b", "s", 1.5, 2, 4)).overlaps() == []


def test_holder_that_died_counts_until_its_lease_ended() -> None:
    dead = Life("a", "x", 1, until=3, granted=1)
    assert dead.died
    assert len(history(dead, holder("b", "x", 1.5, 2.9, 4)).overlaps()) == 1
    assert history(dead, holder("b", "x", 1.5, 3, 4)).overlaps() == []


def test_reader_that_passes_a_waiting_writer_is_noticed() -> None:
    reader, barging = holder("r", "s", 1, 1, 5), holder("b", "s", 3, 3, 4)
    assert len(history(reader, holder("w", "x", 2, 5, 6), barging).passed()) == 1
    assert len(history(reader, Life("w", "x", 2, until=9, left=3.5), barging).passed()) == 1


def test_nobody_passes_who_comes_after_a_withdrawal_or_a_death() -> None:
    reader, late = holder("r", "s", 1, 1, 5), holder("b", "s", 2.5, 3, 4)
    assert history(reader, Life("w", "x", 2, until=9, left=3), late).passed() == []
    assert history(reader, Life("w", "x", 2, until=3), late).passed() == []


def test_equal_tokens_are_noticed() -> None:
    twice = history(holder("a", "x", 1, 1, 2, token=7), holder("b", "x", 1, 2, 3, token=7))
    assert len(twice.tokens_that_do_not_grow()) == 1


def test_wait_that_nothing_explains_is_measured() -> None:
    writer = holder("w", "x", 2, 4, 5)
    assert history(holder("a", "x", 1, 1, 3), writer).unexplained(writer, 4) == pytest.approx(1)
    assert history(holder("a", "x", 1, 1, 4), writer).unexplained(writer, 4) == pytest.approx(0)
    assert history(holder("a", "x", 1, 1, 4), writer).unexplained(writer, 4.5) == pytest.approx(0.5)
    assert history(writer).unexplained(writer, 4) == pytest.approx(2)


def test_readers_do_not_explain_the_wait_of_a_reader_but_a_writer_between_does() -> None:
    first, reader = holder("a", "s", 1, 1, 4), holder("b", "s", 3, 4, 5)
    assert history(first, reader).unexplained(reader, 4) == pytest.approx(1)
    withdrawn = Life("w", "x", 2, until=9, left=3.75)
    assert history(first, withdrawn, reader).unexplained(reader, 4) == pytest.approx(0.25)
    dead = Life("w", "x", 2, until=3.5)
    assert history(first, dead, reader).unexplained(reader, 4) == pytest.approx(0.5)
