"""What is to be done once, for threads."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from .. import _once as core
from .._request import AlreadyDone
from ._blocks import Entered
from ._lease import Lease, enter
from ._lock import Acquirable

if TYPE_CHECKING:
    from ._client import Client, Description


class OnceRun(core.OnceRun):
    """One entry of a ``Once``: whether it is the first, and the result; as ``aiodlock.OnceRun``."""

    __slots__ = ()

    lease: Lease | None  # type: ignore[assignment]


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
        try:
            lease = lock._acquire(lock._core._options.timeout, block=True)
        except AlreadyDone as done:
            run = OnceRun(None, core.decode_result(done.result))
        else:
            enter(lease, lock._entered)
            run = OnceRun(lease)  # type: ignore[arg-type]
        self._runs.add(run)
        return run

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        run = self._runs.pop(self, exc)
        lease = None if run is None else run.lease
        if run is None or lease is None:
            return
        if exc_type is None and isinstance(lease._core, core.OnceLease):
            lease._core.record = (core.encode_result(run.result), self._keep)
        self._lock._entered.discard(lease)
        lease.__exit__(exc_type, exc, traceback)
