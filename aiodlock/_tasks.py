"""The running loop and task; and background tasks, started from tasks and from plain callbacks alike.

asyncio's task group does it, not anyio's: anyio asks which library is running, and since 4.14, where
sniffio is installed, a callback outside of every task has no answer to that.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

#: The loop that this thread runs; None if it runs none.
running_loop: Callable[[], asyncio.AbstractEventLoop | None] = asyncio._get_running_loop
#: The task that a loop of this thread runs; None outside of tasks.
task_of: Callable[[asyncio.AbstractEventLoop], asyncio.Task[Any] | None]
if sys.version_info >= (3, 12):
    task_of = asyncio.current_task
else:  # where that is a Python function around this: each block asks twice
    task_of = asyncio.tasks._current_tasks.get  # type: ignore[attr-defined]


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
