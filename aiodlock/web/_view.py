"""Which rows a viewer sees, in which order, and in which words."""

from __future__ import annotations

import fnmatch
import heapq
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args
from urllib.parse import urlencode

from .._clock import now
from .._model import HolderInfo, Kind, LockInfo, RecordedInfo, WaiterInfo, said_by_users
from .._text import plural, printable
from ._history import STEP, STEPS, History
from ._sightings import Key, Loss, Seen, Totals
from ._watch import Watch

#: Rows of a page.
ROWS = 50
#: Holders that a row names, and requests that the page of one name lists.
_NAMED = 2
_LISTED = 200
_LONGEST_FILTER = 512
_GLOB = re.compile(r"[*?\[]")

#: How rows can be sorted, and what the page calls it.
SORTS = {
    "wait": "longest wait first",
    "waiters": "most waiters first",
    "held": "longest held first",
    "name": "by name",
}
KINDS: tuple[Kind, ...] = get_args(Kind)

_Key = Callable[[Seen], tuple[Any, ...]]
_KEYS: dict[str, _Key] = {
    "wait": lambda seen: (seen.waiting_since, seen.info.name, seen.info.kind),
    "waiters": lambda seen: (-len(seen.info.waiters), seen.info.name, seen.info.kind),
    "held": lambda seen: (seen.held_since, seen.info.name, seen.info.kind),
    "name": lambda seen: (seen.info.name, seen.info.kind),
}


@dataclass(frozen=True, slots=True)
class Query:
    """What a viewer asked for in the address of the page."""

    match: str = ""
    sort: str = "wait"
    page: int = 1
    #: "" for all.
    kind: str = ""

    @classmethod
    def read(cls, parameters: Mapping[str, str]) -> Query:
        """Read it; what cannot be read is left out."""
        sort = parameters.get("sort", "")
        page = parameters.get("page", "")
        return cls(
            parameters.get("match", "")[:_LONGEST_FILTER],
            sort if sort in SORTS else "wait",
            int(page) if re.fullmatch("[1-9][0-9]{0,5}", page) else 1,
            kind if (kind := parameters.get("kind", "")) in KINDS else "",
        )

    def link(self, page: int) -> str:
        """Return the query part of a link to another page of the same rows."""
        sort = self.sort if self.sort != "wait" else ""
        given = {"match": self.match, "kind": self.kind, "sort": sort}
        return "?" + urlencode(
            {k: v for k, v in given.items() if v} | ({"page": page} if page > 1 else {})
        )


