"""The web service with three uvicorn workers: what is counted is what the payment provider has charged.

The provider listens on a socket of its own, and its log is known to neither the database nor the lock.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

import aiodlock
from examples import payment_provider

from ..fastapi.conftest import serve_app
from ..scenes import STARTING, until, until_free
from ..servers import Store
from .workers import workers

pytestmark = pytest.mark.stores("valkey9")

WORKERS = 3


@dataclass
class Shop:
    """The service under test, and what its provider has seen."""

    http: httpx.AsyncClient
    #: The idempotency keys of all requests that reached the provider, in their order.
    asked: list[str]
    log: Path
    database: Path

    def charged(self) -> list[str]:
        """Return the keys that were really charged: the effects, counted outside of the database."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.split()[0] for line in lines]

    def paid(self) -> int:
        with closing(sqlite3.connect(self.database)) as database:
            (number,) = database.execute(
                "SELECT count(*) FROM orders WHERE paid_at IS NOT NULL"
            ).fetchone()
        return int(number)

    async def order(self) -> int:
        answer = await self.http.post("/orders", params={"amount": 1990})
        return int(answer.json()["order"])

    async def click(self, order: int) -> dict[str, Any]:
        answer = await self.http.post(f"/orders/{order}/pay")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@pytest.fixture
async def shop(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Shop]:
    """Give the service with three worker processes, and a provider that has charged nothing yet."""
    log, database = tmp_path / "charges.log", tmp_path / "orders.db"
    monkeypatch.setenv("CHARGES", str(log))
    monkeypatch.setattr(payment_provider, "charges", {})
    asked: list[str] = []
    async with (
        serve_app(watched(asked)) as provider,
        workers(
            "examples.web_service:app",
            WORKERS,
            {
                "AIODLOCK_URL": store.url,
                "DATABASE": str(database),
                "PROVIDER": str(provider.base_url),
            },
        ) as http,
    ):
        yield Shop(http, asked, log, database)


def watched(asked: list[str]) -> FastAPI:
    """Return the provider with a note of every request in front of it."""
    app = FastAPI()

    @app.middleware("http")
    async def note(request: Request, call_next: Any) -> Any:
        asked.append(request.headers["idempotency-key"])
        return await call_next(request)

    app.mount("/", payment_provider.app)
    return app


async def test_many_clicks_in_three_workers_charge_each_order_once(shop: Shop) -> None:
    orders, served = list[int](), set[int]()
    async with asyncio.timeout(3 * STARTING):
        while len(served) < WORKERS or len(orders) < 5:
            order = await shop.order()
            orders.append(order)
            clicks = [*await asyncio.gather(*(shop.click(order) for _ in range(12)))]
            clicks.append(await shop.click(order))  # and one that comes when all others are done
            assert sum(click["first"] for click in clicks) == 1
            assert len({click["charge"] for click in clicks}) == 1
            served |= {click["worker"] for click in clicks}
    assert sorted(shop.charged()) == sorted(f"order-{order}" for order in orders)
    assert shop.paid() == len(orders)
    # What the lock is for: the provider was not even asked twice, as the second click waited.
    assert set(Counter(shop.asked).values()) == {1}


async def test_a_worker_that_dies_between_the_charge_and_the_row_charges_nothing_twice(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = await shop.order()
    worker = (await shop.click(order))["worker"]
    doomed = await shop.order()
    monkeypatch.setattr(payment_provider, "ANSWER_AFTER", STARTING)
    click = asyncio.create_task(shop.http.post(f"/orders/{doomed}/pay"))
    # The order is charged, its row is not written. Any of the workers may be at it: kill them all.
    await until(lambda: f"order-{doomed}" in shop.charged(), "the charge")
    children = Path(f"/proc/{parent_of(worker)}/task/{parent_of(worker)}/children").read_text()
    for pid in map(int, children.split()):
        if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(httpx.TransportError):
        await click
    assert shop.paid() == 1
    monkeypatch.setattr(payment_provider, "ANSWER_AFTER", 0.0)
    async with asyncio.timeout(3 * STARTING):  # new workers start; the dead one's lease ends
        again = await shop.click(doomed)
    assert again["first"]
    assert shop.asked.count(f"order-{doomed}") == 2
    assert shop.charged().count(f"order-{doomed}") == 1
    assert shop.paid() == 2


async def test_two_workers_with_a_broken_lock_charge_once_and_one_of_them_is_told(
    shop: Shop, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = await shop.order()
    monkeypatch.setattr(payment_provider, "ANSWER_AFTER", 1.0)
    async with aiodlock.Client(store.url) as operator:
        first = asyncio.create_task(shop.http.post(f"/orders/{order}/pay"))
        await until(lambda: shop.charged(), "the charge")
        assert await operator.break_lock(f"order:{order}") == 1
        second = await shop.click(order)
        assert (await first).status_code == 409
        assert second["first"]
        await until_free(operator, f"order:{order}")
    assert shop.asked == [f"order-{order}"] * 2
    assert shop.charged() == [f"order-{order}"]
    assert shop.paid() == 1


async def test_an_order_that_does_not_exist_is_not_paid(shop: Shop) -> None:
    assert (await shop.http.post("/orders/77/pay")).status_code == 404
    assert (await shop.http.get("/orders/77/queue")).json() == {"holders": 0, "waiters": 0}
    assert shop.asked == []


def parent_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("PPid:")).split()[1])
