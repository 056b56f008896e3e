"""Election: one leader at a time, on top of the lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .. import _client as core_client
from .. import _election as core
from ._lease import Lease
from ._life import Life
from ._recipe import Described, OnLost, Recipe
from ._twin import like, said_of_threads


class Election:
    __doc__ = said_of_threads(core.Election)

    def __init__(
        self,
        life: Life,
        make: Callable[[core_client.Client], core.Election],
        on_lost: OnLost | None,
        timeout: float | None,
    ) -> None:
        self._life = life
        self._make = make
        self._on_lost = on_lost
        self._timeout = timeout
        self._name = make(life.template).name  # checks what it is given

    @property
    def name(self) -> str:
        """The name, as given; the same as that of ``Client.lock(name)``."""
        return self._name

    def __repr__(self) -> str:
        return f"<Election {self._name!r} on {self._life!r}>"

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
        make = self._make
        of = Recipe(
            self._life,
            (self._name,),
            lambda client: make(client).lead(value),
            self._on_lost,
            self._timeout,
            reenters=False,  # each candidacy is an owner of its own
        )
        return Candidacy(of, f"{value!r} in {self!r}")

    @like(core.Election.observe)
    def observe(self, *, interval: float = 5.0) -> Iterator[str]:
        return self._life.iterate(lambda client: self._make(client).observe(interval=interval))


class Candidacy(Described[core.Candidacy, Lease]):
    """``with`` it to stand, lead and resign. May be entered again, and by several threads."""

    _lease_type = Lease

    def __init__(self, of: Recipe[core.Candidacy], described: str) -> None:
        super().__init__(of)
        self._described = described

    def __repr__(self) -> str:
        return f"<Candidacy {self._described}>"
