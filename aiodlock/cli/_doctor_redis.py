"""``doctor`` for one server of Redis or Valkey: version, settings, replicas, rights, clock."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import RedisError

from .. import BackendError
from ._finding import Finding, Level

_OLDEST = {"redis": (6, 2), "valkey": (7, 2)}
_EVENT_CLASSES = "Kgxe"
_NEARLY_FULL = 0.9

_ONE_NODE = Finding(
    "lock",
    "error",
    "this server is one node of a cluster",
    "With this URL, a client can lock only names whose slots are on this node.",
    "Programs need redis+cluster://host:port. If you examine node by node, ignore this.",
)


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
        doctor = _Examination(server, prefix, urlsplit(url).username or "default")
        await doctor.read()
        if doctor.is_node_of_cluster and lock is not None:
            lock = _ONE_NODE  # one name more or less says nothing
        found = [doctor.version(), await doctor.notifications(fix=fix), doctor.eviction()]
        found += [doctor.persistence(), doctor.replicas(), await doctor.acl(refused)]
        return [*([] if lock is None else [lock]), *found, await doctor.clock()]


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


class _Examination:
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
            *("notify-keyspace-events", "maxmemory-policy", "maxmemory", "save", "appendonly"),
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
                "It is new enough if 'lock' is ok.",
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
                f"Give the user the right +config|get, or set {key} to {_EVENT_CLASSES} in your provider's "
                "console.",
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
            f"{how}. Or run aiodlock doctor --fix, as a user with the right +config|set.",
        )

    def eviction(self) -> Finding:
        policy = self._config.get("maxmemory-policy") or self._info.get("maxmemory_policy")
        limit = int(self._info.get("maxmemory", self._config.get("maxmemory", 0)) or 0)
        if policy is None:
            return Finding(
                "eviction",
                "warning",
                "unknown: the user may run neither INFO nor CONFIG",
                "If the server evicts keys, locks can be lost.",
                "Give the user the right +info, or check in your provider's console that "
                "maxmemory-policy is noeviction.",
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
        # Each of both may be refused.
        appends = self._info.get("aof_enabled", self._config.get("appendonly"))
        saves = self._config.get("save")
        lost = (
            "a restart loses every lock, and every success of once. Others can acquire a lock at once; its "
            "holder notices within a second after it is connected again."
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
                f"Give the user the right +info, or check it in your provider's console. {fix}",
            )
        if appends in (1, "yes"):
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
        if refused is None and user != "default" and await self._lets_everybody_in():
            return Finding(
                "acl",
                "warning",
                f"user {user} has all rights that are needed; the user default needs no password",
                "Everybody who reaches the server can take and break every lock, without a login.",
                "ACL SETUSER default off, when no client uses it any more.",
            )
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

    async def _lets_everybody_in(self) -> bool:
        """Tell whether a connection without a login may do something with locks."""
        ours = self._server.connection_pool
        options = {**ours.connection_kwargs, "username": None, "password": None}
        async with Redis.from_pool(ConnectionPool(ours.connection_class, **options)) as nobody:
            try:
                await nobody.exists(f"{self._prefix}:doctor")
            except RedisError:
                return False
        return True

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
