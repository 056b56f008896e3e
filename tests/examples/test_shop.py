"""The shop of ``examples/once_service.py``: three workers, forty orders, five clicks each, on busy cores.

Counted is what reached the provider: it keeps a list of its own, and charges whatever it is asked to.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from ..fastapi.conftest import serve_app
from ..scenes import STARTING
from ..servers import Store
from .workers import workers

pytestmark = pytest.mark.stores("valkey9")

WORKERS, ORDERS, CLICKS = 3, 40, 5
#: Between the effect and the answer. The other clicks of an order meet it there.
ANSWER_AFTER = 0.05


class Provider:
    """Charges whatever it is asked to, as one that knows no idempotency keys."""

    def __init__(self) -> None:
        #: The orders that were charged, each as often as that was done.
        self.effects: list[str] = []
        self.app = FastAPI()
        self.app.post("/charges")(self.charge)

    async def charge(self, request: Request) -> dict[str, str]:
        self.effects.append(request.headers["idempotency-key"])
        receipt = f"charge-{len(self.effects)}"
        await asyncio.sleep(ANSWER_AFTER)
        return {"charge": receipt}


async def test_forty_orders_with_five_clicks_each_are_charged_once_and_without_once_more_often(
    store: Store, tmp_path: Path
) -> None:
    provider = Provider()
    async with serve_app(provider.app) as served:
        settings = {
            "AIODLOCK_URL": store.url,
            "PROVIDER": str(served.base_url),
            "RECEIPTS": str(tmp_path),
        }
        async with workers("tests.examples.careless_shop:app", WORKERS, settings) as http:
            await until_all_serve(http)
            with busy_cores():
                provider.effects.clear()
                answers = await click_all(http, "orders")
                answers.append(await click(http, "orders", 7))  # and one when all others are done
            once = Counter(provider.effects)
            provider.effects.clear()
            await click_all(http, "careless")
            careless = Counter(provider.effects)
    assert once == {f"order-{order}": 1 for order in range(ORDERS)}
    receipts = {(answer["order"], answer["charge"]) for answer in answers}
    assert len(receipts) == ORDERS, "the clicks of one order got different receipts"
    assert len(careless) == ORDERS
    assert careless.total() > ORDERS, "the clicks of an order did not meet"


async def until_all_serve(http: httpx.AsyncClient) -> None:
    seen, order = set[int](), 1_000_000
    async with asyncio.timeout(2 * STARTING):
        while len(seen) < WORKERS:
            some = [click(http, "orders", order + number) for number in range(6)]
            seen |= {answer["worker"] for answer in await asyncio.gather(*some)}
            order += len(some)


async def click(http: httpx.AsyncClient, shop: str, order: int) -> dict[str, Any]:
    answer = await http.post(f"/{shop}/{order}/pay", params={"amount": 1990})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def click_all(http: httpx.AsyncClient, shop: str) -> list[dict[str, Any]]:
    """Click for all orders at the same time, the clicks of one order beside each other."""
    clicks = [click(http, shop, order) for order in range(ORDERS) for _ in range(CLICKS)]
    return await asyncio.gather(*clicks)


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core of this machine busy with something else."""
    spin = [sys.executable, "-S", "-c", "while True: pass"]
    spinning = [Popen(spin) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()
