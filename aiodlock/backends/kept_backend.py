"""The seam for a store with a lease per request: the store, and a keeper that extends what is in it."""

from __future__ import annotations

from collections.abc import Callable

from .._model import Capabilities, Kind, Mode, Terms
from .asked import Asked
from .base import Follower, Listener, Place
from .keeper import Keeper
from .kept import KeptStore
from .kept_place import KeptPlace


class KeptBackend(Asked):
    """A ``Backend`` made of a ``KeptStore``."""

    def __init__(self, store: KeptStore, *, unavailable_after: float) -> None:
        super().__init__(store, store)
        self.store: KeptStore = store
        self.keeper: Keeper = Keeper(store, unavailable_after)
        self.capabilities: Capabilities = store.capabilities
        self.label: str = store.label

    def __repr__(self) -> str:
        return repr(self.store)

    def follow(self, dead: KeptBackend) -> None:
        """See ``Follower``."""
        if isinstance(self.store, Follower):
            self.store.follow(dead.store)

    @property
    def failure(self) -> Exception | None:
        """Why there is no connection, if there is none."""
        return self.store.failure

    @property
    def further_at(self) -> float:
        """When entering has last come further."""
        return self.store.further_at

    @property
    def answers_within(self) -> float:
        """How long the next answer may take (seconds)."""
        return self.store.answers_within

    async def run(self, ready: Callable[[], None]) -> None:
        """Run the store, and the keeper beside it."""
        await self.keeper.run(ready)

    def place(self, terms: Terms, request_id: str, owner: str, listener: Listener) -> Place:
        """Make the place of a request."""
        return KeptPlace(self.keeper, terms, request_id, owner, listener)

    async def settle(self) -> None:
        """Wait for answers that no call waits for."""
        await self.store.settle()

    def announce(self, kind: str, name: str) -> None:
        """Tell whoever observes the name that its holder has changed."""
        self.store.announce(kind, name)

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        """Have ``changed`` called when the name's holder may have changed."""
        return self.store.observe(kind, name, changed)

    async def holds(self, kind: Kind, name: str, mode: Mode, token: int) -> bool:
        """Return whether the grant that has this token holds still."""
        info = await self.inspect(kind, name)
        return any(held.token == token and held.mode == mode for held in info.holders)
