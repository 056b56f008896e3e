"""``aiodlock deadlocks``: the cycles of waits that clients have told."""

from __future__ import annotations

from .. import Client
from .._client import core_of
from .._cycles import Cycle
from ._source import read_source


async def find(url: str, prefix: str) -> list[Cycle]:
    """Return each cycle once, from its youngest request on."""
    async with Client(read_source(url), prefix=prefix) as client:
        waiting = {waiter.client async for info in client.locks() for waiter in info.waiters}
        return await core_of(client).deadlocks(waiting)
