"""What a backend is: ordered places in a queue, leases, and a way to watch. Nothing more.

The waiting loop, the leases and the extender know only this. A backend translates the driver's
errors: what may or may not have happened is ``Unanswered``, what certainly did not happen is
``BackendUnavailable``, what the store refused is ``BackendError``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from .._errors import BackendError, BackendUnavailable
from .._model import Capabilities, Gone, Granted, Left, LockInfo, Refused, Request, Waiting


class Unanswered(BackendUnavailable):
    """The message was sent and no reply came: it may have been carried out, now or later."""


class Listener(Protocol):
    """Whom a backend tells what it hears. Called in the event loop, returns at once, never raises."""

    def on_granted(self, request_id: str, token: int, where: str) -> None:
        """A notice: the waiter became the holder. ``where`` is for ``Backend.leave_unknown``."""

    def on_held(self, request_id: str, token: int, deadline: float) -> None:
        """The waiter became the holder, with what was left of its lease as a waiter."""

    def on_look(self, request_id: str | None) -> None:
        """A hint: ask about this waiter; with None, about all (notices may have been missed)."""

    def on_other_server(self) -> None:
        """Another server answers from now on, which may know less: ask about all, holders too."""

    def on_back(self) -> None:
        """The connection is back, perhaps to a store that was restarted empty: as with another server, but
        there is a little time to ask about holders."""

    def on_broken(self, request_id: str, token: int) -> None:
        """An operator broke the lease that has this token."""


class Backend(Protocol):
    """One place where locks live. Every call may be cancelled at any await."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def label(self) -> str:
        """What this client is called in ``inspect``."""

    @property
    def failure(self) -> Exception | None:
        """Why there is no connection, if there is none."""

    async def run(self, listener: Listener, ready: Callable[[], None]) -> None:
        """Keep the connections up until cancelled; call ``ready`` when the first calls can be made
        and notices arrive."""

    async def acquire(self, request: Request, *, wait: bool) -> Granted | Waiting | Refused | Gone:
        """Grant, queue or (``wait=False``) refuse the request. Repeating it is harmless."""

    def extend(
        self, batch: Sequence[tuple[Request, float]]
    ) -> Sequence[Awaitable[Granted | Waiting | Gone]]:
        """Push the deadline of each request to at least now + the length beside it; never nearer.

        All are sent before this returns; each awaitable gives one outcome or raises. For the head of
        a queue this is also the look: whoever can be granted is granted.
        """

    def server_of(self, request: Request) -> object:
        """Return something equal for requests whose messages go to the same server for now."""

    async def leave(
        self, request: Request, *, lost: bool = False, within: float | None = None
    ) -> Left:
        """Release or withdraw, and hand off. When an acquire of this request went unanswered, a late
        duplicate of it is refused from then on. Unanswered after ``within`` seconds.

        ``lost``: the lease ran out for its holder (whose local deadline is earlier than the store's),
        so a lock-delay is not opened by this.
        """

    def leave_later(
        self, request: Request, done: Callable[[Left | BackendError], object], *, lost: bool = False
    ) -> bool:
        """Send a leave that nobody waits for, at the latest at the end of this turn of the loop.

        False: nothing can be sent now, and ``done`` is not called. Else ``done`` hears how it went,
        later, and never from within this call.
        """

    async def leave_unknown(self, request_id: str, where: str) -> None:
        """Give back a grant that was announced for a request this client does not have."""

    async def settle(self) -> None:
        """Before the end: wait a moment, a second at most, for answers that no call waits for."""

    def watch(self, request: Request, watching: bool) -> None:
        """Start or stop to listen for the end of what blocks this head, where the store can tell."""

    def announce(self, kind: str, name: str) -> None:
        """Tell whoever observes the name that its holder has changed. May be lost: a hint, no more."""

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        """Have ``changed`` called when the name's holder may have changed; return what ends that."""

    async def inspect(self, kind: str, name: str) -> LockInfo:
        """Return who holds and who waits."""

    async def inspect_all(self, kind: str, names: Sequence[str]) -> list[LockInfo]:
        """Return the same for several names, asked together."""

    def names(self, match: str) -> AsyncIterator[str]:
        """Iterate over every lock name held or waited for that matches the glob."""

    async def break_lock(self, name: str) -> int:
        """Release all holders of a name by force; return their number."""
