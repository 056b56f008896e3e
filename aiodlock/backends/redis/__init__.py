"""Locks on Redis and Valkey: keys, scripts, one multiplexed connection, wake-ups.

Read in this order: ``backend`` (what is asked and answered), ``lua/`` (what is decided), ``wire``
and ``link`` (how it gets there), ``wakeups`` (how waiters hear of it), ``cluster`` (which node it is);
``quorum``, ``votes`` and ``trust`` are for several independent servers.
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
