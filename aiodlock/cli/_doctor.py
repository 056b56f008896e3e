"""``aiodlock doctor``: what matters for locks at a store. Which store it is, and what that one needs."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError

from .. import BackendError, BackendUnavailable, Client
from ..backends.sources import check_scheme
from ._doctor_redis import examine_server
from ._finding import Finding, no_lock, tried, try_a_lock

#: Seconds.
_ANSWERS_WITHIN = 3.0
_NODE_AWAY = (
    "Locks work as long as a majority of the nodes is reachable.",
    "Bring this node back before another one fails.",
)
_NODE_RESTARTS = (
    "After a restart, this node does not count until the longest lease in use is over.",
    "Nothing has to be set: the clients learn that time. restart_delay=0 is safe only with "
    "appendonly yes and appendfsync always.",
)


async def examine(source: str | list[str], *, prefix: str, fix: bool) -> list[Finding]:
    """Return the findings, in a fixed order; of a quorum, node by node.

    :raises BackendUnavailable: when the server is unreachable.
    :raises BackendError: when the server refuses a command that is needed.
    """
    if isinstance(source, str):
        return await _examine(source, prefix, fix)
    nodes = [_examine_node(url, prefix, fix, f"node {n}: ") for n, url in enumerate(source, 1)]
    lock, found = await asyncio.gather(tried(source, prefix), asyncio.gather(*nodes))
    return [lock, *itertools.chain.from_iterable(found)]


async def _examine_node(url: str, prefix: str, fix: bool, which: str) -> list[Finding]:
    try:
        found = await _examine(url, prefix, fix)
    except BackendError as error:
        found = [Finding("server", "error", str(error), *_NODE_AWAY)]
    return [replace(_among_several(one), subject=which + one.subject) for one in found]


def _among_several(one: Finding) -> Finding:
    """Say what the finding means for one node of a quorum."""
    if one.subject == "replicas" and one.level == "ok":
        return replace(one, meaning="")
    if one.subject == "persistence":
        return replace(one, meaning=_NODE_RESTARTS[0], fix=_NODE_RESTARTS[1])
    return one


async def _examine(url: str, prefix: str, fix: bool) -> list[Finding]:
    scheme = check_scheme(url)
    if scheme == "memory":
        async with Client(url):
            return [Finding("server", "ok", "memory store", "Locks exist in this process only.")]
    if scheme in ("postgresql", "postgres"):
        # First: it says what to install where the driver is missing.
        try:
            lock = await try_a_lock(url, prefix)
        except BackendUnavailable as error:  # perhaps it is there, and read-only
            lock = no_lock(error)
        from ._doctor_postgres import examine as examine_postgres

        return [lock, *await examine_postgres(url)]
    if scheme in ("etcd", "etcds"):
        from ._doctor_etcd import examine as examine_etcd

        lock = await tried(url, prefix)
        return [lock, *await examine_etcd(url)]
    if scheme in ("zookeeper", "zookeepers"):
        from ._doctor_zookeeper import examine as examine_zookeeper

        return await examine_zookeeper(url, prefix)
    if scheme.endswith(("+sentinel", "+cluster")):
        from ._doctor_servers import examine_cluster, examine_sentinels

        lock = await tried(url, prefix)
        examine_all = examine_cluster if scheme.endswith("+cluster") else examine_sentinels
        return [lock, *await examine_all(url, prefix, fix=fix)]
    refused: BackendError | None = None
    try:
        lock = await try_a_lock(url, prefix)
    except BackendError as error:
        if not await _answers(url):
            raise
        rights = "ACL" in str(error) or "NOPERM" in str(error)
        refused, lock = error if rights else None, no_lock(error)
    return await examine_server(url, prefix, fix=fix, lock=lock, refused=refused)


async def _answers(url: str) -> bool:
    """Return whether the server lets us in, and says something of itself."""
    async with Redis.from_url(url, socket_timeout=_ANSWERS_WITHIN) as server:
        try:
            await server.time()
        except NoPermissionError:
            return True
        except (RedisError, OSError):
            return False
    return True
