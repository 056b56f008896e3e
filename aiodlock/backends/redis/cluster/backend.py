"""What the core calls on a cluster: each name's calls go to the node that owns its slot.

All keys of a name share a slot, so a lock needs nothing but that node. When a node redirects a request, the
request is repeated by its id at another one, as after any lost reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from ...._clock import now
from ...._errors import BackendError, BackendUnavailable
from ...._model import (
    Capabilities,
    Gone,
    Granted,
    Kind,
    Left,
    LockInfo,
    Refused,
    StoreRequest,
    Tokens,
    Waiting,
)
from ..._label import make_label
from ...base import Unanswered
from ...kept import Notices
from ..calls import Outcome
from ..keys import name_of
from ..refusals import Redirected
from ..replicas import capabilities
from ..settings import Settings
from ..source import Source
from .node import Node, stop_listening
from .topology import Topology

_T = TypeVar("_T")

_REDIRECTIONS = 4


class ClusterBackend:
    """A ``KeptStore``: all primaries of a cluster."""

    def __init__(self, seeds: Sequence[Source], settings: Settings) -> None:
        self.capabilities: Capabilities = capabilities(settings.min_replicas)
        self.label: str = make_label()
        self.topology: Topology = Topology(seeds, settings, self.label)

    def __repr__(self) -> str:
        return f"<ClusterBackend {self.topology!r}>"

    def follow(self, dead: ClusterBackend) -> None:
        """See ``Follower``."""
        self.topology.known.follow(dead.topology.known)

    async def run(self, listener: Notices, ready: Callable[[], None]) -> None:
        await self.topology.run(listener, ready)

    @property
    def failure(self) -> Exception | None:
        """Why there is no connection to one of the nodes, or to any, if so."""
        return self.topology.failure

    @property
    def further_at(self) -> float:
        """When entering has last come further; see ``StoreBase``."""
        return self.topology.further_at

    @property
    def answers_within(self) -> float:
        """How long the next answer may take (seconds)."""
        return self.topology.answers_within

    async def _at(self, name: str, call: Callable[[Node], Awaitable[_T]]) -> _T:
        """Call the node that owns the name, and where it sends us instead."""
        node = self.topology.node_of(name)
        for _ in range(_REDIRECTIONS):
            try:
                await node.wait_begun()
                answer = await call(node)
                node.server.refusal = None
                return answer
            except Redirected as redirected:
                node = self.topology.follow(name, redirected, node)
            except BackendUnavailable:
                self.topology.changed.set()
                raise
        raise BackendUnavailable(f"the cluster's nodes do not agree yet on the owner of {name!r}")

    async def _once_at(self, name: str, call: Callable[[Node], Awaitable[_T]]) -> _T:
        """The same for a caller that does not come back. If the node cannot be reached, and another one has
        taken over from it, that one is called."""
        before = self.topology.address_of(name)
        try:
            return await self._at(name, call)
        except Unanswered:
            raise  # it may have been carried out
        except BackendUnavailable:
            await self.topology.learn()
            if self.topology.address_of(name) in (None, before):
                raise
            return await self._at(name, call)

    # -- requests --------------------------------------------------------------------------------

    async def acquire(
        self, request: StoreRequest, *, wait: bool
    ) -> Granted | Waiting | Refused | Gone:
        at = self._at if wait else self._once_at
        return await at(request.name, lambda node: node.calls.acquire(request, wait=wait))

    def extend(
        self, batch: Sequence[tuple[StoreRequest, float]]
    ) -> Sequence[Awaitable[Granted | Waiting | Gone]]:
        per_node: dict[Node, list[int]] = {}
        outcomes: list[Awaitable[Granted | Waiting | Gone]] = [_UNKNOWN] * len(batch)
        for index, (request, _) in enumerate(batch):
            node = self.topology.owner(request.name)
            if node is None:
                self.topology.changed.set()
            else:
                per_node.setdefault(node, []).append(index)
        for node, indices in per_node.items():
            answers = node.calls.extend([batch[index] for index in indices])
            for index, answer in zip(indices, answers, strict=True):
                outcomes[index] = self._outcome(node, batch[index][0], answer)
        return outcomes

    def server_of(self, request: StoreRequest) -> object:
        return self.topology.address_of(request.name)

    def _outcome(
        self, node: Node, request: StoreRequest, answer: Awaitable[Granted | Waiting | Gone]
    ) -> Outcome:
        async def outcome() -> Granted | Waiting | Gone:
            try:
                found = await answer
                node.server.refusal = None
                if isinstance(found, Gone):
                    stop_listening(request)  # it may not be left: a success is on record
                return found
            except Redirected as redirected:
                # Answers of other names stand behind this one, so the other node is not asked from here:
                # it may be silent. The repetition goes there.
                self.topology.follow(request.name, redirected, node)
                raise BackendUnavailable(
                    f"another node of the cluster takes over {request.name!r}"
                ) from redirected
            except BackendUnavailable:
                self.topology.changed.set()
                raise

        return Outcome(outcome)

    async def leave(
        self, request: StoreRequest, *, lost: bool = False, within: float | None = None
    ) -> Left:
        stop_listening(request)  # also when its node is unreachable
        began = now()

        async def leave(node: Node) -> Left:
            # A node that has redirected it, and waiting for the next one, took a part of the time.
            left = within if within is None else max(0.001, within - (now() - began))
            return await node.calls.leave(request, lost=lost, within=left)

        return await self._at(request.name, leave)

    def leave_later(
        self,
        request: StoreRequest,
        done: Callable[[Left | BackendError], object],
        *,
        lost: bool = False,
    ) -> bool:
        node = self.topology.owner(request.name)

        def on_result(result: Left | BackendError) -> None:
            if isinstance(result, Redirected | BackendUnavailable):
                self.topology.changed.set()
            done(result)

        return node is not None and node.calls.leave_later(request, on_result, lost=lost)

    async def leave_unknown(self, request_id: str, where: str, final: bool) -> Left:
        return await self._at(
            name_of(where)[1], lambda node: node.calls.leave_unknown(request_id, where, final)
        )

    async def settle(self) -> None:
        """Every answer is waited for by a call."""

    def watch(self, request: StoreRequest, watching: bool) -> None:
        for node in self.topology.nodes.values():
            if not watching or node.address == self.topology.address_of(request.name):
                node.calls.watch(request, watching)

    def announce(self, kind: str, name: str) -> None:
        with suppress(BackendUnavailable):
            self.topology.node_of(name).calls.announce(kind, name)

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        return self.topology.observe(kind, name, changed)

    # -- for people ------------------------------------------------------------------------------

    async def inspect(self, kind: Kind, name: str, *, queues: bool = True) -> LockInfo:
        (info,) = await self._once_at(
            name, lambda node: node.inspection.inspect_all(kind, [name], queues=queues)
        )
        return info

    async def inspect_all(
        self, kind: Kind, names: Sequence[str], *, queues: bool = True
    ) -> list[LockInfo]:
        return await asyncio.gather(*(self.inspect(kind, name, queues=queues) for name in names))

    async def tell_waits(self, serial: int, record: bytes, *, keep: float) -> None:
        await self._at(self.label, lambda node: node.waits.tell_waits(serial, record, keep=keep))

    async def waits_of(self, labels: Sequence[str]) -> dict[str, bytes]:
        async def at(label: str) -> dict[str, bytes]:
            return await self._once_at(label, lambda node: node.waits.waits_of([label]))

        found: dict[str, bytes] = {}
        for one in await asyncio.gather(*(at(label) for label in labels)):
            found |= one
        return found

    async def names(self, match: str, kind: Kind = "lock") -> AsyncIterator[str]:
        seen: set[str] = set()
        # What nobody has called since tells nothing of nodes that came and went.
        await self.topology.learn()
        for node in list(self.topology.nodes.values()):
            await node.wait_begun()
            async for name in node.inspection.names(match, kind):
                if name not in seen:  # its slot may have moved meanwhile
                    seen.add(name)
                    yield name

    async def break_lock(self, name: str, kind: Kind = "lock", tokens: Tokens | None = None) -> int:
        return await self._once_at(
            name, lambda node: node.inspection.break_lock(name, kind, tokens)
        )

    async def forget(self, name: str) -> bool:
        return await self._once_at(name, lambda node: node.inspection.forget(name))


async def _unknown() -> Granted | Waiting | Gone:
    raise BackendUnavailable("no node of the cluster owns the slot for now")


_UNKNOWN = Outcome(_unknown)
