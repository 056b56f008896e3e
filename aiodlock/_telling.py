"""What a session tells: each event in the life of a request, to the log and to whoever listens."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from logging import DEBUG, INFO, WARNING

from ._clock import now
from ._cycles import Cycle
from ._errors import LossReason
from ._hooks import Hooks
from ._log import Log
from ._model import RequestInfo
from ._request import AlreadyDone, Request

_logger = logging.getLogger("aiodlock")


class Telling:
    """The hooks of one client, and the words for the log.

    What hooks were told of a lease stands in ``Request.told`` until they are told its end, once.
    """

    __slots__ = ("_new_id", "hooks", "log")

    def __init__(
        self, hooks: list[Hooks], loop: asyncio.AbstractEventLoop, new_id: Callable[[], str]
    ) -> None:
        self.hooks: list[Hooks] = hooks
        self._new_id = new_id
        #: What happens to many names at once.
        self.log: Log = Log(loop)

    # -- the life of a request ---------------------------------------------------------------------

    def acquiring(self, request: Request) -> RequestInfo:
        """A request begins; return what hooks are told of it. Called if there are any."""
        about = _about(request)
        self._tell("acquiring", about)
        return about

    def not_acquired(self, about: RequestInfo, started: float, error: BaseException) -> None:
        """A request was given up, or needs no lease: a success is on record."""
        if isinstance(error, AlreadyDone):
            self._tell("done", about, now() - started)
        else:
            self._tell("not_acquired", about, now() - started, error)

    def acquired(self, request: Request, about: RequestInfo, started: float) -> None:
        """A request was granted."""
        request.told = replace(about, token=request.token)
        self._tell("acquired", request.told, now() - started)

    def handed_out(self, request: Request) -> None:
        """A lease that lingered has a new body: to hooks it is another request, granted at once."""
        if self.hooks:
            about = replace(_about(request), id=self._new_id(), token=0)
            self._tell("acquiring", about)
            request.told = replace(about, token=request.token)
            self._tell("acquired", request.told, 0.0)

    def released(self, request: Request) -> None:
        """A lease was released."""
        if request.told is not None:
            told, request.told = request.told, None
            self._tell("released", told, now() - request.granted_at)

    def lost(self, request: Request) -> None:
        """A lease was marked as lost."""
        lost = request.lost
        assert lost is not None
        self.log.tell(WARNING, "lost", request.name, "%s", lost, reason=lost.reason)
        self.ended(request, lost.reason)

    def ended(self, request: Request, reason: LossReason) -> None:
        """A lease ended while it was being released: its holder gets the error, hooks the event."""
        if request.told is not None:
            told, request.told = request.told, None
            self._tell("lost", told, now() - request.granted_at, reason)

    @staticmethod
    def blocked(late: float, ttl: float) -> None:
        """The event loop did nothing for a large part of a lease: blocked, or the whole process stopped."""
        _logger.warning(
            "this process was paused, or its event loop was blocked, for at least %.2f s, and the shortest "
            "ttl held is %.2f s: nothing is extended meanwhile, and leases get lost; if code of yours "
            "blocks the loop, run it in a thread",
            late,
            ttl,
            extra={"event": "loop_blocked"},
        )

    def waits_inside(self, request: Request, names: Sequence[str]) -> None:
        """A request has waited for long while its task holds other names."""
        self.log.tell(
            WARNING,
            "waits_inside",
            request.name,
            "%r has been waited for longer than %.1f s by a task that holds %s meanwhile: if others take "
            "them in another order, all wait for ever; take them in one order, use multilock, or a timeout",
            request.name,
            3 * request.ttl,
            ", ".join(map(repr, names)),
            held=list(names),
        )

    def waits_for_parent(self, request: Request) -> None:
        """A request waits for what the task that has created its task has open."""
        self.log.tell(
            WARNING,
            "waits_for_parent",
            request.name,
            "%r is waited for by a task whose creator is inside a block on it: if the creator waits for "
            "this task, both wait for ever; a child task is another owner%s",
            request.name,
            " (owner= makes one of both)" if request.terms.kind == "lock" else "",
        )

    def deadlock(self, request: Request, cycle: Cycle) -> None:
        """A request is in a cycle of waits, and the youngest in it."""
        text = "deadlock: %s; the wait for %r ends with DeadlockError"
        self.log.tell(WARNING, "deadlock", request.name, text, cycle.words(), request.name)

    def forgotten(self, request: Request, text: str) -> None:
        """A task has ended and has not released what it held."""
        self.log.tell(WARNING, "forgotten", request.name, "%s", text)

    def late_grant(self, name: str, text: str) -> None:
        """A grant came when its lease was over."""
        self.log.tell(WARNING, "late_grant", name, "%s", text)

    def goes_on(self, request: Request) -> None:
        """A body has not ended within ``close_timeout``."""
        text = "the body that held %r goes on, close_timeout after its client was left"
        self.log.tell(WARNING, "body_goes_on", request.name, text, request.name)

    # -- what failed -------------------------------------------------------------------------------

    def extension_failed(self, request: Request, error: Exception) -> None:
        """An extension had no answer, or was refused."""
        name = request.name
        self.log.tell(DEBUG, "extension_failed", name, "extending %r failed: %r", name, error)
        if self.hooks:
            self._tell("extension_failed", _about(request), error)

    def leave_delayed(self, request: Request, error: Exception) -> None:
        """A leave was not answered in time, and goes on."""
        text = "leaving %r goes on in the background: %r"
        self.log.tell(INFO, "leave_delayed", request.name, text, request.name, error)

    def release_failed(self, request: Request, error: Exception) -> None:
        """A leave that nobody awaits was given up."""
        if request.lost is None:  # else its end was told
            text = "releasing %r had no answer until its lease ended, which has freed it: %r"
            self.log.tell(WARNING, "release_failed", request.name, text, request.name, error)
        if self.hooks:
            self._tell("release_failed", _about(request), error)

    def _tell(self, event: str, *about: object) -> None:
        for hook in self.hooks:
            try:
                getattr(hook, event)(*about)
            except (Exception, asyncio.CancelledError):
                # A hook awaits nothing: this is none of its task's cancellations, but a future's, say.
                _logger.exception("a hook raised", extra={"event": "hook_failed"})
            except BaseException:
                if threading.current_thread() is threading.main_thread():
                    raise  # sys.exit() ends the program; in the thread of aiodlock.sync, nothing
                _logger.exception("a hook raised", extra={"event": "hook_failed"})


def _about(request: Request) -> RequestInfo:
    terms = request.terms
    return request.told or RequestInfo(
        id=request.id,
        kind=terms.kind,
        name=terms.name,
        mode=terms.mode,
        owner=request.options.owner or request.owner[1:],
        token=request.token,
    )
