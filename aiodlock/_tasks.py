"""Starting background tasks, from tasks and from plain callbacks of the event loop alike.

asyncio's task group does it, not anyio's: anyio asks which library is running, and since 4.14, where
sniffio is installed, a callback outside of every task has no answer to that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def start_soon(group: asyncio.TaskGroup | None, coroutine: Coroutine[Any, Any, Any]) -> bool:
    """Run the coroutine in the group. Return False, and drop it, when the group is over or ending."""
    try:
        if group is not None:
            group.create_task(coroutine)
            return True
    except RuntimeError:
        pass  # the group is ending
    coroutine.close()
    return False
