"""What users hand in, checked before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal, NoReturn, TypeVar, cast, get_args

from ._model import Kind

_T = TypeVar("_T")

OnLost = Literal["cancel", "flag"]

SHORTEST_TTL = 0.05
LONGEST_SECONDS = 1e9
LONGEST_NAME = 512
LONGEST_NOTE = 200
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
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
    hold_at_least: float = 0.0
    note: str = ""
    linger: float = 0.0

    def __post_init__(self) -> None:
        self._as_float("ttl", SHORTEST_TTL)
        for seconds in ("lock_delay", "margin", "hold_at_least", "linger"):
            self._as_float(seconds)
        object.__setattr__(self, "timeout", check_timeout(self.timeout))
        check_note("note", self.note)
        if self.linger and (self.hold_at_least or not self.auto_extend):
            other = "hold_at_least" if self.hold_at_least else "auto_extend=False"
            raise ValueError(
                f"linger and {other} contradict each other: a lease that lingers is extended, and released "
                "at once when others want it"
            )
        if self.max_hold is not None:
            self._as_float("max_hold", SHORTEST_TTL)
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

    def _as_float(self, what: str, least: float = 0.0) -> None:
        object.__setattr__(self, what, check_seconds(what, getattr(self, what), least=least))


# Locks are described again and again, with the same few options: checking them takes six to ten times as
# long as this. Typed, since 1 == True, and only one of them is a number of seconds.
_checked_before = lru_cache(maxsize=256, typed=True)(LockOptions)


def lock_options(*options: Any) -> LockOptions:
    """Return the options, checked; those that were checked before are the same object."""
    try:
        return _checked_before(*options)
    except TypeError:  # also of what cannot be hashed
        pass
    return LockOptions(*options)


#: Keywords of other libraries' locks, and what does the same here.
_ELSEWHERE = {
    "blocking": "acquire_nowait(), or timeout=0, tries once; without, acquire() waits",
    "blocking_timeout": "timeout= is how long acquire() waits (the length of the lease is ttl=)",
    "sleep": "leave it out: a waiter is notified of its turn, and does not poll",
    "retry_interval": "leave it out: a waiter is notified of its turn, and does not poll",
    "retry_delay": "leave it out: a waiter is notified of its turn, and does not poll",
    "retry_count": "timeout= is how long acquire() waits",
    "thread_local": "leave it out: a hold belongs to the task or thread of its block; "
    "owner= makes one owner of several",
    "raise_on_release_error": "leave it out: a release that finds the lease lost raises LockLost",
    "lock_class": "leave it out",
    "token": "owner= makes one owner of several; lease.token is the fencing token",
    "id": "owner= makes one owner of several",
    "expire": "ttl= is how long the lease lives without being extended",
    "expires": "ttl= is how long the lease lives without being extended",
    "lock_timeout": "ttl= is how long the lease lives without being extended",
    "lease_time": "ttl= is how long the lease lives without being extended",
    "auto_renewal": "auto_extend= says whether the lease is extended; it is by default",
    "auto_release_time": "ttl= is how long the lease lives without being extended",
    "acquire_timeout": "timeout= is how long acquire() waits",
    "wait_timeout": "timeout= is how long acquire() waits",
    "replace_ttl": "leave it out: extend(60) always sets the time left, and never shortens it",
    "additional_time": "extend(60) sets the time left to 60 s, and never shortens it",
}
_HAVE_THE_LEASE = "acquire() and the block ('as lease') give the lease"
#: Attributes of other libraries' locks, leases and clients, and what does the same here.
LOCKS_ELSEWHERE = {
    "extend": f"the lease has it: lease.extend(60); {_HAVE_THE_LEASE}",
    "reacquire": f"lease.extend() does it; {_HAVE_THE_LEASE}",
    "owned": f"lease.held answers that; {_HAVE_THE_LEASE}",
    "valid": f"lease.held answers that; {_HAVE_THE_LEASE}",
    "held": f"lease.held answers that; {_HAVE_THE_LEASE}",
    "local": f"lease.token is the fencing token; {_HAVE_THE_LEASE}",
    "token": f"lease.token is the fencing token; {_HAVE_THE_LEASE}",
    "is_locked": "lock.locked() answers that",
    "unlock": "lock.release() does it, or the end of the block",
    "reset": "client.break_lock(name) ends it, whoever holds it",
    "get_owner_id": "client.inspect(name) tells who holds it",
}
LEASES_ELSEWHERE = {
    "valid": "lease.held answers that",
    "owned": "lease.held answers that",
    "locked": "lease.held answers that",
    "is_locked": "lease.held answers that",
    "reacquire": "lease.extend() does it",
    "renew": "lease.extend() does it",
    "unlock": "lease.release() does it, or the end of the block",
}
CLIENTS_ELSEWHERE = {
    "acquire": "client.lock(name).acquire() does it, or a block of client.lock(name)",
    "create_lock": "client.lock(name) describes a lock",
    "get_lock": "client.lock(name) describes a lock",
    "is_locked": "client.lock(name).locked() answers that",
    "release": "lease.release() does it, or the end of the block of client.lock(name)",
    "unlock": "lease.release() does it, or the end of the block of client.lock(name)",
}
#: Of a client for tasks; one for threads has a close().
CLOSING_ELSEWHERE = dict.fromkeys(
    ("close", "aclose"), "leaving the block closes it: async with aiodlock.Client(url) as client"
)


def answers(elsewhere: Mapping[str, str]) -> Callable[[type[_T]], type[_T]]:
    """Let a class answer who asks for an attribute of other libraries with what does it here.

    A ``__getattr__`` would do it too, and make each read of an attribute that is there ten times as dear.
    """

    def named(self: object) -> list[str]:
        return [name for name in object.__dir__(self) if name not in elsewhere]

    def decorate(kind: type[_T]) -> type[_T]:
        for name, answer in elsewhere.items():
            setattr(kind, name, _Elsewhere(name, answer))
        kind.__dir__ = named  # type: ignore[method-assign]
        return kind

    return decorate


class _Elsewhere:
    """Stands for an attribute of other libraries: asked for, it says what stands for it here."""

    def __init__(self, name: str, answer: str) -> None:
        self._name, self._answer = name, answer

    def __get__(self, asked: object | None, kind: type) -> NoReturn:
        message = f"{kind.__name__!r} object has no attribute {self._name!r}: {self._answer}"
        raise AttributeError(message, name=self._name, obj=kind if asked is None else asked)


def refuse_keywords(
    call: str,
    wrong: Iterable[str],
    known: Iterable[str] | None = None,
    given: Sequence[object] = (),
) -> NoReturn:
    """Raise the TypeError of a call that got unknown keywords, with what stands for them here.

    :param known: the keywords of the call; default: the options of a lock.
    :param given: what the call got without a keyword.
    """
    if given:
        raise TypeError(
            f"{call} takes keywords only, and got {given[0]!r}: {_ELSEWHERE['blocking']}; "
            "timeout=5 waits for 5 s at most"
        )
    if known is None:
        known = [field.name for field in fields(LockOptions)]
    keyword = min(wrong)
    message = f"{call} got an unexpected keyword argument {keyword!r}"
    close = get_close_matches(keyword, known, 1)
    if keyword in _ELSEWHERE:
        message += f": {_ELSEWHERE[keyword]}"
    elif close:
        message += f": did you mean {close[0]!r}?"
    raise TypeError(message)


def check_tokens(tokens: Iterable[int] | None) -> frozenset[int] | None:
    """Return the tokens that a break is meant for, None for all.

    :raises TypeError: for what is no collection of ints.
    """
    if tokens is None:
        return None
    wrong = f"tokens must be a list of ints, as those of HolderInfo, not {tokens!r:.200}"
    try:
        meant = frozenset(tokens)
    except TypeError:
        raise TypeError(wrong) from None
    if not all(type(token) is int for token in meant):
        raise TypeError(wrong)
    return frozenset(token for token in meant if 0 < token < 1 << 63)  # nobody has another


def check_kind(kind: object) -> Kind:
    """Return a kind, or raise."""
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be 'lock', 'semaphore' or 'once', not {kind!r}")
    return cast("Kind", kind)


def check_note(what: str, value: object) -> str:
    """Return what is only for people, or raise."""
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {value!r}")
    if len(value) > LONGEST_NOTE:
        raise ValueError(
            f"{what} must have at most {LONGEST_NOTE} characters, and has {len(value)}"
        )
    try:
        value.encode()
    except UnicodeEncodeError as wrong:
        raise ValueError(f"{what} must not have lone surrogates: {value!r}") from wrong
    return value


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
    """Return a timeout: None waits without limit, 0 tries once."""
    if isinstance(value, int | float) and value < 0:
        raise ValueError(
            f"timeout must not be negative, and is {value}: None waits without limit, 0 tries once"
        )
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
    return str.__str__(value)  # of an enum, too: what is formatted is the text


def check_limit(value: object) -> int:
    """Return how many may hold a semaphore."""
    limit = check_int("limit", value)
    if not 1 <= limit <= 1_000_000:
        raise ValueError(f"limit must be from 1 to 1,000,000, not {limit}")
    return limit


def check_int(what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, not {value!r}")
    return value


def check_prefix(value: object) -> str:
    """Return what every key may begin with, or raise."""
    if not isinstance(value, str):
        raise TypeError(f"prefix must be a str, not {value!r}")
    if not _PREFIX.fullmatch(value):
        raise ValueError(
            f"prefix must be 1 to 128 letters, digits and '_.:-', not {value!r}: braces, "
            "spaces and glob characters would break key names"
        )
    return value
