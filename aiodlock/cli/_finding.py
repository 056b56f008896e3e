"""What ``doctor`` says of one thing, and how acquiring a lock went."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Literal

from .. import BackendError, Client

Level = Literal["ok", "note", "warning", "error"]

#: Seconds.
_TRIED_WITHIN = 12.0

#: The columns in a pipe, and what they mean.
COLUMNS = {
    "level": "`ok`, `note`, `warning` or `error`.",
    "subject": "What was examined.",
    "found": "What was found.",
    "meaning": "What that means for locks. Empty if it means nothing.",
    "fix": "How to fix it. Empty if there is nothing to fix.",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was examined; see ``COLUMNS``."""

    subject: str
    level: Level
    found: str
    meaning: str = ""
    fix: str = ""


async def try_a_lock(source: str | list[str], prefix: str, ttl: float = 5) -> Finding:
    """Acquire and release a lock, waiting for up to five seconds; say how that went."""
    async with Client(source, prefix=prefix, close_timeout=1.0) as client:
        started = time.perf_counter()
        try:
            # Each node is tried at the same time, and keeps other records than a quorum does.
            name = "aiodlock doctor" if isinstance(source, str) else "aiodlock doctor: quorum"
            async with client.lock(name, ttl=ttl, timeout=5):
                pass
        except (BackendError, TimeoutError) as error:
            return no_lock(error)
    took = (time.perf_counter() - started) * 1000
    return Finding("lock", "ok", f"acquired and released in {took:.1f} ms")


async def tried(source: str | list[str], prefix: str) -> Finding:
    """Acquire and release a lock, also where that fails as a whole."""
    try:
        async with asyncio.timeout(_TRIED_WITHIN):
            return await try_a_lock(source, prefix)
    except TimeoutError:
        return no_lock(TimeoutError(f"no answer within {_TRIED_WITHIN:g} s"))
    except BackendError as error:
        return no_lock(error)


def no_lock(error: Exception) -> Finding:
    """Say that a lock could not be had."""
    return Finding(
        "lock",
        "error",
        f"a lock could not be acquired and released: {error}",
        "aiodlock cannot work with this server.",
        "Read the other findings. Frequent causes: the ACL, a full memory, a replica, an old server.",
    )
