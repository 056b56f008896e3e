"""The shop of ``examples/once_service.py``, and one that looks for a receipt, and writes it later."""

from __future__ import annotations

import os
from pathlib import Path

from examples.once_service import app, charge


@app.post("/careless/{order_id}/pay")
async def pay(order_id: int, amount: int) -> dict[str, int | str]:
    """Pay an order as code does that was tried with one click at a time."""
    receipt = Path(os.environ["RECEIPTS"]) / str(order_id)
    if not receipt.exists():
        receipt.write_text(await charge(order_id, amount))
    return {"order": order_id, "charge": receipt.read_text(), "worker": os.getpid()}
