"""Which servers a client knows: by a random id in a node, and by how many transactions they had carried
out.

All sessions of a client know the same ones.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from ..._errors import BackendError
from .._identity import Known

#: The version of what is kept in the servers. The node of the id says which ones clients may have.
VERSION = 1


@dataclass(frozen=True, slots=True)
class Seen:
    """Servers at a moment. ``floor``: the transaction that was known when they were asked."""

    id: str
    zxid: int
    floor: int = 0

    def conflict(self, known: Self) -> str:
        """Say why these are other servers, or an older state of them."""
        if self.id != known.id:
            return f"its id is {self.id or 'not there'}, known is {known.id or 'none'}"
        if self.zxid < self.floor:
            return f"it has seen transaction {self.zxid:#x}, known is {self.floor:#x}"
        return ""

    def after(self, known: Self) -> Self:
        """Return the newer one of both."""
        return replace(self, zxid=max(self.zxid, known.zxid))


class Acquaintance(Known[Seen]):
    """What all sessions of a client know.

    Mutable state besides: ``zxid`` (the newest transaction that any of them was told of).
    """

    def __init__(self, described: str, *, silence: float, may_hold: Callable[[], bool]) -> None:
        super().__init__(described, silence=silence, may_hold=may_hold)
        self.zxid: int = 0

    def follow(self, dead: Self) -> None:
        super().follow(dead)
        self.zxid = dead.zxid

    @property
    def id(self) -> str | None:
        """The servers' id; None before they were met, "" where it could not be written."""
        return None if self.value is None else self.value.id

    @property
    def least(self) -> int:
        """The transaction that servers must have seen to be asked at all."""
        return 0 if self.may_be_replaced else self.zxid

    def told_of(self, zxid: int) -> None:
        """The known servers have carried out a write."""
        self.zxid = max(self.zxid, zxid)
        self.heard()

    def meet(self, seen: Seen, where: str) -> bool:
        replaced = super().meet(seen, where)
        self.zxid = seen.zxid if replaced else max(self.zxid, seen.zxid)
        return replaced


def write_mark(id: str | None) -> bytes:
    """Return what stands in the node of the id. None: a new one."""
    mark = {"id": id or secrets.token_hex(8), "min": VERSION, "max": VERSION}
    return json.dumps(mark).encode()


def read_mark(data: bytes, described: str) -> str:
    """Return the id in that node.

    :raises BackendError: it cannot be read, or later versions of aiodlock are at work there.
    """
    try:
        mark = json.loads(data)
        least, id = mark["min"], mark["id"]
        known = type(least) is int and isinstance(id, str) and id.isascii() and len(id) < 100
    except (ValueError, RecursionError, TypeError, KeyError):
        known = False
    if not known:
        raise BackendError(f"{described}: the node of its id cannot be read: {data[:100]!r}")
    if least > VERSION:
        raise BackendError(
            f"{described} is used by later versions of aiodlock (at least {least} of what is kept "
            f"there; this one writes {VERSION}): upgrade it"
        )
    return str(id)
