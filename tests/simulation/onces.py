"""What is done once, and what a body keeps closed: what users do with them, and what must hold.

``record``:

- Only a live holder whose body has not failed puts a success on record. No other is on record then.
- It ends all holds and waits, and each waiter is told.
- It stays what it is until it ends or is taken back. Everybody who asks meanwhile gets its result.
- An exit without an exception means that the success is on record. A result that is given was on record.

``closed``: If its body began, a name stays closed until ``hold_at_least`` after the grant, whichever way
the lease ended. Else it does not.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from aiodlock import NotHeld
from aiodlock._acquisition import Acquisition
from aiodlock._description import Description
from aiodlock._lease import Lease
from aiodlock._once import check_result, encode_record

from .checkers import Checkers, Name, Record, read_name
from .world import Process

if TYPE_CHECKING:
    from aiodlock import OnceRun

    from .scenario import SimClient, Simulation

_BASE = "aiodlock:2:once:"


class BodyFailed(Exception):
    """A user's body raises."""


@dataclass
class Habits:
    """What a seed does of this; drawn apart, so that the other seeds stay what they were."""

    random: random.Random
    #: The share of turns that do something once, and for how long a success is kept.
    share: float = 0.0
    keeps: tuple[float, ...] = ()
    failing: float = 0.0
    forgets: float = 0.0
    breaks: float = 0.03
    #: For locks and semaphores: 0 is none.
    holds: tuple[float, ...] = (0.0,)

    @property
    def longest(self) -> float:
        """How long a name may be kept closed."""
        return max(*self.holds, *self.keeps, 0.0)

    def hold(self) -> float:
        return self.random.choice(self.holds) if self.holds != (0.0,) else 0.0


def draw_habits(seed: int) -> Habits:
    rng = random.Random(f"{seed} once")
    habits = Habits(rng)
    if rng.random() < 0.4:
        habits.share = rng.choice((0.3, 0.6, 0.9))
        habits.keeps = rng.choice(((0.3,), (0.05, 0.5), (2.0,), (0.1, 30.0)))
        habits.failing = rng.choice((0.1, 0.5))
        habits.forgets = rng.choice((0.0, 0.05, 0.2))
    if rng.random() < 0.3:
        habits.holds = rng.choice(((0.3,), (0.0, 0.05, 0.6), (0.0, 0.2, 1.5)))
    return habits


class Onces:
    """What users' tasks do."""

    def __init__(self, simulation: Simulation, habits: Habits, checkers: RecordCheckers) -> None:
        self._simulation = simulation
        self.habits = habits
        self.checkers = checkers

    def is_next(self) -> bool:
        """Whether the next turn of a task is one of these."""
        return self.habits.share > 0.0 and self.habits.random.random() < self.habits.share

    async def turn(self, process: Process, client: SimClient) -> None:
        habits, rng = self.habits, self.habits.random
        name = f"o{rng.randrange(2)}"
        kind = rng.random()
        if kind < habits.forgets:
            await client.forget(name)
        elif kind < habits.forgets + habits.breaks:
            await client.break_lock(name, kind="once")
        elif kind < habits.forgets + habits.breaks + 0.02:
            await client.inspect(name, kind="once")
        else:
            with suppress(BodyFailed, NotHeld):
                await self._do(process, client, name)

    async def _do(self, process: Process, client: SimClient, name: str) -> None:
        rng, style = self.habits.random, self._simulation.style
        base, entered = f"{_BASE}{{{name}}}", self._simulation.world.time
        keep = rng.choice(self.habits.keeps)
        options: dict[str, Any] = {
            "ttl": rng.choice(style.ttls),
            "lock_delay": rng.choice(style.delays),
            "timeout": rng.choice((None, None, None, 0.5, 2.0, 0.0)),
            "on_lost": rng.choice(("cancel", "cancel", "flag")),
            "hold_at_least": min(keep, self.habits.hold()),
        }
        async with client.once(name, keep=keep, **options) as run:
            if run.first:
                await self._first(process, run, base)
        if run.lease is not None:
            self.checkers.confirmed(base, run.lease, run.result)
        else:
            self.checkers.given(base, run.result, entered)

    async def _first(self, process: Process, run: OnceRun, base: str) -> None:
        rng, lease = self.habits.random, run.lease
        assert lease is not None
        simulation = self._simulation
        try:
            async with simulation._body(process, lease):
                await simulation._hold(lease, base)
                if rng.random() < self.habits.failing:
                    raise BodyFailed
                if rng.random() < 0.03:
                    await lease.release()
                    raise BodyFailed
            run.result = rng.choice((f"of {lease.token}", f"of {lease.token}".encode(), None))
        except BaseException:
            self.checkers.failed.add(lease._request.id)
            raise


@dataclass
class Success:
    """What is on record. Times are milliseconds of the server's clock, ``ended`` is a true time."""

    id: str
    result: bytes
    until: int
    ended: float | None = None


