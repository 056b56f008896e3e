"""What operators ask: who holds and waits, which names there are; and break a lock by force, or forget a
success."""

from __future__ import annotations

import asyncio
import fnmatch
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import unquote

from ..._errors import BackendError
from ..._model import (
    HolderInfo,
    Kind,
    LockInfo,
    Mode,
    RecordedInfo,
    Tokens,
    WaiterInfo,
)
from .calls import Calls

#: For so long a break is remembered (ms).
_REMEMBERED = 60_000
_INSPECT = """
select asked.number, found.* from unnest($1::text[]) with ordinality asked(key, number)
cross join lateral aiodlock.inspect(asked.key, $2) with ordinality found
order by asked.number, found.ordinality
"""
_NAMES = "select * from aiodlock.names($1, $2, $3)"
#: So many rows of each table are looked at for one page of names: some ms, for which extensions wait.
_PAGE = 500
#: So many names are inspected in one call: some 20 ms.
_INSPECTED_AT_ONCE = 100


class Inspection:
    """The calls of ``KeptStore`` that are for people."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def inspect_all(
        self, kind: Kind, names: Sequence[str], *, queues: bool
    ) -> list[LockInfo]:
        await self._calls.up(hurry=True)
        keys = [self._calls.key(kind, name) for name in names]
        found: list[list[Any]] = [[] for _ in names]
        behind: set[str] = set()
        for first in range(0, len(keys), _INSPECTED_AT_ONCE):
            some = keys[first : first + _INSPECTED_AT_ONCE]
            for row in await self._calls.rows(_INSPECT, some, queues):
                place = first + row["number"] - 1
                found[place].append(row)
                if row["what"] == "name" and row["ago_ms"]:
                    behind.add(keys[place])
        # Where the clock was set back, what was clamped for these answers has to be written.
        await asyncio.gather(*(self._calls.turn(f"look\t{key}") for key in behind))
        return [_info(kind, name, about) for name, about in zip(names, found, strict=True)]

    async def names(self, match: str, kind: Kind = "lock") -> AsyncIterator[str]:
        await self._calls.up(hurry=True)
        mine = after = self._calls.key(kind, "")
        until = mine[:-1] + ";"  # what comes next to the colon
        while page := await self._calls.rows(_NAMES, after, until, _PAGE):
            for row in page:
                after = row["key"]
                name = unquote(after.removeprefix(mine))
                if row["used"] and fnmatch.fnmatchcase(name, match):
                    yield name

    async def break_lock(self, name: str, kind: Kind = "lock", tokens: Tokens | None = None) -> int:
        await self._calls.up(hurry=True)
        key = self._calls.key(kind, name)
        wanted = "" if tokens is None else "\t" + " ".join(map(str, tokens))
        answer = await self._calls.turn(f"break\t{key}\t{_REMEMBERED}{wanted}")
        return int(answer.split(" ")[1])

    async def forget(self, name: str) -> bool:
        await self._calls.up(hurry=True)
        return await self._calls.turn(f"forget\t{self._calls.key('once', name)}") == "forgot 1"


def _info(kind: Kind, name: str, rows: Sequence[Any]) -> LockInfo:
    """Return what the rows about a name say. Others can write into the tables that they are made of.

    :raises BackendError: they cannot be read.
    """
    try:
        return _read(kind, name, rows)
    except (TypeError, ValueError, AttributeError) as wrong:
        raise BackendError(f"what is stored about {name!r} has the wrong shape: {wrong}") from wrong


def _read(kind: Kind, name: str, rows: Sequence[Any]) -> LockInfo:
    holders: dict[tuple[str, Mode], HolderInfo] = {}
    waiters: list[WaiterInfo] = []
    token, closed, places = 0, 0.0, 0
    recorded: RecordedInfo | None = None
    for row in rows:
        what, owner, left = row["what"], row["owner"], row["left_ms"] / 1000
        if what == "name":
            token, closed, places = row["token"], left, row["places"]
            continue
        if what == "record":
            recorded = RecordedInfo(row["ago_ms"] / 1000, left)
            continue
        mode: Mode = "exclusive" if row["mode"] == "x" else "shared"
        shown = unquote(owner[1:]) if owner.startswith("u") else owner[1:]
        if what == "waiter":
            place = len(waiters)
            waiters.append(WaiterInfo(shown, mode, place, left, row["client"], *_texts(row)))
            continue
        before = holders.get((owner, mode))
        holders[owner, mode] = HolderInfo(
            owner=shown,
            mode=mode,
            token=row["token"],
            count=before.count + 1 if before else 1,
            remaining=max(left, (before and before.remaining) or 0.0),
            client=row["client"],
            note=_texts(row)[0],
            description=_texts(row)[1],
            holding=row["ago_ms"] / 1000 if row["ago_ms"] >= 0 else None,
            ttl=max(row["length_ms"] / 1000, (before and before.ttl) or 0.0),
        )
    held, waiting = tuple(holders.values()), tuple(waiters)
    return LockInfo(name, held, waiting, token, closed, places, kind, recorded)


def _texts(row: Any) -> tuple[str, str]:
    """Return the note and the client's description."""
    return unquote(row["note"]), unquote(row["description"])
