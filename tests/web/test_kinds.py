"""All kinds on the page: what it shows and breaks of each, also where they have the same name."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from html import unescape

import httpx
import pytest

import aiodlock
import aiodlock.web
from aiodlock._clock import now
from aiodlock._model import Kind
from aiodlock.web import _sightings, _view, _watch

from ..conftest import MakeClient
from ..fastapi.conftest import serve_app
from ..scenes import until, until_waiting
from .conftest import HERE, Visit
from .test_live import watching
from .test_pages import HOSTILE, Tags, check_harmless

_TWO = pytest.mark.stores("memory", "valkey9")


async def text_of(http: httpx.AsyncClient, page: str) -> str:
    answer = await http.get(page)
    assert answer.status_code == 200, page
    return check_harmless(answer.text).text


async def post_break(http: httpx.AsyncClient, query: str) -> httpx.Response:
    """Open the page that asks, and confirm."""
    asked = await http.get(f"/break{query}")
    action = unescape(re.findall(r'action="([^"]+)"', asked.text)[0])
    fields = dict(re.findall(r'name="(held|code)" value="([^"]+)"', asked.text))
    return await http.post(f"/{action}", data=fields, headers={"origin": HERE})


@pytest.mark.stores("memory", "valkey9", "postgres", "etcd")
async def test_each_kind_is_listed_and_has_a_page(client: aiodlock.Client, visit: Visit) -> None:
    async with (
        client.lock("x", owner="of-the-lock"),
        client.semaphore("x", 2, note="of-the-semaphore"),
        client.once("x", keep=60, note="of-once"),
        client.once("done", keep=600),
        visit(aiodlock.web.app(client)) as http,
    ):
        shown = (await http.get("/")).text
        links = {unescape(link) for link in re.findall(r'href="(name[^"]+)"', shown)}
        of_kinds = ("", "&kind=semaphore", "&kind=once")
        assert {f"name?n=x{kind}" for kind in of_kinds} <= links
        words = ("of-the-lock", "of-the-semaphore", "of-once")
        for kind, word in zip(of_kinds, words, strict=True):
            one = await text_of(http, f"/name?n=x{kind}")
            assert [other in one for other in words] == [other == word for other in words]
        for kind, word in zip(("lock", "semaphore", "once"), words, strict=True):
            rows = Tags((await http.get(f"/?kind={kind}")).text).text
            assert [other in rows for other in words] == [other == word for other in words]


@pytest.mark.stores("memory", "valkey9", "postgres", "etcd")
async def test_success_on_record_is_shown_and_cannot_be_broken(
    client: aiodlock.Client, visit: Visit
) -> None:
    async with client.once("nightly", keep=7_300):
        pass
    async with visit(aiodlock.web.app(client, read_only=False)) as http:
        rows = await text_of(http, "/")
        assert re.search(r"nightly\s+once\s+recorded [\d.]+ s ago, kept for 2 h 1 min", rows)
        one = await text_of(http, "/name?n=nightly&kind=once")
        assert re.search(r"done: the success is on record, [\d.]+ s ago, kept for 2 h 1 min", one)
        assert "Break this" not in one
    assert (await client.inspect("nightly", kind="once")).recorded


@pytest.mark.stores("memory", "valkey9", "postgres", "etcd")
async def test_only_the_kind_that_was_shown_is_broken(
    client: aiodlock.Client, visit: Visit
) -> None:
    lock = await client.lock("x").acquire()
    slots = [await client.semaphore("x", 2).acquire() for _ in range(2)]
    ended = asyncio.Event()

    async def run() -> None:
        async with client.once("x", keep=60, on_lost="flag"):
            await ended.wait()

    running = asyncio.create_task(run())

    async def runs() -> bool:
        return bool((await client.inspect("x", kind="once")).holders)

    await until(runs)
    app = aiodlock.web.app(client, read_only=False)
    async with visit(app) as http:
        answer = await post_break(http, "?n=x&kind=semaphore")
        assert (answer.status_code, answer.headers["location"]) == (
            303,
            "name?n=x&kind=semaphore&broken=2",
        )
        for slot in slots:
            assert (await slot.wait_lost()).reason == "broken"
        await lock.extend()
        assert (await post_break(http, "?n=x&kind=once")).status_code == 303
        assert (await client.inspect("x", kind="once")).holders == ()
        await lock.extend()
    ended.set()
    assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], aiodlock.LockLost)
    await lock.release()


@_TWO
async def test_form_of_one_kind_breaks_no_other(client: aiodlock.Client, visit: Visit) -> None:
    app = aiodlock.web.app(client, read_only=False)
    async with client.lock("x") as lock, client.semaphore("x", 1) as slot, visit(app) as http:
        asked = await http.get("/break?n=x&kind=semaphore")
        fields = dict(re.findall(r'name="(held|code)" value="([^"]+)"', asked.text))
        for query in (
            "?n=x",
            "?n=x&kind=once",
            "?n=x&kind=lock",
            "?n=x&kind=nothing",
            "?n=x&kind=",
        ):
            answer = await http.post(f"/break{query}", data=fields, headers={"origin": HERE})
            assert answer.status_code == 403, query
        await lock.extend()
        await slot.extend()


@_TWO
async def test_unknown_kind_is_refused_and_in_the_list_left_out(
    client: aiodlock.Client, visit: Visit
) -> None:
    app = aiodlock.web.app(client, read_only=False)
    async with client.lock("x"), visit(app) as http:
        for kind in ("", "Lock", "lock%00", "semaphores", "%3Cscript%3E", "x" * 5_000):
            for page in ("name", "break", "events"):
                assert (await http.get(f"/{page}?n=x&kind={kind}")).status_code == 400, kind
            assert "to 1 of 1" in await text_of(http, f"/?kind={kind}")


@pytest.mark.stores("quorum")
async def test_kind_that_the_store_has_not_is_no_page(
    client: aiodlock.Client, visit: Visit
) -> None:
    kinds = client._core.kinds()
    async with client.lock("x"), visit(aiodlock.web.app(client)) as http:
        shown = (await http.get("/")).text
        assert "to 1 of 1" in shown
        for kind in ("lock", "semaphore", "once"):
            answer = await http.get(f"/name?n=x&kind={kind}")
            assert answer.status_code == (200 if kind in kinds else 400), kind
            assert (f'<option value="{kind}"' in shown) == (kind in kinds)


@_TWO
async def test_free_name_has_no_break_button_and_a_form_for_it_breaks_nobody(
    client: aiodlock.Client, visit: Visit
) -> None:
    app = aiodlock.web.app(client, read_only=False)
    lease = await client.lock("x").acquire()
    async with visit(app) as http:
        assert 'id="break"' in (await http.get("/name?n=x")).text
        await lease.release()
        assert 'id="break"' not in (await http.get("/name?n=x")).text
        asked = (await http.get("/break?n=x")).text
        assert "nothing to break" in asked
        assert "<form" not in asked


@_TWO
async def test_closed_name_can_be_opened(client: aiodlock.Client, visit: Visit) -> None:
    async with client.lock("x", hold_at_least=600):
        pass
    async with visit(aiodlock.web.app(client, read_only=False)) as http:
        assert 'id="break"' in (await http.get("/name?n=x")).text
        assert (await post_break(http, "?n=x")).status_code == 303
    assert not (await client.inspect("x")).closed


@_TWO
async def test_leaders_stand_for_their_values(client: aiodlock.Client, visit: Visit) -> None:
    async with (
        client.election("chief").lead(value="<b>host-7</b>"),
        visit(aiodlock.web.app(client)) as http,
    ):
        for page in ("/", "/name?n=chief"):
            shown = await text_of(http, page)
            assert "stands for <b>host-7</b>" in shown
            assert "leader:" not in shown


@_TWO
async def test_time_held_is_what_the_store_tells_also_at_the_first_look(
    client: aiodlock.Client, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's own clock, or a token that is no time, plays no part."""
    inspect = client.inspect

    async def aged(name: str, *, kind: Kind) -> aiodlock.LockInfo:
        info = await inspect(name, kind=kind)
        holders = tuple(replace(one, holding=3_723.0, token=17) for one in info.holders)
        return replace(info, holders=holders)

    async with client.lock("x"), visit(aiodlock.web.app(client)) as http:
        monkeypatch.setattr(client, "inspect", aged)
        assert "1 h 2 min" in await text_of(http, "/name?n=x")


