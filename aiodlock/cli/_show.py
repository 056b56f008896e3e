"""What the commands print: tables for people, plain lines for pipes, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

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


def summary(info: LockInfo) -> tuple[str, str, str, str, str, str]:
    """Return name, mode, holders, seconds left, number of waiters, token."""
    mode = info.holders[0].mode if info.holders else ("closed" if info.closed else "free")
    holders = ",".join(sorted({printable(holder.client) for holder in info.holders})) or "-"
    left = max((holder.remaining for holder in info.holders), default=info.closed)
    return (
        printable(info.name),
        mode,
        holders,
        f"{left:.1f}",
        str(len(info.waiters)),
        str(info.token),
    )


_HEADINGS = ("name", "mode", "held by", "s left", "waiting", "token")


def table(infos: list[LockInfo], title: str | None = None) -> Table:
    found = Table(*_HEADINGS, title=title)
    for info in infos:
        found.add_row(*(Text(cell) for cell in summary(info)))
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