@dataclass
class Closing:
    """A granted request with a hold: until when it keeps the name closed, if its body begins.

    When the server's clock was set back, whoever meets the record clamps it. The scripts that extend a
    lease or leave with nobody waiting meet no record but their own: that of another may end at any time
    from ``least`` on.
    """

    token: int
    hold: int
    until: int
    least: int

    def seen(self, now: int, *, met: bool) -> None:
        """The server has carried out a command on the name, and has met this record or not."""
        self.least = min(self.least, now + self.hold)
        if met:
            self.until = min(self.until, now + self.hold)


@dataclass
class Ledger:
    """One name of kind ``once``: what is on record, and all successes that ever were."""

    known: Name = field(default_factory=lambda: Name({}, {}))
    now: Success | None = None
    ever: list[Success] = field(default_factory=list)


class RecordCheckers:
    """Looks at each command beside the other checkers. Mutable state is listed in ``__init__``."""

    def __init__(self, checkers: Checkers) -> None:
        self._checkers = checkers
        self._server: Any = checkers.server
        self.ledgers: defaultdict[str, Ledger] = defaultdict(Ledger)
        #: How much there was to look at.
        self.seen: Counter[str] = Counter()
        #: Requests whose bodies failed, or were cancelled.
        self.failed: set[str] = set()
        #: Requests whose leases users have got, and those of which the server was told that.
        self.begun: set[str] = set()
        self.told: set[str] = set()
        #: By request id; and the names with their holders as they were last seen.
        self.closing: dict[str, Closing] = {}
        self.holders: dict[str, dict[str, Record]] = {}
        self.restored: dict[str, int] = {}
        checkers.server.executed.append(self._executed)
        checkers.server.lost_data.append(self._lost_data)

    # -- what users see ------------------------------------------------------------------------------

    def confirmed(self, base: str, lease: Lease, result: object) -> None:
        """An exit has confirmed a success."""
        id, kept = lease._request.id, encode_record(check_result(result))
        self.seen["confirmed"] += 1
        if not any(one.id == id and one.result == kept for one in self._ledger(base).ever):
            self._wrong("record", f"{id} was told that {kept!r} is on record, and it never was")

    def given(self, base: str, result: object, since: float) -> None:
        """Somebody got a result."""
        kept = encode_record(check_result(result))
        self.seen["given"] += 1
        for one in self._ledger(base).ever:
            if one.result == kept and (one.ended is None or one.ended >= since):
                return
        self._wrong("record", f"{kept!r} was given, which was not on record since {since:.6f}")

    # -- the server ----------------------------------------------------------------------------------

    def _wrong(self, checker: str, message: str) -> None:
        self._checkers.wrong(checker, message)

    def _ledger(self, base: str) -> Ledger:
        return self.ledgers[base]

    def _lost_data(self) -> None:
        for base, ledger in self.ledgers.items():
            self._end(ledger)
            kept = self._server.read_record(base)
            if kept is not None:
                ledger.now = Success(*kept)
                ledger.ever.append(ledger.now)
            ledger.known = read_name(self._server, base)
        self.closing.clear()
        self.holders = {base: read_name(self._server, base).holders for base in self.holders}
        # Of what an older snapshot has brought back it is not known when it was granted.
        self.restored = {id: r.token for many in self.holders.values() for id, r in many.items()}

    def _end(self, ledger: Ledger) -> None:
        if ledger.now is not None:
            ledger.now.ended = self._checkers.world.time
            ledger.now = None

    def _executed(self, command: Any, reply: Any) -> None:
        if isinstance(reply, Exception):
            return
        if command.forgets:
            base = command.forgets
            self._end(self._ledger(base))
            # This, too, clamps what is left when the clock was set back.
            known = read_name(self._server, base)
            self._checkers.ledger(base).known = self._ledger(base).known = known
            self.holders[base] = known.holders
            now = self._server.now_ms()
            for id in known.holders:
                if id in self.closing:
                    self.closing[id].seen(now, met=self._server.meets_all)
            return
        if command.script not in ("acquire", "extend", "leave", "break"):
            return
        base = command.base
        now = self._server.now_ms()
        if command.script == "break":
            ledger = self._ledger(base)
            ledger.known = self._checkers.ledger(base).known
            # This, too, meets the end of a success: it does not come again when the clock is set back.
            if not self._stands(ledger.now, now) and not self._server.read_record(base):
                self._end(ledger)
        elif base.startswith(_BASE):
            self._check_record(base, command, reply, now)
        self._check_closed(base, command, reply, now)

    def _check_record(self, base: str, command: Any, reply: Any, now: int) -> None:
        ledger, kept = self._ledger(base), self._server.read_record(base)
        before, after = ledger.known, self._checkers.ledger(base).known
        ledger.known = after
        word = reply[0].decode()
        success = ledger.now
        # An end that the server has not met may come again when its clock is set back. Redis counts parts
        # of a millisecond.
        met = not kept or (command.script == "acquire" and not self._stands(success, now - 1))
        # The key may have expired by itself before that, and then nothing comes again.
        latest = now if kept else max(now, self._checkers.latest_ms)
        if met and not self._stands(success, latest):
            self._end(ledger)
            success = None
        if word == "recorded":
            if success is None or success.id != command.id:
                self._check_recording(command, before, after, now, success)
                success = Success(command.id, command.record[0], now + command.record[1])
                ledger.now = success
                ledger.ever.append(success)
        elif word == "done":
            if success is None or reply[1] != success.result:
                self._wrong("record", f"{command} is told {reply[1]!r}, on record is {success}")
        elif command.record is not None:
            holder = before.holders.get(command.id)
            if success is not None and success.id == command.id:
                self._wrong("record", f"{command} is told {reply}, and on record is {success}")
            if holder is not None and now < min(holder.deadline, now + holder.length):
                self._wrong("record", f"{command} holds, and is not put on record: {reply}")
        elif word in ("granted", "waiting", "busy", "held") and self._stands(success, now):
            self._wrong("record", f"{command} is {word} although there is {success}")
        if success is None or now >= success.until:
            return
        if kept is None or kept[:2] != (success.id, success.result):
            self._wrong("record", f"{success} is not what is kept after {command}: {kept}")
        elif abs(kept[2] - success.until) > 2:
            self._wrong("record", f"{success} is kept until {kept[2]} after {command}")

    @staticmethod
    def _stands(success: Success | None, now: int) -> bool:
        return success is not None and now < success.until

    def _check_recording(
        self, command: Any, before: Name, after: Name, now: int, success: Success | None
    ) -> None:
        if success is not None:
            self._wrong("record", f"{command} records beside {success}")
        holder = before.holders.get(command.id)
        if holder is None or now >= holder.deadline:
            self._wrong("record", f"{command} records without the lease: {holder}")
        if command.id in self.failed:
            self._wrong("record", f"{command} records what has failed")
        if after.holders or after.waiters:
            self._wrong("record", f"after {command} somebody holds or waits: {after}")
        told = [
            id for what, ids in self._server.published if what == "done" for id in ids.split(",")
        ]
        self.seen["waiters told"] += len(told)
        live = {id for id, waiter in before.waiters.items() if now < waiter.deadline}
        if not live <= set(told) or len(told) != len(set(told)):
            self._wrong("record", f"{command}: {live} waited, {told} are told")

    # -- what is closed ------------------------------------------------------------------------------

    def _check_closed(self, base: str, command: Any, reply: Any, now: int) -> None:
        before = self.holders.get(base, {})
        after = self.holders[base] = self._checkers.ledger(base).known.holders
        if command.begins:
            self.told.add(command.id)
        for id, record in after.items():
            if not record.hold or self.restored.get(id) == record.token:
                continue
            closing = self.closing.get(id)
            granted = _is_live(record, now) and not _is_live(before.get(id), now)
            # With the same token, too: its owner held meanwhile.
            if closing is None or closing.token != record.token or granted:
                until = now + record.hold
                closing = self.closing[id] = Closing(record.token, record.hold, until, until)
            closing.seen(now, met=id == command.id or self._server.meets_all)
            if record.hold_until and id not in self.told:
                self._wrong("closed", f"{record} counts its hold, and its body has not begun")
        for record in after.values():
            self._check_length(record, now)
        if command.script == "leave" and command.id in before:
            self._check_left(command, before[command.id], after.get(command.id), now)

    def _check_length(self, record: Record, now: int) -> None:
        closing = self.closing.get(record.id)
        if closing is None or closing.token != record.token or record.id in self._checkers.excused:
            return
        if not record.hold_until:
            return
        if not closing.least <= record.hold_until <= closing.until:
            self._wrong("closed", f"{record} counts its hold until another time than {closing}")
        closing.least = closing.until = record.hold_until

    def _check_left(self, command: Any, old: Record, new: Record | None, now: int) -> None:
        closing = self.closing.get(old.id)
        if closing is None or closing.token != old.token or command.id in self._checkers.excused:
            return
        live = _is_live(old, now)
        closing.seen(now, met=True)
        self.seen["left with a hold"] += live and now < closing.least
        closed = 0 if new is None or new.token != old.token else new.closed_until
        if old.id not in self.begun:
            if live and not command.lost and closed > 0:
                self._wrong("closed", f"{command}: its body never began, and {new} is closed")
        elif live and command.record is None and closed < closing.least and now < closing.least:
            self._wrong("closed", f"{command}: it has to be closed until {closing.least}: {new}")


def _is_live(record: Record | None, now: int) -> bool:
    return record is not None and now < min(record.deadline, now + record.length)


def attach(simulation: Simulation) -> Onces:
    """Let the seed's users do things once and keep names closed, and look at what comes of it."""
    checkers = RecordCheckers(simulation.checkers)
    right: Callable[..., Any] = Description.acquire

    async def acquire(self: Description, *args: Any) -> Acquisition:
        acquired = cast("Acquisition", await right(self, *args))
        if acquired.request.terms.begins:
            checkers.begun.add(acquired.request.id)
        return acquired

    simulation.patch(Description, "acquire", acquire)
    return Onces(simulation, draw_habits(simulation.seed), checkers)
