"""What users hand in: the options of ``aiodlock.Client`` and ``Client.lock``, for type checkers.

At run time they are passed on, and checked there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypedDict

from .._errors import LockLost

OnLost: TypeAlias = Literal["flag"] | Callable[[LockLost], object]
#: Stands for "not given".
UNSET: Any = object()


class ClientOptions(TypedDict, total=False):
    """Options of ``aiodlock.Client``."""

    prefix: str
    ttl: float
    waiter_ttl: float
    token_retention: float
    min_replicas: int
    unavailable_after: float
    close_timeout: float
    configure_notifications: bool
    restart_delay: float | None
    listen_source: str | None
    create: bool
    description: str
    deadlock_after: float | None


class _SharedOptions(TypedDict, total=False):
    ttl: float | None
    auto_extend: bool
    max_hold: float | None
    lock_delay: float
    hold_at_least: float
    note: str
    margin: float
    on_lost: OnLost
    confirm_release: bool


class UnnamedOptions(_SharedOptions, total=False):
    """Options of ``multilock``, whose timeout is a parameter of its own."""

    owner: str | None


class OwnerlessOptions(_SharedOptions, total=False):
    """Options of ``semaphore`` and ``election``."""

    timeout: float | None


class LockOptions(OwnerlessOptions, total=False):
    """Options of ``lock`` and ``rwlock``."""

    owner: str | None
