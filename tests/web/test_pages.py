"""What the page shows of a store, and how strangers' texts come out."""

from __future__ import annotations

import asyncio
import re
from html.parser import HTMLParser

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

import aiodlock
import aiodlock.web
from aiodlock.web import _view, _watch

from ..conftest import MakeClient
from ..scenes import until, until_waiting
from ..servers import Store
from .conftest import Visit

#: What people who want to do harm call things.
HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    "javascript:alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "</textarea></title><!--",
    "line\nbreak\r\ndata: event",
    "\x00nul",
    "\u202egpj.exe",
    "ключ 🔑",
    "a&b=c#d?e/../f",
)


class Tags(HTMLParser):
    """All tags and attributes of a page, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.links: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action")]

    def handle_data(self, data: str) -> None:
        self.text += data


def check_harmless(html: str) -> Tags:
    found = Tags(html)
    assert not {"img", "iframe", "object", "style"} & set(found.tags)
    assert found.tags.count("svg") == found.tags.count("figure")  # the page's own pictures
    assert found.tags.count("script") <= 1
    assert not [name for name in found.attributes if name.startswith("on")]
    for link in found.links:
        assert re.match(r"(\./|name\?|break\?|page\.|icon\.|$)", link), link
    return found


async def test_holders_and_waiters_of_every_store_are_shown(
    client: aiodlock.Client, make_client: MakeClient, visit: Visit
) -> None:
    other = await make_client()
    lock = client.lock("order:42", owner="billing")
    async with lock as lease, visit(aiodlock.web.app(client)) as http:
        waiting = asyncio.create_task(other.lock("order:42").acquire())
        await until_waiting(client, "order:42")
        shown = Tags((await http.get("/")).text).text
        for what in ("order:42", "exclusive", "billing", str(lease.token)):
            assert what in shown
        one = Tags((await http.get("/name", params={"n": "order:42"})).text).text
        assert "held (exclusive)" in one
        assert "billing" in one
        assert "Nobody waits" not in one
        waiting.cancel()
        await asyncio.wait({waiting})


@pytest.mark.stores("memory")
async def test_notes_and_descriptions_are_shown_as_text_everywhere(
    make_client: MakeClient, visit: Visit
) -> None:
    note, description = "<b>note</b>\u202e{{ 7 * 7 }}", "<img src=x onerror=alert(1)>\n& co"
    client = await make_client(description=description)
    lock = client.lock("x", note=note)
    async with lock, visit(aiodlock.web.app(client, read_only=False)) as http:
        waiting = asyncio.create_task(client.lock("x", note=note).acquire())
        await until_waiting(client, "x")
        for page, times in (("/", 1), ("/name?n=x", 2), ("/break?n=x", 1)):
            shown = check_harmless((await http.get(page)).text).text
            assert shown.count(r"<b>note</b>\u202e{{ 7 * 7 }}") == times, page
            assert shown.count(r"<img src=x onerror=alert(1)>\n& co") == times, page
    await (await waiting).release()


@pytest.mark.stores("memory", "valkey9")
async def test_hostile_names_and_owners_are_text_everywhere(
    client: aiodlock.Client, visit: Visit
) -> None:
    leases = [
        await client.lock(name, owner=f"{name}{number}").acquire()
        for number, name in enumerate(HOSTILE)
    ]
    async with visit(aiodlock.web.app(client, read_only=False)) as http:
        shown = check_harmless((await http.get("/")).text)
        assert "<script>alert(1)</script>" in shown.text
        assert "{{ 7 * 7 }}{% raw %}" in shown.text
        for name in HOSTILE:
            for page in ("/name", "/break"):
                answer = await http.get(page, params={"n": name})
                assert answer.status_code == 200
                one = check_harmless(answer.text)
                assert "held (exclusive)" in one.text
            found = check_harmless((await http.get("/", params={"match": name})).text)
            assert "to 1 of 1" in found.text or any(c in name for c in "*?["), name
    for lease in leases:
        await lease.release()


@pytest.mark.stores("memory")
async def test_text_that_could_deceive_is_escaped(client: aiodlock.Client, visit: Visit) -> None:
    async with client.lock("\u202egpj.exe"), visit(aiodlock.web.app(client)) as http:
        shown = (await http.get("/")).text
    assert "\u202e" not in shown
    assert "\\u202egpj.exe" in shown


@pytest.mark.stores("memory")
async def test_wrong_queries_show_a_page(client: aiodlock.Client, visit: Visit) -> None:
    async with client.lock("x"), visit(aiodlock.web.app(client)) as http:
        for query in ("page=0", "page=-1", "page=x", "page=999999", "sort=drop", "match=%FF%00"):
            assert (await http.get(f"/?{query}")).status_code == 200, query
        assert "No name matches" in (await http.get("/?match=nothing")).text
        for query in ("", "?n=", "?n=" + "x" * 513):
            assert (await http.get(f"/name{query}")).status_code == 400
        assert (await http.get("/nothing")).status_code == 404


@pytest.mark.stores("memory")
async def test_a_part_of_a_name_or_a_glob_filters(client: aiodlock.Client, visit: Visit) -> None:
    async with (
        client.lock("order:1"),
        client.lock("order:2"),
        client.lock("reorder"),
        visit(aiodlock.web.app(client)) as http,
    ):
        for match, number in (("order", 3), ("ORDER:", 2), ("order:*", 2), ("order:[2]", 1)):
            assert f"of {number}</span>" in (await http.get("/", params={"match": match})).text


@pytest.mark.stores("memory")
async def test_many_names_come_in_pages_and_sorted(client: aiodlock.Client, visit: Visit) -> None:
    leases = [await client.lock(f"name:{number:03}").acquire() for number in range(120)]
    waiting = asyncio.create_task(client.lock("name:077").acquire())
    await until_waiting(client, "name:077")
    async with visit(aiodlock.web.app(client)) as http:
        longest = Tags((await http.get("/")).text).text
        assert longest.index("name:077") < longest.index("name:000")
        seen = []
        for page in (1, 2, 3):
            text = (await http.get("/", params={"sort": "name", "page": page})).text
            seen += re.findall(r">(name:\d+)</a>", text)
        assert seen == [f"name:{number:03}" for number in range(120)]
    waiting.cancel()
    await asyncio.wait({waiting})
    for lease in leases:
        await lease.release()


@pytest.mark.stores("memory")
async def test_page_works_under_a_path(client: aiodlock.Client, visit: Visit) -> None:
    app = Starlette(
        routes=[Mount("/ops", Starlette(routes=[Mount("/locks", aiodlock.web.app(client))]))]
    )
    async with client.lock("x y"), visit(app) as http:
        answer = await http.get("/ops/locks", follow_redirects=True)
        assert answer.url.path == "/ops/locks/"
        for link in set(check_harmless(answer.text).links):
            assert (await http.get(answer.url.join(link))).status_code == 200, link


@pytest.mark.stores("memory")
async def test_a_client_that_is_not_open_is_told(visit: Visit) -> None:
    async with visit(aiodlock.web.app(aiodlock.Client("memory://"))) as http:
        assert "is not open: enter it first" in Tags((await http.get("/")).text).text
        assert (await http.get("/name?n=x")).status_code == 503


@pytest.mark.stores("valkey9")
async def test_page_says_when_the_store_is_away_and_that_it_is_back(
    client: aiodlock.Client,
    real_store: Store,
    visit: Visit,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_watch, "INTERVAL", 0.05)
    server = real_store.server
    assert server is not None
    async with client.lock("x"), visit(aiodlock.web.app(client)) as http:
        assert "failed" not in (await http.get("/")).text
        server.pause()

        async def told() -> bool:
            return "The last look at the store failed" in (await http.get("/")).text

        try:
            await until(told)
            assert ">x</a>" in (await http.get("/")).text
        finally:
            server.resume()

        async def back() -> bool:
            return not await told()

        await until(back)


@pytest.mark.stores("memory")
async def test_input_of_a_wrong_type_is_refused(client: aiodlock.Client) -> None:
    with pytest.raises(TypeError):
        aiodlock.web.app(client, read_only="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        aiodlock.web.app(client, hosts="example.com")


@pytest.mark.stores("memory")
async def test_time_of_a_look_is_told_in_milliseconds(client: aiodlock.Client) -> None:
    watch = _watch.Watch(client)
    watch.took = 0.05
    assert _view.state(watch)["took"] == "50 ms"
