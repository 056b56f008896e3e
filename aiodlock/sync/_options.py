"""What users hand in: the options of ``aiodlock.Client`` and ``Client.lock``, for type checkers.

At run time they are passed on, and checked there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypedDict

from .._errors import LockLost
from .._keywords import CommonKeywords

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


class UnnamedOptions(CommonKeywords, total=False):
    """Options of ``multilock``, whose timeout is a parameter of its own."""

    on_lost: OnLost
    owner: str | None
    linger: float


class OwnerlessOptions(CommonKeywords, total=False):
    """Options of ``semaphore``, ``election`` and ``once``."""

    on_lost: OnLost
    timeout: float | None


class LockOptions(OwnerlessOptions, total=False):
    """Options of ``lock`` and ``rwlock``."""

    owner: str | None
    linger: float
