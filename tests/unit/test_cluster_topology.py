"""How a cluster's client goes on with a node that refuses it. On servers: tests/topology."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio
import pytest

from aiodlock import BackendError, BackendUnavailable
from aiodlock._model import Left, StoreRequest, Terms
from aiodlock.backends.kept import Notices
from aiodlock.backends.redis.calls import Calls
from aiodlock.backends.redis.cluster import ClusterBackend, topology
from aiodlock.backends.redis.refusals import Redirected
from aiodlock.backends.redis.server import Server
from aiodlock.backends.redis.settings import Settings
from aiodlock.backends.redis.source import Source

from ..scenes import until


async def test_pauses_begin_anew_when_a_refusing_node_was_of_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comes_up = {4, 6}  # at these attempts
    attempts = 0
    failures_in_a_row: list[int] = []

    async def run(self: Server, listener: Notices, ready: Callable[[], None]) -> None:
        nonlocal attempts
        attempts += 1
        if attempts in comes_up:
            ready()
        raise BackendError("refused")

    def pause_after(failures: int, *, first: float, longest: float) -> float:
        failures_in_a_row.append(failures)
        return 0.0

    monkeypatch.setattr(Server, "run", run)
    monkeypatch.setattr(topology, "pause_after", pause_after)
    settings = Settings("p", token_retention=60.0, unavailable_after=30.0)
    cluster = topology.Topology([Source.from_url("redis://localhost:1")], settings, "label")
    cluster._listener, cluster._entering = object(), False  # type: ignore[assignment]
    async with asyncio.TaskGroup() as tasks:
        cluster._tasks = tasks
        node = cluster.start(("localhost", 1))
        await until(lambda: len(failures_in_a_row) >= 7)
        node.scope.cancel()
    assert failures_in_a_row[:7] == [1, 2, 3, 1, 2, 1, 2]


async def test_node_that_refuses_while_the_client_is_left_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On its way out, a server's group of tasks fails, and keeps its cancellation to itself."""
    attempts = 0

    async def ask_for_owners(self: topology.Topology) -> bool:
        self.start(("localhost", 1))
        return True

    async def run(self: Server, listener: Notices, ready: Callable[[], None]) -> None:
        nonlocal attempts
        attempts += 1
        ready()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_refuse_when_cancelled)
            await asyncio.Event().wait()

    monkeypatch.setattr(topology.Topology, "_ask_for_owners", ask_for_owners)
    monkeypatch.setattr(Server, "run", run)
    settings = Settings("p", token_retention=60.0, unavailable_after=30.0)
    cluster = topology.Topology([Source.from_url("redis://localhost:1")], settings, "label")
    up = asyncio.Event()
    running = asyncio.create_task(cluster.run(object(), up.set))  # type: ignore[arg-type]
    await up.wait()
    running.cancel()
    await asyncio.wait([running], timeout=3.0)
    ended = running.cancelled()
    if not ended:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
    assert ended
    assert attempts == 1


async def _refuse_when_cancelled() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise BackendError("refused")


class _Asked:
    """Counts how often all places are to be asked about, because another server has taken over."""

    def __init__(self) -> None:
        self.times = 0

    def on_other_server(self) -> None:
        self.times += 1


async def _run_for_ever(self: Server, listener: Notices, ready: Callable[[], None]) -> None:
    ready()
    await asyncio.Event().wait()


def _all_at(port: int) -> list[object]:
    """Return what CLUSTER SLOTS says when one node owns everything."""
    return [[0, 16383, [b"localhost", port, b"id", []]]]


