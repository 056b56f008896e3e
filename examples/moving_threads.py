"""The same as ``moving.py``, for threads: Django views, Celery tasks, scripts.

Deploy three times, as there. Before the next deployment begins, the last worker of the one before is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum

from aiodlock import sync


class Step(Enum):
    OLD = "old"
    BOTH = "both"
    NEW = "new"


@contextmanager
def exclusive(
    name: str, step: Step, old: sync.Client, new: sync.Client, timeout: float | None = None
) -> Iterator[int]:
    """Hold the name in the stores of this step. The result is the token for the data."""
    with ExitStack() as stack:
        tokens = []
        # Always the old store first: then no two workers wait for each other.
        for client in [old] * (step is not Step.NEW) + [new] * (step is not Step.OLD):
            lease = stack.enter_context(client.lock(name, timeout=timeout))
            tokens.append(lease.token)
        yield max(tokens)
