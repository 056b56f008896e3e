"""Everything that a client watches at the cluster, on one stream.

A watch goes on after a cut where it was. What the store has forgotten by then (a compaction) is told to its
owner, who reads anew.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import count

from ..._errors import BackendError
from . import calls as api
from . import messages as m
from .link import Link
from .refusals import TokenEnded


class Watch:
    """One range. ``start``: the revision from which on its changes are not known yet. ``refused``: the last
    stream has refused it, perhaps because of its token."""

    def __init__(
        self,
        id: int,
        key: bytes,
        end: bytes,
        start: int,
        heard: Callable[[list[m.Event], int], None],
        missed: Callable[[], None],
    ) -> None:
        self.id: int = id
        self.key: bytes = key
        self.end: bytes = end
        self.start: int = start
        self.heard: Callable[[list[m.Event], int], None] = heard
        self.missed: Callable[[], None] = missed
        self.created: bool = False
        self.refused: bool = False


class Watches:
    """The stream and what is watched on it.

    Mutable state: ``_watches`` by id, ``_unsent`` (messages for the stream), ``_asked`` (the ids that were
    sent on this stream and not answered yet, in their order), ``_first`` (set when the stream has answered
    for the first time).
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._watches: dict[int, Watch] = {}
        self._ids = count(1)
        self._unsent: asyncio.Queue[m.WatchRequest] = asyncio.Queue()
        self._asked: deque[int] = deque()
        self._first = asyncio.Event()

    def watch(
        self,
        key: bytes,
        end: bytes,
        start: int,
        heard: Callable[[list[m.Event], int], None],
        missed: Callable[[], None],
    ) -> Watch:
        """Have ``heard`` called with the changes of each answer from revision ``start`` on, and the
        revision up to which they are known then. 0 as start: from when the cluster knows of it, which
        is told without changes.

        ``missed`` is called when changes can not be had any more. The watch has ended then.
        """
        watch = Watch(next(self._ids), key, end, start, heard, missed)
        self._watches[watch.id] = watch
        self._unsent.put_nowait(_create(watch))
        return watch

    def end(self, watch: Watch) -> None:
        """Stop."""
        if self._watches.pop(watch.id, None) is not None:
            self._unsent.put_nowait(m.WatchRequest(cancel_request=m.WatchCancelRequest(watch.id)))

    def set_back(self, revision: int) -> None:
        """The store was restored from a backup. Watches that begin later would be told nothing until it is
        as far as before."""
        for watch in list(self._watches.values()):
            if watch.start > revision + 1:
                self.end(watch)
                watch.missed()

    async def first_answer(self) -> None:
        """Wait until the cluster has confirmed a watch."""
        await self._first.wait()

    async def run(self) -> None:
        """Keep the stream until cancelled."""
        await self._link.stream(api.WATCH, self._send, self._heard)

    async def _send(self, send: Callable[[m.WatchRequest], Awaitable[None]]) -> None:
        self._unsent = asyncio.Queue()
        self._asked.clear()
        for watch in self._watches.values():
            self._unsent.put_nowait(_create(watch))
        while True:
            message = await self._unsent.get()
            if message.create_request is not None:
                self._asked.append(message.create_request.watch_id)
            await send(message)

    def _heard(self, answer: m.WatchResponse) -> None:
        asked = self._asked.popleft() if answer.created and self._asked else 0
        if answer.canceled and answer.created:
            # Once it has refused a watch, 3.4 reads nothing more from the stream. 3.5 does not say which it
            # was: the first that was not answered.
            self._on_refused(self._watches.get(asked))
            raise TokenEnded(f"a watch was refused: {answer.cancel_reason}")
        if answer.created and not answer.watch_id:
            # Ours begin with 1. It tells changes under numbers of its own, and renews leases when it likes.
            raise BackendError(
                "this is an etcd grpc-proxy, which is not supported: use the members' own endpoints, or a "
                "proxy that passes calls on as they are"
            )
        self._first.set()
        watch = self._watches.get(answer.watch_id)
        if watch is None:
            return
        revision = answer.header.revision if answer.header is not None else 0
        if answer.canceled:
            # Compacted: its owner has to find out.
            del self._watches[watch.id]
            watch.missed()
            return
        if answer.created:
            watch.created, watch.refused = True, False
            if not watch.start:
                watch.start = revision + 1
                watch.heard([], revision)
        if answer.events:
            # A stream that was opened anew may tell again what was known.
            events = [e for e in answer.events if e.kv and e.kv.mod_revision >= watch.start]
            last = max((e.kv.mod_revision for e in events if e.kv), default=watch.start - 1)
            watch.start = max(watch.start, last + 1)
            watch.heard(events, last)

    def _on_refused(self, watch: Watch | None) -> None:
        """A stream has the user's token of when it was opened, and etcd looks at it for each watch. What
        the next stream refuses, too, the user may not watch: its owner is told, and the others go on."""
        if watch is None:
            return
        if watch.refused:
            del self._watches[watch.id]
            watch.missed()
        watch.refused = True


def _create(watch: Watch) -> m.WatchRequest:
    return m.WatchRequest(
        create_request=m.WatchCreateRequest(
            key=watch.key, range_end=watch.end, start_revision=watch.start, watch_id=watch.id
        )
    )
