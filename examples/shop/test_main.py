"""Tests of the shop. They need no server: run `pytest -o asyncio_mode=auto`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import main
import pytest

from aiodlock import Client
from aiodlock.fastapi import LockClient
from aiodlock.testing import hold, memory_client


class Shop:
    """The app with a store in memory, and with a provider that counts the charges."""

    def __init__(self, client: Client, http: httpx.AsyncClient) -> None:
        self.client = client
        self.http = http
        self.charges: list[int] = []

    async def charge(self, order_id: int) -> None:
        self.charges.append(order_id)
        await asyncio.sleep(0.01)

    async def pay(self, order_id: int) -> httpx.Response:
        return await self.http.post(f"/orders/{order_id}/pay")


@pytest.fixture
async def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shop]:
    monkeypatch.setattr(main, "DATABASE", str(tmp_path / "shop.db"))
    main.make_tables()
    app = main.app
    async with (
        memory_client() as client,
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as http,
    ):
        monkeypatch.setitem(app.dependency_overrides, LockClient, lambda: client)
        shop = Shop(client, http)
        monkeypatch.setattr(main, "charge", shop.charge)
        assert (await http.post("/orders")).json() == 1
        yield shop


async def test_ten_clicks_pay_once(shop: Shop) -> None:
    answers = await asyncio.gather(*[shop.pay(1) for _ in range(10)])
    assert sorted(answer.json() for answer in answers) == [False] * 9 + [True]
    assert shop.charges == [1]


async def test_an_order_that_is_being_paid_is_locked(shop: Shop) -> None:
    async with hold(shop.client, "order:1"):  # somebody else pays it
        assert (await shop.pay(1)).status_code == 423  # after 2 s
    assert shop.charges == []


async def test_a_lost_lock_stops_the_payment(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lose_the_lock(order_id: int) -> None:
        await shop.client.break_lock(f"order:{order_id}")
        await asyncio.sleep(60)  # is cancelled here

    monkeypatch.setattr(main, "charge", lose_the_lock)
    assert (await shop.pay(1)).status_code == 409
    monkeypatch.setattr(main, "charge", shop.charge)
    assert (await shop.pay(1)).json() is True  # the next click pays
