"""The recipe for a move, in threads: workers of neighbouring deployments exclude each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from aiodlock import AcquireTimeout, sync
from aiodlock.testing import memory_url
from examples.moving_threads import Step, exclusive


@pytest.mark.parametrize(
    ("one", "other", "excluded"),
    [
        (Step.OLD, Step.BOTH, True),
        (Step.BOTH, Step.OLD, True),
        (Step.BOTH, Step.NEW, True),
        (Step.NEW, Step.BOTH, True),
        (Step.OLD, Step.NEW, False),  # so the page says that they must not meet
    ],
)
def test_workers_of_neighbouring_deployments_exclude_each_other(
    one: Step, other: Step, excluded: bool
) -> None:
    def second() -> bool:
        try:
            with exclusive("order:42", other, old, new, timeout=0.05):
                return False
        except AcquireTimeout:
            return True

    with sync.Client(memory_url()) as old, sync.Client(memory_url()) as new:
        with ThreadPoolExecutor(1) as pool, exclusive("order:42", one, old, new) as token:
            assert token > 0
            assert pool.submit(second).result(30) is excluded
        with exclusive("order:42", other, old, new, timeout=0):
            pass
