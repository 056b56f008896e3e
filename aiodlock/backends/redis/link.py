"""A connection that is kept up: after a loss it is opened again, with growing pauses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
from redis.exceptions import RedisError

from ..._errors import BackendError, BackendUnavailable
from ..._patience import LEAST, Patience
from .dialing import Attempts, Dialling, Turn, turns_of
from .refusals import Unusable, is_refusal
from .source import Source
from .wire import DriverWire, Wire

_logger = logging.getLogger("aiodlock")

#: How long one call waits for the connection (seconds). Its caller decides whether to try again.
_WAIT_UP = 0.5


class Link:
    """One kept-up connection.

    ``prepare`` runs on each new wire before other tasks may use it; ``on_up`` is called when they may.

    Mutable state: ``wire`` (the connection, while it is up) and ``failure`` (why it is not), ``dialling``
    and ``_attempts``, ``_over``, and two events for those who wait.

    :param longest: seconds for which waiters go on without an answer: what is silent for a third of them
        is dead.
    :param patience: how long replies take, where the owner knows that already.
    """

    def __init__(
        self,
        source: Source,
        *,
        prepare: Callable[[Wire], Awaitable[None]] | None = None,
        on_up: Callable[[Wire], None] | None = None,
        on_message: Callable[[Any], None] | None = None,
        longest: float = float("inf"),
        patience: Patience | None = None,
    ) -> None:
        self._source = source
        self._longest = longest
        self._prepare = prepare
        self._on_up = on_up
        self._on_message = on_message
        self._up = asyncio.Event()
        self._hurry = asyncio.Event()
        #: Another link to the same server. While both are down, only that one tries to connect.
        self.lead: Link | None = None
        self._attempts = Attempts()
        # With a small ``unavailable_after`` waiters have to learn of an outage sooner.
        self.dialling: Dialling = Dialling(patience or Patience(min(LEAST, longest / 2)))
        self._over = False
        #: While the client is entered, a refusal of this user ends ``run``. Later it is an outage like any
        #: other: an account may be missing on one node, or for a moment.
        self.entering = True
        self.wire: Wire | None = None
        self.failure: Exception | None = None

    async def wait_up(self, *, hurry: bool = False) -> Wire:
        """Wait a moment for the connection, then raise BackendUnavailable.

        :param hurry: the caller asks once and does not come back, so the next attempt is made now.
        """
        if hurry:
            self._hurry.set()
        try:
            async with asyncio.timeout(_WAIT_UP):
                return await self.first_up()
        except TimeoutError:
            raise BackendUnavailable(
                f"no connection to {self._source.described}: {self.failure or 'still connecting'}"
            ) from self.failure

    async def first_up(self) -> Wire:
        """Wait until connected; for as long as it takes."""
        while self.wire is None:
            if self._over:
                raise BackendUnavailable(f"{self._source.described}: the client was closed")
            await self._up.wait()
        return self.wire

    async def run(self) -> None:
        """Keep the connection up until cancelled."""
        try:
            await self._keep_up()
        finally:
            self._over = True
            self._up.set()

    async def _keep_up(self) -> None:
        attempts = self._attempts
        turns = turns_of(self._source.described)
        refused_before = told = False
        while True:
            try:
                turn = await turns.take()
                try:
                    wire = await self._connect()
                    try:
                        reason = await self._serve(wire, turn)
                    finally:
                        self.wire = None
                        self._up.clear()
                        await wire.closed()
                finally:
                    turn.give_back()
            except (RedisError, OSError, TimeoutError) as failed:
                reason = failed
            self.failure = reason
            refused = is_refusal(reason)
            described, extra = self._source.described, {"event": "no_connection"}
            if refused and self.entering:
                words = "" if isinstance(reason, Unusable) else " refuses this client"
                raise BackendError(f"{described}{words}: {reason}") from reason
            # Once per outage, and again when it turns out to be a refusal. Calls meanwhile raise errors.
            pause = attempts.failed()
            told = told and attempts.failures > 1
            news = not told or (refused and not refused_before)
            if self.lead is not None and self.lead.wire is None:
                news = False  # the outage is told there
            told, refused_before = told or news, refused
            level = logging.WARNING if news else logging.DEBUG
            _logger.log(level, "no connection to %s: %s", described, reason, extra=extra)
            await self._pause(pause)

    async def _pause(self, seconds: float) -> None:
        """Wait before the next attempt: not in step with all others, and not before the leading link."""
        self._hurry.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()
        if self.lead is not None:
            with suppress(BackendUnavailable):
                await self.lead.first_up()

    async def _serve(self, wire: Wire, turn: Turn) -> Exception:
        """Use the wire until it breaks; return why it did."""
        async with anyio.create_task_group() as tasks:
            if isinstance(wire, DriverWire):
                tasks.start_soon(wire.read)
            reason = await self._prepare_and_use(wire, turn)
            tasks.cancel_scope.cancel()
        return reason

    async def _prepare_and_use(self, wire: Wire, turn: Turn) -> Exception:

        def progress() -> int:
            self.dialling.came_further(wire)
            return wire.answers

        try:
            if self._prepare is not None:
                async with self.dialling.within(progress):
                    await self._prepare(wire)
        except (BackendError, RedisError, OSError) as failed:
            return failed
        turn.succeeded()
        progress()
        self.wire, self.failure = wire, None
        self._attempts.came_up()
        self._up.set()
        # This runs before the callers whose replies are lost: a repeated command must not go to the dead
        # wire.
        wire.lost.add_done_callback(self._on_down)
        if self._on_up is not None:
            self._on_up(wire)
        return await asyncio.shield(wire.lost)

    def _on_down(self, _: asyncio.Future[Exception]) -> None:
        self.wire = None
        self._up.clear()

    async def _connect(self) -> Wire:
        source = self._source
        return await self.dialling.open(
            source.make_connection(),
            source.look_up,
            found=lambda: source.further_at,
            on_message=self._on_message,
            longest=self._longest,
        )
