"""Who listens to a PostgreSQL server's notifications. On servers: tests/fault and tests/contract."""

from __future__ import annotations

import asyncio

from aiodlock.backends._identity import Known
from aiodlock.backends.postgres.history import History
from aiodlock.backends.postgres.listening import Listening


async def test_who_listens_is_told_when_the_store_ends() -> None:
    """Nothing more is told: who observes a leader looks whether another session has begun."""

    async def on_up() -> None:
        pass

    known: Known[History] = Known("a database", silence=30.0, may_hold=lambda: True)
    url = "postgresql://nowhere/locks"
    listening, heard = Listening(url, url, known=known, sessions=False, on_up=on_up), list[str]()
    listening.listen("changes", heard.append)
    running = asyncio.create_task(listening.run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    assert heard == [""]
