"""Fixtures for every test: a store, a client, and the check that nothing is left running."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import inspect
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import redis.utils
from hypothesis import Phase, settings

import aiodlock

from . import known_open, zookeeper
from .etcd import servers as etcd_servers
from .postgres import PostgresServer
from .proxy import FaultProxy
from .servers import (
    ALL,
    BEYOND,
    CLUSTER,
    ETCD,
    FAKEREDIS,
    MEMORY,
    OTHERS,
    PGBOUNCER,
    POSTGRES,
    QUORUM,
    QUORUM5,
    REAL,
    REPLICATED,
    SENTINEL,
    TOYS,
    ZOOKEEPER,
    Servers,
    Store,
    installed,
)

# Times vary too much between servers for a deadline per example.
# The same examples each time: what is rare is found by "random", and not by whoever changed something else.
settings.register_profile("aiodlock", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("aiodlock")
# That a broken library is noticed is enough: minutes would go into the shortest history of it.
settings.register_profile(
    "mutants", deadline=None, phases=[Phase.explicit, Phase.generate], database=None
)

# redis-py parses the metadata of its package again for each connection that is made: a third of what it
# costs to enter a client, some thousands of times.
redis.utils.get_lib_version = functools.cache(redis.utils.get_lib_version)

MakeClient = Callable[..., Coroutine[Any, Any, aiodlock.Client]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--store",
        default="",
        help=f"run on these stores only, separated by commas: {', '.join((*ALL, *OTHERS, *TOYS))}",
    )
    parser.addoption(
        "--heart",
        action="store_true",
        help="besides: the scripts and the heart of the contract on the other stores",
    )
    parser.addoption(
        "--eager",
        action="store_true",
        help="start tasks eagerly in all event loops, as asyncio.eager_task_factory does (Python 3.12)",
    )
    parser.addoption("--uvloop", action="store_true", help="run on uvloop's event loops")


def pytest_configure(config: pytest.Config) -> None:
    # A shell ignores it for what it runs in the background, and the processes of tests would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ends in order: or servers and their folders would be left.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if unknown := set(_chosen(config)) - {*ALL, *OTHERS, *TOYS}:
        raise pytest.UsageError(f"--store: no such store: {', '.join(sorted(unknown))}")
    if config.getoption("--eager"):
        if not hasattr(asyncio, "eager_task_factory"):
            raise pytest.UsageError("--eager: this Python has no eager tasks")
        _start_tasks_eagerly(asyncio.eager_task_factory)
    if config.getoption("--uvloop"):
        asyncio.set_event_loop_policy(importlib.import_module("uvloop").EventLoopPolicy())


def _start_tasks_eagerly(factory: Any) -> None:
    """Give every event loop that is made from now on, of whatever thread, a factory of eager tasks."""
    make: Any = asyncio.BaseEventLoop.__init__

    @functools.wraps(make)
    def make_eager(loop: asyncio.BaseEventLoop) -> None:
        make(loop)
        loop.set_task_factory(factory)

    setattr(asyncio.BaseEventLoop, "__init__", make_eager)  # noqa: B010 - mypy takes no assignment


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep the garbage collector from walking through what lives as long as the run.

    These are some 200,000 objects: modules and tests. While they are made none of them is garbage.
    """
    gc.disable()
    try:
        _import_in_turn(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _import_in_turn(config: pytest.Config) -> None:
    """Import the tests of a whole run, where there are several workers, each beginning at another file.

    The first one that imports a file rewrites its asserts, and keeps that for the others. If all began at
    the same file, each of them would rewrite all files: a third of what collecting costs in a fresh clone.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    root = config.rootpath
    if workers == 1 or [root / one for one in config.args] != [root / "tests"]:
        return
    ignored = [root / one for one in config.getoption("ignore") or ()]
    files = [
        file
        for file in sorted((root / "tests").rglob("test_*.py"))
        if not any(file.is_relative_to(one) for one in ignored)
    ]
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    begin = len(files) * number // workers
    for file in files[begin:] + files[:begin]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection says it again
            importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))


#: Tests that start many processes, or need a whole core. The last ones may be taken over by other workers.
_HEAVY = (
    "integration/test_processes",
    "integration/test_mixed_load",
    "soak/",
    "cli/test_no_overlap",
    "cli/test_demo",
    "unit/test_wheel",
    "security/test_tls",
    "integration/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the heavy tests, one after the other, and with those that wait.

    Of several workers that steal work from each other, the first one has the heavy ones in front, and who
    has nothing left to do takes from the back. So they do not run beside each other while there is
    anything else.
    """
    waits = sorted(filter(_waits, items), key=_other_store)
    others = sorted((item for item in items if not _waits(item)), key=_weight)
    items[:] = _spread(waits, others)
    for item in items:
        why = _differs(item)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))
        if (open_work := known_open.reason_of(item.nodeid)) is not None:
            item.add_marker(pytest.mark.xfail(reason=open_work, strict=False))


