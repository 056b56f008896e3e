"""APScheduler on several hosts: each wants to write the report, one of them does it.

python scheduled.py
"""

from __future__ import annotations

import os

import shop
from apscheduler.schedulers.blocking import BlockingScheduler

from aiodlock import sync

locks = sync.Client(shop.URL)
scheduler = BlockingScheduler()


@scheduler.scheduled_job("interval", seconds=float(os.environ.get("EVERY", "60")))
def report() -> None:
    try:
        with locks.lock("report", timeout=0):
            shop.write_report()
    except sync.AcquireTimeout:
        pass  # another host is at it


if __name__ == "__main__":
    scheduler.start()
