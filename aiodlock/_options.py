"""What users hand in, checked before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

OnLost = Literal["cancel", "flag"]

SHORTEST_TTL = 0.05
LONGEST_SECONDS = 1e9
LONGEST_NAME = 512
#: Of the ttl: the rest has room for a clock's drift and one extension.
LARGEST_MARGIN = 0.9


@dataclass(frozen=True, slots=True)
class LockOptions:
    """The options of ``Client.lock``; the docstring there says what each means."""

    ttl: float
    timeout: float | None = None
    auto_extend: bool = True
    max_hold: float | None = None
    lock_delay: float = 0.0
    margin: float = 0.0
    on_lost: OnLost = "cancel"
    confirm_release: bool = True
    owner: str | None = None

    def __post_init__(self) -> None:
        check_seconds("ttl", self.ttl, least=SHORTEST_TTL)
        check_timeout(self.timeout)
        check_seconds("lock_delay", self.lock_delay)
        check_seconds("margin", self.margin)
        if self.max_hold is not None:
            check_seconds("max_hold", self.max_hold, least=SHORTEST_TTL)
        check_flag("auto_extend", self.auto_extend)
        check_flag("confirm_release", self.confirm_release)
        if self.on_lost not in get_args(OnLost):
            raise ValueError(f"on_lost must be 'cancel' or 'flag', not {self.on_lost!r}")
        if self.owner is not None:
            check_text("owner", self.owner)
        shortest = self.ttl if self.max_hold is None else min(self.ttl, self.max_hold)
        if self.margin > shortest * LARGEST_MARGIN:
            raise ValueError(
                f"margin ({self.margin} s) must be at most {LARGEST_MARGIN:.0%} of ttl and max_hold "
                f"({shortest} s): the lease would be lost before it can be extended"
            )


def check_seconds(what: str, value: object, *, least: float = 0.0) -> float:
    """Return ``value`` as float, or raise TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} must be a number of seconds, not {value!r}")
    if not least <= value <= LONGEST_SECONDS:  # never true of nan
        raise ValueError(
            f"{what} must be from {least:g} to {LONGEST_SECONDS:g} seconds, not {value!r}"
        )
    return float(value)


def check_timeout(value: object) -> float | None:
    """Return a timeout: None waits for ever, 0 tries once."""
    return None if value is None else check_seconds("timeout", value)


def check_flag(what: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, not {value!r}")


def check_text(what: str, value: object) -> str:
    """Return a legal name or owner: any text of 1 to 512 bytes of UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {value!r}")
    try:
        length = len(value.encode())
    except UnicodeEncodeError as surrogates:
        raise ValueError(f"{what} {value!r} has lone surrogates and no UTF-8 form") from surrogates
    if not 1 <= length <= LONGEST_NAME:
        raise ValueError(
            f"{what} must be 1 to {LONGEST_NAME} bytes of UTF-8, and this one has {length}"
        )
    return value


def check_limit(value: object) -> int:
    """Return how many may hold a semaphore."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"limit must be an int, not {value!r}")
    if not 1 <= value <= 1_000_000:
        raise ValueError(f"limit must be from 1 to 1,000,000, not {value}")
    return value
