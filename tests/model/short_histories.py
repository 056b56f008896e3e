"""Histories by hand for the short ways in PostgreSQL: each of their conditions decides in one of them.

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
        (1, "short", [ask("b")]),
        (2, "short", [ask("c")]),
        (3, "short", [ask("d")]),
        (3, "general", [end("stranger")]),
        (4, "short", [end("a")]),
        (5, "short", [ask("e"), end("b")]),
        (6, "short", [ask("d2", mode="s"), end("c")]),
        (7, "short", [end("d")]),
        (8, "general", [ask("g"), end("stranger")]),
    ],
    "free after the general way": [
        (0, "general", [ask("a", delay=1)]),
        (1, "general", [end("a")]),
        (2, "short", [ask("b")]),
    ],
    "the same client": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("a2")]),
        (2, "short", [end("a")]),
        (3, "general", [ask("a3"), end("a2")]),
        (4, "short", [ask("a4")]),
        (5, "short", [end("a3", end="lost")]),
        (6, "short", [end("a4", end="lost")]),
        (6, "general", [end("a4")]),
    ],
    "two at one moment": [
        (0, "short", [ask("a")]),
        (0, "short", [end("a")]),
        (0, "general", [ask("b")]),
        (0, "general", [ask("b")]),
        (0, "short", [ask("c")]),
        (0, "short", [ask("d")]),
        (0, "short", [ask("e"), end("b")]),
    ],
    "a stranger leaves": [(0, "short", [ask("a")]), (1, "general", [end("b")])],
    "too late": [(0, "short", [ask("a")]), (31, "general", [end("a")])],
    "too late, and others wait": [
        (0, "short", [ask("a")]),
        (25, "short", [ask("b")]),
        (31, "general", [end("a")]),
    ],
    "a dead holder": [(0, "short", [ask("a")]), (31, "general", [ask("b")])],
    "a holder whose clock was set back": [(0, "short", [ask("a")]), (-5, "general", [ask("b")])],
    "the holder's owner": [
        (0, "short", [ask("a", owner="uA")]),
        (1, "general", [ask("b", owner="uA")]),
    ],
    "the holder's owner beside its leave": [
        (0, "short", [ask("a", owner="uA")]),
        (1, "short", [ask("b")]),
        (2, "general", [ask("c", owner="uA"), end("a")]),
    ],
    "the first waiter's owner beside a leave": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b", owner="uA")]),
        (2, "general", [ask("c", owner="uA"), end("a")]),
    ],
    "two waiters of one owner": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b", owner="uA")]),
        (2, "short", [ask("c", owner="uA")]),
        (3, "general", [end("a")]),
    ],
    "the holder with another owner": [
        (0, "short", [ask("a")]),
        (1, "general", [ask("a", owner="uA")]),
        (2, "short", [ask("b")]),
        (3, "general", [ask("a", owner="uA"), end("a")]),
    ],
    "one that lingers": [(0, "short", [ask("a", *LINGER)]), (1, "general", [ask("b")])],
    "a waiter that lingers": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b", *LINGER)]),
        (2, "general", [end("a")]),
    ],
    "one that lingers, beside a leave": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b")]),
        (2, "short", [ask("c", *LINGER), end("a")]),
    ],
    "a third message": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b")]),
        (2, "general", [ask("c"), end("a"), extend("b")]),
    ],
    "readers": [
        (0, "short", [ask("a", mode="s")]),
        (1, "general", [ask("b", mode="s")]),
        (2, "general", [end("a")]),
        (3, "short", [ask("c")]),
        (4, "short", [end("b")]),
        (5, "short", [ask("d", mode="s")]),
        (6, "short", [ask("e", mode="s")]),
        (7, "general", [end("c")]),
    ],
    "one that does not wait": [
        (0, "short", [ask("a")]),
        (1, "general", [ask("b", patience="nowait")]),
        (2, "short", [ask("c")]),
        (3, "general", [ask("d", patience="nowait"), end("a")]),
    ],
    "a dead waiter": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b")]),
        (12, "general", [ask("c")]),
    ],
    "a dead waiter whose turn it is": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b")]),
        (12, "general", [end("a")]),
    ],
    "a dead waiter behind the first": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b", length=25)]),
        (2, "short", [ask("c")]),
        (13, "general", [end("a")]),
    ],
    "a waiter whose clock was set back": [
        (0, "short", [ask("a")]),
        (20, "short", [ask("b")]),
        (10, "general", [ask("c")]),
    ],
    "its turn, and its clock was set back": [
        (0, "short", [ask("a")]),
        (20, "short", [ask("b")]),
        (10, "general", [end("a")]),
    ],
    "a second waiter whose clock was set back": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b", length=30)]),
        (20, "short", [ask("c")]),
        (10, "general", [end("a")]),
    ],
    "a second waiter that has to look earlier": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b")]),
        (10, "short", [ask("c")]),
        (10.5, "general", [end("a")]),
    ],
    "one in front that has to look earlier": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b")]),
        (10, "general", [ask("c"), end("a")]),
    ],
    "longer leases": [
        (0, "short", [ask("a")]),
        (1, "general", [ask("b", ttl=40)]),
        (2, "general", [ask("c", ttl=50), end("a")]),
        (3, "general", [end("c")]),
        (4, "short", [end("b")]),
        (5, "general", [ask("d", ttl=60)]),
    ],
    "a waiter with a lock-delay": [
        (0, "short", [ask("a")]),
        (1, "general", [ask("b", delay=500)]),
        (2, "general", [end("a")]),
    ],
    "a waiter with a hold": [
        (0, "short", [ask("a")]),
        (1, "general", [ask("b", "", "", "5000", "later")]),
        (2, "general", [end("a")]),
    ],
    "a request that waits, again": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b")]),
        (2, "short", [ask("c")]),
        (3, "general", [ask("c")]),
        (4, "general", [ask("c"), end("a")]),
    ],
    # The holder was a waiter: its lease is not clamped by a clock that is set back a little.
    "one that left, and the clock was set back": [
        (0, "general", [end("gone", marker=60)]),
        (1, "general", [ask("a", ttl=120)]),
        (55, "general", [ask("b", length=20)]),
        (61, "general", [end("a")]),
        (58, "general", [ask("gone")]),
    ],
    "one that left, beside a leave, and the clock was set back": [
        (0, "general", [end("gone", marker=60)]),
        (1, "general", [ask("a", ttl=120)]),
        (55, "general", [ask("b", length=20)]),
        (56, "general", [ask("c", length=20)]),
        (61, "general", [end("a")]),
        (58, "general", [ask("gone"), end("b")]),
    ],
    "one after the other, extended": [
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
        (1, "short", [ask("b")]),
        (2, "short", [extend("a")]),
        (3, "short", [end("a")]),
        (4, "short", [end("b")]),
    ],
    "strangers": [
        (0, "short", [ask("a")]),
        (1, "general", [end("b")]),
        (2, "general", [extend("b")]),
        (3, "short", [end("a")]),
    ],
    "extended too late": [(0, "short", [ask("a")]), (31, "general", [extend("a")])],
    "a clock that was set back": [
        (0, "short", [ask("a")]),
        (-1, "general", [extend("a")]),
        (-1, "short", [extend("a")]),
    ],
    "a lock-delay": [
        (0, "general", [ask("a", delay=1)]),
        (1, "general", [end("a")]),
        (2, "short", [ask("b")]),
    ],
    "a hold": [(0, "general", [ask("a", "", "", "5000", "later")])],
    "a semaphore": [(0, "general", [ask("a", mode="s3")])],
    "a limit that is to be in use": [(0, "general", [ask("a", "", "", "0", "resize", mode="s3")])],
    "longer leases, extended": [
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
    "a hand-over beside a lock-delay": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b")]),
        (2, "general", [ask("c", delay=1), end("a")]),
    ],
    "a hand-over beside a hold": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b")]),
        (2, "general", [ask("c", "", "", "5000", "later"), end("a")]),
    ],
    "a hand-over beside a semaphore": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b")]),
        (2, "general", [ask("c", mode="s3"), end("a")]),
    ],
    "a hand-over beside a marker": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b")]),
        (2, "general", [ask("c"), end("a", marker=60)]),
    ],
    "a hand-over beside a grant that was not used": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b")]),
        (2, "general", [ask("c"), end("a", end="unused")]),
    ],
}
