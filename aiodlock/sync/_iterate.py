"""Asynchronous iterators, one call into the loop per item."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from ._client import Running

_T = TypeVar("_T")


class Ended(Generic[_T]):
    """Stands for the end: StopAsyncIteration cannot leave a coroutine as a result."""


def iterate(running: Running, make: Callable[[], AsyncIterator[_T]]) -> Iterator[_T]:
    """Yield what the asynchronous iterator yields; dropped or closed, it is closed in the background."""
    made: list[AsyncIterator[_T]] = []

    async def begin() -> None:
        made.append(make())

    async def following() -> _T | Ended[_T]:
        try:
            return await anext(made[0])
        except StopAsyncIteration:
            return Ended()

    async def close() -> None:
        aclose = getattr(made[0], "aclose", None)
        if aclose is not None:
            await aclose()

    running.call(begin)  # a wrong argument is told here
    try:
        while not isinstance(item := running.call(following), Ended):
            yield item
    finally:
        running.portal.start_soon(close)
