"""What is measured has been done: a benchmark whose contender fails says so, and ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.threads import Load, measure


@pytest.mark.parametrize("fails_at", [1, 2, 5, 8])
def test_failure_of_one_thread_ends_the_measurement(fails_at: int) -> None:
    turns = itertools.count(1)

    @contextmanager
    def turn() -> Iterator[None]:
        if next(turns) == fails_at:
            raise ConnectionError("no server")
        yield

    with pytest.raises(ConnectionError, match="no server"):
        measure(lambda name: turn, Load("four threads", 4, 4, 1))
