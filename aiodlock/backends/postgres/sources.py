"""``postgresql://`` and ``postgres://``."""

from __future__ import annotations

from urllib.parse import parse_qs, unquote, urlsplit

from ..._errors import Unsupported
from .._urls import ENCODE, check_host, without_password
from ..kept_backend import KeptBackend
from ..sources import ReadSource, StoreOptions

try:
    from .store import PostgresBackend
except ImportError as _missing:
    if _missing.name != "asyncpg":
        raise
    raise ImportError(
        "postgresql:// needs the driver asyncpg: pip install 'aiodlock[postgres]'"
    ) from _missing


def read_source(source: str, options: StoreOptions) -> ReadSource:
    """Return what opens the database of a URL."""
    if options.min_replicas:
        raise Unsupported(
            "min_replicas is for Redis and Valkey: with PostgreSQL, synchronous_standby_names and "
            "synchronous_commit on the server decide how many standbys a commit waits for"
        )
    described = check_url("source", source)
    if options.listen_source is not None:
        check_url("listen_source", options.listen_source)

    def make() -> KeptBackend:
        store = PostgresBackend(
            source,
            described,
            listen_source=options.listen_source,
            create=options.create,
            prefix=options.prefix,
            token_retention=options.token_retention,
            unavailable_after=options.unavailable_after,
            description=options.description,
        )
        return KeptBackend(store, unavailable_after=options.unavailable_after)

    return ReadSource(described, PostgresBackend.capabilities, make)


def check_url(what: str, url: str) -> str:
    """Return where a URL leads, without user and password, or raise ValueError."""
    scheme, separator, _ = url.partition("://")
    if scheme.lower() not in ("postgresql", "postgres") or not separator:
        raise ValueError(f"{what} must be a URL: postgresql://user@host:5432/database")
    try:
        parts = urlsplit(url)
        hosts = parts.netloc.rpartition("@")[2]
        for host in hosts.split(","):
            one = urlsplit(f"//{host}")
            if one.port == 0:
                raise ValueError("port 0")
            name = unquote(one.hostname or "")
            if not name.startswith("/"):  # that is the directory of a socket
                check_host(name)
        if parts.fragment or "@" in parts.path:
            raise ValueError(ENCODE)
        parse_qs(parts.query, strict_parsing=bool(parts.query))
    except ValueError as wrong:
        why = without_password(url, str(wrong))
    else:
        return f"{scheme.lower()}://{hosts}{parts.path}"
    # Not from that error: it may quote a part of the password.
    raise ValueError(f"{what} is not a URL that can be read: {why}")
