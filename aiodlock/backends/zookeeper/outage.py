"""While a session has no connection: why that is, and who is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..._clock import now
from ..._errors import BackendUnavailable
from .members import Members

#: The members are told so often (seconds).
_TELL_EVERY = 1.0


class Outage:
    """The present one of a session, if there is one.

    Mutable state: ``failure`` (why there is no connection; None while there is one), ``told`` (called with
    that by the session when each server was tried, and with None when there is a connection), ``_since``,
    ``_telling`` (what tells the members again).
    """

    def __init__(self, described: str, members: Members) -> None:
        self.failure: Exception | None = None
        self.told: Callable[[Exception | None], object] = lambda _: None
        self._described = described
        self._members = members
        self._since = 0.0
        self._telling: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """There is no connection from now on."""
        self._since = now()

    def note(self, failed: Exception) -> None:
        """An attempt to get a connection has failed."""
        self.failure = _worded(failed)

    def error(self) -> BackendUnavailable:
        """Return the error of what cannot be sent."""
        why = f": {self.failure}" if self.failure else ""
        return BackendUnavailable(f"no connection to {self._described}{why}")

    def tell(self) -> None:
        """Tell the members now, and again until there is a connection: to dial may take long."""
        self._tell_no_more()
        if self._members:
            error = self.error()
            error.__cause__ = self.failure
            self._members.on_down(error, now() - self._since)
        self._telling = asyncio.get_running_loop().call_later(_TELL_EVERY, self.tell)

    def _tell_no_more(self) -> None:
        if self._telling is not None:
            self._telling.cancel()

    def end(self) -> None:
        """There is a connection."""
        self.failure = None
        self._tell_no_more()
        self.told(None)

    def stop(self) -> None:
        """The session is closed: there will be none."""
        self._tell_no_more()
        self.failure = BackendUnavailable("the client was closed")


def _worded(failed: Exception) -> Exception:
    """Return the reason of a failed attempt in words."""
    if str(failed):
        return failed
    if isinstance(failed, TimeoutError):
        return TimeoutError("no answer in time")
    return ConnectionError("the server closed the connection")
