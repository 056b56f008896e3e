"""Locks on one Redis or Valkey server, as the core uses them."""

from __future__ import annotations

from collections.abc import Callable

from ..._model import Capabilities, StoreRequest
from .._label import make_label
from ..asked import Asked
from ..kept import Notices
from .calls import Calls, ClientChannel
from .inspection import Inspection
from .replicas import capabilities
from .server import Server
from .settings import Settings
from .source import Source
from .waits import Waits


class RedisBackend(Calls, Asked):
    """A ``KeptStore`` of one server: ``Calls`` about requests, ``Inspection`` for people; both use the same
    connections. (The ``Backend`` is the ``KeptBackend`` around it.)"""

    listener: Notices | None

    def __init__(self, source: Source, settings: Settings, *, label: str | None = None) -> None:
        self.capabilities: Capabilities = capabilities(settings.min_replicas)
        self.label: str = label or make_label()
        server = Server(source, settings, self.label)
        Calls.__init__(self, server, ClientChannel(server.to_clients))
        Asked.__init__(self, Inspection(server), Waits(server))

    def __repr__(self) -> str:
        return f"<RedisBackend {self.server.described}>"

    async def run(self, listener: Notices, ready: Callable[[], None]) -> None:
        self.listener = listener
        await self.server.run(listener, ready)

    @property
    def failure(self) -> Exception | None:
        """Why there is no connection, if there is none."""
        return self.server.failure

    @property
    def further_at(self) -> float:
        """When entering has last come further."""
        return self.server.further_at

    @property
    def answers_within(self) -> float:
        """How long the next answer may take (seconds)."""
        return self.server.answers_within

    def server_of(self, request: StoreRequest) -> object:
        return None
