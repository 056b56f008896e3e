"""Histories by hand for the short way in PostgreSQL: each of its conditions decides in one of them.

A call that carries an acquire and a leave is by who leaves.
"""

from __future__ import annotations

from collections.abc import Sequence


def ask(
    id: str,
    *more: str,
    owner: str = "",
    mode: str = "x",
    ttl: int = 30,
    length: int = 10,
    delay: int = 0,
    patience: str = "wait",
) -> str:
    words = (mode, owner or f"t{id}", ttl * 1000, length * 1000, delay, patience)
    return "\t".join(("acquire", "{key}", f"{{at}}{id}", *map(str, words), *more))


def end(id: str, marker: int = 0, end: str = "ended") -> str:
    return f"leave\t{{key}}\t{{at}}{id}\t{marker * 1000}\t{end}"


def extend(id: str, length: int = 30, *more: str) -> str:
    return "\t".join(("extend", "{key}", f"{{at}}{id}", str(length * 1000), *more))


LINGER = ("a%20note", "someone", "0", "linger")
#: What each history is about, and its steps: at which second, what is asked for, and how that is done.
#: First of all, a request "0" holds and releases the name.
HISTORIES: dict[str, list[tuple[float, str, Sequence[str]]]] = {
    "one after the other": [
        (0, "short", [ask("a")]),
        (1, "short", [extend("a")]),
        (2, "short", [end("a")]),
        (3, "short", [ask("b", *LINGER)]),
        (4, "general", [ask("c")]),
        (5, "general", [extend("b")]),
        (6, "general", [end("b")]),
        (7, "short", [extend("c")]),
        (8, "short", [end("c", end="lost")]),
    ],
    "others wait": [
        (0, "short", [ask("a")]),
        (1, "general", [ask("b")]),
        (2, "short", [extend("a")]),
        (3, "general", [end("a")]),
        (4, "short", [end("b")]),
    ],
    "an acquire and a leave": [
        (0, "short", [ask("a")]),
        (1, "general", [ask("b"), end("a")]),
        (2, "short", [end("b")]),
    ],
    "two at one moment": [
        (0, "short", [ask("a")]),
        (0, "short", [end("a")]),
        (0, "general", [ask("b")]),
    ],
    "strangers": [
        (0, "short", [ask("a")]),
        (1, "general", [end("b")]),
        (2, "general", [extend("b")]),
        (3, "short", [end("a")]),
    ],
    "too late": [(0, "short", [ask("a")]), (31, "general", [end("a")])],
    "extended too late": [(0, "short", [ask("a")]), (31, "general", [extend("a")])],
    "a dead holder": [(0, "short", [ask("a")]), (31, "general", [ask("b")])],
    "a clock that was set back": [
        (0, "short", [ask("a")]),
        (-1, "general", [extend("a")]),
        (-1, "short", [extend("a")]),
    ],
    "readers": [
        (0, "short", [ask("a", mode="s")]),
        (1, "general", [ask("b", mode="s")]),
        (2, "general", [end("a")]),
        (3, "short", [end("b")]),
    ],
    "a lock-delay": [
        (0, "general", [ask("a", delay=1)]),
        (1, "general", [end("a")]),
        (2, "short", [ask("b")]),
    ],
    "a hold": [(0, "general", [ask("a", "", "", "5000", "later")])],
    "a semaphore": [(0, "general", [ask("a", mode="s3")])],
    "a limit that is to be in use": [(0, "general", [ask("a", "", "", "0", "resize", mode="s3")])],
    "longer leases": [
        (0, "general", [ask("a", ttl=40)]),
        (1, "short", [end("a")]),
        (2, "short", [ask("b", ttl=40)]),
        (3, "general", [extend("b", 50)]),
        (4, "short", [extend("b", 50)]),
    ],
    "a shorter extension": [(0, "short", [ask("a")]), (1, "general", [extend("a", 10)])],
    "a marker": [
        (0, "short", [ask("a")]),
        (1, "general", [end("a", marker=60)]),
        (2, "general", [ask("a")]),
    ],
    "a grant that was not used": [
        (0, "short", [ask("a")]),
        (1, "general", [end("a", end="unused")]),
    ],
    "a success": [
        (0, "short", [ask("a")]),
        (1, "general", [end("a", end="recorded\t60000\tfine")]),
        (2, "general", [ask("b")]),
    ],
}
