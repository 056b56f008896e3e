"""A shop that pays each order once, with several workers, metrics and tests. See docs/how-to/shop.md."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Annotated

from fastapi import FastAPI, HTTPException
from lock_metrics import Report, metrics

import aiodlock.fastapi
from aiodlock import Lease
from aiodlock.fastapi import Locked

URL = os.environ.get("AIODLOCK_URL", "redis://localhost:6379/0")
DATABASE = os.environ.get("DATABASE", "shop.db")
TABLES = """
CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, paid_at TEXT);
CREATE TABLE IF NOT EXISTS charges (key TEXT PRIMARY KEY, order_id INTEGER);
"""


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Each worker runs this: it has its own client, and reports its own locks."""
    make_tables()
    async with aiodlock.fastapi.lifespan(URL)(app):
        app.state.aiodlock.add_hooks(Report())
        yield


app = FastAPI(lifespan=lifespan)
app.get("/metrics")(metrics)


@app.post("/orders")
def order() -> int:
    """Make an order; return its number."""
    with closing(connect()) as database:
        return database.execute("INSERT INTO orders DEFAULT VALUES").lastrowid or 0


@app.post("/orders/{order_id}/pay")
async def pay(
    order_id: int, lease: Annotated[Lease, Locked("order:{order_id}", timeout=2)]
) -> bool:
    """Pay an order; return whether this request did it. One request at a time works on an order."""
    # sqlite3 blocks the event loop, here for microseconds. With a database server, use its asyncio driver.
    with closing(connect()) as database:
        found = database.execute("SELECT paid_at FROM orders WHERE id = ?", (order_id,)).fetchone()
        if found is None:
            raise HTTPException(404, f"there is no order {order_id}")
        if found[0] is not None:
            return False  # another request has paid it
        await charge(order_id)
        # The lease may be lost by now. The WHERE clause lets one request change the row.
        paid = database.execute(
            "UPDATE orders SET paid_at = datetime('now') WHERE id = ? AND paid_at IS NULL",
            (order_id,),
        )
        return paid.rowcount == 1


async def charge(order_id: int) -> None:
    """Stand for a request to a payment provider, which charges each idempotency key once."""
    with closing(connect()) as provider:
        key = f"order-{order_id}"
        provider.execute("INSERT OR IGNORE INTO charges VALUES (?, ?)", (key, order_id))


def make_tables() -> None:
    with closing(connect()) as database:
        database.executescript(TABLES)


def connect() -> sqlite3.Connection:
    return sqlite3.connect(DATABASE, isolation_level=None)
