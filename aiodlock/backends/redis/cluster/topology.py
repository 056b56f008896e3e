"""The nodes of a cluster, and which of them owns which slot.

A node says so when a name is not its own (``MOVED``): the client learns from it, and follows. It asks the
nodes again whenever what it knows turned out to be wrong. While a slot is on its way (``ASK``), no node
runs scripts about its names, since the keys of a name are not all at one: the client calls again until it
has arrived.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import quote

import anyio
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import RedisError

from ...._backoff import pause_after
from ...._clock import now
from ...._errors import BackendError, BackendUnavailable
from ...._patience import LEAST, Further, Patience
from ...._tasks import start_soon
from ..._identity import Known, OtherStore
from ...kept import Notices
from ..refusals import Redirected, ReplyError, refusal_in
from ..settings import Settings
from ..source import Source
from .identity import ClusterIdentity, Told
from .node import Address, Node
from .observer import Observer
from .seeds import SeedAnswers, ask_seed, owners_in, refusal_of, unlike

_logger = logging.getLogger("aiodlock")

#: How long entering waits for primaries that do not answer, when others do (seconds).
_WAIT_FOR_ALL = 2.0
#: Between two questions for the owners of slots, at the least: many requests notice the same change at
#: once.
_ASK_AGAIN = 0.1
#: And so often while a node cannot be reached. When another takes over, holders are asked about: their next
#: extension may be far (seconds).
_ASK_EVERY = 1.0
#: One that is asked and does not answer delays the question to the next one by so much (seconds).
_ASK_NEXT_AFTER = 0.1
#: While a client is entered, addresses that do not answer are waited for so long when others have
#: answered and do not settle which cluster is meant (seconds).
_WAIT_FOR_SEEDS = 1.0
#: A node that a redirection named is kept for so long, though it owns no slot: the first one may be on its
#: way there (seconds).
_KEPT_FOR = 10.0
#: Between attempts to use a node that refuses this user (seconds).
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0


class Topology:
    """The primaries of a cluster.

    Mutable state: ``nodes`` (by address), ``_owners`` (the address that owns each slot, None for unknown),
    ``_learned`` (the same, as the nodes said last; the former follows redirections too), ``_present`` (the
    nodes that own slots, likewise), ``_observers``,
    ``changed`` (set when somebody noticed that these may be wrong), ``_told`` (set when the next question
    for the owners has been answered), ``_tasks`` (until ``run`` ends), ``_entering``
    (until nodes are connected; until then a refusal is fatal), ``_failure`` (why the last question for the
    owners had no answer), ``known`` (which cluster it is), ``_patience`` (how long answers to that question
    take).
    """

    def __init__(self, seeds: Sequence[Source], settings: Settings, label: str) -> None:
        self._seeds = unlike(seeds)
        self._make_node = partial(
            Node, settings=settings, label=label, on_news=self._on_news, check=self.check
        )
        self.nodes: dict[Address, Node] = {}
        self._observers: set[Observer] = set()
        self._owners: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._learned = list(self._owners)
        self._present: dict[Address, None] = {}
        self.changed: asyncio.Event = asyncio.Event()
        self._told = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._listener: Notices | None = None
        self._failure: Exception | None = None
        self._entering = True
        self._patience = Patience()
        self._further = Further()
        self.known: Known[ClusterIdentity] = Known(
            seeds[0].described, silence=settings.unavailable_after, may_hold=self._may_hold
        )

    def __repr__(self) -> str:
        return f"<Topology {self._seeds[0].described}, {len(self.nodes)} nodes>"

    # -- connections -------------------------------------------------------------------------------

    async def run(self, listener: Notices, ready: Callable[[], None]) -> None:
        """Keep all primaries connected, and know the owners of slots, until cancelled."""
        self._listener = listener
        self._entering = True
        try:
            async with asyncio.TaskGroup() as self._tasks:
                try:
                    await self._know_owners(ready)
                finally:
                    self._tasks = None
        finally:
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
            alone = all(node.server.wire is None for node in self.nodes.values())
            await self._ask_for_owners(seeds=alone or self.changed.is_set())
            told.set()
            await asyncio.sleep(_ASK_AGAIN * random.uniform(1.0, 2.0))

    def _ask_within(self) -> float | None:
        """Return the seconds after which the owners are asked for though nobody has noticed a change."""
        if any(node.server.wire is None for node in self.nodes.values()):
            return _ASK_EVERY * random.uniform(0.8, 1.0)
        # A node is kept for a while that owns no slot.
        return _KEPT_FOR if self.nodes.keys() - self._present.keys() else None

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
                    await node.run(self._listener, on_up)
                except (BackendError, ExceptionGroup) as failed:
                    if self._tasks is None:
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
    def further_at(self) -> float:
        """When entering has last come further; see ``StoreBase``."""
        return max(self._further.at, *(node.server.further_at for node in self.nodes.values()), 0.0)

    @property
    def answers_within(self) -> float:
        """How long the next answer may take (seconds)."""
        return max((node.server.answers_within for node in self.nodes.values()), default=LEAST)

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
            async with asyncio.timeout(2 * self._patience.learned):
                await told.wait()

    async def _ask_for_owners(self, *, seeds: bool = True) -> bool:
        """Ask which primary owns which slots, until one of the nodes tells.

        :param seeds: whether those that the user has named are asked, too, if none tells.
        """
        self.changed.clear()
        nodes = [node for node in self.nodes.values() if node.server.wire is not None]
        random.shuffle(nodes)
        # A node that is alone knows nothing of a failover.
        nodes.sort(key=lambda node: node.failure is not None)
        if await self._ask_in_turn([partial(self._ask_node, node) for node in nodes]):
            return True
        return seeds and await self._ask_seeds()

    async def _ask_in_turn(self, places: Sequence[Callable[[], Awaitable[None]]]) -> bool:
        """Ask one after the other, the next one soon if there is no answer, until one has told."""
        told = False

        async def ask(place: Callable[[], Awaitable[None]], answered: asyncio.Event) -> None:
            nonlocal told
            try:
                await place()
                told = True
                tasks.cancel_scope.cancel()
            except (BackendError, ReplyError, TimeoutError) as failed:
                self._failure = failed
                answered.set()

        async with anyio.create_task_group() as tasks:
            for place in places:
                answered = asyncio.Event()
                tasks.start_soon(ask, place, answered)
                with anyio.move_on_after(_ASK_NEXT_AFTER):
                    await answered.wait()
        return told

    async def _ask_node(self, node: Node) -> None:
        asked = now()
        try:
            told = await node.told(self._patience.within())
        except TimeoutError:
            self._patience.ran_out()
            raise
        self._patience.answered(now() - asked)
        self._meet(told.identity, node.server.described)
        self._learn(told.slots, node.address[0])

    async def _ask_seeds(self) -> bool:
        """Ask all at once: some may be addresses that nobody answers at any more.

        A client that enters goes by most of them. Once entered, it believes those that it knows.
        """
        if self.known.value is None:
            return await self._enter_by_seeds()
        return await self._ask_in_turn([partial(self._ask_known, seed) for seed in self._seeds])

    async def _ask_known(self, seed: Source) -> None:
        try:
            told = await ask_seed(seed, self._further)
        except (RedisError, OSError) as failed:
            raise BackendUnavailable(f"{seed.described}: {failed}") from failed
        self._meet(told.identity, seed.described)
        self._learn(told.slots, seed.place[0])

    async def _enter_by_seeds(self) -> bool:
        answers = SeedAnswers(self._seeds)
        for index, seed in enumerate(self._seeds):
            start_soon(self._tasks, self._hear_seed(index, seed, answers))
        await answers.first.wait()
        with anyio.move_on_after(_WAIT_FOR_SEEDS):
            await answers.settled.wait()
        if not answers.told:
            if answers.refusals:
                raise answers.refusals[0]
            return False
        self._believe(answers.told, answers.chosen())
        return True

    async def _hear_seed(self, index: int, seed: Source, answers: SeedAnswers) -> None:
        try:
            told = await ask_seed(seed, self._further)
        except (BackendError, ReplyError, RedisError, OSError) as failed:
            self._failure = failed
            answers.failed(refusal_of(seed, failed) if self._entering else None)
            return
        answers.take(index, told)
        if self.known.value is not None:  # it came late, and is compared at least
            with suppress(OtherStore):  # the log says so
                self._meet(told.identity, seed.described)

    def _believe(self, told: dict[int, Told], chosen: int) -> None:
        """Enter the cluster of one of these answers; the log says which addresses are of another one."""
        self._meet(told[chosen].identity, self._seeds[chosen].described)
        self._learn(told[chosen].slots, self._seeds[chosen].place[0])
        for index, other in told.items():
            with suppress(OtherStore):
                self._meet(other.identity, self._seeds[index].described)

    # -- which cluster it is -----------------------------------------------------------------------

    def _may_hold(self) -> bool:
        return self._listener is None or self._listener.may_hold()

    def _meet(self, seen: ClusterIdentity, where: str) -> None:
        """Compare a node with what is known; raise ``OtherStore`` if no known one names it."""
        if any(node.server.wire is not None for node in self.nodes.values()):
            self.known.heard()
        self.known.meet(seen, where)

    async def check(self, node: Node, seen: ClusterIdentity) -> None:
        """See that a new connection leads to a node of this cluster; raise ``OtherStore`` if not.

        It may have joined a moment ago. Then the others know it, and are asked.
        """
        known = self.known.value
        if known is not None and seen.node not in known.nodes:
            await self.learn()
        known = self.known.value
        if known is not None and seen.node in known.nodes and not seen.conflict(known):
            return  # whom it names is news only when it is asked for that
        self._meet(seen, node.server.described)

    def _on_news(self) -> None:
        self.known.heard()
        self.changed.set()

    def _learn(self, slots: Any, asked: str) -> None:
        owners, present = owners_in(slots, asked)
        before, self._learned = self._learned, owners
        self._owners, self._failure = list(owners), None
        owned, self._present = self._present, present
        self._keep(present, owned)
        for observer in tuple(self._observers):
            observer.settle()
        if before == owners:
            return

        def moved(channel: bytes) -> bool:
            slot = key_slot(channel)
            return before[slot] != owners[slot]

        for node in self.nodes.values():
            node.again(moved)
        if owned.keys() - present.keys() and self._listener is not None:
            # The node that took its names over may not know the last grants.
            self._listener.on_other_server()

    def _keep(self, present: dict[Address, None], owned: dict[Address, None]) -> None:
        """Begin with nodes that own slots now, and end those that own none any more."""
        for address in present:
            if address not in self.nodes:
                self.start(address)
        moment = now()
        for address in [known for known in self.nodes if known not in present]:
            if address in owned or self.nodes[address].kept_until <= moment:
                self.nodes.pop(address).scope.cancel()

    def start(self, address: Address) -> Node:
        node = self._make_node(self._seeds[0].at(*address), address)
        self.nodes[address] = node
        start_soon(self._tasks, self._run_node(node))
        return node

    # -- the node of a name ------------------------------------------------------------------------

    def address_of(self, name: str) -> Address | None:
        """Return the address of the node that owns a name, if that is known."""
        return self._owners[slot_of(name)]

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        """Call ``changed`` when the holder changes, wherever the slot moves; return what ends that."""
        observer = Observer(self.owner, kind, name, changed)
        self._observers.add(observer)

        def stop() -> None:
            self._observers.discard(observer)
            observer.stop()

        return stop

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
        """Return where a request is to be sent instead; raise if its slot is on its way."""
        if redirected.asking:
            raise BackendUnavailable(
                f"the slot of {name!r} is on its way to another node"
            ) from redirected
        host, port = redirected.address
        address = (host or node.address[0], port)
        self.changed.set()
        if host == "?":  # it is to be called by a name, and has none
            known = [known for known in self.nodes if known[1] == port]
            if len(known) != 1:
                raise BackendUnavailable(
                    f"the cluster does not say where {name!r} is: {redirected}"
                )
            address = known[0]
        self._owners[slot_of(name)] = address
        found = self.nodes.get(address) or self.start(address)
        found.kept_until = now() + _KEPT_FOR
        return found


def slot_of(name: str) -> int:
    """Return the slot of all keys of a name."""
    return key_slot(quote(name, safe="").encode())
