"""Broken clients of a Redis Cluster, in the simulation only: the checkers see what they are for."""

from __future__ import annotations

from aiodlock._clock import now
from aiodlock._model import StoreRequest
from aiodlock.backends.keeper import Keeper
from aiodlock.backends.redis import replies
from aiodlock.backends.redis.cluster.identity import ClusterIdentity
from aiodlock.backends.redis.cluster.node import ChannelPerName, Node
from aiodlock.backends.redis.cluster.topology import Topology
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


def _counts_from_the_answer(_: float, left_ms: int) -> float:
    return _DEADLINE(now(), left_ms)


_DEADLINE = replies.local_deadline


def _listens_nowhere(self: ChannelPerName, request: StoreRequest) -> None:
    pass


def _asks_the_nodes_on_demand(self: Topology) -> float | None:
    return None


#: Where the search for what is caught less often begins.
_BEGIN = {
    "identity is not asked": 8,
    "every node is believed": 16,
    "a subscription stays where the slot was": 37,
    "deadlines count from the answer": 6,
    "nobody asks about a waiter whose channel is subscribed to": 25,
    "owners are only asked for when somebody notices": 230,
}

CLUSTER_VARIANTS = {
    f"cluster: {name}": Variant(
        prepare, caught_by, seed=_BEGIN.get(name, 0), kind=RedisClusterScene
    )
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
            _patched(Keeper, "_ask_about_held", _hears_nothing),
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
            "nobody asks about a waiter whose channel is subscribed to",
            _patched(Wakeups, "_look_at", _hears_nothing),
            ("idle", "liveness"),
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
    )
}
