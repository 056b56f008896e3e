"""Locks on one Redis or Valkey server, as the core uses them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from ..._errors import BackendError
from ..._model import (
    Capabilities,
    Gone,
    Granted,
    Left,
    Refused,
    StoreRequest,
    Waiting,
)
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


class RedisBackend(Asked):
    """One server: ``calls`` for requests, ``inspection`` for people; both use the same connections."""

    def __init__(self, source: Source, settings: Settings, *, label: str | None = None) -> None:
        self.capabilities: Capabilities = capabilities(settings.min_replicas)
        self.label: str = label or make_label()
        self.server: Server = Server(source, settings, self.label)
        self.calls: Calls = Calls(self.server, ClientChannel(self.server.to_clients))
        super().__init__(Inspection(self.server), Waits(self.server))

    def __repr__(self) -> str:
        return f"<RedisBackend {self.server.described}>"

    async def run(self, listener: Notices, ready: Callable[[], None]) -> None:
        self.calls.listener = listener
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

    # -- requests --------------------------------------------------------------------------------

    def acquire(
        self, request: StoreRequest, *, wait: bool
    ) -> Coroutine[Any, Any, Granted | Waiting | Refused | Gone]:
        return self.calls.acquire(request, wait=wait)

    def extend(
        self, batch: Sequence[tuple[StoreRequest, float]]
    ) -> Sequence[Awaitable[Granted | Waiting | Gone]]:
        return self.calls.extend(batch)

    def server_of(self, request: StoreRequest) -> object:
        return None

    def leave(
        self, request: StoreRequest, *, lost: bool = False, within: float | None = None
    ) -> Coroutine[Any, Any, Left]:
        return self.calls.leave(request, lost=lost, within=within)

    def leave_later(
        self,
        request: StoreRequest,
        done: Callable[[Left | BackendError], object],
        *,
        lost: bool = False,
    ) -> bool:
        return self.calls.leave_later(request, done, lost=lost)

    async def leave_unknown(self, request_id: str, where: str, final: bool) -> Left:
        return await self.calls.leave_unknown(request_id, where, final)

    def watch(self, request: StoreRequest, watching: bool) -> None:
        self.calls.watch(request, watching)

    def announce(self, kind: str, name: str) -> None:
        self.calls.announce(kind, name)

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        return self.calls.observe(kind, name, changed)
