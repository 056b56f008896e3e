"""How extensions go out: in batches, so many on their way to one server, and their answers in slices."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from .._errors import BackendError
from .._model import Gone, Granted, Waiting
from .kept import Kept, KeptStore
from .stage import OVER

#: So many places are served in one turn of the loop: that takes a few milliseconds.
SLICE = 200
#: So many extensions are on their way to one server at most: what is read at once takes some milliseconds,
#: and few objects grow so old that Python's collector looks at all there are.
_WINDOW = 2000

Answer: TypeAlias = Granted | Waiting | Gone


class Sender:
    """Extends batches of places.

    Mutable state: ``_flying`` (how many extensions are on their way, per server), ``_held_back`` (holders
    and waiters that wait until there are fewer), ``_taken`` (answers taken in this turn of the loop).

    :param start: has ``fly`` run with a server and a batch, in a task of its own.
    :param on_answer: takes the answer to an extension by so many seconds, and whether it was sent as a
        holder's.
    :param on_unknown: is told that an extension had no answer.
    """

    def __init__(
        self,
        store: KeptStore,
        start: Callable[[object, Sequence[Kept]], object],
        on_answer: Callable[[Kept, Answer, float, bool], object],
        on_unknown: Callable[[Kept, BackendError], object],
    ) -> None:
        self._store = store
        self._start = start
        self._on_answer = on_answer
        self._on_unknown = on_unknown
        self._flying: dict[object, int] = {}
        self._held_back: dict[object, tuple[deque[Kept], deque[Kept]]] = {}
        self._taken = 0

    def send(self, batch: Iterable[Kept]) -> None:
        """Extend these as soon as there are not too many on their way; holders first.

        Each server has batches of its own. Answers are awaited in order: those of a silent server must not
        keep another's waiting.
        """
        servers: dict[object, None] = {}
        for place in batch:
            server = self._store.server_of(place)
            servers[server] = None
            holders, waiters = self._held_back.setdefault(server, (deque(), deque()))
            (holders if place.granted else waiters).append(place)
        for server in servers:
            self._send_held_back(server)

    def _send_held_back(self, server: object) -> None:
        holders, waiters = self._held_back[server]
        while (rest := holders or waiters) and self._flying.get(server, 0) < _WINDOW:
            batch = [rest.popleft() for _ in range(min(SLICE, len(rest)))]
            self._flying[server] = self._flying.get(server, 0) + len(batch)
            self._start(server, batch)
        if not rest:
            # A task that started eagerly may have ended already, and have come by here.
            self._held_back.pop(server, None)

    async def fly(self, server: object, batch: Sequence[Kept]) -> None:
        """Extend a batch, and see to what was held back for it."""
        await self._extend([place for place in batch if place.stage is not OVER])
        self._flying[server] -= len(batch)
        if not self._flying[server]:
            del self._flying[server]
        if server in self._held_back:
            self._send_held_back(server)

    async def _extend(self, batch: Sequence[Kept]) -> None:
        lengths = [place.length for place in batch]
        as_holders = [place.granted for place in batch]
        try:
            outcomes = self._store.extend(list(zip(batch, lengths, strict=True)))
        except BackendError as error:
            # It is no answer about any of them, and what else this client holds must not end for it.
            for place in batch:
                self._on_unknown(place, error)
            return
        for place, length, known, outcome in zip(batch, lengths, as_holders, outcomes, strict=True):
            try:
                answer = await outcome
            except BackendError as error:
                self._on_unknown(place, error)
            else:
                self._on_answer(place, answer, length, known)
            while self._taken >= SLICE:  # noqa: ASYNC110
                # No more answers in this turn of the loop: thousands may have come in one packet.
                await asyncio.sleep(0)
            if not self._taken:
                asyncio.get_running_loop().call_soon(self._new_turn)
            self._taken += 1

    def _new_turn(self) -> None:
        self._taken = 0
