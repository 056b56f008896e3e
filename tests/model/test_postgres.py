"""The functions in PostgreSQL against the machine of ``memory://``: any sequence of calls, the same answers
and messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import asyncpg
import pytest
from hypothesis import Phase, Verbosity

from aiodlock.backends.postgres.schema import create_statements

from ..postgres import PostgresServer
from ..servers import Servers, installed
from .test_mutants import BUDGET
from .test_scripts import (
    FEWEST,
    MINUTE,
    STEPS,
    USUAL,
    Locks,
    Onces,
    Semaphores,
    run,
    take_steps,
)
from .turns import Database, VirtualTurns


@pytest.mark.timeout(300 + STEPS / 10)
@pytest.mark.parametrize("machine", [Locks, Semaphores, Onces])
def test_functions_answer_and_tell_as_the_machine(
    postgres: PostgresServer, machine: type[Locks]
) -> None:
    steps = STEPS if machine is Locks else STEPS // 3  # there is less to go wrong with one mode
    machine.steps = 0
    database = Database(postgres.url)
    try:
        take_steps(lambda: machine(VirtualTurns(database, machine.kind)), steps)
    finally:
        database.close()
    assert machine.steps > steps // USUAL * FEWEST


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[Database]:
    database = Database(postgres.url)
    yield database
    database.close()


@pytest.mark.parametrize("meanwhile", ["acquired", "waited for", "left"])
def test_success_that_had_expired_stays_away_when_the_clock_is_set_back(
    database: Database, meanwhile: str
) -> None:
    turns = VirtualTurns(database, "once")
    turns.time = MINUTE
    run(turns.acquire("a"))
    assert run(turns.leave("a", recorded=("fine", MINUTE))) == ["recorded"]
    assert run(turns.acquire("b", wait=False)) == ["done", "fine"]
    turns.time += MINUTE
    assert run(turns.acquire("b"))[0] == "granted"
    if meanwhile == "waited for":
        assert run(turns.acquire("c"))[0] == "waiting"
    elif meanwhile == "left":
        run(turns.leave("b"))
    turns.time -= MINUTE // 2
    expected = "granted" if meanwhile == "left" else "waiting"
    assert run(turns.acquire("c"))[0] == expected


@pytest.mark.parametrize("began", [True, False])
def test_lease_lost_just_before_its_deadline_keeps_what_is_left_of_its_hold(
    database: Database, began: bool
) -> None:
    turns = VirtualTurns(database, "lock")
    turns.time = MINUTE
    hold = 2 * MINUTE - 10
    run(turns.acquire("a", ttl=2 * MINUTE, words=f" h={hold}", how="begins" if began else "later"))
    assert run(turns.acquire("b", waiter_ttl=10 * MINUTE))[0] == "waiting"
    turns.time += hold - 10
    reply = run(turns.leave("a", end="lost"))
    assert reply == ["gone", "expired"] if began else reply[0] == "released"
    assert run(turns.extend("b", 10 * MINUTE))[0] == ("waiting" if began else "held")
    turns.time += 20
    assert run(turns.extend("b", 10 * MINUTE))[0] == "held"


@dataclass(frozen=True)
class Mutant:
    """`old`, which stands once in ``schema.sql``, becomes `new`."""

    rule: str
    old: str
    new: str
    machine: type[Locks] = Locks

    def statements(self) -> str:
        found = create_statements("unlogged")
        assert found.count(self.old) == 1, f"this is not in the functions any more: {self.old}"
        return found.replace(self.old, self.new)


MUTANTS = [
    Mutant(
        "nobody gets in past a waiter",
        "or (head_at = 0 and (cardinality(holding) = 0",
        "or (true and (cardinality(holding) = 0",
    ),
    Mutant(
        "no reader beside a writer", "if h.mode = 'x' then\n      return false;", "if false then"
    ),
    Mutant(
        "a semaphore has its limit",
        "cardinality(holders) >= places",
        "cardinality(holders) > places",
        Semaphores,
    ),
    Mutant(
        "a reader does not come to exclude",
        "found_token := -h.token;",
        "found_token := h.token;",
    ),
    Mutant(
        "an overdue record gives its owner nothing",
        "if h.owner = who and now_ms < h.deadline then",
        "if h.owner = who then",
    ),
    Mutant("ghosts are skipped", "if now_ms >= head.deadline then", "if false then"),
    Mutant(
        "a lost name stays closed for its lock-delay",
        "else greatest(h.deadline + h.delay,",
        "else greatest(h.deadline,",
    ),
    Mutant(
        "an extension never brings the deadline nearer",
        "mine.deadline := greatest(mine.deadline, now_ms + f[4]::bigint);",
        "mine.deadline := now_ms + f[4]::bigint;",
    ),
    Mutant(
        "a holder's deadline is clamped when the clock was set back",
        "stale := stale or h.deadline > now_ms + h.length or",
        "stale := stale or",
    ),
    Mutant(
        "so are those of all waiters",
        "where w.key = k and w.deadline > now_ms + w.length;",
        "where w.id = head.id;",
    ),
    Mutant(
        "a marker refuses a late duplicate",
        "answers[number] := 'gone gone';",
        "answers[number] := 'busy';",
    ),
    Mutant("the row tells of markers", "and now_ms >= n.marked_until", ""),
    Mutant(
        "a break is told",
        "perform pg_notify(aiodlock.channel(h.client), message);",
        "perform pg_notify(aiodlock.channel('three'), message);",
    ),
    Mutant(
        "the head learns the earliest end of its blockers",
        "earliest := least(earliest, aiodlock.closed_until(h));",
        "earliest := greatest(earliest, aiodlock.closed_until(h));",
    ),
    Mutant(
        "a lease that is lost does not open its name early",
        "and (mine.delay > 0 or (mine.began and now_ms < mine.hold_until)) then",
        "and false then",
    ),
    Mutant(
        "a head that asks soon enough is told nothing",
        "and aiodlock.earliest_end(holding) < head.deadline - head.length * 2 / 3 then",
        "then",
    ),
    Mutant("what is held is not free", "and n.head = 0 and n.holders = '{}'", ""),
    Mutant(
        "who releases alone leaves the others their holds",
        "cardinality(n.holders) = 1 and (n.holders[1]).id = f[3]",
        "(n.holders[1]).id = f[3]",
    ),
    Mutant(
        "who releases hands off",
        "and n.head = 0 and cardinality(n.holders)",
        "and cardinality(n.holders)",
    ),
    Mutant(
        "what is overdue is not released",
        "and now_ms < (n.holders[1]).deadline and",
        "and",
    ),
    Mutant(
        "a lone lease that is lost does not open its name early",
        "(f[5] = 'ended' or (n.holders[1]).delay = 0)",
        "true",
    ),
    Mutant("an overdue head is met", "freed or now_ms >= head_deadline or", "freed or"),
    Mutant(
        "a head's deadline is clamped when the clock was set back",
        "or head_deadline > now_ms + head_length) then",
        ") then",
    ),
    Mutant(
        "the queue is in order though the clock was set back",
        "coalesce(max(l.arrival) + 1, now_us)",
        "now_us",
    ),
]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_constants_of_no_module")
@pytest.mark.skipif(not installed("postgres"), reason="postgres is not installed")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
def test_model_test_notices_a_rule_taken_out_of_the_functions(
    servers: Servers, mutant: Mutant
) -> None:
    database = Database(servers.postgres("postgres").url, mutant.statements())
    machine = mutant.machine
    try:
        with pytest.raises((AssertionError, asyncpg.PostgresError)):
            take_steps(
                lambda: machine(VirtualTurns(database, machine.kind)),
                BUDGET,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                report_multiple_bugs=False,
                verbosity=Verbosity.quiet,
            )
    finally:
        database.close()
