"""The options of locks by their keywords, so that editors complete them and type checkers refuse others.

At run time they are passed on to ``Client.lock``, and checked there. For threads ``on_lost`` takes other
values.
"""

from __future__ import annotations

from typing import Generic, TypeAlias, TypedDict, TypeVar

from ._options import OnLost

_L = TypeVar("_L")


class CommonKeywords(TypedDict, Generic[_L], total=False):
    """What every description takes."""

    ttl: float | None
    auto_extend: bool
    max_hold: float | None
    lock_delay: float
    hold_at_least: float
    note: str
    margin: float
    confirm_release: bool
    on_lost: _L


class UnnamedKeywordsOf(CommonKeywords[_L], Generic[_L], total=False):
    """Options of ``multilock``, whose timeout is a parameter of its own."""

    owner: str | None
    linger: float


class OwnerlessKeywordsOf(CommonKeywords[_L], Generic[_L], total=False):
    """Options of ``semaphore``, ``election`` and ``once``."""

    timeout: float | None


class LockKeywordsOf(OwnerlessKeywordsOf[_L], Generic[_L], total=False):
    """Options of ``lock`` and ``rwlock``."""

    owner: str | None
    linger: float


UnnamedKeywords: TypeAlias = UnnamedKeywordsOf[OnLost]
OwnerlessKeywords: TypeAlias = OwnerlessKeywordsOf[OnLost]
LockKeywords: TypeAlias = LockKeywordsOf[OnLost]
