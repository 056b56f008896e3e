"""A web service that pays each order once, however many workers serve it.

AIODLOCK_URL=redis://localhost:6379/0 uvicorn examples.web_service:app --workers 4
curl -X POST localhost:8000/orders/42/pay
"""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

from fastapi import FastAPI

import aiodlock.fastapi
from aiodlock import Client, Lease
from aiodlock.fastapi import LockClient, Locked

# Each worker enters the client after the fork, when its app starts.
app = FastAPI(lifespan=aiodlock.fastapi.lifespan(os.environ.get("AIODLOCK_URL", "memory://")))

#: What a database would keep: for each order the token of the last payment.
paid: dict[int, int] = {}


@app.post("/orders/{order_id}/pay")
async def pay(
    order_id: int, lease: Annotated[Lease, Locked("orders:{order_id}", timeout=10, ttl=10)]
) -> dict[str, int | bool]:
    """Pay an order. 423 when another request is at it for longer than 10 s."""
    first = order_id not in paid
    await asyncio.sleep(0.02)  # the bank
    # A database would be told: UPDATE ... SET fence = :token WHERE id = :id AND fence < :token
    paid[order_id] = max(paid.get(order_id, 0), lease.token)
    return {"order": order_id, "first": first, "token": lease.token}


@app.get("/orders/{order_id}/queue")
async def queue(order_id: int, client: Annotated[Client, LockClient]) -> dict[str, int]:
    """Tell how many requests wait for an order."""
    info = await client.inspect(f"orders:{order_id}")
    return {"holders": len(info.holders), "waiters": len(info.waiters)}
