"""What an attack on the scripts found."""

from __future__ import annotations

from typing import Any

import pytest

from ..servers import Store
from .direct import Direct, Heard


async def test_new_head_is_told_when_to_look_also_when_its_owner_gets_somebody_else_in(
    direct: Direct, heard: Heard
) -> None:
    await direct.acquire("holder", owner="uone", ttl=10_000)
    await direct.acquire("dead", waiter_ttl=90_000)
    await direct.acquire("next", waiter_ttl=90_000, client="stranger")
    await direct.acquire("again", waiter_ttl=90_000)  # as if its owner had come to hold since
    await direct.age("dead", by=100_000)
    await heard.notices()
    assert (await direct.extend("again", 90_000, owner="uone"))[0] == "held"
    assert ("stranger", "look", "next") in await heard.notices()


@pytest.mark.timeout(240)
@pytest.mark.stores("valkey9")
async def test_time_to_grant_many_readers_grows_with_their_number_not_with_its_square(
    store: Store, direct: Direct
) -> None:
    raw: Any = await store.raw()

    async def computed() -> float:
        """Return what the server has computed: that does not depend on what else runs."""
        used = await raw.info("cpu")
        return float(used["used_cpu_user"] + used["used_cpu_sys"])

    async def time_to_grant(number: int) -> float:
        await raw.flushall()
        await direct.acquire("writer", ttl=600_000)
        for first in range(0, number, 500):
            pipe = raw.pipeline(transaction=False)
            for n in range(first, first + 500):
                await Direct(pipe).acquire(f"reader-{n}", "s", waiter_ttl=600_000)
            await pipe.execute()
        before = await computed()
        await direct.leave("writer")
        needed = await computed() - before
        assert await raw.hlen(direct.keys.state) == number
        return needed

    # A processor is not always equally fast: both are measured right after each other, and once has to do.
    shares = [4 * await time_to_grant(1_000) / await time_to_grant(4_000) for _ in range(5)]
    assert max(shares) > 4 / 7, "it was 12 times as long for 4 times as many"
