"""Locks in PostgreSQL: what is sent to the functions of ``schema.sql``.

Two connections: one for the messages of all tasks, which go out together in one call of ``turn``, and one
that listens for notifications.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from urllib.parse import quote

from ..._clock import now
from ..._errors import BackendError
from ..._model import (
    Capabilities,
    Gone,
    Granted,
    Left,
    Refused,
    StoreRequest,
    Waiting,
)
from .._identity import Known
from .._label import make_label
from ..asked import Asked
from ..base import Unanswered
from ..kept import Notices
from .calls import Calls
from .dialing import Dialer, Prepared
from .history import History
from .inspection import Inspection
from .link import Link
from .meeting import Meeting
from .messages import Message, OtherHistory
from .notifications import Notifications, channel
from .replies import LONG_RECORD, Extended, left_of, outcome_of
from .scouts import Scouts
from .sweeping import Sweeping
from .waits import Waits

#: For how long a marker refuses late duplicates, at the least (seconds).
_REMEMBERED = 60.0
_RECORDED = "select aiodlock.recorded($1) as result"


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


class PostgresBackend(Asked):
    """A ``KeptStore``: one database. Its functions decide; this sends messages and reads the answers.

    Its state is in its connections, in ``Notifications``, and in ``_known`` (the database that it talks
    to); ``_reading`` are the keys whose results are being read.
    """

    capabilities: Capabilities = Capabilities(
        hold_at_least=True, resize=True, once=True, linger=True
    )

    def __init__(
        self,
        source: str,
        described: str,
        *,
        listen_source: str | None,
        create: bool,
        prefix: str,
        token_retention: float,
        unavailable_after: float,
        description: str = "",
    ) -> None:
        self.label: str = make_label()
        #: Shown to people beside the label.
        self.description: str = description
        self._described = described
        self._create = create
        self._marker_ttl = _ms(max(unavailable_after, _REMEMBERED))
        self._known: Known[History] = Known(
            described, silence=unavailable_after, may_hold=self._may_hold
        )
        self._reading: dict[str, asyncio.Future[str]] = {}
        # A user who names another source to listen on has a pooler in front of the first one.
        dialer = Dialer(
            source,
            pooled=listen_source is not None,
            sessions=False,
            known=self._known,
            prepare=Meeting(
                described, create, self._known, lambda *said: self._calls.on_log(*said)
            ).meet,
        )
        link = Link(described, dialer, self._on_connected)
        self._scouts = Scouts(source, link, self._known, self._on_newer)
        self._calls = Calls(
            link,
            self._known,
            prefix=prefix,
            label=self.label,
            retention=_ms(token_retention),
            on_heard=lambda said: self._notifications.hear(said),
        )
        self._messages = self._calls.messages
        self._notifications = Notifications(
            self._calls,
            listen_source or source,
            described + (" (listening)" if listen_source else ""),
            self._known,
            sessions=listen_source is not None,
        )
        self._listening = self._notifications.listening
        super().__init__(Inspection(self._calls), Waits(self._calls))

    def __repr__(self) -> str:
        return f"<PostgresBackend {self._described}>"

    # -- life ------------------------------------------------------------------------------------

    async def run(self, listener: Notices, ready: Callable[[], None]) -> None:
        self._notifications.begin(listener)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._messages.link.run())
            tasks.create_task(self._messages.run())
            tasks.create_task(self._listening.link.run())
            tasks.create_task(self._listening.run())
            await self._messages.link.first_up()
            await self._notifications.known.wait()
            ready()
            tasks.create_task(self._scouts.run())
            tasks.create_task(self._notifications.poll())
            await Sweeping(self._calls).run()

    def follow(self, dead: PostgresBackend) -> None:
        """Know the database that the backend of the client's dead session knew."""
        self._known.follow(dead._known)

    def _may_hold(self) -> bool:
        listener = self._notifications.listener
        return listener is not None and listener.may_hold()

    def _on_newer(self) -> None:
        """Leave a server as soon as a newer history is known than the one there."""
        known = self._known.value
        for link in (self._messages.link, self._listening.link):
            if link.history is not None and known is not None and link.connection is not None:
                conflict = link.history.conflict(known)
                if conflict and link.history.id != known.id:
                    link.give_up(OtherHistory(f"{link.where} is left: {conflict}"))

    def _on_connected(self, prepared: Prepared, again: bool) -> None:
        if not self._messages.patience.knows:
            # The first questions only read: they say nothing of how long a commit takes.
            self._messages.patience.answered(prepared.took)
        if not again:
            return
        self._listening.examine()  # this may be another server
        if self._notifications.listener is not None:
            self._notifications.listener.on_back()

    @property
    def failure(self) -> Exception | None:
        """Why there is no connection, if there is none."""
        for link in (self._messages.link, self._listening.link):
            if link.connection is None and link.failure is not None:
                return link.failure
        return None

    @property
    def further_at(self) -> float:
        """When entering has last come further; see ``StoreBase``."""
        return max(link.dialer.further.at for link in (self._messages.link, self._listening.link))

    @property
    def answers_within(self) -> float:
        """How long the next answer may take (seconds)."""
        return self._messages.patience.typical

    # -- requests --------------------------------------------------------------------------------

    async def acquire(
        self, request: StoreRequest, *, wait: bool
    ) -> Granted | Waiting | Refused | Gone:
        await self._calls.up(hurry=not wait)
        request.sent_on = self._messages.link.connection
        sent = now()
        try:
            answer = await self._messages.submit(self._acquiring(request, wait))
        except Unanswered:
            request.ambiguous = True
            raise
        if answer == LONG_RECORD:
            answer = await self._recorded(self._calls.key(request.kind, request.name))
        request.sent_on = None
        return outcome_of(answer, sent)

    async def _recorded(self, key: str) -> str:
        """Read a long result: once for all that ask at the same time, and without the name's lock."""
        reading = self._reading.get(key)
        if reading is None:
            reading = self._reading[key] = self._calls.start(_RECORDED, key)
            reading.add_done_callback(lambda _: self._reading.pop(key, None))
        (row,) = json.loads(await asyncio.shield(reading))
        return "gone gone" if row["result"] is None else f"done {row['result']}"

    def _acquiring(self, request: StoreRequest, wait: bool) -> Message:
        terms = request.terms
        text = "\t".join(
            (
                "acquire",
                self._calls.key(request.kind, request.name),
                request.id,
                _wire_mode(request),
                request.owner,
                str(_ms(terms.ttl)),
                str(_ms(terms.waiter_ttl)),
                str(_ms(terms.lock_delay)),
                "wait" if wait else "nowait",
                *self._further(request),
            )
        )
        return Message(text)

    def _further(self, request: StoreRequest) -> Sequence[str]:
        """Return what few requests have: texts for people, a hold, a limit that is to be in use."""
        terms = request.terms
        texts = quote(terms.note, safe=""), quote(self.description, safe="")
        if request.lingers:
            return (*texts, "0", "linger")
        if terms.hold_at_least or terms.resize:
            how = ("begins" if request.begins else "later") if terms.hold_at_least else ""
            return (*texts, str(_ms(terms.hold_at_least)), how + "resize" * terms.resize)
        return texts if any(texts) else ()

    def extend(
        self, batch: Sequence[tuple[StoreRequest, float]]
    ) -> Sequence[Awaitable[Granted | Waiting | Gone]]:
        return [self._extend(request, length) for request, length in batch]

    def _extend(self, request: StoreRequest, length: float) -> Awaitable[Granted | Waiting | Gone]:
        sent = now()
        key = self._calls.key(request.kind, request.name)
        begins = "\tbegins" if request.terms.hold_at_least and request.begins else ""
        text = f"extend\t{key}\t{request.id}\t{_ms(length)}{begins}"
        answer = self._messages.submit(Message(text, length))
        return Extended(answer, sent, partial(self._recorded, key))

    def server_of(self, request: StoreRequest) -> object:
        return None

    def _leaving(self, request: StoreRequest) -> Message:
        connection = self._messages.link.connection
        late = request.ambiguous or (
            request.sent_on is not None and request.sent_on is not connection
        )
        marker = self._marker_ttl if late else 0
        key = self._calls.key(request.kind, request.name)
        end = request.end
        words: list[str] = [end.word]
        if end.record is not None:
            result, keep = end.record
            words = ["recorded", str(_ms(keep)), quote(result, safe="")]
        text = "\t".join(("leave", key, request.id, str(marker), *words))
        return Message(text)

    async def leave(
        self, request: StoreRequest, *, lost: bool = False, within: float | None = None
    ) -> Left:
        try:
            async with asyncio.timeout(within):
                await self._calls.up()
                return left_of(await self._messages.submit(self._leaving(request)))
        except TimeoutError as silent:
            raise Unanswered(f"{self._described}: no answer for {within:g} s") from silent

    def leave_later(
        self,
        request: StoreRequest,
        done: Callable[[Left | BackendError], object],
        *,
        lost: bool = False,
    ) -> bool:
        if self._messages.link.connection is None:
            return False

        def on_answer(answer: asyncio.Future[str]) -> None:
            try:
                done(left_of(answer.result()))
            except BackendError as failed:
                done(failed)

        self._messages.submit(self._leaving(request)).add_done_callback(on_answer)
        return True

    async def leave_unknown(self, request_id: str, where: str, final: bool) -> Left:
        await self._calls.up()
        marker_ttl = self._marker_ttl if final else 0
        return left_of(
            await self._calls.turn(f"leave\t{where}\t{request_id}\t{marker_ttl}\tunused")
        )

    def watch(self, request: StoreRequest, watching: bool) -> None:
        """The database cannot tell when a deadline has passed: the head looks at that moment."""

    def announce(self, kind: str, name: str) -> None:
        """Tell whoever observes the name that its holder has changed."""
        self._calls.turn(f"announce\t{self._calls.key(kind, name)}")

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        changes = channel(f"changes {self._calls.key(kind, name)}")
        return self._listening.listen(changes, lambda payload: changed())


def _wire_mode(request: StoreRequest) -> str:
    if request.terms.limit:
        return f"s{request.terms.limit}"
    return "x" if request.terms.mode == "exclusive" else "s"
