"""``aiodlock doctor``: look at a server with the eyes of a lock."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.exceptions import RedisError

from .. import BackendError, BackendUnavailable, Client

Level = Literal["ok", "note", "warning", "error"]

_OLDEST = {"redis": (6, 2), "valkey": (7, 2)}
_EVENT_CLASSES = "Kgxe"

_NODE_AWAY = (
    "Locks live as long as a majority of the nodes does.",
    "Bring it back before another one fails.",
)
_NODE_RESTARTS = (
    "After a restart the node does not count for restart_delay.",
    "restart_delay at least the longest ttl in use; 0 only with appendonly yes and appendfsync always.",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: what was found, what it means for locks, how to mend it."""

    subject: str
    level: Level
    found: str
    meaning: str = ""
    mend: str = ""


async def examine(source: str | list[str], *, prefix: str, fix: bool) -> list[Finding]:
    """Return the findings, in a fixed order; of a quorum, node by node.

    :raises BackendUnavailable: when the server (most of a quorum's) does not answer.
    :raises BackendError: when it refuses.
    """
    if isinstance(source, str):
        return await _examine(source, prefix, fix)
    nodes = [_examine_node(url, prefix, fix, f"node {n}: ") for n, url in enumerate(source, 1)]
    lock, found = await asyncio.gather(_try_a_lock(source, prefix), asyncio.gather(*nodes))
    return [lock, *itertools.chain.from_iterable(found)]


async def _examine_node(url: str, prefix: str, fix: bool, which: str) -> list[Finding]:
    try:
        found = await _examine(url, prefix, fix)
    except BackendError as error:
        found = [Finding("server", "error", str(error), *_NODE_AWAY)]
    return [replace(_among_several(one), subject=which + one.subject) for one in found]


def _among_several(one: Finding) -> Finding:
    """Say what it means for one node of a quorum."""
    if one.subject == "replicas" and one.level == "ok":
        return replace(one, meaning="")
    if one.subject == "persistence":
        return replace(one, meaning=_NODE_RESTARTS[0], mend=_NODE_RESTARTS[1])
    return one


async def _examine(url: str, prefix: str, fix: bool) -> list[Finding]:
    if url.startswith("memory:"):
        async with Client(url):
            return [Finding("server", "ok", "memory store", "Locks live in this process only.")]
    refused: BackendError | None = None
    async with Redis.from_url(url, decode_responses=True) as server:
        try:
            lock = await _try_a_lock(url, prefix)
        except BackendError as error:
            replica = "READONLY" in str(error)
            if not replica and (isinstance(error, BackendUnavailable) or "ACL" not in str(error)):
                raise
            refused, lock = None if replica else error, _no_lock(error)
        doctor = _Doctor(server, prefix, urlsplit(url).username or "default")
        await doctor.read()
        found = [lock, doctor.version(), await doctor.notifications(fix=fix), doctor.eviction()]
        found += [doctor.persistence(), doctor.replicas(), await doctor.acl(refused)]
        return [*found, await doctor.clock()]


def _no_lock(error: Exception) -> Finding:
    return Finding(
        "lock",
        "error",
        f"a lock could not be taken and released: {error}",
        "Nothing will work.",
        "See the other findings: most often it is the ACL, a replica, or a server too old.",
    )


async def _try_a_lock(source: str | list[str], prefix: str) -> Finding:
    async with Client(source, prefix=prefix, close_timeout=1.0) as client:
        started = time.perf_counter()
        try:
            async with client.lock("aiodlock doctor", ttl=5, timeout=2):
                pass
        except (BackendError, TimeoutError) as error:
            return _no_lock(error)
    took = (time.perf_counter() - started) * 1000
    return Finding("lock", "ok", f"taken and released in {took:.1f} ms")


