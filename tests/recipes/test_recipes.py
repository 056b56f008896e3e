"""Each recipe with the real library, on a real server: an order is paid once, whoever tries how often."""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import anyio.lowlevel
import httpx
import pytest
import redis

import aiodlock
from aiodlock import sync

from ..servers import embedded

# What these libraries warn of is theirs.
pytestmark = [pytest.mark.filterwarnings("default")]


ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"


class Shop:
    """The records of the shop, as a test looks at them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.records: Any = redis.Redis.from_url(url, decode_responses=True)

    def charged(self, order_id: int) -> int:
        return int(self.records.get(f"charged:{order_id}") or 0)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = embedded("valkey9", tcp=True)
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


@pytest.fixture
def shop(server: str, monkeypatch: pytest.MonkeyPatch) -> Shop:
    monkeypatch.setenv("AIODLOCK_URL", server)
    # As in a folder of the reader's: each file stands alone beside shop.py.
    monkeypatch.syspath_prepend(RECIPES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(RECIPES), str(ROOT)]))
    monkeypatch.setenv("BROKER_URL", server.rpartition("/")[0] + "/1")
    shop = Shop(server)
    shop.records.flushall()
    return shop


def recipe(name: str) -> ModuleType:
    """Import a recipe anew, with this test's store."""
    for path in RECIPES.glob("*.py"):
        sys.modules.pop(path.stem, None)
    return importlib.import_module(name)


