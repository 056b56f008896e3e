"""A store whose every answer takes seconds: whoever is far gets in, and loses no lease."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

import aiodlock
from aiodlock import BackendError, BackendUnavailable
from aiodlock.backends.etcd import exchange as x

from ...inside import session_of
from ..network import Path
from ..world import Process
from . import etcd_cluster, zookeeper
from .etcd import EtcdScene
from .postgres import PostgresScene
from .scene import Scene
from .zookeeper import ZooKeeperScene


@pytest.mark.parametrize(
    ("kind", "members", "one_way"),
    [
        (EtcdScene, 1, 1.5),
        (EtcdScene, 3, 0.7),
        (EtcdScene, 3, 1.5),
        (ZooKeeperScene, 1, 1.4),
        (ZooKeeperScene, 3, 0.7),
        (ZooKeeperScene, 3, 1.5),
    ],
)
def test_client_enters_over_a_long_way_and_keeps_its_lease(
    kind: type[Scene], members: int, one_way: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "latency", lambda _: one_way)
    monkeypatch.setattr(zookeeper, "TICK", 2.0)  # sessions last as long as usual
    scene = kind(1 if members == 1 else 0)
    ensemble: Any = scene.ensemble  # type: ignore[attr-defined]
    assert len(ensemble.members) == members
    process = Process(scene.world, "far")
    process.loop.wire = scene.wire

    async def use() -> None:
        async with aiodlock.Client(scene.url, ttl=40.0) as client:
            async with client.lock("name", timeout=60.0) as lease:
                await asyncio.sleep(90.0)
                assert lease.held

    _run(scene, process, use())


def test_waiter_is_told_in_time_that_no_server_answers_however_long_they_are_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zookeeper, "TICK", 2.0)
    scene = ZooKeeperScene(0)
    process = Process(scene.world, "locker")
    process.loop.wire = scene.wire
    told: list[float] = []

    async def use() -> None:
        loop = asyncio.get_running_loop()
        async with aiodlock.Client(scene.url, ttl=40.0, unavailable_after=12.0) as client:
            async with client.lock("name", timeout=5.0):
                waiting = asyncio.create_task(client.lock("name", timeout=200.0).acquire())
                await asyncio.sleep(5.0)
                for member in scene.ensemble.members:
                    scene.wire.path(process, scene.ensemble.address(member)).out_blocked = True
                for stream in scene.wire.streams_of(process):
                    stream.break_off()
                began = loop.time()
                with pytest.raises(BackendUnavailable):
                    await waiting
                told.append(loop.time() - began)
                scene.calm_down()

    _run(scene, process, use())
    assert told[0] < 13.5


@pytest.mark.parametrize(("kind", "port"), [(EtcdScene, 2379), (ZooKeeperScene, 2181)])
def test_reason_of_one_server_is_told_although_the_others_are_dark(
    kind: type[Scene], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zookeeper, "TICK", 2.0)
    scene = kind(0)
    ensemble: Any = scene.ensemble  # type: ignore[attr-defined]
    process = Process(scene.world, "locker")
    process.loop.wire = scene.wire
    refusing, *dark = [ensemble.address(member) for member in ensemble.members]
    del scene.wire.listening[refusing, port]
    for address in dark:
        scene.wire.path(process, address).out_blocked = True

    async def use() -> None:
        with pytest.raises(BackendUnavailable, match="nobody listens at"):
            async with aiodlock.Client(scene.url, ttl=40.0):
                pass

    _run(scene, process, use())


def test_server_that_accepts_late_and_says_nothing_is_waited_for_no_longer_than_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five seconds after it has accepted, and not once more for as long as that took."""
    monkeypatch.setattr(zookeeper, "TICK", 2.0)
    scene = ZooKeeperScene(0)
    process = Process(scene.world, "far")
    process.loop.wire = scene.wire
    for member in scene.ensemble.members:
        address = scene.ensemble.address(member)
        scene.wire.path(process, address).latency = lambda: 2.2  # type: ignore[method-assign]
        member.paused = True
    waited: list[float] = []

    async def use() -> None:
        began = asyncio.get_running_loop().time()
        with pytest.raises(BackendUnavailable):
            async with aiodlock.Client(scene.url, ttl=40.0):
                pass
        waited.append(asyncio.get_running_loop().time() - began)

    _run(scene, process, use())
    assert waited[0] < 10.0


