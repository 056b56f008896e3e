"""Histories of several names, between whose steps the database sweeps.

A sweep changes no answer: the machine, which never sweeps, has to give the same. It is told of sweeps only
when the clock is set back. What had ended is remembered again then, unless a sweep has removed it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from itertools import count
from typing import Any, TypeVar

import asyncpg
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from aiodlock.backends.memory.machine import Asked, End, Name

from .test_scripts import MINUTE, NOBODY, PLACES, TTLS, WISHES, Kept, Locks, Onces, Semaphores, Wish
from .turns import WAYS, Database, VirtualTurns

_T = TypeVar("_T")

_NAMES = 3
#: The last token is remembered for less time than everything else, or for more.
KEPT = [
    Kept(token=tokens, marker=3 * MINUTE, broken=4 * MINUTE, record=7 * MINUTE)
    for tokens in (MINUTE, 20 * MINUTE)
]
_FATES = st.lists(st.sampled_from(["dies", "extends", "leaves"]), min_size=8, max_size=8)
#: Longer than anything is kept.
_LONG = 60 * MINUTE
_OF_ONE_NAME = ("scripts", "model", "known", "left", "looks", "beats")


class Lasting(Name):
    """The machine, which forgets only what it is told to forget."""

    def _remember(self, what: dict[str, int], id: str, until: int) -> None:
        what[id] = max(until, what.get(id, 0))

    def forget_what_ended(self, until: int) -> None:
        for what in (self.markers, self.broken):
            for id in [id for id, end in what.items() if end <= until]:
                del what[id]
        if self.record_until <= until:
            self.record = None

    def rows(self, key: str) -> set[tuple[str, str, int]]:
        """Return what is stored besides the row of this name, with its ends."""
        rows = {("marker", id, end) for id, end in self.markers.items()}
        rows |= {("broken", id, end) for id, end in self.broken.items()}
        return rows | ({("record", key, self.record_until)} if self.record else set())

    def ends(self) -> set[int]:
        """Return when what the row of this name tells ends."""
        ends = {entry.closed_until for entry in self.holders.values()}
        ends |= {entry.deadline for entry in (*self.holders.values(), *self.waiters.values())}
        recorded = {self.record_until} if self.record else set()
        return ends | recorded | {self.token_until, *self.markers.values()}


class Swept(Locks):
    """Steps for one of several names, and sweeps, which are for all.

    Mutable state besides: ``_others`` (what belongs to each of the other names), ``_latest`` (the latest
    time that there was), ``_swept_at`` (the time of the last sweep since the clock was set back).
    """

    def __init__(
        self, database: Database, ways: Sequence[str] = WAYS, kept: Kept = KEPT[0]
    ) -> None:
        ids = (f"r{number}" for number in count())
        self._others: list[dict[str, Any]] = []
        for _ in range(_NAMES):
            super().__init__(VirtualTurns(database, self.kind, ways), Lasting)
            self._others.append({word: getattr(self, word) for word in _OF_ONE_NAME})
        del self._others[-1]
        self.ids = ids
        self._latest = self._swept_at = 0
        self.sweeps_always = True
        self._keep(kept)

    @property
    def turns(self) -> VirtualTurns:
        assert isinstance(self.scripts, VirtualTurns)
        return self.scripts

    @property
    def name(self) -> Lasting:
        assert isinstance(self.model.name, Lasting)
        return self.model.name

    # -- steps -------------------------------------------------------------------------------------

    @initialize(kept=st.sampled_from(KEPT), sweeps_always=st.booleans())
    def something_is_remembered(self, kept: Kept, sweeps_always: bool) -> None:
        self._keep(kept)
        self.sweeps_always = sweeps_always

    @rule(place=PLACES)
    def go_on_with_another_name(self, place: int) -> None:
        self._go_to(place % len(self._others))

    @rule()
    def sweep(self) -> None:
        """Delete what has had its time; nothing else."""
        self.turns.time = self._swept_at = self.model.now
        self.turns.sweep()
        self._nothing_is_missing()

    @rule(by=st.sampled_from([3 * MINUTE, 12 * MINUTE, 25 * MINUTE]))
    def much_time_passes(self, by: int) -> None:
        self.time_passes(by)

    @rule(by=st.sampled_from([11 * MINUTE, 1_000 * MINUTE]))
    def clock_is_set_back(self, by: int) -> None:
        now = self.model.now
        self._latest = max(self._latest, now)
        for _ in self._each_name():
            self.turns.time = self.model.now = now
            self.name.forget_what_ended(self._swept_at)
            if self.turns.look()[3] == 0:
                self.name.token = self.name.token_until = 0
            if self.name.holders or self.name.waiters:
                super().clock_is_set_back(by)
            else:  # nobody has to be found out before
                self.model.now -= by
                self._extend(NOBODY, MINUTE)
        self._swept_at = 0

    @rule(fates=_FATES, wishes=st.lists(WISHES, max_size=2), length=TTLS)
    def everybody_dies(self, fates: list[str], wishes: list[Wish], length: int) -> None:
        """Nothing is said any more, only swept: nothing is left, and nothing is removed too soon."""
        self._happen(fates[:4], length)
        for one in wishes:
            self._request(one)
        self._happen(fates[4:], length)
        ends = {end for _ in self._each_name() for end in self.name.ends()}
        for moment in sorted({moment for end in ends for moment in (end - 1, end)}):
            if moment > self.model.now:
                self.time_passes(moment - self.model.now)
                self.sweep()
        self.time_passes(max(0, self._latest - self.model.now) + _LONG)
        self.sweep()
        assert not self.turns.stored()

    # -- what must be the same ---------------------------------------------------------------------

    @invariant()
    def same_holders_and_waiters(self) -> None:
        super().same_holders_and_waiters()
        if self.sweeps_always:
            self.sweep()

    def _nothing_is_missing(self) -> None:
        """Nothing is removed from which a message would be answered; what has ended is."""
        stored = self._find_out()
        rows = set()
        for _ in self._each_name():
            rows |= {row for row in self.name.rows(self.turns.key) if self.model.now < row[-1]}
        assert rows <= stored
        # A success that was found to have ended leaves its row, though the clock was set back since.
        other = {row for row in stored - rows if row[0] in ("marker", "broken")}
        assert not other

    def _find_out(self) -> set[tuple[str, str, int]]:
        """See that names whose row is gone are over; return what is stored."""
        self.turns.time = self.model.now
        stored = self.turns.stored()
        rows = {row[:2] for row in stored}
        for _ in self._each_name():
            key = self.turns.key
            if ("name", key) not in rows:
                assert max(self.name.ends()) <= self.model.now
                assert ("waiter", key) not in rows
                # They are dead, and found out: whether a leave meets them is no promise.
                self.name.holders.clear()
                self.name.waiters.clear()
        return stored

    def _same_token(self, token: int) -> None:
        name = self.model.name
        over = self.model.now >= name.token_until
        assert token == name.token or (over and token == 0)

    # -- parts -------------------------------------------------------------------------------------

    def _keep(self, kept: Kept) -> None:
        self.kept = kept
        for _ in self._each_name():
            self.turns.kept = kept

    def _happen(self, fates: Sequence[str], length: int) -> None:
        """Those who hold and wait say their last words."""
        present = self.model.holders() + self.model.waiters()
        for entry, fate in zip(present, fates, strict=False):
            if fate == "extends":
                self._extend(entry.asked, length)
            elif fate == "leaves":
                self._leave(entry.asked, ambiguous=False, end="ended")

    def _each_name(self) -> Iterator[None]:
        """Go to each name, and at last to the present one again."""
        for _ in range(_NAMES):
            yield
            self._go_to(0)

    def _go_to(self, place: int) -> None:
        now = self.model.now
        self._others.append({word: getattr(self, word) for word in _OF_ONE_NAME})
        self.__dict__.update(self._others.pop(place))
        self.model.now = now


class SweptLocks(Swept, Locks):
    """Locks, and sweeps."""


class SweptSemaphores(Swept, Semaphores):
    """Semaphores, and sweeps."""


class SweptOnces(Swept, Onces):
    """What is to be done once, and sweeps."""


_PAUSE = 4711
_PAUSING = f"""
create function aiodlock.pause() returns trigger language plpgsql as
$$ begin perform pg_advisory_xact_lock_shared({_PAUSE}); return old; end $$;
create trigger pause before delete on aiodlock.name for each row execute function aiodlock.pause();
create table aiodlock.sweepers_clock as select 0::bigint as us;
create or replace function aiodlock.clock_us() returns bigint language sql volatile as
$$ select coalesce(
     (select us from aiodlock.sweepers_clock where current_setting('aiodlock.sweeper', true) = 'on'),
     current_setting('aiodlock.clock')::bigint
   ) $$
