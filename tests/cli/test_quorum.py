"""Several URLs for the command: a quorum of three servers, of which one may be dead."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack

import pytest

import aiodlock
from aiodlock._embedded import EmbeddedServer
from aiodlock.cli._source import read_source

from .. import forked
from ..scenes import PATIENCE


@pytest.mark.parametrize(
    "url",
    [
        "redis://a",
        "redis://:p,w@a:1/0",
        "redis+sentinel://a:1,b:2/m/0",
        "redis+cluster://a:1,b:2",
        "memory://",
        "unix:///a,b",
    ],
)
def test_one_url_stays_one(url: str) -> None:
    assert read_source(url) == url


@pytest.mark.parametrize(
    ("url", "urls"),
    [
        ("redis://a,redis://b,redis://c", ["redis://a", "redis://b", "redis://c"]),
        (
            "redis://a:1/0, rediss://b?x=1,unix:///c",
            ["redis://a:1/0", "rediss://b?x=1", "unix:///c"],
        ),
        (
            "redis+sentinel://a:1,b/m,redis+sentinel://c,d:2/m,redis://e",
            ["redis+sentinel://a:1,b/m", "redis+sentinel://c,d:2/m", "redis://e"],
        ),
    ],
)
def test_whole_urls_with_commas_between_them_are_a_quorum(url: str, urls: list[str]) -> None:
    assert read_source(url) == urls


@pytest.fixture
def servers() -> Iterator[list[EmbeddedServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(EmbeddedServer()) for _ in range(3)]


async def call(servers: list[EmbeddedServer], *arguments: str) -> tuple[int | None, str]:
    """Run a command on the quorum in a process of its own; return exit code and output."""
    process = await forked.start(
        "aiodlock",
        *arguments,
        env=os.environ | {"AIODLOCK_URL": ",".join(server.url for server in servers)},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 6 * PATIENCE)
    return process.returncode, out.decode()


async def test_commands_work_on_a_quorum_with_a_dead_node(servers: list[EmbeddedServer]) -> None:
    async with aiodlock.Client([server.url for server in servers]) as client:
        servers[0].kill()
        lease = await client.lock("x").acquire()
        shown, listed, top, ran = await asyncio.gather(
            call(servers, "show", "x", "--json"),
            call(servers, "ls", "--json"),
            call(servers, "top", "--count", "1", "--json"),
            call(servers, "run", "-n", "x", "--", "true"),
        )
        assert (shown[0], json.loads(shown[1])["holders"][0]["token"]) == (0, lease.token)
        assert (listed[0], [info["name"] for info in json.loads(listed[1])]) == (0, ["x"])
        assert (top[0], json.loads(top[1])["holders"]) == (0, 1)
        assert ran == (75, "")
        code, out = await call(servers, "break", "x", "--yes", "--json")
        assert (code, json.loads(out)["broken"]) == (0, 1)
        assert (await lease.wait_lost()).reason == "broken"
    assert await call(servers, "run", "x", "--", "sh", "-c", "test -n $AIODLOCK_TOKEN") == (0, "")
    code, out = await call(servers, "bench", "--seconds", "0.1", "--json")
    assert (code, len(json.loads(out))) == (0, 3)


async def test_doctor_takes_another_lock_of_the_quorum_than_of_each_node(
    servers: list[EmbeddedServer],
) -> None:
    async with AsyncExitStack() as held:
        for server in servers[:2]:
            node = await held.enter_async_context(aiodlock.Client(server.url))
            await held.enter_async_context(node.lock("aiodlock doctor", ttl=60))
        _, out = await call(servers, "doctor", "--json")
    found = {one["subject"]: one for one in json.loads(out)}
    assert found["lock"]["level"] == "ok", found["lock"]


async def test_doctor_looks_at_every_node(servers: list[EmbeddedServer]) -> None:
    code, out = await call(servers, "doctor", "--json")
    found = {one["subject"]: one for one in json.loads(out)}
    assert code == 0
    assert found["lock"]["level"] == "ok", found["lock"]
    assert [found[f"node {node}: version"]["level"] for node in (1, 2, 3)] == ["ok"] * 3
    assert "restart_delay" in found["node 1: persistence"]["fix"]
    assert not found["node 1: replicas"]["meaning"]
    servers[1].kill()
    code, out = await call(servers, "doctor", "--json")
    found = {one["subject"]: one for one in json.loads(out)}
    assert code == 1
    assert found["lock"]["level"] == "ok", found["lock"]
    assert found["node 2: server"]["level"] == "error"
    assert found["node 3: version"]["level"] == "ok"
    servers[2].kill()
    code, out = await call(servers, "doctor", "--json")
    found = {one["subject"]: one for one in json.loads(out)}
    assert code == 1
    assert [found[at]["level"] for at in ("lock", "node 2: server", "node 3: server")] == [
        "error"
    ] * 3
    assert found["node 1: version"]["level"] == "ok"