@contextmanager
def running(*command: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Python module until the end of the test; it has to end when it is told to."""
    process = subprocess.Popen([sys.executable, "-m", *command], **options)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()


def until(happened: Callable[[], object], within: float = 40.0) -> None:
    give_up_at = time.monotonic() + within
    while not happened():
        assert time.monotonic() < give_up_at, "it did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize("site", ["django_site", "tests.recipes.warmed"], ids=["fresh", "warmed"])
def test_a_django_view_behind_gunicorn_with_preload(shop: Shop, site: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.set_inheritable(True)
        base = f"http://127.0.0.1:{listening.getsockname()[1]}"
        command = (
            "gunicorn",
            "--workers",
            "2",
            "--threads",
            "4",
            "--preload",
            "--no-control-socket",
        )
        bound = ("--bind", f"fd://{listening.fileno()}", "--log-level", "warning")
        with running(*command, *bound, f"{site}:application", pass_fds=[listening.fileno()]):
            with ThreadPoolExecutor(16) as pool:

                def pay(number: int) -> bool:
                    answer = httpx.get(f"{base}/orders/{number % 3}/pay", timeout=60)
                    return bool(answer.raise_for_status().json()["paid_now"])

                paid = list(pool.map(pay, range(48)))
            assert sum(paid) == 3
            assert [shop.charged(order) for order in range(3)] == [1, 1, 1]
            with sync.Client(shop.url) as locks:
                # The parent goes on holding what it held, whatever its children do.
                assert locks.lock("parent").locked() == (site == "tests.recipes.warmed")
                locks.lock("order:1").acquire_nowait().release()


def test_a_celery_task_in_prefork_workers(shop: Shop, tmp_path: Path) -> None:
    tasks = recipe("celery_tasks")
    worker = ("celery", "--app", "celery_tasks", "worker", "--pool", "prefork")
    quiet = ("--concurrency", "3", "--loglevel", "WARNING", "--without-gossip", "--without-mingle")
    with running(*worker, *quiet, stdout=subprocess.DEVNULL):
        for number in range(30):
            (tasks.pay if number % 2 else tasks.pay_later).delay(number % 3)
        until(lambda: [shop.charged(order) for order in range(3)] == [1, 1, 1])
        broker = redis.Redis.from_url(os.environ["BROKER_URL"])
        until(lambda: not broker.exists("celery", "unacked"))
    assert [shop.charged(order) for order in range(3)] == [1, 1, 1]
    with sync.Client(shop.url) as locks:
        assert not any(locks.lock(f"order:{order}").locked() for order in range(3))


async def test_a_view_a_task_and_an_asyncio_service_take_turns(shop: Shop) -> None:
    service, site = recipe("asyncio_service"), recipe("django_site")
    view = functools.partial(site.pay, None, 7)
    async with aiodlock.Client(shop.url) as client:
        async with client.lock("order:7"):
            paying = [
                asyncio.create_task(service.pay(client, 7)),
                asyncio.create_task(asyncio.to_thread(view)),
                asyncio.create_task(asyncio.to_thread(recipe("celery_tasks").pay, 7)),
            ]
            while len((await client.inspect("order:7")).waiters) < 3:
                await asyncio.sleep(0.01)
            assert shop.charged(7) == 0
        await asyncio.gather(*paying)
    assert shop.charged(7) == 1


async def test_a_service_that_is_cancelled_pays_to_the_end_before_the_next_one_may(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = recipe("asyncio_service")
    begun, answered = threading.Event(), threading.Event()

    def provider(_: float) -> None:
        begun.set()
        assert answered.wait(40)

    monkeypatch.setattr(service.shop, "time", SimpleNamespace(sleep=provider))
    async with aiodlock.Client(shop.url) as client:
        first = asyncio.create_task(service.pay(client, 7))
        await asyncio.to_thread(begun.wait, 40)
        first.cancel()
        second = asyncio.create_task(service.pay(client, 7))
        while not (await client.inspect("order:7")).waiters:
            assert not second.done()
            await asyncio.sleep(0.01)
        first.cancel()  # once more
        answered.set()
        assert await second is False
        with pytest.raises(asyncio.CancelledError):
            await first
    assert shop.charged(7) == 1


async def test_a_cancelled_scope_of_anyio_waits_for_the_thread_without_spinning(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = recipe("shop")
    answered = threading.Event()
    monkeypatch.setattr(code, "time", SimpleNamespace(sleep=lambda _: answered.wait(40)))
    wait = Mock(wraps=asyncio.wait)
    monkeypatch.setattr(asyncio, "wait", wait)
    asyncio.get_running_loop().call_later(0.3, answered.set)
    with anyio.move_on_after(0.1) as scope:
        await code.pay_in_thread(7, 1)
        await anyio.lowlevel.checkpoint()  # after the thread, the scope is cancelled as ever
    assert scope.cancelled_caught
    assert shop.charged(7) == 1
    assert wait.call_count == 1


def test_apscheduler_on_several_hosts(shop: Shop) -> None:
    environment = {**os.environ, "EVERY": "0.1"}
    with running("scheduled", env=environment, stderr=subprocess.DEVNULL):
        with running("scheduled", env=environment, stderr=subprocess.DEVNULL):
            until(lambda: int(shop.records.get("reports") or 0) >= 20)
    assert shop.records.get("mixed") is None


async def test_a_taskiq_task(shop: Shop) -> None:
    tasks = recipe("taskiq_tasks")
    tasks.broker.is_worker_process = True  # it works for itself
    await tasks.broker.startup()
    try:
        sent = [await tasks.pay.kiq(number % 2) for number in range(8)]
        results = [await one.wait_result(timeout=20) for one in sent]
    finally:
        await tasks.broker.shutdown()
    assert sum(result.return_value for result in results) == 2
    assert [shop.charged(order) for order in range(2)] == [1, 1]


def test_the_command_of_the_taskiq_recipe(shop: Shop, tmp_path: Path) -> None:
    (command,) = re.findall(r"^    python (.+)$", str(recipe("taskiq_tasks").__doc__), re.MULTILINE)
    script, order_id = command.split()
    for file in (script, "shop.py"):  # a folder of the reader's
        shutil.copy(RECIPES / file, tmp_path)
    ran = subprocess.run(
        [sys.executable, script, order_id],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
    )
    assert sorted(ran.stdout.decode().split()) == ["False", "False", "True"]
    assert shop.charged(int(order_id)) == 1


async def test_a_starlette_endpoint(shop: Shop) -> None:
    app = recipe("starlette_app").app
    async with app.router.lifespan_context(app) as state:

        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "state": dict(state)}, receive, send)

        transport = httpx.ASGITransport(with_state)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as http:
            answers = await asyncio.gather(*[http.post("/orders/7/pay") for _ in range(8)])
    assert sum(answer.raise_for_status().json()["paid_now"] for answer in answers) == 1
    assert shop.charged(7) == 1


async def test_a_litestar_handler(shop: Shop) -> None:
    from litestar.testing import AsyncTestClient

    async with AsyncTestClient(recipe("litestar_app").app) as http:
        answers = await asyncio.gather(*[http.post("/orders/7/pay") for _ in range(8)])
    assert sum(answer.raise_for_status().json()["paid_now"] for answer in answers) == 1
    assert shop.charged(7) == 1


def test_a_fence_column_of_sqlalchemy(shop: Shop, tmp_path: Path) -> None:
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session

    fence = recipe("sqlalchemy_fence")
    engine = create_engine(f"sqlite:///{tmp_path}/accounts.db")
    fence.Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(fence.Account(id=1))

    with sync.Client(shop.url) as locks:

        def deposit(_: int) -> None:
            with Session(engine) as session:
                fence.deposit(locks, session, 1, 10)

        with locks.lock("account:1") as paused:
            stale = paused.token
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(deposit, range(12)))
    with Session(engine) as session, session.begin():
        assert session.get_one(fence.Account, 1).balance == 120
        with pytest.raises(fence.Stale):
            fence.set_balance(session, 1, 0, stale)
        assert session.get_one(fence.Account, 1).balance == 120
        # A late writer that wakes up when the next holder has read, and has not written yet.
        fence.read(session, 1, stale + 10**12)
        with pytest.raises(fence.Stale):
            fence.set_balance(session, 1, 0, stale + 10**12 - 1)
    engine.dispose()
