"""Where locks live, also told by a synchronous redis-py client: only its connection settings are used."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from .._client import SourceLike as AsyncSource

if TYPE_CHECKING:
    import redis

SourceLike: TypeAlias = "AsyncSource | redis.Redis | Sequence[str | redis.Redis]"

#: Objects of the blocking driver that mean nothing to the other.
_DROPPED = (
    "retry",
    "parser_class",
    "connection_pool",
    "cache",
    "command_packer",
    "event_dispatcher",
)


def asynchronous(source: Any) -> Any:
    """Return the source as ``aiodlock.Client`` takes it."""
    if isinstance(source, list | tuple):
        return [asynchronous(one) for one in source]
    if "redis" not in sys.modules:
        return source  # no object of a driver that was never imported
    import redis

    return _asynchronous(source) if isinstance(source, redis.Redis) else source


def _asynchronous(source: redis.Redis) -> Any:
    import redis.asyncio as aioredis
    from redis import connection as blocking

    pool = source.connection_pool
    kinds: dict[type, type[aioredis.connection.AbstractConnection]] = {
        blocking.Connection: aioredis.Connection,
        blocking.SSLConnection: aioredis.SSLConnection,
        blocking.UnixDomainSocketConnection: aioredis.UnixDomainSocketConnection,
    }
    kind = kinds.get(pool.connection_class)
    if kind is None:
        raise TypeError(
            f"source is a {type(source).__module__}.{type(source).__qualname__} whose connections are made "
            f"by {pool.connection_class.__qualname__}: give its URL instead"
        )
    known = {name for base in kind.__mro__ for name in inspect.signature(base).parameters}
    settings = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if name in known and name not in _DROPPED
    }
    pool_of_ours = aioredis.ConnectionPool(connection_class=kind, **settings)
    return aioredis.Redis(connection_pool=pool_of_ours)
