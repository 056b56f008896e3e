"""What the commands print: tables for people, lines with tabs for pipes, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from .. import HolderInfo, LockInfo, RecordedInfo, WaiterInfo
from .._model import said_by_users
from .._text import plural as plural
from .._text import printable as printable

# Rich is imported where a terminal is written to: `run` and what prints into a pipe start sooner without.
if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

#: The columns of ``ls`` and ``top`` in a pipe, in order, and what they mean.
COLUMNS = {
    "name": "The lock's name. Line breaks and control characters are escaped.",
    "mode": "`exclusive` or `shared`. `closed`: nobody holds the lock, but the lock-delay of a lost holder "
    "or the `hold_at_least` of an earlier one keeps it closed. `recorded`: a success is on record. `free`:"
    " nobody holds it.",
    "holders": "The number of holders.",
    "held_by": "The holders' clients, with commas between them: host, process id, and a random part. "
    "`-` if nobody holds the lock.",
    "seconds_left": "Seconds until the last of the holders' leases ends, unless it is extended. If the "
    "lock is closed: seconds until it opens. If a success is on record: seconds until it is forgotten.",
    "waiters": "The number of requests in the queue.",
    "seconds_waited": "Seconds for which the oldest request in the queue has waited.",
    "token": "The last fencing token that was given out. 0 if unknown.",
    "kind": "`lock`, `semaphore`, or `once` (what is to be done once). Each kind has names of its own.",
}
#: In a terminal they are shorter, the kind follows the name, and the token is left out. Added are there
#: the time held, what users say of the holders, and that a lease is overdue.
_HEADINGS = (
    "name",
    "kind",
    "mode",
    "holders",
    "held by",
    "s held",
    "s left",
    "waiters",
    "s waited",
)
_TEXTS = ("name", "kind", "mode", "held by")
#: The columns that are cut, and how many cells they need together to be of use.
_CUT, _LEAST = {"name", "held by"}, 16
#: What a narrow terminal does without, in this order.
_LEFT_OUT = ("s held", "mode", "holders", "s left", "kind", "s waited", "waiters", "held by")


def console() -> Console:
    """Return a console on the present stdout (tests and pipes exchange it)."""
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False)


def for_people() -> bool:
    return sys.stdout.isatty()


def print_json(value: object) -> None:
    print(json.dumps(value), flush=True)


def print_line(*cells: object) -> None:
    """Print cells with tabs between them."""
    print("\t".join(map(str, cells)), flush=True)


def as_dict(info: LockInfo) -> dict[str, Any]:
    facts = dataclasses.asdict(info)
    if info.recorded is not None:
        facts["recorded"] = info.recorded._asdict()
    for one, holder in zip(facts["holders"], info.holders, strict=True):
        one |= {"value": holder.value, "overdue": holder.overdue}
    return facts


# -- one line for each lock ------------------------------------------------------------------------


def summary(info: LockInfo) -> tuple[str, ...]:
    """Return a lock's line in ``ls`` and ``top``; see ``COLUMNS``."""
    mode = info.holders[0].mode if info.holders else _nobody_holds(info)
    holders = ",".join(sorted({printable(holder.client) for holder in info.holders})) or "-"
    without_holders = info.recorded.remaining if info.recorded else info.closed
    left = _longest([holder.remaining for holder in info.holders] or [without_holders])
    longest = _longest([waiter.waiting for waiter in info.waiters] or [0.0])
    return (
        printable(info.name),
        mode,
        str(len(info.holders)),
        holders,
        left,
        str(len(info.waiters)),
        longest,
        str(info.token),
        info.kind,
    )


def _nobody_holds(info: LockInfo) -> str:
    if info.recorded:
        return "recorded"
    return "closed" if info.closed else "free"


