"""What a store is to the core: a queue with ordered places, leases in it, and some questions. The seam.

The core makes one ``Place`` per request and asks it. It pulls the deadline from the place, cancels bodies,
and repeats what had no answer. It looks at nothing of a place but what stands here.

The store keeps what was queued and granted alive by itself, from then on until ``leave``: with a ``Keeper``
where each request has a lease of its own (``keeper``, ``kept``), else with its session or shared lease. The
store alone knows of notices that overtake replies, notices for unknown requests, hints, stale notices, and
of what has to be asked again after a reconnection.

A store translates its driver's errors: what may or may not have happened is ``Unanswered``, what certainly
did not happen is ``BackendUnavailable``, what the store refuses for good is ``BackendError``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from .._errors import BackendError, BackendUnavailable, LossReason
from .._model import (
    Capabilities,
    End,
    Gone,
    Granted,
    Kind,
    Left,
    LockInfo,
    Mode,
    Refused,
    Terms,
    Tokens,
    Waiting,
)


class Unanswered(BackendUnavailable):
    """The message was sent and no reply came: it may have been carried out, now or later."""


class Listener(Protocol):
    """The core's side of one request. Called in the event loop; returns at once; never raises.

    The store calls nothing here before ``acquire`` has returned ``Waiting`` or ``Granted``: what it hears
    earlier goes into what ``acquire`` returns. It calls nothing after ``leave`` was called.
    """

    def granted(self) -> None:
        """The waiter became the holder; the place has its ``token`` and ``deadline``.

        More than the margin is left. If nothing is left when the store hears of its grant, it extends
        first, and calls this when that is answered; if that is too late again, it calls
        ``gone("expired")``.
        """

    def gone(self, reason: LossReason) -> None:
        """The store knows the request no more. A waiter begins again with a new place; a holder is lost."""

    def recorded(self, result: bytes, *, unsure: bool) -> None:
        """A waiter waits no more, because a success with this result is on record.

        :param unsure: an earlier attempt of its acquire may still be carried out: it has to be left.
        """

    def recalled(self) -> None:
        """Others want what this holder has, and it was to linger: no new body begins, and the lease is left
        when the present one has ended. May be told twice, and of a waiter whose grant is on its way."""

    def extension_failed(self, error: Exception) -> None:
        """Keeping the request alive had no answer, or was refused; the store tries again."""

    def unavailable(self, error: BackendUnavailable) -> None:
        """Nothing has answered about a waiter for the client's ``unavailable_after``: it gives up."""


class Place(Protocol):
    """One request's place: in the store's queue, then among the holders. Its insides are the store's."""

    @property
    def deadline(self) -> float:
        """Until when the store certainly honours the request, on our clock; 0.0 before the first answer.

        It never comes nearer.
        """

    @property
    def token(self) -> int:
        """The fencing token; 0 until the store has granted the request."""

    @property
    def capped(self) -> bool:
        """Whether the deadline is that near because of ``max_hold``.

        False where deadlines do not depend on it: the core knows ``max_hold`` too.
        """

    @property
    def silent(self) -> bool:
        """Whether the last message about the request had no answer: a timeout is the store's fault then."""

    @property
    def surely_over_at(self) -> float:
        """Return the moment from which on the store has ended the request, though no leave was answered.

        ``math.inf``: never by itself; leaving is repeated then until it is answered.
        """

    async def acquire(self, *, wait: bool) -> Granted | Waiting | Refused | Gone:
        """Grant, queue or (``wait=False``) refuse the request. Repeating it is harmless.

        ``Gone``: what an earlier message did is over already. The core leaves, and begins again.
        """

    async def begin(self) -> None:
        """A body begins now that was not to begin with the grant (``Terms.begins``). One attempt to tell
        the store, which keeps the name closed for ``hold_at_least`` from then on; errors as ``extend``."""

    def reuse(self, terms: Terms) -> None:
        """A new body has the lease, which lingered. Its terms may differ in margin, max_hold and linger;
        ``max_hold`` counts from now on. Called where the capabilities say ``linger``."""

    async def extend(self, ttl: float | None) -> None:
        """Extend the lease now; with ``ttl``, by that, and from now on. One attempt: the core repeats it.

        A lease that is gone is told to the listener.
        """

    async def leave(self, end: End, *, within: float | None = None) -> Left:
        """Release or withdraw, and hand off. Final: a late duplicate of an acquire is refused from then on.

        Unanswered after ``within`` seconds. A repeated leave answers "released" if the first may have done
        it.
        """

    def leave_soon(self, end: End, done: Callable[[Left | BackendError], object]) -> bool:
        """Send a leave that nobody waits for, at the latest at the end of this turn of the loop.

        False: nothing can be sent now, and ``done`` is not called. Else ``done`` hears how it went,
        later, and never from within this call.
        """

    def run_out(self) -> None:
        """The lease counts as lost here: extend it no more. It is left when its body has ended."""

    def abandon(self) -> None:
        """Forget what is kept of the request on this side: nobody will ask again."""


