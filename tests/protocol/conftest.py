"""Fixtures: the scripts on one name of the store, and what clients would hear."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ..servers import Store
from .direct import CLIENTS, Direct, Heard


@pytest.fixture
async def direct(store: Store) -> Direct:
    """Give the scripts on an empty store."""
    return Direct(await store.raw())


@pytest.fixture
async def heard(store: Store) -> AsyncIterator[Heard]:
    """Give what is said to all clients."""
    heard = await Heard.on(await store.raw(), CLIENTS)
    yield heard
    await heard.aclose()
