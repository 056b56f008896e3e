"""What is to be done once, for threads."""

from __future__ import annotations

from types import TracebackType

from .. import _once as core
from .._request import AlreadyDone
from ._blocks import Enterable
from ._lease import Lease
from ._lock import Acquirable
from ._twin import said_of_threads


class OnceRun(core.OnceRun):
    __doc__ = said_of_threads(core.OnceRun)

    __slots__ = ("_keep",)

    lease: Lease | None  # type: ignore[assignment]

    _keep: float

    def _enter_block(self) -> None:
        if self.lease is not None:
            self.lease._enter_block()

    def _begin(self) -> None:
        if self.lease is not None:
            self.lease._begin()

    def _exit(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        lease = self.lease
        if lease is None:
            return
        record = self._outcome.record_at(lease.name, exc_type, exc)
        if record is not None and isinstance(lease._acquired, core.OnceAcquisition):
            lease._acquired.record = (record, self._keep)
        lease.__exit__(exc_type, exc, traceback)

    def _leave_soon(self) -> None:
        if self.lease is not None:
            self.lease._leave_soon()


class Once(Enterable[OnceRun]):
    __doc__ = said_of_threads(core.Once)

    def __init__(self, lock: Acquirable, keep: float) -> None:
        super().__init__()
        self._lock = lock
        self._keep = keep

    def __repr__(self) -> str:
        return f"<Once {self.name!r} keep={self._keep:g} on {self._lock._client!r}>"

    @property
    def name(self) -> str:
        """The name, as given. A lock of the same name is another thing."""
        return self._lock.name

    def _take(self) -> OnceRun:
        lock = self._lock
        lease: Lease | None = None
        outcome = core.Outcome()
        try:
            try:
                lease = lock._take()
            except AlreadyDone as done:
                outcome = core.Outcome(*core.decode_record(done.result))
            run = OnceRun(lease, outcome)  # type: ignore[arg-type]
            run._keep = self._keep
        except BaseException:  # a signal handler raised
            if lease is not None:
                lease._leave_soon()
            raise
        return run
