"""A child that was forked while a client is entered: it takes nothing of its parent's."""

from __future__ import annotations

import asyncio
import os

import pytest

from aiodlock import Client

from ..scenes import bounded
from .servers import EtcdCluster

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def _lock_in_a_loop_of_its_own(url: str) -> None:
    async def lock() -> None:
        async with Client(url) as client:
            async with client.lock("of the child") as lease:
                assert lease.held

    # What the child inherited is a loop that runs: it belongs to the parent.
    asyncio._set_running_loop(None)
    asyncio.new_event_loop().run_until_complete(lock())


async def test_child_locks_by_itself_and_its_parent_keeps_its_leases(
    one_node: EtcdCluster,
) -> None:
    async with Client(one_node.url) as client:
        async with client.lock("of the parent", ttl=2) as lease:
            for _ in range(5):
                pid = os.fork()
                if pid == 0:
                    code = 1
                    try:
                        _lock_in_a_loop_of_its_own(one_node.url)
                        code = 0
                    finally:
                        os._exit(code)
                waiting = asyncio.create_task(asyncio.to_thread(os.waitpid, pid, 0))
                async with bounded(20.0):
                    # The parent's answers come to the parent, while the child is at work.
                    while not waiting.done():
                        await lease.extend()
                        async with client.lock("another"):
                            pass
                _, status = waiting.result()
                assert os.waitstatus_to_exitcode(status) == 0
            assert lease.held
