"""Clients and members that are cut off, members that are replaced, and upkeep under load."""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

from aiodlock import BackendError, BackendUnavailable, Client, Lease, LockLost, WouldBlock
from aiodlock._clock import now
from aiodlock._model import RAN_OUT, Waiting
from aiodlock.backends.etcd import calls as api
from aiodlock.backends.etcd import messages as m
from aiodlock.cli._doctor_etcd import examine

from ..ports import free_ports
from ..scenes import bounded, until
from ..soak.wire import Wire
from .conftest import Direct
from .cuts import Cut
from .servers import EtcdCluster, EtcdNode, find_etcd
from .test_access import _guard
from .test_faults import _acquire, _leader, _leave, _left, _use

MakeDirect = Callable[..., Coroutine[Any, Any, Direct]]


@asynccontextmanager
async def _cuts(cluster: EtcdCluster) -> AsyncIterator[dict[EtcdNode, Cut]]:
    """Put a proxy in front of each member, for clients."""
    async with AsyncExitStack() as stack:
        ports = free_ports(len(cluster.nodes))
        yield {
            node: await stack.enter_async_context(Cut(port, node.port))
            for node, port in zip(cluster.nodes, ports, strict=True)
        }


def _endpoints(cuts: dict[EtcdNode, Cut]) -> tuple[str, ...]:
    return tuple(f"127.0.0.1:{cut.port}" for cut in cuts.values())


async def test_client_that_is_cut_from_its_member_goes_on_with_another(
    three_nodes: EtcdCluster, make_direct: MakeDirect
) -> None:
    async with _cuts(three_nodes) as cuts:
        direct = await make_direct(three_nodes, _endpoints(cuts))
        holder, heard = direct.place(ttl=5.0)
        waiter, waiter_heard = direct.place(ttl=5.0, waiter_ttl=5.0)
        await _acquire(holder, heard)
        assert isinstance(await waiter.acquire(wait=True), Waiting)
        at = direct.store.cluster.link.endpoint
        (cut,) = [cut for cut in cuts.values() if at.endswith(f":{cut.port}")]
        cut.cut()
        began = now()
        async with bounded(20.0):
            while holder.deadline < began + 6.0:  # renewed elsewhere
                assert heard.words == []
                await asyncio.sleep(0.05)
        assert direct.store.cluster.link.endpoint != at
        assert (await _leave(holder)).what == "released"
        await waiter_heard.until("granted")
        cut.heal()
        assert (await _leave(waiter)).what == "released"
        assert await _left(direct) == []


