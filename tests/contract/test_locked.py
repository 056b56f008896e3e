"""``@client.locked``: a lock around each call, named by the call's arguments."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiodlock

from ..conftest import MakeClient
from ..scenes import bounded

client_of_nothing = aiodlock.Client("memory://")


async def names_held(client: aiodlock.Client) -> list[str]:
    return [info.name async for info in client.locks()]


async def test_the_call_holds_the_lock_that_its_arguments_name(client: aiodlock.Client) -> None:
    uid = UUID(int=5)

    @client.locked("{tenant}/order:{order_id}:{region}", timeout=2)
    async def pay(order_id: int, tenant: str | UUID, *, region: str = "eu") -> list[str]:
        "Doc."
        return await names_held(client)

    assert await pay(42, "acme") == ["acme/order:42:eu"]
    assert await pay(tenant="a:b/c%é", order_id=-1, region="") == ["a%3Ab%2Fc%25é/order:-1:"]
    assert await pay(7, uid, region="us") == [f"{uid}/order:7:us"]
    assert await names_held(client) == []
    assert (pay.__name__, pay.__doc__) == ("pay", "Doc.")
    assert asyncio.iscoroutinefunction(pay)


async def test_equal_calls_exclude_each_other_and_different_ones_do_not(
    make_client: MakeClient,
) -> None:
    client = await make_client()
    inside: dict[str, int] = {}
    most: dict[str, int] = {}
    both = asyncio.Event()

    @client.locked("x:{name}")
    async def work(name: str) -> None:
        inside[name] = inside.get(name, 0) + 1
        most[name] = max(most.get(name, 0), inside[name])
        if len(inside) == 2:
            both.set()
        await both.wait()
        inside[name] -= 1

    async with bounded(10):
        await asyncio.gather(work("a"), work("b"), work("a"), work("b"))
    assert most == {"a": 1, "b": 1}


async def test_methods_recursion_and_errors(client: aiodlock.Client) -> None:
    class Shop:
        @client.locked("stock:{item}")
        async def take(self, item: str, deep: int = 0) -> list[str]:
            if deep:
                return await self.take(item, deep - 1)
            if item == "none":
                raise LookupError(item)
            return await names_held(client)

        @staticmethod
        @client.locked("static")
        async def still() -> list[str]:
            return await names_held(client)

    shop = Shop()
    assert await shop.take("a", 3) == ["stock:a"]
    assert await Shop.still() == ["static"]
    with pytest.raises(LookupError):
        await shop.take("none")
    assert await names_held(client) == []


async def test_braces_that_are_written_twice_are_part_of_the_name(client: aiodlock.Client) -> None:
    @client.locked("{{t}}:order:{order_id}")
    async def before(order_id: int) -> list[str]:
        return await names_held(client)

    @client.locked("a{{x{p}:{q}")
    async def around(p: int, q: int) -> list[str]:
        return await names_held(client)

    @client.locked("{{}}")
    async def alone() -> list[str]:
        return await names_held(client)

    assert await before(42) == ["{t}:order:42"]
    assert await around(1, 2) == ["a{x1:2"]
    assert await alone() == ["{}"]


async def test_options_are_those_of_the_lock(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()

    @client.locked("x", timeout=0.3)
    async def work() -> None: ...

    async with other.lock("x"):
        with pytest.raises(aiodlock.AcquireTimeout):
            await work()


@pytest.mark.parametrize("value", [True, None, 1.5, b"x", ["x"], object()])
async def test_a_value_of_another_kind_is_refused(client: aiodlock.Client, value: object) -> None:
    @client.locked("x:{value}")
    async def work(value: Any) -> None:
        raise AssertionError

    with pytest.raises(TypeError, match="value must be a str"):
        await work(value)


async def test_a_name_that_cannot_be_one_is_refused(client: aiodlock.Client) -> None:
    @client.locked("{value}")
    async def work(value: str) -> None:
        raise AssertionError

    for value in ("", "x" * 513, "\ud800"):
        with pytest.raises(ValueError):
            await work(value)


@pytest.mark.parametrize(
    "template",
    [
        *("", "{}", "{0}", "{a.b}", "{a[0]}", "{a!r}", "{a:>3}", "{", "{a}{b}", "{a}x{b}"),
        *("x{{y{a}{b}", "{{-{a}x{b}"),
        *("{a}%{b}", "{c}", "{args}", "{kwargs}", "x" * 600),
    ],
)
def test_a_wrong_template_is_told_when_decorating(template: str) -> None:
    async def work(a: str, b: str, *args: str, **kwargs: str) -> None: ...

    with pytest.raises(ValueError):
        client_of_nothing.locked(template)(work)


def test_wrong_options_are_told_when_decorating() -> None:
    with pytest.raises(ValueError, match="ttl"):
        client_of_nothing.locked("x", ttl=-1)
    with pytest.raises(TypeError, match="acquire_nowait"):
        client_of_nothing.locked("x", blocking=False)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        client_of_nothing.locked(None)  # type: ignore[arg-type]


def test_what_is_no_async_function_is_refused() -> None:
    def plain() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    async def async_generator() -> AsyncIterator[int]:
        yield 1

    async def work() -> None: ...

    wrong: list[tuple[Any, str]] = [
        (plain, r"aiodlock\.sync"),
        (generator, "generator"),
        (async_generator, "generator"),
        (staticmethod(work), "below @staticmethod"),
        (42, "function"),
    ]
    for one, why in wrong:
        with pytest.raises(TypeError, match=why):
            client_of_nothing.locked("x")(one)


_TEXT = st.text(alphabet="a1-_.~:/%{} é", max_size=6)
_VALUES = st.one_of(_TEXT, st.integers(-20, 20))


@given(
    st.sampled_from(["{a}:{b}", "{a}-{b}", "{a}.b_{b}", "-{a}~-{b}", "{{{a}}}-{b}", "{a}}}{b}"]),
    st.lists(st.tuples(_VALUES, _VALUES)),
)
def test_two_different_calls_never_share_a_name(
    template: str, calls: list[tuple[str | int, str | int]]
) -> None:
    from aiodlock._locked import CallTemplate

    def function(a: object, b: object) -> None: ...

    name: Callable[..., str] = CallTemplate(template).of(function, coroutine=False, instead="")
    for one, other in itertools.combinations(calls, 2):
        same = [str(value) for value in one] == [str(value) for value in other]
        assert (name(*one) == name(*other)) == same
