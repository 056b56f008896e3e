"""``aiodlock init`` of this release, while clients of an older one work in the database."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiodlock.backends.postgres.schema import VERSION

from ..postgres import PostgresServer
from ..scenes import STARTING, until
from . import beside
from .beside import Failed, Peer
from .conftest import Peers
from .journal import check, stays

NAME = "name"
TTL = 3.0


@pytest.fixture(scope="module")
def older(peers: Peers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a Python with a release that needs the schema of before.

    It is the wheel, unless that has the schema of the tree: then a copy of it that asks for the one before.
    """
    home = tmp_path_factory.mktemp("older") / "beside"
    shutil.copytree(peers.wheel.parents[1], home, symlinks=True)
    (schema,) = home.glob("lib/python*/site-packages/aiodlock/backends/postgres/schema.py")
    text = schema.read_text()
    schema.write_text(text.replace(f"VERSION = {VERSION}\n", f"VERSION = {VERSION - 1}\n"))
    return home / "bin" / "python"


def run(python: Path | str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-I", "-m", "aiodlock", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def database(postgres: PostgresServer, older: Path) -> Iterator[PostgresServer]:
    """Give a database with the schema of before."""
    postgres.execute("drop schema if exists aiodlock cascade;")
    made = run(older, "init", "--url", postgres.url)
    assert "created" in made.stdout, made
    yield postgres
    postgres.execute("drop schema if exists aiodlock cascade;")


async def test_clients_of_before_are_refused_clearly_and_nothing_overlaps(
    database: PostgresServer, older: Path, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    journal.touch()
    before, after = [Peer(older), Peer(older)], Peer(sys.executable)
    everybody = [*before, after]
    try:
        # A client of this release comes too early: it says what to do.
        with pytest.raises(Failed, match="run 'aiodlock init' of this release"):
            await after.enter(source=database.url, options={})
        for peer in before:
            await peer.enter(source=database.url, options={"unavailable_after": 5.0})
        token = await before[0].acquire(label="held", name=NAME, ttl=TTL)
        waits = before[1].acquire(label="waits", name=NAME, ttl=TTL)
        works = [
            peer.work(journal=str(journal), names=["a", "b"], tasks=3, seed=number, ttl=TTL)
            for number, peer in enumerate(before)
        ]
        await until(lambda: journal.stat().st_size > 2000, within=STARTING)

        done = await asyncio.to_thread(run, sys.executable, "init", "--url", database.url)
        assert "upgraded" in done.stdout, done

        await after.enter(source=database.url, options={})
        works.append(after.work(journal=str(journal), names=["a", "b"], tasks=3, seed=3, ttl=TTL))
        later = await asyncio.wait_for(after.acquire(label="held", name=NAME, ttl=60), STARTING)
        assert later > token
        assert await before[0].wait_lost(label="held") == "expired"
        for call in (waits, *works[:2], before[0].acquire(label="no", name="other")):
            with pytest.raises(Failed, match=f"version {VERSION}.*: upgrade aiodlock here"):
                await asyncio.wait_for(call, STARTING)
        await after.finish()
        assert await works[2]
        for peer in everybody:
            await peer.leave()
    finally:
        for peer in everybody:
            peer.stop()
    for those in stays(journal, {}).values():
        check(those, lost=2 * 3)


async def test_init_of_the_same_version_disturbs_nobody(
    postgres: PostgresServer, peers: Peers
) -> None:
    postgres.execute("drop schema if exists aiodlock cascade;")
    assert "created" in run(sys.executable, "init", "--url", postgres.url).stdout
    peer = peers.of("tree")
    await peer.enter(source=postgres.url, options={})
    await peer.acquire(label="held", name=NAME)
    told = await asyncio.to_thread(run, sys.executable, "init", "--url", postgres.url)
    assert re.search("nothing to do", told.stdout), told
    assert (await peer.state(label="held"))["held"]
    await peer.leave()
    postgres.execute("drop schema aiodlock cascade;")


def test_wheel_stands_for_a_release() -> None:
    """From the first release on, it is the one on the package index."""
    assert beside.RELEASED is None or re.fullmatch(r"\d+\.\d+\.\d+", beside.RELEASED)
