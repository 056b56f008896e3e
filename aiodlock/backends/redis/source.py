"""Where the server is: what a user gave, turned into connections of our own.

redis-py does what it does well: URLs, TLS, authentication, handshake, Sentinel look-up. Nothing is
taken from the pool of a client that the user owns; only its connection settings are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import ConnectionPool, Redis, connection
from redis.asyncio.connection import AbstractConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff

from .._addresses import resolve
from .._urls import ENCODE, check_host
from .sentinel import Address
from .sentinels import PrimaryLookup, only_primaries
from .tls import share_context
from .wire import Wire

SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")

#: Settings that belong to a pool's way of using connections, not to ours.
_DROPPED = ("maint_", "maintenance_", "oss_cluster_maint", "orig_", "himport_", "event_dispatcher")
_OVERRIDES: dict[str, Any] = {
    "protocol": 2,
    "decode_responses": False,
    "health_check_interval": 0,
    "retry_on_timeout": False,
    "retry_on_error": [],
}
_SENTINEL_PORT = 26379
#: Options of a URL that are for the sentinels alone, there with "sentinel_" in front.
_SENTINEL_LOGIN = ("username", "password")
#: Settings that hold for servers and sentinels.
_SHARED = ("socket_", "ssl_")
#: What a connection calls itself to the server.
_NAMES = ("driver_info", "lib_name", "lib_version")


class Source:
    """Connection settings of one server (or of one Sentinel service).

    :param remap: where a node of a cluster is reached that says that it is elsewhere.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        described: str,
        remap: Callable[[Address], Address] | None = None,
    ) -> None:
        self._class: type[AbstractConnection] = pool.connection_class
        self._kwargs = {
            key: value
            for key, value in pool.connection_kwargs.items()
            if not key.startswith(_DROPPED) and key != "retry"
        } | _OVERRIDES
        if not any(name in self._kwargs for name in _NAMES):
            self._kwargs |= _calling_itself_redis_py()
        self._lookup: PrimaryLookup | None = None
        self.db: int = int(self._kwargs.get("db") or 0)
        self.described = described
        self.remap = remap
        #: Two sources with the same are the same server, or one database of it each.
        self.address: tuple[object, ...] = _address_of(self._kwargs)
        if self._is_looked_up:
            check_host(self.place[0])

    @classmethod
    def from_url(cls, url: str) -> Source:
        """Read a URL of one server or of a Sentinel service, or raise ValueError."""
        if url.partition(":")[0].lower() in SENTINEL_SCHEMES:
            return _read_sentinel_url(url)
        _check(url)
        source = cls(ConnectionPool.from_url(url), _without_secrets(url))
        try:
            source._new()
        except TypeError as unknown:
            raise ValueError(
                f"source has an option that redis-py does not know ({unknown})"
            ) from None
        return source

    @classmethod
    def from_client(cls, client: Redis) -> Source:
        """Use the connection settings of a client that the caller still owns."""
        pool = client.connection_pool
        if isinstance(pool, SentinelConnectionPool):
            if not pool.is_master:
                raise ValueError(
                    f"{pool!r} reads from replicas, where no lock can be taken: pass "
                    "Sentinel(...).master_for(...)"
                )
            source = cls(pool, f"service {pool.service_name!r}")
            source.address = ("service", pool.service_name)
            return source.found_by(PrimaryLookup.of_pool(pool))
        where = pool.connection_kwargs
        place = where.get("path") or f"{where.get('host', 'localhost')}:{where.get('port', 6379)}"
        return cls(pool, f"{type(client).__name__} at {place}")

    @property
    def place(self) -> Address:
        """The host and the port that are dialled."""
        return _place_of(self._kwargs)

    @property
    def _is_looked_up(self) -> bool:
        """Whether a resolver is asked for the host. What connects in another way than redis-py (fakeredis,
        say) may have a name that no resolver knows."""
        own, redis_py = (
            getattr(one, "_connect", None) for one in (self._class, connection.Connection)
        )
        return own is redis_py and "path" not in self._kwargs

    def at(self, host: str, port: int) -> Source:
        """Return the same settings for another server. What it is called is where it says that it is."""
        other = copy(self)
        other.described = f"{host}:{port}"
        if self.remap is not None:
            # Users' code: what it does not know (a node that has joined) is dialled where it says it is.
            with suppress(Exception):
                host, port = self.remap((host, port))
        other._kwargs = self._kwargs | {"host": host, "port": port}
        return other

    def found_by(self, lookup: PrimaryLookup) -> Source:
        """Ask Sentinel where the server is, for every connection anew and while connected."""
        self._class = only_primaries(self._class)
        self._kwargs["connection_pool"] = self._lookup = lookup
        lookup.dial_with(_connection_to_sentinel)
        return self

    async def watch(
        self, wires: Callable[[], Iterable[Wire]], may_hold: Callable[[], bool], silence: float
    ) -> None:
        """Close wires to a server that is not meant any more; until cancelled, where that can change."""
        if self._lookup is not None:
            await self._lookup.watch(wires, may_hold, silence)

    def suspect(self) -> None:
        """Find out at once whether another server is meant now."""
        if self._lookup is not None:
            self._lookup.suspect()

    async def look_up(self) -> None:
        """Wait until the resolver knows the server's name: a dial would take a thread of the loop's."""
        if self._lookup is None and self._is_looked_up:
            await resolve(*self.place)

    @property
    def further_at(self) -> float:
        """When looking for the server has last come further."""
        return 0.0 if self._lookup is None else self._lookup.further_at

    def make_connection(self) -> AbstractConnection:
        """Return a new connection, not connected yet."""
        connection = self._new()
        share_context(connection)
        return connection

    def _new(self) -> AbstractConnection:
        """Return a connection that has read no files yet; TypeError for an option that it does not know."""
        connection: AbstractConnection = self._class(**self._kwargs, retry=Retry(NoBackoff(), 0))  # type: ignore[unused-ignore]
        return connection


