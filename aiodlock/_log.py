"""The log of one client, bounded: the same event many times within a second is told in two lines.

The first one is written at once, as it is. What follows within a second is counted, and written as one line
at its end: the number, the reasons, and the first few names. So an outage of ten thousand leases writes a
few lines. An event that stands alone in that line is written in its own words.

Hooks hear each event: they are told by ``Telling``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

_logger = logging.getLogger("aiodlock")

#: Events are counted for so long (seconds).
_WINDOW = 1.0
#: So many names stand in a line about many.
_FEW = 5


class _Burst:
    """Events of one kind since a line about them was written. Mutable state: all."""

    __slots__ = ("level", "names", "number", "only", "reasons")

    def __init__(self) -> None:
        self.level = logging.NOTSET
        self.number = 0
        #: Each once, and one more than are written.
        self.names: dict[str, None] = {}
        self.reasons: Counter[str] = Counter()
        #: The first one: what to log if no other one comes.
        self.only: tuple[str, tuple[object, ...], dict[str, Any]] = ("", (), {})


class Log:
    """Mutable state: ``_bursts`` (of the last second, by event), ``_over``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._bursts: dict[str, _Burst] = {}
        self._over = False

    def tell(
        self, level: int, event: str, name: str, text: str, *args: object, **more: object
    ) -> None:
        """Log an event of a name, now or together with others.

        :param more: further fields of the record.
        """
        if not _logger.isEnabledFor(level):
            return
        extra = {"event": event, "lock": name, **more}
        burst = self._bursts.get(event)
        if burst is None:
            _logger.log(level, text, *args, extra=extra)
            if not self._over:
                self._begin(event)
            return
        if not burst.number:
            burst.only = text, args, extra
        burst.level = max(burst.level, level)
        burst.number += 1
        if "reason" in more:
            burst.reasons[str(more["reason"])] += 1
        if len(burst.names) <= _FEW:
            burst.names[name] = None

    def end(self) -> None:
        """Write what was counted. Later events are written one by one."""
        self._over = True
        for event in list(self._bursts):
            self._write(event)

    def _begin(self, event: str) -> None:
        self._bursts[event] = _Burst()
        self._loop.call_later(_WINDOW, self._write, event)

    def _write(self, event: str) -> None:
        burst = self._bursts.pop(event, None)
        if burst is None or not burst.number:
            return
        if burst.number == 1:
            text, args, extra = burst.only
            _logger.log(burst.level, text, *args, extra=extra)
        else:
            reasons = ", ".join(f"{reason}: {n}" for reason, n in burst.reasons.most_common())
            names = list(burst.names)[:_FEW]
            _logger.log(
                burst.level,
                "%s: %d more within a second%s: %s%s",
                event,
                burst.number,
                f" ({reasons})" if reasons else "",
                ", ".join(map(repr, names)),
                ", …" if len(burst.names) > _FEW else "",
                extra={
                    "event": event,
                    "number": burst.number,
                    "locks": names,
                    "reasons": dict(burst.reasons),
                },
            )
        if not self._over:
            self._begin(event)
