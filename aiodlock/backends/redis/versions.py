"""Which versions of the protocol may work under a prefix: see ``backends/_versions.py``.

On a cluster one node has the mark, and only that one tells.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ..._errors import BackendError
from .._versions import allows
from .._versions import refused as refused_by
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
    if mark is not None and not allows(mark, VERSION):
        raise BackendError(refused_by(mark, prefix, VERSION))
