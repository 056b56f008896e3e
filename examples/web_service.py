"""A web service that pays each order once, however many workers serve it and whichever of them dies.

Three things work together, and each does what the other two cannot:

- The lock: one request at a time works on an order. The second click waits, and then finds the order paid.
- The row: ``UPDATE ... WHERE paid_at IS NULL`` changes it once. It remembers when the lock is free again.
- The idempotency key: the payment provider charges an order's id once. When a worker dies after the charge
  and before the UPDATE, the row stays unpaid. The next click charges again with the same key, for nothing.

uvicorn examples.payment_provider:app --port 8001 &
AIODLOCK_URL=redis://localhost:6379/0 uvicorn examples.web_service:app --workers 3
curl -X POST 'localhost:8000/orders?amount=1990'
curl -X POST localhost:8000/orders/1/pay
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Annotated, Any

import httpx
from fastapi import FastAPI, HTTPException

import aiodlock.fastapi
from aiodlock import Client, Lease
from aiodlock.fastapi import LockClient, Locked

URL = os.environ.get("AIODLOCK_URL", "memory://")
DATABASE = os.environ.get("DATABASE", "orders.db")
PROVIDER = os.environ.get("PROVIDER", "http://localhost:8001")

TABLE = """CREATE TABLE IF NOT EXISTS orders (
    id INTEGER PRIMARY KEY, amount INTEGER NOT NULL, paid_at TEXT, charge TEXT
)"""
PAID = "UPDATE orders SET paid_at = datetime('now'), charge = ? WHERE id = ? AND paid_at IS NULL"


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Each worker enters its own client, after the fork."""
    await sql(TABLE)
    async with aiodlock.fastapi.lifespan(URL)(app):
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders")
async def order(amount: int) -> dict[str, int]:
    """Make an order of ``amount`` cents."""
    _, _, order_id = await sql("INSERT INTO orders (amount) VALUES (?)", amount)
    return {"order": order_id}


@app.post("/orders/{order_id}/pay")
async def pay(
    order_id: int, lease: Annotated[Lease, Locked("order:{order_id}", timeout=10, ttl=5)]
) -> dict[str, int | str | bool]:
    """Pay an order. 423 when another request works on it for longer than 10 s."""
    row, _, _ = await sql("SELECT amount, charge FROM orders WHERE id = ?", order_id)
    if row is None:
        raise HTTPException(404, f"there is no order {order_id}")
    amount, charge = row
    first = False
    if charge is None:
        charge = await charge_once(order_id, amount)
        # The lease may be lost by now, and another worker be here too. Only one of the two changes the row.
        _, changed, _ = await sql(PAID, charge, order_id)
        first = changed == 1
    return {"order": order_id, "charge": charge, "first": first, "worker": os.getpid()}


@app.get("/orders/{order_id}/queue")
async def queue(order_id: int, client: Annotated[Client, LockClient]) -> dict[str, int]:
    """Tell how many requests wait for an order."""
    info = await client.inspect(f"order:{order_id}")
    return {"holders": len(info.holders), "waiters": len(info.waiters)}


async def charge_once(order_id: int, amount: int) -> str:
    """Charge an order. Repeating it is safe: the provider knows the order by its idempotency key."""
    async with httpx.AsyncClient(base_url=PROVIDER) as provider:
        answer = await provider.post(
            "/charges", params={"amount": amount}, headers={"Idempotency-Key": f"order-{order_id}"}
        )
    answer.raise_for_status()
    charge: str = answer.json()["charge"]
    return charge


async def sql(statement: str, *values: object) -> tuple[Any, int, int]:
    """Run one statement; return its first row, how many rows it changed, and the new row's id."""

    def run() -> tuple[Any, int, int]:
        with closing(sqlite3.connect(DATABASE, isolation_level=None)) as database:
            cursor = database.execute(statement, values)
            return cursor.fetchone(), cursor.rowcount, cursor.lastrowid or 0

    return await asyncio.to_thread(run)
