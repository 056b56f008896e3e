"""Locks on Redis and Valkey: keys, scripts, one multiplexed connection, wake-ups.

Read in this order: ``backend`` (what is asked and answered), ``lua/`` (what is decided), ``wire``
and ``link`` (how it gets there), ``wakeups`` (how waiters hear of it).
"""

from .backend import RedisBackend
from .source import Source

__all__ = ["RedisBackend", "Source"]
