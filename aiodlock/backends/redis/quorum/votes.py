"""What the nodes of a quorum have said of one request, and what follows from it. No I/O.

A request holds when a majority of all nodes has its votes *confirmed*: each wrote the token that the
request chose, and none of them votes for another while that vote's lease lasts. Of any two majorities at
least one node is in both, so two exclusive requests never hold at once, and the later one's token, which is
not smaller than any of its votes' tokens, is larger than the earlier one's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...._clock import now
from ...._model import Gone, Left, StoreRequest, first_request
from ..messages import Call
from ..replies import local_deadline, wrong_shape
from .broadcast import Broadcast
from .questions import Questions

#: ``v``: given, and may be asked back. ``c``: confirmed. ``a``: its owner holds at this node already.
Stage = Literal["v", "c", "a"]
_VOTED = frozenset(("v", "c", "a"))
_STAGES: dict[bytes, Stage] = {b"v": "v", b"c": "c", b"a": "a"}


@dataclass(frozen=True, slots=True)
class Voted:
    """The node votes for the request, certainly until ``deadline``."""

    token: int
    deadline: float
    stage: Stage
    asked_back: bool


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits for the node's vote; see ``Waiting``.

    A vote that the node gives from then on has a larger token than ``floor``.
    """

    deadline: float
    look_at: float | None
    floor: int


@dataclass(frozen=True, slots=True)
class Denied:
    """The node did not queue the request; see ``Refused``."""

    why: Literal["busy", "deadlock"]


Answer = Voted | Queued | Denied | Gone


def read_answer(reply: Any, sent: float) -> tuple[Answer, float]:
    """Return what a node says of a request, and its clock in seconds."""
    try:
        match reply:
            case [b"vote", token, left, stage, back, clock]:
                deadline = local_deadline(sent, int(left))
                answer: Answer = Voted(int(token), deadline, _STAGES[stage], back == b"1")
            case [b"waiting", left, look, floor, clock]:
                look_at = now() + int(look) / 1000 if int(look) >= 0 else None
                answer = Queued(local_deadline(sent, int(left)), look_at, int(floor))
            case [b"busy", clock]:
                answer = Denied("busy")
            case [b"deadlock", clock]:
                answer = Denied("deadlock")
            case [b"gone", b"broken" | b"expired" | b"gone" as reason, clock]:
                answer = Gone(reason.decode())
            case _:
                raise wrong_shape("vote", reply)
        return answer, int(clock) / 1e6
    except (ValueError, TypeError, KeyError, OverflowError) as wrong:
        raise wrong_shape("vote", reply) from wrong


class Sent:
    """What one node was sent about one request, and whether it was left there.

    Mutable state, of the voter: ``on`` (the connection on which it was asked last; None for never),
    ``pending`` (questions on their way), ``ambiguous`` (one may be carried out at any time). And for the
    leave: ``unanswered`` (it was told to release, and its answer was lost), ``has_left`` (it has heard of
    the leave), ``released`` (it has released a vote that was live).
    """

    __slots__ = ("ambiguous", "has_left", "on", "pending", "released", "unanswered")

    def __init__(self) -> None:
        self.on: object | None = None
        self.pending: int = 0
        self.ambiguous: bool = False
        self.unanswered: bool = False
        self.has_left: bool = False
        self.released: bool = False

    def asks(self, wire: object) -> None:
        """A vote is asked for on this connection."""
        self.ambiguous = self.ambiguous or self.may_overtake(wire)
        self.on = wire
        self.pending += 1

    def may_overtake(self, wire: object | None) -> bool:
        """Whether what was asked for may be carried out after what is sent on this connection now."""
        # What is in flight on this very wire is carried out before.
        return self.ambiguous or (self.pending > 0 and self.on is not wire)


