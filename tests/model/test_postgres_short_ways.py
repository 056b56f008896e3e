"""The short ways of `turn` in PostgreSQL, held against the general way behind them.

The same history runs on two names at the same virtual time. One of them takes no short way: nobody can
tell them apart. Histories are drawn, and there are some by hand: if a condition is taken out, one of them
notices.

``AIODLOCK_MODEL_STEPS`` sets how many steps are taken, about (default 2,000; 60 scenes here). With more
than that every condition is taken out, else each third one.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import asyncpg
import pytest

from aiodlock.backends.postgres.schema import create_statements

from ..mutation.conditions import conditions, described
from ..postgres import PostgresServer
from ..servers import Servers, installed
from .short_histories import HISTORIES, ask, end
from .test_scripts import CLIENTS, STEPS
from .turns import Database, with_ways

_RETENTION = 60_000
_FOR_EVER = 10**12
_BEGIN = 1_700_000_000_000
#: How often something is odd, and what of a request may be.
_ODD = 0.2
_ODDITIES = (
    "again",
    "owner",
    "owner",
    "shared",
    "ttl",
    "length",
    "delay",
    "nowait",
    "linger",
    "note",
)
_KEYS = {"short": "aiodlock:l:short", "general": "aiodlock:l:general"}
_STATE = """
select n.token, n.keep_until, n.head, n.head_deadline, n.head_length, n.marked_until, n.noted,
  array(select (h.id, h.mode, h.token, h.deadline, h.length, h.delay, h.owner, h.client, h.hold, h.note,
      h.description, h.lingers)::text
    from unnest(aiodlock.holders_of(n)) h) as holders,
  array(select (w.arrival, w.id, w.mode, w.owner, w.delay, w.client, w.deadline, w.length, w.since,
      w.hold, w.note, w.description, w.lingers)::text
    from aiodlock.waiter w where w.key = n.key order by w.arrival) as waiters
