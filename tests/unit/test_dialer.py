"""Servers that are dialled side by side: who is used, and that nothing else stays open."""

from __future__ import annotations

import asyncio

import pytest

from aiodlock._patience import Patience
from aiodlock.backends._dialer import Dialer

HOSTS = [(f"10.0.0.{number}", 1) for number in range(1, 4)]


class Dials:
    """Each dial waits until it is told what comes of it."""

    def __init__(
        self, least: float = 60.0, *, near: str = "", hosts: list[tuple[str, int]] = HOSTS
    ) -> None:
        """:param near: these accept at once."""
        self.near = near
        self.answers: dict[str, asyncio.Future[str]] = {}
        self.begun: list[str] = []
        self.given_up: list[str] = []
        self.dialer = Dialer(hosts, Patience(least, 60.0), self._dial, self.given_up.append)

    async def _dial(self, host: tuple[str, int], address: str) -> str:
        self.begun.append(address[-1])
        if address[-1] in self.near:
            return "near"
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
    assert not dials.answers["2"].done()  # the first one may be of no use
    dials.dialer.served(dialled)
    await asyncio.sleep(0)
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
    dials.dialer.served(await opening)
    dials.begun.clear()
    again = asyncio.create_task(dials.dialer.open(60.0))
    await dials.until_begun("1", "3", "2")
    again.cancel()
    dials.dialer.stop()


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
    dialled = await opening
    assert dialled.connection == "3"
    dials.dialer.served(dialled)
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
    dials.dialer.stop()
    assert dials.given_up == ["first"]


@pytest.mark.parametrize("near", ["1", "2", "3", "13"])
async def test_near_server_that_may_not_be_used_does_not_keep_off_a_far_one(near: str) -> None:
    """It accepts each time before the far ones do, and is refused then."""
    dials = Dials(least=0.001, near=near)
    refused = 0
    async with asyncio.timeout(5.0):
        while (dialled := await dials.dialer.open(60.0)).connection == "near":
            refused += 1
            if refused == 10:  # by now the far ones have been dialled for as long as they take
                for number in set("123") - set(near):
                    dials.answers[number].set_result("far")
    assert dialled.connection == "far"
    assert {number: dials.begun.count(number) for number in set("123") - set(near)} == {
        number: 1 for number in set("123") - set(near)
    }
    dials.dialer.served(dialled)


async def test_only_name_has_a_near_address_that_may_not_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def resolve(host: str, port: int) -> list[tuple[object, ...]]:
        return [(None, None, None, "", (f"10.0.0.{number}", port)) for number in (1, 2)]

    monkeypatch.setattr("aiodlock.backends._addresses.resolve", resolve)
    dials = Dials(least=0.001, near="1", hosts=[("name", 1)])
    refused = 0
    async with asyncio.timeout(5.0):
        while (dialled := await dials.dialer.open(60.0)).connection == "near":
            refused += 1
            if refused == 2:
                dials.answers["2"].set_result("far")
    assert (dialled.connection, dialled.address) == ("far", "10.0.0.2")
    dials.dialer.served(dialled)


async def test_silence_of_one_is_learned_from_although_another_one_refused_last() -> None:
    dials = Dials(least=0.001)
    opening = asyncio.create_task(dials.dialer.open(0.05))
    await dials.until_begun("1", "2", "3")
    while not dials.answers["1"].done():
        await asyncio.sleep(0.001)
    for number in "23":
        if not dials.answers[number].done():
            dials.answers[number].set_exception(ConnectionRefusedError(number))
    with pytest.raises(OSError):
        await opening
    while dials.dialer.patience.learned == 0.001:  # it is dialled further, beside the next attempt
        with pytest.raises(OSError):
            await dials.dialer.open(60.0)
    assert dials.dialer.patience.learned == 0.002
    dials.dialer.stop()


async def test_silence_does_not_keep_the_next_server_waiting() -> None:
    """What may take longer now is a dial, and not when the next server is dialled beside it."""
    dials = Dials(least=0.001)
    for _ in range(12):
        dials.dialer.patience.ran_out()
    assert dials.dialer.patience.learned > 3.0
    opening = asyncio.create_task(dials.dialer.open(60.0))
    async with asyncio.timeout(2.0):
        await dials.until_begun("1", "2", "3")
    opening.cancel()
    dials.dialer.stop()


async def test_server_that_refused_is_dialled_again_while_another_one_is_silent() -> None:
    """It was restarted, and is back long before the dark one is given up."""
    dials = Dials(least=0.001)
    opening = asyncio.create_task(dials.dialer.open(60.0))
    await dials.until_begun("1", "2", "3")
    for number in "23":
        dials.answers[number].set_exception(ConnectionRefusedError(number))
    async with asyncio.timeout(5.0):
        with pytest.raises(ConnectionRefusedError):
            await opening
    again = asyncio.create_task(dials.dialer.open(60.0))
    await dials.until_begun("1", "2", "3", "2")
    dials.answers["2"].set_result("back")
    dialled = await again
    assert (dialled.connection, dialled.host) == ("back", HOSTS[1])
    assert not dials.answers["1"].done()  # it was dialled once, and for as long as it takes
    dials.dialer.served(dialled)


async def test_server_that_refused_is_dialled_next_when_a_silent_one_is_given_up() -> None:
    """Else it would not be asked until the silent one is given up once more."""
    dials = Dials(least=0.001, hosts=HOSTS[:2])
    opening = asyncio.create_task(dials.dialer.open(60.0))
    await dials.until_begun("1", "2")
    dials.answers["2"].set_exception(ConnectionRefusedError("2"))
    with pytest.raises(ConnectionRefusedError):
        await opening
    dials.dialer.patience = Patience(60.0, 60.0)
    again = asyncio.create_task(dials.dialer.open(60.0))
    dials.answers["1"].set_exception(TimeoutError())
    await dials.until_begun("1", "2", "2")
    dials.answers["2"].set_result("back")
    dials.dialer.served(await again)
