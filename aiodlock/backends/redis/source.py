"""Where the server is: what a user gave, turned into connections of our own.

redis-py does what it does well: URLs, TLS, authentication, handshake, Sentinel look-up. Nothing is
taken from the pool of a client that the user owns; only its connection settings are used.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

#: Settings that belong to a pool's way of using connections, not to ours.
_DROPPED = ("maint_", "maintenance_", "oss_cluster_maint", "orig_", "himport_", "event_dispatcher")
_OVERRIDES: dict[str, Any] = {
    "protocol": 2,
    "decode_responses": False,
    "health_check_interval": 0,
    "retry_on_timeout": False,
    "retry_on_error": [],
}


class Source:
    """Connection settings of one server (or of one Sentinel service)."""

    def __init__(self, pool: ConnectionPool, described: str) -> None:
        self._class: type[AbstractConnection] = pool.connection_class
        self._kwargs = {
            key: value
            for key, value in pool.connection_kwargs.items()
            if not key.startswith(_DROPPED)
        } | _OVERRIDES
        # A Sentinel pool's connections ask it where the primary is.
        self._pool = pool
        self.db = int(self._kwargs.get("db") or 0)
        self.described = described

    @classmethod
    def from_url(cls, url: str) -> Source:
        """Read a ``redis://``, ``rediss://`` or ``unix://`` URL, or raise ValueError."""
        return cls(ConnectionPool.from_url(url), _without_secrets(url))

    @classmethod
    def from_client(cls, client: Redis) -> Source:
        """Use the connection settings of a client that the caller still owns."""
        pool = client.connection_pool
        where = pool.connection_kwargs
        place = where.get("path") or f"{where.get('host', 'localhost')}:{where.get('port', 6379)}"
        return cls(pool, f"{type(client).__name__} at {place}")

    def make_connection(self) -> AbstractConnection:
        """Return a new connection, not connected yet."""
        return self._class(**self._kwargs, retry=Retry(NoBackoff(), 0))  # type: ignore[no-any-return,unused-ignore]


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"
