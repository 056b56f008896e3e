"""One node of a quorum: what is sent to it about a request, and what its answers say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import hiredis

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..._model import Request
from ..base import Unanswered
from .backend import RedisBackend, load_scripts
from .keys import Keys, keys_of, name_of
from .link import is_refusal
from .replies import left_of, wrong_shape
from .scripts import BREAK_VOTES, INSPECT_VOTES, UNVOTE, VOTE, VOTING, Script
from .seen import Seen
from .source import Source
from .trust import Trust
from .votes import Answer, Ballot, Message, Tally, read_answer
from .wire import ReplyError, Wire

#: How long a node's answer is waited for; afterwards it counts as one that did not answer.
ANSWER_WITHIN = 0.5

_Hear = Callable[[Answer | Exception], None]


class Voter(RedisBackend):
    """One node: sends it what concerns it, and hands its answers on. Tasks of its own are connections."""

    def __init__(self, node: int, source: Source, restart_delay: float, **options: Any) -> None:
        super().__init__(source, **options)
        self._voting = True
        self.node = node
        #: Called when another server answers than the one that was met before.
        self.on_restarted: Callable[[Voter], None] = lambda _: None
        #: Called when it is known which server answers.
        self.on_met: Callable[[Voter], None] = lambda _: None
        self.up: asyncio.Event = asyncio.Event()
        self.trust: Trust = Trust(_key_of_members(self._prefix), restart_delay, self._retention)

    async def _on_connected(self, wire: Wire) -> None:
        await load_scripts(wire, VOTING)
        if await self.trust.meet(wire, self._source.described):
            # Nothing that the old one has said may be taken for the new one's.
            if self._wakeups is not None and self._wakeups.link.wire is not None:
                self._wakeups.link.wire.close()
            self.on_restarted(self)
        self.on_met(self)

    @property
    def described(self) -> str:
        """How the node is called in messages."""
        return self._source.described

    @property
    def connecting(self) -> bool:
        """Whether it is not known yet if the node can be reached."""
        return not self.up.is_set() and self.failure is None

    @property
    def is_away(self) -> bool:
        """Whether the last attempt to reach the node failed, and not by a refusal."""
        return self.failure is not None and not is_refusal(self.failure)

    @property
    def wire(self) -> Wire | None:
        """The connection, if there is one."""
        return self._commands.wire if self._commands is not None else None

    def vote(
        self, tally: Tally, ballot: Ballot, what: str, length: float, token: int, hear: _Hear
    ) -> bool:
        """Send one message about the request; ``hear`` is called with the answer, never from within.

        :returns: False when there is no connection: nothing is sent, and nothing will be heard.
        """
        wire = self.wire
        if wire is None or tally.leaving:
            return False
        about = (what, length, token)
        message = tally.message
        if message is None or message.about != about:
            request = tally.request
            arguments = (
                request.id,
                "x" if request.mode == "exclusive" else "s",
                request.owner,
                round(length * 1000),
                round(request.lock_delay * 1000),
                self.label,
                tally.ticket,
                *(what, token),
                *self._options,
            )
            message = tally.message = self._message(VOTE, request, arguments, about)
            tally.longest = max(tally.longest, length)
        ballot.asked = True
        if ballot.pending and ballot.sent_on is not wire:
            ballot.ambiguous = True
        ballot.sent_on = wire
        ballot.pending += 1
        self._call(wire, message, partial(self._on_answer, ballot, now(), hear), tally=tally)
        return True

    def _on_answer(self, ballot: Ballot, sent: float, hear: _Hear, reply: Any) -> None:
        ballot.pending -= 1
        if isinstance(reply, Exception):
            # It may be carried out at any time from now on; leaving will have to refuse that.
            ballot.ambiguous = ballot.ambiguous or isinstance(reply, Unanswered)
            hear(reply)
            return
        try:
            answer, clock = read_answer(reply, sent)
        except BackendError as wrong:
            hear(wrong)
            return
        self.trust.hear_clock(clock, sent)
        ballot.take(answer)
        hear(answer)

    def give_back(self, tally: Tally, ballot: Ballot, hear: _Hear) -> None:
        """Give the vote back, for an older request. It does not count from now on.

        ``hear`` is called with the answer, never from within; not when there is no connection.
        """
        wire = self.wire
        if wire is None:
            return
        ballot.given_back, ballot.yielding = ballot.token, True
        request = tally.request
        arguments = (request.id, "yield", 0, ballot.token, *self._options)
        message = self._message(UNVOTE, request, arguments)
        self._call(wire, message, partial(self._on_given_back, ballot, now(), hear))

    def _on_given_back(self, ballot: Ballot, sent: float, hear: _Hear, reply: Any) -> None:
        if isinstance(reply, Exception):
            hear(reply)
            return
        try:
            answer, clock = read_answer(reply, sent)
        except BackendError as wrong:
            hear(wrong)
            return
        self.trust.hear_clock(clock, sent)
        ballot.yielding = False
        ballot.take(answer)
        hear(answer)

    def unvote(
        self, tally: Tally, ballot: Ballot, lost: bool, later: bool, hear: Callable[[Any], None]
    ) -> bool:
        """Leave this node; ``hear`` is called with a Left or an exception, never from within.

        :returns: False when there is no connection: nothing is sent, and nothing will be heard.
        """
        wire = self.wire
        if wire is None:
            # What it was sent before may still be carried out.
            ballot.ambiguous = ballot.ambiguous or ballot.pending > 0
            return False
        # What is in flight on this very wire is carried out before this.
        late = ballot.ambiguous or (ballot.pending > 0 and ballot.sent_on is not wire)
        about = ("leave", lost, late)
        message = tally.message
        if message is None or message.about != about:
            id, marker = tally.request.id, self._marker_ttl if late else 0
            why = "lost" if lost else "ended"
            arguments = (id, why, marker, tally.next_token, *self._options)
            message = tally.message = self._message(UNVOTE, tally.request, arguments, about)
        self._call(wire, message, partial(self._on_left, hear), later=later)
        return True

    @staticmethod
    def _on_left(hear: Callable[[Any], None], reply: Any) -> None:
        if not isinstance(reply, Exception):
            try:
                reply = left_of(reply)
            except BackendError as wrong:
                reply = wrong
        hear(reply)

    async def leave_unknown(self, request_id: str, where: str) -> None:
        kind, name = name_of(where)
        wire = await self._link.wait_up()
        names = self._names(keys_of(self._prefix, kind, name), request_id)
        left_of(await self._run(wire, UNVOTE, names, request_id, "ended", 0, 0, *self._options))

    async def seen(self, kind: str, name: str) -> Seen:
        """Return what this node knows of a name."""
        keys = keys_of(self._prefix, kind, name)
        wire = await self._link.wait_up(hurry=True)
        reply = await self._run(
            wire, INSPECT_VOTES, (keys.state, keys.queue, keys.waiters, keys.token)
        )
        return Seen.of(reply)

    async def break_votes(self, name: str, remember: float) -> set[str]:
        """Release the holders at this node; return the ids of those."""
        keys = keys_of(self._prefix, "lock", name)
        wire = await self._link.wait_up(hurry=True)
        names = (keys.state, keys.queue, keys.waiters, keys.token, keys.broken)
        reply = await self._run(wire, BREAK_VOTES, names, *self._options, round(remember * 1000))
        try:
            return {id.decode() for id in reply}
        except (TypeError, AttributeError) as wrong:
            raise wrong_shape("break_votes", reply) from wrong

    def away(self) -> BackendUnavailable:
        """Return what is to be said when there is no connection."""
        error = BackendUnavailable(f"no connection to {self._source.described}")
        error.__cause__ = self.failure
        return error

    @staticmethod
    def _names(keys: Keys, request_id: str) -> tuple[str, ...]:
        marker = keys.marker + request_id
        return keys.state, keys.queue, keys.waiters, keys.token, marker, keys.broken

    def _message(
        self,
        script: Script,
        request: Request,
        arguments: tuple[str | int, ...],
        about: tuple[object, ...] = (),
    ) -> Message:
        names = self._names(self._keys(request), request.id)
        call = (script.number_of_keys, *names, *arguments)
        packed = hiredis.pack_command(("EVALSHA", script.sha, *call))  # type: ignore[arg-type]
        return Message(about, script.source, call, packed)

    def _call(
        self,
        wire: Wire,
        message: Message,
        on_reply: Callable[[Any], None],
        *,
        tally: Tally | None = None,
        later: bool = False,
    ) -> None:
        """Run a script, and give its result or an exception; a forgotten script is sent again.

        :param tally: with a vote. It is not asked for again when the request has been left meanwhile.
        """
        within = None if later else ANSWER_WITHIN
        heard = partial(self._on_reply, wire, message, on_reply, tally)
        wire.call(message.packed, heard, within=within, later=later)

    def _on_reply(
        self,
        wire: Wire,
        message: Message | None,
        on_reply: Callable[[Any], None],
        tally: Tally | None,
        reply: Any,
    ) -> None:
        if isinstance(reply, ReplyError):
            left = tally is not None and tally.leaving
            if reply.code == "NOSCRIPT" and message is not None and not left:
                again = hiredis.pack_command(("EVAL", message.source, *message.call))  # type: ignore[arg-type]
                heard = partial(self._on_reply, wire, None, on_reply, tally)
                wire.call(again, heard, within=ANSWER_WITHIN)
                return
            reply = self._translate(wire, reply)
        elif not isinstance(reply, Exception):
            self._refusal = None
        on_reply(reply)


def _key_of_members(prefix: str) -> str:
    """Return the key by which a node is known as a member of the quorum."""
    return f"{prefix}:1:quorum"
