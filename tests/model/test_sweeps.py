"""Sweeps in PostgreSQL against the machine of ``memory://``, which knows of none: the same answers and
messages. When everybody is dead, nothing is left. Of each condition taken out of a sweep, and of how long a
row is kept, a history by hand notices it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import pytest

from aiodlock.backends.postgres.schema import create_statements

from ..postgres import PostgresServer
from ..servers import Servers, installed
from . import histories
from .histories import History, Tale
from .sweeps import (
    KEPT,
    Interrupted,
    PausingDatabase,
    Swept,
    SweptLocks,
    SweptOnces,
    SweptSemaphores,
)
from .test_scripts import (
    FEWEST,
    MINUTE,
    STEPS,
    USUAL,
    Kept,
    Locks,
    Onces,
    Semaphores,
    run,
    take_steps,
)
from .turns import WAYS, Database, VirtualTurns, with_ways

_MACHINES: dict[type[Locks], type[Swept]] = {
    Locks: SweptLocks,
    Semaphores: SweptSemaphores,
    Onces: SweptOnces,
}


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[Database]:
    database = Database(postgres.url)
    yield database
    database.close()


@pytest.mark.timeout(600 + STEPS / 10)
@pytest.mark.parametrize("machine", _MACHINES.values())
def test_sweeps_change_no_answer_and_leave_nothing_of_the_dead(
    database: Database, machine: type[Swept]
) -> None:
    steps = STEPS // 5 if machine is SweptLocks else STEPS // 15
    machine.steps = 0
    take_steps(lambda: machine(database), steps)
    assert machine.steps > steps // USUAL * FEWEST


def _tell(told: Swept, tale: Tale) -> None:
    """Run a history with a sweep after each step, and let everybody die."""
    try:
        tale(History(told))
        told.everybody_dies([], [], 0)
    finally:
        told.teardown()


def _tell_all_ways(database: Database, tale: Tale) -> None:
    for kept, way in product(KEPT, WAYS):
        _tell(_SWEPT[tale](database, (way,), kept), tale)


@pytest.fixture
def one_database(servers: Servers) -> Iterator[Database]:
    """Give one of the oldest server: histories by hand are the same each time."""
    if not installed("postgres"):
        pytest.skip("postgres is not installed")
    database = Database(servers.postgres("postgres").url)
    yield database
    database.close()


def test_sweeps_change_no_answer_of_histories_by_hand(one_database: Database) -> None:
    for machine, tale in histories.ALL:
        _tell(_MACHINES[machine](one_database), tale)
    for tale in _SWEPT:
        _tell_all_ways(one_database, tale)


# -- while a sweep pauses between its reading and its deleting ----------------------------------------


@pytest.fixture
def pausing(postgres: PostgresServer) -> Iterator[PausingDatabase]:
    database = PausingDatabase(postgres.url)
    yield database
    database.close()


@pytest.mark.timeout(600 + STEPS / 10)
def test_steps_while_a_sweep_pauses_are_answered_as_by_the_machine(
    pausing: PausingDatabase,
) -> None:
    take_steps(lambda: Interrupted(pausing), STEPS // 10)


@pytest.mark.parametrize("set_back", [0, 1_000 * MINUTE])
def test_name_that_is_taken_while_a_sweep_pauses_is_not_swept(
    pausing: PausingDatabase, set_back: int
) -> None:
    """Also if its lease ends before the sweep began, as the clock was set back meanwhile."""
    _take_names_while_a_sweep_pauses(pausing, set_back)


def _take_names_while_a_sweep_pauses(pausing: PausingDatabase, set_back: int) -> None:
    names = [VirtualTurns(pausing, "lock") for _ in range(3)]
    now = 2_000 * MINUTE
    for turns in names:
        turns.kept, turns.time = Kept(token=MINUTE), now
        run(turns.acquire(turns.key))
        run(turns.leave(turns.key))
    now += 20 * MINUTE
    pausing.begin_sweep(now)
    now -= set_back
    pausing.set_sweepers_clock(now)
    free = [turns for turns in names if not pausing.is_reached(turns.key)]
    for turns in free:
        turns.time = now
        assert run(turns.acquire(f"new of {turns.key}"))[0] == "granted"
    pausing.end_sweep()
    for turns in free:
        assert run(turns.acquire(f"other of {turns.key}", wait=False)) == ["busy"]
    assert len(free) == 2


# -- what a row is kept for --------------------------------------------------------------------------


def one_that_extends_and_dies(history: History) -> None:
    holder = history.request()
    history.time_passes(MINUTE)
    history.extend(holder)


def reader_beside_another_extends_and_dies(history: History) -> None:
    first = history.request("shared")
    history.request("shared")
    history.extend(first, length=5 * MINUTE)


def one_that_takes_a_free_name_and_dies(history: History) -> None:
    history.leave(history.request())
    history.time_passes(MINUTE)
    history.request()


def one_with_a_lock_delay_dies(history: History) -> None:
    history.request(delay=MINUTE)


def one_with_a_hold_dies(history: History) -> None:
    history.request(hold=11 * MINUTE, begins=True)


def waiter_with_a_hold_finds_its_turn_and_dies(history: History) -> None:
    history.request()
    waiter = history.request(waiter_ttl=10 * MINUTE, hold=11 * MINUTE)
    history.time_passes(2 * MINUTE)
    history.extend(waiter, begins=True)


def waiter_that_is_granted_and_dies(history: History) -> None:
    holder = history.request()
    history.request(waiter_ttl=10 * MINUTE)
    history.time_passes(MINUTE)
    history.leave(holder)


def waiter_that_is_granted_and_dies_with_a_lock_delay(history: History) -> None:
    holder = history.request()
    history.request(waiter_ttl=10 * MINUTE, delay=MINUTE)
    history.leave(holder)


def one_that_waits_longer_than_the_last_token_is_kept(history: History) -> None:
    history.request()
    waiter = history.request(waiter_ttl=10 * MINUTE)
    history.time_passes(2 * MINUTE)
    history.extend(waiter)


def holder_and_waiter_that_die(history: History) -> None:
    history.request()
    history.request(waiter_ttl=10 * MINUTE)


def duplicate_that_comes_when_the_last_token_is_forgotten(history: History) -> None:
    holder = history.request()
    history.leave(holder, ambiguous=True)
    history.time_passes(2 * MINUTE)
    history.repeat(holder)


def success_that_is_kept_longer_than_the_last_token(history: History) -> None:
    holder = history.request()
    history.record(holder)
    history.time_passes(6 * MINUTE)
    history.request()


# -- what was swept, and the clock was set back ------------------------------------------------------


def success_that_was_swept_and_the_clock_was_set_back(history: History) -> None:
    history.record(history.request())
    history.inspect()
    history.time_passes(7 * MINUTE)
    history.clock_is_set_back()
    history.request()


def lease_that_is_broken_twice(history: History) -> None:
    """The second time its end would be nearer, as the clock was set back."""
    holder = history.request()
    history.break_lock()
    history.clock_is_set_back()
    history.repeat(holder)
    history.break_lock()
    history.time_passes(5 * MINUTE)
    history.extend(holder)
    history.leave(holder)


def request_that_is_left_twice(history: History) -> None:
    """The second time its marker would end sooner, as the clock was set back."""
    holder = history.request()
    history.leave(holder, ambiguous=True)
    history.clock_is_set_back()
    history.leave(holder, ambiguous=True)
    history.time_passes(4 * MINUTE)
    history.repeat(holder)


LOCKS: list[Tale] = [
    one_that_extends_and_dies,
    reader_beside_another_extends_and_dies,
    one_that_takes_a_free_name_and_dies,
    one_with_a_lock_delay_dies,
    one_with_a_hold_dies,
    waiter_with_a_hold_finds_its_turn_and_dies,
    waiter_that_is_granted_and_dies,
    waiter_that_is_granted_and_dies_with_a_lock_delay,
    one_that_waits_longer_than_the_last_token_is_kept,
    holder_and_waiter_that_die,
    duplicate_that_comes_when_the_last_token_is_forgotten,
    lease_that_is_broken_twice,
    request_that_is_left_twice,
]
ONCES: list[Tale] = [
    success_that_is_kept_longer_than_the_last_token,
    success_that_was_swept_and_the_clock_was_set_back,
]
_SWEPT: dict[Tale, type[Swept]] = {
    **dict.fromkeys(LOCKS, SweptLocks),
    **dict.fromkeys(ONCES, SweptOnces),
}


# -- what the histories are worth --------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """`old`, which stands in one function, becomes `new` wherever it stands there."""

    rule: str
    old: str
    new: str
    noticed_by: Tale


_KEPT_BY_TURN = "s.keep_until := greatest(s.keep_until, "
_WITH_ANSWER = "\n    s.changed := true;\n    s.answer"
_KEPT_BY_ONE = "greatest(n.keep_until, now_us / 1000 + length_ms, now_us / 1000 + 1 + retention)"
_KEPT_BY_MANY = "greatest(n.keep_until, now_ms + a.ttl, now_ms + 1 + retention)"
_KEPT_BY_LEAVE = "greatest(n.keep_until, its_deadline, new_token / 1000 + 1 + retention)"
MUTANTS = [
    # Of sweeps.
    Mutant(
        "a marker has its time",
        "and m.ctid < there and m.keep_until <= now_ms;",
        "and m.ctid < there;",
        duplicate_that_comes_when_the_last_token_is_forgotten,
    ),
    Mutant(
        "markers are swept",
        "delete from aiodlock.marker m where m.ctid >= here and m.ctid < there and m.keep_until <= now_ms;",
        "",
        duplicate_that_comes_when_the_last_token_is_forgotten,
    ),
    Mutant(
        "a break has its time",
        "and b.ctid < there and b.keep_until <= now_ms;",
        "and b.ctid < there;",
        lease_that_is_broken_twice,
    ),
    Mutant(
        "a success has its time",
        "and r.ctid < there and r.keep_until <= now_ms;",
        "and r.ctid < there;",
        success_that_is_kept_longer_than_the_last_token,
    ),
    Mutant(
        "a name has its time",
        "n.keep_until <= now_ms",
        "true",
        one_that_extends_and_dies,
    ),
    Mutant(
        "a name that is waited for stays",
        "n.head > 0 and w.key = n.key and w.arrival >= n.head and now_ms < w.deadline",
        "false",
        one_that_waits_longer_than_the_last_token_is_kept,
    ),
    Mutant(
        "one for which only the dead wait does not",
        "w.arrival >= n.head and now_ms < w.deadline",
        "w.arrival >= n.head",
        holder_and_waiter_that_die,
    ),
    Mutant(
        "dead waiters go with it",
        "delete from aiodlock.waiter w where w.key = candidate and w.deadline <= now_ms;",
        "null;",
        holder_and_waiter_that_die,
    ),
    # Of how long a name's row is kept.
    Mutant(
        "for an extended lease",
        _KEPT_BY_TURN + "aiodlock.closed_until(mine));",
        "",
        reader_beside_another_extends_and_dies,
    ),
    Mutant(
        "for a marker",
        _KEPT_BY_TURN + "s.marked_until);",
        "",
        duplicate_that_comes_when_the_last_token_is_forgotten,
    ),
    Mutant(
        "for a success",
        _KEPT_BY_TURN + "s.recorded_until);",
        "",
        success_that_is_kept_longer_than_the_last_token,
    ),
    Mutant(
        "for the last token",
        _KEPT_BY_TURN + "s.token / 1000 + 1 + s.retention);",
        "",
        one_with_a_lock_delay_dies,
    ),
    Mutant(
        "for the lock-delay of a waiter that is granted",
        _KEPT_BY_TURN + "h.deadline + h.delay, h.hold_until);",
        _KEPT_BY_TURN + "h.deadline, h.hold_until);",
        waiter_that_is_granted_and_dies_with_a_lock_delay,
    ),
    Mutant(
        "for the hold of a waiter that is granted",
        _KEPT_BY_TURN + "h.deadline + h.delay, h.hold_until);",
        _KEPT_BY_TURN + "h.deadline + h.delay);",
        waiter_with_a_hold_finds_its_turn_and_dies,
    ),
    Mutant(
        "for a lock-delay",
        _KEPT_BY_TURN + "(s.mine).deadline + (s.mine).delay, (s.mine).hold_until);" + _WITH_ANSWER,
        _KEPT_BY_TURN + "(s.mine).deadline, (s.mine).hold_until);" + _WITH_ANSWER,
        one_with_a_lock_delay_dies,
    ),
    Mutant(
        "for a hold",
        _KEPT_BY_TURN + "(s.mine).deadline + (s.mine).delay, (s.mine).hold_until);" + _WITH_ANSWER,
        _KEPT_BY_TURN + "(s.mine).deadline + (s.mine).delay);" + _WITH_ANSWER,
        one_with_a_hold_dies,
    ),
    Mutant(
        "for one that takes a free name",
        _KEPT_BY_ONE,
        _KEPT_BY_ONE.replace("now_us / 1000 + length_ms, ", ""),
        one_that_takes_a_free_name_and_dies,
    ),
    Mutant(
        "for the token of one that takes a free name",
        _KEPT_BY_ONE,
        _KEPT_BY_ONE.replace(", now_us / 1000 + 1 + retention", ""),
        one_that_takes_a_free_name_and_dies,
    ),
    Mutant(
        "for many that take free names",
        _KEPT_BY_MANY,
        _KEPT_BY_MANY.replace("now_ms + a.ttl, ", ""),
        one_that_takes_a_free_name_and_dies,
    ),
    Mutant(
        "for the tokens of many that take free names",
        _KEPT_BY_MANY,
        _KEPT_BY_MANY.replace(", now_ms + 1 + retention", ""),
        one_that_takes_a_free_name_and_dies,
    ),
    Mutant(
        "for many leases that are extended",
        "greatest(n.keep_until, now_ms + a.ttl), lone_until",
        "n.keep_until, lone_until",
        one_that_extends_and_dies,
    ),
    Mutant(
        "for one to whom a name is handed over",
        _KEPT_BY_LEAVE,
        _KEPT_BY_LEAVE.replace("its_deadline, ", ""),
        waiter_that_is_granted_and_dies,
    ),
    Mutant(
        "for the token of one to whom a name is handed over",
        _KEPT_BY_LEAVE,
        _KEPT_BY_LEAVE.replace(", new_token / 1000 + 1 + retention", ""),
        waiter_that_is_granted_and_dies,
    ),
    # Of what is remembered when the clock was set back.
    Mutant(
        "a break is remembered until the later end",
        "greatest(b.keep_until, excluded.keep_until)",
        "excluded.keep_until",
        lease_that_is_broken_twice,
    ),
    Mutant(
        "so is a marker",
        "greatest(m.keep_until, excluded.keep_until)",
        "excluded.keep_until",
        request_that_is_left_twice,
    ),
    Mutant(
        "the record of a success may have been swept",
        "if not found or s.now_ms >= s.recorded_until then",
        "if s.now_ms >= s.recorded_until then",
        success_that_was_swept_and_the_clock_was_set_back,
    ),
]
_BEGIN, _END = "create function", "\nend $$;"


def _function_with(text: str) -> str:
    functions = with_ways(create_statements("unlogged")).split(_BEGIN)
    found = [function for function in functions if text in function]
    assert len(found) == 1, f"this is not in one of the functions: {text}"
    return "create or replace function" + found[0].partition(_END)[0] + _END


def test_histories_by_hand_notice_each_condition_taken_out(one_database: Database) -> None:
    execute = one_database.connection.execute
    unnoticed = []
    for mutant in MUTANTS:
        function = _function_with(mutant.old)
        one_database.do(execute(function.replace(mutant.old, mutant.new)))
        try:
            _tell_all_ways(one_database, mutant.noticed_by)
            unnoticed.append(mutant.rule)
        except (AssertionError, IndexError):  # an answer of nothing is noticed, too
            pass
        one_database.do(execute(function))
    assert not unnoticed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("n.key = candidate and n.keep_until <= now_ms", "n.key = candidate"),
        ("      now_ms := aiodlock.clock_us() / 1000;\n", ""),
    ],
    ids=["a name is looked at again", "by the clock of that moment"],
)
def test_pause_notices_a_condition_taken_out(pausing: PausingDatabase, old: str, new: str) -> None:
    pausing.do(pausing.connection.execute(_function_with(old).replace(old, new)))
    with pytest.raises(AssertionError):
        _take_names_while_a_sweep_pauses(pausing, 1_000 * MINUTE)
