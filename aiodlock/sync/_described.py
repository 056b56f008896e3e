"""Described: what is made of a name and options, and acquired or entered in any number of threads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from .. import _multilock as core_multilock
from .._acquire import OwnRequests
from .._acquisition import Acquisition
from .._errors import LockLost
from .._patience import LEAST, soon
from ._blocks import Enterable, here
from ._lease import (
    Body,
    Lease,
    MultiLease,
    acquisitions_of,
    arm,
    call_when_lost,
    leave,
    wait_for_thread,
)

if TYPE_CHECKING:
    from .. import _client as core
    from ._client import Client
    from ._portal import Portal
    from ._running import Running

_T = TypeVar("_T")


class _Twin(Protocol):
    def _acquire(
        self, timeout: float | None, own: OwnRequests | None = None
    ) -> Coroutine[Any, Any, Any]:
        """Wait for the turn, for a task or for a thread that holds ``own``."""


_C = TypeVar("_C", bound=_Twin)
_L = TypeVar("_L", Lease, MultiLease)
OnLost = Callable[[LockLost], object]


class Described(Enterable[_L], Generic[_C, _L]):
    """Holds nothing itself.

    Mutable state: ``_made`` (its twin on the running client that it was last used with).

    :param make: makes the twin for tasks. Each process has a client of its own, and so a twin.
    """

    _lease_type: Callable[..., _L]

    def __init__(
        self, client: Client, make: Callable[[core.Client], _C], on_lost: OnLost | None
    ) -> None:
        super().__init__()
        self._client: Client = client
        self._make: Callable[[core.Client], _C] = make
        self._on_lost: OnLost | None = on_lost
        self._core: _C = make(client._template)  # checks what it is given
        self._made: tuple[Running, _C] | None = None

    @property
    @abstractmethod
    def _names(self) -> Sequence[str]:
        """The names that are locked."""

    @property
    @abstractmethod
    def _default_timeout(self) -> float | None:
        """Of entering a block."""

    def _twin(self, running: Running) -> _C:
        made = self._made
        if made is None or made[0] is not running:
            self._made = made = (running, self._make(running.inner))
        return made[1]

    def _ask(self, call: Callable[[_C], Coroutine[Any, Any, _T]]) -> _T:
        running = self._client._use(self._names[0])
        twin = self._twin(running)
        return running.call(lambda: call(twin))

    def _take(self) -> _L:
        entered = self._acquire(self._default_timeout, block=True)
        for lease in entered._parts():
            here().acquired(lease)
        return entered

    def _take_bare(self, timeout: float | None) -> _L:
        """Acquire without a block."""
        acquired = self._acquire(timeout)
        try:
            acquired._keep()
            acquired._begin()
        except BaseException:  # lost on its way into this thread, or a signal handler raised
            acquired._let_go()
            acquired._leave_soon()
            raise
        return acquired

    def _acquire(self, timeout: float | None, *, block: bool = False) -> _L:
        """Acquire by one call into the loop; for a block, what belongs to it is done in the same call."""
        running = self._client._use(self._names[0])
        twin, own, body = self._twin(running), self._own(running), Body()

        async def acquire() -> Acquisition | core_multilock.Acquisitions:
            left = timeout if running.is_open else await running.open_within(timeout)
            acquired: Acquisition | core_multilock.Acquisitions = await twin._acquire(left, own)
            parts = acquisitions_of(acquired)
            for one in parts:
                wait_for_thread(one)
            if block:
                await arm([one.request for one in parts], body)
            self._watch(running.portal, parts)
            return acquired

        acquired = running.portal.call(
            acquire,
            lambda acquired: leave(acquired, body),
            within=soon(LEAST) if timeout == 0 else timeout,
        )
        return self._lease_type(self._client, running, acquired, body)

    def _own(self, running: Running) -> OwnRequests:
        """What this thread holds, and so gets again at once."""
        return here().own(running, *self._names)

    def _watch(self, portal: Portal, parts: Sequence[Acquisition]) -> None:
        """Have the function called when one is lost. In the loop's thread."""
        if self._on_lost is not None:
            for one in parts:
                call_when_lost(portal, one, self._on_lost)
