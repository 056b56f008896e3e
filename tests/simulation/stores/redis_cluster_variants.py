"""Broken clients of a Redis Cluster, in the simulation only: the checkers see what they are for."""

from __future__ import annotations

from typing import Any

from aiodlock._clock import now
from aiodlock._errors import BackendError
from aiodlock._model import Left, StoreRequest
from aiodlock.backends.keeper import Keeper
from aiodlock.backends.redis import replies
from aiodlock.backends.redis.calls import Calls
from aiodlock.backends.redis.cluster import topology
from aiodlock.backends.redis.cluster.backend import ClusterBackend
from aiodlock.backends.redis.cluster.identity import ClusterIdentity
from aiodlock.backends.redis.cluster.node import ChannelPerName, Node
from aiodlock.backends.redis.cluster.topology import Topology
from aiodlock.backends.redis.refusals import Redirected
from aiodlock.backends.redis.subscriptions import Subscriptions
from aiodlock.backends.redis.wakeups import Wakeups
from aiodlock.backends.redis.wire import Wire

from ..scenario import Simulation
from ..variants import Prepare, Variant
from .redis_cluster_scene import RedisClusterScene


def _patched(target: object, name: str, value: object) -> Prepare:
    def prepare(simulation: Simulation) -> None:
        simulation.patch(target, name, value)

    return prepare


async def _asks_nobody(self: Node, wire: Wire) -> None:
    """A connection is used whoever answers on it."""


def _believes_everybody(self: ClusterIdentity, known: ClusterIdentity) -> str:
    return ""


def _hears_nothing(*args: object) -> None:
    pass


def _ends_for_good(self: Subscriptions, channel: bytes) -> None:
    self._standing.discard(channel)


def _does_not_follow(self: Topology, name: str, redirected: Redirected, node: Node) -> Node:
    """Only what nodes tell of all slots counts, and nobody asks for it sooner."""
    return node


def _counts_from_the_answer(_: float, left_ms: int) -> float:
    return _DEADLINE(now(), left_ms)


_DEADLINE = replies.local_deadline


async def _leaves_once(self: ClusterBackend, request: StoreRequest, **options: Any) -> Left:
    try:
        return await _LEAVE(self, request, **options)
    except BackendError:
        return Left("released")


_LEAVE = ClusterBackend.leave


def _listens_nowhere(self: ChannelPerName, request: StoreRequest) -> None:
    pass


def _never_late(request: StoreRequest, wire: Wire) -> bool:
    return False


def _asks_the_nodes_on_demand(self: Topology) -> float | None:
    return None


CLUSTER_VARIANTS = {
    f"cluster: {name}": Variant(prepare, caught_by, kind=RedisClusterScene)
    for name, prepare, caught_by in (
        (
            "identity is not asked",
            _patched(Node, "_identify", _asks_nobody),
            ("stranger",),
        ),
        (
            "every node is believed",
            _patched(ClusterIdentity, "conflict", _believes_everybody),
            ("stranger",),
        ),
        (
            "holders are not asked about when a node has taken over",
            _patched(Keeper, "on_other_server", _hears_nothing),
            ("lost",),
        ),
        (
            "owners are only asked for when somebody notices",
            _patched(Topology, "_ask_within", _asks_the_nodes_on_demand),
            ("lost",),
        ),
        (
            "a subscription stays where the slot was",
            _patched(Subscriptions, "_ended", _ends_for_good),
            ("idle", "liveness"),
        ),
        (
            "nobody asks about a waiter whose channel has moved",
            _patched(Wakeups, "_on_moved", _hears_nothing),
            ("idle", "liveness"),
        ),
        (
            "redirections are not followed",
            _patched(Topology, "follow", _does_not_follow),
            ("idle", "liveness", "storm"),
        ),
        (
            "names are not listened to",
            _patched(ChannelPerName, "on_waiting", _listens_nowhere),
            ("idle", "liveness"),
        ),
        (
            "deadlines count from the answer",
            _patched(replies, "local_deadline", _counts_from_the_answer),
            ("honesty", "exclusion"),
        ),
        (
            "a leave is sent once",
            _patched(ClusterBackend, "leave", _leaves_once),
            ("idle", "ghost", "liveness", "fairness", "leak"),
        ),
        (
            "no marker refuses a late acquire",
            _patched(Calls, "_late", staticmethod(_never_late)),
            ("ghost", "idle"),
        ),
        (
            "a node that is gone is kept for ever",
            _patched(topology, "_KEPT_FOR", float("inf")),
            ("leak", "failure"),
        ),
    )
}
