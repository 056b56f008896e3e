"""The recipe on a real server beside the state machine of the memory store, step by step, where both agree.

They agree on who holds and who waits in which order, whoever asks, leaves and breaks. Tokens differ
(revisions; the clock), and the machine grants at once what the recipe grants when a client looks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aiodlock._model import ENDED, UNUSED, Granted, Refused, Waiting
from aiodlock.backends.etcd.place import EtcdPlace
from aiodlock.backends.etcd.recipe import Queue
from aiodlock.backends.memory.machine import Asked, Name

from .conftest import Direct, Heard
from .servers import EtcdCluster

MakeDirect = Callable[..., Coroutine[Any, Any, Direct]]

_LONG = 600_000


class _Both:
    """One name on both."""

    def __init__(self, direct: Direct, name: str, limit: int) -> None:
        self.direct = direct
        self.name = name
        self.limit = limit
        self.machine = Name()
        self.places: dict[str, tuple[EtcdPlace, Heard]] = {}
        self._now = 1_000_000_000

    def now(self) -> int:
        self._now += 1000
        return self._now

    async def acquire(self, mode: Any, owner: str | None, *, wait: bool) -> None:
        kind: Any = "semaphore" if self.limit else "lock"
        place, heard = self.direct.place(self.name, mode, kind=kind, limit=self.limit, owner=owner)
        asked = Asked(place.id, mode, self.limit, place.owner, "c", _LONG, _LONG, 0)
        theirs, _ = self.machine.acquire(self.now(), asked, wait=wait, retention=_LONG)
        mine = await place.acquire(wait=wait)
        match theirs:
            case ("held", *_):
                assert isinstance(mine, Granted), (mine, theirs)
            case ("waiting", *_):
                assert isinstance(mine, Waiting), (mine, theirs)
            case (why, *_):
                assert isinstance(mine, Refused), (mine, theirs)
                assert mine.why == why
                if mine.unsure:
                    await place.leave(UNUSED)
                return
        self.places[place.id] = place, heard

    async def leave(self, id: str) -> None:
        place, _ = self.places.pop(id)
        theirs, _ = self.machine.leave(self.now(), id, retention=_LONG)
        mine = await place.leave(ENDED)
        assert (mine.what, mine.reason)[: len(theirs)] == theirs

    async def break_(self) -> None:
        broken, _ = self.machine.break_(self.now(), remember=_LONG, retention=_LONG)
        assert await self.direct.store.break_lock(self.name) == len(broken)
        for id in broken:
            _, heard = self.places[id]
            await heard.until("gone: broken")
            await self.leave(id)

    async def check(self) -> None:
        """The same hold and wait, on both, and those of the recipe know it."""
        # In the machine a waiter whose owner came to hold gets in when it extends.
        for id in list(self.machine.waiters):
            self.machine.extend(self.now(), id, _LONG, retention=_LONG)
        for _ in range(200):
            queue = await self._read()
            holders = sorted(record.id for record in queue.holders())
            waiters = [record.id for record in queue.waiters()]
            told = all(self.places[id][0].token for id in holders)
            if told and holders == sorted(self.machine.holders):
                break
            await asyncio.sleep(0.01)  # a waiter that joins its owner writes that
        assert holders == sorted(self.machine.holders)
        assert waiters == list(self.machine.waiters)
        assert all(self.places[id][0].token for id in holders)
        assert not any(self.places[id][0].token for id in waiters)
        # An owner has one token.
        tokens: dict[str, set[int]] = {}
        for record in queue.holders():
            tokens.setdefault(record.owner, set()).add(self.places[record.id][0].token)
        assert all(len(one) == 1 for one in tokens.values())

    async def _read(self) -> Queue:
        kind = "semaphore" if self.limit else "lock"
        return await self.direct.store.cluster.read(self.direct.store.cluster.keys(kind, self.name))


@pytest.mark.parametrize("limit", [0, 2], ids=["lock", "semaphore"])
async def test_recipe_grants_what_the_machine_grants(
    one_node: EtcdCluster, make_direct: MakeDirect, limit: int
) -> None:
    direct = await make_direct(one_node)
    for seed in range(30):
        chance = random.Random(seed)
        both = _Both(direct, f"name {seed}", limit)
        for _ in range(25):
            ids = list(both.places)
            choice = chance.random()
            if ids and (choice < 0.4 or len(ids) > 6):
                await both.leave(chance.choice(ids))
            elif choice < 0.45 and not limit:
                await both.break_()
            else:
                mode = "shared" if limit else chance.choice(["exclusive", "shared"])
                owner = None if limit else chance.choice([None, None, "ann", "bob"])
                await both.acquire(mode, owner, wait=chance.random() < 0.75)
            await both.check()
        for id in list(both.places):
            await both.leave(id)
            await both.check()
        assert not (await both._read()).requests
