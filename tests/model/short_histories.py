"""Histories by hand for the short ways in PostgreSQL: each condition of theirs decides in one of them.

A call that carries an acquire and a leave is by who leaves. Of "short", no call reaches `turn`.
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


LINGER = ("a%20note", "someone", "0", "linger")
#: What each history is about, and its steps: at which second, what is asked for, and how that is done.
#: First of all, a request "0" holds and releases the name.
HISTORIES: dict[str, list[tuple[float, str, Sequence[str]]]] = {
    "one after the other": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b")]),
        (2, "short", [ask("c")]),
        (3, "short", [ask("d")]),
        (3, "turn", [end("stranger")]),
        (4, "short", [end("a")]),
        (5, "short", [ask("e"), end("b")]),
        (6, "short", [ask("d2", mode="s"), end("c")]),
        (7, "short", [end("d")]),
        (8, "turn", [ask("g"), end("stranger")]),
    ],
    "free after the general way": [
        (0, "turn", [ask("a", delay=1)]),
        (1, "turn", [end("a")]),
        (2, "short", [ask("b")]),
    ],
    "the same client": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("a2")]),
        (2, "short", [end("a")]),
        (3, "turn", [ask("a3"), end("a2")]),
        (4, "short", [ask("a4")]),
        (5, "short", [end("a3", end="lost")]),
        (6, "short", [end("a4", end="lost")]),
        (6, "turn", [end("a4")]),
    ],
    "two at one moment": [
        (0, "short", [ask("a")]),
        (0, "short", [end("a")]),
        (0, "turn", [ask("b")]),
        (0, "turn", [ask("b")]),
        (0, "short", [ask("c")]),
        (0, "short", [ask("d")]),
        (0, "short", [ask("e"), end("b")]),
    ],
    "a stranger leaves": [(0, "short", [ask("a")]), (1, "turn", [end("b")])],
    "too late": [(0, "short", [ask("a")]), (31, "turn", [end("a")])],
    "too late, and others wait": [
        (0, "short", [ask("a")]),
        (25, "short", [ask("b")]),
        (31, "turn", [end("a")]),
    ],
    "a dead holder": [(0, "short", [ask("a")]), (31, "turn", [ask("b")])],
    "a holder whose clock was set back": [(0, "short", [ask("a")]), (-5, "turn", [ask("b")])],
    "the holder's owner": [
        (0, "short", [ask("a", owner="uA")]),
        (1, "turn", [ask("b", owner="uA")]),
    ],
    "the holder's owner beside its leave": [
        (0, "short", [ask("a", owner="uA")]),
        (1, "short", [ask("b")]),
        (2, "turn", [ask("c", owner="uA"), end("a")]),
    ],
    "the first waiter's owner beside a leave": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b", owner="uA")]),
        (2, "turn", [ask("c", owner="uA"), end("a")]),
    ],
    "two waiters of one owner": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b", owner="uA")]),
        (2, "short", [ask("c", owner="uA")]),
        (3, "turn", [end("a")]),
    ],
    "the holder with another owner": [
        (0, "short", [ask("a")]),
        (1, "turn", [ask("a", owner="uA")]),
        (2, "short", [ask("b")]),
        (3, "turn", [ask("a", owner="uA"), end("a")]),
    ],
    "one that lingers": [(0, "short", [ask("a", *LINGER)]), (1, "turn", [ask("b")])],
    "a waiter that lingers": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b", *LINGER)]),
        (2, "turn", [end("a")]),
    ],
    "readers": [
        (0, "short", [ask("a", mode="s")]),
        (1, "turn", [ask("b", mode="s")]),
        (2, "turn", [end("a")]),
        (3, "short", [ask("c")]),
        (4, "short", [end("b")]),
        (5, "short", [ask("d", mode="s")]),
        (6, "short", [ask("e", mode="s")]),
        (7, "turn", [end("c")]),
    ],
    "one that does not wait": [
        (0, "short", [ask("a")]),
        (1, "turn", [ask("b", patience="nowait")]),
        (2, "short", [ask("c")]),
        (3, "turn", [ask("d", patience="nowait"), end("a")]),
    ],
    "a dead waiter": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b")]),
        (12, "turn", [ask("c")]),
    ],
    "a dead waiter whose turn it is": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b")]),
        (12, "turn", [end("a")]),
    ],
    "a dead waiter behind the first": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b", length=25)]),
        (2, "short", [ask("c")]),
        (13, "turn", [end("a")]),
    ],
    "a waiter whose clock was set back": [
        (0, "short", [ask("a")]),
        (20, "short", [ask("b")]),
        (10, "turn", [ask("c")]),
    ],
    "its turn, and its clock was set back": [
        (0, "short", [ask("a")]),
        (20, "short", [ask("b")]),
        (10, "turn", [end("a")]),
    ],
    "a second waiter whose clock was set back": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b", length=30)]),
        (20, "short", [ask("c")]),
        (10, "turn", [end("a")]),
    ],
    "a second waiter that has to look earlier": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b")]),
        (10, "short", [ask("c")]),
        (10.5, "turn", [end("a")]),
    ],
    "one in front that has to look earlier": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b")]),
        (10, "turn", [ask("c"), end("a")]),
    ],
    "longer leases": [
        (0, "short", [ask("a")]),
        (1, "turn", [ask("b", ttl=40)]),
        (2, "turn", [ask("c", ttl=50), end("a")]),
        (3, "turn", [end("c")]),
        (4, "short", [end("b")]),
        (5, "turn", [ask("d", ttl=60)]),
    ],
    "a waiter with a lock-delay": [
        (0, "short", [ask("a")]),
        (1, "turn", [ask("b", delay=500)]),
        (2, "turn", [end("a")]),
    ],
    "a waiter with a hold": [
        (0, "short", [ask("a")]),
        (1, "turn", [ask("b", "", "", "5000", "later")]),
        (2, "turn", [end("a")]),
    ],
    "a request that waits, again": [
        (0, "short", [ask("a")]),
        (1, "short", [ask("b")]),
        (2, "short", [ask("c")]),
        (3, "turn", [ask("c")]),
        (4, "turn", [ask("c"), end("a")]),
    ],
    # The holder was a waiter: its lease is not clamped by a clock that is set back a little.
    "one that left, and the clock was set back": [
        (0, "turn", [end("gone", marker=60)]),
        (1, "turn", [ask("a", ttl=120)]),
        (55, "turn", [ask("b", length=20)]),
        (61, "turn", [end("a")]),
        (58, "turn", [ask("gone")]),
    ],
    "one that left, beside a leave, and the clock was set back": [
        (0, "turn", [end("gone", marker=60)]),
        (1, "turn", [ask("a", ttl=120)]),
        (55, "turn", [ask("b", length=20)]),
        (56, "turn", [ask("c", length=20)]),
        (61, "turn", [end("a")]),
        (58, "turn", [ask("gone"), end("b")]),
    ],
}
