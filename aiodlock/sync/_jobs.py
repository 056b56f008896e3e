"""Which job of a pool runs in a thread: the next job of the same thread is another owner.

Python tells nobody: ``Executor.submit`` and ``ThreadPool`` run all jobs of a thread in one context. So the
frames of the calling thread are searched for that of the pool, which has the job.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import FrameType

_EXECUTOR = ("concurrent.futures.thread", "run")
_THREAD_POOL = ("multiprocessing.pool", "worker")


def is_of_pool() -> bool:
    """Whether the calling thread is one of a pool's."""
    return any(place in (_EXECUTOR, _THREAD_POOL) for place, _ in _frames())


def present_job() -> object | None:
    """Return what equals itself while the same job of a pool runs."""
    for place, frame in _frames():
        if place == _EXECUTOR:
            return weakref.ref(frame.f_locals["self"])
        if place == _THREAD_POOL:
            return frame.f_locals.get("job"), frame.f_locals.get("i")
    return None


def _frames() -> Iterator[tuple[tuple[object, str], FrameType]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield (frame.f_globals.get("__name__"), frame.f_code.co_name), frame
        frame = frame.f_back
