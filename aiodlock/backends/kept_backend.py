"""The seam for a store with a lease per request: the store, and a keeper that extends what is in it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from .._model import Capabilities, Kind, LockInfo, Mode, Terms, Tokens
from .base import Follower, Listener, Place
from .keeper import Keeper
from .kept import KeptStore
from .kept_place import KeptPlace


class KeptBackend:
    """A ``Backend`` made of a ``KeptStore``."""

    def __init__(self, store: KeptStore, *, unavailable_after: float) -> None:
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

    async def inspect(self, kind: Kind, name: str) -> LockInfo:
        """Return who holds and who waits."""
        return await self.store.inspect(kind, name)

    async def holds(self, kind: Kind, name: str, mode: Mode, token: int) -> bool:
        """Return whether the grant that has this token holds still."""
        info = await self.inspect(kind, name)
        return any(held.token == token and held.mode == mode for held in info.holders)

    async def inspect_all(
        self, kind: Kind, names: Sequence[str], *, queues: bool = True
    ) -> list[LockInfo]:
        """Return the same for several names."""
        return await self.store.inspect_all(kind, names, queues=queues)

    async def tell_waits(self, serial: int, record: bytes, *, keep: float) -> None:
        """Let every client read what this one waits for."""
        await self.store.tell_waits(serial, record, keep=keep)

    async def waits_of(self, labels: Sequence[str]) -> dict[str, bytes]:
        """Return what these clients wait for."""
        return await self.store.waits_of(labels)

    def names(self, match: str, kind: Kind = "lock") -> AsyncIterator[str]:
        """Iterate over every name of the kind that matches the glob."""
        return self.store.names(match, kind)

    async def break_lock(self, name: str, kind: Kind = "lock", tokens: Tokens | None = None) -> int:
        """Release all holders of a name by force, or those with these tokens."""
        return await self.store.break_lock(name, kind, tokens)

    async def forget(self, name: str) -> bool:
        """Take the record of a success back."""
        return await self.store.forget(name)
