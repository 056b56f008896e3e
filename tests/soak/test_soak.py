"""The soak itself: a short one ends without violations, and its checks find what they look for."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scenes import until
from tests.soak.faults import Tormentor
from tests.soak.journal import Hold, Journal, check, read
from tests.soak.memory import Series


def hold(mode: str, token: int, began: float, ended: float, name: str = "name") -> Hold:
    return Hold(name, mode, token, began, ended)


@pytest.mark.parametrize(
    ("holds", "found"),
    [
        ([hold("x", 1, 1.0, 2.0), hold("x", 2, 1.9, 3.0)], "exclusion"),
        ([hold("x", 1, 1.0, 9.0), hold("s", 2, 2.0, 2.0)], "exclusion"),
        ([hold("s", 1, 1.0, 4.0), hold("s", 2, 2.0, 3.0), hold("x", 3, 3.5, 5.0)], "exclusion"),
        ([hold("s2", 1, 1.0, 9.0), hold("s2", 2, 1.0, 9.0), hold("s2", 3, 2.0, 2.5)], "limit"),
        ([hold("x", 2, 1.0, 2.0), hold("x", 1, 3.0, 4.0)], "token"),
        ([hold("x", 2, 1.0, 2.0), hold("s", 1, 3.0, 4.0)], "token"),
        ([hold("s", 2, 1.0, 2.0), hold("s", 2, 1.0, 2.0)], "token"),
    ],
)
def test_broken_promise_is_found(holds: list[Hold], found: str) -> None:
    assert [what.partition(":")[0] for what in check(holds)] == [found]


def test_kept_promises_are_not_mistaken_for_broken_ones() -> None:
    assert not check(
        [
            hold("x", 1, 1.0, 2.0),
            hold("s", 3, 2.0, 5.0),
            hold("s", 2, 2.5, 4.0),
            hold("x", 4, 5.0, 6.0),
            hold("x", 1, 1.5, 1.6, "other"),
            hold("s2", 1, 1.0, 9.0, "pool"),
            hold("s2", 2, 1.0, 2.0, "pool"),
            hold("s2", 3, 2.0, 3.0, "pool"),
        ]
    )


def test_journal_of_a_killed_worker_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    first = journal.began("name", "x", 7, 1.0)
    journal.lasts(first, 2.5)
    journal.began("name", "x", 8, 3.0)
    journal.violation("something")
    journal.totals({"acquisitions": 2, "longest wait": 1.5})
    with path.open("a") as file:
        file.write('t {"acquisitio')
    record = read([path])
    assert record.holds == [hold("x", 7, 1.0, 2.5), hold("x", 8, 3.0, 3.0)]
    assert record.counts == {"acquisitions": 2}
    assert record.longest_wait == 1.5
    assert len(record.violations) == 1


def test_growing_memory_is_not_flat() -> None:
    mebibyte = 1024 * 1024
    warming_up = [(float(at), min(at, 20) * mebibyte) for at in range(100)]
    leaking = [(float(at), (30 + at // 5) * mebibyte) for at in range(100)]
    assert Series("warming up", warming_up).is_flat
    assert not Series("leaking", leaking).is_flat


async def test_tormentor_ends_also_when_cleaning_up_fails() -> None:
    nothing: Any = None
    tormentor = Tormentor(
        nothing,
        nothing,
        random.Random(1),
        victims=lambda: [],
        signal_one=nothing,
        kill_one=nothing,
    )

    async def fault() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ConnectionError("and the server is away")

    for kinds in ("_of_workers", "_of_network", "_of_server"):
        setattr(tormentor, kinds, lambda: {"fault": fault})
    running = asyncio.create_task(tormentor.run(0.001))
    await until(lambda: tormentor.counts["fault"] == 3)
    running.cancel()
    await asyncio.wait({running}, timeout=10)
    assert running.cancelled()


@pytest.mark.timeout(600)  # processes take long to start on a busy machine
async def test_short_soak_ends_without_a_violation() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.soak", "--minutes", "0.1", "--pause", "0.7"),
        cwd=Path(__file__).parents[2],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode == 0, (out.decode(), err.decode())
    assert out.decode().rstrip().endswith(" 0 violations")
