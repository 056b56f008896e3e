"""``aiodlock doctor``: what matters for locks: a server's version, settings, replicas, rights, clock."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError

from .. import BackendError, BackendUnavailable, Client
from ..backends.sources import check_scheme

Level = Literal["ok", "note", "warning", "error"]

_OLDEST = {"redis": (6, 2), "valkey": (7, 2)}
_EVENT_CLASSES = "Kgxe"
#: Seconds.
_ANSWERS_WITHIN, _TRIED_WITHIN = 3.0, 12.0
_NEARLY_FULL = 0.9

_NODE_AWAY = (
    "Locks work as long as a majority of the nodes is reachable.",
    "Bring this node back before another one fails.",
)
_NODE_RESTARTS = (
    "After a restart, this node does not count until the longest lease in use is over.",
    "Nothing has to be set: the clients learn that time. restart_delay=0 is safe only with "
    "appendonly yes and appendfsync always.",
)


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


_ONE_NODE = Finding(
    "lock",
    "error",
    "this server is one node of a cluster",
    "With this URL, a client can lock only names whose slots are on this node.",
    "Programs need redis+cluster://host:port. If you examine node by node, ignore this.",
)


async def examine(source: str | list[str], *, prefix: str, fix: bool) -> list[Finding]:
    """Return the findings, in a fixed order; of a quorum, node by node.

    :raises BackendUnavailable: when the server, or a majority of a quorum's, is unreachable.
    :raises BackendError: when the server refuses a command that is needed.
    """
    if isinstance(source, str):
        return await _examine(source, prefix, fix)
    nodes = [_examine_node(url, prefix, fix, f"node {n}: ") for n, url in enumerate(source, 1)]
    lock, found = await asyncio.gather(try_a_lock(source, prefix), asyncio.gather(*nodes))
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
            lock = _no_lock(error)
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
        refused, lock = error if rights else None, _no_lock(error)
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


async def tried(url: str, prefix: str) -> Finding:
    """Acquire and release a lock, also where that fails as a whole."""
    try:
        async with asyncio.timeout(_TRIED_WITHIN):
            return await try_a_lock(url, prefix)
    except TimeoutError:
        return _no_lock(TimeoutError(f"no answer within {_TRIED_WITHIN:g} s"))
    except BackendError as error:
        return _no_lock(error)


async def examine_server(
    url: str,
    prefix: str,
    *,
    fix: bool,
    lock: Finding | None = None,
    refused: BackendError | None = None,
) -> list[Finding]:
    """Examine one server of Redis or Valkey.

    :param lock: how acquiring a lock went.
    :param refused: what the ACL forbids.
    """
    async with Redis.from_url(url, decode_responses=True) as server:
        if lock is None:
            await server.time()
        doctor = _Doctor(server, prefix, urlsplit(url).username or "default")
        await doctor.read()
        if doctor.is_node_of_cluster and lock is not None:
            lock = _ONE_NODE  # one name more or less says nothing
        found = [doctor.version(), await doctor.notifications(fix=fix), doctor.eviction()]
        found += [doctor.persistence(), doctor.replicas(), await doctor.acl(refused)]
        return [*([] if lock is None else [lock]), *found, await doctor.clock()]


def _no_lock(error: Exception) -> Finding:
    return Finding(
        "lock",
        "error",
        f"a lock could not be acquired and released: {error}",
        "aiodlock cannot work with this server.",
        "Read the other findings. Frequent causes: the ACL, a replica, a server that is too old.",
    )


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
            return _no_lock(error)
    took = (time.perf_counter() - started) * 1000
    return Finding("lock", "ok", f"acquired and released in {took:.1f} ms")


def _append_only(fsync: str | None) -> Finding:
    if fsync == "always":
        return Finding("persistence", "ok", "append-only file, appendfsync always")
    if fsync == "no":
        return Finding(
            "persistence",
            "note",
            "append-only file, appendfsync no",
            "A crash of the machine may lose the grants of the last half a minute: others can acquire "
            "these locks at once.",
            "CONFIG SET appendfsync everysec, or always.",
        )
    return Finding(
        "persistence",
        "ok",
        "append-only file" + (f", appendfsync {fsync}" if fsync else ""),
        "With appendfsync everysec, a crash of the server may lose the grants of the last second.",
    )


class _Doctor:
    """Reads INFO and CONFIG once; each method examines one subject."""

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
        for key in (
            *("notify-keyspace-events", "maxmemory-policy", "save", "appendonly"),
            "appendfsync",
        ):
            try:
                found = await self._server.config_get(key)
            except RedisError:
                continue  # managed services forbid CONFIG
            self._config.update({str(name): str(value) for name, value in found.items()})

    @property
    def is_node_of_cluster(self) -> bool:
        return bool(self._info.get("cluster_enabled"))

    def version(self) -> Finding:
        kind = str(self._info.get("server_name", "redis")).lower()
        text = str(self._info.get(f"{kind}_version") or self._info.get("redis_version", ""))
        if not text:
            return Finding(
                "version",
                "note",
                "unknown: the user may not run INFO",
                "The server may be too old. If the finding 'lock' is ok, it is not.",
                "Give the user the right +info.",
            )
        numbers = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
        oldest = _OLDEST.get(kind, (6, 2))
        if numbers < oldest:
            needed = ".".join(map(str, oldest))
            return Finding(
                "version",
                "error",
                f"{kind} {text}",
                f"aiodlock needs {kind} {needed} or later.",
                "Upgrade the server.",
            )
        return Finding("version", "ok", f"{kind} {text}")

    async def notifications(self, *, fix: bool) -> Finding:
        subject, key = "notifications", "notify-keyspace-events"
        present = self._config.get(key)
        meaning = (
            "Without keyspace notifications, waiters notice later that a lock's keys were deleted or "
            "evicted. Locks are safe without them."
        )
        how = f"CONFIG SET {key} {_EVENT_CLASSES}, and the same in the configuration file"
        if present is None:
            return Finding(
                subject,
                "note",
                "unknown: the user may not run CONFIG",
                meaning,
                f"Set {key} to {_EVENT_CLASSES} in your provider's console.",
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
                "The setting is gone when the server restarts.",
                f"Write it to the configuration file too: {key} {present + missing}",
            )
        return Finding(
            subject,
            "note",
            f"off ({present or 'empty'})",
            meaning,
            f"{how}. Or run aiodlock doctor --fix.",
        )

    def eviction(self) -> Finding:
        policy = self._config.get("maxmemory-policy") or self._info.get("maxmemory_policy")
        limit = int(self._info.get("maxmemory", 0) or 0)
        if policy is None:
            return Finding(
                "eviction",
                "warning",
                "unknown: the user may run neither INFO nor CONFIG",
                "If the server evicts keys, locks can be lost.",
                "Check in your provider's console that maxmemory-policy is noeviction.",
            )
        if policy == "noeviction":
            return self._room(limit)
        # Every key of ours has a TTL, so volatile-* takes them first.
        return Finding(
            "eviction",
            "error" if limit else "warning",
            f"{policy}" + (f", maxmemory {limit} bytes" if limit else ", no maxmemory"),
            "When its memory is full, the server deletes locks that are held. Then two clients can hold "
            "one lock.",
            "CONFIG SET maxmemory-policy noeviction, or use a separate server for locks.",
        )

    def _room(self, limit: int) -> Finding:
        """Tell whether the memory is full, where nothing is evicted."""
        used = int(self._info.get("used_memory", 0) or 0)
        if not limit or used < _NEARLY_FULL * limit:
            return Finding("eviction", "ok", "noeviction")
        full = used >= limit
        return Finding(
            "eviction",
            "error" if full else "warning",
            f"noeviction, and {used} of {limit} bytes are used (maxmemory)",
            "A full server refuses new locks. Locks that are held can be extended and released.",
            "Raise maxmemory, or remove what fills it. A separate server for locks needs little.",
        )

    def persistence(self) -> Finding:
        appends = self._info.get("aof_enabled")
        saves = self._config.get("save")
        lost = (
            "a restart loses every lock. Others can acquire it at once, and the holder notices at its next "
            "extension."
        )
        fix = (
            "If locks must survive a restart: appendonly yes, and appendfsync always. "
            "Otherwise make a restart take longer than the longest ttl."
        )
        if appends is None and saves is None:
            return Finding(
                "persistence",
                "note",
                "unknown: the user may run neither INFO nor CONFIG",
                f"Without an append-only file, {lost}",
                f"Check it in your provider's console. {fix}",
            )
        if appends:
            return _append_only(self._config.get("appendfsync"))
        kind = f"snapshots ({saves})" if saves else "none"
        return Finding("persistence", "note", kind, lost[0].upper() + lost[1:], fix)

    def replicas(self) -> Finding:
        role = self._info.get("role")
        if role is None:
            return Finding(
                "replicas",
                "note",
                "unknown: the user may not run INFO",
                "If there are replicas, a failover may lose the last grants. Then two clients can hold one "
                "lock.",
                "Give the user the right +info, or check it in your provider's console.",
            )
        if role != "master":
            return Finding(
                "replicas",
                "error",
                f"this server is a {role}",
                "Locks need the primary: a replica refuses writes.",
                "Use the URL of the primary, or your provider's primary endpoint.",
            )
        count = int(self._info.get("connected_slaves", 0))
        if not count:
            return Finding(
                "replicas",
                "ok",
                "none",
                "While this server is down, no lock can be acquired.",
            )
        return Finding(
            "replicas",
            "note",
            f"{count}",
            "Replication is asynchronous: a failover may lose the last grants. Then two clients can hold "
            "one lock.",
            "Use fencing tokens: send the token with each write, and reject writes with smaller tokens.",
        )

    async def acl(self, refused: BackendError | None) -> Finding:
        try:
            user = str(await self._server.execute_command("ACL", "WHOAMI"))  # type: ignore[no-untyped-call]
        except RedisError:
            user = self._user
        if refused is None:
            return Finding("acl", "ok", f"user {user} has all rights that are needed")
        prefix = self._prefix
        return Finding(
            "acl",
            "error",
            f"user {user}: {refused}",
            "No client can connect.",
            f"ACL SETUSER {user} ~{prefix}:* resetchannels &{prefix}:* &__keyspace@*__:{prefix}:* "
            "+@read +@write +@scripting +@pubsub +@connection +time; with +info +config|get, doctor "
            "finds out more.",
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
                f"the server's clock jumped by {spread:.1f} s just now",
                "A jump forward ends leases early.",
                "Configure chrony or ntpd to slew the clock instead of stepping it.",
            )
        level: Level = "ok" if abs(offset) < 2.0 else "note"
        return Finding(
            "clock",
            level,
            f"{offset:+.3f} s compared with this machine",
            "Only the server's clock counts. A constant difference does no harm.",
            "" if level == "ok" else "Run NTP on both machines: a later correction may be a jump.",
        )
