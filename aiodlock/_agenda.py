"""What is due when: a heap whose entries are taken out by leaving them empty."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Generic, TypeAlias, TypeVar

_T = TypeVar("_T")

NEVER = float("inf")
#: [moment, serial, item]; an item that was taken out is None. A list, since a heap compares those fastest.
Entry: TypeAlias = list[Any]


class Agenda(Generic[_T]):
    """Items by the moment at which each is due.

    Mutable state: ``_heap``, ``_dead`` (its entries without an item).
    """

    __slots__ = ("_dead", "_heap", "_serials")

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._serials = count()
        self._dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._dead

    def __iter__(self) -> Iterator[_T]:
        return (entry[2] for entry in self._heap if entry[2] is not None)

    def add(self, item: _T, moment: float) -> Entry:
        """Return the item's entry."""
        entry = [moment, next(self._serials), item]
        heappush(self._heap, entry)
        return entry

    def put_back(self, entry: Entry, moment: float) -> Entry:
        """Use an entry again that ``take`` has returned: that makes no object. Return it."""
        entry[0] = moment
        heappush(self._heap, entry)
        return entry

    def remove(self, entry: Entry) -> None:
        """Leave the entry empty. When most are, keep the others."""
        entry[2] = None
        self._dead += 1
        if self._dead > 64 and self._dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2] is not None]
            heapify(self._heap)
            self._dead = 0

    @property
    def first(self) -> float:
        """When the first item is due."""
        while self._heap and self._heap[0][2] is None:
            heappop(self._heap)
            self._dead -= 1
        return self._heap[0][0] if self._heap else NEVER

    def take(self, moment: float) -> Entry | None:
        """Take out the first entry, if it is due at that moment."""
        return heappop(self._heap) if self.first <= moment else None
