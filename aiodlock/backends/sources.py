"""Which package a source is for. Nothing of a package is imported before a source of its is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from .._model import Capabilities
from .base import Backend


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The options of ``Client`` that its store reads; the docstring there says what each means."""

    prefix: str
    ttl: float
    token_retention: float
    unavailable_after: float
    configure_notifications: bool
    min_replicas: int
    restart_delay: float | None
    listen_source: str | None
    create: bool
    description: str = ""


class Opener(Protocol):
    """A source that was read: where a store is, and how it is used. No I/O, no event loop."""

    @property
    def described(self) -> str:
        """The source as text, without secrets."""

    @property
    def capabilities(self) -> Capabilities:
        """What the store can do."""

    def open(self) -> Backend:
        """Make a backend, in the event loop that is to run it."""


@dataclass(frozen=True, slots=True)
class ReadSource:
    """An ``Opener`` as a value."""

    described: str
    capabilities: Capabilities
    open: Callable[[], Backend]


#: Functions that read a source, as "module:function". A module is imported when a source of its is used.
_REDIS = "aiodlock.backends.redis.sources:read_source"
_MEMORY = "aiodlock.backends.memory.sources:read_source"
_POSTGRES = "aiodlock.backends.postgres.sources:read_source"
_ETCD = "aiodlock.backends.etcd.sources:read_source"
_ZOOKEEPER = "aiodlock.backends.zookeeper.sources:read_source"
#: Which function reads the URLs of a scheme.
_SCHEMES = {
    "redis": _REDIS,
    "rediss": _REDIS,
    "unix": _REDIS,
    "memory": _MEMORY,
    "redis+sentinel": _REDIS,
    "rediss+sentinel": _REDIS,
    "redis+cluster": _REDIS,
    "rediss+cluster": _REDIS,
    "postgresql": _POSTGRES,
    "postgres": _POSTGRES,
    "etcd": _ETCD,
    "etcds": _ETCD,
    "zookeeper": _ZOOKEEPER,
    "zookeepers": _ZOOKEEPER,
}
#: Which one reads the ready clients of a driver, and lists of sources.
_DRIVERS = {"redis": _REDIS}
_LISTS = _REDIS


def read_source(source: object, options: StoreOptions) -> Opener:
    """Return what opens the store that a user named.

    :raises TypeError: for what is no source.
    :raises ValueError: for a URL that cannot be read, and for options that the store has no use for.
    :raises Unsupported: for options that ask for what the store cannot do.
    """
    reader = _reader_of(source)
    if reader != _POSTGRES and (options.listen_source is not None or options.create):
        raise ValueError("listen_source and create are for PostgreSQL: leave them out")
    if reader != _REDIS and options.configure_notifications:
        raise ValueError("configure_notifications is for Redis and Valkey: leave it out")
    if options.restart_delay is not None and not isinstance(source, list | tuple):
        raise ValueError("restart_delay is for a quorum: give a list of sources")
    module, _, function = reader.partition(":")
    opener: Opener = getattr(import_module(module), function)(source, options)
    return opener


def _reader_of(source: object) -> str:
    if isinstance(source, str):
        return _SCHEMES[check_scheme(source)]
    if isinstance(source, list | tuple):
        return _LISTS
    for base in type(source).__mro__:
        driver = base.__module__.partition(".")[0]
        if driver in _DRIVERS:
            return _DRIVERS[driver]
    raise not_a_source(source)


def not_a_source(source: object) -> TypeError:
    """Return the error for an object that is no source. Clients of both kinds have the same name."""
    kind = type(source)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    return TypeError(
        f"source must be a URL or a redis.asyncio.Redis (in aiodlock.sync also a redis.Redis), not {name}"
    )


def check_scheme(url: str) -> str:
    """Return the scheme of a URL in lower case, or raise ValueError if no store has that one."""
    scheme = url.partition(":")[0].lower() if ":" in url else ""
    if scheme not in _SCHEMES:
        known = ", ".join(f"{known}://" for known in _SCHEMES)
        raise ValueError(
            f"source must be a URL that begins with one of {known}; got scheme {scheme!r}"
        )
    return scheme
