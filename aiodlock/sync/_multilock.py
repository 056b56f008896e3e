"""MultiLock: several names at once, all or none, for threads."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never, TypeAlias

from .. import _client as core_client
from .. import _multilock as core
from .._errors import LockLost, NotHeld
from .._options import check_timeout, refuse_keywords
from .._request import Request
from ._blocks import Enterable, here
from ._lease import Body, Held, Lease, arm, call_when_lost, leave, wait_for_thread
from ._lock import Lock
from ._options import UNSET

if TYPE_CHECKING:
    from ._client import Client, Running
    from ._portal import Portal

OnLoss: TypeAlias = Callable[[LockLost], object]


class MultiLock(Enterable["MultiLease"]):
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

    def __init__(
        self,
        client: Client,
        names_or_locks: tuple[str | Lock, ...],
        timeout: float | None,
        options: dict[str, Any],
        on_lost: OnLoss | None,
    ) -> None:
        super().__init__()
        self._client = client
        self._given = names_or_locks
        self._timeout = timeout
        self._options = options
        self._on_lost = on_lost
        self._names = self._on(client._template).names
        #: What the given locks call on the loss of their name.
        self._on_lost_of: dict[str, list[OnLoss]] = {}
        for one in names_or_locks:
            if isinstance(one, Lock) and one._on_lost is not None:
                functions = self._on_lost_of.setdefault(one.name, [])
                if one._on_lost not in functions:  # a name that is repeated is taken once
                    functions.append(one._on_lost)

    def __repr__(self) -> str:
        return f"<MultiLock {', '.join(map(repr, self._names))} on {self._client!r}>"

    @property
    def names(self) -> tuple[str, ...]:
        """The names, each once, in the order in which they are taken."""
        return self._names

    def acquire(self, *, timeout: float | None = UNSET, **wrong: Never) -> MultiLease:
        """Wait for all names and return their leases; with an error, nothing is held.

        ```python
        leases = locks.multilock("account:1", "account:2").acquire(timeout=5)
        leases.release()
        ```

        :param timeout: seconds for all of it; None waits for ever, 0 tries each name once. Default: the
            multilock's own.
        :raises AcquireTimeout: when the timeout ran out; ``name`` is the one that was waited for.
        :raises DeadlockError: as ``Lock.acquire``.
        :raises BackendUnavailable: as ``Lock.acquire``.
        :raises ClientClosed: as ``Lock.acquire``.
        :raises LockLost: when a name was lost that this thread is in a block of.
        """
        if wrong:
            refuse_keywords("acquire()", wrong, ["timeout"])
        leases = self._acquire(self._timeout if timeout is UNSET else check_timeout(timeout))
        try:
            for lease in leases.values():
                lease._keep()
            leases._begin()
        except BaseException:  # lost on its way into this thread, or a signal handler raised
            leases._let_go()
            leases._leave_soon()
            raise
        return leases

    # -- inside ------------------------------------------------------------------------------------

    def _on(self, client: core_client.Client) -> core.MultiLock:
        given = [
            one._description.make(client) if isinstance(one, Lock) else one for one in self._given
        ]
        # What is neither is refused there.
        return client.multilock(*given, timeout=self._timeout, **self._options)  # type: ignore[arg-type]

    def _take(self) -> MultiLease:
        return self._acquire(self._timeout, block=True)

    def _acquire(self, timeout: float | None, *, block: bool = False) -> MultiLease:
        running = self._client._use(self._names[0])
        multilock = self._on(running.inner)
        own = here().own(running, *self._names)
        body = Body()

        async def acquire() -> core.MultiLease:
            left = timeout if running.is_open else await running.open_within(timeout)
            leases = await multilock._acquire(left, own)
            for lease in leases.values():
                wait_for_thread(lease)
            if block:
                await arm(leases._requests, body)
            self._watch(running.portal, leases)
            return leases

        def take_back(leases: core.MultiLease) -> Coroutine[Any, Any, object]:
            return leave(leases, leases._requests, body)

        leases = running.portal.call(acquire, take_back, within=timeout)
        return MultiLease(self._client, running, leases, body)

    def _watch(self, portal: Portal, leases: core.MultiLease) -> None:
        """Have the functions called when leases are lost. In the loop's thread."""
        of_all = None if self._on_lost is None else _first_of(self._on_lost)
        for name, lease in leases.items():
            for function in self._on_lost_of.get(name, ()):
                call_when_lost(portal, lease, function)
            if of_all is not None:
                call_when_lost(portal, lease, of_all)


