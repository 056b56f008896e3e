"""The leader of the documentation stands again after everything that happens to its store."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

import aiodlock

from ..proxy import FaultProxy
from ..scenes import PATIENCE, until
from ..servers import Store

pytestmark = pytest.mark.stores("valkey9")
PAGE = Path(__file__).parents[2] / "docs/how-to/leader-election.md"


async def test_leader_of_the_page_leads_again_after_an_outage_longer_than_unavailable_after(
    real_store: Store, proxy: FaultProxy
) -> None:
    led: list[int] = []

    async def schedule_jobs(fence: int) -> None:
        led.append(fence)
        await asyncio.sleep(600)

    code: dict[str, Any] = {"schedule_jobs": schedule_jobs}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for block in blocks:
        if "async def lead(" in block or "async def lead_for_ever(" in block:
            exec(block.replace("sleep(5)", "sleep(0.1)").replace("ttl=10", "ttl=2"), code)
    async with aiodlock.Client(proxy.url, unavailable_after=1.0) as client:
        leading = asyncio.create_task(code["lead_for_ever"](client))
        await until(lambda: led)
        proxy.stall()
        async with asyncio.timeout(PATIENCE):
            # It is lost, the next attempt is given up, and perhaps more of them.
            await asyncio.sleep(6.0)
            await proxy.heal()
            await until(lambda: len(led) > 1 or leading.done())
        assert not leading.done(), leading
        leading.cancel()
        await asyncio.wait([leading])
