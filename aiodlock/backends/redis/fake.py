"""Nodes of a quorum in memory: fakeredis, inside the process, runs the scripts."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from .source import Source

if TYPE_CHECKING:
    from fakeredis import FakeServer

_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, FakeServer]]
_shared = weakref.WeakKeyDictionary()


def shared_server(url: str) -> FakeServer:
    """Return the node behind ``memory://NAME`` on the running loop, or a new one for ``memory://``."""
    try:
        import fakeredis
    except ImportError as missing:
        raise ImportError(
            "a quorum of stores in memory needs fakeredis: pip install 'fakeredis[lua]'"
        ) from missing
    name = urlsplit(url).netloc or urlsplit(url).path
    if not name:
        return fakeredis.FakeServer()
    stores = _shared.setdefault(asyncio.get_running_loop(), {})
    if name not in stores:
        stores[name] = fakeredis.FakeServer()
    return stores[name]


def memory_source(url: str) -> Source:
    """Return connections to the node of a ``memory://`` URL. Needs a running loop."""
    server = shared_server(url)  # says what to install
    from fakeredis.aioredis import FakeRedis

    source = Source.from_client(FakeRedis(server=server))
    source.described = url
    return source
