"""``aiodlock doctor`` for ZooKeeper: the sessions that servers grant, and the tick in the URL."""

from __future__ import annotations

import asyncio

from .. import BackendUnavailable, Unsupported
from ..backends.zookeeper.address import read_url
from ..backends.zookeeper.servers import Ensemble
from ..backends.zookeeper.session import Session
from ._finding import Finding, try_a_lock

_WITHIN = 5.0
#: The lock's ttl, where the servers grant such a session.
_TTL = 5.0
#: Timeouts that no server grants: it answers with the nearest one that it does.
_TOO_SHORT, _TOO_LONG = 0.001, 2_000_000.0
#: minSessionTimeout in ticks, unless the operator has set it.
_TICKS = 2


async def examine(url: str, prefix: str) -> list[Finding]:
    """Return the findings, in a fixed order.

    :raises BackendUnavailable: no server is reachable.
    """
    ensemble = read_url(url, prefix)
    shortest = await _granted(ensemble, _TOO_SHORT)
    longest = await _granted(ensemble, _TOO_LONG)
    try:
        lock = await try_a_lock(url, prefix, min(max(_TTL, shortest), longest))
    except Unsupported as refused:
        lock = Finding("lock", "error", f"a lock was refused: {refused}", "", "See 'tick'.")
    return [
        lock,
        Finding("ttl", "ok", f"the servers grant {shortest:g} to {longest:g} s"),
        _tick(ensemble.tick, shortest),
    ]


async def _granted(ensemble: Ensemble, asked: float) -> float:
    """Return the timeout of the session that the servers grant for this one."""
    session = Session(ensemble, asked, f"doctor-{round(asked)}")
    running = asyncio.create_task(session.run())
    try:
        await session.wait_up(_WITHIN)
        return session.granted
    except BackendUnavailable:
        if running.done():
            running.result()
        raise
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _tick(tick: float, shortest: float) -> Finding:
    compare = (
        f"Compare tickTime in zoo.cfg. If it is {shortest / _TICKS * 1000:g} (milliseconds), add "
        f"?tick_time={shortest / _TICKS:g}"
    )
    if shortest < tick:
        return Finding(
            "tick",
            "warning",
            f"tick_time={tick:g} (seconds), but the shortest session is {shortest:g} s, which is 2 ticks "
            "unless minSessionTimeout is set",
            "If tickTime of the servers is shorter, leases end early here, and a ttl under "
            "1.25 * tick_time is refused.",
            compare,
        )
    if shortest <= _TICKS * tick + 0.001:
        return Finding("tick", "ok", f"tick_time={tick:g}, as far as can be seen")
    return Finding(
        "tick",
        "warning",
        f"tick_time={tick:g}, but the shortest session is {shortest:g} s, which is 2 ticks unless "
        "minSessionTimeout is set",
        "If tickTime of the servers is longer, a lease may end there before its holder is told.",
        compare,
    )
