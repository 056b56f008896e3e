"""What ``--url`` names: one place where locks live, or the servers of a quorum; and what there is."""

from __future__ import annotations

import re

from .. import Client, LockInfo

#: Hosts of one URL are separated by commas too; no scheme stands in front of those.
_NEXT_URL = re.compile(r",\s*(?=[A-Za-z][A-Za-z0-9+.-]*://)")


def read_source(url: str) -> str | list[str]:
    """Return the URL, or a list where several whole URLs are separated by commas."""
    urls = _NEXT_URL.split(url.strip())
    return urls if len(urls) > 1 else urls[0]


def is_one_server(source: str | list[str]) -> bool:
    """Return whether it is one Redis or Valkey that redis-py can be pointed at."""
    return isinstance(source, str) and source.startswith(("redis:", "rediss:", "unix:"))


async def collect(client: Client, match: str) -> list[LockInfo]:
    """Return every lock that is held or waited for, by name."""
    return sorted(
        [info async for info in client.locks(match)], key=lambda info: (info.name, info.kind)
    )
