"""``memory://``: the Redis backend on fakeredis, inside the process. It runs the same scripts."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from .redis import Source

if TYPE_CHECKING:
    from fakeredis import FakeServer

_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, FakeServer]]
_shared = weakref.WeakKeyDictionary()


def shared_server(url: str) -> FakeServer:
    """Return the store behind ``memory://NAME`` on the running loop, or a new one for ``memory://``."""
    try:
        import fakeredis
    except ImportError as missing:
        raise ImportError("memory:// needs fakeredis: pip install 'aiodlock[memory]'") from missing
    name = urlsplit(url).netloc or urlsplit(url).path
    if not name:
        return fakeredis.FakeServer()
    stores = _shared.setdefault(asyncio.get_running_loop(), {})
    if name not in stores:
        stores[name] = fakeredis.FakeServer()
    return stores[name]


def memory_source(url: str) -> Source:
    """Return connections to the store of a ``memory://`` URL. Needs a running loop."""
    server = shared_server(url)  # says what to install
    from fakeredis.aioredis import FakeRedis

    source = Source.from_client(FakeRedis(server=server))
    source.described = url
    return source
