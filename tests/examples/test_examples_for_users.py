"""The web service, the election and the lost lease, as a reader would start them."""

from __future__ import annotations

import asyncio

from examples import leader_election, lost_lease, web_service

from ..fastapi.conftest import serve_app


async def test_web_service_pays_once() -> None:
    async with serve_app(web_service.app) as http:
        answers = await asyncio.gather(*(http.post("/orders/42/pay") for _ in range(5)))
        assert [answer.status_code for answer in answers] == [200] * 5
        assert sum(answer.json()["first"] for answer in answers) == 1
        assert len({answer.json()["token"] for answer in answers}) == 5
        assert (await http.get("/orders/42/queue")).json() == {"holders": 0, "waiters": 0}


async def test_leader_election() -> None:
    terms, leaders = await asyncio.wait_for(leader_election.main(), 120)
    assert sorted(terms) == ["worker-1", "worker-2", "worker-3"]
    assert leaders


async def test_lost_lease() -> None:
    said = await asyncio.wait_for(lost_lease.main(), 120)
    assert said[0].startswith("writing with token")
    assert said[1:] == ["rolled back", "lost: broken"]
