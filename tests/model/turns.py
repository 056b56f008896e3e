"""The functions of ``schema.sql``, called directly, at a time that the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from itertools import count, cycle
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import asyncpg

from aiodlock.backends.postgres.notifications import channel
from aiodlock.backends.postgres.schema import create_statements

from .test_scripts import CLIENTS, Kept, Stored

_T = TypeVar("_T")

_CHANNELS = {channel(client): client for client in CLIENTS}
_CLOCK = """
create or replace function aiodlock.clock_us() returns bigint language sql volatile as
$$ select current_setting('aiodlock.clock')::bigint $$
"""
_TABLES = ("name", "waiter", "marker", "broken", "record")
_STORED = " union all ".join(
    f"select '{table}', {'id' if table in ('marker', 'broken') else 'key'}, "
    f"{'deadline' if table == 'waiter' else 'keep_until'} from aiodlock.{table}"
    for table in _TABLES
)
#: Of a name, whether it has a row or not.
_LOOK = """
select n.token, n.places, n.resized, n.holders,
  array(select w from aiodlock.waiter w where w.key = $1 order by w.arrival) as waiting
from (select) one left join lateral (
  select m.token, m.places, m.resized, aiodlock.holders_of(m) as holders
  from aiodlock.name m where m.key = $1 order by m.version desc limit 1
) n on true
"""
_CLEAR = "; ".join(f"delete from aiodlock.{table}" for table in _TABLES)
_names = count()
#: How messages are carried out: by a short way if they can be, by that of many messages, or by the general
#: one.
WAYS = ("short", "many", "general")
_BEGIN = """{}
begin
  perform set_config('aiodlock.went', 'short', false);
  if current_setting('aiodlock.way', true) = 'general' then
    return aiodlock.general_way(caller, retention, messages);
  elsif current_setting('aiodlock.way', true) = 'many' then
    return aiodlock.many(caller, retention, messages);
  end if;
"""
_GENERAL_BEGIN = """{}
begin
  perform set_config('aiodlock.went', 'general', false);
