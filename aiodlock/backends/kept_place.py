"""The place of a request whose lease is its own: what the core asks of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .._clock import now
from .._errors import BackendError
from .._model import End, Gone, Granted, Left, Refused, Terms, Waiting
from .base import Listener
from .keeper import Keeper
from .kept import Kept
from .stage import HELD, WAITING


class KeptPlace(Kept):
    """To its store it is the request; the keeper keeps it from the first answer on."""

    __slots__ = ("keeper",)

    capped: bool
    deadline: float
    end: End
    floor: int
    granted_at: float
    keeper: Keeper
    leaves: int
    terms: Terms

    def __init__(
        self, keeper: Keeper, terms: Terms, request_id: str, owner: str, listener: Listener
    ) -> None:
        # By super() it takes longer, for each acquire.
        Kept.__init__(self, terms, request_id, owner, listener)
        self.keeper = keeper

    async def acquire(self, *, wait: bool) -> Granted | Waiting | Refused | Gone:
        """Ask the store, and keep what it gives from then on."""
        keeper = self.keeper
        # Before the message: a notice of the grant may overtake the reply.
        keeper.places[self.id] = self
        answer = await keeper.store.acquire(self, wait=wait)
        if isinstance(answer, Granted):
            if answer.token <= self.broken:
                return Gone("broken")
            maximum = self.terms.max_hold
            self.capped = maximum is not None and self.terms.ttl >= maximum
            self.hold(answer.token, answer.deadline)
            keeper.add(self)
            if answer.recalled:
                self.recalled = True
            elif self.recalled:  # the message has overtaken the answer
                answer = replace(answer, recalled=True)
        elif isinstance(answer, Waiting):
            self.stage = WAITING
            self.deadline, self.floor = answer.deadline, answer.floor
            keeper.add(self)
            if answer.look_at is not None:
                keeper.look_at(self, answer.look_at)
            if self.noticed is not None:
                keeper.on_granted(self.id, self.noticed, "")
                if self.stage is HELD:
                    return Granted(self.token, self.deadline, self.recalled)
            self.answered = True
        elif isinstance(answer, Refused):
            if self.ambiguous:  # an earlier attempt may still arrive, and be granted
                return replace(answer, unsure=True)
            self.abandon()
        return answer

    async def extend(self, ttl: float | None) -> None:
        """Ask once for an extension by hand."""
        if ttl is not None:
            self.lease_ttl = ttl
        length = self.length
        (answer,) = self.keeper.store.extend([(self, length)])
        self.keeper.on_answer(self, await answer, length, as_holder=True)

    def reuse(self, terms: Terms) -> None:
        """A new body has the lease that lingered."""
        before, self.terms = self.terms, terms
        if (terms.margin, terms.max_hold) != (before.margin, before.max_hold) or self.capped:
            self.granted_at, self.capped = now(), False
            self.keeper.extend_now(self)
        elif terms.max_hold is not None:
            self.granted_at = now()

    async def begin(self) -> None:
        """Tell the store that the body begins; it hears that by the next extension."""
        self.begins = True
        await self.extend(None)

    async def leave(self, end: End, *, within: float | None = None) -> Left:
        """Leave once; the answer to a repetition tells what the first has done."""
        keeper = self.keeper
        keeper.forget(self)
        self.end = end
        if end.lost:
            keeper.lose(self)
        self.leaves += 1
        left = await keeper.store.leave(self, lost=end.lost, within=within)
        return self._on_left(left)

    def leave_soon(self, end: End, done: Callable[[Left | BackendError], object]) -> bool:
        """Send a leave that nobody waits for."""
        self.keeper.forget(self)
        self.end = end
        if end.lost:
            self.keeper.lose(self)

        def on_answer(answer: Left | BackendError) -> None:
            done(self._on_left(answer) if isinstance(answer, Left) else answer)

        sent = self.keeper.store.leave_later(self, on_answer, lost=end.lost)
        self.leaves += sent
        return sent

    def _on_left(self, left: Left) -> Left:
        if left.reason == "expired":
            self.keeper.lose(self)  # the store has ended the lease before this client
        self.keeper.drop(self)
        if self.leaves > 1 and left == Left("gone", "gone"):
            # The store keeps the record of an expired lease for its lock-delay, and would say so.
            return Left("released")
        return left

    def run_out(self) -> None:
        """Extend it no more."""
        self.keeper.forget(self)

    def abandon(self) -> None:
        """Forget it."""
        self.keeper.drop(self)
