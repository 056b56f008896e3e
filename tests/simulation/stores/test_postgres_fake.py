"""The fake answers as the real functions do: the same random calls on both, equal answers and messages."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from aiodlock.backends.postgres.inspection import _INSPECT
from aiodlock.backends.postgres.notifications import channel
from aiodlock.backends.postgres.schema import create_statements

from ...model.test_scripts import CLIENTS
from ...model.turns import Database
from ...postgres import PostgresServer
from . import postgres_tables as tables
from .postgres_tables import Tables, Turned

_CALLS, _SEEDS = 400, 6
_RETENTION, _MARKER, _REMEMBERED = 3_600_000, 60_000, 60_000
_BEGIN = 1_700_000_000_000_000
#: Words of answers and messages that each seed has to meet.
_USUAL = {
    "granted", "held", "waiting", "busy", "released", "withdrawn", "gone", "broke", "done", "recorded",
}  # fmt: skip
_KINDS = ("l", "l", "s", "o")


class _Requests:
    """Draws lines. Mutable state: the requests that were made by then: client, key, and whether ended."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.keys = [f"aiodlock:{kind}:{seed}n{number}" for number, kind in enumerate(_KINDS)]
        self.made: list[tuple[str, str, str, str]] = []

    def call(self, client: str) -> str:
        """Return the lines of one call."""
        draw = self.random
        return "\n".join(self._line(client) for _ in range(draw.choice((1, 1, 1, 1, 2, 3, 8))))

    def _line(self, client: str) -> str:
        draw = self.random
        kind = draw.random()
        if kind < 0.4 or not self.made:
            return self._acquire(client)
        mine = [one for one in self.made[-12:] if one[0] == client]
        _, key, id, line = draw.choice(mine or self.made)
        if kind < 0.45:
            return line  # the answer was lost
        if kind < 0.65:
            begins = ["begins"] if draw.random() < 0.2 else []
            return "\t".join(("extend", key, id, str(draw.choice((200, 2000, 9000))), *begins))
        if kind < 0.92:
            marker = str(_MARKER) if draw.random() < 0.15 else "0"
            end = draw.choice(("ended", "ended", "ended", "lost", "unused"))
            if key.startswith("aiodlock:o:") and draw.random() < 0.5:
                result = "x" * 300 if draw.random() < 0.3 else quote("fine / %", safe="")
                return "\t".join(
                    ("leave", key, id, marker, "recorded", str(draw.choice((50, 4000))), result)
                )
            return "\t".join(("leave", key, id, marker, end))
        key = draw.choice(self.keys)
        if kind < 0.95:
            return f"break\t{key}\t{_REMEMBERED}"
        if kind < 0.97:
            return f"announce\t{key}"
        return f"forget\t{self.keys[-1]}"

    def _acquire(self, client: str) -> str:
        draw = self.random
        key, id = draw.choice(self.keys), f"{client}-{len(self.made)}"
        mode = draw.choice(("x", "x", "x", "s"))
        if key.startswith("aiodlock:s:"):
            mode = draw.choice(("s2", "s2", "s2", "s3"))
        elif key.startswith("aiodlock:o:"):
            mode = "x"
        owner = draw.choice((f"t{id}", f"t{id}", f"t{id}", "uann", f"u{client}"))
        times = draw.choice((300, 2000)), draw.choice((300, 3000)), draw.choice((0, 0, 0, 500))
        patience = draw.choice(("wait", "wait", "wait", "nowait"))
        more: list[str] = []
        odd = draw.random()
        if odd < 0.15:
            more = ["a%20note", "", "0", "linger"]
        elif odd < 0.3:
            resize = "resize" if mode == "s3" else ""
            more = ["", "", draw.choice(("0", "700")), draw.choice(("begins", "later")) + resize]
        elif odd < 0.4:
            more = ["a%20note", "somebody"]
        if mode.startswith("s") and more[3:] == ["linger"]:
            more = []
        line = "\t".join(("acquire", key, id, mode, owner, *map(str, times), patience, *more))
        self.made.append((client, key, id, line))
        return line


