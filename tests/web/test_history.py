"""The last minutes, as they are kept and drawn."""

from __future__ import annotations

import asyncio
import re
import sys

import pytest

import aiodlock
import aiodlock.web
from aiodlock.web import _sightings, _watch
from aiodlock.web._history import STEP, STEPS, History

from ..fastapi.conftest import serve_app
from ..scenes import until
from .conftest import Visit
from .test_live import watching

pytestmark = pytest.mark.stores("memory")


def test_only_the_last_steps_are_kept_and_drawn() -> None:
    history = History()
    for number in range(10 * STEPS):
        history.add(number * STEP + 1.0, waiters=number, hand_overs=2, losses=1)
    assert len(history._steps) == STEPS
    at = (10 * STEPS - 1) * STEP + 1.0
    waiters, hand_overs, losses = history.pictures(at)
    assert (waiters.most, hand_overs.total, losses.total) == (10 * STEPS - 1, 2 * STEPS, STEPS)
    for picture in (waiters, hand_overs, losses):
        assert picture.bars.count("M") == picture.base.count("M") == STEPS
        assert all(0 <= int(x) < STEPS for x in re.findall(r"M(\d+) ", picture.bars))
        assert re.fullmatch(r"[MhvVz0-9. -]*", picture.bars + picture.base)
    # Later they have moved to the left, and at last are gone.
    assert history.pictures(at + 50 * STEP)[0].bars.count("M") == STEPS - 50
    assert [p.bars + p.base for p in history.pictures(at + 1e6)] == ["", "", ""]
    assert [p.most for p in history.pictures(at + 1e6)] == [0, 0, 0]


def test_steps_in_which_nobody_looked_have_no_line() -> None:
    history = History()
    history.add(1_000.0, waiters=0)
    history.add(1_020.0, losses=1)  # a hook told it
    history.add(1_030.0, waiters=0)
    waiters, _, losses = history.pictures(1_030.0)
    assert (waiters.base.count("M"), waiters.bars, losses.bars.count("M")) == (2, "", 1)


def test_rate_is_that_of_the_last_steps() -> None:
    history = History()
    assert history.hand_overs_per_second(0.0) == 0.0
    for second in range(60):
        history.add(1_000.0 + second, hand_overs=3)
    assert 2.9 < history.hand_overs_per_second(1_059.0) < 3.3
    assert history.hand_overs_per_second(1_100.0) == 0.0


def test_pictures_of_huge_numbers_stay_small() -> None:
    history = History()
    for number in range(STEPS):
        history.add(number * STEP, waiters=sys.maxsize, hand_overs=10**12, losses=10**9)
    for picture in history.pictures(STEPS * STEP - 1):
        assert len(picture.bars) + len(picture.base) < 3_000


async def test_page_draws_what_happens_of_all_and_of_one_name(
    client: aiodlock.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_watch, "INTERVAL", 0.05)
    lease = await client.lock("x").acquire()
    waiting = asyncio.create_task(client.lock("x").acquire())
    await client.lock("left", ttl=1.0, auto_extend=False, on_lost="flag").acquire()
    async with (
        serve_app(aiodlock.web.app(client)) as http,
        watching(http) as events,
        watching(http, n="x") as of_one,
    ):
        async for event in of_one:
            if "waiters" in _bars(event["one"]):
                break
        await lease.release()
        async for event in of_one:
            if _bars(event["one"]) == {"waiters", "hand-overs"}:
                break
        async for event in events:
            if _bars(event["plot"]) == {"waiters", "hand-overs", "losses"}:
                break
        async for event in of_one:
            assert _bars(event["one"]) == {"waiters", "hand-overs"}, "the loss was another name's"
            break
    await (await waiting).release()


def _bars(html: str) -> set[str]:
    """Return which pictures have bars."""
    figures = re.findall(r'<figure class="([a-z-]+)">(.*?)</figure>', html, re.DOTALL)
    return {what for what, drawn in figures if 'class="bars" d="M' in drawn}


async def test_histories_of_names_are_bounded(
    client: aiodlock.Client, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sightings, "_MOST_HISTORIES", 5)
    app = aiodlock.web.app(client)
    watch = app.state.pages.watch
    with watch.viewer(("lock", "seen")):
        for number in range(4):
            with watch.viewer(("semaphore", f"x:{number}")):
                pass
    assert len(watch.seen._histories) == 5
    with watch.viewer(("lock", "seen")):
        for number in range(4):
            with watch.viewer(("once", f"y:{number}")):
                pass
        assert watch.seen.history_of(("lock", "seen")) is not None
        assert watch.seen.history_of(("semaphore", "x:0")) is None
    assert len(watch.seen._histories) == 5
    async with visit(app) as http:
        for number in range(20):
            assert (await http.get(f"/name?n=z:{number}")).status_code == 200
    assert len(watch.seen._histories) == 5
    await until(lambda: watch.viewers == 0)
