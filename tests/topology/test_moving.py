"""A live service moves to another store: workers of neighbouring deployments exclude each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from aiodlock import Client
from aiodlock._clock import now
from aiodlock.backends.postgres.schema import create_statements
from examples.moving import Step, exclusive

from ..servers import embedded, installed, postgres_server

pytestmark = pytest.mark.skipif(not installed("postgres"), reason="postgres is not installed")
NAME = "order:42"
WORKERS = 6


class Account:
    """Notices two workers at once, and counts their work. Refuses smaller tokens, as a fenced row does."""

    def __init__(self) -> None:
        self.steps: dict[Step, int] = dict.fromkeys(Step, 0)
        self.token = 0
        self._inside = False

    async def work(self, step: Step, token: int) -> None:
        assert not self._inside, "two work at once"
        assert token > self.token, "the token is not larger than the one before"
        self._inside, self.token = True, token
        await asyncio.sleep(0)
        self._inside = False
        self.steps[step] += 1


async def run_worker(
    account: Account, step: Step, urls: Sequence[str], ends: asyncio.Event
) -> None:
    """One worker of a deployment, with clients of its own, as a process has them."""
    async with Client(urls[0]) as old, Client(urls[1]) as new:
        while not ends.is_set():
            async with exclusive(NAME, step, old, new) as token:
                await account.work(step, token)


async def roll_out(
    account: Account, urls: Sequence[str], steps: Sequence[Step], until_each: int
) -> None:
    """Replace the workers one by one, from one deployment to the next."""
    async with asyncio.TaskGroup() as tasks:
        ends = [asyncio.Event() for _ in range(WORKERS)]
        running: list[asyncio.Task[None]] = []
        for number, step in enumerate(steps):
            for index in range(WORKERS):
                if number > 0:
                    ends[index].set()
                    await running[index]
                    ends[index] = asyncio.Event()
                call = run_worker(account, step, urls, ends[index])
                task = tasks.create_task(call)
                running[index : index + 1] = [task]
                await work_done(account, step, account.steps[step] + until_each // WORKERS)
        for end in ends:
            end.set()


async def work_done(account: Account, step: Step, count: int) -> None:
    give_up = now() + 60
    while account.steps[step] < count:
        assert now() < give_up, f"no work was done by {step}"
        await asyncio.sleep(0.01)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("direction", ["to PostgreSQL", "to Valkey"])
async def test_rolling_from_one_store_to_another_never_lets_two_work(direction: str) -> None:
    with embedded("valkey9", tcp=True) as valkey, postgres_server("postgres") as postgres:
        postgres.execute(create_statements("logged"))
        urls = [valkey.url, postgres.url]
        if direction == "to Valkey":
            urls.reverse()
        account = Account()
        await roll_out(account, urls, [Step.OLD, Step.BOTH, Step.NEW], 60)
        assert all(count >= 60 for count in account.steps.values())


@pytest.mark.timeout(180)
async def test_rolling_without_the_step_between_lets_two_work() -> None:
    """The test above would notice."""
    with embedded("valkey9", tcp=True) as valkey, postgres_server("postgres") as postgres:
        postgres.execute(create_statements("logged"))
        with pytest.raises(BaseExceptionGroup) as failed:
            await roll_out(Account(), [valkey.url, postgres.url], [Step.OLD, Step.NEW], 600)
        assert failed.value.subgroup(AssertionError) is not None
