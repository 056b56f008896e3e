"""MultiLock: several names at once, all or none, for threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Never

from .. import _client as core_client
from .. import _multilock as core
from .._acquisition import Acquisition
from .._errors import LockLost
from .._options import check_timeout, refuse_keywords
from ._described import Described, OnLost
from ._lease import MultiLease, call_when_lost
from ._lock import Lock
from ._options import UNSET
from ._twin import like

if TYPE_CHECKING:
    from ._client import Client
    from ._portal import Portal


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

    def __init__(
        self,
        client: Client,
        names_or_locks: tuple[str | Lock, ...],
        timeout: float | None,
        options: dict[str, Any],
        on_lost: OnLost | None,
    ) -> None:
        def make(client: core_client.Client) -> core.MultiLock:
            given = [one._make(client) if isinstance(one, Lock) else one for one in names_or_locks]
            # What is neither is refused there.
            return client.multilock(*given, timeout=timeout, **options)  # type: ignore[arg-type]

        super().__init__(client, make, on_lost)
        #: What the given locks call on the loss of their name.
        self._on_lost_of: dict[str, list[OnLost]] = {}
        for one in names_or_locks:
            if isinstance(one, Lock) and one._on_lost is not None:
                functions = self._on_lost_of.setdefault(one.name, [])
                if one._on_lost not in functions:  # a name that is repeated is taken once
                    functions.append(one._on_lost)

    def __repr__(self) -> str:
        return f"<MultiLock {', '.join(map(repr, self.names))} on {self._client!r}>"

    @property
    def names(self) -> tuple[str, ...]:
        """The names, each once, in the order in which they are taken."""
        return self._core.names

    @like(core.MultiLock.acquire)
    def acquire(self, *given: Never, timeout: float | None = UNSET, **wrong: Never) -> MultiLease:
        if given or wrong:
            refuse_keywords("acquire()", wrong, ["timeout"], given)
        return self._take_bare(
            self._default_timeout if timeout is UNSET else check_timeout(timeout)
        )

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _names(self) -> Sequence[str]:
        return self._core.names

    @property
    def _default_timeout(self) -> float | None:
        return self._core._timeout

    def _watch(self, portal: Portal, parts: Sequence[Acquisition]) -> None:
        of_all = [] if self._on_lost is None else [_first_of(self._on_lost)]
        for one in parts:
            for function in (*self._on_lost_of.get(one.request.name, ()), *of_all):
                call_when_lost(portal, one, function)


def _first_of(function: OnLost) -> OnLost:
    """Return what passes on only the first loss that it hears of."""
    told = False

    def first(lost: LockLost) -> None:
        nonlocal told
        if not told:
            told = True
            function(lost)

    return first
