"""``aiodlock doctor`` for etcd: each member, its version and its alarms, and how long a write takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from .. import BackendError, BackendUnavailable
from ..backends.etcd import calls as api
from ..backends.etcd import messages as m
from ..backends.etcd.link import Access, Link
from ..backends.etcd.sources import read_url
from ..backends.etcd.versions import too_old
from ._finding import Finding, Level

_WITHIN = 3.0
#: A write that takes longer than this is worth a note (seconds).
_SLOW = 0.05


async def examine(url: str) -> list[Finding]:
    """Return the findings, in a fixed order.

    :raises BackendUnavailable: no member answers.
    """
    access, described = read_url(url)
    members = await asyncio.gather(*(_member(access, one) for one in access.endpoints))
    answered = [found for found in members if isinstance(found, m.StatusResponse)]
    if not answered:
        raise BackendUnavailable(f"{described}: no member answers")
    findings = [
        _about(endpoint, found, len(access.endpoints))
        for endpoint, found in zip(access.endpoints, members, strict=True)
    ]
    clusters = {found.header.cluster_id for found in answered if found.header is not None}
    if len(clusters) > 1:
        findings.append(
            Finding(
                "cluster",
                "error",
                f"the members belong to {len(clusters)} clusters",
                "Each client uses one member at a time: two of them can hold the same name.",
                "Name the members of one cluster in the URL.",
            )
        )
    findings.append(_alarms(answered))
    writing = tuple(
        endpoint
        for endpoint, found in zip(access.endpoints, members, strict=True)
        if isinstance(found, m.StatusResponse) and found.leader and not found.is_learner
    )
    findings.append(await _try_to_write(replace(access, endpoints=writing), described, members))
    return findings


async def _try_to_write(
    access: Access, described: str, members: Sequence[m.StatusResponse | BackendError]
) -> Finding:
    answered = [found for found in members if isinstance(found, m.StatusResponse)]
    failed = "none of them knows a leader"
    if access.endpoints:
        try:
            return await _write(access, described)
        except BackendError as error:
            failed = str(error)
    return Finding(
        "writes",
        "error",
        f"{len(answered)} of {len(members)} members answer, and nothing can be written: {failed}",
        "Without a majority of the members, no lock can be acquired, extended or released: holders lose "
        "their leases.",
        "Bring members back until a majority of them works, and look at the network between them.",
    )


@asynccontextmanager
async def _opened(access: Access, described: str) -> AsyncIterator[Link]:
    link = Link(access, described)
    running = asyncio.create_task(link.run())
    opening = asyncio.create_task(link.opened())
    try:
        await asyncio.wait({running, opening}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()  # it raises
        yield link
    finally:
        running.cancel()
        opening.cancel()
        await asyncio.gather(running, opening, return_exceptions=True)


async def _member(access: Access, endpoint: str) -> m.StatusResponse | BackendError:
    try:
        async with _opened(replace(access, endpoints=(endpoint,)), endpoint) as link:
            return await link.call(api.STATUS, m.StatusRequest(), within=_WITHIN)
    except BackendError as failed:
        return failed


def _about(endpoint: str, found: m.StatusResponse | BackendError, members: int) -> Finding:
    if isinstance(found, BackendError):
        return Finding(
            f"member {endpoint}",
            "warning",
            str(found),
            "Locks work as long as a majority of the members does.",
            "Bring this member back before another one fails.",
        )
    text = f"etcd {found.version}"
    honest = too_old(found.version)
    if not found.leader:
        return Finding(
            f"member {endpoint}",
            "warning",
            f"{text}, knows no leader",
            "This member is cut off from the majority: clients go on with another one.",
            "Check the network between the members.",
        )
    if found.is_learner:
        return Finding(
            f"member {endpoint}",
            "note",
            f"{text}, a learner",
            "A learner answers no client: clients go on with another member.",
            "Promote it, or leave it out of the URL.",
        )
    if honest is not None:
        level: Level = "warning" if members > 1 else "note"
        return Finding(
            f"member {endpoint}",
            level,
            text,
            f"Before {honest}, a leader that was stopped confirms and revokes the wrong leases when it "
            "wakes. aiodlock does not rely on them; other clients of this cluster do. With lease "
            "checkpoints, a ttl above five minutes can end early after a change of the leader.",
            f"Upgrade to {honest} or later.",
        )
    return Finding(f"member {endpoint}", "ok", text)


def _alarms(answered: list[m.StatusResponse]) -> Finding:
    errors = sorted({error for found in answered for error in found.errors})
    size = max(found.db_size for found in answered) / 1e6
    if any("NOSPACE" in error for error in errors):
        return Finding(
            "alarms",
            "error",
            "; ".join(errors),
            "The database is full: locks can be released, and none can be acquired.",
            "Compact, defragment, disarm the alarm, and raise quota-backend-bytes.",
        )
    errors = [error for error in errors if "no leader" not in error]
    if errors:
        return Finding("alarms", "error", "; ".join(errors), "", "See etcd's documentation.")
    return Finding("alarms", "ok", f"none; the database has {size:.1f} MB")


async def _write(access: Access, described: str) -> Finding:
    async with _opened(access, described) as link:
        grant = await link.call(api.LEASE_GRANT, m.LeaseGrantRequest(ttl=1))
        began = time.perf_counter()
        await link.call(api.LEASE_REVOKE, m.LeaseRevokeRequest(grant.id))
        took = time.perf_counter() - began
    found = f"a write takes {took * 1000:.1f} ms; the shortest lease is {grant.ttl} s"
    if took > _SLOW:
        return Finding(
            "writes",
            "note",
            found,
            "Each acquisition and each release is a write on a majority of the members.",
            "Give etcd a disk of its own, with a short fsync.",
        )
    return Finding("writes", "ok", found)
