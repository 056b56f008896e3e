"""The hosts of a URL of PostgreSQL, asked at once: what one of them says does not keep off another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aiodlock import BackendUnavailable
from aiodlock.backends import _identity
from aiodlock.backends._identity import Known, OtherStore
from aiodlock.backends.postgres import dialing, link, scouts
from aiodlock.backends.postgres.dialing import Dialer, Host, Prepared
from aiodlock.backends.postgres.history import History
from aiodlock.backends.postgres.scouts import Scouts

_OLD, _NEW = History("7", 1, "old", 1, 100), History("7", 2, "new", 2, 100)
_OTHER = History("8", 1, "other", 3, 100)


class _Connection:
    def __init__(self, host: str) -> None:
        self.host = host
        self.terminated = False

    def terminate(self) -> None:
        self.terminated = True

    def is_closed(self) -> bool:
        return self.terminated

    def add_termination_listener(self, _: object) -> None: ...


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


async def test_another_database_that_answers_first_does_not_replace_the_known_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even where the client has asked nothing for long: both of them have answered."""

    async def accepts(host: str) -> None:
        if host == "2":
            while not hosts.made:
                await asyncio.sleep(0.001)

    hosts = Hosts(monkeypatch, accepts, lambda host: Prepared(_OTHER if host == "1" else _NEW))
    monkeypatch.setattr(dialing, "OTHERS_WITHIN", 3600.0)
    moment = 0.0
    monkeypatch.setattr(_identity, "now", lambda: moment)
    hosts.known = hosts.dialer._known = Known("db", silence=10.0, may_hold=lambda: False)
    hosts.known.meet(_NEW, "10.0.0.2")
    moment = 10.0
    async with asyncio.timeout(5.0):
        assert await hosts.dial() == "2"
    assert hosts.known.value == _NEW


async def test_server_that_is_connected_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asked nothing for as long as ``unavailable_after`` went over to another database that
    its URL names, and back again after as long."""
    moment, looks = 0.0, 0

    async def connect(*_: object) -> Any:
        return _Connection("2")

    async def history_at(*_: object) -> History:
        nonlocal moment, looks
        moment, looks = moment + 1.0, looks + 1
        if looks == 50:
            enough.set()
        return _OTHER

    enough = asyncio.Event()
    monkeypatch.setattr(dialing, "connect", connect)
    monkeypatch.setattr(scouts, "history_at", history_at)
    monkeypatch.setattr(scouts, "LOOK_EVERY", 0.0)
    monkeypatch.setattr(_identity, "now", lambda: moment)
    known: Known[History] = Known("db", silence=10.0, may_hold=lambda: False)
    known.meet(_NEW, "10.0.0.1")
    used: Any = SimpleNamespace(where="10.0.0.1", connection=object())
    looking = Scouts("postgresql://10.0.0.1,10.0.0.2/db", used, known, lambda: None)
    running = asyncio.create_task(looking.run())
    async with asyncio.timeout(5.0):
        await enough.wait()
    running.cancel()
    await asyncio.wait({running})
    assert known.value == _NEW


async def test_silence_begins_when_the_connection_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind an address that moves, another database answered at once to a client that had asked nothing
    for long, and was believed at once."""
    moment = 0.0

    async def accepts(host: str) -> None:
        if len(hosts.made) == 4:
            enough.set()

    hosts = Hosts(monkeypatch, accepts, lambda _: Prepared(_OTHER if moment else _NEW))
    enough, up = asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(_identity, "now", lambda: moment)
    monkeypatch.setattr(link, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(link, "_LONGEST_PAUSE", 0.001)
    hosts.known = hosts.dialer._known = Known("db", silence=10.0, may_hold=lambda: False)
    kept = link.Link("db", hosts.dialer, lambda *_: up.set())
    running = asyncio.create_task(kept.run())
    async with asyncio.timeout(5.0):
        await up.wait()
        moment = 10.0
        kept.give_up(ConnectionResetError())
        await enough.wait()
    running.cancel()
    await asyncio.wait({running})
    assert hosts.known.value == _NEW