async def test_client_that_is_cut_from_all_for_less_than_its_lease_keeps_it(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    async with _cuts(one_node) as cuts:
        direct = await make_direct(one_node, _endpoints(cuts), prefix="short")
        other = await make_direct(one_node, prefix="short")
        holder, heard = direct.place(ttl=20.0)
        waiter, waiter_heard = other.place(ttl=20.0, waiter_ttl=20.0)
        await _acquire(holder, heard)
        assert isinstance(await waiter.acquire(wait=True), Waiting)
        (cut,) = cuts.values()
        cut.cut()
        await asyncio.sleep(3.0)
        assert holder.deadline > now()
        cut.heal()
        healed = now()
        async with bounded(20.0):
            while holder.deadline < healed + 19.0:
                await asyncio.sleep(0.05)
        assert heard.words == waiter_heard.words == []
        assert (await _leave(holder)).what == "released"
        await waiter_heard.until("granted")
        await _leave(waiter)
        assert await _left(other) == []


async def test_client_that_is_cut_from_all_for_more_is_told_before_another_holds(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    async with _cuts(one_node) as cuts:
        direct = await make_direct(one_node, _endpoints(cuts), prefix="long")
        other = await make_direct(one_node, prefix="long")
        holder, heard = direct.place(ttl=2.0)
        ghost, _ = direct.place(ttl=2.0, waiter_ttl=2.0)
        waiter, waiter_heard = other.place(ttl=20.0, waiter_ttl=20.0)
        await _acquire(holder, heard)
        assert isinstance(await ghost.acquire(wait=True), Waiting)
        assert isinstance(await waiter.acquire(wait=True), Waiting)
        (cut,) = cuts.values()
        cut.cut()
        await waiter_heard.until("granted", 30.0)
        assert holder.deadline <= now()
        assert waiter.token > holder.token
        cut.heal()
        await heard.until("gone: expired", 20.0)
        assert (await _leave(holder)).what == "gone"
        await ghost.leave(RAN_OUT)
        assert (await _leave(waiter)).what == "released"
        assert await _left(other) == []


@pytest.fixture
def members() -> Any:
    """Give three members that call each other through proxies: these are the test's to start."""
    if find_etcd() is None:
        pytest.skip("etcd is not installed")
    cluster = EtcdCluster(3)
    for node, port in zip(cluster.nodes, free_ports(3), strict=True):
        node.advertised = port
    yield cluster
    cluster.stop()


def _identity(cluster: EtcdCluster, node: EtcdNode) -> bytes:
    listed = cluster.call("cluster/member/list")["members"]
    (found,) = [one["ID"] for one in listed if one.get("name") == node.name]
    return b"%x" % int(found)


async def test_leader_that_is_cut_from_its_peers_keeps_nothing_alive(
    members: EtcdCluster, make_direct: MakeDirect
) -> None:
    async with AsyncExitStack() as stack:
        cuts = {
            node: await stack.enter_async_context(Cut(node.advertised, node.peer))
            for node in members.nodes
        }
        await asyncio.to_thread(members.start)
        direct = await make_direct(members)
        leader = await _leader(members, direct)
        identity = await asyncio.to_thread(_identity, members, leader)
        await _use(direct, members, leader)
        holder, heard = direct.place(ttl=5.0)
        waiter, waiter_heard = direct.place(ttl=5.0, waiter_ttl=5.0)
        await _acquire(holder, heard)
        assert isinstance(await waiter.acquire(wait=True), Waiting)
        for node, cut in cuts.items():
            if node is leader:
                cut.cut()
            cut.is_cut = lambda sender: sender == identity
        began = now()
        async with bounded(30.0):
            # The others choose a leader. The client finds it, and its leases go on there.
            while holder.deadline < began + 7.0:
                assert heard.words == []
                await asyncio.sleep(0.05)
        assert direct.store.cluster.link.endpoint != leader.endpoint
        assert (await _leave(holder)).what == "released"
        await waiter_heard.until("granted", 20.0)
        assert waiter.token > holder.token
        for cut in cuts.values():
            cut.is_cut = lambda _: False
            cut.heal()
        await asyncio.to_thread(members.until_healthy)
        assert (await _leave(waiter)).what == "released"
        assert await _left(direct) == []
        for node in members.nodes:
            node.kill()


async def test_client_with_a_user_enters_past_a_member_that_is_cut_from_its_peers(
    members: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To give a token, a member asks the others."""
    async with AsyncExitStack() as stack:
        cuts = {
            node: await stack.enter_async_context(Cut(node.advertised, node.peer))
            for node in members.nodes
        }
        await asyncio.to_thread(members.start)
        lonely = members.nodes[0]
        identity = await asyncio.to_thread(_identity, members, lonely)
        await asyncio.to_thread(_guard, members)
        cuts[lonely].cut()
        for cut in cuts.values():
            cut.is_cut = lambda sender: sender == identity
        endpoints = ",".join(node.endpoint for node in members.nodes)
        monkeypatch.setattr("random.randrange", lambda _: 0)  # the lonely one is asked first
        async with Client(f"etcd://locker:locker's pass@{endpoints}", prefix="mine") as client:
            async with client.lock("name", timeout=10.0) as lease:
                assert lease.held
        for node in members.nodes:
            node.kill()


async def _under_load(direct: Direct, disturb: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Have three tasks take turns meanwhile, and some after it."""
    tokens: list[int] = []
    inside, stop = 0, False

    async def work() -> None:
        nonlocal inside
        while not stop:
            place, heard = direct.place(ttl=20.0, waiter_ttl=20.0)
            await _acquire(place, heard, 30.0)
            assert not inside
            inside += 1
            tokens.append(place.token)
            await asyncio.sleep(0)
            inside -= 1
            await _leave(place)

    async with asyncio.timeout(90.0), asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(work())
        await disturb()
        done = len(tokens)
        while len(tokens) < done + 20:
            await asyncio.sleep(0.02)
        stop = True
    assert tokens == sorted(set(tokens))
    assert await _left(direct) == []


async def test_compaction_and_defragmentation_disturb_nobody(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)

    async def upkeep() -> None:
        key = base64.b64encode(b"upkeep").decode()
        for _ in range(5):
            # Up to a write that nobody watches. Up to a deletion, this old etcd tells a watch that is
            # behind nothing of that, nor that anything is missing (etcd issue 19179).
            written = await asyncio.to_thread(one_node.call, "kv/put", key=key, value=key)
            revision = written["header"]["revision"]
            await asyncio.to_thread(one_node.call, "kv/compaction", revision=revision)
            await asyncio.to_thread(one_node.call, "maintenance/defragment")

    await _under_load(direct, upkeep)


async def _change(cluster: EtcdCluster, what: str, **about: object) -> None:
    """Change the members. A cluster refuses that until it has been well for some seconds."""
    async with asyncio.timeout(40.0):
        while True:
            try:
                await asyncio.to_thread(cluster.call, f"cluster/member/{what}", **about)
            except urllib.error.HTTPError as refused:
                refused.close()
                await asyncio.sleep(0.2)
            else:
                return


async def test_member_is_replaced_by_a_new_one_under_load(
    three_nodes: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(three_nodes)
    old = await _leader(three_nodes, direct)
    remaining = [node for node in three_nodes.nodes if node is not old]
    new = EtcdNode(three_nodes, 3, *free_ports(2))

    async def replace() -> None:
        identity = await asyncio.to_thread(_identity, three_nodes, old)
        old.kill()
        three_nodes.nodes[:] = remaining
        await _leader(three_nodes, direct)
        await _change(three_nodes, "remove", ID=str(int(identity, 16)))
        await _change(three_nodes, "add", peerURLs=[f"http://127.0.0.1:{new.peer}"])
        three_nodes.nodes.append(new)
        await asyncio.to_thread(lambda: new.start(state="existing", members=three_nodes.members))
        await asyncio.to_thread(three_nodes.until_healthy)

    try:
        await _under_load(direct, replace)
    finally:
        old.kill()


@pytest.fixture
def learning() -> Iterator[tuple[EtcdCluster, EtcdNode]]:
    """Give a member, and one that learns from it."""
    with EtcdCluster() as cluster:
        learner = EtcdNode(cluster, 1, *free_ports(2))
        peer = f"http://127.0.0.1:{learner.peer}"
        cluster.call("cluster/member/add", peerURLs=[peer], isLearner=True)
        learner.start(state="existing", members=f"{cluster.members},{learner.name}={peer}")
        try:
            while b"isLearner" not in _status(learner):
                time.sleep(0.05)
            yield cluster, learner
        finally:
            learner.kill()


def _status(node: EtcdNode) -> bytes:
    url = f"http://{node.endpoint}/v3/maintenance/status"
    try:
        with urllib.request.urlopen(url, data=b"{}", timeout=2.0) as answer:
            found: bytes = answer.read()
            return found
    except OSError:
        return b""


async def test_client_enters_past_a_learner(
    learning: tuple[EtcdCluster, EtcdNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, learner = learning
    monkeypatch.setattr("random.randrange", lambda _: 0)  # the learner is asked first
    async with Client(f"etcd://{learner.endpoint},{cluster.nodes[0].endpoint}") as client:
        async with client.lock("name") as lease:
            assert lease.held


async def test_doctor_tells_of_a_learner(
    learning: tuple[EtcdCluster, EtcdNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, learner = learning
    monkeypatch.setattr("random.randrange", lambda _: 0)
    found = await examine(f"etcd://{learner.endpoint},{cluster.nodes[0].endpoint}")
    assert [one.subject for one in found if "learner" in one.found] == [
        f"member {learner.endpoint}"
    ]
    assert found[-1].subject == "writes"


async def _write_often(client: Client, times: int) -> None:
    session = client._core.session
    assert session is not None
    link = session.backend._link  # type: ignore[attr-defined]
    put = m.RequestOp(request_put=m.PutRequest(b"other", b""))

    async def write() -> None:
        for _ in range(times // 50):
            await link.call(api.TXN, m.TxnRequest(success=[put]))

    await asyncio.gather(*(write() for _ in range(50)))


async def _until_served(client: Client, name: str, within: float = 20.0) -> Lease:
    """Try until there is a lease: a client may find its store silent meanwhile."""
    async with asyncio.timeout(within):
        while True:
            try:
                return await client.lock(name, timeout=5.0).acquire()
            except BackendUnavailable:
                await asyncio.sleep(0.1)


def _told(caplog: pytest.LogCaptureFixture, event: str) -> list[logging.LogRecord]:
    return [one for one in caplog.records if getattr(one, "event", "") == event]


async def test_older_state_of_the_store_is_unreachable_until_no_lease_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was restored from a backup: what it was told since is lost, and who else holds is not known."""
    with EtcdCluster() as cluster:
        (node,) = cluster.nodes
        url, kept = cluster.url, cluster.directory / "backup"
        node.kill()
        shutil.copytree(node.directory, kept)
        await asyncio.to_thread(cluster.start)
        async with (
            Client(url, ttl=8.0, unavailable_after=1.0) as client,
            Client(url, ttl=8.0, unavailable_after=1.0) as other,
        ):
            await _write_often(client, 1000)
            lease = await client.lock("name").acquire()
            async with other.lock("warm"):
                pass
            assert lease.token > 1000
            node.kill()
            shutil.rmtree(node.directory)
            shutil.copytree(kept, node.directory)
            await asyncio.to_thread(cluster.start)
            with pytest.raises(BackendUnavailable, match="not the store that this client entered"):
                await client.lock("another", timeout=3.0).acquire()
            assert lease.held
            assert len(_told(caplog, "other_store")) <= 2  # by each client once
            assert (await lease.wait_lost()).reason == "expired"
            with pytest.raises(LockLost):
                await lease.release()
            async with await _until_served(client, "name") as its_lease:
                assert its_lease.token < 1000
            async with await _until_served(other, "name"):
                pass
        replaced = _told(caplog, "store_replaced")
        assert len(replaced) == 2
        assert all(one.levelno == logging.WARNING for one in replaced)


async def test_waiters_whose_queue_the_backup_has_forgotten_ask_again() -> None:
    with EtcdCluster() as cluster:
        (node,) = cluster.nodes
        kept = cluster.directory / "backup"
        node.kill()
        shutil.copytree(node.directory, kept)
        await asyncio.to_thread(cluster.start)
        async with (
            Client(cluster.url, ttl=2.0, unavailable_after=6.0) as client,
            Client(cluster.url, ttl=2.0, unavailable_after=6.0) as other,
        ):
            await _write_often(client, 1000)
            held = await client.lock("name").acquire()
            waiting = asyncio.create_task(_until_served(other, "name", 40.0))
            while not (await client.inspect("name")).waiters:
                await asyncio.sleep(0.01)
            node.kill()
            shutil.rmtree(node.directory)
            shutil.copytree(kept, node.directory)
            await asyncio.to_thread(cluster.start)
            await (await waiting).release()
            assert held.lost


async def test_grpc_proxy_of_etcd_is_refused(one_node: EtcdCluster) -> None:
    """With it, nobody is told a turn, and renewals are answered too late."""
    (port,) = free_ports(1)
    words = ["grpc-proxy", "start", f"--endpoints={one_node.nodes[0].endpoint}"]
    proxy = subprocess.Popen(
        [one_node.program, *words, f"--listen-addr=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"},
    )
    try:
        async with bounded(20.0):
            while True:
                with pytest.raises(BackendError) as refused:
                    await Client(f"etcd://127.0.0.1:{port}").__aenter__()
                if not isinstance(refused.value, BackendUnavailable):  # it is there
                    break
        assert "grpc-proxy" in str(refused.value)
    finally:
        proxy.kill()
        proxy.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="it needs a second address of this machine")
@pytest.mark.parametrize("turns", [False, True])
async def test_each_address_of_a_name_has_its_turn(
    one_node: EtcdCluster, monkeypatch: pytest.MonkeyPatch, turns: bool
) -> None:
    port, asked = one_node.nodes[0].port, itertools.count()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await reader.read(-1)
        writer.transport.abort()

    silent = await asyncio.start_server(say_nothing, "127.0.0.2", port)
    real = socket.getaddrinfo

    def resolve(host: Any, port: Any, *args: Any, **options: Any) -> list[tuple[Any, ...]]:
        if host != "etcd.internal":
            return list(real(host, port, *args, **options))
        found = ["127.0.0.2", "127.0.0.1"]
        if turns and next(asked) % 2:
            found.reverse()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        async with Client(f"etcd://etcd.internal:{port}") as client, client.lock("name") as lease:
            assert lease.held
    finally:
        silent.close()


async def test_endpoint_of_another_cluster_is_not_used(
    one_node: EtcdCluster, caplog: pytest.LogCaptureFixture
) -> None:
    with EtcdCluster() as other:
        url = f"{one_node.url},{other.nodes[0].endpoint}"
        found = await examine(url)
        assert [one.subject for one in found if one.level == "error"] == ["cluster"]
        async with Client(url, ttl=20.0) as client, client.lock("name") as lease:
            session = client._core.session
            assert session is not None
            link = session.backend._link  # type: ignore[attr-defined]
            for _ in range(3):
                at = link.endpoint
                link.failed(link.generation, BackendUnavailable("moved by the test"))
                async with client.lock("another", timeout=10.0):
                    assert link.endpoint == at
            assert lease.held
    assert len(_told(caplog, "other_store")) == 1


async def test_idle_client_does_not_take_its_cluster_for_silent(
    one_node: EtcdCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had a connection until now, though it has asked nothing for long."""
    monkeypatch.setattr("random.randrange", lambda _: 0)  # the first of them is asked first
    with EtcdCluster() as other:
        async with Wire(one_node.nodes[0].port) as wire:
            url = f"etcd://127.0.0.1:{wire.port},{other.nodes[0].endpoint}"
            async with Client(url, unavailable_after=60.0) as client:
                session = client._core.session
                assert session is not None
                link = session.backend._link  # type: ignore[attr-defined]
                link.acquaintance._heard_at -= 100.0
                await wire.refuse()
                wire.cut()
                await until(lambda: _told(caplog, "other_store") or _told(caplog, "store_replaced"))
                await wire.heal()
                async with client.lock("name", timeout=20.0):
                    assert link.endpoint != other.nodes[0].endpoint
    assert not _told(caplog, "store_replaced")


async def test_next_session_of_a_client_knows_the_cluster_that_the_dead_one_knew(
    one_node: EtcdCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.randrange", lambda _: 0)
    with EtcdCluster() as other:
        url = f"{one_node.url},{other.nodes[0].endpoint}"
        async with (
            Client(url) as client,
            Client(one_node.url) as ours,
            ours.lock("name", ttl=60.0),
        ):
            session = client._core.session
            assert session is not None
            monkeypatch.setattr("random.randrange", lambda _: 1)  # the foreign one is asked first

            async def bug() -> None:
                raise ZeroDivisionError("a bug of ours")

            session.start_soon(bug)
            await until(lambda: session.death is not None, "death")
            with pytest.raises(WouldBlock):
                await client.lock("name").acquire_nowait()
    assert len(_told(caplog, "other_store")) == 1
