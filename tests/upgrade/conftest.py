"""Two processes beside each other, of the wheel and of the tree. The next test uses them again."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest

from ..servers import Store
from . import beside
from .beside import Failed, Peer


class Peers:
    """Starts a process of each release when it is first asked for. Mutable state: those that run."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self._pythons: dict[str, Path | str] = {"wheel": wheel, "tree": sys.executable}
        self._running: dict[str, Peer] = {}

    def start(self, release: str) -> Peer:
        """Start one more process, which the caller ends."""
        return Peer(self._pythons[release])

    def of(self, release: str) -> Peer:
        """Return the process that every test uses; another one if that was killed."""
        if release not in self._running or not self._running[release].running:
            self._running[release] = self.start(release)
        return self._running[release]

    def stop(self) -> None:
        for peer in self._running.values():
            peer.stop()


@pytest.fixture(scope="session")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    """Give the processes of the whole run."""
    here = tmp_path_factory.getbasetemp()
    # With xdist, each of its processes has a folder of its own below that of the run.
    shared = here.parent if here.name.startswith("popen-") else here
    peers = Peers(beside.install(shared / "beside"))
    yield peers
    peers.stop()


@pytest.fixture(params=["wheel-first", "tree-first"])
async def pair(
    request: pytest.FixtureRequest, peers: Peers, store: Store
) -> AsyncIterator[tuple[Peer, Peer]]:
    """Give a client of each release on the store; a test that uses it runs both ways round."""
    releases = ("wheel", "tree") if request.param == "wheel-first" else ("tree", "wheel")
    first, second = (peers.of(release) for release in releases)
    for peer in (first, second):
        await enter(peer, store, waiter_ttl=2.0, unavailable_after=30.0)
    yield first, second
    for peer in (first, second):
        if peer.running:
            await peer.leave()


async def enter(peer: Peer, store: Store, **options: float) -> None:
    """Have a peer enter a client on the store; skip where PostgreSQL has a schema that refuses it."""
    try:
        await peer.enter(source=store.source, options={**store.options, **options})
    except Failed as refused:
        if store.postgres is None or "upgrade aiodlock here" not in str(refused):
            raise
        pytest.skip("the wheel needs another version of the schema, and is refused clearly")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Skip what the store cannot do, as it says itself."""
    try:
        return (yield)
    except Failed as failed:
        if failed.kind == "Unsupported":
            pytest.skip(str(failed))
        raise
