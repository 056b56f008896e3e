"""An app of the examples, served by several uvicorn processes on one socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from ..scenes import STARTING


@asynccontextmanager
async def workers(
    app: str, number: int, settings: dict[str, str]
) -> AsyncIterator[httpx.AsyncClient]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "uvicorn", app, "--log-level", "error"),
            *("--workers", str(number), "--fd", str(listening.fileno())),
            env={**os.environ, **settings},
            pass_fds=[listening.fileno()],
        )
        base = f"http://127.0.0.1:{listening.getsockname()[1]}"
        # A connection for every request: the kernel chooses a worker for each connection.
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
