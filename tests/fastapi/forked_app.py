"""An app for several workers: its handler notes when a worker is inside."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI

import aiodlock.fastapi
from aiodlock import Lease
from aiodlock.fastapi import Locked

LOG = Path(os.environ["LOG"])

app = FastAPI(lifespan=aiodlock.fastapi.lifespan(os.environ["AIODLOCK_URL"]))


@app.post("/orders/{order_id}/pay")
async def pay(order_id: int, lease: Annotated[Lease, Locked("orders:{order_id}", ttl=5)]) -> int:
    note(f"+ {os.getpid()} {lease.token}")
    await asyncio.sleep(0.005)
    note(f"- {os.getpid()} {lease.token}")
    return os.getpid()


def note(line: str) -> None:
    with LOG.open("a") as file:  # appending a short line is one write
        file.write(line + "\n")
