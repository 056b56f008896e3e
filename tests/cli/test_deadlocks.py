"""``aiodlock deadlocks`` prints the cycles that stand."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from .. import forked
from ..conftest import MakeClient
from ..scenes import until
from ..servers import Store

pytestmark = pytest.mark.stores("valkey9")


async def call(store: Store, *options: str) -> tuple[int | None, str]:
    process = await forked.start(
        "aiodlock",
        "deadlocks",
        *options,
        env={**os.environ, "AIODLOCK_URL": store.url},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def test_cycle_that_stands_is_printed(
    store: Store, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The victim does not look, so the cycle stands.
    monkeypatch.setattr("aiodlock._deadlocks.Deadlocks._found", lambda self, found: None)
    one, two = await make_client(deadlock_after=0.1), await make_client(deadlock_after=0.1)
    both = asyncio.Barrier(2)

    async def take(first: object, second: object) -> None:
        async with first:  # type: ignore[attr-defined]
            await both.wait()
            async with second:  # type: ignore[attr-defined]
                pass

    assert await call(store) == (0, "")
    tasks = [
        asyncio.create_task(take(one.lock("a"), one.lock("b"))),
        asyncio.create_task(take(two.lock("b"), two.lock("a"))),
    ]

    async def told() -> bool:
        labels = [client._core.use().backend.label for client in (one, two)]
        return len(await one._core.use().backend.waits_of(labels)) == 2

    await until(told)
    code, out = await call(store)
    assert code == 1
    assert len(out.splitlines()) == 1
    assert "waits for 'a'" in out
    assert "waits for 'b'" in out
    code, out = await call(store, "--json")
    (members,) = json.loads(out)
    assert sorted(member[0] for member in members) == ["a", "b"]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
