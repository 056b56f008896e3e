"""The one clock that leases are judged by on this side. It goes on while the machine is suspended.

A laptop that wakes up must not believe in a lease that ended in its sleep. On Linux, ``CLOCK_BOOTTIME``
counts the sleep, and ``CLOCK_MONOTONIC`` (that of the event loop) does not. On macOS, ``CLOCK_MONOTONIC``
counts it, and ``time.monotonic`` does not. A hypervisor that pauses the machine stops all of them.
"""

from __future__ import annotations

import time

#: How far this process's clock and the store's may drift apart within one lease.
_DRIFT_SHARE, _DRIFT = 0.01, 0.002

#: Some loops have timers of whole milliseconds (uvloop). One that is set so much later than something is
#: due does not come before it, to be set again and again until it is.
TIMER_STEP = 0.001

#: Which clock ``clock_gettime`` is asked for.
CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

_gettime = time.clock_gettime


def now() -> float:
    """Return seconds since boot, the time asleep included."""
    return _gettime(CLOCK)


def local_deadline(sent: float, left_ms: int) -> float:
    """Return until when a lease certainly lives that had ``left_ms`` when a message sent at ``sent``
    was answered."""
    left = left_ms / 1000
    return sent + left - (left * _DRIFT_SHARE + _DRIFT)
