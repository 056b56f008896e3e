"""Which versions of the protocol may work under a prefix, as a mark says that every version reads.

The keys of a version carry its number, so clients of two versions never meet: both would hold. Therefore a
later version that uses other keys writes the mark, `MIN MAX`, before it writes any of them. Without a mark
the version of the first release is at work. On a cluster one node has the mark, and only that one tells.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ..._errors import BackendError
from .keys import VERSION, versions_key
from .refusals import ReplyError
from .wire import Wire


def ask(wire: Wire, prefix: str) -> asyncio.Future[Any]:
    """Ask for the mark, together with the next command."""
    return wire.send("GET", versions_key(prefix), later=True)


async def check(answer: asyncio.Future[Any], prefix: str) -> None:
    """Raise a BackendError if this version may not work under the prefix, or if the mark cannot be read."""
    try:
        mark = await answer
    except ReplyError as refused:
        if refused.code == "WRONGTYPE":
            raise BackendError(f"the key {versions_key(prefix)} is no mark: {refused}") from refused
        return  # another node of the cluster has it; or what refuses this will refuse the rest
    if mark is not None and not _allows(mark):
        raise BackendError(
            f"the versions {mark!r:.60} of aiodlock's protocol are at work under the prefix {prefix!r}, "
            f"and this release has version {VERSION}: use the release that the other clients use"
        )


def _allows(mark: object) -> bool:
    """Tell whether a mark allows this version; words behind the two numbers are a later version's."""
    words = mark.split(b" ") if isinstance(mark, bytes) else []
    if len(words) < 2 or not all(word.isdigit() and len(word) < 10 for word in words[:2]):
        return False
    return int(words[0]) <= int(VERSION) <= int(words[1])
