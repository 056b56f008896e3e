"""What clients tell of their waits: a row for each client, in an unlogged table."""

from __future__ import annotations

from collections.abc import Sequence

from .calls import Calls

_TELL = "select aiodlock.tell_waits($1, $2, $3, $4) as is_there"
_READ = "select client, pg_catalog.encode(record, 'hex') as record from aiodlock.waits_of($1)"


class Waits:
    """Tells and reads records. Mutable state: ``_told`` (the serial that the database has acknowledged)."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._prefix = f"{calls.prefix}:"
        self._told = -1

    async def tell_waits(self, serial: int, record: bytes, *, keep: float) -> None:
        """Keep this client's record, or keep it longer."""
        if serial != self._told or not await self._send(serial, None, keep):
            self._told = -1
            await self._send(serial, record, keep)
        self._told = serial

    async def _send(self, serial: int, record: bytes | None, keep: float) -> bool:
        await self._calls.up()
        client = self._prefix + self._calls.label
        (row,) = await self._calls.rows(_TELL, client, serial, record, round(keep * 1000))
        return bool(row["is_there"])

    async def waits_of(self, labels: Sequence[str]) -> dict[str, bytes]:
        """Return the records of these clients."""
        await self._calls.up()
        rows = await self._calls.rows(_READ, [self._prefix + label for label in labels])
        return {
            row["client"].removeprefix(self._prefix): bytes.fromhex(row["record"]) for row in rows
        }
