"""What is in the store, as all viewers of a page see it: one poll for all, none while nobody looks.

Each look asks about the names that viewers see now, and about the next part of all others. So the cost of a
look has a bound, however many names and viewers there are. There is no task behind it: the first viewer
whose time has come does the look, and the others wait for what it finds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .._clock import now
from .._cycles import Cycle
from .._errors import LockError
from .._hooks import Hooks
from .._model import HolderInfo, LockInfo, RequestInfo

if TYPE_CHECKING:
    from .._client import Client

#: Seconds between two looks.
INTERVAL = 1.0
#: A look that takes long is followed by a pause so many times as long.
_PAUSE = 3.0
#: So many names are asked about in one look, besides those that viewers see.
NAMES_PER_LOOK = 1_000
#: So many names that viewers see are asked about in each look.
_VISIBLE = 500
#: And so many with one call.
_AT_ONCE = 500
#: So many names are kept. Of a store with more, the page shows a part, and says so.
MOST_NAMES = 20_000
#: What was seen longer ago than this is forgotten when somebody looks again.
_STALE = 15.0
#: Seconds over which rates are averaged.
_AVERAGED = 10.0
_MOST_LOSSES = 50
#: Each so many looks, cycles are looked for among waits of so many seconds, of so many clients.
_CYCLES_EACH, _LONG, _MOST_CLIENTS = 3, 1.0, 200
#: Tokens of most stores are microseconds of the store's clock. A token that is no such moment is no age.
_PLAUSIBLE_AGE = 400 * 86_400.0


@dataclass(slots=True)
class Hold:
    """A holder, over several looks. Moments are of ``_clock``."""

    since: float
    longest_remaining: float


@dataclass(slots=True)
class Seen:
    """What was last seen of a name."""

    info: LockInfo
    at: float
    holds: dict[tuple[str, int], Hold]
    #: When the oldest waiter was queued, and when the oldest holder got the name; inf if there is none.
    waiting_since: float
    held_since: float


@dataclass(frozen=True, slots=True)
class Loss:
    """A lease that ended without a release, as far as this page can tell."""

    name: str
    client: str
    token: int
    at: float
    how: str


@dataclass(slots=True)
class Viewer:
    """A page that somebody looks at: the one name that it is about, or those that it lists."""

    one: str | None = None
    names: tuple[str, ...] = ()
    #: What was last seen of the one name, also when it is free.
    info: LockInfo | None = None


@dataclass(slots=True)
class Totals:
    """Sums over all names."""

    names: int = 0
    holders: int = 0
    waiters: int = 0
    longest_wait: float = 0.0


@dataclass(slots=True)
class _Rate:
    """How many things happened per second, on average over the last seconds."""

    counted: deque[tuple[float, int]] = field(default_factory=deque)
    began: float = 0.0

    def add(self, count: int, at: float) -> None:
        if not self.began:
            self.began = at
            return  # what is new at the first look may be old
        self.counted.append((at, count))
        while self.counted[0][0] < at - _AVERAGED:
            self.counted.popleft()

    def per_second(self, at: float) -> float:
        span = min(_AVERAGED, at - self.began) if self.began else 0.0
        return sum(count for _, count in self.counted) / span if span > 0.5 else 0.0


class Watch:
    """The names of a client's store, for all viewers.

    Mutable state:

    - ``names``: what was last seen of each. ``complete``: every name has been seen. ``left_out``: how many
      are above ``MOST_NAMES``.
    - ``losses``. ``deadlocks``: those that stand. ``trouble``: why the last look failed.
    - ``looks``: their number. ``took``, ``asked``: the seconds of the last one, and its names.
    - ``_viewers``. ``_to_ask``: the names that are still to come in the walk through all.
    - ``_due``: when the next look may begin. ``_last``: when the last one ended.
    - ``_hand_overs``, ``_handed_over``: those of the last seconds, and of this look.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.names: dict[str, Seen] = {}
        self.losses: deque[Loss] = deque(maxlen=_MOST_LOSSES)
        self.deadlocks: list[Cycle] = []
        self.trouble: str | None = None
        self.complete = False
        self.left_out = 0
        self.looks = 0
        self.took = 0.0
        self.asked = 0
        self._viewers: list[Viewer] = []
        self._to_ask: list[str] = []
        self._looking = asyncio.Lock()
        self._due = 0.0
        self._last = 0.0
        self._hand_overs = _Rate()
        self._handed_over = 0
        self._totals: tuple[int, Totals] = (-1, Totals())
        client.add_hooks(_OwnLosses(self.losses))

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    @contextmanager
    def viewer(self, one: str | None = None) -> Iterator[Viewer]:
        """Count as a viewer while the block lasts."""
        viewer = Viewer(one)
        self._viewers.append(viewer)
        try:
            yield viewer
        finally:
            # By identity: two viewers may look at the same.
            self._viewers = [other for other in self._viewers if other is not viewer]

    @property
    def due_in(self) -> float:
        """Seconds until the next look may begin."""
        return max(0.0, self._due - now())

    async def look(self) -> None:
        """Have what is known not older than an interval. A store that fails is told in ``trouble``."""
        async with self._looking:
            if now() < self._due:
                return
            started = now()
            if started - self._last > _STALE:
                self._forget()
            try:
                await self._ask()
                self.trouble = None
            except LockError as error:
                self.trouble = str(error)
            finally:
                self._last = now()
                self.took = self._last - started
                self._due = self._last + max(INTERVAL - self.took, _PAUSE * self.took)
            self._hand_overs.add(self._handed_over, self._last)
            self._handed_over = 0
            self.looks += 1

    async def show(self, viewer: Viewer) -> None:
        """Find out about the one name of a new viewer, before the next look is due."""
        if viewer.one is None:
            return
        try:
            viewer.info = await self.inspect(viewer.one)
        except LockError as error:
            self.trouble = str(error)

    async def inspect(self, name: str) -> LockInfo:
        """Ask about one name now."""
        info = await self._client.inspect(name)
        self._take(info)
        return info

    def totals(self) -> Totals:
        """Return the sums over all names that were seen."""
        looks, totals = self._totals
        if looks != self.looks:
            totals = Totals(names=len(self.names))
            oldest = float("inf")
            for seen in self.names.values():
                totals.holders += len(seen.info.holders)
                totals.waiters += len(seen.info.waiters)
                oldest = min(oldest, seen.waiting_since)
            totals.longest_wait = max(0.0, now() - oldest)
            self._totals = (self.looks, totals)
        return totals

    def hand_overs_per_second(self) -> float:
        """Return at least how many grants to waiters there are per second."""
        return self._hand_overs.per_second(now())

    # -- a look ----------------------------------------------------------------------------------

    async def _ask(self) -> None:
        self.asked = 0
        visible = dict.fromkeys(viewer.one for viewer in self._viewers if viewer.one is not None)
        # Few names are all asked about in each look anyway.
        if not self.complete or len(self.names) > NAMES_PER_LOOK // 2:
            for viewer in self._viewers:
                visible.update(dict.fromkeys(viewer.names))
        await self._ask_about(list(visible)[:_VISIBLE])
        await self._go_on()
        if self.looks % _CYCLES_EACH == 0:
            self.deadlocks = await self._client._deadlocks(self._who_waits_long())

    def _who_waits_long(self) -> list[str]:
        """Return the clients whose requests have waited for so long that they may have told it."""
        before = now() - _LONG
        found: dict[str, None] = {}
        for seen in self.names.values():
            if seen.waiting_since < before:
                found.update(dict.fromkeys(waiter.client for waiter in seen.info.waiters))
                if len(found) >= _MOST_CLIENTS:
                    break
        return list(found)[:_MOST_CLIENTS]

    async def _ask_about(self, names: list[str]) -> None:
        if not names:
            return
        self.asked += len(names)
        found = {info.name: info for info in await self._client._inspect_many(names)}
        for info in found.values():
            self._take(info)
        for viewer in self._viewers:
            if viewer.one in found:
                viewer.info = found[viewer.one]

    async def _go_on(self) -> None:
        """Ask about the next names of the walk through all; begin another walk when it has ended."""
        if not self._to_ask:
            await self._begin_walk()
        most = NAMES_PER_LOOK
        while self._to_ask and most > 0:
            part = self._to_ask[-min(_AT_ONCE, most) :]
            await self._ask_about(part)
            del self._to_ask[-len(part) :]
            most -= len(part)
        self.complete = self.complete or not self._to_ask

    async def _begin_walk(self) -> None:
        began = now()
        found = await self._client._held_names()
        self.left_out = max(0, len(found) - MOST_NAMES)
        self._to_ask = found[:MOST_NAMES]
        present = set(self._to_ask)
        for name in [n for n, seen in self.names.items() if n not in present and seen.at < began]:
            self._drop(name, now())

    def _forget(self) -> None:
        self.names.clear()
        self._to_ask.clear()
        self.complete = False
        self.left_out = 0
        self._hand_overs = _Rate()
        self._handed_over = 0

    # -- what was found --------------------------------------------------------------------------

    def _take(self, info: LockInfo) -> None:
        at = now()
        before = self.names.get(info.name)
        holds: dict[tuple[str, int], Hold] = {}
        for holder in info.holders:
            key = (holder.owner, holder.token)
            hold = before.holds.get(key) if before is not None else None
            if hold is None:
                hold = Hold(at - _age(holder), 0.0)
                if before is not None and before.info.waiters:
                    self._handed_over += 1
            hold.longest_remaining = max(hold.longest_remaining, holder.remaining or 0.0)
            holds[key] = hold
        if before is not None:
            self._find_losses(before, holds, at)
        if not (info.holders or info.waiters or info.closed):
            self.names.pop(info.name, None)
            return
        longest = max((waiter.waiting or 0.0 for waiter in info.waiters), default=None)
        self.names[info.name] = Seen(
            info,
            at,
            holds,
            float("inf") if longest is None else at - longest,
            min((hold.since for hold in holds.values()), default=float("inf")),
        )

    def _drop(self, name: str, at: float) -> None:
        self._find_losses(self.names.pop(name), {}, at)

    def _find_losses(self, before: Seen, holds: dict[tuple[str, int], Hold], at: float) -> None:
        """Record the holders whose lease ran out: nobody extended it when it was last seen."""
        for holder in before.info.holders:
            key = (holder.owner, holder.token)
            if key in holds or holder.remaining is None or at < before.at + holder.remaining:
                continue
            # A live client extends at a third of the ttl, so two thirds are always left.
            if holder.remaining <= before.holds[key].longest_remaining / 2:
                self.losses.appendleft(
                    Loss(before.info.name, holder.client, holder.token, at, "not extended")
                )


class _OwnLosses(Hooks):
    """What the page's own client lost."""

    def __init__(self, losses: deque[Loss]) -> None:
        self._losses = losses

    def lost(self, request: RequestInfo, held: float, reason: str) -> None:
        """Record it."""
        self._losses.appendleft(
            Loss(request.name, "this process", request.token, now(), f"lost: {reason}")
        )


def _age(holder: HolderInfo) -> float:
    """Return how long ago a grant was, as its token says; 0 if it does not say."""
    age = time.time() - holder.token / 1e6
    return age if 0 < age < _PLAUSIBLE_AGE else 0.0
