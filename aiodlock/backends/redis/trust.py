"""Whether a node of a quorum may be believed: not for a while after a restart, or a step of its clock.

A server that restarts without its data has forgotten whom it voted for. Counted at once, it could help a
second holder to a majority, so it is waited for until every lease it may have forgotten is over
("delayed restarts"; Antirez, 2015). A restart is told by the server's run id, which each node keeps under
a key of its own from when it was first believed. Where no node has such a key the quorum is new, and
there is nothing that could have been forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ..._clock import now
from ..._errors import BackendError
from ..base import Unanswered
from .wire import ReplyError, Wire

_logger = logging.getLogger("aiodlock")

#: Two clocks part by so much at most, as a share of the time; more than this besides is a step.
_SLEW, _SLACK = 0.001, 0.1
_NEVER = float("inf")
#: Written to a node that is not believed yet: the quorum is not new.
_NOT_YET = b"-"


class Trust:
    """What one client knows of one node.

    Mutable state: ``_run`` (the run id of the server it last met), ``_since`` (from when on the node is
    believed), ``_old_enough_at``, ``_key_seen`` (what the node keeps under its key), ``_marked_until``,
    ``_offset`` (the node's clock less ours: bounds, and when they were seen).
    """

    def __init__(self, key: str, restart_delay: float, retention_ms: int) -> None:
        self._key = key
        self._delay = restart_delay
        self._key_ttl = max(retention_ms, round(restart_delay * 2000))
        self._run: bytes | None = None
        self._since = _NEVER
        self._old_enough_at = _NEVER
        self._key_seen: bytes | None = None
        self._marked_until = 0.0
        self._offset: tuple[float, float, float] | None = None

    @property
    def given(self) -> bool:
        """Whether the node is believed at this moment."""
        return now() >= self._since

    @property
    def undecided(self) -> bool:
        """Whether it is young, and nobody has said that it may be believed."""
        return self._run is not None and self._since == _NEVER

    async def meet(self, wire: Wire, described: str) -> None:
        """Find out, on a new connection, whether this is the server that was met before."""
        sent = now()
        clock = await wire.send("TIME")
        try:
            self.hear_clock(int(clock[0]) + int(clock[1]) / 1e6, sent)
        except (ValueError, TypeError, IndexError) as wrong:
            raise BackendError(f"TIME has the wrong shape: {clock!r:.100}") from wrong
        # A store inside a process has no INFO, and is never restarted.
        if self._delay == 0 or described.startswith("memory:"):
            self._since = 0.0
            return
        try:
            facts = _facts(await wire.send("INFO", "server"))
            key_seen = await wire.send("GET", self._key)
        except ReplyError as refused:
            if refused.code in ("NOPERM", "ERR"):  # a service may have taken the command away
                raise BackendError(
                    f"a quorum needs INFO, and GET of {self._key}: {refused}"
                ) from refused
            raise
        run, uptime = facts.get(b"run_id", b""), int(facts.get(b"uptime_in_seconds", b"0"))
        moment = now()
        if self._run is None:
            self._old_enough_at = moment + self._delay - uptime
            self._key_seen = key_seen
            known = key_seen == run
            self._since = 0.0 if known or moment >= self._old_enough_at else _NEVER
        elif self._run != run:
            self._old_enough_at = self._since = moment + self._delay - uptime
            self._key_seen, self._marked_until = key_seen, 0.0
            _logger.warning(
                "%s was restarted: it counts again in %.1f s",
                described,
                max(0.0, self._since - moment),
                extra={"event": "node_restarted"},
            )
        self._run = run

    def hear_clock(self, clock: float, sent: float) -> None:
        """Take the node's time, from the answer to a message that was sent at ``sent``."""
        moment = now()
        low, high = clock - moment, clock - sent
        if self._offset is not None:
            low_before, high_before, heard = self._offset
            slew = _SLEW * (moment - heard)
            low_before, high_before = low_before - slew, high_before + slew
            if low > high_before + _SLACK or high < low_before - _SLACK:
                self._on_step(low - high_before if low > high_before else high - low_before)
            else:
                # Both were true: a slow answer does not make the time less certain.
                low, high = max(low, low_before), min(high, high_before)
                low, high = min(low, high), max(low, high)
        self._offset = low, high, moment

    def _on_step(self, by: float) -> None:
        if self._delay == 0:
            return
        self._since = max(self._since, now() + self._delay)
        _logger.warning(
            "the clock of a node stepped by %.1f s: it counts again in %.1f s",
            by,
            self._delay,
            extra={"event": "node_clock_stepped"},
        )

    def time_at(self, moment: float) -> float | None:
        """Return the node's time as last heard plus what passed since; None if never heard."""
        return None if self._offset is None else moment + sum(self._offset[:2]) / 2

    # -- what the nodes tell each other through their clients ------------------------------------------

    @staticmethod
    async def judge(nodes: Sequence[tuple[Trust, Wire | None]], majority: int) -> bool:
        """Decide about young nodes, and write down what was decided; return whether some are undecided."""
        met = [
            (trust, wire) for trust, wire in nodes if wire is not None and trust._run is not None
        ]
        for trust, wire in met:
            if trust.undecided:
                trust._key_seen = await _ask(wire, "GET", trust._key) or trust._key_seen
        is_new = len(met) >= majority and not any(trust._key_seen for trust, _ in met)
        for trust, wire in met:
            moment = now()
            if trust.undecided:
                if is_new or trust._key_seen == trust._run:
                    trust._since = 0.0
                elif moment >= trust._old_enough_at:
                    trust._since = moment
            if trust.given and moment >= trust._marked_until:
                assert trust._run is not None
                await _ask(wire, "SET", trust._key, trust._run, "PX", trust._key_ttl)
                trust._key_seen, trust._marked_until = trust._run, moment + trust._key_ttl / 3000
            elif not trust.given and trust._key_seen is None:
                await _ask(wire, "SET", trust._key, _NOT_YET, "PX", trust._key_ttl, "NX")
                trust._key_seen = _NOT_YET
        return any(trust.undecided for trust, _ in met)


async def _ask(wire: Wire, *command: bytes | str | int) -> Any:
    try:
        return await wire.send(*command)
    except (ReplyError, Unanswered) as failed:  # it is asked again
        _logger.debug("%s: %s", command[0], failed)
        return None


def _facts(info: Any) -> dict[bytes, bytes]:
    lines = bytes(info).splitlines() if isinstance(info, bytes | bytearray) else []
    return dict(line.split(b":", 1) for line in lines if b":" in line)
