"""Servers that fork their workers: each has a client of its own, and they exclude each other."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from ..scenes import STARTING
from ..servers import Store

pytestmark = pytest.mark.stores("valkey9")

_APP = "tests.fastapi.forked_app:app"
_GUNICORN = ("gunicorn", "--worker-class", "uvicorn_worker.UvicornWorker", "--workers", "2")
_QUIET = ("--graceful-timeout", "2", "--log-level", "warning", "--no-control-socket")


@asynccontextmanager
async def served(
    store: Store, log: Path, *command: str, listening: socket.socket
) -> AsyncIterator[httpx.AsyncClient]:
    """Start a server on a socket that listens already, and wait until it answers."""
    environment = {**os.environ, "AIODLOCK_URL": store.url, "LOG": str(log)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *command, _APP),
        env=environment,
        pass_fds=[listening.fileno()],
    )
    base = f"http://127.0.0.1:{listening.getsockname()[1]}"
    # A connection for every request, so that both workers get some.
    limits = httpx.Limits(max_keepalive_connections=0)
    try:
        async with httpx.AsyncClient(base_url=base, timeout=60, limits=limits) as http:
            yield http
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), STARTING)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.parametrize("preload", [False, True], ids=["plain", "preloaded"])
async def test_workers_of_gunicorn_exclude_each_other(
    store: Store, tmp_path: Path, preload: bool
) -> None:
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.set_inheritable(True)
        command = [*_GUNICORN, *_QUIET, "--bind", f"fd://{listening.fileno()}"]
        if preload:
            command.append("--preload")
        async with served(store, log, *command, listening=listening) as http:
            count, workers = 0, set[int]()
            async with asyncio.timeout(3 * STARTING):
                # The kernel chooses the worker of each connection.
                while len(workers) < 2 or count < 40:
                    answers = await asyncio.gather(*(http.post("/orders/7/pay") for _ in range(20)))
                    assert {answer.status_code for answer in answers} == {200}
                    workers |= {answer.json() for answer in answers}
                    count += 20
    notes = [line.split() for line in log.read_text().splitlines()]
    entered, left = notes[::2], notes[1::2]
    assert [sign for sign, _, _ in entered] == ["+"] * count
    assert [["-", *rest] for _, *rest in entered] == left
    tokens = [int(token) for _, _, token in entered]
    assert tokens == sorted(set(tokens))
