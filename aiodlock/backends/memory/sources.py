"""``memory://`` and ``memory://NAME``."""

from __future__ import annotations

import os

from ..._errors import Unsupported
from ..._model import Capabilities
from ..kept_backend import KeptBackend
from ..sources import StoreOptions
from .backend import CAPABILITIES, MemoryBackend
from .store import Store, check_process, shared_store


class MemoryOpener:
    """A store in memory, private to the client or shared by name."""

    capabilities: Capabilities = CAPABILITIES

    def __init__(self, url: str, options: StoreOptions) -> None:
        self.described: str = url
        self._options = options
        self._name = _name_in(url)
        self._pid = os.getpid()

    def open(self) -> KeptBackend:
        """Make a backend; a private store is a new one each time."""
        options = self._options
        store = Store()
        if self._name:
            check_process(self._pid, self.described)
            store = shared_store(self._name, self)
        backend = MemoryBackend(
            store,
            self.described,
            prefix=options.prefix,
            token_retention=options.token_retention,
            unavailable_after=options.unavailable_after,
            description=options.description,
        )
        return KeptBackend(backend, unavailable_after=options.unavailable_after)


def _name_in(url: str) -> str:
    _, slashes, name = url.partition("://")
    if not slashes or any(sign in name for sign in "/?#"):
        raise ValueError(
            f"source must be memory:// or memory://NAME, with a NAME without '/', '?' and '#', not {url!r}"
        )
    return name


def read_source(source: str, options: StoreOptions) -> MemoryOpener:
    """Return what opens the store of a URL."""
    if options.min_replicas:
        raise Unsupported(f"min_replicas above 0 needs servers, and {source!r} is in memory")
    return MemoryOpener(source, options)
