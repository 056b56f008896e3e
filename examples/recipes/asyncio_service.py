"""An asyncio service that pays orders too, under the same lock as the Django view and the Celery task.

python asyncio_service.py 42
"""

from __future__ import annotations

import asyncio
import sys

import shop

import aiodlock


async def pay(client: aiodlock.Client, order_id: int) -> bool:
    async with client.lock(f"order:{order_id}", timeout=10) as lease:
        # The lock is released when the thread has ended. The token goes with what it writes.
        paid_now: bool = await shop.pay_in_thread(order_id, lease.token)
        return paid_now


async def main() -> None:
    async with aiodlock.Client(shop.URL) as client:  # once, around the whole service
        print("paid now:", await pay(client, int(sys.argv[1])))


if __name__ == "__main__":
    asyncio.run(main())
