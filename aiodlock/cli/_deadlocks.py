"""``aiodlock deadlocks``: the cycles of waits that clients have told."""

from __future__ import annotations

from .. import Client
from .._cycles import Cycle, Wait, probe, verify
from .._deadlocks import KIND, Asked, waits_in
from ._source import read_source


async def find(url: str, prefix: str) -> list[Cycle]:
    """Return each cycle once, from its youngest request on."""
    async with Client(read_source(url), prefix=prefix) as client:
        waiting = {waiter.client async for info in client.locks() for waiter in info.waiters}
        backend = client._use().backend
        told = await backend.inspect_all(KIND, sorted(waiting)) if waiting else []
        waits: dict[str, Wait] = {wait.id: wait for info in told for wait in waits_in(info)}
        ask = Asked(backend, {})
        first = await ask.all({id: probe(wait) for id, wait in waits.items()})
        found = await ask.all({id: verify(cycle) for id, cycle in first.items()})
    return [found[id] for id in sorted(found)]
