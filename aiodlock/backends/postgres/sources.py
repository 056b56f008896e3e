"""``postgresql://`` and ``postgres://``."""

from __future__ import annotations

from urllib.parse import parse_qs, unquote, urlsplit

from ..._errors import Unsupported
from ..._model import Capabilities
from .._urls import ENCODE, check_host, without_password
from ..kept_backend import KeptBackend
from ..sources import StoreOptions

try:
    from .store import PostgresBackend
except ImportError as _missing:
    if _missing.name != "asyncpg":
        raise
    raise ImportError(
        "postgresql:// needs the driver asyncpg: pip install 'aiodlock[postgres]'"
    ) from _missing


class PostgresOpener:
    """A database."""

    capabilities: Capabilities = PostgresBackend.capabilities

    def __init__(self, url: str, options: StoreOptions) -> None:
        self.described: str = check_url("source", url)
        self._url = url
        self._options = options
        if options.listen_source is not None:
            check_url("listen_source", options.listen_source)

    def open(self) -> KeptBackend:
        """Make a backend."""
        options = self._options
        store = PostgresBackend(
            self._url,
            self.described,
            listen_source=options.listen_source,
            create=options.create,
            prefix=options.prefix,
            token_retention=options.token_retention,
            unavailable_after=options.unavailable_after,
            description=options.description,
        )
        return KeptBackend(store, unavailable_after=options.unavailable_after)


def read_source(source: str, options: StoreOptions) -> PostgresOpener:
    """Return what opens the database of a URL."""
    if options.min_replicas:
        raise Unsupported(
            "min_replicas is for Redis and Valkey: with PostgreSQL, synchronous_standby_names and "
            "synchronous_commit on the server decide how many standbys a commit waits for"
        )
    return PostgresOpener(source, options)


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
