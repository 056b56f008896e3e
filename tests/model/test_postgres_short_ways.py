"""The short ways of the functions in PostgreSQL, held against `turn` behind them.

The same history runs on two names at the same virtual time. One of them takes no short way: nobody can
tell them apart. Here a call may carry an acquire and a leave of the same name.

``AIODLOCK_MODEL_STEPS`` sets how many steps are taken, about (default 2,000; 60 scenes here).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from aiodlock.backends.postgres.schema import create_statements

from ..postgres import PostgresServer
from .test_scripts import CLIENTS, STEPS
from .turns import Database

_RETENTION = 60_000
_FOR_EVER = 10**12
_TURN = "return aiodlock.turn(caller, retention, message"
_PATHS = "perform set_config('aiodlock.general', 'taken', false); "
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
  array(select (h.id, h.mode, h.token, h.deadline, h.length, h.delay, h.owner, h.client, h.note,
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
        self._now = 1_700_000_000_000
        self._count = 0
        self._clients: dict[str, str] = {}
        self._holder = ""
        self._owner = self._shared = False

    def scene(self) -> None:
        """Let a few wait for a name that one holds alone, with some oddities, and then go on."""
        choose = self._random
        for table in ("name", "waiter", "marker", "broken"):
            self._database.do(self._database.connection.execute(f"delete from aiodlock.{table}"))
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
                self._call(self._clients[who], [f"extend\t{{key}}\t{{at}}{who}\t30000"], "turn")
            elif what == "break" and choose.random() < 0.1:
                self._call("nobody", [f"break\t{{key}}\t{_FOR_EVER}"], "turn")
            else:
                self._leave(who, what == "pair")

    def _pass(self) -> None:
        far = [4_000, 12_000, 12_000, 29_000, 40_000, 70_000, -1, -2_000, -40_000]
        self._now += self._random.choice([1, 1, 1, *far]) if self._is_odd() else 1

    def _is_odd(self) -> bool:
        return self._random.random() < _ODD

    def _asking(self, caller: str, plain: bool = False) -> tuple[str, str, int, bool]:
        """Return a new request's id, its message, its ttl, and whether it may take the short way."""
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
        return id, "\t".join(map(str, words)), ttl, not delay

    def _acquire(self, plain: bool = False) -> None:
        caller = self._random.choice(CLIENTS)
        id, message, ttl, short = self._asking(caller, plain)
        self._call(caller, [message], "acquire_one" if short else "turn", id, ttl)

    def _leave(self, who: str, pair: bool, plain: bool = False) -> None:
        caller = self._clients[who]
        end = "ended" if plain else self._random.choice(["ended", "ended", "ended", "lost"])
        marker = 60_000 if self._is_odd() and self._random.random() < 0.3 and not plain else 0
        messages = [f"leave\t{{key}}\t{{at}}{who}\t{marker}\t{end}"]
        short = not marker
        if pair:
            _, asked, _, brief = self._asking(caller)
            messages.insert(0, asked)
            short = short and brief
        self._call(caller, messages, "leave_one" if short else "turn", who)

    def _call(self, caller: str, messages: list[str], way: str, *more: object) -> None:
        database = self._database
        do, connection = database.do, database.connection
        seen = []
        do(
            connection.execute(
                f"set aiodlock.clock = {self._now * 1000}; set aiodlock.general = ''"
            )
        )
        for at, key in _KEYS.items():
            text = "\n".join(messages).format(key=key, at=at)
            function, arguments = "turn", [caller, _RETENTION, text]
            if at == "short" and way != "turn":
                function = way
                arguments += [key, at + str(more[0]), *more[1:]]
            places = ", ".join(f"${number}" for number in range(1, 1 + len(arguments)))
            answer = do(connection.fetchval(f"select aiodlock.{function}({places})", *arguments))
            do(connection.execute("select 1"))  # notifications have come before its answer
            told, database.heard = database.heard, []
            state = do(connection.fetchrow(_STATE, key))
            rows = [] if state is None else list(state.values())
            seen.append(repr((answer, told, rows)).replace(key, "KEY").replace(at, "AT"))
            if at == "short":
                general = do(connection.fetchval("select current_setting('aiodlock.general')"))
                kind = " and ".join(message.split("\t")[0] for message in messages)
                said = " granting" if "granted" in answer or told else ""
                self.taken[
                    f"{kind}{said}, {'general' if general or way == 'turn' else 'short'}"
                ] += 1
                holders = [] if state is None else state["holders"]
                self._holder = holders[0][1:].split(",")[0].removeprefix(at) if holders else ""
        assert seen[0] == seen[1], f"{messages} by {way}, at {self._now}"


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[Database]:
    statements = create_statements("unlogged")
    assert statements.count(_TURN) == 3, (
        "each function of a short way ends there, that for many messages too"
    )
    database = Database(postgres.url, statements.replace(_TURN, _PATHS + _TURN))
    yield database
    database.close()


def test_short_ways_answer_and_write_and_tell_what_turn_does(database: Database) -> None:
    taken: Counter[str] = Counter()
    for seed in range(max(2, STEPS // 1_000)):
        names = _Names(database, seed)
        for _ in range(30):
            names.scene()
        taken += names.taken
    for way in (
        "acquire",
        "acquire granting",
        "leave",
        "leave granting",
        "acquire and leave granting",
    ):
        assert taken[f"{way}, short"] >= 5, taken
