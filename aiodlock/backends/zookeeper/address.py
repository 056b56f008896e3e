"""Where a URL of ZooKeeper leads."""

from __future__ import annotations

import math
import re
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from .._tls import Tls
from .._urls import ENCODE, check_host, without_password
from .servers import Credentials, Ensemble

_PORTS = {"zookeeper": 2181, "zookeepers": 2281}
#: ZooKeeper's own tickTime, in seconds.
_TICK = 2.0
#: What servers refuse in a path: control characters, what takes more than 16 bits, and others.
_REFUSED = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\U0010ffff]")
_OPTIONS = ("tick_time", "auth", "ca", "cert", "key")


def read_url(url: str, prefix: str) -> Ensemble:
    """Return where a URL leads: ``zookeeper://user:password@h1:2181,h2:2181/chroot?tick_time=2``.

    :raises ValueError: for a URL that cannot be read.
    """
    try:
        return _read(url, prefix)
    except ValueError as wrong:
        why = without_password(url, str(wrong))
        if why == str(wrong):
            raise
    # Not from that error: it quotes a part of the password.
    raise _unreadable(why)


def _read(url: str, prefix: str) -> Ensemble:
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    user, separator, hosts = parts.netloc.rpartition("@")
    if parts.fragment or "@" in parts.path:
        raise _unreadable(ENCODE)
    try:
        given = parse_qsl(parts.query, strict_parsing=bool(parts.query))
    except ValueError as wrong:
        raise _unreadable(str(wrong)) from None
    options = dict(given)
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise _unreadable(f"no option {unknown[0]!r}; there are {', '.join(_OPTIONS)}")
    if len(given) > len(options):
        raise _unreadable("an option is given twice")
    path = _path(parts.path)
    root = f"{path}/{quote(prefix, safe='')}"
    return Ensemble(
        hosts=tuple(_host(host.strip(), _PORTS[scheme]) for host in hosts.split(",")),
        root=root,
        tick=_tick(options),
        credentials=_credentials(user if separator else None, options),
        tls=_tls(scheme, options),
        described=f"{scheme}://{hosts}{path}",
    )


def _unreadable(why: str) -> ValueError:
    return ValueError(
        f"source is not a URL that can be read: {why}; "
        "it is written zookeeper://host:2181,host:2181/chroot"
    )


def _host(text: str, port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, given = parts.hostname, parts.port
        check_host(host or "")
    except ValueError as wrong:
        raise _unreadable(str(wrong)) from None
    if not host or given == 0:
        raise _unreadable(f"no server in {text!r}")
    return host, given or port


def _path(text: str) -> str:
    steps = [unquote(step) for step in text.strip("/").split("/")] if text.strip("/") else []
    for step in steps:
        if not step or step in (".", "..") or "/" in step or _REFUSED.search(step):
            raise _unreadable(f"no node can be called {step!r}")
    return "".join(f"/{step}" for step in steps)


def _tick(options: dict[str, str]) -> float:
    try:
        tick = float(options.get("tick_time", _TICK))
    except ValueError:
        tick = 0.0
    if not 0.0 < tick < math.inf:
        raise _unreadable("tick_time is the servers' tickTime, in seconds")
    return tick


def _credentials(user: str | None, options: dict[str, str]) -> Credentials | None:
    mechanism = options.get("auth", "digest")
    if mechanism not in ("digest", "sasl"):
        raise _unreadable("auth is digest or sasl")
    if user is None:
        if "auth" in options:
            raise _unreadable("auth needs a user and a password")
        return None
    name, separator, password = user.partition(":")
    if not name or not separator:
        raise _unreadable("a user and a password are written user:password@")
    return Credentials(
        "sasl" if mechanism == "sasl" else "digest", unquote(name), unquote(password)
    )


def _tls(scheme: str, options: dict[str, str]) -> Tls | None:
    if scheme == "zookeeper":
        if options.keys() & {"ca", "cert", "key"}:
            raise _unreadable("ca, cert and key are for zookeepers://")
        return None
    tls = Tls("ZooKeeper", ca=options.get("ca"), cert=options.get("cert"), key=options.get("key"))
    try:
        tls.read()
    except OSError as wrong:
        raise ValueError(f"source: a file of TLS cannot be read: {wrong}") from wrong
    return tls
