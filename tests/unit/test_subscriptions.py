"""When a subscription that was refused is requested again."""

from __future__ import annotations

import asyncio
from typing import Any

from aiodlock.backends.redis.refusals import ReplyError
from aiodlock.backends.redis.subscriptions import Subscriptions

from ..scenes import SOON, until


class Recorded:
    """A connection that only writes down what is posted."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, ...]] = []
        self.lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def post(self, *command: Any) -> None:
        self.posted.append(command)


async def test_refusal_that_passes_does_not_wait_for_one_that_does_not() -> None:
    subscriptions = Subscriptions(
        on_confirmed=lambda _: None, on_moved=lambda _: None, on_refused=lambda *_: False
    )
    wire: Any = Recorded()
    subscriptions.connected(wire)
    try:
        subscriptions.want(b"events")
        subscriptions.take(ReplyError("NOPERM No permissions to access a channel"))
        subscriptions.want(b"name", "SSUBSCRIBE")
        subscriptions.take(ReplyError("BUSY Redis is busy running a script"))
        wire.posted.clear()
        await until(lambda: ("SSUBSCRIBE", b"name") in wire.posted, "another attempt", within=SOON)
    finally:
        subscriptions.stop()