@runtime_checkable
class Follower(Protocol):
    """A backend that knows its store again."""

    def follow(self, dead: Any) -> None:
        """Before it runs: know the store that the backend of the client's dead session knew."""


class StoreBase(Protocol):
    """What every store answers, as a ``Backend`` and as a ``KeptStore``. Every call may be cancelled at any
    await."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def label(self) -> str:
        """What this client is called in ``inspect``, unlike any other's. Request ids begin with it."""

    @property
    def failure(self) -> Exception | None:
        """Why there is no connection, if there is none."""

    @property
    def further_at(self) -> float:
        """When entering has last come further by an answer of the store, on our clock; 0.0 if it has not.

        It may lie ahead, while an answer is awaited that may take long. Entering is given up 5 s after
        that, and after 30 s in all.
        """

    @property
    def answers_within(self) -> float:
        """How long an answer takes lately, and a little more (seconds); 1.0 at least."""

    async def settle(self) -> None:
        """Before the end: wait for answers that no call waits for, as long as one takes and no longer."""

    def announce(self, kind: str, name: str) -> None:
        """Tell whoever observes the name that its holder has changed. May be lost: a hint, no more."""

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        """Have ``changed`` called when the name's holder may have changed; return what ends that."""

    async def inspect(self, kind: Kind, name: str) -> LockInfo:
        """Return who holds and who waits."""

    async def inspect_all(
        self, kind: Kind, names: Sequence[str], *, queues: bool = True
    ) -> list[LockInfo]:
        """Return the same for several names, asked together.

        :param queues: if not, waiters may be left out.
        """

    async def tell_waits(self, serial: int, record: bytes, *, keep: float) -> None:
        """Let every client read this record of what this client waits for, for ``keep`` seconds at least,
        or until this client's leases or session end.

        It replaces records with smaller serials, and is never replaced by one of them. The same serial
        again keeps it longer. An empty record takes it back.
        """

    async def waits_of(self, labels: Sequence[str]) -> dict[str, bytes]:
        """Return the record of each of these clients that has one: as new as any that was acknowledged
        before this call."""

    def names(self, match: str, kind: Kind = "lock") -> AsyncIterator[str]:
        """Iterate over every name of the kind that is held or waited for and matches the glob."""

    async def break_lock(self, name: str, kind: Kind = "lock", tokens: Tokens | None = None) -> int:
        """Release all holders of a name by force, or those with these tokens; return their number.

        With tokens, what keeps the name closed goes on doing so.
        """

    async def forget(self, name: str) -> bool:
        """Take the record of a success back (kind ``once``); return whether there was one. Asked only if
        the capabilities say ``once``."""


class Backend(StoreBase, Protocol):
    """One place where locks live."""

    async def run(self, ready: Callable[[], None]) -> None:
        """Keep connections and leases up until cancelled; call ``ready`` when the first calls can be made
        and notices arrive."""

    def place(self, terms: Terms, request_id: str, owner: str, listener: Listener) -> Place:
        """Make the place of a request that is about to be asked. No I/O.

        :param owner: identity for reentrancy, unambiguous: ``t…`` for a task's, ``u…`` for a user's.
        """

    async def holds(self, kind: Kind, name: str, mode: Mode, token: int) -> bool:
        """Return whether the grant that has this token holds still."""
