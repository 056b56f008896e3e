"""The functions in PostgreSQL against the reference: any sequence of calls, the same answers and grants."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

import asyncpg
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from .test_scripts import CLIENTS, MINUTE, MOST, USUAL, Locks, Semaphores, _names

STEPS = int(os.environ.get("AIODLOCK_MODEL_STEPS", "2000"))
FOR_EVER = 100_000 * MINUTE
_T = TypeVar("_T")


class VirtualDirect:
    def __init__(self, loop: asyncio.AbstractEventLoop, db: asyncpg.Connection, kind: str) -> None:
        self.loop, self.db = loop, db
        self.key = f"{kind[0]}:name{next(_names)}"
        self.time = 0
        self.log = []
        self._clients: dict[str, str] = {}
        self._said: list[tuple[str, str, str]] = []

    def do(self, call: Coroutine[Any, Any, _T]) -> _T:
        return self.loop.run_until_complete(call)

    def _turn(self, caller: str, *words: object) -> list[str]:
        verb, *rest = words
        self.log.append((caller, words, self.time))
        op = "\t".join(map(str, (verb, self.key, *rest)))
        self.do(self.db.execute(f"set aiodlock.clock = {self.time * 1000}"))
        answer, *heard = self.do(
            self.db.fetchval(
                "select aiodlock.turn($1, $2, $3)", caller, 100 * MINUTE, [op]
            )
        )
        words = answer.split(" ")
        if verb == "acquire" and words[0] == "gone":
            words = ["gone"]
        for message in heard:
            word, id, _key, *token = message.split(" ")
            if words[0] == "released" and word == "granted":
                words += [id, *token]
            else:
                self._said.append((caller, word, id))
        self.log.append((answer, heard))
        if words[0] == "released" and len(words) > 1:
            words.insert(1, "state")
        return words

    async def acquire(self, id: str, mode: str = "x", *, owner: str | None = None, ttl: int = 100_000,
        waiter_ttl: int = 50_000, delay: int = 0, client: str = "one", wait: bool = True, retention: int = 0,
    ) -> list[str]:
        self._clients[id] = client
        wish = "wait" if wait else "nowait"
        return self._turn(client, "acquire", id, mode, owner or f"t{id}", ttl, waiter_ttl, delay, wish)

    async def extend(self, id: str, length: int, owner: str = "") -> list[str]:
        return self._turn("", "extend", id, length, owner)

    async def leave(self, id: str, ambiguous: bool = False) -> list[str]:
        return self._turn(self._clients.get(id, ""), "leave", id, FOR_EVER if ambiguous else 0, "ended")

    async def break_lock(self) -> int:
        return int(self._turn("", "break", FOR_EVER)[1])

    def hear(self, _: object, __: int, channel: str, payload: str) -> None:
        word, id, *_rest = payload.split(" ")
        client = next(c for c in CLIENTS if CHANNELS[c] == channel)
        self._said.append((client, word, id))

    def said(self) -> list[tuple[str, str, str]]:
        self.do(_settle())
        said, self._said = self._said, []
        return said

    def look(self) -> tuple[dict[str, str], dict[str, str], list[tuple[str, dict[str, str]]], int]:
        name = self.do(self.db.fetchrow(
            "select * from aiodlock.name where key = $1 order by version desc limit 1", self.key))
        waiting = self.do(self.db.fetch("select * from aiodlock.waiter where key = $1 order by arrival", self.key))
        state, token = {}, 0
        if name is not None:
            token = name["token"]
            for h in name["holders"]:
                state[h["id"]] = " ".join(str(h[w]) for w in ("mode", "token", "deadline", "length", "delay", "owner", "client"))
        waiters = {w["id"]: f"{w['arrival']} {w['deadline']} {w['length']}" for w in waiting}
        return state, waiters, [(str(w["arrival"]), {"id": w["id"]}) for w in waiting], token


import hashlib

LAST = []
CHANNELS = {c: "aiodlock_" + hashlib.md5(c.encode()).hexdigest() for c in CLIENTS}
CLOCK = "create or replace function aiodlock.clock_us() returns bigint language sql volatile as $$ select current_setting('aiodlock.clock')::bigint $$"


def _machine(base: type[Locks], loop, db):
    class Machine(base):
        def __init__(self) -> None:
            super().__init__(None)
            self.scripts = VirtualDirect(loop, db, self.kind)
            for table in ('name','waiter','marker','broken'):
                self.scripts.do(db.execute(f'delete from aiodlock.{table}'))
            self.scripts.said()
            listeners[0] = self.scripts

        def teardown(self) -> None:
            import sys
            if sys.exc_info()[0]:
                pass
            LAST[:] = self.scripts.log

    listeners = [None]
    for c in CLIENTS:
        loop.run_until_complete(db.add_listener(CHANNELS[c], lambda *a: listeners[0].hear(*a)))
    Machine.steps = 0
    return Machine


import pytest


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("base", [Locks, Semaphores])
def test_functions_answer_and_grant_as_the_reference(base) -> None:
    loop = asyncio.new_event_loop()
    db = loop.run_until_complete(asyncpg.connect("postgresql://postgres@127.0.0.1:15432/postgres"))
    loop.run_until_complete(db.execute("create table if not exists public.x(); drop table public.x"))
    sql = __import__("pathlib").Path("aiodlock/backends/postgres/schema.sql").read_text().replace("@schema@", '"aiodlock"').replace("@unlogged@", "unlogged")
    loop.run_until_complete(db.execute("drop schema if exists aiodlock cascade; create schema aiodlock"))
    loop.run_until_complete(db.execute(sql))
    loop.run_until_complete(db.execute(CLOCK))
    machine = _machine(base, loop, db)
    try:
      run_state_machine_as_test(machine, settings=settings(max_examples=max(1, STEPS // USUAL), stateful_step_count=MOST, deadline=None, phases=[Phase.generate], report_multiple_bugs=False, suppress_health_check=list(HealthCheck)))
    except BaseException:
      print(*LAST[-12:], sep='\n')
      raise
    print(machine.steps)
    loop.run_until_complete(db.close())
    loop.close()


async def _settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)
