"""``etcd://`` and ``etcds://``."""

from __future__ import annotations

from urllib.parse import parse_qs, unquote, urlsplit

from ..._errors import Unsupported
from .._urls import check_host, without_password
from ..sources import ReadSource, StoreOptions

try:
    from .link import Access
    from .store import EtcdBackend
except ImportError as _missing:
    if _missing.name is None or not _missing.name.startswith(("hpack", "hyperframe")):
        raise
    raise ImportError(
        "etcd:// needs the packages hpack and hyperframe: pip install 'aiodlock[etcd]'"
    ) from _missing

_PORT = 2379
_FILES = ("ca", "cert", "key")


def read_source(source: str, options: StoreOptions) -> ReadSource:
    """Return what opens the cluster of a URL."""
    if options.min_replicas:
        raise Unsupported(
            "min_replicas is for Redis and Valkey: in etcd a majority of the members has each write"
        )
    access, described = read_url(source)

    def make() -> EtcdBackend:
        return EtcdBackend(
            access,
            described,
            prefix=options.prefix,
            unavailable_after=options.unavailable_after,
            description=options.description,
        )

    return ReadSource(described, EtcdBackend.capabilities, make)


def read_url(url: str) -> tuple[Access, str]:
    """Return where a URL leads, and that as text without the password."""
    scheme, separator, _ = url.partition("://")
    if scheme.lower() not in ("etcd", "etcds") or not separator:
        raise ValueError("source must be a URL: etcd://host1:2379,host2:2379,host3:2379")
    try:
        return _read(url, scheme.lower())
    except ValueError as wrong:
        why = without_password(url, str(wrong))
    # Not from that error: it may quote a part of the password.
    raise ValueError(f"source is not a URL that can be read: {why}")


def _read(url: str, scheme: str) -> tuple[Access, str]:
    tls = scheme == "etcds"
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    endpoints = tuple(_endpoint(host.strip()) for host in hosts.split(","))
    if parts.path.strip("/") or parts.fragment:
        raise ValueError(
            "it has no path; prefix= of the client keeps clusters' users apart, and '/' and '#' in a "
            "password are percent-encoded"
        )
    query = parse_qs(parts.query, strict_parsing=bool(parts.query))
    if unknown := set(query) - set(_FILES):
        raise ValueError(f"unknown options: {', '.join(sorted(unknown))}")
    if query and not tls:
        raise ValueError("ca, cert and key are for etcds://")
    files = {name: query[name][-1] if name in query else None for name in _FILES}
    if (files["cert"] is None) != (files["key"] is None):
        raise ValueError("cert and key belong together")
    user, _, password = login.partition(":")
    access = Access(
        endpoints,
        tls=tls,
        ca=files["ca"],
        cert=files["cert"],
        key=files["key"],
        user=unquote(user) or None,
        password=unquote(password) or None,
    )
    return access, f"{scheme}://{hosts}"


def _endpoint(host: str) -> str:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise ValueError("a host is missing")
    if parts.port == 0:
        raise ValueError("port 0")
    check_host(parts.hostname)
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{name}:{parts.port or _PORT}"
