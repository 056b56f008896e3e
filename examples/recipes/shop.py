"""What the recipes protect: code that looks first and writes later. Without a lock it charges twice.

It keeps its records in Redis, where a program of yours has a database.
"""

from __future__ import annotations

import os
import time

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


def write_report() -> None:
    """Write the report. Two at a time would mix their lines."""
    records = redis.Redis.from_url(URL, decode_responses=True)
    if int(records.incr("writing")) > 1:
        records.incr("mixed")
    time.sleep(0.05)
    records.decr("writing")
    records.incr("reports")