def table(infos: list[LockInfo]) -> Table:
    """Return a table with a line for each lock. What does not fit is cut or left out, the name last."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    rows = [dict(zip(_HEADINGS, _row(info), strict=True)) for info in infos]
    widths = {
        heading: max([cell_len(heading), *(cell_len(row[heading]) for row in rows)])
        for heading in _HEADINGS
    }
    room = _room(widths)
    for heading in _LEFT_OUT:
        if room >= min(_LEAST, widths["name"] + widths.get("held by", 0)):
            break
        del widths[heading]
        room = _room(widths)
    if "held by" in widths:
        # The name gets what it needs, two thirds of the room at least; the holders get the rest.
        wanted = min(widths["name"], max(room * 2 // 3, room - widths["held by"]))
        widths["held by"] = max(1, min(widths["held by"], room - wanted))
    else:
        wanted = min(widths["name"], room)
    widths["name"] = max(1, wanted)
    found = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading, width in widths.items():
        justify: Literal["left", "right"] = "left" if heading in _TEXTS else "right"
        found.add_column(heading, justify=justify, no_wrap=True, width=width)
    for row in rows:
        found.add_row(*(Text(row[heading]) for heading in widths))
    return found


def _room(widths: dict[str, int]) -> int:
    """Return how many cells a terminal has for the name and the holders, beside the other columns."""
    others = sum(width + 2 for heading, width in widths.items() if heading not in _CUT)
    return console().width - others - 2 * len(_CUT & widths.keys())


def _row(info: LockInfo) -> tuple[str, ...]:
    told = dict(zip(COLUMNS, summary(info), strict=True))
    overdue = ", overdue" if any(holder.overdue for holder in info.holders) else ""
    return (
        *(told["name"], told["kind"], told["mode"], told["holders"]),
        ", ".join(dict.fromkeys(map(_named, info.holders))) or "-",
        _longest([holder.holding for holder in info.holders]) if info.holders else "",
        told["seconds_left"] + overdue,
        *(told["waiters"], told["seconds_waited"]),
    )


def _named(one: HolderInfo) -> str:
    """Name a holder: its client, and what users have said of it."""
    value = f" for {printable(one.value)}" if one.value else ""
    description = f" ({printable(one.description)})" if one.description else ""
    note = f' "{printable(one.note)}"' if one.note else ""
    return f"{printable(one.client)}{value}{description}{note}"


def print_list(infos: list[LockInfo], *, header: bool) -> None:
    if for_people():
        render(table(infos) if infos else "No lock is held or waited for.")
        return
    if header:
        print_line(*COLUMNS)
    for info in infos:
        print_line(*summary(info))


def render(what: RenderableType) -> None:
    console().print(what)


# -- everything about one lock ---------------------------------------------------------------------


def print_one(info: LockInfo) -> None:
    """Print the lock, then a line for each holder and waiter, in columns. The same in a pipe."""
    facts = [("name", printable(info.name)), ("kind", info.kind), ("state", _state(info))]
    facts = [fact for fact in facts if fact != ("kind", "lock")]
    facts.append(("token", str(info.token or "none known")))
    _print_columns(facts)
    if info.holders or info.waiters:
        print()
        _print_columns(
            [_holder_cells(one) for one in info.holders]
            + [_waiter_cells(one) for one in info.waiters]
        )


def _longest(times: Sequence[float | None]) -> str:
    """Return the longest, or that the store does not tell them."""
    known = [seconds for seconds in times if seconds is not None]
    return f"{max(known):.1f}" if known else "?"


def _seconds(time: float | None, what: str) -> str:
    return "" if time is None else f"{time:.1f} s {what}"


def _state(info: LockInfo) -> str:
    if info.holders:
        return f"held by {plural(len(info.holders), 'holder')}, {len(info.waiters)} waiting"
    if info.recorded:
        return _recorded(info.recorded)
    if info.closed:
        return f"closed for {info.closed:.1f} s more: by a lock-delay or hold_at_least"
    return "free"


def _recorded(record: RecordedInfo) -> str:
    since = "" if record.ago is None else f", since {record.ago:.1f} s"
    return f"done: its success is on record{since}, for {record.remaining:.1f} s more"


def _holder_cells(one: HolderInfo) -> tuple[str, ...]:
    since = "" if one.holding is None else f"since {one.holding:.1f} s"
    overdue = ", overdue: nobody has extended it" if one.overdue else ""
    facts = (f"token {one.token}", since, _seconds(one.remaining, f"left{overdue}"))
    times = f"acquired {plural(one.count, 'time')}"
    return ("holder", one.mode, printable(one.client), *facts, times, *_words_of_users(one))


def _waiter_cells(one: WaiterInfo) -> tuple[str, ...]:
    place = f"waiter {one.position + 1}"
    facts = ("", "", _seconds(one.waiting, "waited"), "")
    return (place, one.mode, printable(one.client), *facts, *_words_of_users(one))


def _words_of_users(one: HolderInfo | WaiterInfo) -> tuple[str, ...]:
    said = said_by_users(one)
    return tuple(f"{what} {printable(text)}" if text else "" for what, text in said.items())


def _print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows of one length, without the columns that are empty in all of them."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (
            cell + " " * (width - cell_len(cell))
            for cell, width in zip(row, widths, strict=True)
            if width
        )
        print("  ".join(padded).rstrip())


# -- who has it, in one sentence -------------------------------------------------------------------

_NAMED = 3


def who(info: LockInfo) -> str:
    """Say who holds a lock, or why it is closed; nothing if it is free."""
    clients = list(dict.fromkeys(printable(one.client) for one in info.holders))
    if clients:
        shared = "shared" if info.holders[0].mode == "shared" else "held"
        return f"{shared} by {_some(clients)}"
    if info.recorded:
        return _recorded(info.recorded)
    if info.closed:
        return f"closed for {info.closed:.1f} s more by a lock-delay or hold_at_least"
    return ""


def who_before(info: LockInfo, ours: str) -> str:
    """Say what a request waits for. Clients whose names begin with ``ours`` are its own."""
    ahead = _ahead(info, ours)
    queue = f"{plural(ahead, 'request')} ahead in the queue" if ahead else ""
    return "; ".join(part for part in (who(info), queue) if part)


def _ahead(info: LockInfo, ours: str) -> int:
    own = [one.position for one in info.waiters if one.client.startswith(ours)]
    return min(own, default=len(info.waiters))


def _some(words: Iterable[str]) -> str:
    listed = list(words)
    more = len(listed) - _NAMED
    return ", ".join(listed[:_NAMED]) + (f" and {more} more" if more > 0 else "")
