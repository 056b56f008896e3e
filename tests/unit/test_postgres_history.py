"""Which state of a database counts: answers of two connections may overtake each other."""

from __future__ import annotations

from typing import Any

import pytest

from aiodlock.backends._identity import Known, OtherStore
from aiodlock.backends.postgres.history import History, history_of

_BORN = 1_700_000_000_000_000


def _row(flushed: int) -> dict[str, Any]:
    told = {"system": "s", "timeline": 1, "history": "h", "born_us": _BORN, "flushed": flushed}
    return told | {"place": "1/2"}


def _known(flushed: int) -> Known[History]:
    known: Known[History] = Known("a database", silence=30.0, may_hold=lambda: True)
    seen = history_of(_row(flushed), None)
    assert seen is not None
    known.meet(seen, "here")
    return known


def test_answer_that_was_overtaken_by_a_later_one_is_no_older_state() -> None:
    """Found by a seed: two connections were made at the same time, and one of them was slow."""
    known = _known(100)
    slow, quick = history_of(_row(100), known.value), history_of(_row(164), known.value)
    assert slow is not None
    assert quick is not None
    known.meet(quick, "here")
    known.meet(slow, "here")
    assert known.value is not None
    assert known.value.flushed == 164


def test_first_answers_of_a_history_may_overtake_each_other() -> None:
    """Found by a seed: nothing was known of a history when both were asked, just after a promotion."""
    known: Known[History] = Known("a database", silence=30.0, may_hold=lambda: True)
    slow, quick = history_of(_row(100), known.value), history_of(_row(164), known.value)
    assert slow is not None
    assert quick is not None
    known.meet(quick, "here")
    known.meet(slow, "here")
    assert known.value == quick


def test_state_that_lacks_what_was_known_before_it_was_asked_is_refused() -> None:
    known = _known(100)
    older = history_of(_row(36), known.value)
    assert older is not None
    with pytest.raises(OtherStore, match="64 bytes are missing"):
        known.meet(older, "here")