class Ballot:
    """What one node has said of one request.

    Mutable state: ``stage`` (``q`` for queued, None for unknown), ``token``, ``noticed`` (only a notice has
    announced this vote, no answer yet), ``deadline`` (until when the node certainly keeps vote or place),
    ``look_at``, ``given_back`` (the token of the vote that was yielded: it does not count any more,
    whatever answers still say), ``yielding`` (a yield is on its way),
    ``broken`` (the largest token that an operator broke here), ``floor`` (a notice with a token that
    is not larger is older than an answer), ``highest`` (the largest token it named), ``healing`` (the node
    had lost the vote of a holder: it counts again after the others were seen to suffice).
    """

    __slots__ = (
        "asked_back",
        "broken",
        "deadline",
        "floor",
        "given_back",
        "healing",
        "highest",
        "look_at",
        "node",
        "noticed",
        "questions",
        "sent",
        "stage",
        "token",
        "yielding",
    )

    def __init__(self, node: int) -> None:
        self.node: int = node
        self.questions: Questions = Questions()
        self.sent: Sent = Sent()
        self.stage: Stage | Literal["q"] | None = None
        self.token: int = 0
        self.deadline: float = 0.0
        self.look_at: float | None = None
        self.asked_back: bool = False
        self.noticed: bool = False
        self.given_back: int = 0
        self.yielding: bool = False
        self.broken: int = 0
        self.floor: int = 0
        self.highest: int = 0
        self.healing: bool = False

    def counts_at(self, moment: float) -> bool:
        """Whether the node certainly votes for the request at this moment."""
        voted = self.stage in _VOTED and self.token != self.given_back
        return voted and moment < self.deadline

    def take(self, answer: Answer) -> None:
        match answer:
            case Voted(token) if token <= self.broken:
                self.take(Gone("broken"))  # the break has overtaken the answer
            case Voted(token, deadline, stage, asked_back):
                self.stage, self.token, self.asked_back = stage, token, asked_back
                self.noticed = False
                if deadline > self.deadline:
                    self.deadline = deadline
                if token > self.highest:
                    self.highest = token
                self.look_at = None
                if stage == "a" or (stage == "c" and not self.yielding):
                    self.given_back = 0  # such a vote is never taken back, whatever its token
            case Queued(deadline, look_at, floor):
                if deadline > self.deadline:
                    self.deadline = deadline
                if floor > self.floor:
                    self.floor = floor
                if not self.noticed or self.token <= floor:
                    self.stage, self.token, self.asked_back = "q", 0, False
                    self.noticed, self.look_at = False, look_at
                # Else a notice has overtaken the answer. What an answer told is never newer than the next
                # answer: a node that came back empty, with a slower clock, may have small tokens again.
            case _:
                self.stage, self.token, self.asked_back, self.deadline = None, 0, False, 0.0
                self.noticed, self.look_at = False, None

    @property
    def disowned(self) -> bool:
        """Whether the node may still vote for the request, which has given that vote back."""
        return self.stage == "v" and self.token == self.given_back

    def lose(self, token: int) -> None:
        """An operator broke the vote with this token. What tells of it and is still to come is stale."""
        self.broken = max(self.broken, token)
        if self.stage in _VOTED and self.token <= self.broken:
            self.take(Gone("broken"))

    def restarted(self) -> None:
        """The node has become another server, which may know of nothing, and begin with smaller tokens."""
        self.take(Gone("gone"))
        self.given_back = self.floor = self.broken = 0

    def leave(self, answer: Left | Exception) -> None:
        """Take the answer to a leave. A node that has forgotten the request may have released it before."""
        sent = self.sent
        if isinstance(answer, Exception):
            sent.unanswered = True
            return
        before = sent.unanswered and self.stage in _VOTED and answer == Left("gone", "gone")
        sent.released = sent.released or before or answer.what == "released"

    def notice(self, token: int) -> None:
        """A notice: the node votes for the request now, unless it is an old one."""
        self.highest = max(self.highest, token)
        known = self.stage in _VOTED and self.token != self.given_back
        if not known and token > max(self.given_back, self.floor, self.broken):
            self.stage, self.token, self.noticed = "v", token, True


class Fence:
    """The tokens that were written for one request.

    Mutable state: ``message`` (the one that writes the token, while it is on its way), ``written`` (the
    token that was written last) and ``vain`` (how often in a row, as long as too few nodes took it),
    ``tried`` (the largest one that was written), ``renounced`` (the largest one that a question has named:
    a vote that was confirmed with it is open when that arrives, so it is not written any more).
    """

    __slots__ = ("message", "renounced", "tried", "vain", "written")

    def __init__(self) -> None:
        self.message: Broadcast[Answer] | None = None
        self.written: int = 0
        self.vain: int = 0
        self.tried: int = 0
        self.renounced: int = 0

    def writes(self, token: int) -> None:
        """The token is about to be written."""
        # A question between has renounced the token, so the next one takes its place.
        self.vain = self.vain + 1 if token <= self.written + 1 else 1
        self.written, self.tried = token, max(token, self.tried)


