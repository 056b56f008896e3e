"""The requests of one session: which there are, what each task holds, and what their ends entail here.

A request knows its own state; what stands beside it (lists, deadlines, what is told) is kept in step here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ._clock import now
from ._deadlines import Deadlines
from ._errors import BackendError, LockLost, LossReason
from ._model import Kind
from ._request import HELD, KEPT, OVER, Request
from ._telling import Telling

#: What each task holds of a name, in order of acquisition: by the task's id.
Holds: TypeAlias = dict[tuple[Kind, str, int], list[Request]]


class Register:
    """Mutable state: ``requests`` (by id, from before the first message until the leave is confirmed),
    ``is_dead`` (the session has died: what a task has lost stays on its list until it is told),
    ``holds_of`` (each task, of a name), ``_removed`` (set when the next one has gone, if anybody waits).

    :param acquisition_ended: called when an acquisition of a request has ended, or its wait.
    :param holds: of the session before this one: a task is told what it has lost there.
    """

    def __init__(
        self,
        telling: Telling,
        deadlines: Deadlines,
        acquisition_ended: Callable[[Request], object],
        holds: Holds | None = None,
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.is_dead: bool = False
        self.holds_of: Holds = {} if holds is None else holds
        self._telling = telling
        self._deadlines = deadlines
        self._acquisition_ended = acquisition_ended
        self._removed: asyncio.Event | None = None

    # -- what tasks hold -----------------------------------------------------------------------------

    def holds(self, kind: Kind, name: str, task: asyncio.Task[Any] | None) -> Sequence[Request]:
        """Return what a task holds of a name, in order of acquisition."""
        found = self.holds_of.get((kind, name, id(task)))
        if not found:
            return ()
        return [
            request
            for request in found
            # A task of the same id that is gone is somebody else. What is kept has no body: it stays on the
            # list because its task's next body mostly gets it.
            if request.task is not None and request.task() is task and request.state is not KEPT
        ]

    def add_hold(self, request: Request) -> None:
        """A task has got what it asked for."""
        terms = request.terms
        self.holds_of.setdefault((terms.kind, terms.name, request.task_id), []).append(request)

    def drop_hold(self, request: Request) -> None:
        """A task holds it no more."""
        key = (request.terms.kind, request.terms.name, request.task_id)
        found = self.holds_of.get(key)
        if found is not None and request in found:
            found.remove(request)
            if not found:
                del self.holds_of[key]

    def give_to(self, request: Request, task: asyncio.Task[Any] | None) -> None:
        """A kept lease gets its next body: it is this task's, and the latest that it holds."""
        self.drop_hold(request)
        request.belongs_to(task)
        self.add_hold(request)

    def begin_leaving(self, request: Request) -> None:
        """The request neither waits nor holds any more; its leave is about to be sent."""
        self._deadlines.remove(request)
        if not self.is_dead or not request.handles:  # else its task is told of the loss, later
            self.drop_hold(request)
            if request.on_task_end is not None:
                request.forget_task_end()
        request.leave()
        self._acquisition_ended(request)

    def remove(self, request: Request) -> None:
        """The store knows nothing of it any more, or nobody asks."""
        if request.state is OVER:
            return  # its leave was on its way twice, see ``Departure.again``
        request.end()
        self.requests.pop(request.id, None)
        if self._removed is not None:
            self.end_wait()

    def remove_unawaited(self, request: Request) -> None:
        """The same, after a leave that no caller waits for."""
        self.remove(request)
        self._telling.released(request)

    async def removal(self) -> None:
        """Wait until the next one has gone, or ``end_wait`` is called."""
        if self._removed is None:
            self._removed = asyncio.Event()
        await self._removed.wait()

    def end_wait(self) -> None:
        """Let those go on who wait for a removal."""
        removed, self._removed = self._removed, None
        if removed is not None:
            removed.set()

    # -- losses --------------------------------------------------------------------------------------

    def lose(
        self,
        request: Request,
        reason: LossReason,
        *,
        failure: BackendError | None = None,
        spare: asyncio.Task[Any] | None = None,
    ) -> None:
        """A lease is lost: cancel its bodies, stop extending, tell."""
        if request.state is HELD:
            request.lose(reason, failure, spare=spare)
            self._deadlines.remove(request)
            request.place.run_out()
            self._telling.lost(request)

    def end_of_hold(self, request: Request, reason: LossReason) -> None:
        """The store knows a holder no more; perhaps its time was over before."""
        self.lose_if_overdue(request)
        self.lose(request, reason)

    def lose_if_overdue(self, request: Request, *, spare: asyncio.Task[Any] | None = None) -> None:
        """The clock decides when no message came."""
        if request.state is HELD:
            moment = now()
            if moment >= request.ends_at:
                self.lose(request, request.overdue_reason(moment), spare=spare)

    def loss_of(self, request: Request, serial: int) -> LockLost | None:
        """Return why that acquisition was lost, and let it stay lost: who acts on it must be right, though
        an extension may be answered in that moment."""
        self.lose_if_overdue(request)
        return request.lost if request.has_lost(serial) else None

    def is_live(self, request: Request) -> bool:
        """Whether the request holds at this moment. What is overdue is marked as lost."""
        self.lose_if_overdue(request)
        return request.state is HELD

    def lost_on_leaving(self, request: Request, reason: LossReason, serial: int) -> LockLost:
        """The store's answer to the leave of this acquisition was that the lease had ended."""
        request.lose_on_leaving(reason, serial)
        self._telling.lost(request)
        lost = request.lost
        assert lost is not None
        return lost
