"""The worker pool with its singleton job, and the cache that one refreshes for many."""

from __future__ import annotations

import asyncio

import pytest

from aiodlock import Client
from examples import cache_refresh, worker_pool

from ..scenes import until
from ..servers import Store

# The examples take a URL.
pytestmark = pytest.mark.stores("memory", "redis62", "redis70", "valkey9")


async def test_worker_pool_cleans_up_in_one_worker_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "URL", store.url)
    pool = await asyncio.wait_for(worker_pool.main(), 120)
    assert sorted(pool.done) == list(range(40))
    assert pool.cleaned_by
    assert pool.cleaning == 0


async def test_cache_is_loaded_once_per_change(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_refresh, "URL", store.url)
    catalogue = await asyncio.wait_for(cache_refresh.main(), 120)
    assert catalogue.loads == 3


async def test_cleaner_that_is_cancelled_leaves_the_next_one_alone(client: Client) -> None:
    pool = worker_pool.Pool(jobs=0)
    first = asyncio.create_task(pool.clean("first", 1))
    await asyncio.sleep(0)  # it has begun
    first.cancel()  # as a loss does it
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await worker_pool.clean_if_nobody_does(client, pool, "second")
    assert pool.cleaned_by == ["second"]


async def test_change_that_comes_while_the_cache_is_loaded_is_loaded_too(client: Client) -> None:
    catalogue = cache_refresh.Catalogue(client)
    reading = asyncio.create_task(catalogue.read())
    await until(lambda: catalogue.loads == 1, "loading")
    catalogue.invalidate()
    await reading
    await catalogue.read()
    assert catalogue.loads == 2
