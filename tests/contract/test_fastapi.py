"""`aiodlock.fastapi`, in the process of the test."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException
from fastapi.responses import PlainTextResponse

import aiodlock
from aiodlock import Client, Lease
from aiodlock.fastapi import LockClient, Locked, lifespan

from ..conftest import MakeClient
from ..proxy import FaultProxy
from ..scenes import (
    BRIEF,
    cancelled,
    held_elsewhere,
    is_free,
    takes,
    until_cancelled,
    until_held,
    until_waiting,
)
from ..servers import BEYOND, Store

pytestmark = pytest.mark.stores("memory", "fakeredis", "valkey9", *BEYOND)


@asynccontextmanager
async def started(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as http,
    ):
        yield http


def make_app(url: str, **options: Any) -> FastAPI:
    app = FastAPI(lifespan=lifespan(url, **options))

    @app.get("/orders/{order_id}")
    async def show(
        order_id: int, lease: Annotated[Lease, Locked("orders:{order_id}")]
    ) -> dict[str, Any]:
        return {"name": lease.name, "mode": lease.mode, "token": lease.token, "held": lease.held}

    @app.get("/impatient")
    async def impatient(lease: Annotated[Lease, Locked("orders:1", timeout=BRIEF)]) -> str:
        return "in"

    @app.get("/docs/{doc}")
    async def read(doc: str, lease: Annotated[Lease, Locked("{doc}", shared=True)]) -> str:
        return lease.mode

    @app.get("/at-once")
    async def at_once(lease: Annotated[Lease, Locked("orders:1", timeout=0)]) -> str:
        return "in"

    @app.get("/slow")
    async def slow(lease: Annotated[Lease, Locked("slow")]) -> None:
        await until_cancelled()

    @app.get("/teapot")
    async def teapot(lease: Annotated[Lease, Locked("teapot")]) -> None:
        raise HTTPException(418, "a teapot")

    @app.get("/hand/{how}")
    async def by_hand(how: str, client: Annotated[Client, LockClient]) -> str:
        if how == "nowait":
            await client.lock("orders:1").acquire_nowait()
        async with client.lock("orders:1", timeout=BRIEF):
            return "in"

    return app


@pytest.mark.scripted
async def test_the_client_is_in_the_state_of_the_app(store: Store) -> None:
    app = make_app(store.source, ttl=3, prefix="web")
    async with started(app):
        client = app.state.aiodlock
        assert isinstance(client, Client)
        async with client.lock("x") as lease:
            assert lease.ttl == 3
            assert all(str(k).startswith("web:") for k in await (await store.raw()).keys("*"))
    with pytest.raises(aiodlock.ClientClosed):
        await client.lock("x").acquire()


async def test_the_handler_gets_the_lease_and_the_lock_is_free_afterwards(store: Store) -> None:
    app = make_app(store.source)
    async with started(app) as http:
        answer = await http.get("/orders/7")
        assert answer.status_code == 200
        found = answer.json()
        assert (found["name"], found["mode"], found["held"]) == ("orders:7", "exclusive", True)
        assert await is_free(app.state.aiodlock, "orders:7")
        assert (await http.get("/docs/readme")).json() == "shared"


async def test_a_busy_lock_is_423_with_retry_after(store: Store, make_client: MakeClient) -> None:
    other = await make_client()
    async with started(make_app(store.source)) as http, held_elsewhere(other.lock("orders:1")):
        for path in ("/impatient", "/at-once", "/hand/timeout", "/hand/nowait"):
            answer = await http.get(path)
            assert answer.status_code == 423, path
            assert float(answer.headers["Retry-After"]) > 0, path
        assert (await http.get("/orders/2")).status_code == 200
        assert not (await other.inspect("orders:1")).waiters


async def test_readers_share(store: Store, make_client: MakeClient) -> None:
    other = await make_client()
    async with started(make_app(store.source)) as http:
        async with held_elsewhere(other.rwlock("readme").read):
            assert (await http.get("/docs/readme")).status_code == 200


async def test_a_lost_lease_is_409(store: Store, make_client: MakeClient) -> None:
    operator = await make_client()
    async with started(make_app(store.source)) as http:
        asking = asyncio.create_task(http.get("/slow"))
        await until_held(operator, "slow")
        await operator.break_lock("slow")
        assert (await asking).status_code == 409


async def test_what_the_handler_raises_comes_out(store: Store) -> None:
    app = make_app(store.source)
    async with started(app) as http:
        assert (await http.get("/teapot")).status_code == 418
        assert await is_free(app.state.aiodlock, "teapot")


@pytest.mark.stores("valkey9")
async def test_a_store_that_is_away_is_503(proxy: FaultProxy) -> None:
    async with started(make_app(proxy.url, close_timeout=0.2)) as http:
        assert (await http.get("/orders/1")).status_code == 200
        await proxy.refuse()
        proxy.cut()
        for path in ("/impatient", "/at-once", "/hand/timeout", "/hand/nowait"):
            async with takes(at_most=2.0 + 0.5):
                assert (await http.get(path)).status_code == 503, path
        await proxy.accept()


async def test_a_missing_field_is_the_clients_fault(store: Store) -> None:
    app = FastAPI(lifespan=lifespan(store.source))

    @app.get("/x")
    async def x(id: str, lease: Annotated[Lease, Locked("x:{id}")]) -> str:
        return lease.name

    async with started(app) as http:
        assert (await http.get("/x")).status_code == 422
        assert (await http.get("/x", params={"id": "7"})).json() == "x:7"


async def test_errors_are_http_exceptions_that_handlers_of_the_app_see(store: Store) -> None:
    app = make_app(store.source)
    seen: list[Exception] = []

    @app.exception_handler(HTTPException)
    async def note(request: object, error: Exception) -> Any:
        seen.append(error)
        return PlainTextResponse("mine", 400)

    async with started(app) as http:
        async with held_elsewhere(app.state.aiodlock.lock("orders:1")):
            assert (await http.get("/at-once")).status_code == 400
    (error,) = seen
    assert isinstance(error, HTTPException)
    assert type(error) is not HTTPException
    assert error.status_code == 423


async def test_a_request_that_is_cancelled_while_it_waits_leaves_the_queue(
    store: Store, make_client: MakeClient
) -> None:
    other = await make_client()
    async with started(make_app(store.source)) as http:
        async with held_elsewhere(other.lock("slow")):
            asking = asyncio.create_task(http.get("/slow"))
            await until_waiting(other, "slow")
            await cancelled(asking)
            await until_waiting(other, "slow", 0)


def test_with_starlettes_test_client() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which httpx it would like better
        from fastapi.testclient import TestClient
    app = make_app("memory://")

    @app.get("/sync")
    def sync(lease: Annotated[Lease, Locked("orders:1")]) -> int:
        lease.ensure_held()
        return lease.token

    with TestClient(app) as http:
        first = http.get("/orders/1").json()["token"]
        assert http.get("/sync").json() > first
        assert http.get("/hand/timeout").json() == "in"


async def test_locked_checks_its_arguments_when_made() -> None:
    for wrong in ("", "a{", "{}", "{a}{b}", "x" * 600):
        with pytest.raises(ValueError):
            Locked(wrong)
    for options in ({"ttl": 0.01}, {"timeout": -1}, {"on_lost": "x"}, {"margin": -1}):
        with pytest.raises((ValueError, TypeError)):
            Locked("x", **options)
    with pytest.raises(TypeError):
        Locked("x", nonsense=1)


async def test_without_the_lifespan_the_message_says_what_to_do(store: Store) -> None:
    app = FastAPI()

    @app.get("/x")
    async def x(lease: Annotated[Lease, Locked("x")]) -> None:
        pass

    async with started(app) as http:
        with pytest.raises(RuntimeError, match="lifespan"):
            await http.get("/x")
