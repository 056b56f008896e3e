"""Backends and stores that have other objects answer people, and tell what clients wait for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Protocol
from urllib.parse import unquote

from .._model import HolderInfo, Kind, LockInfo, Mode, Tokens


class Inspector(Protocol):
    """Answers people; see ``StoreBase``."""

    async def inspect_all(
        self, kind: Kind, names: Sequence[str], *, queues: bool
    ) -> list[LockInfo]: ...

    def names(self, match: str, kind: Kind) -> AsyncIterator[str]: ...

    async def break_lock(self, name: str, kind: Kind, tokens: Tokens | None) -> int: ...

    async def forget(self, name: str) -> bool: ...


class WaitsTold(Protocol):
    """Tells and reads what clients wait for; see ``StoreBase``."""

    async def tell_waits(self, serial: int, record: bytes, *, keep: float) -> None: ...

    async def waits_of(self, labels: Sequence[str]) -> dict[str, bytes]: ...


class Asked:
    """The calls of ``StoreBase`` that are passed on to these two."""

    def __init__(self, inspection: Inspector, waits: WaitsTold) -> None:
        self._inspection = inspection
        self._waits = waits

    async def inspect(self, kind: Kind, name: str) -> LockInfo:
        return (await self.inspect_all(kind, [name]))[0]

    async def inspect_all(
        self, kind: Kind, names: Sequence[str], *, queues: bool = True
    ) -> list[LockInfo]:
        return await self._inspection.inspect_all(kind, names, queues=queues)

    def names(self, match: str, kind: Kind = "lock") -> AsyncIterator[str]:
        return self._inspection.names(match, kind)

    async def break_lock(self, name: str, kind: Kind = "lock", tokens: Tokens | None = None) -> int:
        return await self._inspection.break_lock(name, kind, tokens)

    async def forget(self, name: str) -> bool:
        return await self._inspection.forget(name)

    async def tell_waits(self, serial: int, record: bytes, *, keep: float) -> None:
        await self._waits.tell_waits(serial, record, keep=keep)

    async def waits_of(self, labels: Sequence[str]) -> dict[str, bytes]:
        return await self._waits.waits_of(labels)

    def announce(self, kind: str, name: str) -> None:
        """Do nothing: observers watch the name itself."""

    async def settle(self) -> None:
        """Every answer is waited for by a call."""


def by_owner(holds: Iterable[HolderInfo]) -> tuple[HolderInfo, ...]:
    """Return one entry for each owner and mode, with the number of its holds that the store counts.

    :param holds: with owners as the store has them; people are shown them as users named them.
    """
    found: dict[tuple[str, Mode], HolderInfo] = {}
    for hold in holds:
        before = found.get((hold.owner, hold.mode))
        count = before.count + 1 if before else 1
        found[hold.owner, hold.mode] = replace(hold, count=count)
    return tuple(replace(hold, owner=shown(hold.owner)) for hold in found.values())


def shown(owner: str) -> str:
    """Return an owner as the user named it, or the task's id."""
    return unquote(owner[1:]) if owner.startswith("u") else owner[1:]
