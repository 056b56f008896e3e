"""Services of several servers, each started when a test of this folder first asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiodlock._embedded import find_valkey9

from ..servers import BINARIES, installed
from .servers import Replicated, SentinelService


@pytest.fixture(scope="module")
def _service() -> Iterator[SentinelService]:
    with SentinelService(find_valkey9(), replicas=2) as service:
        yield service


@pytest.fixture
def service(_service: SentinelService) -> Iterator[SentinelService]:
    """Give a primary, two replicas and three sentinels, empty and well."""
    _service.settle()
    _service.primary.call("FLUSHALL")
    yield _service
    for node in [*_service.nodes, *_service.sentinels]:
        node.resume()


@pytest.fixture
def small_service() -> Iterator[SentinelService]:
    """Give a primary, one replica and three sentinels of the test's own."""
    with SentinelService(find_valkey9(), replicas=1) as service:
        yield service


@pytest.fixture(scope="module", params=["valkey9", "redis62", "redis70"])
def _replicated(request: pytest.FixtureRequest) -> Iterator[Replicated]:
    if not installed(request.param):
        pytest.skip(f"no server for {request.param} on PATH")
    with Replicated(BINARIES[request.param](), replicas=1) as replicated:
        yield replicated


@pytest.fixture
def replicated(_replicated: Replicated) -> Iterator[Replicated]:
    """Give a primary and a replica, empty and well."""
    _replicated.settle()
    _replicated.primary.call("FLUSHALL")
    yield _replicated
    for node in _replicated.nodes:
        node.resume()
