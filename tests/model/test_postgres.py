"""The functions in PostgreSQL against the machine of ``memory://``: any sequence of calls, the same answers
and messages. Of each rule taken out of the functions, a history by hand notices it.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import asyncpg
import pytest

from aiodlock.backends.postgres.schema import create_statements

from ..postgres import PostgresServer
from ..servers import Servers, installed
from . import histories
from .histories import Tale
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
from .turns import WAYS, Database, VirtualTurns


@pytest.mark.timeout(600 + STEPS / 10)
@pytest.mark.parametrize("machine", [Locks, Semaphores, Onces])
def test_functions_answer_and_tell_as_the_machine(
    request: pytest.FixtureRequest, postgres: PostgresServer, machine: type[Locks]
) -> None:
    steps = STEPS if machine is Locks else STEPS // 3  # there is less to go wrong with one mode
    if request.node.callspec.params["postgres"] == "postgres":
        steps //= 3  # the functions are those of the newer server, which all machines have
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


def test_success_that_was_swept_stays_away_when_the_clock_is_set_back(database: Database) -> None:
    """It was answered with nothing, and that answer was left out between those to other messages."""
    turns = VirtualTurns(database, "once")
    turns.time = MINUTE
    run(turns.acquire("a"))
    assert run(turns.leave("a", recorded=("fine", MINUTE))) == ["recorded"]
    turns.time += MINUTE
    turns.sweep()
    turns.time -= MINUTE // 2
    assert run(turns.acquire("b"))[0] == "granted"


@pytest.mark.parametrize("set_back", [0, 20 * MINUTE])
def test_break_is_remembered_to_its_end_though_the_request_is_broken_again(
    database: Database, set_back: int
) -> None:
    """A duplicate of its acquire came after the first break, and waited. Its lease was the shorter one."""
    turns = VirtualTurns(database, "lock")
    turns.kept = Kept(broken=MINUTE)
    turns.time = 60 * MINUTE
    run(turns.acquire("a", ttl=10 * MINUTE))
    assert run(turns.break_lock()) == 1
    turns.time -= set_back
    run(turns.acquire("b"))
    assert run(turns.acquire("a", waiter_ttl=MINUTE))[0] == "waiting"
    run(turns.leave("b"))
    assert run(turns.break_lock()) == 1
    turns.time += 2 * MINUTE
    assert run(turns.leave("a")) == ["gone", "broken"]


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


def test_marker_refuses_nobody_when_its_time_is_over_and_that_of_others_is_not(
    database: Database,
) -> None:
    turns = VirtualTurns(database, "lock")
    turns.kept = Kept(marker=MINUTE)
    turns.time = MINUTE
    for id in "ab":
        run(turns.acquire(id))
        run(turns.leave(id, ambiguous=True))
        turns.time += MINUTE // 2
    assert run(turns.acquire("b")) == ["gone", "gone"]
    assert run(turns.acquire("a"))[0] == "granted"


def test_success_is_not_recorded_again_when_its_time_is_over(database: Database) -> None:
    turns = VirtualTurns(database, "once")
    turns.time = MINUTE
    run(turns.acquire("a"))
    for _ in range(2):
        assert run(turns.leave("a", recorded=("fine", MINUTE))) == ["recorded"]
    turns.time += MINUTE
    assert run(turns.leave("a", recorded=("fine", MINUTE))) == ["gone", "gone"]


@pytest.mark.parametrize("extended", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_unlogged_names_stay_closed_after_a_crash_until_the_longest_lease_is_over(
    database: Database, way: str, extended: bool
) -> None:
    turns = VirtualTurns(database, "lock", (way,))
    turns.time = MINUTE
    for id, ttl in (("a", MINUTE), ("b", 7 * MINUTE)):
        run(turns.acquire(id, ttl=ttl))
        if extended:
            run(turns.extend(id, ttl + MINUTE))
        run(turns.leave(id))
        turns.time += 1
    empty = "truncate aiodlock.name, aiodlock.waiter, aiodlock.marker, aiodlock.present"
    database.do(database.connection.execute(empty))
    longest = (8 if extended else 7) * MINUTE
    assert run(turns.acquire("c")) == ["closed", str(longest)]
    turns.time += longest - 1
    assert run(turns.acquire("c")) == ["closed", "1"]
    turns.time += 1
    assert run(turns.acquire("c"))[0] == "granted"


@pytest.mark.parametrize("way", WAYS)
def test_unlogged_names_stay_closed_for_no_longer_when_the_clock_is_set_back(
    database: Database, way: str
) -> None:
    """As on a machine that starts with a wrong clock after it has lost power."""
    turns = VirtualTurns(database, "lock", (way,))
    turns.time = 100 * MINUTE
    run(turns.acquire("a", ttl=7 * MINUTE))
    run(turns.leave("a"))
    empty = "truncate aiodlock.name, aiodlock.waiter, aiodlock.marker, aiodlock.present"
    database.do(database.connection.execute(empty))
    assert run(turns.acquire("b")) == ["closed", str(7 * MINUTE)]
    turns.time = MINUTE
    assert run(turns.acquire("b")) == ["closed", str(7 * MINUTE)]
    turns.time += 7 * MINUTE - 1
    assert run(turns.acquire("b")) == ["closed", "1"]
    turns.time += 1
    assert run(turns.acquire("b"))[0] == "granted"


@pytest.mark.parametrize("first", ["late leave", "break", "forget"])
@pytest.mark.parametrize("way", WAYS)
def test_unlogged_name_is_not_opened_after_a_crash_by_what_makes_its_row_anew(
    database: Database, way: str, first: str
) -> None:
    """Before the acquire: a leave that is unsure whether its request was queued, or an operator."""
    turns = VirtualTurns(database, "once" if first == "forget" else "lock", (way,))
    turns.time = MINUTE
    run(turns.acquire("a", ttl=7 * MINUTE))
    empty = "truncate aiodlock.name, aiodlock.waiter, aiodlock.marker, aiodlock.present"
    database.do(database.connection.execute(empty))
    if first == "late leave":
        run(turns.leave("b", ambiguous=True))
    else:
        run(turns.break_lock() if first == "break" else turns.forget())
    assert run(turns.acquire("c")) == ["closed", str(7 * MINUTE)]
    turns.time += 7 * MINUTE
    assert run(turns.acquire("c"))[0] == "granted"


def test_lock_delay_is_part_of_the_longest_lease(database: Database) -> None:
    turns = VirtualTurns(database, "lock", ("general",))
    turns.time = MINUTE
    run(turns.acquire("a", delay=5 * MINUTE))
    run(turns.extend("a", 3 * MINUTE))
    longest = database.do(database.connection.fetchval("select longest from aiodlock.meta"))
    assert longest == 8 * MINUTE


def test_break_is_told_as_long_as_it_is_remembered(database: Database) -> None:
    turns = VirtualTurns(database, "lock")
    turns.kept = Kept(broken=3 * MINUTE)
    turns.time = MINUTE
    run(turns.acquire("a", ttl=MINUTE))
    run(turns.break_lock())
    turns.time += 3 * MINUTE - 1
    assert run(turns.extend("a", MINUTE)) == ["gone", "broken"]
    turns.time += 1
    assert run(turns.extend("a", MINUTE)) == ["gone", "gone"]


def test_dead_waiter_does_not_come_back_when_the_clock_is_set_back(database: Database) -> None:
    turns = VirtualTurns(database, "lock", ("general",))
    turns.time = 10 * MINUTE
    run(turns.acquire("a", ttl=10 * MINUTE))
    run(turns.acquire("b", waiter_ttl=MINUTE))
    run(turns.acquire("c", waiter_ttl=10 * MINUTE))
    turns.time += MINUTE
    assert run(turns.extend("c", 10 * MINUTE))[0] == "waiting"
    turns.time -= MINUTE // 2
    assert run(turns.extend("b", MINUTE)) == ["gone", "taken_over"]


def test_calls_about_one_name_change_nothing_of_another(database: Database) -> None:
    one, other = VirtualTurns(database, "once", ("general",)), VirtualTurns(database, "lock")
    one.time = other.time = 2_000 * MINUTE
    run(one.acquire("a"))
    for id in "xyz":
        run(other.acquire(id))
    before = other.look()
    run(one.acquire("b"))
    assert run(one.leave("a", recorded=("fine", 1))) == ["recorded"]
    assert other.look() == before
    one.time += 1
    for id in "cd":
        run(one.acquire(id))
    one.time -= 1_000 * MINUTE
    run(one.acquire("e", wait=False))
    assert other.look() == before


def test_looks_are_those_of_one_name_though_others_are_waited_for_since_the_same_moment(
    database: Database,
) -> None:
    other, one = (VirtualTurns(database, "lock", ("general",)) for _ in range(2))
    for turns, ids in ((other, "xy"), (one, "ab")):
        turns.time = MINUTE
        for id in ids:
            run(turns.acquire(id, owner=f"u{id}", ttl=20 * MINUTE, waiter_ttl=30 * MINUTE))
    run(one.acquire("c", owner="ua"))
    assert one.said() == [("one", "look", "b")]
    _, _, _, waiting, _, _ = run(one.inspect())
    assert waiting[::5] == ["ub"]


_TURN_AROUND = """
create temp table turned as select * from aiodlock.waiter order by arrival desc;
delete from aiodlock.waiter; insert into aiodlock.waiter select * from turned; drop table turned
"""


def test_head_is_told_to_look_wherever_in_the_table_its_row_is(database: Database) -> None:
    """The server may find rows in the order of the table, which need not be that of the queue."""
    do, connection = database.do, database.connection
    do(connection.execute("set enable_indexscan = off"))
    turns = VirtualTurns(database, "lock", ("general",))
    turns.time = MINUTE
    run(turns.acquire("a", owner="uA", ttl=20 * MINUTE))
    for id in "bc":
        run(turns.acquire(id, waiter_ttl=30 * MINUTE))
    do(connection.execute(_TURN_AROUND))
    run(turns.acquire("d", owner="uA"))
    assert turns.said() == [("one", "look", "b")]


def test_next_head_is_told_to_look_though_another_name_was_swept(database: Database) -> None:
    """Who removes the dead head tells the next one to look. A sweep tells nobody."""
    dead, live = (VirtualTurns(database, "lock", ("general",)) for _ in range(2))
    dead.kept = live.kept = Kept(token=MINUTE)
    dead.time = live.time = MINUTE
    for id in "ab":
        run(dead.acquire(id, ttl=MINUTE, waiter_ttl=MINUTE))
    run(live.acquire("c", ttl=6 * MINUTE))
    run(live.acquire("d", waiter_ttl=2 * MINUTE))
    run(live.acquire("e", waiter_ttl=20 * MINUTE))
    live.time = 4 * MINUTE
    live.sweep()
    assert dead.key not in {row[1] for row in live.stored()}
    run(live.acquire("f"))
    assert live.said() == [("one", "look", "e")]


def test_name_of_the_dead_is_swept_while_others_wait_elsewhere(database: Database) -> None:
    dead, live = (VirtualTurns(database, "lock", ("general",)) for _ in range(2))
    dead.kept = live.kept = Kept(token=MINUTE)
    dead.time = live.time = MINUTE
    for id in "ab":
        run(dead.acquire(id, ttl=MINUTE, waiter_ttl=MINUTE))
    live.time = dead.time = 4 * MINUTE
    for id in "cd":
        run(live.acquire(id))
    live.sweep()
    assert {row[1] for row in live.stored() if row[0] in ("name", "waiter")} == {live.key}


def test_names_are_those_that_are_held_or_waited_for(database: Database) -> None:
    one, many, free, other, done = (
        VirtualTurns(database, kind, ("general",))
        for kind in ("lock", "lock", "lock", "once", "once")
    )
    for turns, modes in ((one, "x"), (many, "ss"), (free, "x"), (other, "x"), (done, "x")):
        turns.time = MINUTE
        for number, mode in enumerate(modes):
            run(turns.acquire(f"{turns.key} {number}", mode))
    run(free.leave(f"{free.key} 0"))
    run(many.acquire(f"{many.key} waiter", "x"))
    run(done.leave(f"{done.key} 0", recorded=("result", MINUTE)))

    def listed(kind: str, most: int) -> list[str]:
        found: list[str] = []
        after = f"aiodlock:{kind}:"
        while True:
            call = f"select * from aiodlock.names('{after}', 'aiodlock:{kind};', {most})"
            rows = database.do(database.connection.fetch(call))
            assert len(rows) <= most
            if not rows:
                return found
            found += [row["key"] for row in rows if row["used"]]
            after = rows[-1]["key"]

    for most in (1, 2, 100):
        assert listed("l", most) == sorted({one.key, many.key})
        assert listed("o", most) == sorted({other.key, done.key})


def test_change_is_announced_to_those_that_listen_to_the_name(database: Database) -> None:
    do, connection = database.do, database.connection
    heard: list[object] = []
    channel = do(connection.fetchval("select aiodlock.channel('changes aiodlock:l:name')"))
    do(connection.add_listener(channel, lambda *words: heard.append(words[-1])))
    do(connection.execute("set aiodlock.clock = 0"))
    call = "select aiodlock.turn('one', 1, E'announce\\taiodlock:l:name')"
    assert do(connection.fetchval(call)) == "announced"
    do(asyncio.sleep(0))
    assert heard == ["aiodlock:l:name"]


def test_client_that_calls_is_notified_in_the_answer_alone(database: Database) -> None:
    do, connection = database.do, database.connection
    told = []
    lingers = "\t\t\t0\tlinger"
    messages = [
        *(_ask("A", "1") + lingers, _ask("A", "2")),  # the first one is recalled
        *(_end("A", "1"), _ask("A", "3") + lingers, _ask("A", "4", waits=600_000), _end("A", "2")),
        *(_ask("A", "5", waits=600_000), _end("A", "4"), "break\tA\t60000"),
        *(_ask("O", "6"), _ask("O", "7"), _end("O", "6", "recorded\t60000\tfine")),
    ]
    for second, message in enumerate(messages, 1):
        do(connection.execute(f"set aiodlock.clock = {second * 1_000_000}"))
        call = "select aiodlock.turn('one', 60000, $1)"
        answer = do(connection.fetchval(call, _at("", message)))
        told += [line.split(" ")[:2] for line in answer.split("\n")[1:]]
    assert told == [
        *(["recall", "-1"], ["granted", "-2"], ["granted", "-3"], ["look", "-4"], ["look", "-5"]),
        *(["broken", "-3"], ["granted", "-5"], ["done", "-7"]),
    ]
    do(asyncio.sleep(0))
    assert not database.heard


def _ask(name: str, id: str, mode: str = "x", delay: int = 0, waits: int = 60_000) -> str:
    return f"acquire\t{name}\t{id}\t{mode}\tt{id}\t120000\t{waits}\t{delay}\twait"


def _end(name: str, id: str, end: str = "ended", *, marker: int = 0) -> str:
    return f"leave\t{name}\t{id}\t{marker}\t{end}"


#: Calls with many messages. The names and the requests are those of the way by which they go.
_MANY = [
    [_ask("A", "1"), _ask("B", "2"), _ask("C", "3")],
    [_end("A", "1"), _end("B", "2"), _end("C", "3")],
    [_ask("D", "4"), _ask("A", "5"), _ask("B", "6"), "extend\tE\tnobody\t120000"],
    ["extend\tA\t5\t120000", _ask("C", "7"), _end("B", "6"), _end("E", "nobody")],
    ["extend\tA\t5\t60000", _ask("B", "8", delay=1_000), "extend\tC\t7\t120000"],
    [_end("C", "7"), "extend\tC\t7\t120000", _ask("A", "9")],
    [_ask("C", "10"), _end("A", "5"), _end("B", "8"), "break\tD\t60000"],
    [_end("A", "9", marker=60_000), _end("C", "10", "unused"), "forget\tE", _ask("B", "11", "s")],
]


def test_each_of_many_messages_is_answered_as_it_is_alone(database: Database) -> None:
    """By the short way, and by the general one."""
    do, connection = database.do, database.connection
    seen: dict[str, list[str]] = {}
    for way in WAYS:
        database.set(way=way)
        seen[way] = []
        for second, messages in enumerate(_MANY, 1):
            do(connection.execute(f"set aiodlock.clock = {second * 1_000_000}"))
            text = "\n".join(_at(way, message) for message in messages)
            answer = do(connection.fetchval("select aiodlock.turn('one', 60000, $1)", text))
            rows = do(connection.fetch(_STATE, f"aiodlock:l:{way}-"))
            seen[way].append(f"{answer}\n{rows}".replace(f"{way}-", ""))
    assert seen["short"] == seen["general"]


def test_messages_about_one_name_are_answered_in_one_call_as_each_is_alone(
    database: Database,
) -> None:
    """Of several holders that extend in one call, the function remembers where they are."""
    chance, do, connection = random.Random(1), database.do, database.connection
    time, extended = 100_000, 0
    for _ in range(150):
        time += chance.choice([0, 50, 500, 2000, -1000])
        do(connection.execute(f"set aiodlock.clock = {time * 1000}"))
        messages = [_any_message(chance) for _ in range(chance.randint(2, 12))]
        answers: dict[str, list[str]] = {}
        for way, calls in (("many", [messages]), ("alone", [[one] for one in messages])):
            answers[way] = []
            for call in calls:
                text = "\n".join(_at(way, message) for message in call)
                said = do(connection.fetchval("select aiodlock.turn('one', 60000, $1)", text))
                answers[way] += said.split("\n")[: len(call)]
            rows = do(connection.fetch(_STATE, f"aiodlock:l:{way}-"))
            answers[way].append(str(rows).replace(f"{way}-", ""))
        assert answers["many"] == answers["alone"], messages
        extended += sum(answer.startswith("held") for answer in answers["many"])
    assert extended > 200


def _any_message(chance: random.Random) -> str:
    id = chance.randint(1, 8)
    verb = chance.choice(["acquire", "acquire", "extend", "extend", "extend", "extend", "leave"])
    if verb == "acquire":
        mode, patience = chance.choice("ssssx"), chance.choice(["wait", "nowait"])
        return f"acquire\tA\t{id}\t{mode}\tt{id}\t3000\t1000\t{chance.choice([0, 500])}\t{patience}"
    if verb == "extend":
        return f"extend\tA\t{id}\t{chance.choice([1000, 3000])}"
    return f"leave\tA\t{id}\t0\t{chance.choice(['ended', 'lost', 'unused'])}"


#: On logged tables: by which way, which messages, and whether its commit waits for the disk.
_COMMITS: list[tuple[str, list[str], str]] = [
    ("general", [_ask("A", "1"), _ask("B", "2"), _ask("C", "3")], "on"),
    ("general", ["extend\tA\t1\t120000"], "on"),
    ("general", [_end("A", "1")], "off"),
    ("short", [_end("B", "2"), _end("C", "3")], "off"),
    ("general", [_ask("A", "1"), _ask("A", "4")], "on"),
    ("general", [_end("A", "1")], "on"),  # the other one holds now
    ("general", [_end("A", "4", marker=60_000)], "on"),
    ("short", [_ask("B", "5")], "on"),
    ("short", [_end("B", "5")], "off"),
    ("short", [_ask("B", "6"), _ask("C", "7")], "on"),
    ("short", ["extend\tB\t6\t120000", _end("C", "7")], "on"),
    ("short", [_end("B", "6"), _end("E", "nobody")], "off"),
    ("short", [_ask("B", "8"), _end("E", "nobody")], "on"),
    ("short", [_ask("B", "9")], "on"),
    ("short", [_end("B", "8")], "on"),
    ("general", ["break\tB\t60000"], "on"),
    ("general", ["forget\tB"], "on"),
]


def test_commits_of_all_but_releases_wait_for_the_disk(postgres: PostgresServer) -> None:
    """If a crash forgets a release, the lease ends at its deadline."""
    database = Database(postgres.url, create_statements("logged"))
    do, connection = database.do, database.connection
    try:
        for second, (way, messages, expected) in enumerate(_COMMITS, 1):
            do(connection.execute(f"set aiodlock.clock = {second * 1_000_000}"))
            text = "\n".join(_at("", message) for message in messages)
            database.set(way=way)
            do(connection.execute("begin"))
            do(connection.fetchval("select aiodlock.turn('one', 60000, $1)", text))
            waits = do(connection.fetchval("select current_setting('synchronous_commit')"))
            do(connection.execute("commit"))
            assert waits == expected, (way, messages)
    finally:
        database.close()


def test_longest_lease_that_is_asked_for_while_names_are_closed_waits_for_the_disk(
    database: Database,
) -> None:
    """Of unlogged tables. Once the names are open, nobody would write it again."""
    do, connection = database.do, database.connection
    do(
        connection.execute(
            "update aiodlock.present set opened_at = 10000; set aiodlock.clock = 1000"
        )
    )
    message = "\t".join(("acquire", "aiodlock:l:a", "a", "x", "ta", "120000", "60000", "0", "wait"))
    do(connection.execute("begin"))
    answer = do(connection.fetchval("select aiodlock.turn('one', 60000, $1)", message))
    waits = do(connection.fetchval("select current_setting('synchronous_commit')"))
    do(connection.execute("rollback"))
    assert (answer.split(" ")[0], waits) == ("closed", "on")


def _at(way: str, message: str) -> str:
    verb, name, *fields = message.split("\t")
    if verb in ("acquire", "extend", "leave"):
        fields[0] = f"{way}-{fields[0]}"
    return "\t".join((verb, f"aiodlock:l:{way}-{name}", *fields))


_STATE = """
select n.key, n.token, n.keep_until, n.head,
  array(select (h.id, h.mode, h.token, h.deadline, h.length, h.delay)::text
    from unnest(aiodlock.holders_of(n)) h)
