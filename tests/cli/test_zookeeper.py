"""``aiodlock doctor`` on ZooKeeper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiodlock.cli._doctor import examine

from ..zookeeper import ZooKeeperServer, installed

pytestmark = pytest.mark.skipif(not installed(), reason="no ZooKeeper")

TICK = 0.1


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeperServer]:
    with ZooKeeperServer(tick=TICK, longest=8.0) as server:
        yield server


async def test_doctor_tells_which_sessions_are_granted(server: ZooKeeperServer) -> None:
    found = await examine(f"{server.url}?tick_time={TICK}", prefix="aiodlock", fix=False)
    assert [(one.subject, one.level) for one in found] == [
        ("lock", "ok"),
        ("ttl", "ok"),
        ("tick", "ok"),
    ]
    assert found[1].found == "the servers grant 0.2 to 8 s"


async def test_doctor_warns_of_a_tick_that_is_too_short(server: ZooKeeperServer) -> None:
    found = await examine(f"{server.url}?tick_time={TICK / 4}", prefix="aiodlock", fix=False)
    (tick,) = [one for one in found if one.subject == "tick"]
    assert tick.level == "warning"
    assert "?tick_time=0.1" in tick.fix


async def test_doctor_warns_of_a_tick_in_milliseconds(server: ZooKeeperServer) -> None:
    found = await examine(f"{server.url}?tick_time={TICK * 1000}", prefix="aiodlock", fix=False)
    assert [(one.subject, one.level) for one in found] == [
        ("lock", "error"),
        ("ttl", "ok"),
        ("tick", "warning"),
    ]
    assert "?tick_time=0.1" in found[2].fix


async def test_doctor_takes_its_lock_with_a_ttl_that_the_servers_grant() -> None:
    """Their longest session is shorter than the five seconds of elsewhere."""
    with ZooKeeperServer(tick=TICK, longest=2.0) as server:
        found = await examine(f"{server.url}?tick_time={TICK}", prefix="aiodlock", fix=False)
    assert [(one.subject, one.level) for one in found] == [
        ("lock", "ok"),
        ("ttl", "ok"),
        ("tick", "ok"),
    ]
