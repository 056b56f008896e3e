"""The one clock that leases are judged by on this side.

``CLOCK_BOOTTIME`` goes on while the machine is suspended, ``CLOCK_MONOTONIC`` (that of the event
loop) does not: a laptop that wakes up must not believe in a lease that ended in its sleep.
"""

from __future__ import annotations

import time

#: How far this process's clock and the store's may drift apart within one lease.
_DRIFT_SHARE, _DRIFT = 0.01, 0.002

if hasattr(time, "CLOCK_BOOTTIME"):
    _BOOTTIME = time.CLOCK_BOOTTIME
    _gettime = time.clock_gettime

    def now() -> float:
        """Return seconds since boot, the time asleep included."""
        return _gettime(_BOOTTIME)

else:  # pragma: no cover - not Linux
    now = time.monotonic


def local_deadline(sent: float, left_ms: int) -> float:
    """Return until when a lease certainly lives that had ``left_ms`` when a message sent at ``sent``
    was answered."""
    left = left_ms / 1000
    return sent + left - (left * _DRIFT_SHARE + _DRIFT)