"""


def with_ways(statements: str) -> str:
    """Return statements by which a setting of the session says which way is gone, and another which was."""
    for function, begin in (("turn", _BEGIN), ("general_way", _GENERAL_BEGIN)):
        before, name, rest = statements.partition(f"create function aiodlock.{function}(")
        declared, _, body = rest.partition("\nbegin\n")
        assert "$$;" not in declared
        statements = before + name + begin.format(declared) + body
    return statements


class Database:
    """A schema in which the clock is a setting of the session, and a connection that calls and listens."""

    def __init__(self, url: str, statements: str | None = None) -> None:
        self.heard: list[tuple[str, str]] = []
        self._settings: dict[str, object] = {}
        self._loop = asyncio.new_event_loop()
        self.connection: asyncpg.Connection = self.do(asyncpg.connect(url))
        self.do(self.connection.execute("drop schema if exists aiodlock cascade"))
        self.do(self.connection.execute(with_ways(statements or create_statements("unlogged"))))
        self.do(self.connection.execute(_CLOCK))
        for listened in _CHANNELS:
            self.do(self.connection.add_listener(listened, self._on_notification))

    def set(self, **settings: object) -> None:
        """From now on it is so late (``clock``, in us), and messages are carried out by this ``way``."""
        if new := settings.items() - self._settings.items():
            self._settings |= new
            self.do(
                self.connection.execute("; ".join(f"set aiodlock.{key} = {to}" for key, to in new))
            )

    def do(self, call: Awaitable[_T]) -> _T:
        return self._loop.run_until_complete(call)

    def close(self) -> None:
        self.do(self.connection.close())
        self._loop.close()

    def _on_notification(self, _: object, __: int, channel: str, payload: Any) -> None:
        self.heard.append((_CHANNELS[channel], payload))


def word_in(key: str, words: str) -> str:
    """Return the value of one of the words that the scripts are given."""
    return next((word[2:] for word in words.split(" ") if word.startswith(f"{key}=")), "")


class VirtualTurns:
    """One name. The answers are put as those of the scripts are.

    The calls go by the `ways` in turn: all of them do the same.
    """

    def __init__(self, database: Database, kind: str, ways: Sequence[str] = WAYS) -> None:
        self._ways = cycle(ways)
        self.time = 0
        self.whole = True
        self.lingers = True
        self.kept = Kept()
        self._database = database
        self.key = f"aiodlock:{kind[0]}:name{next(_names)}"
        self._clients: dict[str, str] = {}
        self._said: list[tuple[str, str, str]] = []
        self.clear()

    async def acquire(
        self,
        id: str,
        mode: str = "x",
        *,
        owner: str | None = None,
        ttl: int = 120_000,
        waiter_ttl: int = 60_000,
        delay: int = 0,
        client: str = "one",
        wait: bool = True,
        retention: int = 0,
        words: str = "",
        how: str = "",
    ) -> list[Any]:
        self._clients[id] = client
        patience = "wait" if wait else "nowait"
        message = (id, mode, owner or f"t{id}", ttl, waiter_ttl, delay, patience)
        hold, note = word_in("h", words), word_in("n", words)
        how = "linger" if word_in("g", words) else how
        more = (note, "", hold or 0, how) if hold or how else (note, "") if note else ()
        return self._turn(client, "acquire", *message, *more)

    async def extend(
        self, id: str, length: int, *, owner: str = "", begins: bool = False
    ) -> list[Any]:
        more = ("begins",) if begins else ()
        return self._turn(self._clients.get(id, "nobody"), "extend", id, length, *more)

    async def leave(
        self, id: str, *, ambiguous: bool = False, end: str = "ended", recorded: Sequence[Any] = ()
    ) -> list[Any]:
        client, marker = self._clients.get(id, "nobody"), self.kept.marker if ambiguous else 0
        if recorded:
            result, keep = recorded
            return self._turn(client, "leave", id, marker, "recorded", keep, quote(result))
        return self._turn(client, "leave", id, marker, end)

    async def break_lock(self, tokens: Sequence[int] | None = None) -> int:
        meant = () if tokens is None else (" ".join(map(str, tokens)),)
        return int(self._turn("nobody", "break", self.kept.broken, *meant)[1])

    async def inspect(self) -> list[Any]:
        rows = self._fetch("select * from aiodlock.inspect($1)", self.key)
        if any(row["what"] == "name" and row["ago_ms"] for row in rows):
            self._turn("nobody", "look")
        token, closed, closed_places, places = 0, 0, 0, "s0"
        recorded: list[int] = []
        rows.sort(key=lambda row: row["what"] != "name")
        holding: list[str] = []
        waiting: list[str] = []
        for row in rows:
            if row["what"] == "name":
                token, closed, closed_places = row["token"], row["left_ms"], row["places"]
                places = row["mode"]
            elif row["what"] == "record":
                recorded = [row["ago_ms"], row["left_ms"]]
            elif row["what"] == "holder":
                note = f" n={row['note']}"
                mode = places if row["mode"].startswith("s") and places != "s0" else row["mode"]
                words = (row["owner"], mode, row["token"], row["left_ms"], row["client"], note)
                holding += map(str, (*words, row["length_ms"]))
            else:
                mode = places if row["mode"].startswith("s") and places != "s0" else row["mode"]
                waiting += [row["owner"], mode, "", row["client"], f" n={row['note']}"]
        return [token, closed, holding, waiting, closed_places, recorded]

    async def forget(self) -> bool:
        return bool(self._turn("nobody", "forget") == ["forgot", "1"])

    def heard(self) -> list[tuple[str, str, str]]:
        self._database.do(_settle())
        for client, payload in self._database.heard:
            word, id, key, *_ = payload.split(" ")
            assert key == self.key
            self._said.append((client, word, id))
        self._database.heard.clear()
        return self._said

    def said(self) -> list[tuple[str, str, str]]:
        said, self._said = self.heard(), []
        return said

    def look(self) -> Stored:
        ((token, places, resized, found, waiting),) = self._fetch(_LOOK, self.key)
        words = ("mode", "token", "deadline", "length", "delay", "owner", "client", "marks")
        holders = [dict(holder) for holder in found or ()]
        for holder in holders:
            holder["marks"] = f"g={holder['lingers']}" if holder["lingers"] else ""
        if places:
            holders = [{**holder, "mode": f"s{places}{'r' * resized}"} for holder in holders]
        return (
            {holder["id"]: " ".join(str(holder[word]) for word in words) for holder in holders},
            {row["id"]: f"{row['arrival']} {row['deadline']} {row['length']}" for row in waiting},
            [(str(row["arrival"]), {"id": row["id"]}) for row in waiting],
            token or 0,
        )

    def sweep(self) -> None:
        """Have the database delete what has had its time."""
        self._fetch(
            "select aiodlock.sweep(100000, 100000, 'm0'), aiodlock.sweep(100000, 100000, 'b0'), "
            "aiodlock.sweep(100000, 100000, 'r0'), aiodlock.sweep(100000, 100000, 'n0')"
        )

    def stored(self) -> set[tuple[str, str, int]]:
        """Return table, key or id, and end of every row, also of those of other names."""
        return {tuple(row) for row in self._fetch(_STORED)}

    def clear(self) -> None:
        self._database.do(self._database.connection.execute(_CLEAR))

    def _turn(self, caller: str, verb: str, *words: object) -> list[Any]:
        """Carry a message out."""
        message = "\t".join(map(str, (verb, self.key, *words)))
        self._database.set(clock=self.time * 1000, way=next(self._ways))
        sql = "select aiodlock.turn($1, $2, $3)"
        rows = self._fetch(sql, caller, self.kept.token, message)
        answer, *heard = rows[0][0].split("\n")
        reply: list[Any] = answer.split(" ")
        if reply[0] == "done":
            reply[1] = unquote(reply[1])
        told = [told.split(" ") for told in heard]
        if reply[0] == "released":
            # What is granted to the same client is told by the reply, with its token.
            reply.append("state")
            reply += [x for word, id, _, *token in told if word == "granted" for x in (id, *token)]
            told = [words for words in told if words[0] != "granted"]
        self._said += [(caller, word, id) for word, id, *_ in told]
        return reply

    def _fetch(self, sql: str, *arguments: object) -> list[Any]:
        """Run a query at the present time."""
        database = self._database
        database.set(clock=self.time * 1000)
        return database.do(database.connection.fetch(sql, *arguments))


async def _settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)
