"""Move a live service from one store to another without a moment in which two can work at once.

Deploy three times. Before the next deployment begins, the last worker of the deployment before is gone:

1. OLD: every worker locks in the old store, as today.
2. BOTH: every worker locks in the old store, and then in the new one.
3. NEW: every worker locks in the new store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from enum import Enum

import aiodlock


class Step(Enum):
    OLD = "old"
    BOTH = "both"
    NEW = "new"


@asynccontextmanager
async def exclusive(
    name: str, step: Step, old: aiodlock.Client, new: aiodlock.Client
) -> AsyncIterator[int]:
    """Hold the name in the stores of this step. The result is the token for the data."""
    async with AsyncExitStack() as stack:
        tokens = []
        # Always the old store first: then no two workers wait for each other.
        for client in [old] * (step is not Step.NEW) + [new] * (step is not Step.OLD):
            lease = await stack.enter_async_context(client.lock(name))
            tokens.append(lease.token)
        yield max(tokens)
