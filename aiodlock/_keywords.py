"""The options of locks by their keywords, so that editors complete them and type checkers refuse others.

At run time they are passed on to ``Client.lock``, and checked there.
"""

from __future__ import annotations

from typing import TypedDict

from ._options import OnLost


class CommonKeywords(TypedDict, total=False):
    """What every description takes; ``on_lost`` has other values for threads."""

    ttl: float | None
    auto_extend: bool
    max_hold: float | None
    lock_delay: float
    hold_at_least: float
    note: str
    margin: float
    confirm_release: bool


class UnnamedKeywords(CommonKeywords, total=False):
    """Options of ``multilock``, whose timeout is a parameter of its own."""

    on_lost: OnLost
    owner: str | None
    linger: float


class OwnerlessKeywords(CommonKeywords, total=False):
    """Options of ``semaphore``, ``election`` and ``once``."""

    on_lost: OnLost
    timeout: float | None


class LockKeywords(OwnerlessKeywords, total=False):
    """Options of ``lock`` and ``rwlock``."""

    owner: str | None
    linger: float
