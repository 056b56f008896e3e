"""Election: one leader at a time, on top of the lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from .. import _client as core_client
from .. import _election as core
from .._acquire import OwnRequests
from ._blocks import here
from ._described import Described, OnLost
from ._iterate import iterate
from ._lease import Lease
from ._twin import like, said_of_threads

if TYPE_CHECKING:
    from ._client import Client
    from ._running import Running


class Election:
    __doc__ = said_of_threads(core.Election)

    def __init__(
        self,
        client: Client,
        make: Callable[[core_client.Client], core.Election],
        on_lost: OnLost | None,
    ) -> None:
        self._client = client
        self._make = make
        self._on_lost = on_lost
        self._name = make(client._template).name  # checks what it is given

    @property
    def name(self) -> str:
        """The name, as given; the same as that of ``Client.lock(name)``."""
        return self._name

    def __repr__(self) -> str:
        return f"<Election {self._name!r} on {self._client!r}>"

    def lead(self, value: str = "") -> Candidacy:
        """Wait to be elected: ``with election.lead("host-1") as lease``; leaving resigns.

        Candidates are elected in order of arrival.

        ```python
        with locks.election("scheduler").lead("host-1") as lease:
            print("elected, with token", lease.token)
        ```

        :param value: what ``observe`` shows, such as an address; up to 400 bytes of UTF-8.
        :raises AcquireTimeout: (on entering) with the option ``timeout``, when it ran out.
        """
        return Candidacy(self, value)

    @like(core.Election.observe)
    def observe(self, *, interval: float = 5.0) -> Iterator[str]:
        running = self._client._use(self._name)
        leaders = self._make(running.inner).observe(interval=interval)
        return iterate(self._client, running, leaders)


class Candidacy(Described[core.Candidacy, Lease]):
    """``with`` it to stand, lead and resign. May be entered again, and by several threads."""

    _lease_type = Lease

    def __init__(self, election: Election, value: str) -> None:
        super().__init__(
            election._client,
            lambda client: election._make(client).lead(value),
            election._on_lost,
        )
        self._election = election
        self._value = value

    @property
    def _names(self) -> Sequence[str]:
        return (self._election._name,)

    @property
    def _default_timeout(self) -> float | None:
        return self._core._described.options.timeout

    def _own(self, running: Running) -> OwnRequests:
        return here().own(running)  # each candidacy is an owner of its own

    def __repr__(self) -> str:
        return f"<Candidacy {self._value!r} in {self._election!r}>"
