"""Locks in PostgreSQL: what is sent to the functions of ``schema.sql``.

Two connections: one for the messages of all tasks, which go out together in one call of ``turn``, and one
that listens for notifications.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

import asyncpg

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
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
from .connection import Connection, ask
from .history import History, history_of
from .inspection import Inspection
from .installing import install
from .link import Host, Link, Prepared
from .messages import Message, OtherHistory
from .notifications import Notifications, channel
from .replies import LONG_RECORD, Extended, left_of, outcome_of
from .schema import READ_ONLY, VERSION, missing, wrong_version
from .scouts import Scouts
from .waits import Waits

_logger = logging.getLogger("aiodlock")

#: For how long a marker refuses late duplicates, at the least (seconds).
_REMEMBERED = 60.0
_SWEEP_EVERY = 60.0
#: Names with locks of their own in one call. Few, because each lock takes a place in the server's table of
#: locks until the call has ended.
_SWEEP_MOST = 200
#: Pages of a table that a call looks at; fewer where the server's limits end such a call.
_SWEEP_PAGES = 1000
#: How long the installation may take, which waits for that of others (seconds).
_INSTALL_WITHIN = 4.0
_HELLO = f"""
select v.oldest, v.newest, h.*, a.backend_start, ({READ_ONLY}) as read_only
from aiodlock.versions() v cross join aiodlock.hello() h
left join pg_catalog.pg_stat_activity a on a.pid = pg_catalog.pg_backend_pid()
"""


_SWEEP = "select place from aiodlock.sweep($1, $2, $3)"
_RECORDED = "select aiodlock.recorded($1) as result"


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


class PostgresBackend(Asked):
    """One database. Its functions decide; this sends messages and reads the answers.

    Its state is in its connections, in ``Notifications``, and in ``_known`` (the database that it talks
    to); ``_reading`` are the keys whose results are being read, and ``_sweep_pages`` how much one call can
    sweep here.
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
        self._sweep_pages = _SWEEP_PAGES
        # A user who names another source to listen on has a pooler in front of the first one.
        link = Link(
            source,
            described,
            pooled=listen_source is not None,
            known=self._known,
            prepare=self._meet,
            on_up=self._on_connected,
        )
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
            while True:
                await asyncio.sleep(_SWEEP_EVERY * random.uniform(0.5, 1.5))
                await self._sweep()

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

    async def _meet(self, connection: Connection, host: Host) -> Prepared:
        """Check that the server can be written to, and has the schema in the right version."""
        connection.add_log_listener(self._calls.on_log)
        within, known, sent = host.patience.learned, self._known.value, now()
        try:
            row = await self._greet(connection, within)
        except (asyncpg.UndefinedFunctionError, asyncpg.InvalidSchemaNameError) as absent:
            await self._see_version(connection, within)
            if not self._create:
                raise BackendError(missing(self._described)) from absent
            # Only here: with a lock of all who install, and rights that a client need not have.
            await ask(connection, install(connection), max(within, _INSTALL_WITHIN))
            sent = now()
            row = await self._greet(connection, within)
        took = now() - sent
        if row["read_only"]:
            raise BackendUnavailable(f"{self._described} {row['read_only']}")
        if not row["oldest"] <= VERSION <= row["newest"]:
            raise BackendError(f"{self._described}: {wrong_version(row['version'])}")
        session = None
        if not self._messages.link.pooled and row["backend_start"] is not None:
            session = connection.get_server_pid(), row["backend_start"]
        return Prepared(history_of(row, known), session, took)

    async def _greet(self, connection: Connection, within: float) -> Any:
        """Return what the server and the schema say of themselves."""
        try:
            return await self._ask(connection, partial(connection.fetchrow, _HELLO), within)
        except asyncpg.InsufficientPrivilegeError as refused:
            raise BackendError(
                f"{self._described}: this role may not use the schema aiodlock ({refused}). The owner of "
                "the schema has to run: GRANT USAGE ON SCHEMA aiodlock TO the_role; "
                "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA aiodlock TO the_role"
            ) from refused

    async def _see_version(self, connection: Connection, within: float) -> None:
        """Raise if there is a schema of another version, or if no schema can be made here."""
        read_only = await self._ask(connection, partial(connection.fetchval, READ_ONLY), within)
        if read_only:
            raise BackendUnavailable(f"{self._described} {read_only}")
        for sql in (
            "select newest from aiodlock.versions()",
            "select version from aiodlock.hello()",  # before version 11
        ):
            try:
                found = await self._ask(connection, partial(connection.fetchval, sql), within)
            except (asyncpg.UndefinedFunctionError, asyncpg.InvalidSchemaNameError):
                continue
            if found != VERSION:
                raise BackendError(f"{self._described}: {wrong_version(found)}")

    async def _ask(
        self,
        connection: Connection,
        query: Callable[[], Coroutine[Any, Any, Any]],
        within: float,
    ) -> Any:
        return await ask(connection, self._calls.one_step(connection, query, within), within)

    def _on_connected(self, prepared: Prepared, again: bool) -> None:
        if not self._messages.patience.knows:
            # The first questions only read: they say nothing of how long a commit takes.
            self._messages.patience.answered(prepared.took)
        if not again:
            return
        self._listening.examine()  # this may be another server
        if self._notifications.listener is not None:
            self._notifications.listener.on_back()

    async def _sweep(self) -> None:
        # Each call goes on where the last one has ended: else it would read again what is not to be swept.
        place: str | None = "m0"
        while place is not None:
            try:
                (row,) = await self._calls.rows(_SWEEP, self._sweep_pages, _SWEEP_MOST, place)
                place = row["place"]
            except BackendError as failed:
                _logger.debug("sweeping failed: %s", failed)
                if self._sweep_pages == 1 or self._messages.link.connection is None:
                    return
                self._sweep_pages = max(1, self._sweep_pages // 8)

    @property
    def failure(self) -> Exception | None:
        """Why there is no connection, if there is none."""
        for link in (self._messages.link, self._listening.link):
            if link.connection is None and link.failure is not None:
                return link.failure
        return None

    @property
    def further_at(self) -> float:
        """When entering has last come further; see ``Backend``."""
        return max(self._messages.link.further.at, self._listening.link.further.at)

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

    async def settle(self) -> None:
        """Every answer is waited for by a call."""

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
