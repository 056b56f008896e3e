"""What the commands print: tables for people, plain lines for pipes, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any, Literal

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from .. import LockInfo


def console() -> Console:
    """Return a console on the present stdout (tests and pipes exchange it)."""
    return Console(file=sys.stdout, highlight=False)


def for_people() -> bool:
    return sys.stdout.isatty()


def print_json(value: object) -> None:
    print(json.dumps(value), flush=True)


def as_dict(info: LockInfo) -> dict[str, Any]:
    return dataclasses.asdict(info)


def printable(text: str) -> str:
    """Escape what would break a line or a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def summary(info: LockInfo) -> tuple[str, ...]:
    """Return a lock's line in ``ls`` and ``top``; see ``_HEADINGS``."""
    mode = info.holders[0].mode if info.holders else ("closed" if info.closed else "free")
    holders = ",".join(sorted({printable(holder.client) for holder in info.holders})) or "-"
    left = max((holder.remaining for holder in info.holders), default=info.closed)
    longest = max((waiter.waiting for waiter in info.waiters), default=0.0)
    return (
        printable(info.name),
        mode,
        str(len(info.holders)),
        holders,
        f"{left:.1f}",
        str(len(info.waiters)),
        f"{longest:.1f}",
        str(info.token),
    )


#: In a pipe the last one, the token, comes too.
_HEADINGS = ("name", "mode", "holders", "held by", "s left", "waiters", "s waited", "token")
_TEXTS = ("name", "mode", "held by")


def table(infos: list[LockInfo]) -> Table:
    """Return a table with a line for each lock; names and holders are cut when they do not fit."""
    rows = [summary(info)[:-1] for info in infos]
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=False)]
    name, held_by = _HEADINGS.index("name"), _HEADINGS.index("held by")
    room = console().width - 2 * len(widths) - sum(widths) + widths[name] + widths[held_by]
    # The name gets what it needs, three fifths of the room at least; the holders get the rest.
    wanted = min(widths[name], max(room * 3 // 5, room - widths[held_by]))
    widths[name], widths[held_by] = max(1, wanted), max(1, min(widths[held_by], room - wanted))
    found = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading, width in zip(_HEADINGS, widths, strict=False):
        justify: Literal["left", "right"] = "left" if heading in _TEXTS else "right"
        found.add_column(heading, justify=justify, no_wrap=True, width=width)
    for row in rows:
        found.add_row(*(Text(cell) for cell in row))
    return found


def print_list(infos: list[LockInfo]) -> None:
    if for_people():
        render(table(infos) if infos else "No lock is held or waited for.")
        return
    for info in infos:
        print("\t".join(summary(info)))


def render(what: RenderableType) -> None:
    console().print(what)


def print_one(info: LockInfo) -> None:
    """Tell everything about one lock, a line for each holder and waiter."""
    print(f"name\t{printable(info.name)}")
    print(f"token\t{info.token}")
    if info.closed:
        print(f"closed\t{info.closed:.1f} s (lock-delay of a holder that was lost)")
    for holder in info.holders:
        print(
            f"holder\t{holder.mode}\ttoken {holder.token}\t{holder.remaining:.1f} s left\t"
            f"{holder.count} times\t{printable(holder.client)}\t{printable(holder.owner)}"
        )
    for waiter in info.waiters:
        print(
            f"waiter {waiter.position + 1}\t{waiter.mode}\twaiting {waiter.waiting:.1f} s\t"
            f"{printable(waiter.client)}\t{printable(waiter.owner)}"
        )
    if not info.holders and not info.waiters and not info.closed:
        print("free")
