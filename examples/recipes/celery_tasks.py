"""A Celery task that pays an order once, however often it is delivered.

    celery --app celery_tasks worker --pool prefork --concurrency 4

The client is made at import, in the process that forks the workers; each of them connects on its first use.
"""

from __future__ import annotations

import os

import shop
from celery import Celery, Task

from aiodlock import sync

app = Celery(broker=os.environ.get("BROKER_URL", "redis://localhost:6379/1"))
app.conf.task_ignore_result = True
locks = sync.Client(shop.URL)


@app.task
@locks.locked("order:{order_id}", timeout=60)
def pay(order_id: int) -> None:
    shop.pay(order_id, 0)  # here is no lease: where the token is checked, take a block, as below


@app.task(bind=True, max_retries=None)
def pay_later(self: Task, order_id: int) -> None:
    """As above; a worker that finds the order locked takes another task meanwhile."""
    try:
        with locks.lock(f"order:{order_id}", timeout=0) as lease:
            shop.pay(order_id, lease.token)
    except sync.AcquireTimeout as busy:
        raise self.retry(exc=busy, countdown=0.1) from busy
