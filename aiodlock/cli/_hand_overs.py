"""Counting hand-overs, for ``aiodlock top``: each is announced to the one who waited, and we listen in."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from ..backends.redis.keys import channel_prefix
from ._source import is_one_server, read_source


class HandOvers:
    """Hand-overs since the last look. Without a ``pubsub`` nothing is known."""

    def __init__(self, pubsub: PubSub | None) -> None:
        self._pubsub = pubsub
        self._since = time.monotonic()

    async def per_second(self) -> float | None:
        """Return how many there were per second since the last call; None where that is not known."""
        if self._pubsub is None:
            return None
        seen = 0
        try:
            while (message := await self._pubsub.get_message(timeout=0)) is not None:
                seen += message["type"] == "pmessage" and message["data"].startswith(b"granted ")
        except (RedisError, OSError):  # an ACL forbids it, or the server is away: the rest goes on
            self._pubsub = None
            return None
        now = time.monotonic()
        since, self._since = self._since, now
        return round(seen / max(now - since, 0.001), 1)


@asynccontextmanager
async def counting(url: str, prefix: str) -> AsyncIterator[HandOvers]:
    """Count while the block lasts. On other stores than one server nothing is known."""
    if not is_one_server(read_source(url)):
        yield HandOvers(None)
        return
    async with Redis.from_url(url) as server, server.pubsub() as pubsub:
        try:
            await pubsub.psubscribe(f"{channel_prefix(prefix)}*")
        except (RedisError, OSError):
            yield HandOvers(None)
        else:
            yield HandOvers(pubsub)
