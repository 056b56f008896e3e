"""Locks on Redis and Valkey: keys, scripts, one multiplexed connection, wake-ups.

Read in this order: ``backend`` (a single server), ``calls`` (what is asked and answered), ``lua/`` (what is
decided), ``server`` (how a client uses one server), ``wire`` and ``link`` (how messages get there),
``wakeups`` (how waiters hear of their grants), ``cluster`` (which node owns a name), ``quorum`` (how
several independent servers decide).
"""

from .backend import RedisBackend
from .cluster import ClusterBackend, seeds_of
from .quorum import QuorumBackend
from .source import SENTINEL_SCHEMES, Source

__all__ = [
    "SENTINEL_SCHEMES",
    "ClusterBackend",
    "QuorumBackend",
    "RedisBackend",
    "Source",
    "seeds_of",
]
