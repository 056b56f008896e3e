"""What ``aiodlock run`` says of a run, on standard error: as text, or as JSON objects, one a line."""

from __future__ import annotations

import asyncio
import json
import sys

from .. import Client, LockError, LockInfo
from .._errors import LossReason
from ..backends._label import process_label
from ._run_options import Run
from ._show import who_before

#: A request that waits for longer tells what it waits for (seconds).
_SILENT = 0.5
#: What ``--quiet`` keeps to itself. Failures are always told.
QUIET = frozenset(("waiting", "not_acquired", "done"))
_WHY: dict[LossReason, str] = {
    "expired": "its lease could not be extended in time",
    "broken": "an operator released it by force",
    "taken_over": "another client holds it",
    "gone": "the store does not know it any more (flushed, evicted, failed over, or its clock jumped)",
    "max_hold": "it was held for the longest time allowed",
    "closed": "the client was closed",
}


def say(wanted: Run, event: str, text: str, **facts: object) -> None:
    """Print a message, unless it is to be quiet."""
    if wanted.quiet and event in QUIET:
        return
    if wanted.as_json:
        text = json.dumps({"event": event, "name": wanted.name, "message": text, **facts})
    else:
        text = f"aiodlock: {text}"
    print(text, file=sys.stderr, flush=True)


async def say_waiting(wanted: Run, client: Client) -> None:
    """Say what is waited for, after a moment."""
    await asyncio.sleep(_SILENT)
    try:
        info = await client.inspect(wanted.name, kind=wanted.kind)
    except LockError as error:
        say(wanted, "waiting", f"waiting for {wanted.name!r}; {error}")
        return
    if any(holder.client.startswith(process_label()) for holder in info.holders):
        return  # granted just now
    say(wanted, "waiting", f"waiting for {wanted.name!r}{_by(info)}", held_by=_clients(info))


async def say_not_acquired(wanted: Run, client: Client) -> None:
    """Say who has it instead."""
    if wanted.quiet:
        return
    text = f"{wanted.name!r} was not acquired"
    text += f" within {wanted.timeout:g} s" if wanted.timeout else ""
    try:
        info = await client.inspect(wanted.name, kind=wanted.kind)
    except LockError:
        say(wanted, "not_acquired", text)
    else:
        say(wanted, "not_acquired", f"{text}{_by(info)}", held_by=_clients(info))


def _by(info: LockInfo) -> str:
    who = who_before(info, process_label())
    return f": {who}" if who else ""


def _clients(info: LockInfo) -> list[str]:
    return list(dict.fromkeys(holder.client for holder in info.holders))


def say_losing(wanted: Run, reason: LossReason, why_silent: str, kill_in: float) -> None:
    """Say that the command is asked to end, and when it is killed."""
    why = _WHY[reason]
    if reason == "expired":
        why += f", and has {kill_in + wanted.spare:.1f} s left{why_silent}"
    say(
        wanted,
        "losing",
        f"{wanted.name!r}: {why}; the command gets SIGTERM now, and SIGKILL in {kill_in:.1f} s "
        "if it still runs",
        reason=reason,
        kill_in=round(kill_in, 3),
    )


def say_lost(wanted: Run, reason: LossReason, token: int) -> None:
    """Say that the command did not have the lock to its end."""
    text = f"{wanted.name!r} was lost while the command ran: {_WHY[reason]} (token {token})"
    say(wanted, "lost", text, reason=reason)
