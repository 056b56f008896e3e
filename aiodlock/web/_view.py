"""Which rows a viewer sees, in which order, and in which words."""

from __future__ import annotations

import fnmatch
import heapq
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from .._clock import now
from .._model import HolderInfo, LockInfo, WaiterInfo
from .._text import printable
from ._watch import Hold, Loss, Seen, Totals, Watch

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

_Key = Callable[[Seen], tuple[Any, ...]]
_KEYS: dict[str, _Key] = {
    "wait": lambda seen: (seen.waiting_since, seen.info.name),
    "waiters": lambda seen: (-len(seen.info.waiters), seen.info.name),
    "held": lambda seen: (seen.held_since, seen.info.name),
    "name": lambda seen: (seen.info.name,),
}


@dataclass(frozen=True, slots=True)
class Query:
    """What a viewer asked for in the address of the page."""

    match: str = ""
    sort: str = "wait"
    page: int = 1

    @classmethod
    def read(cls, parameters: Mapping[str, str]) -> Query:
        """Read it; what cannot be read is left out."""
        sort = parameters.get("sort", "")
        page = parameters.get("page", "")
        return cls(
            parameters.get("match", "")[:_LONGEST_FILTER],
            sort if sort in SORTS else "wait",
            int(page) if re.fullmatch("[1-9][0-9]{0,5}", page) else 1,
        )

    def link(self, page: int) -> str:
        """Return the query part of a link to another page of the same rows."""
        given = {"match": self.match, "sort": self.sort if self.sort != "wait" else ""}
        return "?" + urlencode(
            {k: v for k, v in given.items() if v} | ({"page": page} if page > 1 else {})
        )


def names(watch: Watch, query: Query) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what the list shows, and the names in it."""
    found = _matching(watch, query.match)
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
        "losses": [_loss(loss, at) for loss in watch.losses],
        "deadlocks": [printable(cycle.words()) for cycle in watch.deadlocks],
    }, tuple(seen.info.name for seen in shown)


def _matching(watch: Watch, match: str) -> list[Seen]:
    """Return the names that contain a text, or match a glob if it has one's characters."""
    if not match:
        return list(watch.names.values())
    if _GLOB.search(match):
        fits = re.compile(fnmatch.translate(match)).match
        return [seen for name, seen in watch.names.items() if fits(name)]
    wanted = match.casefold()
    return [seen for name, seen in watch.names.items() if wanted in name.casefold()]


def state(watch: Watch) -> dict[str, Any]:
    """Return the sums, and what the page says of itself."""
    totals: Totals = watch.totals()
    return {
        "totals": totals,
        "longest_wait": lasting(totals.longest_wait) if totals.waiters else "none",
        "hand_overs": _rate(watch.hand_overs_per_second()),
        "trouble": None if watch.trouble is None else printable(watch.trouble),
        "complete": watch.complete,
        "left_out": watch.left_out,
        "asked": watch.asked,
        "took": f"{watch.took * 1000:.0f} ms",
        "every": lasting(max(1.0, watch.took * 4)),
        "viewers": watch.viewers,
        "lost": len(watch.losses),
    }


def one(info: LockInfo, watch: Watch) -> dict[str, Any]:
    """Return what the page of one name shows."""
    at = now()
    seen = watch.names.get(info.name)
    return {
        "name": printable(info.name),
        "link": link(info.name),
        "state": state(watch),
        "status": _status(info),
        "token": info.token or "none known",
        "holders": [_holder(holder, seen, at) for holder in info.holders[:_LISTED]],
        "waiters": [_waiter(waiter) for waiter in info.waiters[:_LISTED]],
        "more_holders": max(0, len(info.holders) - _LISTED),
        "more_waiters": max(0, len(info.waiters) - _LISTED),
        "losses": [_loss(loss, at) for loss in watch.losses if loss.name == info.name],
        "deadlocks": [],
    }


def link(name: str) -> str:
    """Return the query part of links about a name."""
    return "?" + urlencode({"n": name})


def _row(seen: Seen, at: float) -> dict[str, Any]:
    info = seen.info
    return {
        "name": printable(info.name),
        "link": link(info.name),
        "mode": info.holders[0].mode if info.holders else ("closed" if info.closed else "free"),
        "holders": [_holder(holder, seen, at) for holder in info.holders[:_NAMED]],
        "more": max(0, len(info.holders) - _NAMED),
        "waiters": len(info.waiters),
        "waited": lasting(max(0.0, at - seen.waiting_since)) if info.waiters else "",
        "closed": lasting(info.closed) if info.closed else "",
    }


def _holder(holder: HolderInfo, seen: Seen | None, at: float) -> dict[str, Any]:
    hold = seen.holds.get((holder.owner, holder.token)) if seen is not None else None
    late = _is_late(holder.remaining, hold)
    return {
        "client": printable(holder.client),
        "owner": _owner(holder),
        "note": printable(holder.note),
        "description": printable(holder.description),
        "mode": holder.mode,
        "token": holder.token,
        "held": lasting(at - hold.since) if hold is not None else "",
        "left": lasting(holder.remaining),
        "late": late,
        "count": holder.count,
    }


def _waiter(waiter: WaiterInfo) -> dict[str, Any]:
    return {
        "place": waiter.position + 1,
        "client": printable(waiter.client),
        "owner": _owner(waiter),
        "note": printable(waiter.note),
        "description": printable(waiter.description),
        "mode": waiter.mode,
        "waited": lasting(waiter.waiting),
    }


def _loss(loss: Loss, at: float) -> dict[str, Any]:
    return {
        "name": printable(loss.name),
        "link": link(loss.name),
        "client": printable(loss.client),
        "token": loss.token,
        "ago": lasting(at - loss.at),
        "how": loss.how,
    }


def _owner(one: HolderInfo | WaiterInfo) -> str:
    """Tell an owner that a user has named. The default is made from the client's name."""
    return "" if one.owner.startswith(f"{one.client}-") else printable(one.owner)


def _status(info: LockInfo) -> str:
    if info.holders:
        return f"held ({info.holders[0].mode})"
    if info.closed:
        return f"closed for {lasting(info.closed)} more: by a lock-delay or hold_at_least"
    return "free"


def _rate(rate: float) -> str:
    return f"{rate:.1f}" if rate < 10 else f"{rate:,.0f}"


def _is_late(remaining: float | None, hold: Hold | None) -> bool:
    """Tell whether nobody has extended the lease in time. Not where the store does not tell its end."""
    return hold is not None and remaining is not None and remaining <= hold.longest_remaining / 2


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
