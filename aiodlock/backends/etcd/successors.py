"""Whether others want the name of a lease that lingers.

A holder that lingers watches the requests of its name, from the revision on in which it was granted. So
nobody who queues is missed, also while the connection is cut: a watch goes on where it was. What the store
has forgotten by then (a compaction) is read anew.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ..._errors import BackendError
from . import messages as m
from .own_keys import PAUSE
from .recipe import Queue, Record, after, read_record
from .watching import Watch

if TYPE_CHECKING:
    from .place import EtcdPlace


class Successors:
    """Tells its place once that others want the name (``on_recalled``).

    Mutable state: ``_watch``, ``_over``.
    """

    __slots__ = ("_over", "_place", "_watch")

    def __init__(self, place: EtcdPlace) -> None:
        self._place = place
        self._watch: Watch | None = None
        self._over = False

    def begin(self, known: Queue | None) -> None:
        """The place holds. ``known``: the name's requests, if that is newer than its key."""
        place = self._place
        if known is not None and known.revision >= place.own.created:
            self._look(known)
        elif place.token == place.own.created:
            self._follow(place.own.created + 1)  # before its key was made nobody waited
        else:
            self._read()  # it got in beside its owner's other request, perhaps past waiters

    def end(self) -> None:
        """The place holds no more."""
        self._over = True
        if self._watch is not None:
            self._place.store.watches.end(self._watch)
            self._watch = None

    def _look(self, queue: Queue) -> None:
        if any(map(self._is_one, queue.requests.values())):
            self._tell()
        else:
            self._follow(queue.revision + 1)

    def _follow(self, revision: int) -> None:
        start = self._place.keys.request("")
        self._watch = self._place.store.watches.watch(
            start, after(start), revision, self._heard, self._read
        )

    def _heard(self, events: list[m.Event], revision: int) -> None:
        for event in events:
            if event.type == m.PUT and event.kv is not None:
                _, id = self._place.keys.split(event.kv.key)
                try:
                    found = self._is_one(read_record(id, event.kv))
                except ValueError:
                    continue  # not a key of ours
                if found:
                    self._tell()
                    return

    def _is_one(self, record: Record) -> bool:
        """Whether a request waits for this holder. (It may have left again: then the recall is in vain.)"""
        place = self._place
        return record.owner != place.owner and "exclusive" in (record.mode, place.terms.mode)

    def _tell(self) -> None:
        if not self._over:
            self.end()
            self._place.on_recalled()

    def _read(self) -> None:
        self._watch = None
        self._place.store.start(self._read_until_answered)

    async def _read_until_answered(self) -> None:
        store, keys = self._place.store, self._place.keys
        while not self._over:
            try:
                queue = await store.read(keys)
            except BackendError:
                await asyncio.sleep(PAUSE)
            else:
                if not self._over:
                    self._look(queue)
                return
