"""The soak of ZooKeeper's, for some seconds."""

from __future__ import annotations

import pytest

from ..zookeeper import installed
from .zookeeper_soak import soak

pytestmark = pytest.mark.skipif(not installed(), reason="no ZooKeeper")


async def test_soak_of_some_seconds_finds_nothing() -> None:
    assert await soak(0.15, processes=3) == []
