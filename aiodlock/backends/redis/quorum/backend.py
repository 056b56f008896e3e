"""What the keeper calls on a quorum, and how its rooms are put together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from ...._errors import BackendError
from ...._model import (
    Capabilities,
    Gone,
    Granted,
    Left,
    Refused,
    StoreRequest,
    Waiting,
)
from ..._label import make_label
from ...asked import Asked
from ...kept import NOTHING_LEFT, Notices
from ..calls import Outcome
from ..settings import Settings
from ..source import Source
from .asking import Asking
from .broadcast import Broadcast
from .confirming import Confirming
from .delays import length_of
from .giving_back import GivingBack
from .holding import Holding
from .inspection import Inspection
from .leaving import Leaving
from .messenger import Messenger
from .nodes import Nodes
from .notices import NodeNotices
from .requests import Requests
from .voter import Voter
from .votes import Answer, Tally

#: A body runs so long on its lease as a waiter (seconds). Most have ended by then, and need no extension.
_EXTEND_AFTER = 0.01
CAPABILITIES = Capabilities(
    fair="by ticket", semaphores=False, notices="hints", extend_after=_EXTEND_AFTER
)


class QuorumBackend(Asked):
    """A ``KeptStore``: all nodes of a quorum. Its state is in its rooms."""

    def __init__(
        self,
        sources: Sequence[Source],
        settings: Settings,
        *,
        restart_delay: float | None,
        described: str,
        label: str | None = None,
    ) -> None:
        self.capabilities: Capabilities = CAPABILITIES
        self.label: str = label or make_label()
        self.nodes: Nodes = Nodes(
            sources, settings, self.label, restart_delay, described, self._on_restarted
        )
        self._requests = Requests(self.nodes)
        self._giving_back = GivingBack(self._requests)
        self._messenger = Messenger(self._requests, self._giving_back)
        self._confirming = Confirming(self._requests, self._messenger, self._giving_back)
        self._holding = Holding(self._requests, self._messenger)
        self._asking = Asking(self._requests, self._messenger, self._confirming, self._holding)
        self._leaving = Leaving(self._requests)
        self._people = Inspection(self.nodes)
        super().__init__(self._people, self._people)

    def __repr__(self) -> str:
        return f"<QuorumBackend {self.nodes.described}>"

    # -- life ------------------------------------------------------------------------------------

    def follow(self, dead: QuorumBackend) -> None:
        """See ``Follower``."""
        self.nodes.follow(dead.nodes)

    async def run(self, listener: Notices, ready: Callable[[], None]) -> None:
        self._requests.listener = listener
        try:
            async with asyncio.TaskGroup() as tasks:
                self._leaving.tasks = tasks
                await self.nodes.run(tasks, self._notices_of, ready, self._on_trust_changed)
        finally:
            self._leaving.tasks = None
            self._requests.clear()

    def _notices_of(self, voter: Voter) -> NodeNotices:
        return NodeNotices(voter, self._requests, self._giving_back, self._leaving)

    def _on_restarted(self, voter: Voter) -> None:
        self._requests.node_restarted(voter.node)

    def _on_trust_changed(self) -> None:
        if self._requests.listener is not None:
            self._requests.listener.on_look(None)

    @property
    def failure(self) -> Exception | None:
        """Why there is no majority of connections, or none that counts, if there is none."""
        return self.nodes.failure

    @property
    def further_at(self) -> float:
        """When entering has last come further; see ``StoreBase``."""
        return max(voter.further_at for voter in self.nodes.voters)

    @property
    def answers_within(self) -> float:
        """How long the next answer may take (seconds)."""
        return sorted(voter.patience.typical for voter in self.nodes.voters)[
            self.nodes.majority - 1
        ]

    # -- requests --------------------------------------------------------------------------------

    async def acquire(
        self, request: StoreRequest, *, wait: bool
    ) -> Granted | Waiting | Refused | Gone:
        length = length_of(request.terms, request.terms.ttl)
        if self.nodes.delays.use(length):
            await self.nodes.note(length)
        return await self._asking.acquire(request, wait=wait)

    def extend(
        self, batch: Sequence[tuple[StoreRequest, float]]
    ) -> Sequence[Awaitable[Granted | Waiting | Gone]]:
        return [self._extend(request, length) for request, length in batch]

    def _extend(self, request: StoreRequest, length: float) -> Awaitable[Granted | Waiting | Gone]:
        tally = self._requests.get(request.id)
        if tally is None:
            return Outcome(_gone)  # it left meanwhile: asking now would queue it again
        in_use = length_of(request.terms, max(length, request.terms.ttl))
        to_note = self.nodes.delays.use(in_use)
        if tally.token:
            extension = self._holding.extend(tally, length)
            if to_note:
                return Outcome(lambda: self._noted(in_use, tally, extension))
            return Outcome(lambda: self._holding.outcome(tally, extension))
        # With a majority of votes nothing has to be asked before they are confirmed.
        has_majority = self._requests.has_majority(tally)
        asked = None if has_majority else self._messenger.ask(tally, length)
        return Outcome(lambda: self._asking.outcome(tally, asked, length))

    async def _noted(
        self, length: int, tally: Tally, extension: Broadcast[Answer]
    ) -> Granted | Gone:
        """Go on holding for longer than any lease in use, once the nodes know of it."""
        await self.nodes.note(length)
        return await self._holding.outcome(tally, extension)

    def server_of(self, request: StoreRequest) -> object:
        # A request that may have to be asked about twice must not keep the others waiting.
        tally = self._requests.get(request.id)
        return None if tally is not None and tally.token else request.id

    def leave(
        self, request: StoreRequest, *, lost: bool = False, within: float | None = None
    ) -> Coroutine[Any, Any, Left]:
        return self._leaving.leave(request, lost, within)

    def leave_later(
        self,
        request: StoreRequest,
        done: Callable[[Left | BackendError], object],
        *,
        lost: bool = False,
    ) -> bool:
        self._leaving.leave_later(request, done, lost)
        return True

    async def settle(self) -> None:
        await self._leaving.settle()

    async def leave_unknown(self, request_id: str, where: str, final: bool) -> Left:
        left = await self._people.of_majority(
            lambda voter: voter.leave_unknown(request_id, where, final)
        )
        return next((one for one in left if one != NOTHING_LEFT), NOTHING_LEFT)

    # -- messages --------------------------------------------------------------------------------

    def watch(self, request: StoreRequest, watching: bool) -> None:
        for voter in self.nodes.voters:
            voter.watch(request, watching)

    def announce(self, kind: str, name: str) -> None:
        for voter in self.nodes.voters:
            voter.announce(kind, name)

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        stops = [voter.observe(kind, name, changed) for voter in self.nodes.voters]

        def stop() -> None:
            for stop_one in stops:
                stop_one()

        return stop


async def _gone() -> Gone:
    return Gone("gone")
