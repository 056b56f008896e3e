"""`aiodlock.fastapi` under a real uvicorn, over sockets."""

from __future__ import annotations

import asyncio
import functools
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Annotated, Any
from uuid import UUID

import httpx
import pytest
from fastapi import (
    APIRouter,
    BackgroundTasks,
    Body,
    Depends,
    FastAPI,
    Header,
    HTTPException,
    Query,
    Request,
    Response,
)
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import StreamingResponse
from starlette.middleware import Middleware
from starlette.routing import Mount
from starlette.types import Message, Receive, Scope, Send

import aiodlock
from aiodlock import Client, Lease
from aiodlock._model import Kind
from aiodlock.fastapi import LockClient, Locked, Once, lifespan

from ..scenes import BRIEF, PATIENCE, keeper_of, until, until_cancelled
from ..servers import Store
from .conftest import Serve

ORDER_LOCK = Locked("orders:{order_id}")

pytestmark = pytest.mark.stores("memory", "valkey9")


@pytest.fixture
def app(store: Store) -> FastAPI:
    return FastAPI(lifespan=lifespan(store.source, ttl=2))


@pytest.fixture(params=["bare", "behind a middleware"])
def served_app(app: FastAPI, request: pytest.FixtureRequest) -> FastAPI:
    """The app, also behind a middleware that wraps ``receive``."""
    if request.param != "bare":

        @app.middleware("http")
        async def pass_on(
            request: Request, call_next: Callable[[Request], Awaitable[Response]]
        ) -> Response:
            return await call_next(request)

    return app


async def waiters(app: FastAPI, name: str) -> int:
    return len((await app.state.aiodlock.inspect(name)).waiters)


async def test_handler_runs_with_the_lock_and_it_is_free_when_the_answer_arrives(
    app: FastAPI, serve: Serve
) -> None:
    @app.get("/orders/{order_id}")
    async def show(
        order_id: int, lease: Annotated[Lease, Locked("orders:{order_id}")]
    ) -> dict[str, Any]:
        info = await app.state.aiodlock.inspect("orders:7")
        return {"name": lease.name, "token": lease.token, "holders": len(info.holders)}

    async with serve(app) as http:
        for _ in range(5):
            answer = await http.get("/orders/7")
            assert answer.json()["name"] == "orders:7"
            assert answer.json()["holders"] == 1
            assert not (await app.state.aiodlock.inspect("orders:7")).holders


async def test_braces_that_are_written_twice_are_part_of_the_name(
    app: FastAPI, serve: Serve
) -> None:
    @app.get("/orders/{shop}/{order_id}")
    async def show(
        shop: str, order_id: int, lease: Annotated[Lease, Locked("{{x}}y{{{shop}:{order_id}}}")]
    ) -> str:
        return lease.name

    async with serve(app) as http:
        assert (await http.get("/orders/mine/7")).json() == "{x}y{mine:7}"


