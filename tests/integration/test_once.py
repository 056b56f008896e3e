"""Once, with workers that are killed, stopped and cancelled. The long form: ``tests.integration.once``."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

import aiodlock

from ..conftest import MakeClient
from ..servers import Store
from .once import Line, judge, try_store

KEYS = 60


@pytest.mark.stores("valkey9")
async def test_each_key_has_one_success_though_workers_are_killed_and_stopped(store: Store) -> None:
    verdict = await try_store(store, keys=KEYS, workers=3, kills=3, stops=3, seed=7)
    assert not verdict.wrong
    assert (verdict.keys, verdict.kills) == (KEYS, 3)
    assert verdict.effects == KEYS + verdict.again


def line(at: float, pid: int, word: str, value: str = "-") -> Line:
    return Line(at, pid, word, 1, value)


DONE = [line(1, 1, "enters"), line(2, 1, "effect", "5"), line(3, 1, "confirmed", "5")]
AGAIN = [line(0.4, 2, "enters"), line(0.5, 2, "effect", "4")]
LATE = [line(9, 1, "effect", "5"), line(10, 1, "confirmed", "5")]


@pytest.mark.parametrize(
    ("lines", "deaths", "result", "right"),
    [
        (DONE, {}, "5", True),
        (DONE, {}, None, False),
        (DONE, {}, "4", False),
        ([*DONE, line(4, 2, "got", "4")], {}, "5", False),
        ([*AGAIN, *DONE], {}, "5", False),
        ([*AGAIN, *DONE], {2: 0.6}, "5", True),
        ([*AGAIN, *DONE, line(4, 2, "lost", "expired")], {}, "5", True),
        ([*AGAIN, line(8.9, 1, "enters"), *LATE], {2: 0.6}, "5", True),
        ([*AGAIN, line(0.6, 1, "enters"), *LATE], {2: 0.6}, "5", False),
    ],
)
def test_judge_knows_right_from_wrong(
    lines: list[Line], deaths: dict[int, float], result: object, right: bool
) -> None:
    assert bool(judge(lines, deaths, {1: result}).wrong) != right


@pytest.mark.stores("memory")
async def test_each_key_has_one_success_though_tasks_are_cancelled(
    make_client: MakeClient,
) -> None:
    clients = [await make_client(ttl=1.0), await make_client(ttl=1.0)]
    chance = random.Random(7)
    effects: Counter[int] = Counter()
    results: dict[int, set[object]] = {}

    async def work(client: aiodlock.Client) -> None:
        for key in chance.sample(range(KEYS), KEYS):
            async with client.once(f"key:{key}", keep=600) as once:
                if once.first:
                    assert once.lease is not None
                    await asyncio.sleep(chance.random() * 0.005)
                    effects[key] += 1
                    once.result = str(once.lease.token)
            results.setdefault(key, set()).add(once.result)

    tasks = [asyncio.create_task(work(client)) for client in clients * 4]
    for task in tasks[2:]:
        await asyncio.sleep(chance.random() * 0.02)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert {key: len(values) for key, values in results.items()} == dict.fromkeys(range(KEYS), 1)
    assert sum(effects.values()) - KEYS <= len(tasks) - 2
