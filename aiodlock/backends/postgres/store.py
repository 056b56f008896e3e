"""Locks in PostgreSQL: what is sent to the functions of ``schema.sql``.

Two connections: one for the messages of all tasks, which go out together in one call of ``turn``, and one
that listens for notifications.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
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
    Kind,
    Left,
    LockInfo,
    Refused,
    StoreRequest,
    Tokens,
    Waiting,
)
from .._label import make_label
from ..base import Unanswered
from ..kept import Notices
from .connection import LOOK_FOR_CLIENT, Connection, Link, ask, transaction
from .inspection import Inspection
from .installing import install
from .messages import Message, Messages
from .notifications import Notifications, channel
from .replies import Extended, left_of, outcome_of
from .schema import READ_ONLY, VERSION, missing, wrong_version

_logger = logging.getLogger("aiodlock")

#: For how long a marker refuses late duplicates, at the least (seconds).
_REMEMBERED = 60.0
_SWEEP_EVERY = 60.0
#: Few, because each name's lock takes a place in the server's table of locks until the call has ended.
_SWEEP_MOST = 200
#: How long a question may take while a connection is prepared.
_HELLO_WITHIN = 2.0
#: And how long the installation, which waits for that of others.
_INSTALL_WITHIN = 4.0

_ACQUIRE_ONE = "select aiodlock.acquire_one($1, $2, $3, $4, $5, $6)"
_LEAVE_ONE = "select aiodlock.leave_one($1, $2, $3, $4, $5)"
_TURN = "select aiodlock.turn($1, $2, $3)"
_TURN_MANY = "select aiodlock.turn_many($1, $2, $3)"
_SWEEP = "select place::text from aiodlock.sweep($1, $2::text::tid)"


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


class PostgresBackend:
    """One database. Its functions decide; this sends messages and reads the answers.

    It has no state of its own: that is in its connections, and in ``Notifications``.
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
        self._prefix = prefix
        self._retention = _ms(token_retention)
        self._marker_ttl = _ms(max(unavailable_after, _REMEMBERED))
        # A user who names another source to listen on has a pooler in front of the first one.
        pooled = listen_source is not None
        link = Link(source, described, pooled=pooled, prepare=self._meet, on_up=self._on_connected)
        self._messages = Messages(link, self._call, lambda said: self._notifications.hear(said))
        self._notifications = Notifications(
            self._messages,
            listen_source or source,
            described + (" (listening)" if listen_source else ""),
            self.label,
        )
        self._listening = self._notifications.listening
        self._inspection = Inspection(self)

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
            tasks.create_task(self._notifications.poll())
            while True:
                await asyncio.sleep(_SWEEP_EVERY * random.uniform(0.5, 1.5))
                await self._sweep()

    async def _meet(self, connection: Connection) -> None:
        """Check that the server can be written to, and has the schema in the right version."""
        read_only = await self._ask(connection, READ_ONLY)
        if read_only:
            raise BackendUnavailable(f"{self._described} {read_only}")
        try:
            version = await self._installed(connection)
        except (asyncpg.UndefinedFunctionError, asyncpg.InvalidSchemaNameError) as absent:
            if not self._create:
                raise BackendError(missing(self._described)) from absent
            # Only here: with a lock of all who install, and rights that a client need not have.
            await ask(connection, install(connection), _INSTALL_WITHIN)
            version = await self._installed(connection)
        if version != VERSION:
            raise BackendError(f"{self._described}: {wrong_version(version)}")
        if not self._messages.link.pooled:
            await self._ask(connection, LOOK_FOR_CLIENT)

    async def _installed(self, connection: Connection) -> int:
        """Return the version of the schema that is there."""
        try:
            version: int = await self._ask(connection, "select version from aiodlock.hello()")
        except asyncpg.InsufficientPrivilegeError as refused:
            raise BackendError(
                f"{self._described}: this role may not use the schema aiodlock ({refused}). The owner of "
                "the schema has to run: GRANT USAGE ON SCHEMA aiodlock TO the_role; "
                "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA aiodlock TO the_role"
            ) from refused
        return version

    async def _ask(self, connection: Connection, sql: str) -> Any:
        query = partial(connection.fetchval, sql)
        return await ask(connection, self._one_step(connection, query), _HELLO_WITHIN)

    async def _one_step(
        self, connection: Connection, query: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:
        """Return a query's answer. Behind a pooler, keep the session for as long as the query takes.

        asyncpg prepares a statement and runs it in two steps. Between them a pooler may change the session.
        """
        if not self._messages.link.pooled:
            return await query()
        async with transaction(connection):
            return await query()

    def _on_connected(self, again: bool) -> None:
        if not again:
            return
        self._listening.examine()  # this may be another server
        if self._notifications.listener is not None:
            self._notifications.listener.on_back()

    async def _sweep(self) -> None:
        try:
            # In a minute more names may have their time than one call takes. Each call goes on where the
            # last one has ended: else it would read again what is not to be swept.
            place = "(0,0)"
            while place is not None:
                ((place,),) = await self.fetch(_SWEEP, _SWEEP_MOST, place)
        except BackendError as failed:
            _logger.debug("sweeping failed: %s", failed)

    @property
    def failure(self) -> Exception | None:
        """Why there is no connection, if there is none."""
        for link in (self._messages.link, self._listening.link):
            if link.connection is None and link.failure is not None:
                return link.failure
        return None

    async def _call(self, connection: Connection, messages: list[Message]) -> list[str]:
        if len(messages) == 1:
            text, statement, more = messages[0]
        else:
            text, more = "\n".join([one.text for one in messages]), ()
            keys = {one.text.split("\t", 2)[1] for one in messages}
            if len(keys) == len(messages):
                statement = _TURN_MANY
            elif [one.alone for one in messages] == [_ACQUIRE_ONE, _LEAVE_ONE]:
                _, statement, more = messages[1]  # as when many tasks take one name again and again
            else:
                statement = _TURN
        call = partial(connection.fetchval, statement, self.label, self._retention, text, *more)
        answers: str = await self._one_step(connection, call)
        return answers.split("\n")

    # -- calls -----------------------------------------------------------------------------------

    async def up(self, *, hurry: bool = False) -> None:
        """Wait for a connection if there is none."""
        if self._messages.link.connection is None:
            await self._messages.link.wait_up(hurry=hurry)

    def key(self, kind: str, name: str) -> str:
        """Return what a name is called in the tables."""
        return f"{self._prefix}:{kind[0]}:{quote(name, safe='')}"

    async def fetch(self, sql: str, *arguments: object) -> list[Any]:
        """Return a query's rows."""

        def fetch(connection: Connection) -> Any:
            return self._one_step(connection, partial(connection.fetch, sql, *arguments))

        rows: list[Any] = await self._messages.query(fetch)
        return rows

    def turn(self, message: str) -> asyncio.Future[str]:
        """Send a message that may change anything of its name."""
        return self._messages.submit(Message(message, _TURN))

    # -- requests --------------------------------------------------------------------------------

    async def acquire(
        self, request: StoreRequest, *, wait: bool
    ) -> Granted | Waiting | Refused | Gone:
        await self.up(hurry=not wait)
        request.sent_on = self._messages.link.connection
        sent = now()
        try:
            answer = await self._messages.submit(self._acquiring(request, wait))
        except Unanswered:
            request.ambiguous = True
            raise
        request.sent_on = None
        return outcome_of(answer, sent)

    def _acquiring(self, request: StoreRequest, wait: bool) -> Message:
        terms, key, ttl = (
            request.terms,
            self.key(request.kind, request.name),
            _ms(request.terms.ttl),
        )
        text = "\t".join(
            (
                "acquire",
                key,
                request.id,
                _wire_mode(request),
                request.owner,
                str(ttl),
                str(_ms(terms.waiter_ttl)),
                str(_ms(terms.lock_delay)),
                "wait" if wait else "nowait",
                *self._further(request),
            )
        )
        if terms.lock_delay or terms.limit or terms.hold_at_least:
            return Message(text, _TURN)
        return Message(text, _ACQUIRE_ONE, (key, request.id, ttl))

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
        key = self.key(request.kind, request.name)
        begins = "\tbegins" if request.terms.hold_at_least and request.begins else ""
        text = f"extend\t{key}\t{request.id}\t{_ms(length)}{begins}"
        answer = self._messages.submit(Message(text, _TURN_MANY))
        return Extended(answer, sent)

    def server_of(self, request: StoreRequest) -> object:
        return None

    def _leaving(self, request: StoreRequest) -> Message:
        connection = self._messages.link.connection
        late = request.ambiguous or (
            request.sent_on is not None and request.sent_on is not connection
        )
        marker = self._marker_ttl if late else 0
        key = self.key(request.kind, request.name)
        end = request.end
        words: list[str] = [end.word]
        if end.record is not None:
            result, keep = end.record
            words = ["recorded", str(_ms(keep)), quote(result, safe="")]
        text = "\t".join(("leave", key, request.id, str(marker), *words))
        if marker or words[0] not in ("ended", "lost"):
            return Message(text, _TURN)
        return Message(text, _LEAVE_ONE, (key, request.id))

    async def leave(
        self, request: StoreRequest, *, lost: bool = False, within: float | None = None
    ) -> Left:
        try:
            async with asyncio.timeout(within):
                await self.up()
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
        await self.up()
        marker_ttl = self._marker_ttl if final else 0
        return left_of(await self.turn(f"leave\t{where}\t{request_id}\t{marker_ttl}\tunused"))

    async def settle(self) -> None:
        """Every answer is waited for by a call."""

    def watch(self, request: StoreRequest, watching: bool) -> None:
        """The database cannot tell when a deadline has passed: the head looks at that moment."""

    def announce(self, kind: str, name: str) -> None:
        """Tell whoever observes the name that its holder has changed."""
        self.turn(f"announce\t{self.key(kind, name)}")

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        changes = channel(f"changes {self.key(kind, name)}")
        return self._listening.listen(changes, lambda payload: changed())

    # -- for people ------------------------------------------------------------------------------

    async def inspect(self, kind: Kind, name: str) -> LockInfo:
        return await self._inspection.inspect(kind, name)

    async def inspect_all(self, kind: Kind, names: Sequence[str]) -> list[LockInfo]:
        return await self._inspection.inspect_all(kind, names)

    def names(self, match: str, kind: Kind = "lock") -> AsyncIterator[str]:
        return self._inspection.names(match, kind)

    async def break_lock(self, name: str, kind: Kind = "lock", tokens: Tokens | None = None) -> int:
        return await self._inspection.break_lock(name, kind, tokens)

    async def forget(self, name: str) -> bool:
        return await self._inspection.forget(name)


def _wire_mode(request: StoreRequest) -> str:
    if request.terms.limit:
        return f"s{request.terms.limit}"
    return "x" if request.terms.mode == "exclusive" else "s"
