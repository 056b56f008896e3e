"""``min_replicas``: an answer counts only when enough replicas have what it is made of.

Acquiring and extending use a connection of their own, in batches: every command that is due, then one
``WAIT``. The answers of a batch are kept back until the replicas have confirmed it. Commands that are sent
meanwhile make the next batch. So one ``WAIT`` serves all of them, no other commands wait behind it, and the
server that gave the answers is the one that is asked.

``WAIT`` covers only what its own connection wrote. So each command of a batch must write what it answers.
An extension does, and so does a first acquire. A hand-off is written by the client that releases: its
notice is only a hint, and the extension that follows counts. ``Calls.acquire`` handles a repeated
acquire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ..._errors import BackendError, BackendUnavailable
from ..._model import Capabilities
from ..base import Unanswered
from .link import Link
from .refusals import ReplyError
from .replies import promises
from .wire import Reader, Wire, fail

#: For how long a batch waits for the replicas, at most, in seconds.
LONGEST_WAIT = 0.5
_ASK_AGAIN = 0.05
_Asked = tuple[bytes, Reader]
_Answer = tuple["asyncio.Future[Any]", Reader]


class ReplicatedWire:
    """One connection, used in batches; looks to its users like the wire itself.

    Mutable state: ``_next`` (commands of the next batch), ``_busy`` (a batch is due or on its way).
    """

    def __init__(self, link: ReplicatedLink, wire: Wire) -> None:
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._next: list[_Asked] = []
        self._busy = False
        self.wire: Wire = wire
        self.reloaded: set[str] = wire.reloaded
        wire.lost.add_done_callback(self._on_lost)

    def send_packed(self, command: bytes) -> asyncio.Future[Any]:
        """Send one command in RESP; its reply arrives when the replicas have confirmed it."""
        reply: asyncio.Future[Any] = self._loop.create_future()
        self.put(command, reply)
        return reply

    def put(self, command: bytes, reader: Reader, **_: object) -> None:
        """Send one command in RESP; ``reader`` is given its reply when the replicas have confirmed it.

        What else a wire is told is not used: a batch takes all there are, and has a limit of its own.
        """
        self._next.append((command, reader))
        if not self._busy:
            self._busy = True
            self._loop.call_soon(self._send_batch)

    def close(self, reason: Exception | None = None) -> None:
        """Break the connection."""
        self.wire.close(reason)

    def _send_batch(self) -> None:
        # A caller that was cancelled before its command was sent has asked for nothing.
        asked, self._next = [sent for sent in self._next if not sent[1].done()], []
        if not asked:
            self._busy = False
            return
        answers = [(self.wire.send_packed(command), reply) for command, reply in asked]
        wait = self.wire.send("WAIT", self._link.least, self._link.wait_ms)
        wait.add_done_callback(lambda wait: self._on_confirmed(answers, wait))

    def _on_confirmed(self, answers: list[_Answer], wait: asyncio.Future[Any]) -> None:
        shortage = self._link.judge(self.wire, wait)
        for answer, reply in answers:
            # Replies come in order, so all are here; if the connection was lost, all know that.
            error = answer.exception()
            if error is None and shortage is not None and promises(answer.result()):
                error = shortage()
            if reply.done():
                continue
            if error is None:
                reply.set_result(answer.result())
            else:
                fail(reply, error)
        self._send_batch()

    def _on_lost(self, _: asyncio.Future[Exception]) -> None:
        for _command, reply in self._next:
            if not reply.done():
                fail(reply, BackendUnavailable("the connection was lost"))


class ReplicatedLink:
    """A kept-up connection whose answers count when ``least`` replicas have them.

    Mutable state: ``_wrapped`` (the present wire), ``_shortage`` (what the last ``WAIT`` said, if too
    little).
    """

    def __init__(
        self,
        link: Link,
        least: int,
        described: str,
        longest: float,
        *,
        suspect: Callable[[], None] = lambda: None,
    ) -> None:
        self.link: Link = link
        #: Called when replicas are missing: they may follow another primary now.
        self._suspect = suspect
        self.least: int = least
        self.wait_ms: int = round(min(LONGEST_WAIT, longest / 8) * 1000)
        self._described = described
        self._wrapped: ReplicatedWire | None = None
        self._shortage: BackendError | None = None

    @property
    def failure(self) -> Exception | None:
        """Why nothing can be granted, if that is so."""
        return self.link.failure or self._shortage

    @property
    def wire(self) -> ReplicatedWire | None:
        """The connection, if there is one."""
        wire = self.link.wire
        if wire is None:
            return None
        if self._wrapped is None or self._wrapped.wire is not wire:
            self._wrapped = ReplicatedWire(self, wire)
        return self._wrapped

    async def wait_up(self, *, hurry: bool = False) -> ReplicatedWire:
        """Wait a moment for the connection, then raise BackendUnavailable."""
        await self.link.wait_up(hurry=hurry)
        wire = self.wire
        assert wire is not None
        return wire

    async def enough(self) -> None:
        """Wait until so many replicas are connected; for as long as it takes."""
        while True:
            wire = await self.link.first_up()
            wait = wire.send("WAIT", self.least, self.wait_ms)
            await asyncio.wait({wait})
            shortage = self.judge(wire, wait)
            if shortage is None:
                return
            error = shortage()
            if not isinstance(error, BackendUnavailable):
                raise error
            await asyncio.sleep(_ASK_AGAIN)

    def judge(self, wire: Wire, wait: asyncio.Future[Any]) -> Callable[[], BackendError] | None:
        """Return what to raise instead of a promise; None if enough replicas have it."""
        refused = wait.exception()
        if refused is None and wait.result() >= self.least:
            self._shortage = None
            return None
        self._suspect()
        kind: type[BackendError] = Unanswered
        if refused is None:
            why = (
                f"within {self.wait_ms / 1000:g} s {wait.result()} replicas have confirmed, of "
                f"min_replicas={self.least}; are so many connected?"
            )
        elif isinstance(refused, ReplyError) and refused.code == "NOPERM":
            kind, why = BackendError, f"the server's ACL does not allow WAIT: {refused}"
        else:
            why = f"the replicas' answer did not come: {refused}"
            if isinstance(refused, ReplyError):
                wire.close(refused)  # this server was demoted: find the primary again

        def shortage() -> BackendError:
            error = kind(f"{self._described}: {why}")
            error.__cause__ = refused
            return error

        self._shortage = shortage()
        return shortage


def capabilities(min_replicas: int) -> Capabilities:
    """Return what a backend can do: with replicas to ask, the notice of a grant is not the grant."""
    return Capabilities(
        notices="hints" if min_replicas else "grants",
        hold_at_least=True,
        resize=True,
        once=True,
        linger=True,
    )