def _check(url: str) -> None:
    """Refuse what redis-py takes for database 0, or for port 6379, without a word."""
    parts = urlsplit(url)
    if parts.netloc and "@" in url and "@" not in parts.netloc:  # the rest would be told as a path
        raise ValueError(ENCODE)
    db = unquote(parts.path).strip("/")
    if parts.scheme in ("redis", "rediss") and db and not (db.isascii() and db.isdigit()):
        example = f"{parts.scheme}://{parts.hostname or 'localhost'}/0"
        raise ValueError(f"source must end with a database's number, not {db!r}: {example}")
    if parts.scheme in ("redis", "rediss") and parts.port == 0:
        raise ValueError("no server can be at port 0")


def _connection_to_sentinel(address: Address, settings: dict[str, Any]) -> AbstractConnection:
    host, port = address
    pool = Redis(host=host, port=port, **settings).connection_pool
    return Source(pool, f"{host}:{port}").make_connection()


@cache
def _calling_itself_redis_py() -> dict[str, Any]:
    """Return what redis-py would tell the server of itself.

    It would read the metadata of its package for it at each connection: a third of what that costs.
    Versions that have no such setting do not.
    """
    info = getattr(connection, "DriverInfo", None)
    return {} if info is None else {"driver_info": info()}


def _address_of(settings: dict[str, Any]) -> tuple[object, ...]:
    if "path" in settings:
        return "unix", settings["path"]
    host, port = _place_of(settings)
    return host.lower().rstrip("."), port


def _place_of(settings: dict[str, Any]) -> Address:
    host, port = settings.get("host", "localhost"), settings.get("port", 6379)
    try:
        return str(host), int(port)
    except (TypeError, ValueError):
        raise ValueError(f"source must have a port, not {port!r}") from None


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


# -- redis+sentinel://user:password@h1:26379,h2:26379/service/db?sentinel_password=... ------------------


def _read_sentinel_url(url: str) -> Source:
    # By hand: several hosts with ports are no host to urllib, and it may refuse IPv6 ones.
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    place, _, query = rest.partition("?")
    netloc, _, path = place.partition("/")
    login, _, hosts = netloc.rpartition("@")
    service, db = _service_and_db(scheme, hosts, path)
    addresses = [_address(one, hosts) for one in hosts.split(",")]
    described = f"{scheme}://{hosts}/{service}{db and '/'}{db}"
    # redis-py reads what is written as in its own URLs.
    plain = f"{scheme.partition('+')[0]}://{login}{login and '@'}host/{db}?{query}"
    settings: dict[str, Any] = {
        key: value
        for key, value in parse_url(plain).items()
        if key not in ("host", "port", "connection_class")
    }
    for_sentinels = {key: value for key, value in settings.items() if key.startswith(_SHARED)}
    for option in _SENTINEL_LOGIN:
        if (value := settings.pop(f"sentinel_{option}", None)) is not None:
            for_sentinels[option] = value
    kind: type[SentinelManagedConnection] = SentinelManagedConnection
    if scheme == "rediss+sentinel":
        kind = SentinelManagedSSLConnection
        for_sentinels["ssl"] = True
    source = Source(ConnectionPool(connection_class=kind, **settings), described)
    source.found_by(PrimaryLookup(addresses, service, for_sentinels))
    source.address = (frozenset(addresses), service)
    try:
        source.make_connection()
    except TypeError as unknown:
        raise ValueError(
            f"source has an option that redis-py does not know ({unknown}); for the sentinels there "
            f"are {' and '.join(f'sentinel_{option}' for option in _SENTINEL_LOGIN)}"
        ) from None
    return source


def _service_and_db(scheme: str, hosts: str, path: str) -> tuple[str, str]:
    service, _, db = path.partition("/")
    example = f"{scheme}://{hosts or 'host:26379'}/{service or 'mymaster'}/0"
    if not hosts or not service:
        what = "the service, as the sentinels call it" if hosts else "at least one sentinel"
        raise ValueError(f"source must name {what}: {example}")
    if db and not (db.isascii() and db.isdigit()):
        raise ValueError(f"source must end with a database's number, not {db!r}: {example}")
    return unquote(service), db


def _address(text: str, hosts: str) -> tuple[str, int]:
    host, colon, port = text.strip().rpartition(":")
    if not colon or port.endswith("]"):  # no port; an IPv6 address has colons of its own
        host, port = text.strip(), str(_SENTINEL_PORT)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"source must have an IPv6 address in brackets, [{text}]: {hosts!r}")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(
            f"source must name each sentinel as host or host:port, separated by commas: {hosts!r}"
        )
    check_host(host)
    return host, int(port)
