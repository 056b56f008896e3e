"""How long an answer may take: learned from the answers, by one rule for every store.

The estimate is TCP's for its retransmission timer (RFC 6298): a smoothed round trip plus four times its
smoothed deviation. It differs in four points:

- Every request has an id, and repeating it is harmless. So an answer that comes late is matched with the
  sending that it answers, and is a sample like any other (RFC 6298 must ignore it, by Karn's rule). Without
  late samples, a store that becomes slow stays too slow for ever.
- When an answer does not come in time, the message is repeated; the connection is not cut.
- An answer that is much quicker than the last ones counts little for the deviation, as in Linux's TCP. Else
  a store that becomes quick seems slower at first, by far, and for many answers.
- At least a quarter of the round trip is added, because the deviation of steady answers shrinks to nothing.

Whether a connection is dead is another question: it is, when nothing *of its kind* is answered any more.
A call that needs a leader, a quorum or a row is not vouched for by pings. Authentication has a ``Patience``
of its own, because a store may hash a password for much longer than it works on anything else.
"""

from __future__ import annotations

from ._clock import now

#: The shortest and the longest time that an answer is waited for (seconds).
LEAST, LONGEST = 1.0, 60.0
#: Entering a client is given up so long after the last answer that brought it further, and in all
#: (seconds): within 5 s, and within 30 s.
ENTERS_WITHIN, ENTERS_IN_ALL = 4.8, 29.5
#: What does not wait for a turn answers or raises within twice as long as an answer may take, 2 s at least.
#: A part of that is for what is done besides.
_SOON = 1.8
#: RFC 6298, section 2: the weights of a new sample, and how many deviations are added.
_GAIN, _DEVIATION_GAIN, _DEVIATIONS = 1 / 8, 1 / 4, 4
#: The least that is added, as a part of the round trip.
_LEAST_ADDED = 1 / 4
#: What part of the least time is a short one.
_SHORT = 1 / 10


def soon(answers_within: float) -> float:
    """Return how long a call may take that does not wait for a turn.

    :param answers_within: how long one answer may take (seconds).
    """
    return _SOON * max(answers_within, LEAST)


def left_of(timeout: float | None, since: float) -> float | None:
    """Return what is left of a timeout that began then. None (for ever) and 0 (try once) stay.

    It is never 0 for another: that would mean to try once.
    """
    return max(0.001, since + timeout - now()) if timeout else timeout


class Further:
    """When entering has last come further. Only what never came as far before counts: a connection that is
    refused again and again at the same step does not.

    Mutable state: ``at`` (on our clock, seconds; in the future if more is expected only then), ``_steps``.
    """

    def __init__(self) -> None:
        self.at: float = 0.0
        self._steps = 0

    def step(self) -> None:
        """One more answer has come, of those that come once."""
        self.reach(self._steps + 1)

    def reach(self, steps: int, expected: float = 0.0) -> None:
        """So many answers have come, on one connection.

        :param expected: how long the next one takes, judging by these (seconds).
        """
        if steps > self._steps:
            self._steps, self.at = steps, now() + expected

    def go_on(self) -> None:
        """What is awaited now may take long, and the store shows that it works on it."""
        self.at = now()


class Patience:
    """How long the answers of one kind of call may take. Seconds everywhere; no clock of its own.

    Mutable state: ``_smoothed`` (round trip; None before the first sample), ``_deviation``, ``_doublings``
    (how often in a row nothing came in time).
    """

    def __init__(self, least: float = LEAST, longest: float = LONGEST) -> None:
        self._least, self._longest = least, longest
        self._smoothed: float | None = None
        self._deviation = 0.0
        self._doublings = 0

    def __repr__(self) -> str:
        return f"<Patience {self.learned:.3g} s>"

    @property
    def learned(self) -> float:
        """How long the next answer may take, whatever hangs on it."""
        return min(self.usual * 2.0**self._doublings, self._longest)

    @property
    def knows(self) -> bool:
        """Whether there was an answer yet."""
        return self._smoothed is not None

    @property
    def is_short(self) -> bool:
        """Whether answers take so much less than the least time that a few samples tell of all."""
        return self.learned <= self._least and self._estimate < _SHORT * self._least

    @property
    def _estimate(self) -> float:
        if self._smoothed is None:
            return 0.0
        return self._smoothed + max(_DEVIATIONS * self._deviation, _LEAST_ADDED * self._smoothed)

    @property
    def usual(self) -> float:
        """The same while all answers come in time, at least the least time: silence does not stretch it."""
        return min(max(self._least, self._estimate), self._longest)

    @property
    def typical(self) -> float:
        """How long an answer takes lately, and a quarter more; at least the least time. What is late once,
        because a machine was busy, hardly stretches it."""
        return min(max(self._least, (self._smoothed or 0.0) * (1 + _LEAST_ADDED)), self._longest)

    @property
    def expected(self) -> float:
        """How long the next answer takes, judging by the last ones: without the least time, as long as all
        come in time. 0 before the first one."""
        return self.learned if self._doublings else min(self._estimate, self._longest)

    def within(self, lease: float | None = None) -> float:
        """Return how long an answer may take on which a lease of this length hangs (None: no lease does).

        At most a third of the lease, so that a message that is lost can be repeated in time. The least time
        wins over that: a shorter wait would only repeat what is being answered.
        """
        if lease is None:
            return self.learned
        return max(self._least, min(self.learned, lease / 3))

    def silence(self, lease: float) -> float:
        """Return after what silence a connection counts as dead, on which a lease of this length hangs.

        One late answer ends no connection: it is given up after three times as long as an answer may take.
        Where a third of the lease is less, that: but never before an answer may be late.
        """
        return max(self.learned, min(3 * self.learned, lease / 3))

    def answered(self, took: float) -> None:
        """An answer came, late or not, so many seconds after the sending that it answers."""
        self._doublings = 0
        if self._smoothed is None:
            self._smoothed, self._deviation = took, took / 2
            return
        later = took - self._smoothed
        off = abs(later) if later >= -self._deviation else -later * _GAIN
        self._deviation += _DEVIATION_GAIN * (off - self._deviation)
        self._smoothed += _GAIN * later

    def ran_out(self) -> None:
        """No answer came in time: wait twice as long for the next one, until there is an answer."""
        if self.learned < self._longest:
            self._doublings += 1
