"""Asking a connection to PostgreSQL: whoever gives up leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import asyncpg

from aiodlock.backends.postgres.connection import ask


class _Connection:
    def terminate(self) -> None:
        """Nothing is under way."""

    def is_closed(self) -> bool:
        return True


async def test_query_that_fails_as_its_caller_is_cancelled_is_not_complained_of() -> None:
    """Found by a seed: a task's exception was never retrieved."""
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    async def fail() -> None:
        raise asyncpg.InterfaceError("connection is closed")

    connection: Any = _Connection()
    caller = asyncio.create_task(ask(connection, fail(), 60))
    await asyncio.sleep(0)  # it has asked
    await asyncio.sleep(0)  # that has failed
    caller.cancel()
    await asyncio.wait({caller})
    assert caller.cancelled()
    del caller
    gc.collect()
    assert not told