def _block(
    scene: EtcdScene | ZooKeeperScene, process: Process, members: Sequence[int]
) -> list[Path]:
    """Block the ways to these members; return them."""
    ensemble: Any = scene.ensemble
    paths = [scene.wire.path(process, ensemble.address(ensemble.members[one])) for one in members]
    for path in paths:
        path.out_blocked = path.in_blocked = True
    return paths


@pytest.mark.parametrize("near", [0, 1, 2])
def test_near_server_that_has_lost_the_others_does_not_keep_off_those_that_are_far(
    near: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is used while all is well. Then it accepts connections still, sooner than the others do."""
    monkeypatch.setattr(zookeeper, "TICK", 2.0)
    scene = ZooKeeperScene(0)
    ensemble = scene.ensemble
    process = Process(scene.world, "locker")
    process.loop.wire = scene.wire
    far = [other for other in range(3) if other != near]
    paths = _block(scene, process, far)

    async def use() -> None:
        async with aiodlock.Client(scene.url, ttl=40.0) as client:
            for path in paths:
                path.calm()
                path.latency = lambda: 1.1  # type: ignore[method-assign]
            async with client.lock("before", timeout=60.0) as kept:
                ensemble.cut.update(frozenset((near, other)) for other in far)
                await asyncio.sleep(3.0)
                async with client.lock("after", timeout=60.0):
                    pass
                await asyncio.sleep(60.0)
                assert kept.held

    _run(scene, process, use())


@pytest.mark.parametrize("alone", [0, 1, 2])
def test_holder_that_calls_nothing_leaves_a_member_of_etcd_that_has_lost_the_others(
    alone: int,
) -> None:
    scene = EtcdScene(0)
    ensemble = scene.ensemble
    process = Process(scene.world, "locker")
    process.loop.wire = scene.wire
    others = [other for other in range(3) if other != alone]
    paths = _block(scene, process, others)

    async def use() -> None:
        async with aiodlock.Client(scene.url, ttl=20.0) as client:
            for path in paths:
                path.calm()
            async with client.lock("name", timeout=60.0) as lease:
                ensemble.cut.update(frozenset((alone, other)) for other in others)
                await asyncio.sleep(90.0)
                assert lease.held

    _run(scene, process, use())


@pytest.mark.parametrize("code", [x.RESOURCE_EXHAUSTED, x.UNAVAILABLE, etcd_cluster.REFUSED])
def test_holder_that_calls_nothing_leaves_a_member_of_etcd_that_refuses_its_renewals(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reads are answered all the while, so that no call shows it."""
    scene = EtcdScene(0)
    process = Process(scene.world, "locker")
    process.loop.wire = scene.wire
    renew, refusing = etcd_cluster.Member._leasekeepalive, set[str]()

    def refuse(member: etcd_cluster.Member, call: etcd_cluster.Call, request: Any) -> None:
        if scene.ensemble.address(member) not in refusing:
            renew(member, call, request)
        else:
            call.end(code, "too many requests")

    monkeypatch.setattr(etcd_cluster.Member, "_leasekeepalive", refuse)

    async def use() -> None:
        async with aiodlock.Client(scene.url, ttl=20.0) as client:
            async with client.lock("name", timeout=60.0) as lease:
                link = session_of(client).backend.cluster.link  # type: ignore[attr-defined]
                refusing.add(link.endpoint.rpartition(":")[0])
                await asyncio.sleep(90.0)
                assert lease.held

    _run(scene, process, use())


@pytest.mark.parametrize(("members", "one_way"), [(1, 0.5), (3, 0.36), (3, 0.5)])
def test_holder_that_calls_nothing_keeps_its_lease_when_a_far_connection_is_cut(
    members: int, one_way: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dialling and examining take longer than an answer may: that is no reason to begin anew."""
    monkeypatch.setattr(Path, "latency", lambda _: one_way)
    scene = EtcdScene(1 if members == 1 else 0)
    process = Process(scene.world, "far")
    process.loop.wire = scene.wire

    async def use() -> None:
        async with aiodlock.Client(scene.url, ttl=40.0) as client:
            async with client.lock("name", timeout=60.0) as lease:
                for stream in scene.wire.streams_of(process):
                    stream.break_off()
                await asyncio.sleep(90.0)
                assert lease.held

    _run(scene, process, use())


def test_member_that_is_being_examined_is_not_left_for_one_that_was_dialled_before() -> None:
    """The far one was dialled first, and its connection comes last: the near one is used."""
    scene = EtcdScene(0)
    scene.patch(random, "randrange", lambda _: 0)
    process = Process(scene.world, "locker")
    process.loop.wire = scene.wire
    for number, one_way in enumerate((0.95, 0.15, 0.15)):
        path = scene.wire.path(process, scene.ensemble.address(scene.ensemble.members[number]))
        setattr(path, "latency", lambda one_way=one_way: one_way)  # noqa: B010

    async def use() -> None:
        async with aiodlock.Client(scene.url) as client:
            link = session_of(client).backend.cluster.link  # type: ignore[attr-defined]
            assert (link.endpoint, link.generation) == ("10.0.0.2:2379", 0)

    _run(scene, process, use())


def test_lease_is_held_no_more_when_its_session_of_zookeeper_is_being_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that dies closes its sessions, and the next one is let in, also where no answer comes."""
    monkeypatch.setattr(zookeeper, "TICK", 2.0)
    scene = ZooKeeperScene(1)
    process = Process(scene.world, "dying")
    process.loop.wire = scene.wire

    async def bug() -> None:
        raise ZeroDivisionError("a bug of ours")

    async def use() -> None:
        async with aiodlock.Client(scene.url, ttl=20.0) as client:
            lease = await client.lock("name", on_lost="flag").acquire()
            session = session_of(client)
            assert lease.held
            for path in scene.wire.paths_of(process):
                path.in_blocked = True
            session.start_soon(bug)
            while zookeeper.Records(scene.ensemble).queue("lock", "name"):
                await asyncio.sleep(0.001)
            assert session.death is None
            assert not lease.held

    _run(scene, process, use())


@pytest.mark.parametrize("one_way", [0.7, 1.5])
@pytest.mark.parametrize(
    ("deployment", "seed"), [("single", 0), ("pair", 3), ("pooled", 12), ("pooled", 7)]
)
def test_client_enters_a_far_database_and_keeps_its_lease(
    deployment: str, seed: int, one_way: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "latency", lambda _: one_way)
    scene = PostgresScene(seed)
    assert scene.deployment == deployment
    process = Process(scene.world, "far")
    process.loop.wire = scene.wire
    waits: list[float] = []

    async def use() -> None:
        loop = asyncio.get_running_loop()
        async with aiodlock.Client(scene.url, ttl=60.0) as client:
            began = loop.time()
            async with client.lock("name", timeout=60.0) as lease:
                waits.append(loop.time() - began)
                await asyncio.sleep(200.0)
                assert lease.held

    _run(scene, process, use())
    # One call: nothing was repeated. Behind a pooler it takes three round trips.
    assert waits[0] < 2 * one_way * (3.5 if deployment == "pooled" else 1.5)


@pytest.mark.parametrize(("password", "hashing"), [("secret", 12.0), ("wrong", 6.0)])
@pytest.mark.parametrize("seed", [0, 1])
def test_password_that_takes_long_is_accepted_or_refused(
    password: str, hashing: float, seed: int
) -> None:
    """To check one takes a busy member many seconds: entering goes on, and says then what it is."""
    scene = EtcdScene(seed)
    scene.ensemble.password, scene.ensemble.hashing = "secret", hashing
    process = Process(scene.world, "locker")
    process.loop.wire = scene.wire
    url = scene.url.replace("secret", password)

    async def use() -> None:
        async with aiodlock.Client(url) as client, client.lock("name", timeout=5.0) as lease:
            assert lease.held

    if password == "secret":
        _run(scene, process, use())
    else:
        with pytest.raises(BackendError, match="invalid user ID or password") as refused:
            _run(scene, process, use())
        assert not isinstance(refused.value, BackendUnavailable)


@pytest.mark.parametrize("alone", ["from the beginning", "while it checks"])
def test_login_goes_past_a_member_without_a_leader(alone: str) -> None:
    scene = EtcdScene(0)
    cluster = scene.ensemble
    cluster.password, cluster.hashing = "secret", 0.3
    scene.patch(random, "randrange", lambda _: 0)
    process = Process(scene.world, "locker")
    process.loop.wire = scene.wire
    pairs = [frozenset((0, other)) for other in (1, 2)]

    def cut() -> None:
        cluster.cut.update(pairs)

    if alone == "from the beginning":
        cut()
    scene.world.run_until(3.0)
    scene.world.after(0.2, cut)

    async def use() -> None:
        async with aiodlock.Client(scene.url) as client, client.lock("name", timeout=5.0) as lease:
            assert lease.held

    _run(scene, process, use())


def _run(scene: Scene, process: Process, main: Coroutine[Any, Any, None]) -> None:
    with scene._everything_virtual():
        done = process.start(main)
        try:
            assert scene.world.run_until(300.0, done.done)
            done.result()
        finally:
            process.bury()
