"""A real uvicorn in the test's own loop, and httpx over a socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp

Serve = Callable[[ASGIApp], AbstractAsyncContextManager[httpx.AsyncClient]]


@asynccontextmanager
async def serve_app(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    config = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=1, ws="none", lifespan="on"
    )
    server = uvicorn.Server(config)
    # The test's own process must keep its signal handlers.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        running = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            assert not running.done(), "uvicorn did not start"
            await asyncio.sleep(0.005)
        base = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=base, timeout=60) as http:
                yield http
        finally:
            server.should_exit = True
            await running


@pytest.fixture
def serve() -> Serve:
    """Give ``async with serve(app) as http``."""
    return serve_app
