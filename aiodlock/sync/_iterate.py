"""Asynchronous iterators, one call into the loop per item."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from ._client import Client
    from ._running import Running

_T = TypeVar("_T")


class Ended(Generic[_T]):
    """Stands for the end: StopAsyncIteration cannot leave a coroutine as a result."""


def iterate(client: Client, running: Running, items: AsyncIterator[_T]) -> Iterator[_T]:
    """Yield what the asynchronous iterator yields; dropped or closed, it is closed in the background.

    The client is kept for as long: one that is collected is closed.
    """

    async def following() -> _T | Ended[_T]:
        try:
            return await anext(items)
        except StopAsyncIteration:
            return Ended()

    async def close() -> None:
        aclose = getattr(items, "aclose", None)
        if aclose is not None:
            await aclose()

    try:
        while not isinstance(item := running.call(following), Ended):
            yield item
    finally:
        running.portal.start_soon(close)