"""


class PausingDatabase(Database):
    """One with a second connection, whose sweep pauses at the first name that it deletes.

    It ends when it is told to, and when a call on the first connection has to wait for it.
    """

    def __init__(self, url: str, statements: str | None = None) -> None:
        self._paused: asyncio.Future[Any] | None = None
        super().__init__(url, statements)
        self._sweeper, self._keeper = self.do(asyncpg.connect(url)), self.do(asyncpg.connect(url))
        self.do(self.connection.execute(_PAUSING))
        self.do(self._sweeper.execute("set aiodlock.sweeper = on"))

    def close(self) -> None:
        self.end_sweep()
        self.do(self._sweeper.close())
        self.do(self._keeper.close())
        super().close()

    @property
    def sweeps(self) -> bool:
        return self._paused is not None

    def begin_sweep(self, now: int) -> None:
        self.end_sweep()
        self.do(self._keeper.execute(f"select pg_advisory_lock({_PAUSE})"))
        self.set_sweepers_clock(now)
        self._paused = asyncio.ensure_future(
            self._sweeper.execute(
                "select aiodlock.sweep(100000, 100000, 'm0'), aiodlock.sweep(100000, 100000, 'b0'), "
                "aiodlock.sweep(100000, 100000, 'r0'), aiodlock.sweep(100000, 100000, 'n0')"
            ),
            loop=self._loop,
        )
        super().do(self._wait_until_paused(self._paused))

    def set_sweepers_clock(self, now: int) -> None:
        super().do(self._keeper.execute(f"update aiodlock.sweepers_clock set us = {now * 1000}"))

    async def _wait_until_paused(self, sweeping: asyncio.Future[Any]) -> None:
        while not sweeping.done() and not await self._is_blocked(self._sweeper):
            await asyncio.sleep(0.001)

    async def _is_blocked(self, connection: asyncpg.Connection) -> bool:
        blocked = "select cardinality(pg_blocking_pids($1)) > 0"
        return bool(await self._keeper.fetchval(blocked, connection.get_server_pid()))

    def is_reached(self, key: str) -> bool:
        """Whether the sweep has the name's lock."""
        free = "select pg_try_advisory_xact_lock(1095323471, hashtext($1))"
        return not super().do(self._keeper.fetchval(free, key))

    def end_sweep(self) -> None:
        if self._paused is not None:
            super().do(self._end_sweep(self._paused))

    async def _end_sweep(self, sweeping: asyncio.Future[Any]) -> None:
        self._paused = None
        await self._keeper.execute(f"select pg_advisory_unlock({_PAUSE})")
        await sweeping

    def do(self, call: Awaitable[_T]) -> _T:
        return super().do(call if self._paused is None else self._in_spite_of_it(call))

    async def _in_spite_of_it(self, call: Awaitable[_T]) -> _T:
        """Let the sweep go on when the call waits for what it has."""
        doing = asyncio.ensure_future(call)
        while not doing.done():
            await asyncio.wait([doing], timeout=0.02)
            if (
                not doing.done()
                and self._paused is not None
                and await self._is_blocked(self.connection)
            ):
                await self._end_sweep(self._paused)
        return await doing


