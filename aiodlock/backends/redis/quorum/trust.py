"""Whether a node of a quorum may be believed: not soon after a restart, or after a step of its clock.

A server that restarts without its data has forgotten its votes. A server that takes another one's address
has never known them. If it counted at once, it could help a second holder to a majority. So its votes do
not count until every lease that it may not know of has ended ("delayed restarts"; Antirez, 2015).

- A server is recognized by its run id.
- A mark on the server tells since when it has belonged to the quorum. The first client that meets the
  server writes the mark. The server's uptime tells nothing: it may have run elsewhere.
- When no node has a mark, the quorum is new, and nothing can have been forgotten. The client that finds so
  marks all nodes. Others that see some of these marks wait a moment for the rest.
- The mark also tells for how long the node does not count: as long as the longest lease in use when it came
  back (``delays``).
- Who holds goes on by what a node says whose clock has stepped: it has kept that very vote. New votes of it
  wait until leases are over that it may have ended early.
- A number that a node has made up once stands in the mark, too: a copy of its data is the same node.
- Every answer about a vote tells the node's time. A node that has none to give is asked for its time:
  otherwise, after long, a step of its clock would pass for drift.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import Any

from ...._clock import now
from ...._errors import BackendError
from ...._patience import Further
from ...base import Unanswered
from ..refusals import ReplyError
from ..wire import DriverWire, Wire
from .delays import CAP, Delays

_logger = logging.getLogger("aiodlock")

#: Two clocks part by so much at most, as a share of the time; more than this besides is a step.
_SLEW, _SLACK = 0.001, 0.1
#: A node that has not told its time for so long is asked for it (seconds). The longer it is, the larger are
#: the steps that pass for drift.
_HEAR_AGAIN = 10.0
_NEVER = float("inf")
#: How long a node without a mark may still get one from a client that takes the quorum for new (seconds).
_MARKED_WITHIN = 1.0
#: After it came back, a node's mark tells the longest lease in use so soon (seconds).
_SETTLED_AFTER = 20.0
#: In a mark, instead of the node's time: it has been there since the quorum was new.
_EVER = 0


class Trust:
    """What one client knows of one node, in whichever session: another one's node is no new quorum's.

    Mutable state: ``server``, ``_run`` (the run id of the server it last met), ``_since`` (from when on the
    node is believed), ``_steady_at`` (from when on its clock is), ``mark`` (what the node keeps under its
    key: run id, the node's time in us at which it was first met, for how many ms it did not count from then
    on, its id), ``unsettled`` (it came back, and the others were not asked for the longest lease since),
    ``_is_news`` (of which it does not know yet), ``_unmarked_at`` (when it was
    first seen without one), ``_marked_until``, ``_offset`` (the node's clock less ours: bounds, and when
    they were seen).
    """

    def __init__(self, key: str, delays: Delays, retention_ms: int) -> None:
        self.key = key
        #: Answers about trust count for entering, too.
        self.further: Further = Further()
        self._delays = delays
        self._retention_ms = retention_ms
        #: The run id of the server that answers at this address: two nodes with one are one server.
        self.server: bytes = b""
        self._run: bytes | None = None
        self._since = _NEVER
        self._steady_at = 0.0
        #: Whether the other nodes have to be asked for the longest lease in use before it counts.
        self.unsettled: bool = False
        self.mark: bytes | None = None
        self._is_news = False
        self._unmarked_at: float | None = None
        self._marked_until = 0.0
        self._offset: tuple[float, float, float] | None = None

    @property
    def given(self) -> bool:
        """Whether the node is believed at this moment."""
        return now() >= self.counts_at

    @property
    def keeps(self) -> bool:
        """Whether what it says of a vote that it keeps is believed."""
        return not self.unsettled and now() >= self._since

    @property
    def id(self) -> bytes:
        """The id that the node has made up; empty if it is not known."""
        return _words(self.mark)[3]

    @property
    def is_met(self) -> bool:
        """Whether it is known which server answers."""
        return self._run is not None

    @property
    def counts_at(self) -> float:
        """From when on the node is believed; infinity while that is not known."""
        return _NEVER if self.unsettled else max(self._since, self._steady_at)

    @property
    def was_founding(self) -> bool:
        """Whether it has been there since the quorum was new."""
        return self.mark is not None and _moment_in(self.mark) == _EVER

    @property
    def undecided(self) -> bool:
        """Whether it is not known yet since when it has been there."""
        return self._run is not None and self._since == _NEVER

    async def meet(self, wire: Wire, described: str) -> bool:
        """Find out, on a new connection, whether this is the server that was met before.

        :returns: True when it is another one, or the same one restarted.
        """
        heard_before = self._offset[2] if self._offset is not None else 0.0
        sent = now()
        clock = wire.send("TIME")
        about, kept = wire.send("INFO", "server"), wire.send("GET", self.key)
        self._hear_time(await clock, sent)
        # A store inside a process (fakeredis) has no INFO, and is never restarted.
        if isinstance(wire, DriverWire):
            self._since = 0.0
            return False
        try:
            facts, mark = _facts(await about), await kept
        except ReplyError as refused:
            if refused.code in ("NOPERM", "ERR") and not self._delays.notes:
                self._since = 0.0
                return False
            if refused.code in ("NOPERM", "ERR"):  # a service may have taken the command away
                raise BackendError(
                    f"a quorum needs INFO, and GET of {self.key}: {refused}"
                ) from refused
            raise
        run, known = facts.get(b"run_id", b""), self._run
        self.server = run
        if run == known and _run_of(mark) in (b"", run):
            return False
        # Also if it did not restart: with the mark of another server it was its replica meanwhile.
        self._run, self.mark, self._is_news, self._marked_until = run, mark, False, 0.0
        self._unmarked_at = None
        self._since = self._since_of_mark()
        self.unsettled = known is not None or self._came_lately
        if known is None:
            return False
        if self._since == _NEVER or self._met < heard_before:
            # Either a client marked it that took the quorum for new, not knowing the server that was here
            # before. Or it was here earlier, and another server was here meanwhile.
            self._since = now() + self._delays.longest
            self.mark, self._is_news = self._mark_of(self._latest_us()), True
            await self._keep(wire)
        _logger.warning(
            "%s was restarted: it counts again in %.1f s",
            described,
            max(0.0, self._since - now()),
            extra={"event": "node_restarted"},
        )
        return True

    @property
    def _came_lately(self) -> bool:
        """Whether it came back so short ago that others may not have told of leases that it forgot."""
        met = _moment_in(self.mark)
        return met != _EVER and self._latest_us() - met < _SETTLED_AFTER * 1e6

    def settle(self) -> None:
        """All other nodes have told which leases are in use: none that it may have forgotten is longer."""
        self.unsettled = False
        _, met, delay, _ = _words(self.mark)
        longest = round(self._delays.longest * 1000)
        if met != _EVER and delay < longest:
            self.mark, self._is_news = self._mark_of(met), True
            self._since = max(self._since, self._since_of_mark())

    def _mark_of(self, met: int) -> bytes:
        delay = 0 if met == _EVER else round(self._delays.longest * 1000)
        id = self.id or secrets.token_hex(8).encode()
        return b"%b %d %d %b" % (self._run or b"", met, delay, id)

    def _since_of_mark(self) -> float:
        """Return from when on the mark has the node believed; never when it is about another server."""
        if self.mark is None or _run_of(self.mark) != self._run:
            return _NEVER
        _, met, delay, _ = _words(self.mark)
        if met == _EVER:
            return 0.0
        low, _, _ = self._offset or (0.0, 0.0, 0.0)
        return min(met / 1e6 - low, now()) + max(self._delays.least, min(delay / 1000, CAP))

    @property
    def _met(self) -> float:
        """When it was met first, at the earliest; 0 if the quorum was new then."""
        _, high, _ = self._offset or (0.0, 0.0, 0.0)
        return max(0.0, _moment_in(self.mark) / 1e6 - high - _SLACK)

    def _latest_us(self) -> int:
        """Return the latest that it can be by the node's clock."""
        _, high, _ = self._offset or (0.0, 0.0, 0.0)
        return int((now() + high) * 1e6)

    @property
    def _key_ttl(self) -> int:
        return max(self._retention_ms, round(self._delays.longest * 2000))

    async def _keep(self, wire: Wire) -> None:
        """Have the node keep the mark; what fails is repeated when nodes are judged next."""
        assert self.mark is not None
        said: tuple[bytes | str | int, ...] = ("SET", self.key, self.mark, "PX", self._key_ttl)
        if self._is_news:
            kept = await self._ask(wire, *said)
        else:
            # Another client may have had news of it.
            kept = await self._ask(wire, "PEXPIRE", self.key, self._key_ttl)
            kept = kept or await self._ask(wire, *said)
        if kept:
            self._is_news, self._marked_until = False, now() + self._key_ttl / 3000

    async def _introduce(self, wire: Wire, met: int) -> None:
        """Mark the node as met then, by its clock, unless somebody else has done so meanwhile."""
        mark = self._mark_of(met)
        only = ("NX",) if self.mark is None else ()
        written = await self._ask(wire, "SET", self.key, mark, "PX", self._key_ttl, *only)
        self.mark = mark if written else await self._ask(wire, "GET", self.key)
        self._since, self.unsettled = self._since_of_mark(), self._came_lately
        self._marked_until = now() + self._key_ttl / 3000

    async def keep_time(self, wire: Wire) -> None:
        """Ask the node for its time if it has not told it for long: of an idle client, nobody else does."""
        if self._offset is None or now() < self._offset[2] + _HEAR_AGAIN:
            return
        sent = now()
        clock = await self._ask(wire, "TIME")
        if clock is None:
            return
        try:
            self._hear_time(clock, sent)
        except BackendError as wrong:  # one node alone ends nobody's client
            _logger.debug("%s", wrong)

    def _hear_time(self, clock: Any, sent: float) -> None:
        try:
            time = int(clock[0]) + int(clock[1]) / 1e6
        except (ValueError, TypeError, IndexError, OverflowError) as wrong:
            raise BackendError(f"TIME has the wrong shape: {clock!r:.100}") from wrong
        self.hear_clock(time, sent)

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
        longest = self._delays.longest
        if longest == 0.0:
            return
        self._steady_at = now() + longest
        _logger.warning(
            "the clock of a node stepped by %.1f s: it counts again in %.1f s",
            by,
            longest,
            extra={"event": "node_clock_stepped"},
        )

    def time_at(self, moment: float) -> float | None:
        """Return the node's time as last heard plus what passed since; None if never heard."""
        return None if self._offset is None else moment + sum(self._offset[:2]) / 2

    @property
    def least_token(self) -> int:
        """The time, by its clock, from which on the node counts: no request holds with a smaller token.

        It may have forgotten tokens. A vote that it gave before it counted may be smaller than those.
        """
        since = max(self._since, self._steady_at)
        if self._offset is None or not 0.0 < since < _NEVER:
            return 0
        return int((since + self._offset[1]) * 1e6)

    # -- what the clients tell each other through the node ---------------------------------------------

    async def read_mark(self, wire: Wire) -> bool:
        """Look whether another client has marked the node meanwhile; return False if it does not answer."""
        mark = await self._ask(wire, "GET", self.key, failed=False)
        if mark is False:
            return False
        self.mark = mark or self.mark
        self._since, self.unsettled = self._since_of_mark(), self._came_lately
        return True

    async def _ask(self, wire: Wire, *command: bytes | str | int, failed: Any = None) -> Any:
        """Return the answer, or ``failed`` when there is none in time: the node is asked again later."""
        try:
            answer = await wire.send(*command, within=wire.patience.within())
        except (ReplyError, Unanswered) as error:
            _logger.debug("%s: %s", command[0], error)
            return failed
        self.further.step()
        return answer

    async def keep_mark(self, wire: Wire, *, quorum_is_new: bool, quorum_was_new: bool) -> None:
        """Mark the node if nobody has; and have it keep the mark."""
        if self.undecided:
            if quorum_was_new and not quorum_is_new and self.mark is None:
                if self._unmarked_at is None:
                    self._unmarked_at = now()
                if now() < self._unmarked_at + _MARKED_WITHIN:
                    return  # the client that has marked other nodes may be about to mark this one
            await self._introduce(wire, _EVER if quorum_is_new else self._latest_us())
        elif self._is_news or now() >= self._marked_until:
            await self._keep(wire)