from aiodlock.name n where n.key = $1 order by n.version desc limit 1
"""


class _Names:
    """The two names, what is known of their requests, and how often which way was taken."""

    def __init__(self, database: Database, seed: int) -> None:
        self.taken: Counter[str] = Counter()
        self._database = database
        self._random = random.Random(seed)
        self._now = _BEGIN
        self._count = 0
        self._clients: dict[str, str] = {}
        self._holder = ""
        self._owner = self._shared = False

    def scene(self) -> None:
        """Let a few wait for a name that one holds alone, with some oddities, and then go on."""
        choose = self._random
        self.clear()
        self._clients.clear()
        self._acquire(plain=True)
        self._leave(self._holder, pair=False, plain=True)
        self._now += 1  # the name is free now, and its last token smaller than the time
        self._acquire(plain=choose.random() < 0.5)
        for _ in range(choose.choice([0, 1, 2, 2, 3])):
            self._pass()
            self._acquire()
        for _ in range(choose.choice([1, 1, 2, 4])):
            self._pass()
            known = list(self._clients)
            who = self._holder if choose.random() > 0.1 and self._holder else choose.choice(known)
            what = choose.choice(["leave", "pair", "pair", "pair", "extend", "break"])
            if what == "extend":
                self._call(self._clients[who], [f"extend\t{{key}}\t{{at}}{who}\t30000"])
            elif what == "break" and choose.random() < 0.1:
                self._call("nobody", [f"break\t{{key}}\t{_FOR_EVER}"])
            else:
                self._leave(who, what == "pair")

    def _pass(self) -> None:
        far = [4_000, 12_000, 12_000, 29_000, 40_000, 70_000, -1, -2_000, -40_000]
        self._now += self._random.choice([1, 1, 1, *far]) if self._is_odd() else 1

    def _is_odd(self) -> bool:
        return self._random.random() < _ODD

    def _asking(self, caller: str, plain: bool = False) -> str:
        """Return a new request's message."""
        choose = self._random
        odd = "" if plain or not self._is_odd() else choose.choice(_ODDITIES)
        again = list(self._clients)[-3:] if odd == "again" else []
        id = choose.choice(again) if again else f"r{self._count}"
        self._count += 1
        self._clients[id] = caller
        owner = "uA" if odd == "owner" or (self._owner and not plain) else f"t{id}"
        self._owner = odd == "owner" or (self._owner and choose.random() < 0.5)
        mode = "s" if odd == "shared" or (self._shared and not plain) else "x"
        self._shared = odd == "shared" or (self._shared and choose.random() < 0.5)
        ttl, length = 60_000 if odd == "ttl" else 30_000, 30_000 if odd == "length" else 10_000
        delay, patience = 500 * (odd == "delay"), "nowait" if odd == "nowait" else "wait"
        words = ["acquire", "{key}", f"{{at}}{id}", mode, owner, ttl, length, delay, patience]
        if odd in ("linger", "note"):
            words += ["a%20note", "someone", *(["0", "linger"] if odd == "linger" else [])]
        return "\t".join(map(str, words))

    def _acquire(self, plain: bool = False) -> None:
        caller = self._random.choice(CLIENTS)
        self._call(caller, [self._asking(caller, plain)])

    def _leave(self, who: str, pair: bool, plain: bool = False) -> None:
        caller = self._clients[who]
        end = "ended" if plain else self._random.choice(["ended", "ended", "ended", "lost"])
        marker = 60_000 if self._is_odd() and self._random.random() < 0.3 and not plain else 0
        messages = [f"leave\t{{key}}\t{{at}}{who}\t{marker}\t{end}"]
        if pair:
            messages.insert(0, self._asking(caller))
        self._call(caller, messages)

    def step(self, seconds: float, texts: Sequence[str]) -> str:
        """Carry out a step of a history by hand: tell by which way."""
        self._now = _BEGIN + round(seconds * 1000)
        id = texts[-1].split("\t")[2].removeprefix("{at}")
        return self._call(CLIENTS[ord(id[0]) % len(CLIENTS)], list(texts))

    def clear(self) -> None:
        for table in ("name", "waiter", "marker", "broken"):
            self._database.do(self._database.connection.execute(f"delete from aiodlock.{table}"))

    def _call(self, caller: str, messages: list[str]) -> str:
        """Carry messages out on both names, which become equal. Return which way they went."""
        database = self._database
        do, connection = database.do, database.connection
        seen = []
        went = "general"
        for at, key in _KEYS.items():
            # Each time: the end of a transaction takes them back.
            now = f"set aiodlock.clock = {self._now * 1000}; set aiodlock.way = {at}"
            do(connection.execute(f"{now}; set aiodlock.went = 'general'"))
            text = "\n".join(messages).format(key=key, at=at)
            arguments = [caller, _RETENTION, text]
            answer = do(connection.fetchval("select aiodlock.turn($1, $2, $3)", *arguments))
            assert answer is not None
            state = do(connection.fetchrow(_STATE, key))
            told, database.heard = database.heard, []  # notifications have come before its answer
            rows = [] if state is None else list(state.values())
            seen.append(repr((answer, told, rows)).replace(key, "KEY").replace(at, "AT"))
            if at == "short":
                went = do(connection.fetchval("select current_setting('aiodlock.went')"))
                kind = " and ".join(message.split("\t")[0] for message in messages)
                said = " granting" if "granted" in answer or told else ""
                self.taken[f"{kind}{said}, {went}"] += 1
                holders = [] if state is None else state["holders"]
                self._holder = holders[0][1:].split(",")[0].removeprefix(at) if holders else ""
        assert seen[0] == seen[1], f"{messages} at {self._now}"
        return went


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[Database]:
    database = _made(postgres)
    yield database
    database.close()


def _made(server: PostgresServer) -> Database:
    return Database(server.url, create_statements("unlogged"))