def _first_of(function: OnLoss) -> OnLoss:
    """Return what passes on only the first loss that it hears of."""
    told = False

    def first(lost: LockLost) -> None:
        nonlocal told
        if not told:
            told = True
            function(lost)

    return first


class MultiLease(Held, Mapping[str, Lease]):
    """The leases of a multilock: a mapping from each name to its ``Lease``, in the order taken.

    As a context manager it releases in reverse on the way out. Losing one loses all: ``held`` is false from
    then on; the other names stay closed until this is released, so that nobody enters a half-done job.

    ```python
    with locks.multilock("account:1", "account:2") as leases:
        assert leases.held
    ```
    """

    __slots__ = ("_core", "_leases")

    _core: core.MultiLease

    def __init__(
        self, client: Client, running: Running, leases: core.MultiLease, body: Body
    ) -> None:
        self._running = running
        self._core = leases
        self._body = body
        self._leases: dict[str, Lease] = {
            name: Lease(client, running, lease, body) for name, lease in leases.items()
        }

    def __repr__(self) -> str:
        return repr(self._core)

    def __getitem__(self, name: str) -> Lease:
        return self._leases[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leases)

    def __len__(self) -> int:
        return len(self._leases)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    # -- what it is --------------------------------------------------------------------------------

    @property
    def tokens(self) -> dict[str, int]:
        """The fencing token of each name. They are comparable per name only."""
        return self._core.tokens

    @property
    def held(self) -> bool:
        """True only while the server certainly honours every one of the leases."""
        return self._is_here() and self._core.held

    @property
    def lost(self) -> LockLost | None:
        """Why the first of them was lost; None while all are held and after a release."""
        return self._core.lost if self._is_here() else None

    def remaining(self) -> float:
        """Return the seconds until the first of them is lost if not extended; 0.0 once over.

        ```python
        with locks.multilock("account:1", "account:2") as leases:
            print(leases.remaining())
        ```
        """
        return self._core.remaining() if self._is_here() else 0.0

    def ensure_held(self) -> None:
        """Return if all are held, else raise LockLost (or NotHeld after a release).

        ```python
        with locks.multilock("account:1", "account:2") as leases:
            leases.ensure_held()
        ```
        """
        self._check_here()
        self._core.ensure_held()

    def wait_lost(self) -> LockLost:
        """Wait until one is lost and return why. Raises NotHeld when all are released instead.

        ```python
        def tell(leases):  # in a thread beside the work
            lost = leases.wait_lost()
            print("lost", lost.name, lost.reason)
        ```
        """
        self._check_here()
        return self._running.portal.call(self._core.wait_lost)

    def release(self) -> None:
        """Release all, in reverse; each is attempted whatever happens to the others. From any thread.

        ```python
        leases = locks.multilock("account:1", "account:2").acquire()
        leases.release()
        ```

        :raises NotHeld: when this was released before.
        :raises LockLost: when one was lost before, or not answered until its local deadline.
        """
        self._check_here()
        try:
            self._running.portal.call(self._core.release, within=self._core.remaining())
        finally:
            for lease in self._leases.values():
                if lease._is_over():
                    lease._let_go()

    # -- inside ------------------------------------------------------------------------------------

    def _requests(self) -> Sequence[Request]:
        return self._core._requests

    def _parts(self) -> Sequence[Lease]:
        return tuple(self._leases.values())

    def _check_here(self) -> None:
        if not self._is_here():
            raise NotHeld(
                f"the leases on {', '.join(map(repr, self._leases))} were acquired by process "
                f"{self._running.pid}, before a fork: they stay with that process"
            )
