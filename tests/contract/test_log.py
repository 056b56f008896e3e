"""The log is bounded: the same event for many names within a second is two lines. Hooks hear each."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

import aiodlock
from aiodlock._errors import LossReason
from aiodlock._log import Log
from aiodlock.testing import lose

from ..conftest import MakeClient
from ..scenes import PATIENCE, until, until_waiting

pytestmark = pytest.mark.stores("memory")
MANY = 300
REASONS: list[LossReason] = ["broken", "gone", "broken", "gone"]


def lines(caplog: pytest.LogCaptureFixture, event: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "event", "") == event]


def told(records: list[logging.LogRecord]) -> int:
    """Return of how many names these lines tell."""
    return sum(getattr(record, "number", 1) for record in records)


async def hold(client: aiodlock.Client, name: str, inside: asyncio.Event | None = None) -> None:
    async with client.lock(name):
        if inside is not None:
            inside.set()
        await asyncio.sleep(600)


async def test_children_that_wait_for_what_their_creator_has_open(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = await make_client(deadlock_after=0.05)
    async with client.lock("a"):
        tasks = [asyncio.create_task(hold(client, "a")) for _ in range(MANY)]
        async with asyncio.timeout(PATIENCE):
            await until(lambda: told(lines(caplog, "waits_for_parent")) == MANY)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    first, *later = lines(caplog, "waits_for_parent")
    assert first.lock == "a"  # type: ignore[attr-defined]
    assert 1 <= len(later) <= 20, "one a second"
    assert f"{later[0].number} more" in later[0].getMessage()  # type: ignore[attr-defined]
    assert later[0].locks == ["a"]  # type: ignore[attr-defined]


async def test_leases_lost_at_once_are_a_few_lines_and_hooks_hear_each(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []

    class Losses(aiodlock.Hooks):
        def lost(self, request: aiodlock.RequestInfo, held: float, reason: LossReason) -> None:
            heard.append(request.name)

    client = await make_client()
    client.add_hooks(Losses())
    leases = [await client.lock(f"n{number}").acquire() for number in range(MANY)]
    await client.__aexit__(None, None, None)
    records = lines(caplog, "lost")
    assert told(records) == MANY, "what was counted is written when the client is left"
    assert len(records) <= 10
    assert sorted(heard) == sorted(lease.name for lease in leases)


async def test_many_deadlocks_at_once_end_one_task_each_and_are_a_few_lines(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = await make_client(deadlock_after=0.05)
    pairs = 60

    async def take(first: str, second: str, both: asyncio.Barrier) -> int:
        async with client.lock(first):
            await both.wait()
            try:
                async with client.lock(second):
                    return 0
            except aiodlock.DeadlockError:
                return 1

    taking = []
    for number in range(pairs):
        both, x, y = asyncio.Barrier(2), f"x{number}", f"y{number}"
        taking.append(asyncio.gather(take(x, y, both), take(y, x, both)))
    async with asyncio.timeout(PATIENCE):
        ended = await asyncio.gather(*taking)
    await client.__aexit__(None, None, None)
    assert all(sum(pair) == 1 for pair in ended), "of each two, one goes on"
    records = lines(caplog, "deadlock")
    assert told(records) == pairs
    assert len(records) <= 20, "at most one a second after the first"


async def test_line_about_many_losses_has_their_reasons(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = await make_client()
    leases = [await client.lock(name).acquire() for name in "abcd"]
    await asyncio.gather(*map(lose, leases, REASONS))
    await client.__aexit__(None, None, None)
    first, later = lines(caplog, "lost")
    assert first.reason == "broken"  # type: ignore[attr-defined]
    assert "3 more within a second (gone: 2, broken: 1): 'b', 'c', 'd'" in later.getMessage()
    assert later.reasons == {"gone": 2, "broken": 1}  # type: ignore[attr-defined]


async def test_line_about_many_tries_has_their_name_once(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(asyncio.get_running_loop())
    for name in "aaabcdefg":
        log.tell(logging.WARNING, "extension_failed", name, "extending %r failed", name)
    log.end()
    _, later = lines(caplog, "extension_failed")
    assert later.number == 8  # type: ignore[attr-defined]
    assert later.locks == ["a", "b", "c", "d", "e"]  # type: ignore[attr-defined]
    assert "8 more within a second: 'a', 'b', 'c', 'd', 'e', …" in later.getMessage()


async def test_second_event_alone_is_written_in_its_own_words(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = await make_client(deadlock_after=0.05)
    names = ("a", "b")
    async with client.multilock(*names):
        tasks = [asyncio.create_task(hold(client, name)) for name in names]
        for name in names:
            await until_waiting(client, name)
        await until(lambda: len(lines(caplog, "waits_for_parent")) == 2)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    records: list[Any] = lines(caplog, "waits_for_parent")
    assert sorted(record.lock for record in records) == ["a", "b"]
    assert all("creator" in record.getMessage() for record in records)
