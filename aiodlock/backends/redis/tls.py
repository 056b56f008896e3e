"""One TLS context for all connections of this process that have the same settings.

redis-py makes a context for each connection, and each reads all certificate authorities of the machine:
40 ms of CPU where this was measured, many times what a handshake takes. A thousand clients that come back
together had no time for anything else.
"""

from __future__ import annotations

import os
import ssl
from typing import Any

from redis.asyncio.connection import RedisSSLContext

from .refusals import Unusable

_Key = tuple[object, ...]
#: So many different settings are remembered.
_MOST = 16

_contexts: dict[_Key, ssl.SSLContext] = {}


def share_context(connection: Any) -> None:
    """Give a new connection the context of the others, unless a certificate's file has changed since."""
    settings = getattr(connection, "ssl_context", None)
    if type(settings) is not RedisSSLContext or settings.context is not None:
        return
    key = _key_of(settings)
    context = _contexts.get(key)
    if context is None:
        if len(_contexts) >= _MOST:
            _contexts.clear()
        context = _contexts[key] = _read(settings)
    settings.context = context


def _read(settings: RedisSSLContext) -> ssl.SSLContext:
    """Make a context; tell which file cannot be read, which Python's error does not."""
    try:
        return settings.get()
    except OSError as wrong:
        named = {
            name: getattr(settings, name) for name in ("ca_certs", "ca_path", "certfile", "keyfile")
        }
        for name, path in named.items():
            if path and not os.access(path, os.R_OK):
                raise Unusable(f"ssl_{name}: {path!r} cannot be read: {wrong}") from wrong
        given = ", ".join(f"ssl_{name}={path!r}" for name, path in named.items() if path)
        raise Unusable(f"no TLS with {given or 'the files of this system'}: {wrong}") from wrong


def _key_of(settings: RedisSSLContext) -> _Key:
    usual = ssl.get_default_verify_paths()
    named = (settings.ca_certs, settings.ca_path, settings.certfile, settings.keyfile)
    stamps = [_stamp(path) for path in (*named, usual.cafile, usual.capath) if path]
    names = getattr(RedisSSLContext, "__slots__", None) or vars(settings)
    told = [f"{name}={getattr(settings, name, None)!r}" for name in names if name != "context"]
    return (*told, *stamps)


def _stamp(path: str) -> object:
    try:
        about = os.stat(path)
    except OSError:
        return None  # making the context tells what is wrong with it
    return about.st_ino, about.st_size, about.st_mtime_ns