async def judge(nodes: Sequence[tuple[Trust, Wire | None]], majority: int) -> bool:
    """Decide about nodes without a mark, keep marks, hear clocks; return whether some are undecided.

    All nodes are asked at once, and each has a limit: a silent node delays no decision about the others.
    """
    met = [(trust, wire) for trust, wire in nodes if wire is not None and trust.is_met]
    have_told = await asyncio.gather(
        *(trust.read_mark(wire) for trust, wire in met if trust.undecided)
    )
    is_marked = any(trust.mark for trust, _ in met)
    silent = have_told.count(False)
    if not is_marked and len(met) - silent < majority <= len(met):
        return True  # whether the quorum is new is known when the silent ones answer
    is_new = not is_marked and len(met) >= majority
    was_new = any(trust.was_founding for trust, _ in met)
    await asyncio.gather(
        *(trust.keep_time(wire) for trust, wire in met),
        *(
            trust.keep_mark(wire, quorum_is_new=is_new, quorum_was_new=was_new)
            for trust, wire in met
        ),
    )
    return any(trust.undecided for trust, _ in met)


def _run_of(mark: bytes | None) -> bytes:
    return (mark or b"").partition(b" ")[0]


def _moment_in(mark: bytes | None) -> int:
    """Return the node's time in a mark: a number of some size, whatever somebody has written there."""
    return _words(mark)[1]


def _words(mark: bytes | None) -> tuple[bytes, int, int, bytes]:
    """Return what a mark says: run id, time (us), delay (ms), id; whatever somebody has written there."""
    run, met, delay, id, *_ = [*(mark or b"").split(b" "), b"", b"", b"", b""]
    return run, _number(met), _number(delay), id[:64]


def _number(text: bytes) -> int:
    return int(text[:18]) if text.isdigit() else 0


def _facts(info: Any) -> dict[bytes, bytes]:
    lines = bytes(info).splitlines() if isinstance(info, bytes | bytearray) else []
    return dict(line.split(b":", 1) for line in lines if b":" in line)
