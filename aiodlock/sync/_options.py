"""What users hand in: the options of ``aiodlock.Client`` and ``Client.lock``, for type checkers.

At run time they are passed on, and checked there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, TypedDict

from .._errors import LockLost
from .._keywords import LockKeywordsOf, OwnerlessKeywordsOf, UnnamedKeywordsOf

OnLost: TypeAlias = Literal["flag"] | Callable[[LockLost], object]


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


UnnamedOptions: TypeAlias = UnnamedKeywordsOf[OnLost]
OwnerlessOptions: TypeAlias = OwnerlessKeywordsOf[OnLost]
LockOptions: TypeAlias = LockKeywordsOf[OnLost]
