"""A member of etcd's, and a store on it that is driven without a client."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from aiodlock._errors import BackendUnavailable, LossReason
from aiodlock._model import Kind, Mode, Terms
from aiodlock.backends.etcd.link import Access
from aiodlock.backends.etcd.place import EtcdPlace
from aiodlock.backends.etcd.store import EtcdBackend

from ..scenes import bounded
from .servers import EtcdCluster, find_etcd

_prefixes = itertools.count(1)


@pytest.fixture(scope="session")
def one_node() -> Iterator[EtcdCluster]:
    """Give one member that runs as long as the tests."""
    if find_etcd() is None:
        pytest.skip("etcd is not installed")
    with EtcdCluster() as cluster:
        yield cluster


@pytest.fixture
def three_nodes() -> Iterator[EtcdCluster]:
    """Give three members of the test's own."""
    if find_etcd() is None:
        pytest.skip("etcd is not installed")
    with EtcdCluster(3) as cluster:
        yield cluster


class Heard:
    """What a request was told."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.errors: list[Exception] = []
        self.changed = asyncio.Event()

    def granted(self) -> None:
        self._note("granted")

    def gone(self, reason: LossReason) -> None:
        self._note(f"gone: {reason}")

    def recorded(self, result: bytes, *, unsure: bool) -> None:
        self._note("recorded")

    def extension_failed(self, error: Exception) -> None:
        self.errors.append(error)

    def recalled(self) -> None:
        """Nothing lingers here."""

    def unavailable(self, error: BackendUnavailable) -> None:
        self._note("unavailable")

    def _note(self, word: str) -> None:
        self.words.append(word)
        self.changed.set()

    async def until(self, word: str, within: float = 60.0) -> None:
        """Wait until this was told last."""
        async with asyncio.timeout(within):
            while not self.words or self.words[-1] != word:
                self.changed.clear()
                await self.changed.wait()


class Direct:
    """A store and its requests."""

    def __init__(self, store: EtcdBackend) -> None:
        self.store: EtcdBackend = store
        self._numbers = itertools.count(1)

    def place(
        self,
        name: str = "name",
        mode: Mode = "exclusive",
        *,
        kind: Kind = "lock",
        ttl: float = 5.0,
        waiter_ttl: float = 3.0,
        limit: int = 0,
        lock_delay: float = 0.0,
        margin: float = 0.0,
        auto_extend: bool = True,
        owner: str | None = None,
    ) -> tuple[EtcdPlace, Heard]:
        """Make a request, and what it will have been told."""
        id, heard = f"{self.store.label}-{next(self._numbers)}", Heard()
        waiter_ttl = min(waiter_ttl, ttl)
        terms = Terms(
            kind, name, mode, limit, ttl, waiter_ttl, lock_delay, margin, None, auto_extend
        )
        return self.store.place(terms, id, f"u{owner}" if owner else f"t{id}", heard), heard


MakeDirect = Callable[[EtcdCluster], "asyncio.Future[Direct]"]


@pytest.fixture
async def make_direct() -> AsyncIterator[Callable[..., object]]:
    """Give a factory of running stores."""
    tasks: list[asyncio.Task[None]] = []

    async def make(
        cluster: EtcdCluster, endpoints: tuple[str, ...] = (), prefix: str = ""
    ) -> Direct:
        access = Access(endpoints or tuple(node.endpoint for node in cluster.nodes))
        store = EtcdBackend(
            access,
            "etcd",
            prefix=prefix or f"test{next(_prefixes)}",
            unavailable_after=10.0,
        )
        ready = asyncio.Event()
        task = asyncio.create_task(store.run(ready.set))
        tasks.append(task)
        async with bounded(10.0):
            await ready.wait()
        return Direct(store)

    yield make
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
