"""What the recipes protect: code that looks first and writes later. Without a lock it charges twice.

It keeps its records in Redis, where a program of yours has a database.
"""

from __future__ import annotations

import asyncio
import os
import time

import anyio
import redis

URL = os.environ.get("AIODLOCK_URL", "redis://localhost:6379/0")


def pay(order_id: int, token: int) -> bool:
    """Charge an order that is not paid yet; return whether this call did it."""
    records = redis.Redis.from_url(URL, decode_responses=True)
    if records.get(f"paid:{order_id}") is not None:
        return False
    time.sleep(0.02)  # the payment provider takes its time
    records.incr(f"charged:{order_id}")
    records.set(f"paid:{order_id}", token)
    return True


async def pay_in_thread(order_id: int, token: int) -> bool:
    """Pay without blocking the event loop, and return when the thread has ended, also if cancelled.

    A cancellation ends an await at once, and stops no thread: the lock would be free while it still pays.
    """
    paying = asyncio.get_running_loop().run_in_executor(None, pay, order_id, token)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):  # anyio cancels again at each turn of the event loop
        while not paying.done():
            try:
                await asyncio.wait([paying])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled
    return paying.result()


def write_report() -> None:
    """Write the report. Two at a time would mix their lines."""
    records = redis.Redis.from_url(URL, decode_responses=True)
    if int(records.incr("writing")) > 1:
        records.incr("mixed")
    time.sleep(0.05)
    records.decr("writing")
    records.incr("reports")
