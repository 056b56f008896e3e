"""The quorum, as a reader would start it, with servers that it starts and kills itself."""

from __future__ import annotations

import asyncio

from examples import quorum


async def test_work_goes_on_when_a_server_dies() -> None:
    seen, tokens = await asyncio.wait_for(quorum.main(), 120)
    assert seen == [
        "the first works",
        "a server is dead",
        "the first is done, and held the lock all the time",
        "the second works",
        "the second is done, and held the lock all the time",
    ]
    assert tokens[0] < tokens[1]