async def test_next_request_gets_a_lease_that_lingers_without_a_message(
    app: FastAPI, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.get("/orders/{order_id}")
    async def show(
        order_id: int, lease: Annotated[Lease, Locked("orders:{order_id}", ttl=20, linger=60.0)]
    ) -> int:
        return lease.token

    asked: list[object] = []
    async with serve(app) as http:
        first = (await http.get("/orders/7")).json()
        store = keeper_of(app.state.aiodlock).store
        acquire, leave_later, leave = store.acquire, store.leave_later, store.leave

        def counted(call: Any) -> Any:
            def counting(*about: Any, **options: Any) -> Any:
                asked.append(call)
                return call(*about, **options)

            return counting

        monkeypatch.setattr(store, "acquire", counted(acquire))
        monkeypatch.setattr(store, "leave_later", counted(leave_later))
        monkeypatch.setattr(store, "leave", counted(leave))
        for _ in range(5):
            assert (await http.get("/orders/7")).json() == first
        assert not asked
        assert (await http.get("/orders/8")).json()
        assert len(asked) == 1


async def test_busy_lock_gives_423_with_retry_after_and_problem(app: FastAPI, serve: Serve) -> None:
    @app.get("/orders/{order_id}")
    async def show(lease: Annotated[Lease, Locked("orders:{order_id}", timeout=BRIEF)]) -> None:
        raise AssertionError("must not run")

    async with serve(app) as http:
        async with app.state.aiodlock.lock("orders:7"):
            answer = await http.get("/orders/7")
        assert answer.status_code == 423
        assert int(answer.headers["retry-after"]) >= 1
        detail = answer.json()["detail"]
        assert detail["status"] == 423
        assert detail["lock"] == "orders:7"
        assert {"type", "title", "detail"} <= set(detail)


async def test_lost_lease_cancels_the_handler_and_gives_409(app: FastAPI, serve: Serve) -> None:
    cancelled = asyncio.Event()

    @app.get("/slow")
    async def slow(lease: Annotated[Lease, Locked("slow")]) -> None:
        try:
            await until_cancelled()
        finally:
            cancelled.set()

    async with serve(app) as http:
        answer = asyncio.create_task(http.get("/slow"))
        client: Client = app.state.aiodlock
        await until(lambda: client.lock("slow").locked(), "locked")
        assert await client.break_lock("slow") == 1
        assert (await answer).status_code == 409
        assert answer.result().json()["detail"]["status"] == 409
        assert cancelled.is_set()


async def test_handler_that_checks_its_lease_gives_409(app: FastAPI, serve: Serve) -> None:
    @app.get("/check")
    async def check(lease: Annotated[Lease, Locked("check", on_lost="flag")]) -> None:
        await app.state.aiodlock.break_lock("check")
        await lease.wait_lost()
        lease.ensure_held()

    async with serve(app) as http:
        assert (await http.get("/check")).status_code == 409


async def test_shared_locks_are_held_together(app: FastAPI, serve: Serve) -> None:
    both = asyncio.Barrier(2)

    @app.get("/read")
    async def read(lease: Annotated[Lease, Locked("doc", shared=True)]) -> str:
        async with asyncio.timeout(PATIENCE):
            await both.wait()
        return lease.mode

    async with serve(app) as http:
        answers = await asyncio.gather(http.get("/read"), http.get("/read"))
        assert [answer.json() for answer in answers] == ["shared", "shared"]


async def test_fields_come_from_path_query_and_headers(app: FastAPI, serve: Serve) -> None:
    @app.get("/a/{order_id}")
    async def bare(
        lease: Annotated[Lease, Locked("{x_tenant}:{region}:{order_id}")],
        x_tenant: Annotated[str, Header()] = "",
        region: str = "",
    ) -> str:
        return lease.name

    @app.get("/b/{order_id}")
    async def told(
        lease: Annotated[Lease, Locked("{header.x_tenant}:{query.region}:{path.order_id}")],
    ) -> str:
        return lease.name

    async with serve(app) as http:
        for path in ("/a/7", "/b/7"):
            answer = await http.get(path, params={"region": "eu"}, headers={"X-Tenant": "acme"})
            assert answer.json() == "acme:eu:7"
            for params, headers in (
                ({}, {"X-Tenant": "acme"}),
                ({"region": "eu"}, {}),
                ({"region": ""}, {"X-Tenant": "acme"}),
                ({"region": "eu"}, {"X-Tenant": ""}),
            ):
                answer = await http.get(path, params=params, headers=headers)
                assert answer.status_code == 422, (path, params, headers)
        # A query cannot stand in for a header, nor a header for a query, nor be given twice.
        twice: list[tuple[str, str | int | float | bool | None]]
        twice = [("region", "eu"), ("region", "us")]
        answer = await http.get("/a/7", params=twice, headers={"X-Tenant": "acme"})
        assert answer.status_code == 422
        both = {"region": "eu", "x_tenant": "other"}
        answer = await http.get(
            "/a/7", params=both, headers={"X-Tenant": "acme", "Region": "other"}
        )
        assert answer.json() == "acme:eu:7"


async def test_value_cannot_break_out_into_another_name(app: FastAPI, serve: Serve) -> None:
    @app.get("/x")
    async def x(a: str, b: str, lease: Annotated[Lease, Locked("{a}-{b}")]) -> str:
        return lease.name

    async with serve(app) as http:
        assert (await http.get("/x", params={"a": "1", "b": "2"})).json() == "1-2"
        assert (await http.get("/x", params={"a": "1-2", "b": "3"})).json() == "1%2D2-3"
        assert (await http.get("/x", params={"a": "1", "b": "2-3"})).json() == "1-2%2D3"


async def test_name_gets_the_value_as_the_handler_sees_it(app: FastAPI, serve: Serve) -> None:
    @app.get("/n/{number}/{uid}")
    async def n(number: int, uid: UUID, lease: Annotated[Lease, Locked("{number}:{uid}")]) -> str:
        return lease.name

    uid = UUID(int=5)
    async with serve(app) as http:
        answer = await http.get(f"/n/007/{uid.hex.upper()}")
        assert answer.json() == f"7:{uid}"
        assert (await http.get(f"/n/seven/{uid}")).status_code == 422


async def test_disconnected_client_leaves_the_queue_and_its_handler_does_not_run(
    served_app: FastAPI, serve: Serve
) -> None:
    ran: list[bytes] = []

    @served_app.post("/orders/{order_id}")
    async def pay(
        request: Request, lease: Annotated[Lease, Locked("orders:{order_id}", timeout=None)]
    ) -> None:
        ran.append(await request.body())

    async with serve(served_app) as http:
        client: Client = served_app.state.aiodlock
        async with client.lock("orders:7"):
            request = asyncio.create_task(http.post("/orders/7", content=b"x"))
            await until(lambda: waiting(client), "queued")
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request

            async def left() -> bool:
                return not await waiting(client)

            await until(left, "left the queue")
        assert not ran
        assert (await http.post("/orders/7", content=b"second")).status_code == 200
        assert ran == [b"second"]


async def waiting(client: Client) -> int:
    return len((await client.inspect("orders:7")).waiters)


async def test_body_is_not_stolen_while_waiting(served_app: FastAPI, serve: Serve) -> None:
    """Neither one that FastAPI reads nor one the handler streams, small or large, early or late."""

    @served_app.post("/raw")
    async def raw(request: Request, lease: Annotated[Lease, Locked("orders:7")]) -> int:
        return sum([len(chunk) async for chunk in request.stream()])

    @served_app.post("/json")
    async def parsed(
        value: Annotated[dict[str, str], Body()], lease: Annotated[Lease, Locked("orders:7")]
    ) -> int:
        return len(value["x"])

    size, go_on = 300_000, asyncio.Event()

    async def slow_body() -> AsyncIterator[bytes]:
        yield b"y" * 10
        await go_on.wait()
        for _ in range(10):
            yield b"z" * (size // 10)

    async with serve(served_app) as http:
        client: Client = served_app.state.aiodlock
        async with client.lock("orders:7"):
            requests = [
                asyncio.create_task(http.post("/raw", content=b"x" * size)),
                asyncio.create_task(http.post("/raw", content=slow_body())),
                asyncio.create_task(http.post("/json", json={"x": "x" * size})),
            ]

            async def all_wait() -> bool:
                return await waiting(client) == 3

            await until(all_wait, "queued")
        go_on.set()
        answers = [await request for request in requests]
        assert [answer.json() for answer in answers] == [size, size + 10, size]


async def test_body_that_a_middleware_refuses_while_it_is_received_is_refused(
    app: FastAPI, serve: Serve
) -> None:
    @app.post("/raw")
    async def raw(request: Request, lease: Annotated[Lease, Locked("orders:7")]) -> int:
        return len(await request.body())

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        async def at_most_ten() -> Message:
            message = await receive()
            if len(message.get("body", b"")) > 10:
                raise HTTPException(413)
            return message

        await app(scope, at_most_ten, send)

    async with serve(limited) as http, asyncio.timeout(30):
        assert (await http.post("/raw", content=b"x" * 9)).json() == 9
        assert (await http.post("/raw", content=b"x" * 11)).status_code == 413


async def test_lock_is_free_while_a_body_streams_and_background_tasks_run(
    app: FastAPI, serve: Serve
) -> None:
    seen: list[bool] = []

    async def look() -> None:
        seen.append(await app.state.aiodlock.lock("s").locked())

    @app.get("/stream")
    async def stream(
        tasks: BackgroundTasks, lease: Annotated[Lease, Locked("s")]
    ) -> StreamingResponse:
        async def body() -> AsyncIterator[bytes]:
            await look()
            yield b"x"

        tasks.add_task(look)
        return StreamingResponse(body(), background=tasks)

    async with serve(app) as http:
        assert (await http.get("/stream")).text == "x"
        await until(lambda: len(seen) == 2, "background task")
        assert seen == [False, False]


@pytest.mark.parametrize(("scope", "locked"), [("function", True), ("request", False)])
async def test_dependency_behind_the_lock_ends_with_it_only_in_the_functions_scope(
    client: Client, scope: Any, locked: bool
) -> None:
    """What the page says of sessions that commit behind their yield."""
    seen: list[bool] = []
    app = FastAPI()
    app.dependency_overrides[LockClient] = lambda: client

    async def session() -> AsyncIterator[None]:
        yield
        seen.append(await client.lock("s").locked())

    @app.get("/", dependencies=[Locked("s"), Depends(session, scope=scope)])
    async def handler() -> None: ...

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        assert (await http.get("/")).status_code == 200
    assert seen == [locked]


async def test_sync_handlers_hold_the_lock_too(app: FastAPI, serve: Serve) -> None:
    @app.get("/sync")
    def sync(lease: Annotated[Lease, Locked("s")]) -> bool:
        return lease.held

    async with serve(app) as http:
        assert (await http.get("/sync")).json() is True


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("dependency", [Locked("s"), Once("s", keep=600)], ids=["lock", "once"])
async def test_cancelled_request_keeps_its_lock_until_the_handlers_thread_has_ended(
    client: Client, dependency: Any, included: bool
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    inside: list[int] = []
    most: list[int] = []
    app = FastAPI()
    app.dependency_overrides[LockClient] = lambda: client
    router = APIRouter()

    def sync(held: Any, outer: Annotated[Lease, Locked("outer")]) -> None:
        inside.append(1)
        most.append(len(inside))
        begun.set()
        assert go_on.wait(PATIENCE)
        assert held
        inside.pop()

    sync.__annotations__["held"] = Annotated[Any, dependency]
    (router if included else app).get("/sync")(sync)
    if included:
        app.include_router(router)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        cancelled = asyncio.create_task(http.get("/sync"))
        await asyncio.to_thread(begun.wait, PATIENCE)
        cancelled.cancel()
        second = asyncio.create_task(http.get("/sync"))
        kind: Kind = "once" if isinstance(dependency, Once) else "lock"

        async def waits() -> bool:
            return bool((await client.inspect("s", kind=kind)).waiters)

        await until(waits, "queued")
        cancelled.cancel()  # once more
        await asyncio.sleep(BRIEF)
        assert await waits()
        go_on.set()
        assert (await second).status_code == 200
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    assert most == [1, 1]


async def test_lock_client_gives_the_client_and_maps_errors(app: FastAPI, serve: Serve) -> None:
    @app.get("/nowait")
    async def nowait(client: Annotated[Client, LockClient]) -> None:
        async with client.lock("n", timeout=0):
            pass

    @app.get("/called")
    async def called(client: Annotated[Client, LockClient]) -> bool:
        return client is app.state.aiodlock

    async with serve(app) as http:
        assert (await http.get("/called")).json() is True
        assert (await http.get("/nowait")).status_code == 200
        async with app.state.aiodlock.lock("n"):
            assert (await http.get("/nowait")).status_code == 423


async def test_client_that_tests_put_in_place_raises_the_same_errors(client: Client) -> None:
    app = FastAPI()
    app.dependency_overrides[LockClient] = lambda: client

    @app.get("/annotated")
    async def annotated(client: Annotated[Client, LockClient]) -> None:
        async with client.lock("n", timeout=0):
            pass

    @app.get("/lost")
    async def lost(client: Annotated[Client, LockClient]) -> None:
        async with client.lock("lost"):
            await client.break_lock("lost")
            await until_cancelled()

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        assert (await http.get("/annotated")).status_code == 200
        async with client.lock("n", owner="another"):
            answer = await http.get("/annotated")
        assert (answer.status_code, answer.json()["detail"]["lock"]) == (423, "n")
        assert (await http.get("/lost")).status_code == 409


async def test_lifespans_inside_each_other_give_the_inner_client_and_then_the_outer_one() -> None:
    outer, inner = lifespan("memory://", description="outer"), lifespan("memory://")
    router = APIRouter(lifespan=inner)
    app = FastAPI(lifespan=outer)
    app.include_router(router)
    for _ in range(2):
        async with app.router.lifespan_context(app):
            first = app.state.aiodlock
            async with lifespan("memory://")(app):
                assert app.state.aiodlock is not first
                async with app.state.aiodlock.lock("x"):
                    pass
            assert app.state.aiodlock is first
            async with first.lock("x"):
                pass
        assert app.state.aiodlock is None
    transport = httpx.ASGITransport(app)
    app.get("/")(uses_client)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        with pytest.raises(RuntimeError, match="there is no client at"):
            await http.get("/")


async def uses_client(client: Annotated[Client, LockClient]) -> None: ...


async def test_status_of_a_wait_that_times_out_may_be_another(client: Client) -> None:
    app = FastAPI(lifespan=lifespan("memory://"))
    app.dependency_overrides[LockClient] = lambda: client

    @app.get("/locked")
    async def locked(lease: Annotated[Lease, Locked("x", timeout=0, status=503)]) -> None: ...

    @app.get("/once")
    async def once(run: Annotated[Any, Once("x", keep=60, timeout=0, status=429)]) -> None: ...

    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        client.lock("x", owner="another"),
        httpx.AsyncClient(transport=transport, base_url="http://x") as http,
    ):
        answer = await http.get("/locked")
        assert (answer.status_code, answer.json()["detail"]["status"]) == (503, 503)
        assert answer.headers["retry-after"] == "1"
        held = client.once("x", keep=60)
        await asyncio.create_task(enter(held))
        assert (await http.get("/once")).status_code == 200
        schema = (await http.get("/openapi.json")).json()["paths"]
    assert "423" not in schema["/locked"]["get"]["responses"]
    assert {"429", "409", "503"} <= set(schema["/once"]["get"]["responses"])


async def enter(once: Any) -> None:
    async with once:
        pass


async def test_another_locks_error_in_the_handler_is_not_ours(app: FastAPI, serve: Serve) -> None:
    @app.get("/x")
    async def x(lease: Annotated[Lease, Locked("mine")]) -> str:
        try:
            await app.state.aiodlock.lock("other").acquire(timeout=0)
        except aiodlock.AcquireTimeout:
            return "caught"
        return "free"

    async with serve(app) as http:
        async with app.state.aiodlock.lock("other"):
            assert (await http.get("/x")).json() == "caught"


@pytest.mark.stores("valkey9")
async def test_store_away_gives_503(store: Store, serve: Serve) -> None:
    app = FastAPI(lifespan=lifespan(store.source, unavailable_after=0.3, close_timeout=0.5))

    @app.get("/x")
    async def x(lease: Annotated[Lease, Locked("x", timeout=0.5)]) -> None:
        raise AssertionError("must not run")

    async with serve(app) as http:
        assert store.server is not None
        store.server.pause()
        try:
            answer = await http.get("/x")
        finally:
            store.server.resume()
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        assert answer.json()["detail"]["status"] == 503


@pytest.mark.stores("valkey9")
async def test_cause_of_503_is_in_the_log_which_is_bounded(
    store: Store, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    app = FastAPI(lifespan=lifespan(store.source, unavailable_after=0.3, close_timeout=0.5))

    @app.get("/{x}")
    async def handler(lease: Annotated[Lease, Locked("{x}", timeout=0.5)]) -> None:
        raise AssertionError("must not run")

    async with serve(app) as http:
        assert store.server is not None
        store.server.pause()
        try:
            answers = await asyncio.gather(*(http.get(f"/{number}") for number in range(20)))
        finally:
            store.server.resume()
    assert {answer.status_code for answer in answers} == {503}
    refused = [one for one in caplog.records if getattr(one, "event", "") == "request_refused"]
    # Which of the two, is a matter of when the silent connection was given up.
    causes = r"the store did not answer|the connection was lost before the reply came"
    assert re.search(causes, refused[0].getMessage())
    assert sum(getattr(one, "number", 1) for one in refused) == 20
    assert len(refused) < 10


async def test_callers_get_texts_for_them(app: FastAPI, serve: Serve) -> None:
    @app.get("/busy")
    async def busy(lease: Annotated[Lease, Locked("b", timeout=0)]) -> None: ...

    @app.get("/lost")
    async def lost(lease: Annotated[Lease, Locked("l")]) -> None:
        await app.state.aiodlock.break_lock("l")
        await until_cancelled()

    async with serve(app) as http:
        async with app.state.aiodlock.lock("b"):
            answer = await http.get("/busy")
        assert answer.json()["detail"]["detail"] == "Somebody else holds 'b'; try again in 1 s."
        answer = await http.get("/lost")
        text = "The lock on 'l' was lost; the work may be half done."
        assert answer.json()["detail"]["detail"] == text


async def test_request_that_would_wait_for_itself_is_refused_when_the_app_starts() -> None:
    async def shared_first(
        a: Annotated[Lease, Locked("x", shared=True)], b: Annotated[Lease, Locked("x")]
    ) -> None: ...
    async def once_twice(
        a: Annotated[aiodlock.OnceRun, Once("x", keep=9)],
        b: Annotated[aiodlock.OnceRun, Once("x", keep=9)],
    ) -> None: ...
    async def exclusive_first(
        a: Annotated[Lease, Locked("x")],
        b: Annotated[Lease, Locked("x", shared=True)],
        c: Annotated[aiodlock.OnceRun, Once("x", keep=9)],
        d: Annotated[Lease, Locked("x")],
    ) -> None: ...

    for handler in (shared_first, once_twice, exclusive_first):
        app = FastAPI(lifespan=lifespan("memory://"))
        app.get("/")(handler)
        transport = httpx.ASGITransport(app)
        if handler is exclusive_first:
            async with (
                app.router.lifespan_context(app),
                httpx.AsyncClient(transport=transport, base_url="http://x") as http,
            ):
                assert (await http.get("/")).status_code == 200
        else:
            with pytest.raises(ValueError, match="DeadlockError"):
                async with app.router.lifespan_context(app):
                    pass


async def test_problems_are_in_the_schema(app: FastAPI, serve: Serve) -> None:
    router = APIRouter(prefix="/in")

    @router.get("/{a}")
    @app.get("/direct/{a}")
    async def x(lease: Annotated[Lease, Locked("{header.x_tenant}:{a}")]) -> None: ...

    @app.get("/free")
    async def free() -> None: ...

    app.include_router(router)
    async with serve(app) as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
    for path in ("/direct/{a}", "/in/{a}"):
        operation = paths[path]["get"]
        assert {"423", "409", "503"} <= set(operation["responses"]), path
        assert [p["name"] for p in operation["parameters"] if p["in"] == "header"] == ["x-tenant"]
    assert "423" not in paths["/free"]["get"]["responses"]


async def test_dependencies_can_be_overridden(store: Store, client: Client) -> None:
    app = FastAPI()

    @app.get("/orders/{order_id}")
    async def show(lease: Annotated[Any, ORDER_LOCK]) -> str:
        return str(getattr(lease, "name", lease))

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        app.dependency_overrides[LockClient] = lambda: client
        assert (await http.get("/orders/7")).json() == "orders:7"
        app.dependency_overrides[ORDER_LOCK] = lambda: "instead"
        assert (await http.get("/orders/7")).json() == "instead"


@pytest.mark.parametrize(
    "template",
    ["", "{}", "{a}{b}", "{a}x{b}", "{{-{a}x{b}", "{a.b}", "{a:>3}", "{a!r}", "{a[0]}", "{"],
)
def test_wrong_templates_are_refused_at_once(template: str) -> None:
    with pytest.raises(ValueError):
        Locked(template)


def test_wrong_options_are_refused_at_once() -> None:
    with pytest.raises(ValueError):
        Locked("x", timeout=-1)
    with pytest.raises(TypeError):
        Locked("x", no_such_option=1)
    for status in (200, 600, "503", None):
        with pytest.raises(ValueError, match="status"):
            Locked("x", status=status)  # type: ignore[arg-type]


def tenant_of(x_tenant: Annotated[str, Header()]) -> str:
    return x_tenant


async def test_a_field_that_no_request_can_fill_is_refused_when_the_app_starts() -> None:
    def app_with(template: str, *, prefix: str = "") -> FastAPI:
        app = FastAPI(lifespan=aiodlock.fastapi.lifespan("memory://"))
        router = APIRouter()

        @router.get("/orders/{order_id}", dependencies=[Locked(template)])
        async def pay(
            tenant: Annotated[str, Depends(tenant_of)],
            region: str = "eu",
            zone: Annotated[str, Query(alias="az")] = "a",
        ) -> None: ...

        app.include_router(router, prefix=prefix)
        return app

    for good in (
        "{order_id}",
        "{region}",
        "{az}",
        "{x_tenant}",
        "{query.any}",
        "{header.any}",
        "x",
    ):
        app = app_with(good)
        async with app.router.lifespan_context(app):
            pass
    app = app_with("{shop}:{order_id}", prefix="/{shop}")
    async with app.router.lifespan_context(app):
        pass
    for bad in ("{oder_id}", "{path.region}", "{zone}", "{tenant}:{order_id}"):
        app = app_with(bad)
        with pytest.raises(ValueError, match="neither the path nor the handler"):
            async with app.router.lifespan_context(app):
                pass


class Yields:
    """A handler that is an object."""

    async def __call__(self) -> AsyncIterator[int]:
        yield 1


async def yields() -> AsyncIterator[int]:
    yield 1


def yields_in_a_thread() -> Iterator[int]:
    yield 1


@functools.wraps(yields)
def decorated(*args: Any) -> AsyncIterator[int]:
    return yields(*args)


@pytest.mark.parametrize("handler", [yields, yields_in_a_thread, Yields(), decorated])
@pytest.mark.parametrize("dependency", [Locked("s"), Once("s", keep=600)])
async def test_handler_that_yields_would_run_without_the_lock_and_is_refused(
    handler: Any, dependency: Any, client: Client
) -> None:
    app = FastAPI(lifespan=aiodlock.fastapi.lifespan("memory://"))
    # Before 0.134, what it yields is not known to be no model.
    app.get("/", dependencies=[dependency], response_model=None)(handler)
    with pytest.raises(ValueError, match="the handler yields"):
        async with app.router.lifespan_context(app):
            pass
    app.dependency_overrides[LockClient] = lambda: client  # an app that never starts
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        with pytest.raises(RuntimeError, match="the handler yields"):
            await http.get("/")
    if isinstance(dependency, Once):
        async with client.once("s", keep=1) as once:
            assert once.first


def test_keywords_of_other_libraries_are_answered() -> None:
    with pytest.raises(TypeError, match=r"timeout= is how long"):
        Locked("x", blocking_timeout=5)


async def test_mounted_apps_get_the_client(app: FastAPI, serve: Serve) -> None:
    """Nobody runs their own lifespans."""
    inner, own = FastAPI(), FastAPI()
    other = own.state.aiodlock = object()

    @inner.get("/{order_id}")
    async def name(order_id: int, lease: Annotated[Lease, Locked("order:{order_id}")]) -> str:
        return lease.name

    app.mount("/v1", inner)
    app.mount("/v2", own)
    async with serve(app) as http:
        assert (await http.get("/v1/007")).json() == "order:7"
        assert own.state.aiodlock is other
    assert inner.state.aiodlock is None


async def test_apps_mounted_with_middleware_or_in_a_router_get_the_client(
    app: FastAPI, serve: Serve
) -> None:
    inner, router = FastAPI(), APIRouter()

    @inner.get("/")
    async def name(lease: Annotated[Lease, Locked("x")]) -> str:
        return lease.name

    outer = Mount("/v1", FastAPI(), middleware=[Middleware(GZipMiddleware)])
    assert isinstance(outer._base_app, FastAPI)
    outer._base_app.router.routes.append(
        Mount("/v2", inner, middleware=[Middleware(GZipMiddleware)])
    )
    app.router.routes.append(outer)
    routed = FastAPI()
    routed.add_api_route("/", name)
    router.mount("/v3", routed)
    app.include_router(router)
    async with serve(app) as http:
        assert (await http.get("/v1/v2/")).json() == "x"
        # Before FastAPI 0.137, what a router mounts is not included.
        assert (await http.get("/v3/")).status_code in (200, 404)


async def test_parameter_with_an_alias_counts_under_that(app: FastAPI, serve: Serve) -> None:
    @app.get("/")
    async def name(
        order: Annotated[int, Query(alias="order-id")],
        lease: Annotated[Lease, Locked("order:{query.order-id}")],
    ) -> str:
        return lease.name

    async with serve(app) as http:
        assert (await http.get("/", params={"order-id": "007"})).json() == "order:7"

    @app.get("/wrong")
    async def wrong(
        order: Annotated[int, Query(alias="order-id")], lease: Annotated[Lease, Locked("o:{order}")]
    ) -> None:
        raise NotImplementedError

    with pytest.raises(ValueError, match="one with an alias counts under that"):
        async with lifespan("memory://")(app):
            raise AssertionError("it started")
