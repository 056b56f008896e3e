"""``zookeeper://`` and ``zookeepers://``."""

from __future__ import annotations

from ..._errors import Unsupported
from ..._model import Capabilities
from ..sources import StoreOptions
from .address import read_url
from .store import ZooKeeperBackend


class ZooKeeperOpener:
    """An ensemble."""

    capabilities: Capabilities = ZooKeeperBackend.capabilities

    def __init__(self, url: str, options: StoreOptions) -> None:
        self._ensemble = read_url(url, options.prefix)
        self.described: str = self._ensemble.described
        self._options = options

    def open(self) -> ZooKeeperBackend:
        """Make a backend."""
        options = self._options
        return ZooKeeperBackend(
            self._ensemble,
            ttl=options.ttl,
            unavailable_after=options.unavailable_after,
            description=options.description,
        )


def read_source(source: str, options: StoreOptions) -> ZooKeeperOpener:
    """Return what opens the ensemble of a URL."""
    if options.min_replicas:
        raise Unsupported(
            "min_replicas is for Redis and Valkey: in ZooKeeper a majority has every commit"
        )
    if options.prefix in (".", ".."):
        raise ValueError(f"prefix {options.prefix!r} cannot be the name of a node of ZooKeeper's")
    return ZooKeeperOpener(source, options)
