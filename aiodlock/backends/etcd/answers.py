"""How fast the cluster answers what needs a leader, and whether it answers at all."""

from __future__ import annotations

from ..._clock import now
from ..._patience import Further, Patience

#: The only endpoint is given up after so much silence: there is no other one, but its connection may be
#: dead (seconds).
_ALONE = 5.0
#: How far entering has come with a connection. Each answer that counts is a step more.
_ACCEPTED, _CONNECTED = 1, 2


class Answers:
    """Those of one client.

    Mutable state: ``patience``, ``further`` (how far entering has come), ``heard_at`` (when the last answer
    came), ``_silent_since`` (when the first call was sent that ran out without any answer since),
    ``_ran_out_at``, ``_number``.
    """

    def __init__(self, *, alone: bool) -> None:
        """:param alone: there is one endpoint."""
        self.patience: Patience = Patience()
        self.further: Further = Further()
        self.heard_at: float = 0.0
        self.alone: bool = alone
        self._silent_since = self._ran_out_at = 0.0
        self._number = 0

    def accepted(self) -> None:
        """A machine has accepted a connection."""
        self.further.reach(_ACCEPTED)

    def connected(self, took: float) -> None:
        """There is a connection. It took so long (seconds)."""
        self.further.reach(_CONNECTED, took)

    def came_further(self, took: float = 0.0) -> None:
        """An answer came that brings entering further."""
        self._number += 1
        self.further.reach(_CONNECTED + self._number, took)

    def answered(self, sent: float) -> None:
        """What needs a leader was answered, late or not."""
        self.heard_at = now()
        self.came_further(self.heard_at - sent)
        self.patience.answered(self.heard_at - sent)

    def gives_up(self, sent: float) -> bool:
        """Count that a call ran out; tell whether that is the end of the connection: nothing was answered
        since it was sent, and there are other endpoints, or this one has been silent for long."""
        if self.heard_at >= sent:
            return False
        if self._silent_since <= self.heard_at:
            self._silent_since = sent
        if sent >= self._ran_out_at:  # what was sent together runs out once
            self._ran_out_at = now()
            self.patience.ran_out()
        return not self.alone or now() - self._silent_since >= _ALONE
