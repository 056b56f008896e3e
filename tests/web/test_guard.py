"""Whom the page refuses: other hosts, other sites, forged and stale forms; and what it tells browsers."""

from __future__ import annotations

import asyncio
import re
from html import unescape
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

import aiodlock
import aiodlock.sync
import aiodlock.web
from aiodlock._model import Kind
from aiodlock.web import _app, _guard

from .conftest import HERE, Visit

pytestmark = pytest.mark.stores("memory")


async def form_of(http: httpx.AsyncClient, name: str = "x") -> dict[str, str]:
    """Open the confirmation, and return what its form would send."""
    page = (await http.get("/break", params={"n": name})).text
    fields = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page)
    return {field: unescape(value) for field, value in fields}


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:8470",
        "localhost:1",
        "LOCALHOST",
        "a.localhost",
        "[::1]:80",
        "10.0.0.9",
    ],
)
async def test_addresses_and_this_machine_are_expected(
    client: aiodlock.Client, visit: Visit, host: str
) -> None:
    async with visit(aiodlock.web.app(client)) as http:
        assert (await http.get("/", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8470", "localhost.evil.example", "127.0.0.1.evil.example"),
        *("", "127.0.0.1@evil.example", "evil.example#localhost", "localhost, evil.example"),
    ],
)
@pytest.mark.parametrize(
    "path", ["/", "/name?n=x", "/events", "/page.js", "/break?n=x", "/nothing"]
)
async def test_other_hosts_are_refused_everywhere(
    client: aiodlock.Client, visit: Visit, host: str, path: str
) -> None:
    async with client.lock("secret"), visit(aiodlock.web.app(client, read_only=False)) as http:
        answer = await http.get(path, headers={"host": host})
        assert answer.status_code == 400
        assert "secret" not in answer.text


async def test_hosts_that_were_given_are_expected(client: aiodlock.Client, visit: Visit) -> None:
    mine = {"host": "Locks.Example.com:8443"}
    async with visit(aiodlock.web.app(client, hosts=["locks.example.com"])) as http:
        assert (await http.get("/", headers=mine)).status_code == 200
        assert (await http.get("/", headers={"host": "other.example.com"})).status_code == 400
    async with visit(aiodlock.web.app(client, hosts=["*"])) as http:
        assert (await http.get("/", headers=mine)).status_code == 200


@pytest.mark.parametrize("path", ["/", "/name?n=x", "/page.css", "/page.js", "/nothing", "/name"])
async def test_every_answer_forbids_what_the_page_does_not_need(
    client: aiodlock.Client, visit: Visit, path: str
) -> None:
    async with visit(aiodlock.web.app(client)) as http:
        for method in ("GET", "OPTIONS", "POST"):
            headers = (await http.request(method, path, headers={"origin": HERE})).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-store"
            assert not [name for name in headers if name.startswith("access-control")]


async def test_other_sites_may_link_here_and_nothing_else(
    client: aiodlock.Client, visit: Visit
) -> None:
    elsewhere = {"sec-fetch-site": "cross-site"}
    async with visit(aiodlock.web.app(client)) as http:
        assert (await http.get("/events", headers=elsewhere)).status_code == 403
        assert (await http.get("/page.js", headers=elsewhere)).status_code == 403
        link = {**elsewhere, "sec-fetch-mode": "navigate"}
        assert (await http.get("/", headers=link)).status_code == 200


async def test_read_only_page_breaks_nothing(client: aiodlock.Client, visit: Visit) -> None:
    async with client.lock("x") as lease, visit(aiodlock.web.app(client)) as http:
        assert "reak" not in (await http.get("/name?n=x")).text
        assert (await http.get("/break?n=x")).status_code == 404
        assert (await http.post("/break?n=x", data={"held": "1"})).status_code == 404
        assert not http.cookies
        assert lease.held


async def test_confirmed_break_ends_the_hold_and_says_so(
    client: aiodlock.Client, visit: Visit, caplog: pytest.LogCaptureFixture
) -> None:
    name = "x\r\ny <b>"
    lease = await client.lock(name).acquire()
    async with visit(aiodlock.web.app(client, read_only=False)) as http:
        opened = await http.get("/break", params={"n": name})
        cookie = opened.headers["set-cookie"]
        for flag in ("HttpOnly", "SameSite=Strict"):
            assert flag in cookie
        answer = await http.post(
            "/break",
            params={"n": name},
            data=await form_of(http, name),
            headers={"origin": HERE, "sec-fetch-site": "same-origin"},
        )
        assert answer.status_code == 303
        assert (await lease.wait_lost()).reason == "broken"
        told = await http.get(answer.headers["location"])
        assert "1 holder lost it" in told.text
    assert "broken_by_hand" in [getattr(record, "event", "") for record in caplog.records]