def test_short_ways_answer_and_write_and_tell_what_the_general_one_does(
    database: Database,
) -> None:
    taken: Counter[str] = Counter()
    for seed in range(max(2, STEPS // 1_000)):
        names = _Names(database, seed)
        for _ in range(30):
            names.scene()
        taken += names.taken
    for way in (
        "acquire",
        "acquire granting",
        "extend",
        "leave",
        "leave granting",
        "acquire and leave granting",
    ):
        assert taken[f"{way}, short"] >= 5, taken


#: What no history notices: why.
_UNNOTICED = {
    "f[1] = 'acquire'": "the others have no such fields",
    "f[1] = 'leave'": "the same",
    "last[1] = 'leave'": "the same",
    "last[2] <> f[2]": "the general way does it, too, and the names would be locked in another order",
    "not true": "of logged tables; these are unlogged ones",
    "true and current_setting('synchronous": "the same",
    "pg_advisory_xact_lock": "nobody else calls here",
    "n.head > 0": "finds sooner that nobody waits",
    "current_setting('aiodlock.way'": "the test's own",
    "n.ctid = (select m.ctid": "finds the row of the one who holds at once, and there is one",
}
_WHOLE = re.DOTALL | re.MULTILINE


_FUNCTIONS = ("turn", "queue_behind", "hand_over")


def _source(function: str) -> str:
    pattern = rf"create function aiodlock\.{function}\(.*?^end \$\$;"
    found = re.search(pattern, with_ways(create_statements("unlogged")), _WHOLE)
    assert found is not None
    return found[0]


def _tell(database: Database, about: str) -> None:
    """Run a history by hand, and compare how each step is done with what it says."""
    names = _Names(database, 0)
    names.clear()
    at_once = (_BEGIN + 1_000) * 1_000
    elsewhere = [("elsewhere", f"elsewhere{one}", one) for one in (at_once, 10**18)]
    for key, id, arrival in (*elsewhere, *((at, at, 1) for at in _KEYS)):
        # Two wait for another name, and one died long ago for each of these.
        row = (
            f"'aiodlock:l:{key}', {arrival}, '{id}', 'x', 't', 0, 'one', 2, 1, 1, 0, '', '', false"
        )
        database.do(database.connection.execute(f"insert into aiodlock.waiter values ({row})"))
    names.step(-2, [ask("0")])
    names.step(-1, [end("0")])
    for number, (seconds, expected, texts) in enumerate(HISTORIES[about]):
        way = names.step(seconds, texts)
        assert way == expected, f"step {number} of {about!r} went by {way}"


def _refuse(database: Database) -> None:
    """Where somebody holds, nothing is done with another isolation level."""
    names = _Names(database, 0)
    names.clear()
    for seconds, text in enumerate((ask("0"), end("0"), ask("a"), ask("b"))):
        names.step(seconds, [text])
    done = names.taken.total()
    for text in (ask("c"), end("a")):
        begin = "begin isolation level repeatable read"
        database.do(database.connection.execute(begin))
        try:
            with pytest.raises(asyncpg.ActiveSQLTransactionError):
                names.step(5, [text])
            assert names.taken.total() == done, "by a short way"
        finally:
            database.do(database.connection.execute("rollback"))


def test_histories_by_hand_go_their_ways(database: Database) -> None:
    for about in HISTORIES:
        _tell(database, about)
    _refuse(database)


@pytest.mark.timeout(300)
@pytest.mark.skipif(not installed("postgres"), reason="postgres is not installed")
@pytest.mark.parametrize("function", _FUNCTIONS)
def test_histories_by_hand_notice_each_condition_taken_out(servers: Servers, function: str) -> None:
    database = _made(servers.postgres("postgres"))
    unnoticed = []
    taken_out = 0
    try:
        source = _source(function)
        for mutant in conditions(source, "sql"):
            if any(source.startswith(text, mutant.start) for text in _UNNOTICED):
                continue
            taken_out += 1
            if STEPS <= 2_000 and taken_out % 3:
                continue
            _replace(database, mutant.of(source))
            if not _notices(database):
                unnoticed.append(described(source, mutant))
    finally:
        database.close()
    assert taken_out > 15
    assert not unnoticed


def _replace(database: Database, source: str) -> None:
    source = source.replace("create function", "create or replace function", 1)
    database.do(database.connection.execute(source))


#: Those that noticed something last come first.
_order = [*HISTORIES]


def _notices(database: Database) -> bool:
    for about in _order:
        try:
            _tell(database, about)
        except (AssertionError, asyncpg.PostgresError):
            _order.remove(about)
            _order.insert(0, about)
            return True
    try:
        _refuse(database)
    except AssertionError:
        return True
    return False
