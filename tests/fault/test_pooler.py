"""PostgreSQL behind pgbouncer in transaction mode, where notifications do not arrive."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiodlock import Client
from aiodlock._clock import now
from aiodlock.backends.postgres.schema import create_statements

from ..postgres import PostgresServer
from ..scenes import until_waiting
from ..servers import Servers, installed

NAME = "order:42"
POOLER = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"

pytestmark = pytest.mark.skipif(
    not installed("postgres") or not Path(POOLER).exists(), reason="no pgbouncer, or no postgres"
)


@pytest.fixture
def server(servers: Servers) -> PostgresServer:
    server = servers.postgres("postgres")
    server.execute("drop schema if exists aiodlock cascade;")
    server.execute(create_statements())
    return server


@pytest.fixture
def pooled(server: PostgresServer, tmp_path: Path) -> Iterator[str]:
    """Give the URL of a pooler that shares four connections in transaction mode."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    users = tmp_path / "users"
    users.write_text('"postgres" ""\n')
    settings = tmp_path / "pgbouncer.ini"
    settings.write_text(
        f"[databases]\npostgres = host=127.0.0.1 port={server.port} dbname=postgres\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nauth_type = trust\n"
        f"auth_file = {users}\npool_mode = transaction\ndefault_pool_size = 4\nunix_socket_dir =\n"
    )
    user = "postgres" if os.getuid() == 0 else None
    for path in (tmp_path, *tmp_path.parents):
        if user is not None and path.is_relative_to("/tmp") and path != Path("/tmp"):
            path.chmod(0o755)
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        [POOLER, settings], stdin=subprocess.DEVNULL, stdout=log, stderr=log, user=user
    )
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up:
        assert process.poll() is None, (tmp_path / "log").read_text()
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            time.sleep(0.05)
    yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    process.terminate()
    process.wait(20)
    log.close()


async def _hand_over(one: Client, other: Client) -> float:
    """Return how long a hand-over takes."""
    async with one.lock(NAME):
        waiting = asyncio.create_task(other.lock(NAME).acquire())
        await until_waiting(one, NAME)
    released = now()
    lease = await asyncio.wait_for(waiting, 20)
    took = now() - released
    await lease.release()
    return took


async def test_client_behind_a_pooler_hears_by_the_connection_that_goes_around_it(
    server: PostgresServer, pooled: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "aiodlock")
    async with (
        Client(pooled, listen_source=server.url) as one,
        Client(pooled, listen_source=server.url) as other,
    ):
        for _ in range(5):
            await _hand_over(one, other)
        await asyncio.gather(*(_many(client, 20) for client in (one, other) * 8))
    assert not [record for record in caplog.records if getattr(record, "event", "") == "polling"]


async def test_client_that_hears_nothing_polls_and_says_so(
    pooled: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "aiodlock")
    async with Client(pooled) as one, Client(pooled) as other:
        events = [getattr(record, "event", "") for record in caplog.records]
        assert events.count("polling") == 2
        assert "poll every 1 s" in caplog.text
        for _ in range(3):
            assert await _hand_over(one, other) < 3
        await asyncio.gather(*(_many(client, 3) for client in (one, other) * 4))


async def _many(client: Client, turns: int) -> None:
    for _ in range(turns):
        async with client.lock(NAME):
            pass
