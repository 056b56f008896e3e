"""The fake servers answer as real ones do: the same random calls on both, equal answers and events."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import aiodlock._clock
from aiodlock.backends.zookeeper import jute
from aiodlock.backends.zookeeper.connection import Connection, connect

from ... import zookeeper
from ..world import Process, World
from .wire import Wire
from .zookeeper_ensemble import Ensemble

_CALLS = 150


def _calls(rng: random.Random, root: str) -> list[tuple[int, jute.Call[Any]]]:
    """Draw what two sessions ask for, one after the other."""
    names = [f"{root}/{one}" for one in ("a", "b", "c")]
    paths = [*names, *(f"{name}/{below}" for name in names for below in ("x", "y"))]
    flags = (jute.PERSISTENT, jute.EPHEMERAL, jute.EPHEMERAL | jute.SEQUENTIAL)

    def some_write() -> jute.Call[Any]:
        path, version = rng.choice(paths), rng.choice((-1, -1, 0, 1))
        data = rng.choice((b"", b"one", b"[1]"))
        return rng.choice(
            (
                jute.create(path, data, rng.choice(flags)),
                jute.create(path, data, rng.choice(flags)),
                jute.create2(path, data, jute.PERSISTENT),
                jute.create2(path, data, jute.CONTAINER),
                jute.delete(path, version),
                jute.set_data(path, data, version),
            )
        )

    def some_call() -> jute.Call[Any]:
        path, watch = rng.choice(paths), rng.random() < 0.5
        kind = rng.random()
        if kind < 0.4:
            return some_write()
        if kind < 0.6:
            parts = [some_write() for _ in range(rng.randint(1, 3))]
            # Containers are no part of the transactions of real servers older than 3.6 in any other way.
            parts += [jute.check(rng.choice(paths), rng.choice((-1, 0)))] * rng.randint(0, 1)
            return jute.multi(parts)
        if kind < 0.7:
            return jute.exists(path, watch=watch)
        if kind < 0.85:
            return jute.get_data(path, watch=watch)
        if kind < 0.97:
            return jute.get_children(path, watch=watch)
        return jute.get_ephemerals(f"{root}/")

    return [(rng.randrange(2), some_call()) for _ in range(_CALLS)]


def _plain(value: object, root: str) -> object:
    """Return what two servers can agree on: no transactions, no times, no ids of sessions."""
    if isinstance(value, jute.Stat):
        return (
            value.version,
            value.children_version,
            bool(value.ephemeral_owner),
            value.data_length,
            value.children,
            value.modified == value.created,
        )
    if isinstance(value, str):
        return value.removeprefix(root)
    if isinstance(value, tuple):
        return tuple(_plain(one, root) for one in value)
    if isinstance(value, list):
        plain = [_plain(one, root) for one in value]
        return sorted(plain, key=repr) if all(isinstance(one, str) for one in value) else plain
    return value


async def _play(
    hosts: list[tuple[str, int]], root: str, calls: list[tuple[int, jute.Call[Any]]]
) -> list[object]:
    """Make the calls, each after the answer to the one before; return answers and events."""
    heard: list[object] = []
    connections: list[Connection] = []
    for number, (host, port) in enumerate(hosts):

        def on_event(event: jute.Event, number: int = number) -> None:
            heard.append((number, "event", event.kind, event.path.removeprefix(root)))

        connection = await connect(host, port, None, on_event, lambda sent: None)
        await connection.hello(0, 4000, 0, bytes(16))
        connections.append(connection)
    await connections[0].submit(jute.create(root, b"", jute.PERSISTENT))
    for number, call in calls:
        try:
            answer = _plain((await connections[number].submit(call)).value, root)
        except jute.Aborted as aborted:
            answer = ("aborted", aborted.index, aborted.code)
        except jute.ZooKeeperError as refused:
            answer = ("refused", refused.code)
        # What this has told the others has reached them when they are answered next.
        for other in connections:
            await other.submit(jute.sync("/"))
        told = sorted(
            (one for one in heard if isinstance(one, tuple) and one[1] == "event"), key=repr
        )
        heard[:] = [one for one in heard if one not in told]
        heard.append((number, call.opcode, answer, told))
    # Its session ends: what is ephemeral goes.
    await connections[1].submit(jute.CLOSE_CALL)
    left = await connections[0].submit(jute.get_children(root))
    await connections[0].submit(jute.sync("/"))
    told = sorted((one for one in heard if isinstance(one, tuple) and one[1] == "event"), key=repr)
    heard[:] = [one for one in heard if one not in told]
    # The nodes of a session go in no certain order, and the first one uses a watch of their parent up.
    heard.append((_plain(left.value, root), {one[1:] for one in told}))
    for connection in connections:
        connection.abort(ConnectionError("done"))
    return heard


def _on_the_fake(
    monkeypatch: pytest.MonkeyPatch, members: int, calls: list[tuple[int, jute.Call[Any]]]
) -> list[object]:
    world = World(1)
    wire = Wire(world)
    Ensemble(world, wire, members, 2.0)
    process = Process(world, "p")
    process.loop.wire = wire
    monkeypatch.setattr(aiodlock._clock, "_gettime", lambda _: (world.current or process).boot())
    heard: list[list[object]] = []

    async def play() -> None:
        heard.append(await _play([("10.0.0.1", 2181)] * 2, "/root", calls))

    task = process.start(play())
    assert world.run_until(1e4, task.done), "the fake did not answer"
    task.result()
    process.bury()
    return heard[0]


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    if not zookeeper.installed():
        pytest.skip("no ZooKeeper here")
    one = zookeeper.ZooKeeperServer()
    one.start()
    yield SimpleNamespace(port=one.port)
    one.stop()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("members", [1, 3])
def test_fake_answers_as_a_real_server_does(
    server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, seed: int, members: int
) -> None:
    root = f"/fake-{members}-{seed}"
    real = asyncio.run(
        _play([("127.0.0.1", server.port)] * 2, root, _calls(random.Random(seed), root))
    )
    with monkeypatch.context() as patched:
        fake = _on_the_fake(patched, members, _calls(random.Random(seed), "/root"))
    for number, (one, other) in enumerate(zip(real, fake, strict=True)):
        assert one == other, f"call {number}: the server {one}, the fake {other}"
