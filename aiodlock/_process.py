"""Which process this is, without asking the system: that takes as long as all else that a lingering acquire
does, and each acquire and release has to know whether the client was entered before a fork."""

from __future__ import annotations

import os

#: As ``os.getpid()``: after a fork the child's.
pid: int = os.getpid()


def _forked() -> None:
    global pid
    pid = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
