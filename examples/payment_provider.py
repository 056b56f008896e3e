"""Stand in for a payment provider, to try ``examples/web_service.py`` with.

Like real providers, it charges once per idempotency key: a request with a key that it knows gets the first
answer again. Every charge that is really made becomes one line in ``CHARGES``, so that it can be counted.

CHARGES=charges.log uvicorn examples.payment_provider:app --port 8001
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Header

app = FastAPI()

#: Answers by idempotency key. A real provider keeps them in a database, for a day or longer.
charges: dict[str, str] = {}

#: How long the answer takes after the money has moved.
ANSWER_AFTER = 0.02


@app.post("/charges")
async def charge(amount: int, idempotency_key: Annotated[str, Header()]) -> dict[str, str]:
    """Charge ``amount`` cents, unless this key has been charged already."""
    if idempotency_key not in charges:
        charges[idempotency_key] = f"charge-{len(charges) + 1}"
        note(f"{idempotency_key} {amount}")
    answer = charges[idempotency_key]
    await asyncio.sleep(ANSWER_AFTER)
    return {"charge": answer}


def note(line: str) -> None:
    """Write down that money has moved."""
    with Path(os.environ.get("CHARGES", "charges.log")).open("a") as log:
        log.write(line + "\n")
