"""What is in the store, as all viewers of a page see it: one poll for all, none while nobody looks.

Each look asks about the names that viewers see now, and about the next part of all others. So the cost of a
look has a bound, however many names and viewers there are. There is no task behind it: the first viewer
whose time has come does the look, and the others wait for what it finds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from .._client import Client, core_of
from .._clock import now
from .._cycles import Cycle
from .._errors import LockError
from .._hooks import Hooks
from .._model import Kind, LockInfo, RequestInfo
from ._history import History

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
#: So many losses are kept, and of so many names that somebody looks at, the last minutes.
_MOST_LOSSES = 50
_MOST_HISTORIES = 200
#: Each so many looks, cycles are looked for among waits of so many seconds, of so many clients.
_CYCLES_EACH, _LONG, _MOST_CLIENTS = 3, 1.0, 200
#: What there is under a name: each kind has names of its own.
Key: TypeAlias = tuple[Kind, str]


@dataclass(slots=True)
class Seen:
    """What was last seen of a name."""

    info: LockInfo
    at: float
    #: When each holder got it, by owner and token, as far as that is known: at the latest when it was seen.
    holds: dict[tuple[str, int], float]
    #: When the oldest waiter was queued, -inf where the store does not tell; and when the oldest holder got
    #: the name. inf if there is none.
    waiting_since: float
    held_since: float

    @property
    def key(self) -> Key:
        """Its kind and name."""
        return (self.info.kind, self.info.name)


@dataclass(frozen=True, slots=True)
class Loss:
    """A lease that ended without a release, as far as this page can tell."""

    key: Key
    client: str
    token: int
    at: float
    how: str


@dataclass(slots=True)
class Viewer:
    """A page that somebody looks at: the one name that it is about, or those that it lists."""

    one: Key | None = None
    listed: tuple[Key, ...] = ()
    #: What was last seen of the one name, also when it is free.
    info: LockInfo | None = None


@dataclass(slots=True)
class Totals:
    """Sums over all names."""

    names: int = 0
    holders: int = 0
    waiters: int = 0
    #: None where the store does not tell.
    longest_wait: float | None = 0.0


class Watch:
    """The names of a client's store, for all viewers.

    Mutable state:

    - ``names``: what was last seen of each. ``complete``: every name has been seen. ``left_out``: how many
      are above ``MOST_NAMES``.
    - ``losses``: the last ones. ``lost``: the number of all. ``deadlocks``: those that stand. ``trouble``:
      why the last look failed.
    - ``history``: the last minutes, of all names together. ``_histories``: of those that somebody looks at,
      or has looked at.
    - ``looks``: their number. ``took``, ``asked``: the seconds of the last one, and its names.
    - ``_viewers``. ``_to_ask``: the names that are still to come in the walk through all, the last first.
    - ``_due``: when the next look may begin. ``_last``: when the last one ended.
    - ``_handed_over``: the hand-overs of this look.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.names: dict[Key, Seen] = {}
        self.losses: deque[Loss] = deque(maxlen=_MOST_LOSSES)
        self.lost = 0
        self.history = History()
        self.deadlocks: list[Cycle] = []
        self.trouble: str | None = None
        self.complete = False
        self.left_out = 0
        self.looks = 0
        self.took = 0.0
        self.asked = 0
        self._viewers: list[Viewer] = []
        self._histories: dict[Key, History] = {}
        self._to_ask: list[Key] = []
        self._looking = asyncio.Lock()
        self._due = 0.0
        self._last = 0.0
        self._handed_over = 0
        self._totals: tuple[int, Totals] = (-1, Totals())
        client.add_hooks(_OwnLosses(self))

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    @contextmanager
    def viewer(self, one: Key | None = None) -> Iterator[Viewer]:
        """Count as a viewer while the block lasts."""
        viewer = Viewer(one)
        if one is not None:
            # At the end of what is kept, though it was there before: the first ones are forgotten.
            self._histories[one] = self._histories.pop(one, History())
            while len(self._histories) > _MOST_HISTORIES:
                del self._histories[next(iter(self._histories))]
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
                pause = max(INTERVAL - self.took, _PAUSE * self.took)
                # A look that failed waited for an answer: it has cost the store nothing.
                self._due = self._last + (pause if self.trouble is None else INTERVAL)
            self.looks += 1
            waiters = None if self.trouble else self.totals().waiters
            self.history.add(self._last, waiters=waiters, hand_overs=self._handed_over)
            self._handed_over = 0

    async def show(self, viewer: Viewer) -> None:
        """Find out about the one name of a new viewer, before the next look is due."""
        if viewer.one is None:
            return
        try:
            viewer.info = await self.inspect(*viewer.one)
        except LockError as error:
            self.trouble = str(error)

    async def inspect(self, kind: Kind, name: str) -> LockInfo:
        """Ask about one name now."""
        info = await self._client.inspect(name, kind=kind)
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
                if seen.waiting_since > float("-inf"):
                    oldest = min(oldest, seen.waiting_since)
            if totals.waiters:
                totals.longest_wait = now() - oldest if oldest < float("inf") else None
            self._totals = (self.looks, totals)
        return totals

    def history_of(self, key: Key) -> History | None:
        """Return the last minutes of a name, if somebody looks at it or did so a short time ago."""
        return self._histories.get(key)

    def lose(self, loss: Loss) -> None:
        """Record a loss, once: it may be told by a hook and be seen in the store."""
        if any((loss.key, loss.token) == (other.key, other.token) for other in self.losses):
            return
        self.losses.appendleft(loss)
        self.lost += 1
        for history in (self.history, self._histories.get(loss.key)):
            if history is not None:
                history.add(loss.at, losses=1)

    # -- a look ----------------------------------------------------------------------------------

    async def _ask(self) -> None:
        self.asked = 0
        visible = dict.fromkeys(viewer.one for viewer in self._viewers if viewer.one is not None)
        # Few names are all asked about in each look anyway.
        if not self.complete or len(self.names) > NAMES_PER_LOOK // 2:
            for viewer in self._viewers:
                visible.update(dict.fromkeys(viewer.listed))
        await self._ask_about(list(visible)[:_VISIBLE])
        await self._go_on()
        if self.looks % _CYCLES_EACH == 0:
            self.deadlocks = await core_of(self._client).deadlocks(self._who_waits_long())

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

    async def _ask_about(self, keys: Sequence[Key]) -> None:
        names: dict[Kind, list[str]] = {}
        for kind, name in keys:
            names.setdefault(kind, []).append(name)
        for kind, some in names.items():
            self.asked += len(some)
            for info in await core_of(self._client).inspect_many(some, kind):
                self._take(info)
                for viewer in self._viewers:
                    if viewer.one == (kind, info.name):
                        viewer.info = info

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
        # The kind with the fewest names first: those left out are then of the kind that has so many.
        kinds = sorted(
            (await core_of(self._client).held_names()).items(), key=lambda names: len(names[1])
        )
        found = [(kind, name) for kind, names in kinds for name in names]
        self.left_out = max(0, len(found) - MOST_NAMES)
        self._to_ask = found[:MOST_NAMES]
        present = set(self._to_ask)
        for key in [k for k, seen in self.names.items() if k not in present and seen.at < began]:
            self._drop(key, now())

    def _forget(self) -> None:
        self.names.clear()
        self._to_ask.clear()
        self.complete = False
        self.left_out = 0
        self._handed_over = 0

    # -- what was found --------------------------------------------------------------------------

    def _take(self, info: LockInfo) -> None:
        at, key = now(), (info.kind, info.name)
        before = self.names.get(key)
        known = before.holds if before is not None else {}
        holds = {
            (one.owner, one.token): known.get((one.owner, one.token), at - (one.holding or 0.0))
            for one in info.holders
        }
        handed_over = len(holds.keys() - known) if before is not None and before.info.waiters else 0
        self._handed_over += handed_over
        if (history := self._histories.get(key)) is not None:
            history.add(at, waiters=len(info.waiters), hand_overs=handed_over)
        if before is not None:
            self._find_losses(before, holds, at)
        if not (info.holders or info.waiters or info.closed or info.recorded):
            self.names.pop(key, None)
            return
        self.names[key] = Seen(
            info, at, holds, _waiting_since(info, at), min(holds.values(), default=float("inf"))
        )

    def _drop(self, key: Key, at: float) -> None:
        self._find_losses(self.names.pop(key), {}, at)

    def _find_losses(self, before: Seen, holds: Mapping[tuple[str, int], float], at: float) -> None:
        """Record the holders whose lease ran out: nobody extended it when it was last seen."""
        for holder in before.info.holders:
            if (holder.owner, holder.token) in holds or holder.remaining is None:
                continue
            if holder.overdue and at >= before.at + holder.remaining:
                self.lose(Loss(before.key, holder.client, holder.token, at, "not extended"))


def _waiting_since(info: LockInfo, at: float) -> float:
    if not info.waiters:
        return float("inf")
    known = [waiter.waiting for waiter in info.waiters if waiter.waiting is not None]
    return at - max(known) if known else float("-inf")


class _OwnLosses(Hooks):
    """What the page's own client lost."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def lost(self, request: RequestInfo, held: float, reason: str) -> None:
        """Record it."""
        key = (request.kind, request.name)
        self._watch.lose(Loss(key, "this process", request.token, now(), f"lost: {reason}"))