class _Doctor:
    """Reads INFO and CONFIG once; each method looks at one thing."""

    def __init__(self, server: Redis, prefix: str, user: str) -> None:
        self._server = server
        self._user = user
        self._prefix = prefix
        self._info: dict[str, Any] = {}
        self._config: dict[str, str] = {}

    async def read(self) -> None:
        try:
            self._info = dict(await self._server.info("everything"))
        except RedisError:
            self._info = {}
        for key in ("notify-keyspace-events", "maxmemory-policy", "save", "appendonly"):
            try:
                found = await self._server.config_get(key)
            except RedisError:
                continue  # managed services forbid CONFIG
            self._config.update({str(name): str(value) for name, value in found.items()})

    def version(self) -> Finding:
        kind = str(self._info.get("server_name", "redis")).lower()
        text = str(self._info.get(f"{kind}_version") or self._info.get("redis_version", ""))
        if not text:
            return Finding(
                "version",
                "note",
                "unknown: INFO is refused",
                "It cannot be seen whether the server is new enough; the lock above tells more.",
                "Allow the user INFO: +info.",
            )
        numbers = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
        oldest = _OLDEST.get(kind, (6, 2))
        if numbers < oldest:
            needed = ".".join(map(str, oldest))
            return Finding(
                "version",
                "error",
                f"{kind} {text}",
                f"aiodlock is made for {kind} {needed} and later.",
                "Upgrade the server.",
            )
        return Finding("version", "ok", f"{kind} {text}")

    async def notifications(self, *, fix: bool) -> Finding:
        subject, key = "notifications", "notify-keyspace-events"
        present = self._config.get(key)
        meaning = (
            "Without them the next waiter of a holder that died looks when that lease ends, as it "
            "does anyway; a lock whose keys are deleted or evicted is noticed later. Nothing is unsafe."
        )
        how = f"CONFIG SET {key} {_EVENT_CLASSES} (and the same in the configuration file)"
        if present is None:
            return Finding(
                subject,
                "note",
                "unknown: CONFIG is refused",
                meaning,
                f"Set {key} to {_EVENT_CLASSES} in the console of the service.",
            )
        missing = "".join(c for c in _EVENT_CLASSES if c not in present.replace("A", "gxe"))
        if not missing:
            return Finding(subject, "ok", f"on ({present})")
        if fix:
            try:
                await self._server.config_set(key, present + missing)
            except RedisError as refused:
                return Finding(
                    subject, "warning", f"could not be turned on: {refused}", meaning, how
                )
            return Finding(
                subject,
                "ok",
                f"turned on ({present + missing})",
                "Until the server restarts: write it to the configuration file too.",
            )
        return Finding(
            subject, "note", f"off ({present or 'empty'})", meaning, f"{how}, or doctor --fix."
        )

    def eviction(self) -> Finding:
        policy = self._config.get("maxmemory-policy") or self._info.get("maxmemory_policy")
        limit = int(self._info.get("maxmemory", 0) or 0)
        if policy is None:
            return Finding(
                "eviction",
                "warning",
                "unknown: INFO and CONFIG are refused",
                "A server that evicts keys can lose locks.",
                "See in the console of the service that maxmemory-policy is noeviction.",
            )
        if policy == "noeviction":
            return Finding("eviction", "ok", "noeviction")
        # Every key of ours has a TTL, so volatile-* takes them first.
        return Finding(
            "eviction",
            "error" if limit else "warning",
            f"{policy}" + (f", maxmemory {limit} bytes" if limit else ", no maxmemory"),
            "A full server deletes locks that are held: two may hold one name.",
            "CONFIG SET maxmemory-policy noeviction, or give locks a server of their own.",
        )

    def persistence(self) -> Finding:
        appends = self._info.get("aof_enabled")
        saves = self._config.get("save")
        lost = (
            "a restart forgets every lock: holders learn it at their next extension, others get in."
        )
        mend = (
            "For locks that must outlive a restart: appendonly yes, appendfsync always. "
            "Otherwise let a restart take longer than the longest ttl."
        )
        if appends is None and saves is None:
            return Finding(
                "persistence",
                "note",
                "unknown: INFO and CONFIG are refused",
                f"Without an append-only file: {lost}",
                f"See in the console of the service. {mend}",
            )
        if appends:
            return Finding(
                "persistence",
                "ok",
                "append-only file",
                "With appendfsync everysec a crash may lose the last second's grants.",
            )
        kind = f"snapshots ({saves})" if saves else "none"
        return Finding("persistence", "note", kind, lost.capitalize(), mend)

    def replicas(self) -> Finding:
        role = self._info.get("role")
        if role is None:
            return Finding(
                "replicas",
                "note",
                "unknown: INFO is refused",
                "With replicas a failover may lose the last grants, and two may hold a name.",
                "Allow the user INFO (+info), or see in the console of the service.",
            )
        if role != "master":
            return Finding(
                "replicas",
                "error",
                f"this server is a {role}",
                "Locks live on the primary; a replica refuses writes.",
                "Connect to the primary, or to the primary endpoint of the service.",
            )
        count = int(self._info.get("connected_slaves", 0))
        if not count:
            return Finding(
                "replicas",
                "ok",
                "none",
                "The server is a single point of failure: locks wait for it.",
            )
        return Finding(
            "replicas",
            "note",
            f"{count}",
            "Replication is asynchronous: a failover may lose the last grants, and two may hold a name.",
            "Give the token to whatever is written to, and let it refuse smaller ones.",
        )

    async def acl(self, refused: BackendError | None) -> Finding:
        try:
            user = str(await self._server.execute_command("ACL", "WHOAMI"))  # type: ignore[no-untyped-call]
        except RedisError:
            user = self._user
        if refused is None:
            return Finding("acl", "ok", f"user {user} may do all that is needed")
        prefix = self._prefix
        return Finding(
            "acl",
            "error",
            f"user {user}: {refused}",
            "No client can be entered.",
            f"ACL SETUSER {user} ~{prefix}:* resetchannels &{prefix}:* &__keyspace@*__:{prefix}:* "
            "+@read +@write +@scripting +@pubsub +@connection +time; +info +config|get show this "
            "doctor more.",
        )

    async def clock(self) -> Finding:
        offsets: list[float] = []
        try:
            for _ in range(5):
                before = time.time()
                seconds, micros = await self._server.time()
                after = time.time()
                offsets.append(int(seconds) + int(micros) / 1e6 - (before + after) / 2)
        except RedisError as refused:
            return Finding("clock", "note", f"unknown: {refused}")
        spread, offset = max(offsets) - min(offsets), sorted(offsets)[2]
        if spread > 1.0:
            return Finding(
                "clock",
                "error",
                f"the server's clock stepped by {spread:.1f} s just now",
                "A step forward ends leases early.",
                "Let the clock be slewed, not stepped (chrony or ntpd without big steps).",
            )
        level: Level = "ok" if abs(offset) < 2.0 else "note"
        return Finding(
            "clock",
            level,
            f"{offset:+.3f} s from this machine's",
            "Leases count on the server's clock alone: a constant difference does no harm.",
            "" if level == "ok" else "Set both clocks by NTP: a correction may come as a step.",
        )
