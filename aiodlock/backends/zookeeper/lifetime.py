"""Until when a session certainly lives: the one calculation that everything here rests on.

The leader ends a session when it has not heard of it for the session's timeout. A client talks to a
follower. The follower answers pings by itself, and tells its leader later: the leader asks each follower
every half tick which sessions were heard of since. So "ping sent + timeout" is wrong, and so is "write
sent + timeout": neither answer says that the leader has heard of the session. This class counts only what
it surely has:

1. A write is sent at S. The follower that receives it notes that the session was heard of, not before S.
2. A second write is sent more than half a tick after the first was answered. In between the leader has
   asked its followers. The question and the second write's commit come to the follower in order, so when
   the second write is answered, the follower has answered the question.
3. A third write is sent after that, and is committed. It comes to the leader behind the follower's
   answer. So the leader has heard of the session, not before S, and the session lives until S + timeout
   at least.

No delay of the network can break this: messages between a follower and its leader are never reordered,
and the third write, which a majority had to accept, proves that this leader was still the leader. A new
leader gives each session its whole timeout again. It rests on the leader asking each half tick; ``gap``
leaves it half as long again.

A new connection counts at once: the leader itself creates a session, and the leader is asked when a
session goes on with another server. One committed write on that connection proves that it was the leader.

Any write serves. The chain belongs to one connection: a follower that changes its leader closes its
connections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..._clock import local_deadline, now

#: How long the leader may take to ask its followers, in ticks. It does so every half tick.
_GAP = 0.75


class Lifetime:
    """One session's, from its creation to its end.

    Mutable state: ``deadline`` (it certainly lives until then; grows only, unless the servers shorten the
    session, which ends it), ``over`` (a server said so, or it is not used any more; see ``end``),
    ``_timeout`` (milliseconds), ``_attached`` (when the message that began this connection was sent,
    until a write is committed), ``_heard`` (writes: when they were sent and when answered), ``_told``
    (when the write that followed on a question of the leader was answered, and the moment of which it
    tells), ``_waiting`` (who waits for the deadline to move).
    """

    def __init__(self, tick: float) -> None:
        self.deadline: float = 0.0
        self.over: bool = False
        self._gap = _GAP * tick
        self._timeout = 0
        self._attached: float | None = None
        self._heard: deque[tuple[float, float]] = deque()
        self._told: deque[tuple[float, float]] = deque()
        self._waiting: list[Callable[[], object]] = []

    def on_progress(self, moved: Callable[[], object]) -> None:
        """Have ``moved`` called once when the deadline has moved."""
        self._waiting.append(moved)

    def attached(self, sent: float, timeout: int) -> None:
        """A server has taken the session over from the one before, or created it."""
        self._heard.clear()
        self._told.clear()
        self._attached, self._timeout = sent, timeout

    def shortened(self, sent: float, timeout: int) -> None:
        """A server has taken the session over, and lets it live for less than the one before did."""
        self.deadline = min(self.deadline, local_deadline(sent, timeout))

    def end(self) -> None:
        """A server said so, or what closes the session is about to be sent: nothing is held in it."""
        self.over, self.deadline = True, min(self.deadline, now())

    def committed(self, sent: float, answered: float) -> None:
        """A write was answered: a majority of the servers has it."""
        before = self.deadline
        if self._attached is not None:
            self._lives_since(self._attached)
            self._attached = None
        while self._told and self._told[0][0] <= sent:
            self._lives_since(self._told.popleft()[1])
        moment = 0.0
        while self._heard and self._heard[0][1] + self._gap <= sent:
            moment = self._heard.popleft()[0]
        if moment:
            self._told.append((answered, moment))
        # A busy client's writes need not all be remembered.
        if not self._heard or self._heard[-1][0] + self._gap / 8 <= sent:
            self._heard.append((sent, answered))
        if self.deadline > before:
            waiting, self._waiting = self._waiting, []
            for moved in waiting:
                moved()

    def _lives_since(self, moment: float) -> None:
        if not self.over:
            self.deadline = max(self.deadline, local_deadline(moment, self._timeout))