@pytest.mark.stores("memory", "zookeeper")
async def test_what_a_store_does_not_tell_is_called_unknown(
    client: aiodlock.Client, make_client: MakeClient, visit: Visit
) -> None:
    other = await make_client()
    known = client._core.store.capabilities.waiting_known
    async with client.lock("x"), visit(aiodlock.web.app(client)) as http:
        waiting = asyncio.create_task(other.lock("x").acquire())
        await until_waiting(client, "x")
        app_text = await text_of(http, "/")
        assert ("unknown" in app_text) == (not known)
        one = await text_of(http, "/name?n=x")
        assert ("unknown" in one) == (not known)
        assert ("≥ " in one) == (not known)  # since the page saw it
        waiting.cancel()
        await asyncio.wait({waiting})


@_TWO
async def test_overdue_lease_is_marked_at_the_first_look(
    client: aiodlock.Client, visit: Visit
) -> None:
    kept = await client.lock("kept", ttl=9, on_lost="flag").acquire()
    left = await client.lock("left", ttl=6, auto_extend=False, on_lost="flag").acquire()
    await until(lambda: left.remaining() < 2.5)
    async with visit(aiodlock.web.app(client)) as http:
        shown = await text_of(http, "/")
        # Once beside the times, and once where a narrow screen shows them.
        assert shown.count("overdue") == 2
        assert (await text_of(http, "/name?n=left")).count("overdue") == 1
        assert "overdue" not in await text_of(http, "/name?n=kept")
    assert kept.held
    await kept.release()


