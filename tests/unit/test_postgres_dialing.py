"""The hosts of a URL of PostgreSQL, asked at once: what one of them says does not keep off another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aiodlock import BackendUnavailable
from aiodlock.backends._identity import Known, OtherStore
from aiodlock.backends.postgres import dialing
from aiodlock.backends.postgres.dialing import Dialer, Host, Prepared
from aiodlock.backends.postgres.history import History

_OLD, _NEW = History("7", 1, "old", 1, 100), History("7", 2, "new", 2, 100)


class _Connection:
    def __init__(self, host: str) -> None:
        self.host = host
        self.terminated = False

    def terminate(self) -> None:
        self.terminated = True


class Hosts:
    """Two of them. ``asked``: how often each was. What each does with that is the test's."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        accepts: Callable[[str], Awaitable[None]],
        prepare: Callable[[str], Prepared] = lambda _: Prepared(_NEW),
    ) -> None:
        monkeypatch.setattr(dialing, "connect", self._connect)
        monkeypatch.setattr(dialing, "OTHERS_WITHIN", 0.001)
        monkeypatch.setattr(dialing, "_ASK_AGAIN", 0.001, raising=False)
        self.asked = {"1": 0, "2": 0}
        self.made: list[_Connection] = []
        self.known: Known[History] = Known("db", silence=60.0, may_hold=lambda: True)
        self._accepts = accepts
        self._prepared = prepare
        self.dialer = Dialer(
            "postgresql://10.0.0.1,10.0.0.2/db",
            pooled=False,
            sessions=True,
            known=self.known,
            prepare=self._prepare,
        )

    async def _connect(self, url: str, *_: object) -> Any:
        host = url.partition("10.0.0.")[2][0]
        self.asked[host] += 1
        await self._accepts(host)
        self.made.append(_Connection(host))
        return self.made[-1]

    async def _prepare(self, connection: Any, host: Host, pooled: bool) -> Prepared:
        return self._prepared(connection.host)

    async def dial(self) -> str:
        reached: Any = await self.dialer.dial()
        await self.dialer.close()
        assert [one for one in self.made if not one.terminated] == [reached.connection]
        return str(reached.connection.host)


@pytest.mark.parametrize("refusal", ["none", "standby"])
async def test_host_that_is_back_is_used_while_another_one_is_dark(
    monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    """A primary is started again, or a standby promoted, long before a dark host is given up."""

    async def accepts(host: str) -> None:
        if host == "1":
            await asyncio.Event().wait()
        if refusal == "none" and hosts.asked["2"] < 4:
            raise ConnectionRefusedError

    def prepare(host: str) -> Prepared:
        if hosts.asked["2"] < 4:
            raise BackendUnavailable("is a standby")
        return Prepared(_NEW)

    hosts = Hosts(monkeypatch, accepts, prepare)
    async with asyncio.timeout(5.0):
        assert await hosts.dial() == "2"
    assert hosts.asked == {"1": 1, "2": 4}


async def test_old_primary_that_is_near_does_not_keep_off_a_far_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the time that the far one lets the client in, the near one could do so three times."""

    async def accepts(host: str) -> None:
        if host == "2":
            enough = hosts.asked["1"] + 3
            while hosts.asked["1"] < enough:
                await asyncio.sleep(0.001)

    hosts = Hosts(monkeypatch, accepts, lambda host: Prepared(_OLD if host == "1" else _NEW))
    hosts.known.meet(_NEW, "10.0.0.2")
    async with asyncio.timeout(5.0):
        while True:
            try:
                assert await hosts.dial() == "2"
                return
            except OtherStore:
                continue


async def test_refusals_of_all_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def accepts(host: str) -> None:
        raise ConnectionRefusedError(host)

    hosts = Hosts(monkeypatch, accepts)
    with pytest.raises(ConnectionRefusedError):
        await hosts.dialer.dial()


async def test_refusal_of_one_host_does_not_keep_waiting_who_was_let_in_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each dial beside a standby, or a host that is down, took as long as until that is asked again."""

    async def accepts(host: str) -> None:
        if host == "1":
            raise ConnectionRefusedError
        while not hosts.asked["1"]:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.001)

    hosts = Hosts(monkeypatch, accepts)
    monkeypatch.setattr(dialing, "OTHERS_WITHIN", 3600.0)
    monkeypatch.setattr(dialing, "_ASK_AGAIN", 3600.0)
    async with asyncio.timeout(5.0):
        assert await hosts.dial() == "2"
    assert hosts.asked == {"1": 1, "2": 1}
