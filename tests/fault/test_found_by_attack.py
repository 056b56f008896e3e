"""Interleavings that an attack on the code found, each once broken."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import aiodlock
from aiodlock._embedded import EmbeddedServer
from aiodlock._model import Request, Waiting
from aiodlock.backends.redis import backend as backend_module
from aiodlock.backends.redis.cluster import ClusterBackend
from aiodlock.backends.redis.keys import keys_of
from aiodlock.backends.redis.permissions import check_permissions
from aiodlock.backends.redis.wire import Wire

from ..conftest import MakeClient
from ..scenes import PATIENCE, SOON, takes, until, until_cancelled, until_outlived, until_waiting
from ..security.fake_server import FakeServer
from ..servers import BINARIES, Store
from ..topology.cluster import Cluster, port
from .scenes import line_up, session_of, waiting_for_notice


async def _snapshot(store: Store) -> Callable[..., Any]:
    """Return what brings the store back to where it is now, as a failover to an old replica does."""
    raw: Any = await store.raw(decode_responses=False)
    kept = {key: (await raw.dump(key), await raw.pttl(key)) for key in await raw.keys("*")}

    async def restore(*, without: str = "") -> None:
        # All at once: between two steps somebody would see a store that never was.
        async with raw.pipeline(transaction=True) as steps:
            for key in await raw.keys("*"):
                steps.delete(key)
            for key, (value, left) in kept.items():
                steps.restore(key, max(left, 0), value, replace=True)
                if without and key.endswith(b":state"):
                    steps.hdel(key, without)
            await steps.execute()

    return restore


async def test_holder_whom_the_store_takes_for_a_waiter_again_is_told(
    real_store: Store, make_client: MakeClient
) -> None:
    """A failover lost the hand-off: the new primary knows the request, in the queue."""
    first, second = [await make_client(ttl=3.0) for _ in range(2)]
    held, (waiting,) = await line_up(first, second)
    restore = await _snapshot(real_store)
    await held.release()
    lease = await waiting
    with pytest.raises(aiodlock.LockLost) as lost:  # noqa: PT012
        async with lease:
            await restore()
            await until_cancelled()
    assert lost.value.reason == "gone"


async def test_holder_whom_the_store_has_granted_anew_is_told(
    real_store: Store, make_client: MakeClient
) -> None:
    """The same, and by the time it asks the ghost before it is over: its token is of another grant."""
    first, second = [await make_client(ttl=3.0) for _ in range(2)]
    held, (waiting,) = await line_up(first, second)
    released = held._place.request.id
    restore = await _snapshot(real_store)
    await held.release()
    lease = await waiting
    with pytest.raises(aiodlock.LockLost) as lost:  # noqa: PT012
        async with lease:
            await restore(without=released)
            await until_cancelled()
    assert lost.value.reason == "gone"


@pytest.mark.parametrize("about", ["one", "all"])
async def test_hint_that_overtakes_the_answer_to_acquire_is_not_forgotten(
    make_client: MakeClient, about: str
) -> None:
    """The grant's own notice was missed; whoever is still asking must look, too, once it is answered."""
    first, second = await make_client(), await make_client()
    held = await first.lock("name").acquire()
    session = session_of(second)
    send = session.backend.acquire
    listener = session

    async def acquire(request: Request, *, wait: bool) -> Any:
        answer = await send(request, wait=wait)
        assert isinstance(answer, Waiting)
        missed = asyncio.Event()
        noticing = session.on_granted
        session.on_granted = lambda *_: missed.set()  # type: ignore[method-assign]
        try:
            await held.release()
            await missed.wait()
        finally:
            session.on_granted = noticing  # type: ignore[method-assign]
        listener.on_look(request.id if about == "one" else None)
        return answer

    session.backend.acquire = acquire  # type: ignore[method-assign]
    async with takes(at_most=SOON):  # the next extension is due after 3.3 s
        lease = await second.lock("name").acquire()
    await lease.release()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_hook_that_ends_in_a_cancellation_leaves_no_lease_behind(
    client: aiodlock.Client,
) -> None:
    class Cancelling(aiodlock.Hooks):
        def acquired(self, *_: object) -> None:
            raise asyncio.CancelledError

    client.add_hooks(Cancelling())
    acquiring = asyncio.create_task(client.lock("name").acquire())
    await asyncio.wait({acquiring})
    assert acquiring.cancelled()
    del acquiring

    def is_over() -> bool:
        gc.collect()  # the traceback refers to it
        return not session_of(client).places

    await until(is_over, "the end of the lease")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Give a cluster of a test's own: it does not stay as it was."""
    with Cluster(BINARIES["valkey9"](), replicas=0) as cluster:
        yield cluster


