"""How the twin of a lock, for tasks, is made in each process, and how a thread acquires it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Generic, Never, Protocol, TypeAlias, TypeVar

from .. import _client as core
from .._acquire import OwnRequests
from .._acquisition import Acquisition
from .._errors import LockLost
from .._lock import UNSET
from .._multilock import Acquisitions
from .._options import check_timeout, refuse_keywords
from .._patience import LEAST, soon
from ._block import Enterable
from ._body import Body, call_when_lost
from ._holds import here
from ._lease import Lease, MultiLease
from ._life import Life
from ._running import Running

OnLost: TypeAlias = Callable[[LockLost], object]


class Twin(Protocol):
    """A lock for tasks, or several as one, or a candidacy."""

    def _acquire(
        self, timeout: float | None, own: OwnRequests | None = None
    ) -> Coroutine[Any, Any, Acquisition | Acquisitions]:
        """Wait for the turn, for a task or for a thread that holds ``own``."""
        raise NotImplementedError


_T = TypeVar("_T")
_C = TypeVar("_C", bound=Twin)
_L = TypeVar("_L", Lease, MultiLease)


class Recipe(Generic[_C]):
    """Holds nothing itself.

    Mutable state: ``_made`` (its twin on the running client that it was last used with).

    :param make: makes the twin for tasks. Each process has a client of its own, and so a twin.
    :param timeout: of entering a block.
    :param reenters: whether a thread gets the names at once that it holds.
    """

    def __init__(
        self,
        life: Life,
        names: Sequence[str],
        make: Callable[[core.Client], _C],
        on_lost: OnLost | None,
        timeout: float | None,
        *,
        reenters: bool = True,
    ) -> None:
        self.life: Life = life
        self.names: Sequence[str] = names
        self.make: Callable[[core.Client], _C] = make
        self.on_lost: OnLost | None = on_lost
        self.template: _C = make(life.template)  # checks what it is given
        self.timeout: float | None = check_timeout(timeout)
        self._reenters = reenters
        self._made: tuple[Running, _C] | None = None

    def use(self) -> tuple[Running, _C]:
        """Return what runs in this process, and there the twin."""
        running = self.life.use(self.names[0])
        made = self._made
        if made is None or made[0] is not running:
            self._made = made = (running, self.make(running.inner))
        return made

    def ask(self, call: Callable[[_C], Coroutine[Any, Any, _T]]) -> _T:
        """Run a coroutine of the twin in the loop's thread."""
        running, twin = self.use()
        return running.call(lambda: call(twin))

    def acquire(self, timeout: float | None, *, block: bool) -> Body:
        """Acquire by one call into the loop; for a block, what belongs to it is done in the same call."""
        running, twin = self.use()
        own = here().own(running, self.names if self._reenters else ())

        async def acquire() -> Body:
            left = timeout if running.is_open else await running.open_within(timeout)
            body = Body(running, await twin._acquire(left, own))
            body.wait_for_thread()
            if block:
                await body.arm()
            self.watch(body)
            return body

        within = soon(LEAST) if timeout == 0 else timeout
        return running.portal.call(acquire, Body.leave, within=within)

    def watch(self, body: Body) -> None:
        """Have the function called when one is lost. In the loop's thread."""
        if self.on_lost is not None:
            for hold in body.holds:
                call_when_lost(hold, self.on_lost)


class Described(Enterable[_L], Generic[_C, _L]):
    """What is made of a name and options, and acquired or entered in any number of threads."""

    _lease_type: Callable[[Life, Body], _L]

    def __init__(self, of: Recipe[_C]) -> None:
        super().__init__()
        self._of: Recipe[_C] = of

    def _take(self) -> tuple[_L, Body]:
        body = self._of.acquire(self._of.timeout, block=True)
        return self._lease_type(self._of.life, body), body

    def _take_bare(
        self,
        timeout: float | None,
        given: tuple[Never, ...] = (),
        wrong: Collection[str] = (),
    ) -> _L:
        """Acquire without a block. What is ``given`` and ``wrong`` is refused."""
        if given or wrong:
            refuse_keywords("acquire()", wrong, ["timeout"], given)
        timeout = self._of.timeout if timeout is UNSET else check_timeout(timeout)
        body = self._of.acquire(timeout, block=False)
        try:
            lease = self._lease_type(self._of.life, body)
            body.keep(lease)
            body.begin()
        except BaseException:  # lost on its way into this thread, or a signal handler raised
            body.let_go()
            body.leave_soon()
            raise
        return lease