async def test_byte_that_is_no_text_in_the_address_is_no_failure(client: aiodlock.Client) -> None:
    app = aiodlock.web.app(client, read_only=False)
    for path in ("/", "/name", "/break"):
        answers = await answers_to(app, path, b"n=\xff&q=\xff&sort=\xff&page=\xff&broken=\xff")
        assert answers[0]["status"] == 200


async def answers_to(app: Starlette, path: str, query: bytes = b"", **more: Any) -> list[Any]:
    """Ask as a server does."""
    scope = {"type": "http", "method": "GET", "path": path, "query_string": query, "scheme": "http"}
    scope |= {"headers": [(b"host", b"localhost")], "server": ("localhost", 80), "root_path": ""}
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope | more, receive, send)
    return sent


async def test_client_of_threads_is_refused() -> None:
    threads = aiodlock.sync.Client("memory://")
    with pytest.raises(TypeError, match=r"needs an aiodlock\.Client"):
        aiodlock.web.app(threads)  # type: ignore[arg-type]


async def nothing() -> None: ...


async def admins_only(request: Request) -> bool:
    if "x-user" not in request.headers:
        raise HTTPException(401, "log in first", {"WWW-Authenticate": "Basic"})
    return request.headers["x-user"] == "admin"


@pytest.mark.parametrize("place", ["app", "router", "inclusion"])
async def test_page_in_an_app_whose_dependencies_do_not_protect_it_is_closed(
    client: aiodlock.Client, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    depends = [Depends(nothing)]
    for allow in (None, admins_only):
        page = aiodlock.web.app(client, read_only=False, allow=allow)
        app = FastAPI(dependencies=depends if place == "app" else [])
        router = APIRouter(dependencies=depends if place == "router" else [])
        (app if place == "app" else router).mount("/locks", page)
        app.include_router(router, dependencies=depends if place == "inclusion" else [])
        transport = httpx.ASGITransport(app)
        async with (
            client.lock("alice@example.com"),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
        ):
            paths = ("", "name?n=alice@example.com", "break?n=alice@example.com", "events")
            for user, status in ((None, 401), ("admin", 200), ("bob", 403)):
                headers = {} if user is None else {"x-user": user}
                for path in paths[: 3 if status == 200 else 4]:
                    answer = await http.get(f"/locks/{path}", headers=headers)
                    if allow is None:
                        assert answer.status_code in (403, 404)  # older ones include no mounts
                        assert "alice" not in answer.text
                    elif answer.status_code != 404 or place == "app":
                        assert answer.status_code == status
                        assert ("alice" in answer.text) == (status == 200)
        if allow is None and place == "app":
            assert "page_unprotected" in [getattr(one, "event", "") for one in caplog.records]


async def test_page_in_an_app_in_an_app_with_dependencies_is_closed(
    client: aiodlock.Client,
) -> None:
    for inner in (FastAPI(), Starlette()):
        inner.mount("/locks", aiodlock.web.app(client))
        app = FastAPI(dependencies=[Depends(nothing)])
        app.mount("/inner", inner)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            assert (await http.get("/inner/locks/")).status_code == 403


async def test_allow_that_is_no_function_is_refused(client: aiodlock.Client) -> None:
    with pytest.raises(TypeError, match="allow must be a function"):
        aiodlock.web.app(client, allow="admin")  # type: ignore[arg-type]


async def test_page_in_a_fastapi_app_without_dependencies_is_open(client: aiodlock.Client) -> None:
    app = FastAPI()
    app.mount("/locks", aiodlock.web.app(client))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        assert (await http.get("/locks/")).status_code == 200


@pytest.mark.parametrize("answer", [False, None, 1, "yes"])
async def test_only_true_lets_in(client: aiodlock.Client, answer: Any, visit: Visit) -> None:
    async with visit(aiodlock.web.app(client, allow=lambda request: answer)) as http:
        assert (await http.get("/")).status_code == 403


async def test_holder_that_comes_while_the_answer_is_on_its_way_is_spared(
    client: aiodlock.Client, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = await client.lock("x", owner="shown").acquire()
    page = aiodlock.web.app(client, read_only=False)
    inspect = client.inspect
    came: list[aiodlock.Lease] = []

    async def seen_too_soon(name: str, *, kind: Kind) -> aiodlock.LockInfo:
        info = await inspect(name, kind=kind)
        await shown.release()
        came.append(await client.lock(name, owner="next").acquire())
        return info

    async with visit(page) as http:
        form = await form_of(http)
        monkeypatch.setattr(client, "inspect", seen_too_soon)
        answer = await http.post("/break?n=x", data=form, headers={"origin": HERE})
    assert answer.status_code == 409
    await came[0].extend()
    await came[0].release()


async def test_forged_forms_break_nothing(client: aiodlock.Client, visit: Visit) -> None:
    app = aiodlock.web.app(client, read_only=False)
    lease = await client.lock("x").acquire()
    async with client.lock("y"), visit(app) as http:
        form = await form_of(http)

        async def post(data: dict[str, str], **more: str) -> int:
            headers = {"origin": HERE, **{key.replace("_", "-"): v for key, v in more.items()}}
            return (await http.post("/break?n=x", data=data, headers=headers)).status_code

        assert await post({}) == 403
        assert await post({**form, "code": ""}) == 403
        assert await post({**form, "code": form["code"][:-1] + "é"}) == 403
        assert await post({**form, "code": (await form_of(http, "y"))["code"]}) == 403
        assert await post({**form, "held": "1"}) == 403
        assert await post(form, origin="http://evil.example") == 403
        assert await post(form, origin="null") == 403
        assert await post(form, sec_fetch_site="cross-site") == 403
        assert await post(form, sec_fetch_site="same-site") == 403
        assert await post(form, content_type="text/plain") == 403
        assert await post({**form, "more": "x" * 100_000}) == 403
        async with visit(app) as another_browser:
            answer = await another_browser.post("/break?n=x", data=form)
            assert answer.status_code == 403
            answer = await another_browser.post(
                "/break?n=x", data=form, headers={"cookie": "aiodlock_web="}
            )
            assert answer.status_code == 403
        assert (await http.get("/break?n=x&" + "&".join(f"{k}={v}" for k, v in form.items()))).text
        assert lease.held
        assert await post(form) == 303
        assert (await lease.wait_lost()).reason == "broken"
        with pytest.raises(aiodlock.LockLost):
            await lease.release()


async def test_holders_who_came_after_the_confirmation_are_spared(
    client: aiodlock.Client, visit: Visit
) -> None:
    async with visit(aiodlock.web.app(client, read_only=False)) as http:
        async with client.lock("x"):
            form = await form_of(http)
        async with client.lock("x") as later:
            answer = await http.post("/break?n=x", data=form, headers={"origin": HERE})
            assert answer.status_code == 409
            assert later.held


async def test_who_joined_an_owner_after_the_confirmation_is_spared(
    client: aiodlock.Client, visit: Visit
) -> None:
    async with visit(aiodlock.web.app(client, read_only=False)) as http:
        async with client.lock("x", owner="both"):
            form = await form_of(http)
            later = await client.lock("x", owner="both").acquire()
            answer = await http.post("/break?n=x", data=form, headers={"origin": HERE})
            assert answer.status_code == 409
            assert later.held
            await later.release()


async def test_form_is_as_short_for_many_readers_as_for_one(
    client: aiodlock.Client, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_app, "_LONGEST_FORM", 500)
    read = client.rwlock("x").read
    leases = [await asyncio.create_task(read.acquire()) for _ in range(50)]
    async with visit(aiodlock.web.app(client, read_only=False)) as http:
        form = await form_of(http)
        answer = await http.post("/break?n=x", data=form, headers={"origin": HERE})
        assert answer.status_code == 303
    assert {(await lease.wait_lost()).reason for lease in leases} == {"broken"}


async def test_cookie_stays_under_the_path_of_the_page(
    client: aiodlock.Client, visit: Visit
) -> None:
    app = Starlette(routes=[Mount("/locks", aiodlock.web.app(client, read_only=False))])
    async with client.lock("x"), visit(app, "https://127.0.0.1") as http:
        cookie = (await http.get("/locks/break?n=x")).headers["set-cookie"]
        assert "Secure" in cookie
        assert [kept.path for kept in http.cookies.jar] == ["/locks"]


@pytest.mark.parametrize(
    ("outside", "inside"),
    [("", ""), ("", "/locks"), ("/locks", ""), ("/locks", "/locks"), ("/admin/locks", "/locks")],
)
async def test_page_breaks_locks_behind_a_proxy_that_changes_its_path(
    client: aiodlock.Client, visit: Visit, outside: str, inside: str
) -> None:
    page = aiodlock.web.app(client, read_only=False)
    app = Starlette(routes=[Mount(inside, page)])

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        path = inside + scope["path"].removeprefix(outside)
        await app({**scope, "path": path, "raw_path": path.encode()}, receive, send)

    lease = await client.lock("x").acquire()
    async with visit(proxy, HERE + outside) as http:
        form = await form_of(http)
        answer = await http.post("/break?n=x", data=form, headers={"origin": HERE})
        assert answer.status_code == 303
    assert (await lease.wait_lost()).reason == "broken"


def test_codes_of_different_things_differ() -> None:
    assert _guard.code_for("s", "a", "bc") != _guard.code_for("s", "ab", "c")
    assert not _guard.is_code_for("", None, "a")


@pytest.mark.parametrize(
    "host",
    ["https://a.example", "a.example:8443", "", "*.example", "a.example/locks", "münchen.de"],
)
def test_host_that_no_request_can_name_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="hosts must be names"):
        aiodlock.web.app(aiodlock.Client("memory://"), hosts=["b.example", host])
