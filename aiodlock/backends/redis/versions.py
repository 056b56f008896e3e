"""Which versions of the protocol may work under a prefix: see ``backends/_versions.py``.

On a cluster one node has the mark, and only that one tells.

This version never writes the mark: entering leaves no key, and on a cluster no script could write it beside
a name. The subscription of each client stands for it. A later version writes the mark first, and then
looks for these channels; a client reads the mark when it is subscribed. So at least one of the two sees the
other, in whichever order they come.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
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
    with suppress(ReplyError):
        await answer
    wrong = objection(answer, prefix)
    if wrong is not None:
        raise wrong


def objection(answer: asyncio.Future[Any], prefix: str) -> BackendError | None:
    """Return why this version may not work under the prefix, by an answer that has come."""
    failed = answer.exception()
    if isinstance(failed, ReplyError) and failed.code == "WRONGTYPE":
        return BackendError(f"the key {versions_key(prefix)} is no mark: {failed}")
    # Otherwise another node of the cluster has it; or what refuses this will refuse the rest.
    mark = None if failed is not None else answer.result()
    allowed = mark is None or allows(mark, VERSION)
    return None if allowed else BackendError(refused_by(mark, prefix, VERSION))
