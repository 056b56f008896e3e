"""The command `aiodlock`: where it looks, what its child sees, how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

import aiodlock

from ..scenes import BRIEF, STARTING, held_elsewhere, until_free
from ..servers import Store

pytestmark = pytest.mark.stores("valkey9")

Start = Callable[..., Awaitable[asyncio.subprocess.Process]]
SHOW = (
    "import os, json; print(json.dumps({k: os.environ.get(k) for k in os.environ if 'DLOCK' in k}))"
)


@pytest.fixture
async def start(store: Store) -> AsyncIterator[Start]:
    """Give a way to start the command; what still runs in the end is ended."""
    started: list[asyncio.subprocess.Process] = []

    async def start(*arguments: str, url: str = store.url) -> asyncio.subprocess.Process:
        script = Path(sys.executable).with_name("aiodlock")
        command = [str(script)] if script.exists() else [sys.executable, "-m", "aiodlock"]
        process = await asyncio.create_subprocess_exec(
            *command,
            *arguments,
            env={**os.environ, "AIODLOCK_URL": url},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str]:
    async with asyncio.timeout(STARTING):
        out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_the_child_sees_name_token_and_sequencer(
    start: Start, client: aiodlock.Client
) -> None:
    name = "nightly report: é"
    code, out = await ended(await start("run", name, "--", sys.executable, "-c", SHOW))
    assert code == 0
    seen = json.loads(out)
    assert seen["AIODLOCK_NAME"] == name
    assert int(seen["AIODLOCK_TOKEN"]) == (await client.inspect(name)).token
    assert seen["AIODLOCK_TOKEN"] in seen["AIODLOCK_SEQUENCER"]
    assert not await client.check_sequencer(seen["AIODLOCK_SEQUENCER"])
    await until_free(client, name)


async def test_the_childs_sequencer_holds_while_it_runs(
    start: Start, client: aiodlock.Client, tmp_path: Path
) -> None:
    text = "import os, time; print(os.environ['AIODLOCK_SEQUENCER'], flush=True); time.sleep(30)"
    process = await start("run", "job", "--", sys.executable, "-c", text)
    assert process.stdout is not None
    async with asyncio.timeout(STARTING):
        line = (await process.stdout.readline()).decode().strip()
    assert await client.check_sequencer(line)
    process.send_signal(signal.SIGTERM)
    code, _ = await ended(process)
    assert code == 128 + signal.SIGTERM
    await until_free(client, "job")


@pytest.mark.parametrize("code", [0, 1, 3, 69, 75, 255])
async def test_ends_with_the_childs_code(start: Start, code: int) -> None:
    text = f"raise SystemExit({code})"
    assert (await ended(await start("run", "job", "--", sys.executable, "-c", text)))[0] == code


async def test_ends_with_75_when_not_acquired(start: Start, client: aiodlock.Client) -> None:
    async with held_elsewhere(client.lock("job")):
        processes = [
            await start("run", "job", *options, "--", "echo", "ran")
            for options in (["--nonblock"], ["--timeout", f"{BRIEF}"], ["--timeout", "0"])
        ]
        assert [await ended(process) for process in processes] == [(75, "")] * 3


async def test_ends_with_76_when_lost(start: Start, client: aiodlock.Client) -> None:
    process = await start("run", "job", "--", "sh", "-c", "echo ready; exec sleep 30")
    assert process.stdout is not None
    async with asyncio.timeout(STARTING):
        assert await process.stdout.readline() == b"ready\n"
    assert await client.break_lock("job") == 1
    assert (await ended(process))[0] == 76


async def test_ends_with_69_when_the_store_is_away(start: Start) -> None:
    away = "redis://127.0.0.1:1/0"
    processes = [
        await start(*arguments, url=away)
        for arguments in (
            ("run", "job", "--", "echo", "ran"),
            ("ls",),
        )
    ]
    for process in processes:
        code, out = await ended(process)
        assert (code, "ran" in out) == (69, False)


async def test_ends_with_2_when_used_wrongly(start: Start) -> None:
    processes = [
        await start(*arguments)
        for arguments in (
            ("run",),
            ("run", "", "--", "true"),
            ("run", "job", "--ttl", "0.01", "--", "true"),
            ("run", "job", "--timeout", "-1", "--", "true"),
        )
    ]
    assert [(await ended(process))[0] for process in processes] == [2] * len(processes)


async def test_a_url_that_is_none_is_wrong_use(start: Start) -> None:
    code, _ = await ended(await start("ls", url="http://localhost"))
    assert code == 2


async def test_every_command_is_there(start: Start) -> None:
    code, out = await ended(await start("--help"))
    assert code == 0
    for name in ("run", "ls", "show", "break", "top", "doctor", "bench", "demo"):
        assert f" {name} " in out


async def test_ls_show_and_break(start: Start, client: aiodlock.Client) -> None:
    lease = await client.lock("order:42").acquire()
    _, out = await ended(await start("ls"))
    assert "order:42" in out
    _, out = await ended(await start("show", "order:42"))
    assert str(lease.token) in out
    code, _ = await ended(await start("break", "order:42", "--yes"))
    assert code == 0
    assert (await lease.wait_lost()).reason == "broken"
    with pytest.raises(aiodlock.LockLost):
        await lease.release()
