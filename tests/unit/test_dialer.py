"""Servers that are dialled side by side: who is used, and that nothing else stays open."""

from __future__ import annotations

import asyncio

import pytest

from aiodlock._patience import Patience
from aiodlock.backends._dialer import Dialer

HOSTS = [(f"10.0.0.{number}", 1) for number in range(1, 4)]


class Dials:
    """Each dial waits until it is told what comes of it."""

    def __init__(self, least: float = 60.0) -> None:
        self.answers: dict[str, asyncio.Future[str]] = {}
        self.begun: list[str] = []
        self.given_up: list[str] = []
        self.dialer = Dialer(HOSTS, Patience(least, 60.0), self._dial, self.given_up.append)

    async def _dial(self, host: tuple[str, int], address: str) -> str:
        assert host[0] == address
        self.begun.append(address[-1])
        self.answers[address[-1]] = asyncio.get_running_loop().create_future()
        return await self.answers[address[-1]]

    async def until_begun(self, *hosts: str) -> None:
        async with asyncio.timeout(5.0):
            while self.begun != list(hosts):
                await asyncio.sleep(0)


async def test_next_server_is_dialled_beside_a_slow_one_which_may_still_be_first() -> None:
    dials = Dials(least=0.001)
    opening = asyncio.create_task(dials.dialer.open(60.0))
    await dials.until_begun("1", "2", "3")
    dials.answers["1"].set_result("first")
    dialled = await opening
    assert (dialled.connection, dialled.host) == ("first", HOSTS[0])
    assert dials.answers["2"].cancelled()
    assert dials.answers["3"].cancelled()


async def test_next_server_is_dialled_at_once_when_one_refuses() -> None:
    dials = Dials()
    opening = asyncio.create_task(dials.dialer.open(60.0))
    for number in "12":
        await dials.until_begun(*"123"[: int(number)])
        dials.answers[number].set_exception(ConnectionRefusedError(number))
    await dials.until_begun("1", "2", "3")
    dials.answers["3"].set_result("third")
    assert (await opening).connection == "third"
    assert dials.given_up == []


async def test_server_that_was_lost_is_the_last_one_to_be_dialled_again() -> None:
    dials = Dials(least=0.001)
    opening = asyncio.create_task(dials.dialer.open(60.0))
    await dials.until_begun("1", "2", "3")
    dials.answers["2"].set_result("second")
    await opening
    dials.begun.clear()
    again = asyncio.create_task(dials.dialer.open(60.0))
    await dials.until_begun("1", "3", "2")
    again.cancel()


async def test_last_failure_is_raised_when_all_have_failed() -> None:
    dials = Dials()
    opening = asyncio.create_task(dials.dialer.open(60.0))
    for number in "123":
        await dials.until_begun(*"123"[: int(number)])
        dials.answers[number].set_exception(ConnectionRefusedError(number))
    with pytest.raises(ConnectionRefusedError, match="3"):
        await opening


async def test_silence_of_all_is_learned_from() -> None:
    dials = Dials(least=0.001)
    with pytest.raises(TimeoutError):
        await dials.dialer.open(0.01)
    assert dials.dialer.patience.learned == 0.002


async def test_connections_that_come_together_are_closed_except_for_one() -> None:
    dials = Dials(least=0.001)
    opening = asyncio.create_task(dials.dialer.open(60.0))
    await dials.until_begun("1", "2", "3")
    for number in "312":
        dials.answers[number].set_result(number)
    assert (await opening).connection == "3"
    assert sorted(dials.given_up) == ["1", "2"]


async def test_connection_is_closed_whose_caller_was_cancelled_in_that_moment() -> None:
    dials = Dials()
    opening = asyncio.create_task(dials.dialer.open(60.0))
    await dials.until_begun("1")
    dials.answers["1"].set_result("first")
    await asyncio.sleep(0)  # it is there, and its caller has not heard so
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert dials.given_up == ["first"]
