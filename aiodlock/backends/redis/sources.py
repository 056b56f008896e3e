"""What a user may give for Redis and Valkey: a URL, a ready client of redis-py, or a list for a quorum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis
from redis.asyncio import Redis, RedisCluster
from redis.exceptions import RedisError

from ..._errors import Unsupported
from .._urls import without_password
from ..kept import KeptStore
from ..kept_backend import KeptBackend
from ..sources import ReadSource, StoreOptions, check_scheme, not_a_source
from .backend import RedisBackend
from .cluster import ClusterBackend, seeds_of
from .quorum import CAPABILITIES, QuorumBackend
from .replicas import capabilities
from .settings import Settings
from .source import Source

_T = TypeVar("_T")

_CLUSTER = ("redis+cluster", "rediss+cluster")
_SMALLEST_QUORUM = 3


def read_source(source: Any, options: StoreOptions) -> ReadSource:
    """Return what opens the servers of a source."""
    settings = Settings(
        prefix=options.prefix,
        token_retention=options.token_retention,
        unavailable_after=options.unavailable_after,
        configure_notifications=options.configure_notifications,
        min_replicas=options.min_replicas,
        description=options.description,
    )
    if isinstance(source, list | tuple):
        return _quorum(source, options, settings)
    found, described = _read(source)

    def make() -> KeptBackend:
        store: KeptStore
        if isinstance(found, list):
            store = ClusterBackend(found, settings)
        else:
            store = RedisBackend(found, settings)
        return KeptBackend(store, unavailable_after=options.unavailable_after)

    return ReadSource(described, capabilities(options.min_replicas), make)


def _quorum(sources: Sequence[Any], options: StoreOptions, settings: Settings) -> ReadSource:
    nodes, described = _read_nodes(sources)
    if options.min_replicas:
        raise Unsupported("min_replicas above 0 has no meaning with a quorum of servers")

    def make() -> KeptBackend:
        store = QuorumBackend(
            [_source_of(node) for node in nodes],
            settings,
            restart_delay=options.restart_delay,
            described=described,
        )
        return KeptBackend(store, unavailable_after=options.unavailable_after)

    return ReadSource(described, CAPABILITIES, make)


def _read(source: Any) -> tuple[Source | list[Source], str]:
    """Return connection settings (of a cluster: of its first nodes), and a text without secrets."""
    if isinstance(source, RedisCluster):
        seeds = seeds_of(source)
        return seeds, seeds[0].described
    if isinstance(source, Redis):
        settings = Source.from_client(source)
        return settings, settings.described
    if not isinstance(source, str):
        raise _blocking(source) or not_a_source(source)
    scheme = check_scheme(source)
    if "://" not in source:
        raise ValueError(
            f"source must be a URL: {scheme}:// and then the server, with both slashes"
        )
    if scheme in _CLUSTER:
        seeds = _unless_unreadable(seeds_of, source)
        return seeds, "redis+cluster at " + ", ".join(seed.described for seed in seeds)
    settings = _unless_unreadable(Source.from_url, source)
    return settings, settings.described


def _blocking(source: object) -> TypeError | None:
    """Return the error for a client of redis-py that blocks, None for anything else."""
    if not isinstance(source, redis.Redis | redis.RedisCluster):
        return None
    kind = type(source)
    return TypeError(
        f"source is a {kind.__module__}.{kind.__qualname__}, which blocks: pass its URL or a "
        f"redis.asyncio.{kind.__name__}; code without asyncio uses aiodlock.sync.Client"
    )


def _read_nodes(sources: Sequence[Any]) -> tuple[list[Source | str], str]:
    if len(sources) < _SMALLEST_QUORUM:
        raise ValueError(
            f"source must list at least {_SMALLEST_QUORUM} servers for a quorum (5 survive the loss of 2), "
            f"got {len(sources)}"
        )
    nodes: list[Source | str] = []
    described: dict[object, str] = {}
    for one in sources:
        node, text = _read_node(one)
        address: object = node.address if isinstance(node, Source) else text
        if text == "memory://":
            address = len(nodes)  # each is a store of its own
        if address in described:
            raise ValueError(
                f"source must list different servers, {described[address]} is there twice"
                + ("" if text == described[address] else f", also as {text}")
            )
        nodes.append(node)
        described[address] = text
    return nodes, f"a quorum of {', '.join(described.values())}"


def _read_node(source: Any) -> tuple[Source | str, str]:
    """Return connection settings of one node; a str is a memory URL, which needs an event loop."""
    if isinstance(source, list | tuple):
        raise TypeError("source must be a flat list of servers")
    if isinstance(source, str) and check_scheme(source) == "memory":
        return source, source
    found, described = _read(source)
    if isinstance(found, list):
        raise Unsupported(f"a quorum is made of independent servers, and {described} is a cluster")
    return found, described


def _source_of(node: Source | str) -> Source:
    if isinstance(node, Source):
        return node
    from .fake import memory_source

    return memory_source(node)


def _unless_unreadable(read: Callable[[str], _T], url: str) -> _T:
    try:
        return read(url)
    except (ValueError, RedisError) as wrong:
        why = without_password(url, str(wrong))
    # Not from that error: it quotes what it could not read, which may be a part of the password.
    raise ValueError(f"source cannot be read as the URL of a server: {why}")
