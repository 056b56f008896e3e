"""The page in a real Chromium, by clicking."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import aiodlock
import aiodlock.web
from aiodlock.web import _watch

from ..browser import Browser, open_browser
from ..fastapi.conftest import serve_app
from ..scenes import until, until_waiting

pytestmark = [pytest.mark.stores("memory"), pytest.mark.xdist_group("browser")]

_LOOKS = "return Number(document.querySelector('[data-live]').dataset.looks) >= 2"
_NARROW = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


class Page:
    """The browser, driven from beside the event loop that serves the page."""

    def __init__(self, browser: Browser, base: str) -> None:
        self._browser = browser
        self.base = base

    async def do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(functools.partial(call, *arguments))

    async def open(self, path: str = "/") -> None:
        await self.do(self._browser.open, self.base + path)

    async def click(self, selector: str) -> None:
        await self.do(self._browser.click, selector)

    async def type(self, selector: str, text: str) -> None:
        await self.do(self._browser.type, selector, text)

    async def until(self, script: str) -> None:
        await self.do(self._browser.until, script)

    async def sees(self, text: str) -> None:
        await self.do(
            self._browser.until, "return document.body.innerText.includes(arguments[0])", text
        )

    async def text(self, selector: str) -> str:
        found: str = await self.do(
            self._browser.run, "return document.querySelector(arguments[0]).innerText", selector
        )
        return found

    async def ask(self, script: str) -> Any:
        return await self.do(self._browser.run, script)

    async def complaints(self) -> list[str]:
        return [entry["message"] for entry in await self.do(self._browser.log)]

    async def resize(self, width: int, height: int) -> None:
        await self.do(self._browser.resize, width, height)


@pytest.fixture
async def page(
    client: aiodlock.Client, chromium: Browser, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Page]:
    # The browser takes some tenths of a second for a click, during which the link must not be replaced.
    monkeypatch.setattr(_watch, "INTERVAL", 0.5)
    async with serve_app(aiodlock.web.app(client, read_only=False)) as http:
        opened = Page(chromium, str(http.base_url).rstrip("/"))
        await opened.resize(1200, 900)
        yield opened
        # No script was refused, nothing was missing, and no stream holds the server up.
        complaints = await opened.complaints()
        await opened.do(chromium.open, "about:blank")
        assert not complaints


async def test_rows_come_and_go_while_the_page_is_open(client: aiodlock.Client, page: Page) -> None:
    await page.open()
    await page.sees("No lock is held or waited for.")
    async with client.lock("order:42"):
        await page.sees("order:42")
        await page.until("return document.querySelector('#live').innerText === 'live'")
    await page.sees("No lock is held or waited for.")


async def test_break_by_clicking(client: aiodlock.Client, page: Page) -> None:
    lease = await client.lock("order:42", on_lost="flag").acquire()
    waiting = asyncio.create_task(client.lock("order:42").acquire())
    await until_waiting(client, "order:42")
    await page.open()
    await page.sees("order:42")
    await page.click("td.name a")
    await page.sees("held (exclusive)")
    await page.click("#break")
    await page.sees("may still be writing")
    await page.click(".cancel")
    await page.sees("held (exclusive)")
    assert lease.held
    await page.click("#break")
    await page.click("#confirm")
    await page.sees("Broken: 1 holder lost it.")
    await until(lambda: not lease.held)
    assert (await waiting).held
    await (await waiting).release()
    await page.sees("Nobody holds it.")


async def test_filter_while_typing(client: aiodlock.Client, page: Page) -> None:
    names = [f"order:{number}" for number in range(60)] + ["invoice:7"]
    leases = [await client.lock(name).acquire() for name in names]
    await page.open()
    await page.sees("1 to 50 of 61")
    await page.type("input[name=match]", "invoice")
    await page.sees("1 to 1 of 1")
    assert "order:" not in await page.text("#rows")
    assert (await page.ask("return location.search")) == "?match=invoice"
    assert await page.ask("return document.activeElement.name") == "match"
    await page.type("input[name=match]", "nothing<b>")
    await page.sees("No name matches nothing<b>.")
    await page.type("input[name=match]", "order:*")
    await page.sees("1 to 50 of 60")
    await page.click(".pages a")
    await page.sees("51 to 60 of 60")
    for lease in leases:
        await lease.release()


async def test_hostile_name_runs_nothing(client: aiodlock.Client, page: Page) -> None:
    name = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
    async with client.lock(name, owner=name):
        await page.open()
        await page.until(_LOOKS)
        assert name in await page.text("#rows")
        await page.click("td.name a")
        await page.until(_LOOKS)
        assert (await page.text("h1")) == name
        assert "hacked" not in (await page.ask("return document.title.split('<')[0]"))
        assert (
            await page.ask("return document.querySelectorAll('main img, main script').length") == 0
        )


async def test_selected_text_stays_while_rows_change(client: aiodlock.Client, page: Page) -> None:
    async with client.lock("order:42"):
        await page.open()
        await page.until(_LOOKS)
        await page.ask("getSelection().selectAllChildren(document.querySelector('td.name'))")
        before = await page.ask("return document.querySelector('[data-live]').dataset.looks")
        async with client.lock("order:43"):
            await asyncio.sleep(1.2)
            assert await page.ask("return getSelection().toString().trim()") == "order:42"
            assert before == await page.ask(
                "return document.querySelector('[data-live]').dataset.looks"
            )
            await page.ask("getSelection().removeAllRanges()")
            await page.sees("order:43")


async def test_nothing_is_asked_while_the_page_is_hidden(
    client: aiodlock.Client, page: Page, chromium: Browser
) -> None:
    app_watch = client._core.hooks  # the page's own listener is the last one
    assert app_watch
    await page.open()
    await page.until(_LOOKS)
    hide = """Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true});
    document.dispatchEvent(new Event('visibilitychange'));"""
    await page.do(chromium.run, hide.replace("arguments[0]", "true"))
    await page.sees("paused")
    await page.do(chromium.run, hide.replace("arguments[0]", "false"))
    async with client.lock("later"):
        await page.sees("later")


async def test_colours_can_be_changed_and_stay(page: Page) -> None:
    colour = "return getComputedStyle(document.body).backgroundColor"
    await page.open()
    before = await page.ask(colour)
    await page.click("#theme")
    after = await page.ask(colour)
    assert before != after
    await page.open()
    assert await page.ask(colour) == after
    await page.click("#theme")


@pytest.mark.parametrize("size", [(390, 844), (1400, 900)], ids=["phone", "desktop"])
async def test_long_names_and_many_columns_fit_the_screen(
    client: aiodlock.Client, page: Page, size: tuple[int, int]
) -> None:
    name = "tenant-without-any-space-" * 12
    async with client.lock(name, owner="an-owner-without-any-space-" * 4), client.lock("short"):
        await page.resize(*size)
        await page.open()
        await page.until(_LOOKS)
        assert await page.ask(_NARROW)
        await page.click("td.name a")
        await page.until(_LOOKS)
        assert await page.ask(_NARROW)


async def test_holders_stand_apart_on_a_phone_and_pictures_have_bars(
    client: aiodlock.Client, page: Page
) -> None:
    async with client.semaphore("x", 1), client.semaphore("slots", 3, note="one"):
        slots = [await client.semaphore("slots", 3).acquire() for _ in range(2)]
        waiting = asyncio.create_task(client.semaphore("x", 1).acquire())
        await page.resize(390, 844)
        await page.open("/?match=slots")
        await page.until(_LOOKS)
        assert await page.ask(_NARROW)
        places = await page.ask(
            "return [...document.querySelectorAll('td.who > div')].map(one => {"
            " const place = one.getBoundingClientRect(); return [place.top, place.bottom]; })"
        )
        assert len(places) == 3  # two, and how many more
        assert all(above[1] <= below[0] for above, below in itertools.pairwise(places))
        assert "held for" in await page.text("td.who .narrow")
        await page.until("return document.querySelector('.waiters .bars').getBBox().height > 10")
        assert (
            await page.ask(
                "return [...document.querySelectorAll('.plot svg')].map(one => one.clientHeight > 20)"
            )
            == [True] * 3
        )
        await page.open("/name?n=slots&kind=semaphore")
        await page.until(_LOOKS)
        assert await page.ask(_NARROW)
        assert "semaphore" in await page.text("h1")
        for slot in slots:
            await slot.release()
    await (await waiting).release()
