"""One request, as its keys and its place both know it; and all those of a client."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, TypeVar

from ..._backoff import pauses
from ..._errors import BackendError, LossReason
from ..._model import Terms, first_request
from ..stage import HELD, NEW, WAITING, Stage
from . import recipe
from .cluster import Cluster
from .recipe import Keys

#: The first pause between repetitions in the background (seconds). Each one is longer: what is refused
#: costs the cluster as much as what is done, and thousands of requests may repeat theirs at once.
PAUSE = 0.1


class Request:
    """Mutable state: ``terms`` (a lease that lingers gets others), ``stage``, ``token``, ``_timer`` (of
    what is due)."""

    def __init__(self, cluster: Cluster, terms: Terms, request_id: str, owner: str) -> None:
        self.cluster: Cluster = cluster
        self.id: str = request_id
        self.owner: str = owner
        self.terms: Terms = terms
        self.keys: Keys = cluster.keys(terms.kind, terms.name)
        self.stage: Stage = NEW
        self.token: int = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def key(self) -> bytes:
        """Its key."""
        return self.keys.request(self.id)

    @property
    def lives(self) -> bool:
        """Whether it waits or holds, as far as is known."""
        return self.stage is WAITING or self.stage is HELD

    def value(self, order: int | None = None) -> bytes:
        """Return what stands in its keys. ``order``: of one that joins, and in its lock-delay."""
        cluster = self.cluster
        return recipe.value_of(self.terms, self.owner, cluster.label, cluster.description, order)

    @property
    def is_due(self) -> bool:
        """Whether something will be called after a while."""
        return self._timer is not None

    def set_timer(self, pause: float, due: Callable[[], object]) -> None:
        """Call this after a while, instead of what was due before."""
        self.cancel_timer()

        def call() -> None:
            self._timer = None
            due()

        self._timer = self.cluster.later(pause, call)

    def cancel_timer(self) -> None:
        """Nothing is due any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def repeat(self, stage: Stage, attempt: Callable[[], Awaitable[bool | None]]) -> None:
        """Attempt this, more and more rarely, while the request is at this stage: again when it failed, or
        has returned True."""
        pause = pauses(first=PAUSE)
        while self.stage is stage:
            try:
                if not await attempt():
                    return
            except BackendError as failed:
                self.on_failed(failed)
            await asyncio.sleep(next(pause))

    def on_gone(self, reason: LossReason) -> None:
        """The store does not know it any more."""
        raise NotImplementedError

    def on_failed(self, error: BackendError) -> None:
        """What was sent in the background had no answer, or was refused."""
        raise NotImplementedError


_R = TypeVar("_R", bound=Request)


class Requests(Generic[_R]):
    """Those that the cluster may know of: from the first message until the leave was answered.

    Mutable state: ``_by_id``; ``_mates`` (how many of them have an owner that another request has named).
    """

    def __init__(self) -> None:
        self._by_id: dict[str, _R] = {}
        self._mates: Counter[str] = Counter()

    def __iter__(self) -> Iterator[_R]:
        return iter(tuple(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, request_id: str) -> _R | None:
        """Return the one with this id."""
        return self._by_id.get(request_id)

    def add(self, request: _R) -> None:
        """It is about to be sent."""
        if request.id not in self._by_id:
            self._by_id[request.id] = request
            if first_request(request.owner) != request.id:
                self._mates[request.owner] += 1

    def remove(self, request: _R) -> None:
        """The store knows nothing of it any more."""
        if self._by_id.pop(request.id, None) is None or first_request(request.owner) == request.id:
            return
        self._mates[request.owner] -= 1
        if not self._mates[request.owner]:
            del self._mates[request.owner]

    def has_mates(self, owner: str) -> bool:
        """Whether requests of this client may get in beside one that has named this owner."""
        return owner in self._mates
