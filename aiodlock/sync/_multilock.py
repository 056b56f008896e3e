"""MultiLock: several names at once, all or none, for threads."""

from __future__ import annotations

from typing import Any, Never

from .. import _client as core_client
from .. import _multilock as core
from .._errors import LockLost
from .._lock import UNSET
from ._body import Body, call_when_lost
from ._lease import MultiLease
from ._life import Life
from ._lock import Lock
from ._recipe import Described, OnLost, Recipe
from ._twin import like


class Several(Recipe[core.MultiLock]):
    """Names, which are described here, and locks, which were described before."""

    def __init__(
        self,
        life: Life,
        names_or_locks: tuple[str | Lock, ...],
        timeout: float | None,
        options: dict[str, Any],
        on_lost: OnLost | None,
    ) -> None:
        before: list[Recipe[Any] | str] = []
        #: What the given locks call on the loss of their name.
        self._on_lost_of: dict[str, list[OnLost]] = {}
        for one in names_or_locks:
            if not isinstance(one, Lock):
                before.append(one)
                continue
            recipe = one._of
            before.append(recipe)
            if recipe.life is not life:
                raise ValueError(f"{one!r} belongs to another client than {life!r}")
            functions = self._on_lost_of.setdefault(one.name, [])
            if recipe.on_lost is not None and recipe.on_lost not in functions:
                functions.append(recipe.on_lost)  # a name that is repeated is taken once

        def make(client: core_client.Client) -> core.MultiLock:
            given = [one.make(client) if isinstance(one, Recipe) else one for one in before]
            # What is neither is refused there.
            return client.multilock(*given, timeout=timeout, **options)

        super().__init__(life, (), make, on_lost, timeout)
        self.names = self.template.names

    def watch(self, body: Body) -> None:
        """Have the functions of the given locks called, and that of the options for the first loss."""
        of_all = [] if self.on_lost is None else [_first_of(self.on_lost)]
        for hold in body.holds:
            for function in (*self._on_lost_of.get(hold.request.name, ()), *of_all):
                call_when_lost(hold, function)


class MultiLock(Described[core.MultiLock, MultiLease]):
    """Several locks as one. Made by ``Client.multilock``; holds nothing, may be used by many threads.

    ``with multilock as leases:`` waits for all names and enters the block when all are held. When one is
    lost, all count as lost, and leaving the block raises ``LockLost``. Multilocks do not deadlock with each
    other, in whatever order their names are given.

    ```python
    both = locks.multilock("account:1", "account:2", timeout=5)
    with both as leases:
        print(leases.tokens)
    ```
    """

    _lease_type = MultiLease

    def __repr__(self) -> str:
        return f"<MultiLock {', '.join(map(repr, self.names))} on {self._of.life!r}>"

    @property
    def names(self) -> tuple[str, ...]:
        """The names, each once, in the order in which they are taken."""
        return self._of.template.names

    @like(core.MultiLock.acquire)
    def acquire(self, *given: Never, timeout: float | None = UNSET, **wrong: Never) -> MultiLease:
        return self._take_bare(timeout, given, wrong)


def _first_of(function: OnLost) -> OnLost:
    """Return what passes on only the first loss that it hears of."""
    told = False

    def first(lost: LockLost) -> None:
        nonlocal told
        if not told:
            told = True
            function(lost)

    return first
