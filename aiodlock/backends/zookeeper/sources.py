"""``zookeeper://`` and ``zookeepers://``."""

from __future__ import annotations

from ..._errors import Unsupported
from ..sources import ReadSource, StoreOptions
from .address import read_url
from .store import ZooKeeperBackend


def read_source(source: str, options: StoreOptions) -> ReadSource:
    """Return what opens the ensemble of a URL."""
    if options.min_replicas:
        raise Unsupported(
            "min_replicas is for Redis and Valkey: in ZooKeeper a majority has every commit"
        )
    if options.prefix in (".", ".."):
        raise ValueError(f"prefix {options.prefix!r} cannot be the name of a node of ZooKeeper's")
    ensemble = read_url(source, options.prefix)

    def make() -> ZooKeeperBackend:
        return ZooKeeperBackend(
            ensemble,
            ttl=options.ttl,
            unavailable_after=options.unavailable_after,
            description=options.description,
        )

    return ReadSource(ensemble.described, ZooKeeperBackend.capabilities, make)
