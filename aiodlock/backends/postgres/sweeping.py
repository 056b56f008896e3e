"""Deleting now and then what has had its time."""

from __future__ import annotations

import asyncio
import logging
import random

from ..._errors import BackendError
from .calls import Calls

_logger = logging.getLogger("aiodlock")

_SWEEP_EVERY = 60.0
#: Names with locks of their own in one call. Few, because each lock takes a place in the server's table of
#: locks until the call has ended.
_SWEEP_MOST = 200
#: Pages of a table that a call looks at; fewer where the server's limits end such a call, and twice as many
#: at each sweep after that.
_SWEEP_PAGES = 1000
_SWEEP = "select place from aiodlock.sweep($1, $2, $3)"


class Sweeping:
    """Sweeps the database. Mutable state: ``pages`` (how much one call can sweep here)."""

    def __init__(self, calls: Calls) -> None:
        self.pages: int = _SWEEP_PAGES
        self._calls = calls

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_EVERY * random.uniform(0.5, 1.5))
            await self.sweep()

    async def sweep(self) -> None:
        self.pages = min(2 * self.pages, _SWEEP_PAGES)
        # Each call goes on where the last one has ended: else it would read again what is not to be swept.
        place: str | None = "m0"
        while place is not None:
            try:
                (row,) = await self._calls.rows(_SWEEP, self.pages, _SWEEP_MOST, place)
                place = row["place"]
            except BackendError as failed:
                _logger.debug("sweeping failed: %s", failed)
                if self.pages == 1 or self._calls.messages.link.connection is None:
                    return
                self.pages = max(1, self.pages // 8)
