"""Which process this is, without asking the system: that takes as long as all else that a lingering acquire
does, and each acquire and release has to know whether the client was entered before a fork.

Python tells of its own forks. Of those that uWSGI makes of its workers it does not know: what is entered or
used for the first time in a process asks the system (``look``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

#: As ``os.getpid()``: after a fork the child's.
pid: int = os.getpid()
_in_child: list[Callable[[], object]] = []
#: Reentrant: a signal handler may come in at any step of the thread that has it.
_looking = threading.RLock()


def after_fork(call: Callable[[], object]) -> None:
    """Have it called in each child, before anything of ours is used there."""
    _in_child.append(call)


def look() -> int:
    """Return the process's id, as the system tells it."""
    if os.getpid() != pid:
        with _looking:
            if os.getpid() != pid:
                _forked()
    return pid


def _forked() -> None:
    global pid
    try:
        for call in _in_child:
            call()
    finally:
        pid = os.getpid()


def _told_of_fork() -> None:
    global _looking
    _looking = threading.RLock()  # another thread of the parent may have had it
    _forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_told_of_fork)