from aiodlock.name n where starts_with(n.key, $1) order by n.key
"""


@dataclass(frozen=True)
class Mutant:
    """`old`, which stands once in ``schema.sql``, becomes `new`."""

    rule: str
    old: str
    new: str
    noticed_by: Tale

    def statements(self) -> str:
        found = create_statements("unlogged")
        assert found.count(self.old) == 1, f"this is not in the functions any more: {self.old}"
        return found.replace(self.old, self.new)


MUTANTS = [
    Mutant(
        "an overdue place ends with its repetition",
        "if own.id is null then\n      -- Overdue:",
        "if false then\n      -- Overdue:",
        histories.late_repetition_of_an_owner_that_came_to_hold,
    ),
    Mutant(
        "nobody gets in past a waiter",
        "or (s.head = 0 and (cardinality(s.holders) = 0",
        "or (true and (cardinality(s.holders) = 0",
        histories.waiting_writer_and_a_new_reader,
    ),
    Mutant(
        "no reader beside a writer",
        "if h.mode = 'x' then\n      return false;",
        "if false then",
        histories.reader_while_a_writer_holds,
    ),
    Mutant(
        "a semaphore has its limit",
        "cardinality(holders) >= places",
        "cardinality(holders) > places",
        histories.more_requests_than_places,
    ),
    Mutant(
        "a reader does not come to exclude",
        "found_token := -h.token;",
        "found_token := h.token;",
        histories.reader_that_wants_to_write,
    ),
    Mutant(
        "an overdue record gives its owner nothing",
        "if h.owner = who and now_ms < h.deadline then",
        "if h.owner = who then",
        histories.owner_that_comes_back_within_its_lock_delay,
    ),
    Mutant(
        "ghosts are skipped",
        "if s.now_ms < head.deadline then",
        "if true then",
        histories.dead_waiter_at_the_head,
    ),
    Mutant(
        "a lost name stays closed for its lock-delay",
        "else greatest(h.deadline + h.delay,",
        "else greatest(h.deadline,",
        histories.name_that_is_tried_within_a_lock_delay,
    ),
    Mutant(
        "an extension never brings the deadline nearer",
        "mine.deadline := greatest(mine.deadline, s.now_ms + f[4]::bigint);",
        "mine.deadline := s.now_ms + f[4]::bigint;",
        histories.shorter_extension,
    ),
    Mutant(
        "a holder's deadline is clamped when the clock was set back",
        "stale := stale or h.deadline > s.now_ms + h.length or",
        "stale := stale or",
        histories.dead_holder_whose_clock_was_set_back,
    ),
    Mutant(
        "so are those of all waiters",
        "where w.key = s.key and w.deadline > s.now_ms + w.length;\n      head",
        "where w.id = head.id;\n      head",
        histories.dead_waiters_whose_clock_was_set_back,
    ),
    Mutant(
        "a marker refuses a late duplicate",
        "m.keep_until) then\n    s.answer := 'gone gone';",
        "m.keep_until) then\n    s.answer := 'busy';",
        histories.duplicate_that_comes_after_the_leave,
    ),
    Mutant(
        "a break is told",
        "concat_ws(' ', 'broken', h.id",
        "concat_ws(' ', 'look', h.id",
        histories.broken_lease,
    ),
    Mutant(
        "the head learns the earliest end of its blockers",
        "earliest := least(earliest, aiodlock.closed_until(h));",
        "earliest := greatest(earliest, aiodlock.closed_until(h));",
        histories.readers_that_end_at_different_times,
    ),
    Mutant(
        "a lease that is lost does not open its name early",
        "and (mine.delay > 0 or (mine.began and s.now_ms < mine.hold_until)) then",
        "and false then",
        histories.lease_that_is_lost_and_has_a_lock_delay,
    ),
    Mutant(
        "a head that asks soon enough is told nothing",
        "if aiodlock.earliest_end(s.holders) < s.head_deadline - s.head_length * 2 / 3 then",
        "if true then",
        histories.head_that_withdraws_from_a_long_lease,
    ),
    Mutant(
        "an overdue head is met",
        "if not s.freed and s.now_ms < s.head_deadline and",
        "if not s.freed and",
        histories.dead_writer_between_readers,
    ),
    Mutant(
        "a head's deadline is clamped when the clock was set back",
        "and s.head_deadline <= s.now_ms + s.head_length then",
        "then",
        histories.dead_writer_between_readers_whose_clock_was_set_back,
    ),
    Mutant(
        "the queue is in order though the clock was set back",
        "coalesce(max(l.arrival) + 1, s.now_us)",
        "coalesce(max(s.now_us), s.now_us)",
        histories.newcomer_after_the_clock_was_set_back,
    ),
    Mutant(
        "a hold is part of when its owner's further lease ends",
        "s.moved or aiodlock.closed_until(s.mine) <",
        "s.moved or (s.mine).deadline + (s.mine).delay <",
        histories.owner_that_comes_back_with_a_hold,
    ),
    Mutant(
        "a hold that is over keeps no lease that is lost",
        "(mine.delay > 0 or (mine.began and s.now_ms < mine.hold_until)) then",
        "(mine.delay > 0 or mine.began) then",
        histories.lease_that_is_lost_after_its_hold,
    ),
    Mutant(
        "a grant that came too late closes nothing",
        "and s.now_ms < closed and why = 'unused' then",
        "and false then",
        histories.unused_grant_that_ran_out,
    ),
    Mutant(
        "an extension says that the body has begun",
        "mine.began := mine.began or f[5] is not null;",
        "null;",
        histories.repeated_request_whose_body_began,
    ),
    Mutant(
        "an owner that shares lets its reader in",
        "exit when held is null or (held < 0 and own.mode = 'x');",
        "exit when held is null or held < 0;",
        histories.waiter_whose_owner_came_to_hold_for_longer,
    ),
    Mutant(
        "the head learns of a nearer end",
        "s.moved := s.moved or own.deadline + own.delay < aiodlock.earliest_end(s.holders);",
        "null;",
        histories.waiter_whose_owner_came_to_hold_for_longer,
    ),
    Mutant(
        "the head learns that it became one",
        "s.moved := s.moved or own.deadline",
        "s.moved := own.deadline",
        histories.dead_head_that_a_waiter_meets_whose_owner_came_to_hold,
    ),
    Mutant(
        "a task's request gets in past nobody",
        "or left(own.owner, 1) <> 'u' or",
        "or",
        histories.task_whose_request_that_it_gave_up_came_to_hold,
    ),
    Mutant(
        "a success that comes too late is not recorded",
        "elsif f[5] = 'recorded' and s.now_ms < (s.mine).deadline then",
        "elsif f[5] = 'recorded' and (s.mine).id is not null then",
        histories.success_that_comes_too_late,
    ),
    Mutant(
        "a success leaves a marker",
        "if f[4] <> '0' then",
        "if f[4] <> '0' and f[5] is distinct from 'recorded' then",
        histories.duplicate_that_comes_after_a_success_was_taken_back,
    ),
    # The short way.
    Mutant(
        "a name with markers is not free",
        "and s.now_ms >= s.marked_until and s.recorded_until = 0",
        "and s.recorded_until = 0",
        histories.duplicate_that_comes_after_the_leave,
    ),
    Mutant(
        "a name with a success on record is not free",
        "and s.now_ms >= s.marked_until and s.recorded_until = 0",
        "and s.now_ms >= s.marked_until",
        histories.success_that_is_alone,
    ),
    Mutant(
        "one that is held is not free",
        "case when h.id is null then ''",
        "case when true then ''",
        histories.name_that_is_tried_within_a_lock_delay,
    ),
    Mutant(
        "one message takes what is free",
        "and n.lone = '' and n.token < now_us and (not true or length_ms",
        "and n.token < now_us and (not true or length_ms",
        histories.held_name_that_is_tried,
    ),
    Mutant(
        "one message takes no token twice",
        "n.lone = '' and n.token < now_us and (not true or length_ms",
        "n.lone = '' and (not true or length_ms",
        histories.two_grants_of_one_moment,
    ),
    Mutant(
        "one message releases its own",
        "and n.lone = f[3] and n.head = 0 and now_us / 1000 < n.lone_until\n",
        "and n.lone > '' and n.head = 0 and now_us / 1000 < n.lone_until\n",
        histories.stranger_that_leaves,
    ),
    Mutant(
        "one message releases what is not overdue",
        "and n.lone = f[3] and n.head = 0 and now_us / 1000 < n.lone_until\n",
        "and n.lone = f[3] and n.head = 0\n",
        histories.release_that_comes_too_late,
    ),
    Mutant(
        "one message brings no deadline nearer",
        "and n.lone_until <= now_us / 1000 + length_ms\n",
        "\n",
        histories.shorter_extension,
    ),
    Mutant(
        "one message extends what is not overdue",
        "and n.lone = f[3] and now_us / 1000 < n.lone_until and n.lone_until <=",
        "and n.lone = f[3] and n.lone_until <=",
        histories.extension_that_comes_too_late,
    ),
    Mutant(
        "one message leaves a marker",
        "and f[4] = '0' and f[5]",
        "and f[5]",
        histories.duplicate_that_comes_after_the_leave,
    ),
    Mutant(
        "one message leaves its lock-delay",
        "f[8] = '0' and length(f[4]) = 1 and (f[12] is null or f[13] = 'linger') then",
        "length(f[4]) = 1 and (f[12] is null or f[13] = 'linger') then",
        histories.name_that_is_tried_within_a_lock_delay,
    ),
    Mutant(
        "many messages bring no deadline nearer",
        "n.lone = a.f[3] and now_ms < n.lone_until and n.lone_until <= now_ms + a.ttl\n",
        "n.lone = a.f[3] and now_ms < n.lone_until\n",
        histories.shorter_extension,
    ),
    Mutant(
        "many messages take what is free",
        "where n.ctid = a.row_at and n.lone = '' and n.token",
        "where n.ctid = a.row_at and n.token",
        histories.held_name_that_is_tried,
    ),
    Mutant(
        "many messages extend what is not overdue",
        "n.lone = a.f[3] and now_ms < n.lone_until and n.lone_until <=",
        "n.lone = a.f[3] and n.lone_until <=",
        histories.extension_that_comes_too_late,
    ),
    Mutant(
        "many messages release what is not overdue",
        "n.lone = a.f[3] and now_ms < n.lone_until and n.head = 0\n          and a.f[4]",
        "n.lone = a.f[3] and n.head = 0\n          and a.f[4]",
        histories.release_that_comes_too_late,
    ),
    Mutant(
        "many messages release their own",
        "n.lone = a.f[3] and now_ms < n.lone_until and n.head = 0\n          and a.f[4]",
        "n.lone > '' and now_ms < n.lone_until and n.head = 0\n          and a.f[4]",
        histories.stranger_that_leaves,
    ),
    Mutant(
        "many messages leave a marker",
        "and a.f[4] = '0' and a.f[5]",
        "and a.f[5]",
        histories.duplicate_that_comes_after_the_leave,
    ),
    Mutant(
        "many messages leave their lock-delay",
        "and a.f[8] = '0' and length(a.f[4])",
        "and length(a.f[4])",
        histories.name_that_is_tried_within_a_lock_delay,
    ),
    # Linger.
    Mutant(
        "a lone holder that lingers is known as one",
        "case when f[14] = 'linger' then 1 else 0 end",
        "0",
        histories.one_that_lingers_and_is_tried,
    ),
    Mutant(
        "what lingers is recalled",
        "if h.lingers = 1 then",
        "if false then",
        histories.newcomers_behind_one_that_lingers,
    ),
    Mutant(
        "its client is told that",
        "'recall ' || h.id",
        "'look ' || h.id",
        histories.newcomers_behind_one_that_lingers,
    ),
    Mutant(
        "it is recalled once",
        "if h.lingers = 1 then",
        "if h.lingers > 0 then",
        histories.newcomers_behind_one_that_lingers,
    ),
    Mutant(
        "what is overdue is recalled, too",
        "if h.lingers = 1 then",
        "if h.lingers = 1 and s.now_ms < h.deadline then",
        histories.one_that_lingers_and_lives_again_as_the_clock_was_set_back,
    ),
    Mutant(
        "each answer to an extension tells the recall",
        "      case when mine.lingers = 2 then 'recalled ' else 'held ' end",
        "      case when false then 'recalled ' else 'held ' end",
        histories.one_that_lingers_and_is_tried,
    ),
    Mutant(
        "the answer to a waiter that finds its turn tells the recall",
        "s.answer := case when (s.mine).lingers = 2 then 'recalled ' else 'held ' end",
        "s.answer := case when false then 'recalled ' else 'held ' end",
        histories.waiter_that_lingers_and_finds_a_dead_holder,
    ),
    Mutant(
        "the answer to a repeated acquire tells the recall",
        "s.answer := case when (s.mine).lingers = 2 then 'recalled ' else 'granted ' end || (s.mine).token "
        "|| ' '\n",
        "s.answer := case when false then 'recalled ' else 'granted ' end || (s.mine).token || ' '\n",
        histories.newcomers_behind_one_that_lingers,
    ),
    Mutant(
        "a waiter is granted with its recall if others wait",
        "if s.head > 0 then\n        h.lingers := 2;",
        "if false then\n        h.lingers := 2;",
        histories.waiters_that_linger,
    ),
    Mutant(
        "the last waiter is granted without",
        "if s.head > 0 then\n        h.lingers := 2;",
        "if true then\n        h.lingers := 2;",
        histories.waiters_that_linger,
    ),
    Mutant(
        "an owner that gets in past waiters is recalled",
        "case when s.head > 0 then 2 else 1 end",
        "1",
        histories.owner_that_lingers_and_gets_in_past_a_waiter,
    ),
    Mutant(
        "a waiter that gets in as its owner holds is recalled",
        "if mine.lingers = 1 and s.head > 0 then",
        "if false then",
        histories.waiter_that_lingers_and_whose_owner_came_to_hold,
    ),
]


_MACHINES = {tale: machine for machine, tale in histories.ALL}


#: By each way, and by turns.
_ALL_WAYS = (*((way,) for way in WAYS), WAYS)


def _tell_all_ways(database: Database, tale: Tale) -> None:
    for ways in _ALL_WAYS:
        _tell(database, tale, ways)


def _tell(database: Database, tale: Tale, ways: Sequence[str]) -> None:
    make = functools.partial(_virtual, database, ways)
    histories.tell(make, _MACHINES[tale], tale)


def _virtual(database: Database, ways: Sequence[str], machine: type[Locks]) -> VirtualTurns:
    return VirtualTurns(database, machine.kind, ways)


@pytest.mark.parametrize("ways", _ALL_WAYS, ids=lambda ways: "-or-".join(ways))
def test_functions_answer_histories_by_hand_as_the_machine(
    database: Database, ways: Sequence[str]
) -> None:
    for _, tale in histories.ALL:
        _tell(database, tale, ways)


@pytest.mark.skipif(not installed("postgres"), reason="postgres is not installed")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
def test_history_notices_a_rule_taken_out_of_the_functions(
    servers: Servers, mutant: Mutant
) -> None:
    database = Database(servers.postgres("postgres").url, mutant.statements())
    try:
        with pytest.raises((AssertionError, asyncpg.PostgresError)):
            _tell_all_ways(database, mutant.noticed_by)
    finally:
        database.close()