@pytest.fixture(params=["logged", "unlogged"])
def database(postgres: PostgresServer, request: pytest.FixtureRequest) -> Iterator[Database]:
    database = Database(postgres.url, create_statements(request.param))
    yield database
    database.close()


def _ask(database: Database, sql: str, *args: Any) -> Any:
    return database.do(database.connection.fetch(sql, *args))


def _really(database: Database, now_us: int, client: str, text: str) -> str:
    turn = "select aiodlock.turn($1, $2, $3) from set_config('aiodlock.clock', $4, false)"
    rows = _ask(database, turn, client, _RETENTION, text, str(now_us))
    answer: str = rows[0][0]
    return answer


def _comparable(answer: str, most: int) -> list[str]:
    """Return the lines without what is no promise: of what is overdue, how far it was swept, and in which
    order names are told of."""
    lines = re.sub("gone (expired|taken_over|gone)", "gone", answer).split("\n")
    return lines[:most] + sorted(lines[most:], key=lambda line: line.split(" ")[2])


def _by_name(told: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return sorted(told, key=lambda one: one[1].split(" ")[2])


def _heard(database: Database) -> list[tuple[str, str]]:
    database.do(database.connection.execute("select 1"))
    heard, database.heard = database.heard, []
    return heard


@pytest.mark.parametrize("seed", range(_SEEDS))
def test_fake_answers_as_the_real_functions_do(database: Database, seed: int) -> None:
    requests = _Requests(seed)
    draw = requests.random
    unlogged = _ask(database, "select durability from aiodlock.meta")[0][0] == "unlogged"
    fake, now_us = Tables(unlogged=unlogged), _BEGIN
    answered: set[str] = set()
    channels = {channel(client): client for client in CLIENTS}
    for number in range(_CALLS):
        now_us += draw.choice((0, 1_000, 20_000, 300_000, 300_000, 2_000_000))
        client = draw.choice(CLIENTS)
        text = requests.call(client)
        real = _really(database, now_us, client, text)
        turned: Turned = fake.turn(now_us, client, _RETENTION, text)
        about = f"call {number} at {now_us // 1000} of {client}: {text!r}"
        most = text.count("\n") + 1
        assert _comparable(turned.answer, most) == _comparable(real, most), about
        told = [
            (channels[one.channel], one.payload) for one in turned.told if one.channel in channels
        ]
        assert _by_name(_heard(database)) == _by_name(told), about
        answered.update(re.findall(r"^[a-z]+", real, re.MULTILINE))
        if unlogged and number in (_CALLS // 3, _CALLS // 2):
            _crash(database)
            fake.crash()
        if number % 7 == 0:
            _compare_what_is_read(database, fake, now_us, requests.keys)
    expected = _USUAL | {"closed"} if unlogged else _USUAL
    assert expected <= answered, "the calls were all of a kind"


def _crash(database: Database) -> None:
    """Leave what a crash leaves of unlogged tables."""
    tables = ("name", "waiter", "marker", "broken", "record", "present")
    database.do(
        database.connection.execute("; ".join(f"delete from aiodlock.{one}" for one in tables))
    )


def _compare_what_is_read(database: Database, fake: Tables, now_us: int, keys: list[str]) -> None:
    now = now_us // 1000
    for number, key in enumerate(keys, 1):
        (found,) = _ask(database, "select aiodlock.recorded($1)", key)[0]
        assert found == tables.recorded(fake.names.get(key), now_us)
        real = [dict(row) for row in _ask(database, _INSPECT, [key], True)]
        mine = [
            dict(row, number=1)
            for row in tables.inspected(fake.names.get(key), now_us, queues=True)
        ]
        assert _plain(real) == _plain(mine), (now, number)


def _plain(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return what a client reads: rows in any order but that of waiters."""
    read: dict[str, tuple[str, ...]] = {
        "name": ("token", "left_ms", "places"),
        "holder": ("owner", "mode", "token", "left_ms", "client", "note", "description", "ago_ms"),
        "record": ("left_ms", "ago_ms"),
        "waiter": ("owner", "mode", "left_ms", "client", "note", "description"),
    }
    return sorted(
        (row["what"], *(row[word] for word in read[row["what"]]))
        for row in rows
        if row["what"] != "name" or row["token"] or row["left_ms"]
    )
