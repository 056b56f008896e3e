"""The user that the pages describe is enough for a cluster, and one that may do less is told so."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiodlock

from ..scenes import until, until_waiting
from ..servers import BINARIES
from .cluster import Cluster

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(BINARIES["valkey9"](), primaries=2, replicas=0) as cluster:
        yield cluster


def _rules() -> list[str]:
    """Return what both pages list, after `ACL SETUSER locks`."""
    server = (ROOT / "examples" / "operators" / "locks.acl").read_text()
    nodes = (DOCS / "topologies" / "cluster.md").read_text()
    more = re.search(r"```text\n(\+cluster.*?)```", nodes, re.DOTALL)
    assert more is not None
    one = [word for line in server.splitlines() for word in line.split()[3:]]
    return [*one, *more[1].split()]


def _let_in(cluster: Cluster, rules: list[str]) -> str:
    """Give all nodes such a user; return the URL with its login."""
    for node in cluster.nodes:
        cluster.call(node, "ACL", "SETUSER", "locks", *rules)
    return cluster.url.replace("//", "//locks:PASSWORD@", 1)


async def test_listed_user_is_told_of_grants_on_every_node(cluster: Cluster) -> None:
    url = _let_in(cluster, _rules())
    async with (
        aiodlock.Client(url, ttl=60.0, waiter_ttl=60.0) as one,
        aiodlock.Client(url, ttl=60.0, waiter_ttl=60.0) as two,
    ):
        for name in ("a", "b", "c", "d"):
            held = await one.lock(name).acquire()
            waiting = asyncio.create_task(two.lock(name).acquire())
            await until_waiting(one, name)
            await until(lambda: any(_sharded(cluster)), "a channel of the name")
            await held.release()
            # By itself a waiter asks only every 20 s.
            await (await asyncio.wait_for(waiting, 10.0)).release()
            await until(lambda: not any(_sharded(cluster)), "the end of the channel")


def _sharded(cluster: Cluster) -> list[list[str]]:
    return [cluster.call(node, "PUBSUB", "SHARDCHANNELS") for node in cluster.nodes]


async def test_user_without_keyspace_channels_is_not_warned_of_each_waiter(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The page says that they may be left out. Waiters are notified as before."""
    url = _let_in(cluster, [rule for rule in _rules() if not rule.startswith("&__keyspace")])
    async with aiodlock.Client(url) as one, aiodlock.Client(url) as two:
        for name in ("a", "b", "c", "d"):
            held = await one.lock(name).acquire()
            waiting = asyncio.create_task(two.lock(name).acquire())
            await until_waiting(one, name)
            await held.release()
            await (await waiting).release()
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("command", ["spublish", "sunsubscribe", "hset"])
async def test_user_who_may_do_less_is_told_when_the_client_is_entered(
    cluster: Cluster, command: str
) -> None:
    url = _let_in(cluster, [rule for rule in _rules() if rule != f"+{command}"])
    with pytest.raises(aiodlock.BackendError, match=f"the command {command.upper()}"):
        await aiodlock.Client(url).__aenter__()
