"""Election: one leader at a time, on top of the lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .. import _client as core_client
from .. import _election as core
from .. import _lease as core_lease
from .._errors import LockLost
from ._blocks import Enterable, here
from ._iterate import iterate
from ._lease import Body, Lease, arm, call_when_lost, leave, wait_for_thread

if TYPE_CHECKING:
    from ._client import Client


class Election:
    """Made by ``Client.election``; may be used by many threads. It is the lock of the same name.

    ```python
    with locks.election("scheduler", ttl=10).lead("http://host-1:8080") as lease:
        ...
    ```
    """

    def __init__(
        self,
        client: Client,
        name: str,
        options: dict[str, Any],
        on_lost: Callable[[LockLost], object] | None,
    ) -> None:
        self._client = client
        self._options = options
        self._on_lost = on_lost
        self._name = name
        self._on(client._template)  # checks what it is given

    @property
    def name(self) -> str:
        """The name, as given; the same as that of ``Client.lock(name)``."""
        return self._name

    def __repr__(self) -> str:
        return f"<Election {self._name!r} on {self._client!r}>"

    def _on(self, client: core_client.Client) -> core.Election:
        return client.election(self._name, **self._options)

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

    def observe(self, *, interval: float = 5.0) -> Iterator[str]:
        """Iterate over the leaders' values: the present one's first, then that of each next one.

        Each step waits until there is one.

        ```python
        def follow():
            for address in locks.election("scheduler").observe():
                print("the leader is at", address)
        ```

        :param interval: seconds between two looks, where announcements may be lost.
        :raises BackendUnavailable: when nothing answered for the client's ``unavailable_after``.
        :raises ClientClosed: when the client is closed.
        """
        running = self._client._use(self._name)
        leaders = self._on(running.inner).observe(interval=interval)
        return iterate(self._client, running, leaders)


class Candidacy(Enterable[Lease]):
    """``with`` it to stand, lead and resign. May be entered again, and by several threads."""

    def __init__(self, election: Election, value: str) -> None:
        super().__init__()
        election._on(election._client._template).lead(value)  # checks it
        self._election = election
        self._value = value

    def _take(self) -> Lease:
        election, body = self._election, Body()
        running = election._client._use(election.name)
        candidacy = election._on(running.inner).lead(self._value)
        own = here().own(running)

        async def elect() -> core_lease.Lease:
            lease = await candidacy._elect(own)
            wait_for_thread(lease)
            await arm([lease._request], body)
            if election._on_lost is not None:
                call_when_lost(running.portal, lease, election._on_lost)
            return lease

        lease = Lease(
            election._client,
            running,
            running.call(elect, lambda lease: leave(lease, [lease._request], body)),
            body,
        )
        here().acquired(lease)
        return lease

    def __repr__(self) -> str:
        return f"<Candidacy {self._value!r} in {self._election!r}>"
