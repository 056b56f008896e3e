"""The nodes of a cluster, and which of them owns which slot.

A node says so when a name is not its own: the client follows the redirection (``ASK``) or learns from it
(``MOVED``). It asks the nodes again whenever what it knows turned out to be wrong.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import anyio
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import RedisError

from ...._backoff import pause_after
from ...._clock import now
from ...._errors import BackendError, BackendUnavailable
from ...._tasks import start_soon
from ...kept import Notices
from ..refusals import Redirected, ReplyError, refusal_in
from ..settings import Settings
from ..source import Source
from .node import Address, Node
from .observer import Observer
from .seeds import ask_seed, at_address, host_in, host_of, refusal_of

_logger = logging.getLogger("aiodlock")

#: How long entering waits for primaries that do not answer, when others do (seconds).
_WAIT_FOR_ALL = 2.0
#: Between two questions for the owners of slots, at the least: many requests notice the same change at
#: once.
_ASK_AGAIN = 0.1
#: And so often while a node cannot be reached. When another takes over, holders are asked about: their next
#: extension may be far (seconds).
_ASK_EVERY = 1.0
#: How long a call waits for the answer to that question (seconds).
_ANSWER_WITHIN = 2.0
#: A node that a redirection named is kept for so long, though it owns no slot: the first one may be on its
#: way there (seconds).
_KEPT_FOR = 10.0
#: Between attempts to use a node that refuses this user (seconds).
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0


class Topology:
    """The primaries of a cluster.

    Mutable state: ``nodes`` (by address), ``_owners`` (the address that owns each slot, None for unknown),
    ``_learned`` (the same, as the nodes said last; the former follows redirections too), ``observers``,
    ``changed`` (set when somebody noticed that these may be wrong), ``_told`` (set when the next question
    for the owners has been answered), ``_keeps`` (whether a node is kept that owns no slot),
    ``_entering`` (until nodes are connected; until then a refusal is fatal), ``_leaving`` (set when ``run``
    ends), ``_failure`` (why the last question for the owners had no answer).
    """

    def __init__(self, seeds: Sequence[Source], settings: Settings, label: str) -> None:
        self._seeds = list(seeds)
        self._settings = settings
        self._label = label
        self.nodes: dict[Address, Node] = {}
        self.observers: set[Observer] = set()
        self._owners: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._learned = list(self._owners)
        self.changed: asyncio.Event = asyncio.Event()
        self._told = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._listener: Notices | None = None
        self._failure: Exception | None = None
        self._keeps = False
        self._entering = True
        self._leaving = False

    def __repr__(self) -> str:
        return f"<Topology {self._seeds[0].described}, {len(self.nodes)} nodes>"

    # -- connections -------------------------------------------------------------------------------

    async def run(self, listener: Notices, ready: Callable[[], None]) -> None:
        """Keep all primaries connected, and know the owners of slots, until cancelled."""
        self._listener = listener
        self._entering, self._leaving = True, False
        try:
            async with asyncio.TaskGroup() as self._tasks:
                try:
                    await self._know_owners(ready)
                finally:
                    self._leaving = True
        finally:
            self._tasks = None
            self.nodes.clear()

    async def _know_owners(self, ready: Callable[[], None]) -> None:
        while not await self._ask_for_owners():  # noqa: ASYNC110
            await asyncio.sleep(_ASK_AGAIN)
        with anyio.move_on_after(_WAIT_FOR_ALL):
            for node in list(self.nodes.values()):
                await node.up.wait()
        while not any(node.up.is_set() for node in self.nodes.values()):
            await asyncio.sleep(_ASK_AGAIN)
            await self._ask_for_owners()
        self._entering = False
        ready()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._ask_within()):
                    await self.changed.wait()
            # Whoever wants to know from now on is told by the next answer.
            told, self._told = self._told, asyncio.Event()
            await self._ask_for_owners(seeds=self.changed.is_set())
            told.set()
            await asyncio.sleep(_ASK_AGAIN * random.uniform(1.0, 2.0))

    def _ask_within(self) -> float | None:
        """Return the seconds after which the owners are asked for though nobody has noticed a change."""
        if any(node.server.wire is None for node in self.nodes.values()):
            return _ASK_EVERY * random.uniform(0.8, 1.0)
        return _KEPT_FOR if self._keeps else None

    async def _run_node(self, node: Node) -> None:
        assert self._listener is not None
        failures = 0

        def on_up() -> None:
            nonlocal failures
            failures, node.refusal = 0, None
            node.up.set()

        with node.scope:
            while True:
                try:
                    node.begun.set()
                    await node.server.run(self._listener, on_up)
                except (BackendError, ExceptionGroup) as failed:
                    if self._leaving:
                        return  # it was cancelled, which a task group that fails keeps to itself
                    node.refusal = refusal = refusal_in(failed) or failed
                    if self._entering:
                        raise
                    # One node does not know this user yet. The names of the others are not concerned.
                    level = logging.DEBUG if failures else logging.WARNING
                    extra = {"event": "node_refuses"}
                    _logger.log(level, "a node of the cluster: %s", refusal, extra=extra)
                failures += 1
                pause = pause_after(failures, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE)
                await asyncio.sleep(pause)

    @property
    def failure(self) -> Exception | None:
        """Why there is no connection to one of the nodes, or to any, if so."""
        failures = (node.failure for node in self.nodes.values())
        return next((failure for failure in failures if failure), self._failure)

    # -- owners of slots ---------------------------------------------------------------------------

    async def learn(self) -> None:
        """Have the nodes asked which of them owns which slots, and wait a moment for the answer.

        All who want to know at the same time share one question.
        """
        if self._tasks is None:
            return  # the client has ended
        self.changed.set()
        told = self._told
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_WITHIN):
                await told.wait()

    async def _ask_for_owners(self, *, seeds: bool = True) -> bool:
        """Ask one node after the other which primary owns which slots, until one tells.

        :param seeds: whether those that the user has named are asked, too, if none tells.
        """
        self.changed.clear()
        nodes = list(self.nodes.values())
        random.shuffle(nodes)
        # A node that is alone knows nothing of a failover.
        nodes.sort(key=lambda node: node.failure is not None)
        for node in nodes:
            try:
                self._learn(await node.slots(), node.address[0])
                return True
            except (BackendError, ReplyError, TimeoutError) as failed:
                self._failure = failed
        return seeds and await self._ask_seeds()

    async def _ask_seeds(self) -> bool:
        """Ask all at once: some may be addresses that nobody answers at any more."""
        refusals: list[BackendError] = []
        learned = False

        async def ask(seed: Source) -> None:
            nonlocal learned
            try:
                slots = await ask_seed(seed)
                if not learned:
                    self._learn(slots, host_of(seed))
                    learned = True
                    tasks.cancel_scope.cancel()
            except (BackendError, ReplyError, RedisError, OSError) as failed:
                if not learned:
                    self._failure = failed
                # Once entered, another server may have its address, or the right may be gone for a moment.
                if self._entering and (refusal := refusal_of(seed, failed)):
                    refusals.append(refusal)

        async with anyio.create_task_group() as tasks:
            for seed in self._seeds:
                tasks.start_soon(ask, seed)
        if refusals and not learned:
            raise refusals[0]
        return learned

    def _learn(self, slots: Any, asked: str) -> None:
        if not slots:
            raise BackendUnavailable("the cluster has given no slots to its nodes yet")
        owners: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        try:
            for first, last, primary, *_ in slots:
                address = (host_in(primary, asked), int(primary[1]))
                owners[int(first) : int(last) + 1] = [address] * (int(last) - int(first) + 1)
        except (ValueError, TypeError, AttributeError, IndexError) as wrong:
            raise BackendError(f"CLUSTER SLOTS has the wrong shape: {slots!r:.200}") from wrong
        before, self._learned = self._learned, owners
        self._owners, self._failure = list(owners), None
        present = {owner for owner in owners if owner is not None}
        for address in present - self.nodes.keys():
            self.start(address)
        owned, moment = set(before), now()
        for address in self.nodes.keys() - present:
            if address in owned or self.nodes[address].kept_until <= moment:
                self.nodes.pop(address).scope.cancel()
        self._keeps = len(self.nodes) > len(present)
        for observer in tuple(self.observers):
            observer.settle()
        if before == owners:
            return

        def moved(channel: bytes) -> bool:
            slot = key_slot(channel)
            return before[slot] != owners[slot]

        for node in self.nodes.values():
            node.again(moved)
        if owned - present - {None} and self._listener is not None:
            # The node that took its names over may not know the last grants.
            self._listener.on_other_server()

    def start(self, address: Address) -> Node:
        source = at_address(self._seeds[0], *address)
        node = Node(source, address, self._settings, self._label, self.changed.set)
        self.nodes[address] = node
        start_soon(self._tasks, self._run_node(node))
        return node

    # -- the node of a name ------------------------------------------------------------------------

    def address_of(self, name: str) -> Address | None:
        """Return the address of the node that owns a name, if that is known."""
        return self._owners[slot_of(name)]

    def owner(self, name: str) -> Node | None:
        """Return the node that owns a name, if that is known."""
        address = self._owners[slot_of(name)]
        return self.nodes.get(address) if address is not None else None

    def node_of(self, name: str) -> Node:
        """Return the node that owns a name, or raise BackendUnavailable."""
        node = self.owner(name)
        if node is None:
            self.changed.set()
            raise BackendUnavailable(f"no node of the cluster owns the slot of {name!r} for now")
        return node

    def follow(self, name: str, redirected: Redirected, node: Node) -> Node:
        """Return where a request is to be sent instead."""
        host, port = redirected.address
        address = (host or node.address[0], port)
        if host == "?":  # it is to be called by a name, and has none
            self.changed.set()
            known = [known for known in self.nodes if known[1] == port]
            if len(known) != 1:
                raise BackendUnavailable(
                    f"the cluster does not say where {name!r} is: {redirected}"
                )
            address = known[0]
        if not redirected.asking:
            self._owners[slot_of(name)] = address
            self.changed.set()
        found = self.nodes.get(address) or self.start(address)
        found.kept_until = now() + _KEPT_FOR
        return found


def slot_of(name: str) -> int:
    """Return the slot of all keys of a name."""
    return key_slot(quote(name, safe="").encode())