class Tally:
    """One request, over all nodes.

    Mutable state: ``token`` (the one it holds with; 0 before), ``holds_until`` (a majority certainly keeps
    that token until then), ``fence`` (how it comes to that), ``extension`` (the message that extended what
    it came to hold meanwhile), ``waiting`` (its client knows that it is queued), ``leaving``, ``longest``
    (the longest lease that any node was asked for), ``packed`` (what was sent last, and what tells it from
    other messages of the request).
    """

    def __init__(self, request: StoreRequest, ticket: int, nodes: int) -> None:
        self.request: StoreRequest = request
        self.ticket: int = ticket
        self.majority: int = nodes // 2 + 1
        self.ballots: list[Ballot] = [Ballot(node) for node in range(nodes)]
        self.token: int = 0
        self.holds_until: float = 0.0
        self.fence: Fence = Fence()
        self.extension: Broadcast[Answer] | None = None
        self.waiting: bool = False
        self.leaving: bool = False
        self.longest: float = 0.0
        self.packed: tuple[tuple[object, ...], Call] | None = None

    @property
    def decides(self) -> bool:
        """Whether it holds, or its token is being written: no vote is asked for or given back then."""
        return self.token > 0 or self.fence.message is not None

    def call_of(self, about: tuple[object, ...], pack: Callable[[], Call]) -> Call:
        """Return the message about this, packed once for all nodes."""
        if self.packed is None or self.packed[0] != about:
            self.packed = about, pack()
        return self.packed[1]

    def votes(self, trusted: Callable[[int], bool]) -> list[Ballot]:
        """Return the votes that count, of trusted nodes."""
        moment = now()
        return [
            ballot for ballot in self.ballots if ballot.counts_at(moment) and trusted(ballot.node)
        ]

    def has_majority(self, trusted: Callable[[int], bool]) -> bool:
        """Tell whether the votes that count are enough."""
        majority = self.majority
        told = sum([ballot.stage in _VOTED for ballot in self.ballots])
        return told >= majority and len(self.votes(trusted)) >= majority

    def token_of_owner(self, votes: Sequence[Ballot]) -> int:
        """Return the token that the owner holds with already, by a majority of these votes; else 0."""
        tokens = [ballot.token for ballot in votes if ballot.stage == "a"]
        token = next((token for token in tokens if tokens.count(token) >= self.majority), 0)
        return 0 if self.was_broken(token) else token

    def agreed(self, votes: Sequence[Ballot]) -> list[Ballot]:
        """Return the votes with the token that a majority of all nodes gave by themselves, if there is one.

        It is as if each had been told to take it: the request holds, unless other requests depend on what
        the nodes know: requests of the same owner, and requests that its lock-delay keeps out.
        """
        request = self.request
        if request.terms.lock_delay or first_request(request.owner) != request.id:
            return []
        least = self.least_token
        for vote in votes[: len(self.ballots) - self.majority + 1]:
            if vote.token < least:
                continue
            same = [one for one in votes if one.token == vote.token and one.stage != "a"]
            if len(same) >= self.majority:
                return same
        return []

    @property
    def broken(self) -> int:
        """The largest token that an operator broke at any node: it is about to be broken at the others."""
        return max(ballot.broken for ballot in self.ballots)

    def was_broken(self, token: int) -> bool:
        """Whether an operator broke this very token at a node, and so the hold of the owner that has it."""
        return any(ballot.broken == token for ballot in self.ballots)

    @property
    def least_token(self) -> int:
        """The smallest token that the request may come to hold with, but for its owner's."""
        return max(self.broken, self.fence.renounced) + 1

    @property
    def next_token(self) -> int:
        """The token that the next holder is to have on every node; 0 when no node has told any."""
        highest = max(ballot.highest for ballot in self.ballots)
        return highest + 1 if highest else 0

    def confirmed(self, token: int, trusted: Callable[[int], bool]) -> list[Ballot]:
        """Return the votes that carry the token, as their nodes said."""
        votes = self.votes(trusted)
        return [vote for vote in votes if vote.stage == "c" and vote.token == token]

    def deadline(self, ballots: Sequence[Ballot]) -> float:
        """Return until when a majority keeps its word: its latest by the majority's number; 0 for never."""
        moments = sorted((ballot.deadline for ballot in ballots), reverse=True)
        return moments[self.majority - 1] if len(moments) >= self.majority else 0.0

    def hold(self, token: int, votes: Sequence[Ballot]) -> float:
        """Hold, or go on, by these votes that have the token; return their deadline."""
        deadline = self.deadline(votes)
        self.token, self.holds_until = token, max(self.holds_until, deadline)
        return deadline

    def left(self, answers: Mapping[int, Left]) -> Left:
        """Return what the answers to a leave come to: released, if a majority may have released it."""
        whats = [answer.what for answer in answers.values()]
        if self.token:
            if self._released(answers, silent=True):
                return Left("released")
        elif "released" in whats or "withdrawn" in whats:
            return Left("released" if "released" in whats else "withdrawn")
        reasons = [answer.reason for answer in answers.values() if answer.what == "gone"]
        return Left("gone", next((one for one in ("broken", "expired") if one in reasons), "gone"))

    def left_for_certain(self, answers: Mapping[int, Left]) -> bool:
        """Whether the nodes that are still silent cannot change what these answers come to."""
        if not self.token or all(answer.what == "released" for answer in answers.values()):
            return True
        may = self._released(answers, silent=True)
        return not may or self._released(answers, silent=False)

    def _released(self, answers: Mapping[int, Left], *, silent: bool) -> bool:
        released = [
            ballot
            for ballot in self.ballots
            if ballot.sent.released
            or (
                silent
                and ballot.node not in answers
                and ballot.stage in _VOTED
                and ballot.token == self.token
            )
        ]
        return len(released) >= self.majority


def worst_of(gone: Sequence[Gone]) -> Gone:
    """Return why a request is gone when nodes give several reasons."""
    reasons = [answer.reason for answer in gone]
    return Gone(next((known for known in ("broken", "expired") if known in reasons), "gone"))
