"""A Litestar handler that pays an order once.

litestar --app litestar_app:app run
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import shop
from litestar import Litestar, post
from litestar.datastructures import State
from litestar.exceptions import HTTPException

import aiodlock


@asynccontextmanager
async def client(app: Litestar) -> AsyncIterator[None]:
    async with aiodlock.Client(shop.URL) as app.state.locks:
        yield


@post("/orders/{order_id:int}/pay", status_code=200)
async def pay(order_id: int, state: State) -> dict[str, bool]:
    locks: aiodlock.Client = state.locks
    try:
        async with locks.lock(f"order:{order_id}", timeout=10) as lease:
            return {"paid_now": await shop.pay_in_thread(order_id, lease.token)}
    except aiodlock.AcquireTimeout as busy:
        raise HTTPException("this order is being paid", status_code=423) from busy


app = Litestar([pay], lifespan=[client])
