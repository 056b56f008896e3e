"""One order has one name: whatever way its number is written, and wherever its type is declared."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, NewType
from uuid import UUID

import httpx
import pytest
from fastapi import (
    APIRouter,
    Body,
    Cookie,
    Depends,
    FastAPI,
    Form,
    Header,
    Path,
    Query,
    Request,
    UploadFile,
)
from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, field_validator

import aiodlock.fastapi
from aiodlock import Client, Lease, OnceRun
from aiodlock.fastapi import LockClient, Locked, Once

pytestmark = pytest.mark.stores("memory")

LOCK = Annotated[Lease, Locked("order:{order_id}")]
ONCE = Annotated[OnceRun, Once("order:{order_id}", keep=60)]
WAYS = ("7", "007", "+7", "7.0")


class Asked(BaseModel):
    order_id: int


class Camel(BaseModel):
    order_id: int = Field(alias="orderId")


async def load_order(order_id: int) -> int:
    return order_id


class Loader:
    def __init__(self, order_id: int) -> None:
        self.order_id = order_id


async def deep(loaded: Annotated[int, Depends(load_order)]) -> int:
    return loaded


async def by_model(asked: Annotated[Asked, Query()]) -> int:
    return asked.order_id


async def by_header(x_order: Annotated[int, Header()]) -> int:
    return x_order


async def raw_too(order_id: str) -> str:
    return order_id


def in_app(app: FastAPI) -> None:
    @app.post("/{order_id}/x")
    async def handler(order_id: int, lease: LOCK) -> str:
        return lease.name


def in_dependency(app: FastAPI) -> None:
    @app.post("/{order_id}/x")
    async def handler(order: Annotated[int, Depends(load_order)], lease: LOCK) -> str:
        return lease.name


def in_class(app: FastAPI) -> None:
    @app.post("/{order_id}/x")
    async def handler(lease: LOCK, order: Annotated[Loader, Depends()]) -> str:
        return lease.name


def in_deep_dependency(app: FastAPI) -> None:
    @app.post("/{order_id}/x", dependencies=[Depends(deep)])
    async def handler(lease: LOCK) -> str:
        return lease.name


def in_apps_dependencies(app: FastAPI) -> None:
    app.router.dependencies.append(Depends(load_order))

    @app.post("/{order_id}/x")
    async def handler(lease: LOCK) -> str:
        return lease.name


def beside_a_raw_one(app: FastAPI) -> None:
    @app.post("/{order_id}/x", dependencies=[Depends(raw_too)])
    async def handler(order_id: int, lease: LOCK) -> str:
        return lease.name


def beside_a_raw_handler(app: FastAPI) -> None:
    @app.post("/{order_id}/x", dependencies=[Depends(load_order)])
    async def handler(order_id: str, lease: LOCK) -> str:
        return lease.name


def in_prefix_of_inclusion(app: FastAPI) -> None:
    router = APIRouter()

    @router.post("/x")
    async def handler(order_id: int, lease: LOCK) -> str:
        return lease.name

    app.include_router(router, prefix="/{order_id}")


def in_prefix_of_outer_router(app: FastAPI) -> None:
    router, outer = APIRouter(), APIRouter(prefix="/{order_id}", dependencies=[Depends(deep)])

    @router.post("/x")
    async def handler(lease: LOCK) -> str:
        return lease.name

    outer.include_router(router)
    app.include_router(outer)


def in_own_prefix(app: FastAPI) -> None:
    router = APIRouter(prefix="/{order_id}")

    @router.post("/x")
    async def handler(order_id: int, lease: LOCK) -> str:
        return lease.name

    app.include_router(router)


def told_to_be_in_path(app: FastAPI) -> None:
    @app.post("/{order_id}/x")
    async def handler(
        order_id: int, lease: Annotated[Lease, Locked("order:{path.order_id}")]
    ) -> str:
        return lease.name


def under_an_alias(app: FastAPI) -> None:
    @app.post("/{order_id}/x")
    async def handler(number: Annotated[int, Path(alias="order_id")], lease: LOCK) -> str:
        return lease.name


def in_mounted_app(app: FastAPI) -> None:
    inner = FastAPI()
    inner.dependency_overrides = app.dependency_overrides

    @inner.post("/x")
    async def handler(order_id: Annotated[int, Path()], lease: LOCK) -> str:
        return lease.name

    app.mount("/{order_id}", inner)


@pytest.mark.parametrize(
    "declare",
    [
        *(in_app, in_dependency, in_class, in_deep_dependency, in_apps_dependencies),
        *(beside_a_raw_one, beside_a_raw_handler, told_to_be_in_path, under_an_alias),
        *(in_prefix_of_inclusion, in_prefix_of_outer_router, in_own_prefix, in_mounted_app),
    ],
)
async def test_number_in_the_path_is_one_order(
    declare: Callable[[FastAPI], None], client: Client
) -> None:
    app = FastAPI(lifespan=aiodlock.fastapi.lifespan("memory://"))
    app.dependency_overrides[LockClient] = lambda: client
    declare(app)
    async with app.router.lifespan_context(app), asking(app) as http:
        answers = [await http.post(f"/{way}/x") for way in WAYS]
    assert [(one.status_code, one.json()) for one in answers] == [(200, "order:7")] * len(WAYS)


def asking(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x")


def in_query(app: FastAPI) -> None:
    @app.post("/")
    async def handler(order_id: int, lease: LOCK) -> str:
        return lease.name


def in_query_of_dependency(app: FastAPI) -> None:
    @app.post("/", dependencies=[Depends(load_order)])
    async def handler(lease: Annotated[Lease, Locked("order:{query.order_id}")]) -> str:
        return lease.name


def in_query_model(app: FastAPI) -> None:
    @app.post("/")
    async def handler(
        asked: Annotated[Asked, Query()],
        lease: Annotated[Lease, Locked("order:{query.order_id}")],
    ) -> str:
        return lease.name


def in_query_model_of_dependency(app: FastAPI) -> None:
    @app.post("/")
    async def handler(order: Annotated[int, Depends(by_model)], lease: LOCK) -> str:
        return lease.name


def under_an_alias_in_query(app: FastAPI) -> None:
    @app.post("/")
    async def handler(number: Annotated[int, Query(alias="order_id")], lease: LOCK) -> str:
        return lease.name


@pytest.mark.parametrize(
    "declare",
    [
        *(in_query, in_query_of_dependency, in_query_model, in_query_model_of_dependency),
        under_an_alias_in_query,
    ],
)
async def test_number_in_the_query_is_one_order(
    declare: Callable[[FastAPI], None], client: Client
) -> None:
    app = FastAPI(lifespan=aiodlock.fastapi.lifespan("memory://"))
    app.dependency_overrides[LockClient] = lambda: client
    declare(app)
    async with app.router.lifespan_context(app), asking(app) as http:
        answers = [await http.post("/", params={"order_id": way}) for way in WAYS]
        assert [(one.status_code, one.json()) for one in answers] == [(200, "order:7")] * len(WAYS)
        twice = await http.post("/", params={"order_id": ["7", "8"]})
        assert twice.status_code == 422
        assert (await http.post("/", params={"order_id": "seven"})).status_code == 422
        assert (await http.post("/")).status_code == 422


class Color(Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("kind", "ways", "text"),
    [
        (UUID, ["A" * 32, "a" * 32, f"urn:uuid:{UUID('a' * 32)}"], str(UUID("a" * 32))),
        (Decimal, ["7", "7.0", "7.00", "07", "70e-1"], "7"),
        (dt.date, ["2026-11-27"], "2026-11-27"),
        (
            dt.datetime,
            ["2026-11-27T15:00:00Z", "2026-11-27T16:00:00+01:00"],
            "2026-11-27T15%3A00%3A00+00%3A00",
        ),
        (Color, ["red"], "red"),
        (Annotated[str, AfterValidator(str.lower)], ["Alice@X", "alice@x"], "alice@x"),
        (int | None, ["7", "07"], "7"),
    ],
)
async def test_value_has_one_text(kind: Any, ways: list[str], text: str, client: Client) -> None:
    app = FastAPI()
    app.dependency_overrides[LockClient] = lambda: client

    async def handler(value: Any, lease: Annotated[Lease, Locked("x:{value}")]) -> str:
        return lease.name

    handler.__annotations__["value"] = kind
    app.post("/")(handler)
    async with asking(app) as http:
        answers = [await http.post("/", params={"value": way}) for way in ways]
    assert [(one.status_code, one.json()) for one in answers] == [(200, f"x:{text}")] * len(ways)


async def test_headers_that_every_caller_sends_are_no_second_value_of_the_query(
    client: Client,
) -> None:
    app = FastAPI()
    app.dependency_overrides[LockClient] = lambda: client

    @app.get("/")
    async def handler(
        host: str, origin: str, lease: Annotated[Lease, Locked("{host}:{origin}")]
    ) -> str:
        return lease.name

    async with asking(app) as http:
        answer = await http.get(
            "/", params={"host": "a", "origin": "b"}, headers={"Origin": "https://test"}
        )
    assert (answer.status_code, answer.json()) == (200, "a:b")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Decimal, "1E+1000"),
        (Decimal, "1E-1000"),
        (int, "9" * 600),
        (dt.datetime, "0001-01-01T00:00:00+05:00"),
        (dt.datetime, "9999-12-31T23:59:59-05:00"),
    ],
)
async def test_value_that_has_no_text_for_a_name_is_refused_by_the_request(
    kind: Any, value: str, client: Client
) -> None:
    app = FastAPI()
    app.dependency_overrides[LockClient] = lambda: client

    async def handler(value: Any, lease: Annotated[Lease, Locked("x:{value}")]) -> str:
        return lease.name

    handler.__annotations__["value"] = kind
    app.post("/")(handler)
    async with asking(app) as http:
        assert (await http.post("/", params={"value": value})).status_code == 422
    with pytest.raises(ValueError):
        aiodlock.name("x:{value}", value=TypeAdapter(kind).validate_python(value))


def test_name_is_not_made_of_two_fields_that_one_keyword_would_fill() -> None:
    with pytest.raises(ValueError, match="two fields have one name"):
        aiodlock.name("{path.id}:{query.id}", id=1)
    assert aiodlock.name("{id}:{id}", id=1) == "1:1"


async def test_body_header_and_cookie_have_names_too(client: Client) -> None:
    app = FastAPI(lifespan=aiodlock.fastapi.lifespan("memory://"))
    app.dependency_overrides[LockClient] = lambda: client

    @app.post("/model")
    async def model(asked: Asked, lease: LOCK, once: ONCE) -> list[object]:
        return [lease.name, once.first]

    @app.post("/told")
    async def told(asked: Asked, lease: Annotated[Lease, Locked("order:{body.order_id}")]) -> str:
        return lease.name

    @app.post("/camel")
    async def camel(asked: Camel, lease: LOCK) -> str:
        return lease.name

    @app.post("/two")
    async def two(asked: Asked, other: Annotated[int, Body()], lease: LOCK) -> str:
        return lease.name

    @app.post("/alone")
    async def alone(order_id: Annotated[int, Body(embed=True)], lease: LOCK) -> str:
        return lease.name

    @app.post("/form")
    async def form(order_id: Annotated[int, Form()], lease: LOCK) -> str:
        return lease.name

    @app.post("/optional")
    async def optional(lease: LOCK, asked: Asked | None = None) -> str:
        return lease.name

    @app.post("/header", dependencies=[Depends(by_header)])
    async def header(lease: Annotated[Lease, Locked("order:{x_order}")]) -> str:
        return lease.name

    @app.post("/cookie")
    async def cookie(order_id: Annotated[int, Cookie()], lease: LOCK) -> str:
        return lease.name

    async with app.router.lifespan_context(app), asking(app) as http:
        for number in (7, "007"):
            for path, body in {
                "/told": {"order_id": number},
                "/camel": {"orderId": number},
                "/two": {"asked": {"order_id": number}, "other": 1},
                "/alone": {"order_id": number},
                "/optional": {"order_id": number},
            }.items():
                answer = await http.post(path, json=body)
                assert (answer.status_code, answer.json()) == (200, "order:7"), path
            answer = await http.post("/model", json={"order_id": number})
            assert answer.json() == ["order:7", number == 7]
            for path, sent in {
                "/form": {"data": {"order_id": f"{number}"}},
                "/header": {"headers": {"X-Order": f"{number}"}},
                "/cookie": {"headers": {"Cookie": f"order_id={number}"}},
            }.items():
                answer = await http.post(path, **sent)  # type: ignore[arg-type]
                assert (answer.status_code, answer.json()) == (200, "order:7"), path
        wrong: Any
        for wrong in ({"order_id": "x"}, {}, [], None):
            assert (await http.post("/model", json=wrong)).status_code == 422
        for empty in ("/model", "/optional", "/form", "/header", "/cookie"):
            assert (await http.post(empty)).status_code == 422
        answer = await http.post(
            "/model", content="{", headers={"content-type": "application/json"}
        )
        assert answer.status_code == 422


async def test_default_of_a_parameter_is_its_value(client: Client) -> None:
    app = FastAPI()
    app.dependency_overrides[LockClient] = lambda: client

    @app.post("/")
    async def handler(
        lease: Annotated[Lease, Locked("{region}:{x_tenant}")],
        region: str = "eu",
        x_tenant: Annotated[str | None, Header()] = None,
    ) -> str:
        return lease.name

    async with asking(app) as http:
        for params in ({}, {"region": "eu"}):
            answer = await http.post("/", params=params, headers={"X-Tenant": "acme"})
            assert answer.json() == "eu:acme"
        assert (await http.post("/")).status_code == 422


async def test_name_is_that_of_other_templates_and_mostly_of_an_f_string(client: Client) -> None:
    app = FastAPI()
    app.dependency_overrides[LockClient] = lambda: client

    @app.post("/")
    async def handler(email: str, lease: Annotated[Lease, Locked("user:{email}")]) -> list[str]:
        return [info.name async for info in client.locks()]

    @client.locked("user:{email}")
    async def worker(email: str) -> list[str]:
        return [info.name async for info in client.locks()]

    async with asking(app) as http:
        for email in (
            "alice@example.com",
            "a b/ü?*{}\n\x00é",
            "a:b",
            "100%",
            "a%3Ab",
            '"x"',
            "\U0001f512",
        ):
            expected = [aiodlock.name("user:{email}", email=email)]
            assert (await http.post("/", params={"email": email})).json() == expected
            assert await worker(email) == expected
            if not set(email) & set(":%"):
                assert expected == [f"user:{email}"]
        assert (await http.post("/", params={"email": "x" * 600})).status_code == 422


async def test_two_requests_with_different_values_never_share_a_name(client: Client) -> None:
    app = FastAPI()
    app.dependency_overrides[LockClient] = lambda: client

    @app.post("/")
    async def handler(a: str, b: str, lease: Annotated[Lease, Locked("{a}:{b}")]) -> str:
        return lease.name

    parts = ["x", ":", "%", "x:", ":x", "%3A", "x%3A", "::"]
    async with asking(app) as http:
        names = [
            (await http.post("/", params={"a": a, "b": b})).json() for a in parts for b in parts
        ]
    assert len(set(names)) == len(parts) ** 2


class Several(BaseModel):
    order_id: list[int]


Price = NewType("Price", float)


async def test_value_whose_type_nobody_declares_is_refused_by_the_request(client: Client) -> None:
    app = FastAPI()
    app.dependency_overrides[LockClient] = lambda: client

    @app.post("/{v:float}")
    async def handler(lease: Annotated[Lease, Locked("x:{v}")]) -> str:
        return lease.name

    async with asking(app) as http:
        assert (await http.post("/7.5")).status_code == 422


def refused() -> Iterator[tuple[str, Any]]:
    async def nothing(lease: LOCK) -> None: ...
    async def several(order_id: Annotated[list[int], Query()], lease: LOCK) -> None: ...
    async def many(asked: Several, lease: LOCK) -> None: ...
    async def a_bool(order_id: bool, lease: LOCK) -> None: ...
    async def a_float(order_id: float | None, lease: LOCK) -> None: ...
    async def a_union(order_id: int | float, lease: LOCK) -> None: ...
    async def a_price(order_id: Price, lease: LOCK) -> None: ...
    async def a_time(order_id: dt.time, lease: LOCK) -> None: ...
    async def a_while(order_id: dt.timedelta | None, lease: LOCK) -> None: ...
    async def a_file(order_id: UploadFile, lease: LOCK) -> None: ...
    async def ambiguous(asked: Asked, order_id: int, lease: LOCK) -> None: ...
    async def two(asked: Asked, other: Asked, lease: LOCK) -> None: ...
    async def other_key(order_id: Annotated[int, Query(alias="id")], lease: LOCK) -> None: ...
    async def a_model(order_id: Camel, lease: Annotated[Lease, Locked("x:{id}")]) -> None: ...
    async def a_dict(body: dict[str, Any], lease: LOCK) -> None: ...
    async def in_body(lease: Annotated[Lease, Locked("x:{body.order_id}")]) -> None: ...
    async def elsewhere(
        order_id: int, lease: Annotated[Lease, Locked("x:{path.order_id}")]
    ) -> None: ...

    yield "neither the path nor", nothing
    yield "is a list", several
    yield "is a list", many
    yield "is a bool, which cannot be part of a lock's name", a_bool
    yield "is a float, which cannot be part of a lock's name", a_float
    yield "is a float, which cannot be part of a lock's name", a_union
    yield "is a float, which cannot be part of a lock's name", a_price
    yield "is a time, which cannot be part of a lock's name", a_time
    yield "is a timedelta, which cannot be part of a lock's name", a_while
    yield "is a UploadFile, which is not one value", a_file
    yield "query and the body", ambiguous
    yield "more than one part of the body", two
    yield "neither the path nor", other_key
    yield "neither the path nor", a_model
    yield "neither the path nor", a_dict
    yield "neither the path nor", in_body
    yield "neither the path nor", elsewhere


@pytest.mark.parametrize("where", ["app", "router", "mount"])
@pytest.mark.parametrize(("why", "handler"), list(refused()))
async def test_what_cannot_be_found_is_refused_when_the_app_starts_and_by_one_that_never_did(
    why: str, handler: Any, where: str, client: Client
) -> None:
    app = FastAPI(lifespan=aiodlock.fastapi.lifespan("memory://"))
    router, mounted = APIRouter(), FastAPI()
    place: Any = {"app": app, "router": router, "mount": mounted}[where]
    place.post("/x")(handler)
    app.include_router(router)
    app.mount("/mounted", mounted)
    with pytest.raises(ValueError, match=why):
        async with app.router.lifespan_context(app):
            pass
    app.dependency_overrides[LockClient] = lambda: client
    if where != "mount" and handler.__name__ != "elsewhere":  # FastAPI itself answers 422 there
        sent = {"order_id": "7"}
        async with asking(app) as http:
            with pytest.raises(RuntimeError, match=why):
                await http.post("/x", params=sent, json={"asked": sent, "other": sent, **sent})


AT_LOCK = Annotated[Lease, Locked("x:{at}")]


class At(BaseModel):
    at: dt.time

    @field_validator("at")
    @classmethod
    def _text(cls, at: dt.time) -> Any:
        return at.isoformat()


async def test_value_of_which_the_application_makes_a_str_can_stand_in_a_name() -> None:
    app = FastAPI(lifespan=aiodlock.fastapi.lifespan("memory://"))

    @app.post("/query")
    async def query(
        at: Annotated[dt.time, AfterValidator(lambda at: at.isoformat())], lease: AT_LOCK
    ) -> str:
        return lease.name

    @app.post("/body")
    async def body(asked: At, lease: AT_LOCK) -> str:
        return lease.name

    async with app.router.lifespan_context(app), asking(app) as http:
        for answer in (
            await http.post("/query", params={"at": "10:00"}),
            await http.post("/body", json={"at": "10:00"}),
        ):
            assert answer.json() == aiodlock.name("x:{at}", at="10:00:00")


async def test_value_of_a_type_without_one_text_is_told(client: Client) -> None:
    app = FastAPI()
    app.dependency_overrides[LockClient] = lambda: client

    @app.post("/")
    async def handler(
        value: Annotated[str, AfterValidator(lambda text: {text})],
        lease: Annotated[Lease, Locked("x:{value}")],
    ) -> None: ...

    async with asking(app) as http:
        with pytest.raises(TypeError, match="must be a str"):
            await http.post("/", params={"value": "x"})


async def test_dependencies_that_read_a_value_in_different_ways_are_no_one_name(
    client: Client,
) -> None:
    app = FastAPI()
    app.dependency_overrides[LockClient] = lambda: client

    async def upper(value: Annotated[str, AfterValidator(str.upper)]) -> str:
        return value

    @app.post("/", dependencies=[Depends(upper)])
    async def handler(
        value: Annotated[str, AfterValidator(str.lower)],
        lease: Annotated[Lease, Locked("x:{value}")],
    ) -> str:
        return lease.name

    async with asking(app) as http:
        assert (await http.post("/", params={"value": "Mixed"})).status_code == 422


async def test_body_is_still_there_for_the_handler(client: Client) -> None:
    app = FastAPI()
    app.dependency_overrides[LockClient] = lambda: client

    @app.post("/")
    async def handler(asked: Asked, request: Request, lease: LOCK) -> list[Any]:
        return [asked.order_id, await request.json(), lease.name]

    async with asking(app) as http:
        answer = await http.post("/", json={"order_id": "07"})
    assert answer.json() == [7, {"order_id": "07"}, "order:7"]