@pytest.mark.stores("memory")
async def test_store_and_prefix_are_in_title_and_header_without_a_password(visit: Visit) -> None:
    url = "redis://someone:secret@127.0.0.1:1/5?password=secret"
    client = aiodlock.Client(url, prefix="staging")
    async with visit(aiodlock.web.app(client)) as http:
        for page in ("/", "/name?n=x", "/break?n=x"):
            shown = (await http.get(page)).text
            if page == "/":
                assert (
                    "<title>Locks · redis://127.0.0.1:1/5, prefix staging · aiodlock</title>"
                    in shown
                )
                assert shown.count("redis://127.0.0.1:1/5, prefix staging") >= 2
            assert "secret" not in shown
            assert "someone" not in shown


@pytest.mark.stores("memory")
async def test_losses_are_all_listed_or_it_is_said_how_many_there_were(
    client: aiodlock.Client, visit: Visit
) -> None:
    app = aiodlock.web.app(client)
    seen = app.state.pages.watch.seen

    def lose(count: int) -> None:
        for number in range(count):
            loss = _sightings.Loss(("lock", f"x:{seen.lost}"), "c", number, now(), "not extended")
            seen.lose(loss)
            seen.lose(loss)  # a hook may tell it too

    async with visit(app) as http:
        lose(27)
        shown = (await http.get("/")).text
        assert ">27</dd>" in shown
        assert shown.count(" token ") == 27
        lose(1_000)
        shown = (await http.get("/")).text
        assert ">1,027</dd>" in shown
        assert "the last 50 of 1,027" in shown
        assert shown.count(" token ") == 50


@pytest.mark.stores("memory")
async def test_few_of_a_kind_are_not_crowded_out_by_many_of_another(
    client: aiodlock.Client, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_watch, "MOST_NAMES", 10)
    leases = [await client.lock(f"name:{number}").acquire() for number in range(25)]
    async with client.semaphore("rare", 1), visit(aiodlock.web.app(client)) as http:
        shown = await text_of(http, "/?sort=name")
        assert "rare" in shown
        assert "16 more names" in shown
    for lease in leases:
        await lease.release()