def names(watch: Watch, query: Query) -> tuple[dict[str, Any], tuple[Key, ...]]:
    """Return what the list shows, and the names in it."""
    found = _matching(watch, query)
    pages = max(1, -(-len(found) // ROWS))
    page = min(query.page, pages)
    # Only what is in front is sorted: all of it would take as long as the rest of a page.
    first = heapq.nsmallest(page * ROWS, found, key=_KEYS[query.sort])
    shown = first[(page - 1) * ROWS :]
    at = now()
    return {
        "rows": [_row(seen, at) for seen in shown],
        "query": query,
        "page": page,
        "pages": pages,
        "found": len(found),
        "watch": watch,
        "state": state(watch),
        "losses": [_loss(loss, at) for loss in watch.seen.losses],
        "lost": watch.seen.lost,
        "plot": plot(watch.seen.history, at),
        "deadlocks": [printable(cycle.words()) for cycle in watch.deadlocks],
    }, tuple(seen.key for seen in shown)


def _matching(watch: Watch, query: Query) -> list[Seen]:
    """Return the names that contain a text, or match a glob if it has one's characters."""
    found = [seen for seen in watch.seen.names.values() if query.kind in ("", seen.info.kind)]
    if not query.match:
        return found
    if _GLOB.search(query.match):
        fits = re.compile(fnmatch.translate(query.match)).match
        return [seen for seen in found if fits(seen.info.name)]
    wanted = query.match.casefold()
    return [seen for seen in found if wanted in seen.info.name.casefold()]


def state(watch: Watch) -> dict[str, Any]:
    """Return the sums, and what the page says of itself."""
    totals: Totals = watch.seen.totals()
    return {
        "totals": totals,
        "longest_wait": _unless_unknown(totals.longest_wait) if totals.waiters else "none",
        "hand_overs": _rate(watch.seen.history.hand_overs_per_second(now())),
        "trouble": None if watch.trouble is None else printable(watch.trouble),
        "complete": watch.complete,
        "left_out": watch.left_out,
        "asked": watch.asked,
        "took": f"{watch.took * 1000:.0f} ms",
        "every": lasting(max(1.0, watch.took * 4)),
        "viewers": watch.viewers,
        "lost": watch.seen.lost,
    }


def one(info: LockInfo, watch: Watch) -> dict[str, Any]:
    """Return what the page of one name shows."""
    at, key = now(), (info.kind, info.name)
    seen, history = watch.seen.names.get(key), watch.seen.history_of(key)
    return {
        "name": printable(info.name),
        "kind": info.kind,
        "link": link(info),
        "breakable": bool(info.holders or info.closed),
        "state": state(watch),
        "status": _status(info),
        "token": info.token or "none known",
        "holders": [_holder(holder, seen, at) for holder in info.holders[:_LISTED]],
        "waiters": [_waiter(waiter) for waiter in info.waiters[:_LISTED]],
        "more_holders": max(0, len(info.holders) - _LISTED),
        "more_waiters": max(0, len(info.waiters) - _LISTED),
        "losses": [_loss(loss, at) for loss in watch.seen.losses if loss.key == key],
        "lost": 0,
        "plot": plot(history, at) if history is not None else None,
        "deadlocks": [],
    }


def plot(history: History, at: float) -> dict[str, Any]:
    """Return what is drawn of the last minutes."""
    return {
        "pictures": history.pictures(at),
        "steps": STEPS,
        "lasts": f"{STEPS * STEP / 60:g} min",
        "step": f"{STEP:g} s",
    }


def link(info: LockInfo) -> str:
    """Return the query part of links about a name."""
    return _link((info.kind, info.name))


def _link(key: Key) -> str:
    kind, name = key
    return "?" + urlencode({"n": name} | ({"kind": kind} if kind != "lock" else {}))


def _row(seen: Seen, at: float) -> dict[str, Any]:
    info = seen.info
    waited = at - seen.waiting_since if seen.waiting_since > float("-inf") else None
    return {
        "name": printable(info.name),
        "kind": info.kind,
        "link": link(info),
        "mode": _mode(info),
        "holders": [_holder(holder, seen, at) for holder in info.holders[:_NAMED]],
        "more": max(0, len(info.holders) - _NAMED),
        "waiters": len(info.waiters),
        "waited": _unless_unknown(waited) if info.waiters else "",
        "closed": lasting(info.closed) if info.closed else "",
        "recorded": _kept(info.recorded) if info.recorded else "",
    }


def _mode(info: LockInfo) -> str:
    if info.holders:
        return info.holders[0].mode if info.kind == "lock" else "held"
    return "recorded" if info.recorded else "closed" if info.closed else "free"


def _kept(record: RecordedInfo) -> str:
    """Say since when a success is on record, and for how long it stays there."""
    ago = "" if record.ago is None else f"{lasting(record.ago)} ago, "
    return f"{ago}kept for {lasting(record.remaining)}"


def _holder(holder: HolderInfo, seen: Seen | None, at: float) -> dict[str, Any]:
    since = seen.holds.get((holder.owner, holder.token)) if seen is not None else None
    # Where the store does not tell since when, it is at least since the page saw it.
    least = "≥ " if holder.holding is None else ""
    return _who(holder) | {
        "mode": holder.mode,
        "token": holder.token,
        "held": least + lasting(at - since) if since is not None else lasting(holder.holding),
        "left": lasting(holder.remaining),
        "late": holder.overdue,
        "count": holder.count,
    }


def _waiter(waiter: WaiterInfo) -> dict[str, Any]:
    return _who(waiter) | {
        "place": waiter.position + 1,
        "mode": waiter.mode,
        "waited": _unless_unknown(waiter.waiting),
    }


def _loss(loss: Loss, at: float) -> dict[str, Any]:
    return {
        "name": printable(loss.key[1]),
        "kind": loss.key[0],
        "link": _link(loss.key),
        "client": printable(loss.client),
        "token": loss.token,
        "ago": lasting(at - loss.at),
        "how": loss.how,
    }


def _who(one: HolderInfo | WaiterInfo) -> dict[str, Any]:
    """Return who it is: the client, and what users have said of it."""
    said = {"client": one.client, **said_by_users(one)}
    return {what: printable(text) for what, text in said.items()}


def _status(info: LockInfo) -> str:
    if info.holders:
        if info.kind == "lock":
            return f"held ({info.holders[0].mode})"
        return f"held by {plural(len(info.holders), 'holder')}"
    if info.recorded:
        return f"done: the success is on record, {_kept(info.recorded)}"
    if info.closed:
        return f"closed for {lasting(info.closed)} more: by a lock-delay or hold_at_least"
    return "free"


def _rate(rate: float) -> str:
    return f"{rate:.1f}" if rate < 10 else f"{rate:,.0f}"


def _unless_unknown(seconds: float | None) -> str:
    return "unknown" if seconds is None else lasting(seconds)


def lasting(seconds: float | None) -> str:
    """Say how long something lasts, for people: ``0.4 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``.

    None, for what a store does not tell, is empty.
    """
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3_600} h {whole % 3_600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3_600} h"