@pytest.mark.parametrize("kept_for", [topology._KEPT_FOR, 0.0])
async def test_node_that_a_slot_has_moved_to_is_kept_before_others_say_so(
    monkeypatch: pytest.MonkeyPatch, kept_for: float
) -> None:
    """Else it is connected to anew for each message, and each time all leases are asked about."""
    monkeypatch.setattr(Server, "run", _run_for_ever)
    monkeypatch.setattr(topology, "_KEPT_FOR", kept_for)
    settings = Settings("p", token_retention=60.0, unavailable_after=30.0)
    cluster = topology.Topology([Source.from_url("redis://localhost:1")], settings, "label")
    cluster._listener = listener = _Asked()  # type: ignore[assignment]
    async with asyncio.TaskGroup() as tasks:
        cluster._tasks = tasks
        cluster._learn(_all_at(1), "localhost")
        moved = Redirected("it", "MOVED 1 localhost:2")
        new = cluster.follow("name", moved, cluster.node_of("name"))
        cluster._learn(_all_at(1), "localhost")
        assert (cluster.nodes.get(("localhost", 2)) is new) == bool(kept_for)
        assert listener.times == 0
        cluster._learn(_all_at(3), "localhost")
        assert ("localhost", 1) not in cluster.nodes
        assert listener.times == 1
        for node in cluster.nodes.values():
            node.scope.cancel()


async def test_slot_that_is_on_its_way_belongs_to_its_node_until_it_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Server, "run", _run_for_ever)
    settings = Settings("p", token_retention=60.0, unavailable_after=30.0)
    cluster = topology.Topology([Source.from_url("redis://localhost:1")], settings, "label")
    cluster._listener = _Asked()  # type: ignore[assignment]
    async with asyncio.TaskGroup() as tasks:
        cluster._tasks = tasks
        cluster._learn(_all_at(1), "localhost")
        old, asked = cluster.node_of("name"), Redirected("it", "ASK 1 localhost:2")
        with pytest.raises(BackendUnavailable, match="on its way"):
            cluster.follow("name", asked, old)
        assert cluster.node_of("name") is old
        assert list(cluster.nodes) == [("localhost", 1)], "nobody asks the other one"
        old.scope.cancel()


async def test_node_that_refuses_is_named_with_the_reason_between_two_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run(self: Server, listener: Notices, ready: Callable[[], None]) -> None:
        raise BackendError("WRONGPASS")

    monkeypatch.setattr(Server, "run", run)
    monkeypatch.setattr(topology, "_FIRST_PAUSE", 60.0)
    settings = Settings("p", token_retention=60.0, unavailable_after=30.0)
    backend = ClusterBackend([Source.from_url("redis://localhost:1")], settings)
    cluster = backend.topology
    cluster._listener, cluster._entering = object(), False  # type: ignore[assignment]
    async with asyncio.TaskGroup() as tasks:
        cluster._tasks = tasks
        cluster._learn(_all_at(1), "localhost")
        await cluster.node_of("name").begun.wait()
        with pytest.raises(BackendUnavailable, match="WRONGPASS"):
            await backend._at("name", lambda node: node.inspection.inspect_all("lock", ["name"]))
        assert "WRONGPASS" in str(backend.failure)
        cluster.node_of("name").scope.cancel()


async def test_leaving_that_is_redirected_takes_no_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Server, "run", _run_for_ever)
    settings = Settings("p", token_retention=60.0, unavailable_after=30.0)
    backend = ClusterBackend([Source.from_url("redis://localhost:1")], settings)
    cluster = backend.topology
    cluster._listener = _Asked()  # type: ignore[assignment]
    given: list[float] = []

    async def leave(*_: object, within: float, **__: object) -> Left:
        given.append(within)
        await asyncio.sleep(0.05)
        if len(given) < 3:
            raise Redirected("it", f"MOVED 1 localhost:{len(given) + 1}")
        return Left("released")

    monkeypatch.setattr(Calls, "leave", leave)
    async with asyncio.TaskGroup() as tasks:
        cluster._tasks = tasks
        cluster._learn(_all_at(1), "localhost")
        terms = Terms("lock", "name", "exclusive", 0, 1.0, 1.0, 0.0, 0.0, None, True)
        await backend.leave(StoreRequest("id", terms, "owner"), within=1.0)
        for node in cluster.nodes.values():
            node.scope.cancel()
    first, second, third = given
    assert third <= second - 0.05 <= first - 0.1
