"""A sentinel of another deployment is not believed. A primary's name that moves is looked up again."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from redis.asyncio.sentinel import SentinelManagedConnection
from redis.exceptions import ConnectionError as RedisConnectionError

import aiodlock
from aiodlock.backends.redis import sentinels
from aiodlock.backends.redis.sentinel import Named

from ..scenes import until
from ..servers import BINARIES
from .servers import SERVICE, SentinelService


@pytest.fixture
def ours() -> Iterator[SentinelService]:
    with SentinelService(BINARIES["valkey9"](), replicas=1, down_after=2000) as service:
        yield service


@pytest.fixture
def theirs() -> Iterator[SentinelService]:
    """Theirs has had a failover more."""
    with SentinelService(BINARIES["valkey9"](), replicas=1, down_after=2000) as service:
        old, _ = service.promote_another()
        service.wait_promoted(old)
        service.settle()
        yield service


def _url(addresses: list[str]) -> str:
    return "redis+sentinel://" + ",".join(addresses) + f"/{SERVICE}/0"


async def test_sentinel_of_another_deployment_is_not_believed(
    ours: SentinelService, theirs: SentinelService, caplog: pytest.LogCaptureFixture
) -> None:
    mixed = _url([*theirs.addresses[:1], *ours.addresses[:2]])
    async with (
        aiodlock.Client(mixed, ttl=60.0) as one,
        aiodlock.Client(_url(ours.addresses), ttl=60.0) as other,
    ):
        lease = await one.lock("name").acquire()
        with pytest.raises(aiodlock.AcquireTimeout):
            await other.lock("name", timeout=0.5).acquire()

        def told() -> bool:
            events = [getattr(r, "event", "") for r in caplog.records]
            return events.count("other_store") == 1

        await until(told, "a line of the log")
        assert lease.held
        await lease.release()
    assert [r for r in caplog.records if r.levelno > logging.WARNING] == []


async def test_sentinel_that_is_heard_first_does_not_decide_which_deployment_is_meant() -> None:
    addresses = [(f"192.0.2.{n}", 26379) for n in range(3)]
    lookup = sentinels.PrimaryLookup(addresses, SERVICE, {})
    lookup.dial_with(lambda address, settings: pytest.fail("nothing is dialled"))
    lookup._sentinels = theirs, *ours = lookup._make_sentinels()
    moment = asyncio.get_running_loop().time()
    theirs.heard = Named(("192.0.2.8", 6379), epoch=2, id="t", knows=frozenset("t")), moment
    await lookup._close_others(tuple)
    for sentinel, id in zip(ours, "ab", strict=True):
        named = Named(("192.0.2.9", 6379), epoch=1, id=id, knows=frozenset("ab"))
        sentinel.heard = named, moment
    assert lookup._choose(lookup._sentinels).address == ("192.0.2.9", 6379)


async def test_address_that_cannot_be_reached_yields_to_another_of_the_same_failover() -> None:
    lookup = sentinels.PrimaryLookup([(f"192.0.2.{n}", 26379) for n in range(2)], SERVICE, {})
    lookup.dial_with(lambda address, settings: pytest.fail("nothing is dialled"))
    lookup._sentinels = lookup._make_sentinels()
    moment = asyncio.get_running_loop().time()
    dead, alive = ("127.0.0.1", 1), ("192.0.2.9", 6379)
    for sentinel, address, id in zip(lookup._sentinels, (dead, alive), "ab", strict=True):
        sentinel.heard = Named(address, epoch=1, id=id, knows=frozenset("ab")), moment
    lookup._dialled = dead
    assert lookup._choose(lookup._sentinels).address == dead
    kind: Any = sentinels.only_primaries(SentinelManagedConnection)
    with pytest.raises(RedisConnectionError):
        await kind(connection_pool=lookup).connect_to(dead)
    assert lookup._choose(lookup._sentinels).address == alive


async def test_name_of_the_primary_that_leads_elsewhere_by_now_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sentinels, "_RESOLVED_FOR", 0.01)
    found = ["192.0.2.1"]

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    lookup = sentinels.PrimaryLookup([("sentinel", 26379)], SERVICE, {})
    lookup.reached(("primary", 6379), ("192.0.2.1", 6379))

    async def leads() -> bool:
        return await lookup._leads_to(("primary", 6379), ("192.0.2.1", 6379))

    assert await leads()
    found[0] = "192.0.2.2"

    async def noticed() -> bool:
        return not await leads()

    await until(noticed, "another server")
