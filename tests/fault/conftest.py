"""Fixtures: clients to which something will happen, behind a proxy."""

from __future__ import annotations

import pytest

import aiodlock

from ..conftest import MakeClient
from ..proxy import FaultProxy
from ..servers import Store
from .scenes import load_scripts


@pytest.fixture
async def make_unlucky(proxy: FaultProxy, store: Store, make_client: MakeClient) -> MakeClient:
    """Give a factory of clients behind the proxy. The store knows the scripts: a call is one message."""
    await load_scripts(store)

    async def make(**options: object) -> aiodlock.Client:
        return await make_client(proxy.url, **options)

    return make


@pytest.fixture
async def unlucky(make_unlucky: MakeClient) -> aiodlock.Client:
    """Give a client behind the proxy, with the default options."""
    return await make_unlucky()
