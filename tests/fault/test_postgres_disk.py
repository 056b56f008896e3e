"""A PostgreSQL server whose disk is full, on a file system of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiodlock import BackendUnavailable, Client
from aiodlock.backends.postgres.schema import create_statements

from ..postgres import PostgresServer
from ..scenes import bounded
from ..servers import installed, postgres_server

pytestmark = pytest.mark.skipif(not installed("postgres"), reason="postgres is not installed")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a small file system, and have servers keep their data there."""
    where = Path(tempfile.mkdtemp(prefix="aiodlock-disk-"))
    mounting = ("mount", "-t", "tmpfs", "-o", "size=120m", "tmpfs", str(where))
    if os.getuid() != 0 or subprocess.run(mounting, capture_output=True).returncode != 0:
        where.rmdir()
        pytest.skip("file systems cannot be mounted here")
    where.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(where))
    yield where
    monkeypatch.undo()
    subprocess.run(["umount", "--lazy", str(where)], check=True)
    shutil.rmtree(where, ignore_errors=True)


@pytest.fixture
def server(disk: Path) -> Iterator[PostgresServer]:
    with postgres_server("postgres", max_wal_size="32MB", min_wal_size="32MB") as server:
        server.execute(create_statements("logged"))
        yield server


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):  # noqa: PT012
        while True:
            file.write(bytes(65536))


async def test_full_disk_makes_the_server_unavailable_until_there_is_room(
    disk: Path, server: PostgresServer
) -> None:
    filler = disk / "filler"
    async with Client(server.url, ttl=5) as client:
        lease = await client.lock("held", on_lost="flag").acquire()
        fill(filler)
        with pytest.raises(BackendUnavailable):  # noqa: PT012
            for number in range(5_000):  # each name is a row more
                await (await client.lock(f"name{number}").acquire_nowait()).release()
        filler.unlink()
        if not server.running:  # it may have stopped itself because it could not write its log
            await asyncio.to_thread(server.start)
        async with bounded(30), client.lock("another"):
            pass
        if lease.held:
            await lease.release()
