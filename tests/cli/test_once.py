"""`aiodlock run --once` and `--hold-at-least`: jobs that several hosts start."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from .. import forked
from ..conftest import MakeClient
from ..servers import Store

pytestmark = pytest.mark.stores("valkey9")


async def aiodlock(store: Store, *arguments: str) -> tuple[int, str, str]:
    process = await forked.start(
        "aiodlock",
        *arguments,
        env={**os.environ, "AIODLOCK_URL": store.url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def appending(path: Path, code: int = 0) -> tuple[str, ...]:
    return "--", "sh", "-c", f"echo ran >> {path}; exit {code}"


async def test_job_of_three_hosts_is_done_once(store: Store, tmp_path: Path) -> None:
    effects = tmp_path / "effects"
    runs = await asyncio.gather(
        *(aiodlock(store, "run", "--once", "600", "job:1", *appending(effects)) for _ in range(3))
    )
    assert [code for code, _, _ in runs] == [0, 0, 0]
    assert effects.read_text() == "ran\n"
    assert sum("done already" in err for _, _, err in runs) == 2
    code, _, err = await aiodlock(store, "run", "-q", "--once", "600", "job:1", *appending(effects))
    assert (code, err) == (0, "")


async def test_failing_job_is_done_again_and_forgotten_ones_too(
    store: Store, tmp_path: Path
) -> None:
    effects = tmp_path / "effects"
    failing = await aiodlock(store, "run", "--once", "600", "job", *appending(effects, 3))
    assert failing[0] == 3
    assert (await aiodlock(store, "run", "--once", "600", "job", *appending(effects)))[0] == 0
    assert effects.read_text() == "ran\n" * 2
    assert (await aiodlock(store, "forget", "job"))[0] == 0
    assert (await aiodlock(store, "forget", "job"))[0] == 1
    assert (await aiodlock(store, "run", "--once", "600", "job", *appending(effects)))[0] == 0
    assert effects.read_text() == "ran\n" * 3


async def test_short_job_keeps_the_name_closed(store: Store, make_client: MakeClient) -> None:
    run = ("run", "-n", "--hold-at-least", "600", "--note", "nightly", "job", "--", "true")
    assert (await aiodlock(store, *run))[0] == 0
    code, _, err = await aiodlock(store, *run)
    assert code == 75
    assert "closed for" in err
    client = await make_client()
    assert (await client.inspect("job")).closed > 500


async def test_hold_that_is_longer_than_the_record_is_refused(store: Store) -> None:
    run = ("run", "--hold-at-least", "61", "--once", "60", "job", "--", "true")
    code, _, err = await aiodlock(store, *run)
    assert code == 2
    assert "--hold-at-least" in err