class Interrupted(SweptLocks):
    """Steps while a sweep pauses between its reading and its deleting."""

    def __init__(self, database: PausingDatabase) -> None:
        super().__init__(database)
        self._pausing = database
        self.sweeps_always = False
        self.paused = 0

    @initialize()
    def something_is_remembered(self) -> None:
        """As in the beginning."""

    @rule(by=st.sampled_from([3 * MINUTE, 12 * MINUTE]), wishes=st.lists(WISHES, max_size=3))
    def begin_a_sweep(self, by: int, wishes: list[Wish]) -> None:
        """When most names have had their time; somebody asks for those that were not reached."""
        self._end_sweep()
        self.time_passes(by)
        self._swept_at = self.model.now
        self._pausing.begin_sweep(self.model.now)
        for _, one in zip(self._each_name(), wishes, strict=False):
            if not self._pausing.is_reached(self.turns.key):
                self._request(one)

    @rule()
    def sweep(self) -> None:
        self._end_sweep()
        super().sweep()

    @rule(by=st.sampled_from([11 * MINUTE, 1_000 * MINUTE]))
    def clock_is_set_back(self, by: int) -> None:
        self._end_sweep()
        super().clock_is_set_back(by)

    def _end_sweep(self) -> None:
        self._pausing.end_sweep()
        self._find_out()

    def _leave(self, asked: Asked, ambiguous: bool, end: End) -> None:
        if not self._pausing.sweeps:
            self._find_out()
        waiter = self.name.waiters.get(asked.id)
        if waiter is None or self.model.now < waiter.deadline or not self._pausing.sweeps:
            super()._leave(asked, ambiguous, end)
