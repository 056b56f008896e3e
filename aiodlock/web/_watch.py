"""What is in the store, as all viewers of a page see it: one poll for all, none while nobody looks.

Each look asks about the names that viewers see now, and about the next part of all others. So the cost of a
look has a bound, however many names and viewers there are. There is no task behind it: the first viewer
whose time has come does the look, and the others wait for what it finds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from .._client import Client, core_of
from .._clock import now
from .._cycles import Cycle
from .._errors import LockError
from .._hooks import Hooks
from .._model import Kind, LockInfo, RequestInfo
from ._sightings import Key, Loss, Sightings

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
#: Each so many looks, cycles are looked for.
_CYCLES_EACH = 3


@dataclass(slots=True)
class Viewer:
    """A page that somebody looks at: the one name that it is about, or those that it lists."""

    one: Key | None = None
    listed: tuple[Key, ...] = ()
    #: What was last seen of the one name, also when it is free.
    info: LockInfo | None = None


class Watch:
    """The names of a client's store, for all viewers.

    Mutable state:

    - ``seen``: what was seen of them. ``complete``: every name has been seen. ``left_out``: how many are
      above ``MOST_NAMES``.
    - ``deadlocks``: those that stand. ``trouble``: why the last look failed.
    - ``looks``: their number. ``took``, ``asked``: the seconds of the last one, and its names.
    - ``_viewers``. ``_to_ask``: the names that are still to come in the walk through all, the last first.
    - ``_due``: when the next look may begin. ``_last``: when the last one ended.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.seen = Sightings()
        self.deadlocks: list[Cycle] = []
        self.trouble: str | None = None
        self.complete = False
        self.left_out = 0
        self.looks = 0
        self.took = 0.0
        self.asked = 0
        self._viewers: list[Viewer] = []
        self._to_ask: list[Key] = []
        self._looking = asyncio.Lock()
        self._due = 0.0
        self._last = 0.0
        client.add_hooks(_OwnLosses(self.seen))

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    @contextmanager
    def viewer(self, one: Key | None = None) -> Iterator[Viewer]:
        """Count as a viewer while the block lasts."""
        viewer = Viewer(one)
        if one is not None:
            self.seen.follow(one)
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
                self.seen.forget()
                self._to_ask.clear()
                self.complete, self.left_out = False, 0
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
            self.seen.end_look(self._last, failed=self.trouble is not None)

    async def show(self, viewer: Viewer) -> None:
        """Find out about the one name of a new viewer, before the next look is due."""
        if viewer.one is None or viewer.info is not None:
            return
        try:
            viewer.info = await self.inspect(*viewer.one)
        except LockError as error:
            self.trouble = str(error)

    async def inspect(self, kind: Kind, name: str) -> LockInfo:
        """Ask about one name now."""
        info = await self._client.inspect(name, kind=kind)
        self.seen.take(info)
        return info

    # -- a look ----------------------------------------------------------------------------------

    async def _ask(self) -> None:
        self.asked = 0
        visible = dict.fromkeys(viewer.one for viewer in self._viewers if viewer.one is not None)
        # Few names are all asked about in each look anyway.
        if not self.complete or len(self.seen.names) > NAMES_PER_LOOK // 2:
            for viewer in self._viewers:
                visible.update(dict.fromkeys(viewer.listed))
        await self._ask_about(list(visible)[:_VISIBLE])
        await self._go_on()
        if self.looks % _CYCLES_EACH == 0:
            self.deadlocks = await core_of(self._client).deadlocks(self.seen.who_waits_long())

    async def _ask_about(self, keys: Sequence[Key]) -> None:
        names: dict[Kind, list[str]] = {}
        for kind, name in keys:
            names.setdefault(kind, []).append(name)
        for kind, some in names.items():
            self.asked += len(some)
            for info in await core_of(self._client).inspect_many(some, kind):
                self.seen.take(info)
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
        self.seen.keep(set(self._to_ask), began)


class _OwnLosses(Hooks):
    """What the page's own client lost."""

    def __init__(self, seen: Sightings) -> None:
        self._seen = seen

    def lost(self, request: RequestInfo, held: float, reason: str) -> None:
        """Record it."""
        key = (request.kind, request.name)
        self._seen.lose(Loss(key, "this process", request.token, now(), f"lost: {reason}"))
