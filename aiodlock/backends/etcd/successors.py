"""Whether others want the name of a lease that lingers.

A holder that lingers watches the requests of its name, from the revision on in which it was granted. So
nobody who queues is missed, also while the connection is cut: a watch goes on where it was. What the store
has forgotten by then (a compaction) is read anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..._backoff import pauses
from ..._errors import BackendError
from . import messages as m
from .recipe import Queue, Record, after, read_record
from .request import PAUSE, Request
from .watching import Watch


class Successors:
    """Calls ``recalled`` once when others want the name of a request that holds.

    Mutable state: ``_watch``, ``_over``.
    """

    def __init__(self, request: Request, recalled: Callable[[], object]) -> None:
        self._request = request
        self._recalled = recalled
        self._watch: Watch | None = None
        self._over = False

    def begin(self, created: int, known: Queue | None) -> None:
        """It holds. ``created``: the revision in which its key was made. ``known``: the name's requests, if
        that is newer."""
        if known is not None and known.revision >= created:
            self._look(known)
        elif self._request.token == created:
            self._follow(created + 1)  # before its key was made nobody waited
        else:
            self._read()  # it got in beside its owner's other request, perhaps past waiters

    def end(self) -> None:
        """It holds no more."""
        self._over = True
        if self._watch is not None:
            self._request.cluster.watches.end(self._watch)
            self._watch = None

    def _look(self, queue: Queue) -> None:
        if any(map(self._is_one, queue.requests.values())):
            self._tell()
        else:
            self._follow(queue.revision + 1)

    def _follow(self, revision: int) -> None:
        start = self._request.keys.request("")
        self._watch = self._request.cluster.watches.watch(
            start, after(start), revision, self._heard, self._read
        )

    def _heard(self, events: list[m.Event], revision: int) -> None:
        for event in events:
            if event.type == m.PUT and event.kv is not None:
                _, id = self._request.keys.split(event.kv.key)
                try:
                    found = self._is_one(read_record(id, event.kv))
                except ValueError:
                    continue  # not a key of ours
                if found:
                    self._tell()
                    return

    def _is_one(self, record: Record) -> bool:
        """Whether a request waits for this holder. (It may have left again: then the recall is in vain.)"""
        mine = self._request
        return record.owner != mine.owner and "exclusive" in (record.mode, mine.terms.mode)

    def _tell(self) -> None:
        if not self._over:
            self.end()
            self._recalled()

    def _read(self) -> None:
        self._watch = None
        self._request.cluster.start(self._read_until_answered)

    async def _read_until_answered(self) -> None:
        cluster, keys, pause = self._request.cluster, self._request.keys, pauses(first=PAUSE)
        while not self._over:
            try:
                queue = await cluster.read(keys)
            except BackendError:
                await asyncio.sleep(next(pause))
            else:
                if not self._over:
                    self._look(queue)
                return
