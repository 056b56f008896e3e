"""The clock of leases counts sleep, where this machine's does and on others."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from aiodlock import _clock

#: macOS: no CLOCK_BOOTTIME, and a time.monotonic that stands still while the machine sleeps.
MACOS = """
import time
real, asleep = time.monotonic, 0.0
if hasattr(time, "CLOCK_BOOTTIME"):
    del time.CLOCK_BOOTTIME
time.monotonic = lambda: real() - asleep
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", MACOS + code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.strip()


def test_clock_goes_on_in_a_sleep_where_monotonic_stands_still() -> None:
    code = """
from aiodlock import _clock
before = _clock.now()
asleep = 3600.0
print(_clock.CLOCK == time.CLOCK_MONOTONIC, 0 <= _clock.now() - before < 60)
"""
    assert run(code) == "True True"


def test_lease_is_over_after_a_sleep() -> None:
    code = """
import asyncio, contextlib
clock = time.clock_gettime
slept = 0.0
time.clock_gettime = lambda which: clock(which) + (slept if which == time.CLOCK_MONOTONIC else 0.0)
import aiodlock
async def main():
    global slept
    async with aiodlock.Client("memory://") as client:
        lease = await client.lock("nap", ttl=60, on_lost="flag").acquire()
        before = lease.held
        slept = 61.0
        print(before, lease.held, lease.remaining() <= 0)
        with contextlib.suppress(aiodlock.LockError):
            await lease.release()
asyncio.run(main())
"""
    assert run(code) == "True False True"


def test_body_is_cancelled_soon_after_a_sleep_though_the_loops_timers_slept_too() -> None:
    code = """
import asyncio
clock = time.clock_gettime
slept = 0.0
time.clock_gettime = lambda which: clock(which) + (slept if which == time.CLOCK_MONOTONIC else 0.0)
import aiodlock
async def main():
    global slept
    async with aiodlock.Client("memory://") as client, asyncio.timeout(20):
        try:
            async with client.lock("nap", ttl=60):
                slept = 61.0
                await asyncio.Event().wait()
        except aiodlock.LockLost as lost:
            print(lost.reason)
asyncio.run(main())
"""
    assert run(code) == "expired"


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="not Linux")
def test_clock_of_linux_is_that_of_the_boot() -> None:
    assert _clock.CLOCK == time.CLOCK_BOOTTIME
    assert abs(_clock.now() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 60
