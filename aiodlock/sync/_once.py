"""What is to be done once, for threads."""

from __future__ import annotations

from .. import _once as core
from .._lock import Acquirable as CoreAcquirable
from .._request import AlreadyDone
from ._block import Enterable
from ._body import Body
from ._lease import Lease
from ._recipe import Recipe
from ._twin import said_of_threads


class OnceRun(core.OnceRun):
    __doc__ = said_of_threads(core.OnceRun)

    __slots__ = ()

    lease: Lease | None  # type: ignore[assignment]


class OnceBlock:
    """The body of one entry: of the first, or of one that has nothing to do (None was acquired)."""

    def __init__(self, outcome: core.Outcome, body: Body | None, keep: float) -> None:
        self._outcome = outcome
        self._body = body
        self._keep = keep

    def enter(self) -> None:
        """Be inside of it, in this thread."""
        if self._body is not None:
            self._body.enter()

    def begin(self) -> None:
        """Let the body begin, unless the lease was lost."""
        if self._body is not None:
            self._body.begin()

    def exit(self, exc: BaseException | None) -> None:
        """End the block; without an exception, that is a success."""
        if self._body is None:
            return
        acquired = self._body.core
        assert isinstance(acquired, core.OnceAcquisition)
        name = acquired.request.name
        record = self._outcome.record_at(name, None if exc is None else type(exc), exc)
        if record is not None:
            acquired.record = (record, self._keep)
        self._body.exit(exc)

    def leave_soon(self) -> None:
        """End the block; nobody waits for it."""
        if self._body is not None:
            self._body.leave_soon()


class Once(Enterable[OnceRun]):
    __doc__ = said_of_threads(core.Once)

    def __init__(self, of: Recipe[CoreAcquirable], keep: float) -> None:
        super().__init__()
        self._of = of
        self._keep = keep

    def __repr__(self) -> str:
        return f"<Once {self.name!r} keep={self._keep:g} on {self._of.life!r}>"

    @property
    def name(self) -> str:
        """The name, as given. A lock of the same name is another thing."""
        return self._of.template.name

    def _take(self) -> tuple[OnceRun, OnceBlock]:
        of, body, lease, outcome = self._of, None, None, core.Outcome()
        try:
            try:
                body = of.acquire(of.timeout, block=True)
                lease = Lease(of.life, body)
            except AlreadyDone as done:
                outcome = core.Outcome(*core.decode_record(done.result))
            run = OnceRun(lease, outcome)  # type: ignore[arg-type]
            return run, OnceBlock(outcome, body, self._keep)
        except BaseException:  # a signal handler raised
            if body is not None:
                body.leave_soon()
            raise