def _differs(item: pytest.Item) -> str | None:
    """Tell why a test is not for its store, if that does something else than the others."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return None
    store = item.callspec.params.get("store")
    if store in ETCD:
        return etcd_servers.DIFFERS.get(item.originalname)
    return zookeeper.DIFFERS.get(item.originalname) if store in ZOOKEEPER else None


def _weight(item: pytest.Item) -> int:
    starts = [item.nodeid.startswith(f"tests/{heavy}") for heavy in _HEAVY]
    return starts.index(True) if any(starts) else len(_HEAVY)


def _waits(item: pytest.Item) -> bool:
    return item.nodeid.startswith(("tests/topology/", "tests/etcd/")) or bool(_other_store(item))


def _other_store(item: pytest.Item) -> str:
    """Return the store of several servers, or beyond Redis, that a test runs on; else nothing."""
    store = (
        item.callspec.params.get("store")
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else ""
    )
    return store if store in OTHERS else ""


def _spread(waits: list[pytest.Item], others: list[pytest.Item]) -> list[pytest.Item]:
    """Give each worker its part of the tests that wait, so that it computes while the others wait."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    spread: list[pytest.Item] = []
    for number in range(workers):
        for part in (waits, others):
            spread += part[len(part) * number // workers : len(part) * (number + 1) // workers]
    return spread


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that uses `store` once per store; markers and fixtures narrow the choice."""
    if "store" not in metafunc.fixturenames:
        return
    chosen = [*_chosen(metafunc.config), *_heart(metafunc)]
    names = [name for name in _wanted(metafunc) if name in chosen]
    if _asks_for(metafunc, "notifications"):
        both = [_param(name, on) for name in names for on in (True, False)]
        # fakeredis sends notifications whatever its configuration says; what has no keys has none.
        without = [(FAKEREDIS, False), *((name, True) for name in (MEMORY, *TOYS))]
        both = [p for p in both if p.values not in without]
        metafunc.parametrize(("store", "notifications"), both, indirect=True)
    else:
        metafunc.parametrize("store", [_param(name) for name in names], indirect=True)


def _asks_for(metafunc: pytest.Metafunc, fixture: str) -> bool:
    """Tell whether the test itself names the fixture, rather than a fixture of its."""
    marked = [
        name for mark in metafunc.definition.iter_markers("usefixtures") for name in mark.args
    ]
    return fixture in inspect.signature(metafunc.function).parameters or fixture in marked


def _chosen(config: pytest.Config) -> list[str]:
    chosen: str = config.getoption("--store")
    return [name.strip() for name in chosen.split(",")] if chosen else [*ALL, *TOYS]


_EACH = (CLUSTER, SENTINEL, REPLICATED, QUORUM, QUORUM5, *POSTGRES, PGBOUNCER, "etcd", "zookeeper")
_SCRIPTS = (FAKEREDIS, "redis62", "redis70")
#: What runs on further stores with ``--heart``: the scripts, the heart of the contract on every store, and
#: what etcd and ZooKeeper go through by themselves.
_HEART: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("protocol/", "topology/test_version_marks"), _SCRIPTS),
    **dict.fromkeys(("contract/test_locking", "contract/test_lock_delay"), (*_SCRIPTS, *_EACH)),
    **dict.fromkeys(
        [
            f"contract/test_{subject}"
            for subject in ("shared", "semaphore", "once", "linger", "client.")
        ],
        _EACH,
    ),
    "fault/test_lost_replies": (*_SCRIPTS, "etcd", "zookeeper"),
    "fault/": ("etcd", "zookeeper"),
    "compat/": ("etcd", "zookeeper"),
}


def _heart(metafunc: pytest.Metafunc) -> tuple[str, ...]:
    if not metafunc.config.getoption("--heart"):
        return ()
    file = metafunc.definition.nodeid.removeprefix("tests/")
    return next((stores for start, stores in _HEART.items() if file.startswith(start)), ())


def _wanted(metafunc: pytest.Metafunc) -> list[str]:
    markers = list(metafunc.definition.iter_markers("stores"))
    names = [name for name in (*ALL, *OTHERS) if all(name in marker.args for marker in markers)]
    only_real = "real_store" in metafunc.fixturenames or any(
        metafunc.definition.iter_markers("real_store")
    )
    if only_real:
        return [name for name in names if name in REAL]
    if metafunc.module.__name__.startswith(_TOYS):
        return list(TOYS) if not any(metafunc.definition.iter_markers("stores")) else []
    if _SCRIPTED & set(metafunc.fixturenames) or any(metafunc.definition.iter_markers("scripted")):
        names = [name for name in names if name not in (MEMORY, *BEYOND)]
    return names


#: Where the core of the contract is run on the toys, and on nothing else.
_TOYS = "tests.toys."
#: Fixtures that look at keys.
_SCRIPTED = {"direct", "heard"}


def _param(name: str, notified: bool | None = None) -> Any:
    missing = pytest.mark.skipif(not installed(name), reason=f"no server for {name} on PATH")
    if notified is None:
        return pytest.param(name, marks=[missing], id=name)
    id = f"{name}-{'notified' if notified else 'unnotified'}"
    return pytest.param(name, notified, marks=[missing], id=id)


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """Give the servers of the whole run; they start when first asked for."""
    servers = Servers()
    yield servers
    servers.stop()


@pytest.fixture(autouse=True)
async def no_stray_tasks() -> AsyncIterator[None]:
    """Fail the test when a task is left in its loop after all its fixtures are done."""
    yield
    strays = _other_tasks()
    for _ in range(3):  # a task that was cancelled or has just finished needs a turn to end
        await asyncio.sleep(0)
        strays = _other_tasks()
    assert not strays, f"tasks left running: {[task.get_coro() for task in strays]}"


@pytest.fixture(autouse=True)
def nobody_hides_the_log() -> Iterator[None]:
    """Fail the test that leaves a filter behind, and not the later ones that find the log empty."""
    yield
    logger = logging.getLogger("aiodlock")
    left, logger.filters[:] = [*logger.filters], []
    assert not left, "the log is filtered still"


def _other_tasks() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@pytest.fixture
def notifications(request: pytest.FixtureRequest) -> bool:
    """Tell whether the store sends keyspace notifications.

    A test that names this fixture runs with and without; elsewhere there are none, as on a server
    nobody has configured. (fakeredis sends them always, the memory store never does.)
    """
    return getattr(request, "param", False)


@pytest.fixture
async def store(
    request: pytest.FixtureRequest, servers: Servers, no_stray_tasks: None, notifications: bool
) -> AsyncIterator[Store]:
    """Give an empty store; a test that uses it runs once on each kind."""
    store = servers.store(request.param)
    if notifications:
        await store.notifications(True)
    yield store
    if store.server is not None:
        store.server.resume()  # so that everything after us can close its connections
    await store.aclose()


@pytest.fixture(params=POSTGRES)
def postgres(request: pytest.FixtureRequest, servers: Servers) -> PostgresServer:
    """Give a running PostgreSQL; a test that uses it runs on each there is."""
    if not installed(request.param):
        pytest.skip(f"{request.param} is not installed")
    return servers.postgres(request.param)


@pytest.fixture
def real_store(store: Store) -> Store:
    """Give an empty store on a real server; a test that uses it runs on no other."""
    assert store.name not in (MEMORY, FAKEREDIS)
    return store


@pytest.fixture
async def client(store: Store) -> AsyncIterator[aiodlock.Client]:
    """Give an entered client on the store, with the default options."""
    async with aiodlock.Client(store.source, **store.options) as client:
        yield client


@pytest.fixture
async def make_client(store: Store) -> AsyncIterator[MakeClient]:
    """Give a factory of entered clients: await make_client(ttl=1.0), make_client(url=proxy.url).

    All that are still open are closed when the test ends, the last one first.
    """
    async with AsyncExitStack() as stack:

        async def make(url: str | None = None, **options: Any) -> aiodlock.Client:
            options = {**store.options, **options}
            client = aiodlock.Client(url if url is not None else store.source, **options)
            return await stack.enter_async_context(client)

        yield make


@pytest.fixture
def brief_entering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up entering earlier, but not before an answer: for tests of what is said then, not of when."""
    monkeypatch.setattr("aiodlock._patience.ENTERS_WITHIN", 2.0)


@pytest.fixture
async def proxy(real_store: Store) -> AsyncIterator[FaultProxy]:
    """Give a proxy in front of a real store; a test that uses it runs on no other."""
    async with FaultProxy(real_store.url) as proxy:
        yield proxy


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skip what a toy says that it cannot do."""
    try:
        return (yield)
    except aiodlock.Unsupported as unsupported:
        if isinstance(item, pytest.Function) and item.module.__name__.startswith(_TOYS):
            pytest.skip(str(unsupported))
        raise
