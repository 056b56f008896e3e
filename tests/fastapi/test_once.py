"""`Once` in FastAPI: five clicks are one effect."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

import fastapi
import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Form, HTTPException, Request, Response, UploadFile
from fastapi.responses import JSONResponse
from pydantic import AfterValidator

from aiodlock import Client, OnceRun
from aiodlock.fastapi import LockClient, Locked, Once, _once, lifespan

from ..scenes import BRIEF, PATIENCE
from ..servers import Store
from .conftest import Serve

pytestmark = pytest.mark.stores("memory", "valkey9")

A = Annotated[OnceRun, Once("a", keep=600)]
B = Annotated[OnceRun, Once("b", keep=600)]
OUTER = Once("outer", keep=600)


def deeper(c: Annotated[OnceRun, Once("c", keep=600)]) -> OnceRun:
    return c


Deep = Annotated[OnceRun, Depends(deeper)]


async def transaction(commits: bool) -> AsyncIterator[None]:
    yield
    if not commits:
        raise RuntimeError("cannot commit")


Transaction = Annotated[None, Depends(transaction, scope="function")]


@pytest.fixture
def app(store: Store) -> FastAPI:
    return FastAPI(lifespan=lifespan(store.source, ttl=2))


async def test_five_clicks_are_one_effect_and_one_answer(app: FastAPI, serve: Serve) -> None:
    effects: list[int] = []

    @app.post("/orders/{order_id}")
    async def pay(
        order_id: int, once: Annotated[OnceRun, Once("orders:{order_id}", keep=600)]
    ) -> Any:
        if once.first:
            await asyncio.sleep(0.05)
            effects.append(order_id)
            once.result = f"receipt {order_id}"
        return once.result

    async with serve(app) as http:
        clicks = [http.post(f"/orders/{order}") for order in range(4) for _ in range(5)]
        answers = await asyncio.gather(*clicks)
        assert [answer.status_code for answer in answers] == [200] * 20
        assert [answer.json() for answer in answers] == [
            f"receipt {order}" for order in range(4) for _ in range(5)
        ]
    assert sorted(effects) == [0, 1, 2, 3]


@pytest.mark.parametrize("way", ["raises", "answers", "raises another"])
@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_handler_that_fails_records_nothing(
    app: FastAPI, serve: Serve, way: str, kind: str
) -> None:
    tries: list[int] = []

    def work(once: OnceRun) -> Any:
        assert once.first
        tries.append(1)
        once.result = "never on record" if len(tries) == 1 else "second"
        if len(tries) > 1:
            return once.result
        if way == "raises":
            raise HTTPException(409, "not now")
        if way == "answers":
            return JSONResponse({"why": "not now"}, status_code=503)
        raise RuntimeError("failed")

    if kind == "async":

        @app.post("/a")
        async def in_loop(once: Annotated[OnceRun, Once("a", keep=600)]) -> Any:
            return work(once)
    else:

        @app.post("/a")
        def in_thread(once: Annotated[OnceRun, Once("a", keep=600)]) -> Any:
            return work(once)

    async with serve(app) as http:
        first = await http.post("/a")
        assert first.status_code >= 400
        second = await http.post("/a")
        assert (second.status_code, second.json()) == (200, "second")


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_redirect_that_is_raised_is_an_answer_unless_a_dependency_raises_it(
    app: FastAPI, serve: Serve, kind: str
) -> None:
    effects: list[int] = []

    def work(once: OnceRun) -> str:
        if once.first:
            effects.append(1)
            raise HTTPException(303, headers={"location": "/done"})
        return "done before"

    async def in_loop(a: A, login: Login) -> str:
        return work(a)

    def in_thread(a: A, login: Login) -> str:
        return work(a)

    app.post("/a")(in_loop if kind == "async" else in_thread)
    async with serve(app) as http:
        users = ("", "alice", "alice", "")
        answers = [await http.post("/a", params={"user": user}) for user in users]
    assert [answer.status_code for answer in answers] == [307, 303, 200, 307]
    assert effects == [1]


async def log_in(user: str) -> None:
    if not user:
        raise HTTPException(307, headers={"location": "/login"})


Login = Annotated[None, Depends(log_in)]


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_handler_that_fails_records_nothing_under_any_of_its_names(
    app: FastAPI, serve: Serve, kind: str
) -> None:
    firsts: list[tuple[bool, bool, bool]] = []

    def work(*runs: OnceRun) -> Any:
        a, b, c = (run.first for run in runs)
        firsts.append((a, b, c))
        return JSONResponse("not now", status_code=503) if len(firsts) == 1 else "done"

    if kind == "async":

        @app.post("/a")
        async def in_loop(a: A, b: B, deep: Deep) -> Any:
            return work(a, b, deep)
    else:

        @app.post("/a")
        def in_thread(a: A, b: B, deep: Deep) -> Any:
            return work(a, b, deep)

    async with serve(app) as http:
        assert [(await http.post("/a")).status_code for _ in range(3)] == [503, 200, 200]
    assert firsts == [(True,) * 3, (True,) * 3, (False,) * 3]


@pytest.mark.parametrize("way", ["refused by its model", "no JSON"])
@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_work_whose_answer_cannot_be_sent_is_done_once(
    app: FastAPI, serve: Serve, way: str, kind: str
) -> None:
    effects: list[int] = []

    def work(*runs: OnceRun) -> Any:
        if not runs[0].first:
            return [run.result for run in runs]
        effects.append(1)
        for run in runs:
            run.result = "receipt"
        return "no list" if way == "refused by its model" else [object()]

    model = list[str] if way == "refused by its model" else None
    if kind == "async":

        @app.post("/a", response_model=model)
        async def in_loop(a: A, b: B, deep: Deep) -> Any:
            return work(a, b, deep)
    else:

        @app.post("/a", response_model=model)
        def in_thread(a: A, b: B, deep: Deep) -> Any:
            return work(a, b, deep)

    async with serve(app) as http:
        assert (await http.post("/a")).status_code == 500
        assert (await http.post("/a")).json() == ["receipt"] * 3
    assert effects == [1]


async def test_loss_while_the_answer_is_made_gives_409(app: FastAPI, serve: Serve) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def check(answer: str) -> str:
        begun.set()
        assert go_on.wait(PATIENCE)
        return answer

    @app.post("/a", response_model=Annotated[str, AfterValidator(check)])
    def pay(a: A) -> str:  # in a thread, and so is its answer checked
        return "paid"

    async with serve(app) as http:
        answer = asyncio.create_task(http.post("/a"))
        try:
            assert await asyncio.to_thread(begun.wait, PATIENCE)
            assert await app.state.aiodlock.break_lock("a", kind="once") == 1
            assert (await answer).status_code == 409
        finally:
            go_on.set()


async def test_dependency_that_fails_behind_the_handler_records_nothing(
    app: FastAPI, serve: Serve
) -> None:
    firsts: list[bool] = []

    @app.post("/a")
    async def pay(a: A, inside: Transaction) -> None:
        firsts.append(a.first)

    async with serve(app) as http:
        answers = [await http.post("/a", params={"commits": n > 0}) for n in range(3)]
        assert [answer.status_code for answer in answers] == [500, 200, 200]
    assert firsts == [True, True, False]


@pytest.mark.parametrize("is_behind_a_lock", [False, True])
async def test_thread_of_a_cancelled_request_is_done_once(
    client: Client, monkeypatch: pytest.MonkeyPatch, is_behind_a_lock: bool
) -> None:
    """Also if another thread runs for a while just before this one has told what it answers."""
    tell = _once._tell

    def tell_late(answer: object) -> object:
        time.sleep(0.1)
        return tell(answer)

    monkeypatch.setattr(_once, "_tell", tell_late)
    begun, go_on = threading.Event(), threading.Event()
    firsts: list[bool] = []
    app = FastAPI()
    app.dependency_overrides[LockClient] = lambda: client
    lock = [Locked("lock")] if is_behind_a_lock else []

    @app.post("/a", dependencies=lock)
    def pay(a: A) -> str | None:
        firsts.append(a.first)
        if a.first:
            begun.set()
            assert go_on.wait(PATIENCE)
            a.result = "receipt"
        return str(a.result)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        cancelled = asyncio.create_task(http.post("/a"))
        await asyncio.to_thread(begun.wait, PATIENCE)
        cancelled.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert (await http.post("/a")).json() == "receipt"
    assert firsts == [True, False]


@pytest.mark.parametrize("where", ["handler", "dependency"])
@pytest.mark.parametrize(("inner_status", "status"), [(200, 503), (503, 200)])
async def test_request_that_is_made_meanwhile_in_the_same_task_is_another(
    app: FastAPI, serve: Serve, where: str, inner_status: int, status: int
) -> None:
    """As a test client or a gateway does it, which call an app without a server."""
    inside = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://inside")

    async def ask(place: str) -> None:
        if place == where:
            assert (await inside.post("/inner")).status_code == inner_status

    async def before() -> None:
        await ask("dependency")

    dependencies = [OUTER, Depends(before)]

    @app.post("/inner")
    async def inner(once: Annotated[OnceRun, Once("inner", keep=600)]) -> Any:
        return JSONResponse(once.first, status_code=inner_status)

    @app.post("/outer", dependencies=dependencies)
    async def outer(once: Annotated[OnceRun, OUTER]) -> Any:
        await ask("handler")
        return JSONResponse(once.first, status_code=status)

    async with serve(app) as http, inside:
        assert [(await http.post("/outer")).json() for _ in range(2)] == [True, status != 200]
        assert (await http.post("/inner")).json() is (inner_status != 200)


def decorated(handler: Any) -> Any:
    @functools.wraps(handler)
    def handled(*args: Any, **kwargs: Any) -> Any:
        return handler(*args, **kwargs)

    return handled


@pytest.mark.parametrize("place", ["app", "router", "router in a router", "two inclusions"])
@pytest.mark.parametrize("way", ["async", "thread", "async behind a decorator"])
async def test_handler_that_fails_records_nothing_wherever_its_route_was_added(
    app: FastAPI, serve: Serve, place: str, way: str
) -> None:
    if way == "async behind a decorator" and not knows_decorators():
        pytest.skip("FastAPI itself does not await such a handler before 0.123")
    status = [503, 200, 200]

    async def handler(once: Annotated[OnceRun, Once("a", keep=600)]) -> Any:
        return JSONResponse(once.first, status_code=status.pop(0))

    def in_thread(once: Annotated[OnceRun, Once("a", keep=600)]) -> Any:
        return JSONResponse(once.first, status_code=status.pop(0))

    router = APIRouter()
    route = in_thread if way == "thread" else handler if way == "async" else decorated(handler)
    (app if place == "app" else router).post("/a")(route)
    if place == "two inclusions":
        app.include_router(router, prefix="/v1")
    if place == "router in a router":
        inner, router = router, APIRouter()
        router.include_router(inner)
    if place != "app":
        app.include_router(router)

    async with serve(app) as http:
        assert [(await http.post("/a")).json() for _ in range(3)] == [True, True, False]


def knows_decorators() -> bool:
    """Return whether FastAPI awaits an async handler behind a decorator that is not async."""
    return tuple(map(int, fastapi.__version__.split(".")[:2])) >= (0, 123)


async def test_status_that_the_handler_sets_counts_too(app: FastAPI, serve: Serve) -> None:
    tries: list[int] = []

    @app.post("/a")
    async def handler(response: Response, once: Annotated[OnceRun, Once("a", keep=600)]) -> Any:
        tries.append(1)
        if len(tries) == 1:
            response.status_code = 422
        return once.first

    async with serve(app) as http:
        assert [(await http.post("/a")).json() for _ in range(3)] == [True, True, False]


async def test_status_that_the_route_declares_counts_too(app: FastAPI, serve: Serve) -> None:
    @app.post("/a", status_code=503)
    async def handler(once: Annotated[OnceRun, Once("a", keep=600)]) -> bool:
        return once.first

    @app.post("/b", status_code=503)
    async def answers(once: Annotated[OnceRun, Once("b", keep=600)]) -> Any:
        return JSONResponse(once.first, status_code=200)

    async with serve(app) as http:
        assert [(await http.post("/a")).json() for _ in range(3)] == [True, True, True]
        assert [(await http.post("/b")).json() for _ in range(2)] == [True, False]


async def test_request_that_waits_too_long_gets_423(
    app: FastAPI, serve: Serve, client: Client
) -> None:
    @app.post("/a")
    async def handler(once: Annotated[OnceRun, Once("a", keep=600, timeout=BRIEF)]) -> bool:
        return once.first

    async with serve(app) as http:
        async with client.once("a", keep=600):
            assert (await http.post("/a")).status_code == 423
        assert (await http.post("/a")).json() is False


OUTER_ONCE = Depends(OUTER)


@pytest.mark.parametrize("place", ["route", "app", "router", "inclusion", "sub-router", "mount"])
async def test_run_that_nobody_reads_is_refused(client: Client, place: str) -> None:
    app = FastAPI(
        dependencies=[OUTER_ONCE] if place == "app" else [], lifespan=lifespan("memory://")
    )
    router = APIRouter(dependencies=[OUTER_ONCE] if place == "router" else [])
    outer = APIRouter(dependencies=[OUTER_ONCE] if place == "sub-router" else [])
    mounted = FastAPI(dependencies=[OUTER_ONCE] if place == "mount" else [])
    charged: list[int] = []

    @mounted.post("/pay")
    @router.post("/pay", dependencies=[OUTER_ONCE] if place == "route" else [])
    async def pay() -> None:
        charged.append(1)

    outer.include_router(router)
    app.include_router(outer, dependencies=[OUTER_ONCE] if place == "inclusion" else [])
    app.mount("/mounted", mounted)
    with pytest.raises(ValueError, match="nobody reads the run"):
        async with app.router.lifespan_context(app):
            pass
    app.dependency_overrides[LockClient] = lambda: client  # an app that never starts
    if place != "mount":
        async with asking(app) as http:
            with pytest.raises(RuntimeError, match="nobody reads the run"):
                await http.post("/pay")
    assert not charged


def asking(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x")


def answers_by_itself(once: Annotated[OnceRun, OUTER]) -> None:
    if not once.first:
        raise HTTPException(409, "done before")


async def test_run_that_a_dependency_reads_is_read(client: Client) -> None:
    app = FastAPI(lifespan=lifespan("memory://"))
    app.dependency_overrides[LockClient] = lambda: client

    @app.post("/", dependencies=[OUTER, Depends(answers_by_itself)])
    async def pay() -> str:
        return "paid"

    async with app.router.lifespan_context(app), asking(app) as http:
        assert [(await http.post("/")).status_code for _ in range(2)] == [200, 409]


@pytest.mark.parametrize("result", ["receipt " * 10_000, "\ud800", {"receipt": 7}])
async def test_result_that_cannot_be_kept_after_the_effect_is_no_second_effect(
    app: FastAPI, serve: Serve, result: Any
) -> None:
    effects: list[int] = []

    @app.post("/")
    async def pay(a: A) -> bool:
        if a.first:
            effects.append(1)
            a.result = result
        return a.first

    async with serve(app) as http:
        answers = [await http.post("/") for _ in range(3)]
    first = 500 if isinstance(result, dict) else 200
    assert [answer.status_code for answer in answers] == [first, 200, 200]
    assert effects == [1]


KEYED = Annotated[OnceRun, Once("key:{header.idempotency_key}", keep=600)]


async def test_another_request_with_the_same_key_is_refused(client: Client) -> None:
    app = FastAPI()
    app.dependency_overrides[LockClient] = lambda: client
    effects: list[object] = []

    def work(once: OnceRun, what: object) -> str:
        if once.first:
            effects.append(what)
            once.result = f"did {what}"
        return str(once.result)

    @app.post("/pay")
    async def pay(order: dict[str, int], once: KEYED) -> str:
        return work(once, order)

    @app.post("/form")
    async def form(order: Annotated[str, Form()], file: UploadFile, once: KEYED) -> str:
        return work(once, (order, await file.read()))

    @app.post("/raw")
    async def raw(request: Request, once: KEYED) -> str:
        return work(once, await request.body())

    @app.post("/any/{which}")
    async def any_one(
        request: Request, once: Annotated[OnceRun, Once("any:{which}", keep=60)]
    ) -> str:
        return work(once, await request.body())

    @app.post("/told/{which}")
    async def told(
        request: Request, once: Annotated[OnceRun, Once("t:{which}", keep=60, fingerprint=True)]
    ) -> str:
        return work(once, await request.body())

    async with asking(app) as http:

        async def ask(path: str, key: str = "", **sent: Any) -> int:
            return (await http.post(path, headers={"Idempotency-Key": key}, **sent)).status_code

        assert await ask("/pay", "a", json={"x": 1, "y": 2}) == 200
        again = await http.post("/pay", headers={"Idempotency-Key": "a"}, json={"y": 2, "x": 1})
        assert again.json() == "did {'x': 1, 'y': 2}"
        other = await http.post("/pay", headers={"Idempotency-Key": "a"}, json={"x": 3})
        assert other.status_code == 422
        assert "another request" in other.json()["detail"]["title"]
        assert await ask("/pay?x=1", "a", json={"x": 1, "y": 2}) == 422
        assert await ask("/raw", "a", json={"x": 1, "y": 2}) == 422
        assert await ask("/pay", "b", json={"x": 3}) == 200
        # As the draft of the header writes it.
        assert [await ask("/pay", '"8e03"', json={"x": 1}) for _ in range(2)] == [200, 200]
        assert len(effects) == 3
        for content, status in ((b"1", 200), (b"1", 200), (b"2", 422)):
            sent = {"data": {"order": "7"}, "files": {"file": ("a.txt", content)}}
            assert await ask("/form", "c", **sent) == status
            assert await ask("/raw", "d", content=content * 1000) == status
            assert await ask("/told/1", content=content) == status
            assert await ask("/any/1", content=content) == 200
    assert len(effects) == 7


async def test_first_that_fails_leaves_the_key_to_another_request(client: Client) -> None:
    app = FastAPI()
    app.dependency_overrides[LockClient] = lambda: client

    @app.post("/")
    async def pay(order: dict[str, int], once: KEYED) -> bool:
        if once.first and order["x"] < 0:
            raise HTTPException(400)
        return once.first

    async with asking(app) as http:
        key = {"Idempotency-Key": "a"}
        answers = [await http.post("/", json={"x": x}, headers=key) for x in (-1, 1, 1, 2)]
    assert [answer.status_code for answer in answers] == [400, 200, 200, 422]
    assert [answer.json() for answer in answers[1:3]] == [True, False]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"owner": "me"}, {"owner": ""}, {"linger": 1.0}, {"confirm_release": False}),
        *(
            {"fingerprint": 1},
            {"status": 200},
            {"shared": True},
            {"keep": 0},
            {"ttll": 1},
            {"hold_at_least": 601},
        ),
    ],
)
def test_bad_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Once("a", **{"keep": 600, **wrong})
