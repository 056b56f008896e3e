"""The worker pool with its singleton job, and the cache that one refreshes for many."""

from __future__ import annotations

import asyncio

import pytest

from examples import cache_refresh, worker_pool

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
