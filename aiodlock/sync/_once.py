"""What is to be done once, for threads."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from .. import _once as core
from .._request import AlreadyDone
from ._blocks import Block, Entered
from ._lease import Lease
from ._lock import Acquirable

if TYPE_CHECKING:
    from ._client import Client, Description


class OnceRun(core.OnceRun):
    """One entry of a ``Once``: whether it is the first, and the result; as ``aiodlock.OnceRun``.

    ```python
    with locks.once("invoice:7", keep=86400) as once:
        if once.first:
            once.result = "sent"
    print(once.result)
    ```
    """

    __slots__ = ()

    lease: Lease | None  # type: ignore[assignment]

    def _leave_soon(self) -> None:
        if self.lease is not None:
            self.lease._leave_soon()


class Once:
    """Something to be done once; made by ``Client.once``. May be used by many threads at once.

    ```python
    with locks.once("order:42", keep=86400) as once:
        if once.first:
            once.result = "charged"
    print(once.result)
    ```
    """

    def __init__(self, client: Client, description: Description, keep: float) -> None:
        self._lock = Acquirable(client, description)
        self._keep = keep
        #: The open blocks of all threads, also those that are not the first.
        self._runs: Entered[OnceRun] = Entered()

    def __repr__(self) -> str:
        return f"<Once {self.name!r} keep={self._keep:g} on {self._lock._client!r}>"

    @property
    def name(self) -> str:
        """The name, as given. A lock of the same name is another thing."""
        return self._lock.name

    def __enter__(self) -> OnceRun:
        lock = self._lock
        lease: Lease | None = None
        record: tuple[str | bytes | None, str | None] = (None, None)
        try:
            lease = lock._acquire(lock._core._options.timeout, block=True)
        except AlreadyDone as done:
            record = core.decode_record(done.result)
        run: OnceRun | None = None
        try:
            run = OnceRun(lease, *record)  # type: ignore[arg-type]
            if lease is not None:
                lease._enter_block()
            self._runs.add(run, sys._getframe(1))
            if lease is not None:
                lease._begin()
        except BaseException as error:  # a signal handler raised
            if run is not None:
                self._runs.discard(run)
            if lease is not None:
                lease.__exit__(type(error), error, None)
            raise
        return run

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        block: Block[OnceRun] | None = None
        try:
            block = self._runs.find(self, exc, sys._getframe(1))
            if block is None:
                return
            self._runs.remove(block)
            run = block[1]
            lease = run.lease
            if lease is None:
                return
            record = run._record_at(exc_type, exc)
            if record is not None and isinstance(lease._core, core.OnceLease):
                lease._core.record = (record, self._keep)
            lease.__exit__(exc_type, exc, traceback)
        except BaseException:  # a signal handler raised, or there was a loss
            self._runs.leave_soon(block, sys._getframe(1))
            raise
