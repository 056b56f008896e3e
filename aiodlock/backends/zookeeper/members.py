"""What lives in a session, and ends with it: requests' places, and observers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..._clock import now
from ..._errors import BackendUnavailable

#: Heartbeats per timeout of the session.
BEATS = 8
#: How many members see to themselves at each heartbeat.
_AT_ONCE = 100


class Member(Protocol):
    """One of them."""

    def on_up(self) -> None:
        """There is a connection again, in the same session. Watches are set again."""

    def on_down(self, error: BackendUnavailable, silent: float) -> None:
        """There is no connection, for so many seconds now."""

    def on_over(self) -> None:
        """The session has expired."""

    def look_after(self) -> None:
        """Once per timeout or so: see whether something was missed. There may be no connection."""


class Members:
    """Those of one session.

    Mutable state: ``looking`` (called at each heartbeat), ``used_at`` (when a member last left), ``_all``,
    ``_beats`` (since all members were put on the round) and ``_round`` (those that have not looked after
    themselves in it yet). ``looking`` and ``_all`` are in order of arrival.
    """

    def __init__(self) -> None:
        self.looking: dict[Callable[[], object], None] = {}
        self.used_at: float = now()
        self._all: dict[Member, None] = {}
        self._beats = 0
        self._round: list[Member] = []

    def __len__(self) -> int:
        return len(self._all)

    def add(self, member: Member) -> None:
        """It lives in the session from now on."""
        self._all[member] = None

    def discard(self, member: Member) -> None:
        """It does not any more."""
        if member in self._all:
            del self._all[member]
            self.used_at = now()

    def on_up(self) -> None:
        """Tell all of them; and so below."""
        for member in list(self._all):
            member.on_up()

    def on_down(self, error: BackendUnavailable, silent: float) -> None:
        for member in list(self._all):
            member.on_down(error, silent)

    def on_over(self) -> None:
        """The session has expired: those who stay are members of the next one."""
        members, self._all = self._all, {}
        for member in members:
            member.on_over()

    def on_beat(self) -> None:
        """A heartbeat was sent. Some members see to themselves: each once per timeout, unless they are
        thousands."""
        for look in list(self.looking):
            look()
        self._beats += 1
        if not self._round and self._beats >= BEATS:
            self._beats, self._round = 0, list(self._all)
        for _ in range(min(_AT_ONCE, len(self._round))):
            member = self._round.pop()
            if member in self._all:
                member.look_after()
