"""A taskiq task that pays an order once. Each worker process has a client of its own.

    python taskiq_tasks.py 42

This broker keeps its tasks in memory, and runs them in the process that sends them, for the example. With
taskiq-redis or another, start workers: ``taskiq worker taskiq_tasks:broker``.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import shop
from taskiq import Context, InMemoryBroker, TaskiqDepends, TaskiqEvents, TaskiqState

import aiodlock

broker = InMemoryBroker()


@broker.on_event(TaskiqEvents.WORKER_STARTUP)
async def start(state: TaskiqState) -> None:
    state.locks = await aiodlock.Client(shop.URL).__aenter__()


@broker.on_event(TaskiqEvents.WORKER_SHUTDOWN)
async def stop(state: TaskiqState) -> None:
    await state.locks.__aexit__(None, None, None)


@broker.task
async def pay(order_id: int, context: Annotated[Context, TaskiqDepends()]) -> bool:
    locks: aiodlock.Client = context.state.locks
    async with locks.lock(f"order:{order_id}", timeout=60) as lease:
        paid_now: bool = await shop.pay_in_thread(order_id, lease.token)
        return paid_now


async def main() -> None:
    await broker.startup()
    try:
        sent = [await pay.kiq(int(sys.argv[1])) for _ in range(3)]
        for one in sent:
            print((await one.wait_result(timeout=60)).return_value)
    finally:
        await broker.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
