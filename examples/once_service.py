"""A shop that charges each order once a day, and needs no table for that: the store keeps the record.

``Once`` lets the first click charge. The other clicks wait, and get the receipt that is on record; a click
that comes hours later gets it too. What fails records nothing, and the next click charges.

The idempotency key stays: if a worker dies after the charge and before the record, the next click
charges again, and the provider recognizes the key.

A click after ``KEEP`` charges again, when the provider may have forgotten the key, too. An order that can
be clicked later than that needs a row: ``examples/web_service.py``.

uvicorn examples.payment_provider:app --port 8001 &
AIODLOCK_URL=redis://localhost:6379/0 uvicorn examples.once_service:app --workers 3
for click in 1 2 3 4 5; do curl -X POST 'localhost:8000/orders/1/pay?amount=1990' & done; wait
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import httpx
from fastapi import FastAPI

import aiodlock.fastapi
from aiodlock import OnceRun
from aiodlock.fastapi import Once

URL = os.environ.get("AIODLOCK_URL", "memory://")
PROVIDER = os.environ.get("PROVIDER", "http://localhost:8001")
#: Longer than anybody can click on an order: this shop's orders are void after some hours.
KEEP = 86400
#: A kept connection may be closed by the provider just when it is used again.
FRESH = httpx.Limits(max_keepalive_connections=0)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Each worker enters its own clients, after the fork."""
    async with (
        aiodlock.fastapi.lifespan(URL)(app),
        httpx.AsyncClient(base_url=PROVIDER, timeout=30, limits=FRESH) as app.state.provider,
    ):
        yield


app = FastAPI(lifespan=lifespan)
#: A click waits for up to 30 s for the first one, and gets 423 then.
charged_once = Once("orders:{order_id}", keep=KEEP, timeout=30)


@app.post("/orders/{order_id}/pay")
async def pay(
    order_id: int, amount: int, once: Annotated[OnceRun, charged_once]
) -> dict[str, int | str]:
    """Pay an order of ``amount`` cents. Every click gets the same receipt."""
    if once.first:
        once.result = await charge(order_id, amount)
    return {"order": order_id, "charge": str(once.result), "worker": os.getpid()}


async def charge(order_id: int, amount: int) -> str:
    """Charge an order at the provider, which knows the order by its idempotency key."""
    answer = await app.state.provider.post(
        "/charges", params={"amount": amount}, headers={"Idempotency-Key": f"order-{order_id}"}
    )
    answer.raise_for_status()
    receipt: str = answer.json()["charge"]
    return receipt