async def test_silent_node_of_a_cluster_costs_no_lease_on_another(cluster: Cluster) -> None:
    cluster.configure("cluster-require-full-coverage", "no")
    async with aiodlock.Client(cluster.url, ttl=3.0) as client:
        # Extended in one batch.
        leases = [await client.lock(f"name {n}").acquire() for n in range(20)]
        nodes = [cluster.primary_of(f"aiodlock:1:lock:{{name%20{n}}}:state") for n in range(20)]
        stopped = nodes[0]
        session = session_of(client)
        for place in session.places.values():
            session.extender.extend_now(place)
        stopped.pause()
        try:
            # A silent connection is given up after a second.
            async with asyncio.timeout(PATIENCE):
                await leases[0].wait_lost()
            others = [lease for n, lease in enumerate(leases) if nodes[n] is not stopped]
            await asyncio.gather(*(until_outlived(lease) for lease in others))
            assert [lease for lease in others if lease.lost] == []
        finally:
            stopped.resume()


def _node_for(cluster: Cluster, name: str) -> EmbeddedServer:
    return cluster.primary_of(keys_of("aiodlock", "lock", name).state)


@pytest.mark.parametrize("binary", ["redis62", "valkey9"])
async def test_node_is_only_asked_to_speak_as_it_can(
    binary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that has just come up may be called before all was found out about it."""
    go_on = asyncio.Event()
    check = check_permissions

    async def late(*args: Any, **options: Any) -> None:
        await go_on.wait()
        await check(*args, **options)

    with Cluster(BINARIES[binary](), replicas=0) as cluster:
        async with aiodlock.Client(cluster.url, waiter_ttl=60.0, ttl=60.0) as client:
            backend = session_of(client).backend
            assert isinstance(backend, ClusterBackend)
            monkeypatch.setattr(backend_module, "check_permissions", late)
            address = ("127.0.0.1", port(_node_for(cluster, "name")))
            backend._nodes.pop(address).scope.cancel()
            node = backend._start(address)
            held = await client.lock("name").acquire()
            waiting = asyncio.create_task(client.lock("name").acquire())
            await until_waiting(client, "name")
            await held.release()
            lease = await asyncio.wait_for(waiting, PATIENCE)
            await lease.release()
            assert not node.up.is_set()
            go_on.set()


@pytest.mark.parametrize("configured", [False, True])
async def test_node_that_goes_while_it_is_prepared_does_not_end_the_client(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, configured: bool
) -> None:
    cluster.configure("cluster-require-full-coverage", "no")
    check = check_permissions
    gone = _node_for(cluster, "gone")
    was_there = asyncio.Event()

    async def unlucky(wire: Wire, **options: Any) -> None:
        await check(wire, **options)
        if wire.peer == ("127.0.0.1", port(gone)) and not was_there.is_set():
            gone.pause()
            wire.close()
            was_there.set()

    try:
        async with aiodlock.Client(cluster.url, configure_notifications=configured) as client:
            backend = session_of(client).backend
            assert isinstance(backend, ClusterBackend)
            monkeypatch.setattr(backend_module, "check_permissions", unlucky)
            address = ("127.0.0.1", port(gone))
            backend._nodes.pop(address).scope.cancel()
            node = backend._start(address)
            await was_there.wait()
            await asyncio.sleep(1.0)  # for longer than a call waits for its connection
            gone.resume()
            await until(node.up.is_set, "the node")
            await (await client.lock("gone").acquire()).release()
    finally:
        gone.resume()


async def test_node_of_a_cluster_that_is_loading_is_asked_again() -> None:
    told = 0

    def answer(command: tuple[bytes, ...]) -> bytes | None:
        nonlocal told
        if command[0] != b"CLUSTER":
            return None
        told += 1
        if told <= 3:
            return b"-LOADING Redis is loading the dataset in memory\r\n"
        return b"-ERR This instance has cluster support disabled\r\n"

    async with FakeServer() as server:
        server.answer = answer
        with pytest.raises(aiodlock.BackendError, match="cluster support disabled"):
            async with aiodlock.Client(server.url.replace("redis:", "redis+cluster:")):
                pass
    assert told == 4


async def test_waiter_that_was_given_up_while_its_node_was_away_is_not_listened_for(
    cluster: Cluster,
) -> None:
    cluster.configure("cluster-require-full-coverage", "no")
    async with aiodlock.Client(cluster.url, ttl=2.0) as client:
        held = await client.lock("name", ttl=3.0).acquire()
        backend = session_of(client).backend
        assert isinstance(backend, ClusterBackend)
        waiting = asyncio.create_task(client.lock("name").acquire())
        await waiting_for_notice(client)
        node = _node_for(cluster, "name")
        wakeups = backend._node_of("name")._wakeups
        assert wakeups is not None
        await until(lambda: wakeups._listened, "listening")
        node.stop()
        await until(lambda: backend.failure is not None, "its connection's end")
        waiting.cancel()
        await asyncio.wait({waiting})
        await until(lambda: len(session_of(client).places) == 1, "the end of the waiter")
        assert not wakeups._listened
        await held.wait_lost()
