"""``aiodlock web``: a page on this machine alone, until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

import aiodlock

from .. import forked
from ..scenes import STARTING
from ..servers import Store

pytestmark = pytest.mark.stores("valkey9")


@asynccontextmanager
async def served(
    store: Store, *options: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await forked.start(
        "aiodlock",
        "web",
        "--port",
        "0",
        *options,
        env={**os.environ, "AIODLOCK_URL": store.url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(STARTING):
            yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_page_is_served_here_and_ends_with_open_streams(
    store: Store, client: aiodlock.Client
) -> None:
    async with client.lock("order:42"), served(store) as (process, url):
        assert url.startswith("http://127.0.0.1:")
        async with httpx.AsyncClient(base_url=url, timeout=STARTING) as http:
            answer = await http.get("/")
            assert "order:42" in answer.text
            assert (await http.get("/break?n=order:42")).status_code == 404
            assert (await http.get("/", headers={"host": "evil.example"})).status_code == 400
            async with http.stream("GET", "/events") as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                process.send_signal(signal.SIGINT)
                async for _ in lines:
                    pass
        _, complaints = await process.communicate()
        assert (process.returncode, complaints) == (130, b"aiodlock: press Ctrl-C to stop\n")


async def test_page_breaks_where_that_is_allowed(store: Store, client: aiodlock.Client) -> None:
    async with client.lock("order:42"), served(store, "--allow-break") as (_, url):
        async with httpx.AsyncClient(base_url=url, timeout=STARTING) as http:
            assert "Release it by force" in (await http.get("/break?n=order:42")).text


async def test_port_that_is_taken_is_named(store: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = await forked.start(
            "aiodlock",
            "web",
            "--port",
            port,
            "--url",
            store.url,
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await process.communicate()
    assert process.returncode == 2
    assert f"port {port} on 127.0.0.1 cannot be used" in said.decode()