@pytest.mark.stores("memory")
async def test_queries_tell_kinds_apart() -> None:
    query = _view.Query.read({"kind": "semaphore", "match": "a&b", "sort": "held"})
    assert query.link(2) == "?match=a%26b&kind=semaphore&sort=held&page=2"
    assert _view.Query.read({"kind": "x"}) == _view.Query()


LONGEST = ("x" * 512, "é" * 256, "\n" * 512, "<" * 512, "%" * 512)


@_TWO
async def test_hostile_and_longest_names_of_each_kind_lead_to_their_own_page(
    client: aiodlock.Client, visit: Visit
) -> None:
    names = (*HOSTILE, *LONGEST, "x&kind=once", "x?n=y&kind=lock", "x;kind=semaphore#kind")
    slots = [await client.semaphore(name, 1, note=name[:40]).acquire() for name in names]
    async with visit(aiodlock.web.app(client, read_only=False)) as http:
        found = await http.get("/?kind=semaphore")
        check_harmless(found.text)
        links = {unescape(link) for link in re.findall(r'href="(name\?[^"]+)"', found.text)}
        assert len(links) == len(names)
        for link in links:
            one = await http.get(f"/{link}")
            assert "held by 1 holder" in check_harmless(one.text).text
            assert 'id="break"' in one.text
    for name, slot in zip(names, slots, strict=True):
        async with visit(aiodlock.web.app(client, read_only=False)) as http:
            query = str(httpx.QueryParams({"n": name, "kind": "semaphore"}))
            assert (await post_break(http, f"?{query}")).status_code == 303
        assert (await slot.wait_lost()).reason == "broken"


@_TWO
async def test_streams_of_one_name_show_each_its_kind(client: aiodlock.Client) -> None:
    async with (
        client.lock("x", note="of-the-lock"),
        client.semaphore("x", 2, note="of-the-semaphore"),
        serve_app(aiodlock.web.app(client)) as http,
        watching(http, n="x") as lock,
        watching(http, n="x", kind="semaphore") as semaphore,
        watching(http, kind="semaphore") as rows,
    ):
        for _ in range(3):
            assert "of-the-lock" in (shown := (await anext(lock))["one"])
            assert "of-the-semaphore" not in shown
            assert "of-the-semaphore" in (shown := (await anext(semaphore))["one"])
            assert "of-the-lock" not in shown
            assert "of-the-semaphore" in (shown := (await anext(rows))["rows"])
            assert "of-the-lock" not in shown


@_TWO
async def test_page_goes_on_when_the_stores_clock_was_set_back(
    client: aiodlock.Client, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are then ahead of the clock, so the store cannot tell since when a name is held."""
    inspect = client._core.inspect_many

    async def set_back(names: list[str], kind: Kind) -> list[aiodlock.LockInfo]:
        infos = await inspect(names, kind)
        return [
            replace(info, holders=tuple(replace(one, holding=None) for one in info.holders))
            for info in infos
        ]

    async with client.lock("x"), visit(aiodlock.web.app(client)) as http:
        monkeypatch.setattr(client._core, "inspect_many", set_back)
        assert re.search(r"≥ \d\.\d s", await text_of(http, "/"))


@_TWO
async def test_other_sites_form_for_a_semaphore_breaks_nothing(
    client: aiodlock.Client, visit: Visit
) -> None:
    app = aiodlock.web.app(client, read_only=False)
    async with client.semaphore("x", 1) as slot, visit(app) as http, visit(app) as stranger:
        asked = await http.get("/break?n=x&kind=semaphore")
        fields = dict(re.findall(r'name="(held|code)" value="([^"]+)"', asked.text))
        for who, origin in ((http, "http://evil.example"), (stranger, HERE)):
            answer = await who.post(
                "/break?n=x&kind=semaphore", data=fields, headers={"origin": origin}
            )
            assert answer.status_code == 403
        # The form says a kind of its own: only the address counts.
        sent = {**fields, "kind": "lock", "n": "y"}
        answer = await http.post("/break?n=x&kind=once", data=sent, headers={"origin": HERE})
        assert answer.status_code == 403
        await slot.extend()
