"""One node of a quorum: what is sent to it about a request, and what its answers say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial
from typing import Any

from ...._clock import now
from ...._errors import BackendError
from ...._model import Left, StoreRequest
from ...._patience import Patience
from ...base import Unanswered
from ..inspection import names_of
from ..keys import Keys, keys_of, name_of
from ..messages import Call, words_of
from ..permissions import CHECKED, CHECKED_VOTING
from ..refusals import is_refusal
from ..replies import left_of, wrong_shape
from ..scripts import BREAK_VOTES, INSPECT_VOTES, LENGTHS, UNVOTE, VOTE, VOTING, Script, Words
from ..server import Server
from ..settings import Settings
from ..source import Source
from ..waits import Waits
from ..wire import Wire
from .delays import Delays
from .trust import Trust
from .views import NodeView
from .votes import Answer, Ballot, Tally, read_answer

_OnAnswer = Callable[[Answer | Exception], None]


class Voter:
    """One node: sends it what concerns it, and hands its answers on. Its only tasks are its connections.

    Mutable state: ``up`` (set while it can be used), ``trust`` (a dead session's goes on), ``_ran_out_at``
    (when an answer did not come in time last).

    :param on_restarted: called when another server answers than the one that was met before.
    :param on_met: called when it is known which server answers.
    """

    def __init__(
        self,
        node: int,
        source: Source,
        settings: Settings,
        label: str,
        delays: Delays,
        *,
        on_restarted: Callable[[Voter], None] = lambda _: None,
        on_met: Callable[[Voter], None] = lambda _: None,
    ) -> None:
        self.server: Server = Server(
            source,
            settings,
            label,
            prepare=self._on_connected,
            scripts=VOTING,
            checked=CHECKED | CHECKED_VOTING,
        )
        self.waits: Waits = Waits(self.server)
        self.node = node
        self._prefix = settings.prefix
        self._marker_ms = settings.marker_ms
        self._to_clients = self.server.to_clients
        self._on_restarted = on_restarted
        self._on_met = on_met
        self.up: asyncio.Event = asyncio.Event()
        self._ran_out_at = 0.0
        key = _key_of_members(settings.prefix)
        self.trust: Trust = Trust(key, delays, settings.retention_ms)

    def __repr__(self) -> str:
        return f"<Voter {self.server.described}>"

    async def _on_connected(self, wire: Wire) -> None:
        if await self.trust.meet(wire, self.server.described):
            # Nothing that the old one has said may be taken for the new one's.
            wakeups = self.server.wakeups
            if wakeups is not None and wakeups.link.wire is not None:
                wakeups.link.wire.close()
            self._on_restarted(self)
        self._on_met(self)

    @property
    def patience(self) -> Patience:
        """How long the node's answers take, late ones too."""
        return self.server.patience

    @property
    def further_at(self) -> float:
        """When entering has last come further; see ``StoreBase``."""
        return max(self.server.further_at, self.trust.further.at)

    @property
    def connecting(self) -> bool:
        """Whether it is not known yet if the node can be reached."""
        return not self.up.is_set() and self.server.failure is None

    @property
    def is_unreachable(self) -> bool:
        """Whether the last attempt to reach the node failed, and not by a refusal."""
        failure = self.server.failure
        return failure is not None and not is_refusal(failure)

    def vote(
        self,
        tally: Tally,
        ballot: Ballot,
        what: str,
        length: float,
        token: int,
        on_answer: _OnAnswer,
        on_late: _OnAnswer,
    ) -> bool:
        """Send one message about the request; ``on_answer`` is called with the answer, never from within.

        :param on_late: called with an answer that comes after ``on_answer`` was told that there is none.
        :returns: False when there is no connection: nothing is sent, and nothing will be heard.
        """
        wire = self.server.wire
        if wire is None or tally.leaving:
            return False
        known = ballot.token if what == "held" else 0
        tally.longest = max(tally.longest, length)
        request = tally.request

        def pack() -> Call:
            arguments = (
                request.id,
                "x" if request.terms.mode == "exclusive" else "s",
                request.owner,
                round(length * 1000),
                round(request.terms.lock_delay * 1000),
                self.server.label,
                tally.ticket,
                *(what, token),
                *self._to_clients,
                words_of(request, self.server.settings.description),
                known,
            )
            return self._call_of(VOTE, request, arguments)

        message = tally.call_of((what, length, token, known), pack)
        ballot.sent.asks(wire)
        sent = now()
        self._call(
            wire,
            message,
            partial(self._on_vote_answer, ballot, sent, on_answer),
            on_late=partial(self._take_answer, ballot, sent, on_late),
            lease=length,
            tally=tally,
        )
        return True

    def _on_vote_answer(
        self, ballot: Ballot, sent: float, on_answer: _OnAnswer, reply: Any
    ) -> None:
        ballot.sent.pending -= 1
        self._take_answer(ballot, sent, on_answer, reply)

    def _take_answer(
        self,
        ballot: Ballot,
        sent: float,
        on_answer: _OnAnswer,
        reply: Any,
        *,
        to_yield: bool = False,
    ) -> None:
        if isinstance(reply, Exception):
            if isinstance(reply, Unanswered) and not to_yield:
                # It may be carried out at any time from now on; leaving will have to refuse that.
                ballot.sent.ambiguous = True
            on_answer(reply)
            return
        try:
            answer, clock = read_answer(reply, sent)
        except BackendError as wrong:
            on_answer(wrong)
            return
        self.trust.hear_clock(clock, sent)
        if to_yield:
            ballot.yielding = False
        ballot.take(answer)
        on_answer(answer)

    def give_back(
        self, tally: Tally, ballot: Ballot, on_answer: _OnAnswer, *, rests: bool = False
    ) -> None:
        """Give the vote back, for an older request. It does not count from now on.

        :param rests: the request gets no other vote before it asks for one.

        ``on_answer`` is called with the answer, never from within; not when there is no connection.
        """
        wire = self.server.wire
        if wire is None:
            return
        ballot.given_back, ballot.yielding = ballot.token, True
        request = tally.request
        what = "rest" if rests else "yield"
        arguments = (request.id, what, 0, ballot.token, *self._to_clients)
        message = self._call_of(UNVOTE, request, arguments)
        lease = request.terms.waiter_ttl
        heard = partial(self._take_answer, ballot, now(), on_answer, to_yield=True)
        self._call(wire, message, heard, lease=lease)

    def unvote(
        self,
        tally: Tally,
        ballot: Ballot,
        lost: bool,
        later: bool,
        on_answer: Callable[[Any], None],
    ) -> bool:
        """Leave this node; ``on_answer`` is called with a Left or an exception, never from within.

        :returns: False when there is no connection: nothing is sent, and nothing will be heard.
        """
        wire = self.server.wire
        late = ballot.sent.may_overtake(wire)
        if wire is None:
            # What it was sent before may still be carried out.
            ballot.sent.ambiguous = late
            return False

        def pack() -> Call:
            id, marker = tally.request.id, self._marker_ms if late else 0
            why = "lost" if lost else "ended"
            arguments = (id, why, marker, tally.next_token, *self._to_clients)
            return self._call_of(UNVOTE, tally.request, arguments)

        message = tally.call_of(("leave", lost, late), pack)
        heard = partial(self._on_left, on_answer)
        heard_late = partial(self._on_left, partial(_left_late, ballot))
        self._call(
            wire, message, heard, on_late=heard_late, lease=tally.request.terms.ttl, later=later
        )
        return True

    @staticmethod
    def _on_left(on_answer: Callable[[Any], None], reply: Any) -> None:
        if not isinstance(reply, Exception):
            try:
                reply = left_of(reply)
            except BackendError as wrong:
                reply = wrong
        on_answer(reply)

    async def leave_unknown(self, request_id: str, where: str, final: bool) -> Left:
        """Give back a vote for a request that this client does not have; see ``KeptStore``."""
        keys = keys_of(self._prefix, *name_of(where))
        arguments = (request_id, "ended", self._marker_ms if final else 0, 0, *self._to_clients)
        return left_of(await self.server.eval(UNVOTE, _names(keys, request_id), arguments))

    def watch(self, request: StoreRequest, watching: bool) -> None:
        """Start or stop to listen for the end of what blocks this head."""
        self.server.watch(self._keys(request).state, request.id, watching)

    def announce(self, kind: str, name: str) -> None:
        """See ``StoreBase.announce``."""
        self.server.announce(keys_of(self._prefix, kind, name).changes)

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        """See ``StoreBase.observe``."""
        return self.server.observe(keys_of(self._prefix, kind, name).changes, changed)

    # -- for people --------------------------------------------------------------------------------

    async def inspect(self, kind: str, name: str) -> NodeView:
        """Return what this node knows of a name."""
        keys = keys_of(self._prefix, kind, name)
        names = (keys.state, keys.queue, keys.waiters, keys.token)
        return NodeView.of(await self.server.eval(INSPECT_VOTES, names, hurry=True))

    def names(self, match: str) -> AsyncIterator[str]:
        """Iterate over the names that this node knows and that match the glob."""
        return names_of(self.server, match)

    async def break_votes(self, name: str, ids: Collection[bytes] | None) -> set[str]:
        """Release the holders at this node, or these requests; return the ids of those."""
        keys = keys_of(self._prefix, "lock", name)
        names = (keys.state, keys.queue, keys.waiters, keys.token, keys.broken)
        which = "all" if ids is None else b" ".join(ids).decode()
        arguments = (*self._to_clients, self._marker_ms, which)
        reply = await self.server.eval(BREAK_VOTES, names, arguments, hurry=True)
        try:
            return {id.decode() for id in reply}
        except (TypeError, AttributeError) as wrong:
            raise wrong_shape("break_votes", reply) from wrong

    # -- calls -------------------------------------------------------------------------------------

    def _keys(self, request: StoreRequest) -> Keys:
        return keys_of(self._prefix, request.kind, request.name)

    def _call_of(self, script: Script, request: StoreRequest, arguments: Words) -> Call:
        return Call.of(script, _names(self._keys(request), request.id), arguments)

    def _call(
        self,
        wire: Wire,
        message: Call,
        on_result: Callable[[Any], None],
        *,
        lease: float,
        on_late: Callable[[Any], None] | None = None,
        tally: Tally | None = None,
        later: bool = False,
    ) -> None:
        """Run a script, and give its result or an exception.

        :param lease: what hangs on the answer (seconds); see ``Patience``.
        :param on_late: called with a result that comes later than that.
        :param tally: with a vote. It is not asked for again when the request has been left meanwhile.
        """
        is_pointless = _never if tally is None else lambda: tally.leaving
        sent = now()

        def heard(result: Any) -> None:
            if isinstance(result, Unanswered) and not wire.lost.done():
                self._ran_out(sent)
            on_result(result)

        self.server.call(
            wire,
            message,
            heard,
            within=None if later else self.patience.within(lease),
            later=later,
            is_pointless=is_pointless,
            on_late=on_late,
        )

    def _ran_out(self, sent: float) -> None:
        """Be more patient, once for all that was sent before anybody knew."""
        if sent >= self._ran_out_at:
            self._ran_out_at = now()
            self.patience.ran_out()

    async def tell_lengths(self, told: Sequence[int]) -> Any:
        """Tell and ask for the leases in use; return what the node keeps, or raise."""
        async with asyncio.timeout(self.patience.learned):
            kept = await self.server.eval(LENGTHS, (f"{self.trust.key}:lengths",), tuple(told))
        self.trust.further.step()
        return kept


def _left_late(ballot: Ballot, answer: Any) -> None:
    if not isinstance(answer, Exception):
        ballot.leave(answer)
        ballot.sent.has_left = True


def _never() -> bool:
    return False


def _names(keys: Keys, request_id: str) -> tuple[str, ...]:
    marker = keys.marker + request_id
    return keys.state, keys.queue, keys.waiters, keys.token, marker, keys.broken


def _key_of_members(prefix: str) -> str:
    """Return the key by which a node is known as a member of the quorum."""
    return f"{prefix}:2:quorum"
