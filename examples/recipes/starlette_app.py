"""A Starlette endpoint that pays an order once.

uvicorn --workers 2 starlette_app:app
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypedDict

import shop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import aiodlock


class State(TypedDict):
    locks: aiodlock.Client


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[State]:
    async with aiodlock.Client(shop.URL) as locks:
        yield {"locks": locks}


async def pay(request: Request) -> JSONResponse:
    order_id = request.path_params["order_id"]
    locks: aiodlock.Client = request.state.locks
    try:
        async with locks.lock(f"order:{order_id}", timeout=10) as lease:
            paid_now = await shop.pay_in_thread(order_id, lease.token)
    except aiodlock.AcquireTimeout:
        return JSONResponse({"error": "this order is being paid"}, 423)
    return JSONResponse({"paid_now": paid_now})


app = Starlette(
    routes=[Route("/orders/{order_id:int}/pay", pay, methods=["POST"])], lifespan=lifespan
)
