"""Redis Cluster: each name lives on the primary that owns its slot, and every primary is a ``Node``.

All keys of a name share a slot, so a lock needs nothing but the node that owns it. What a node says to
a request that is not (or not any more) its own is followed (``ASK``) or learned from (``MOVED``); the
request itself is repeated by its id, as after any lost reply.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import anyio
from redis.asyncio import ConnectionPool, RedisCluster
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import RedisError

from ..._errors import BackendError, BackendUnavailable
from ..._model import Capabilities, Gone, Granted, Left, LockInfo, Refused, Request, Waiting
from ..._tasks import start_soon
from .._label import make_label
from ..kept import Notices as Listener
from .calls import Calls, Outcome
from .inspection import Inspection
from .keys import base_of, name_of
from .refusals import Redirected, ReplyError, refusal_in, will_pass
from .replicas import capabilities
from .scripts import Words
from .server import Server
from .settings import Settings
from .source import Source
from .wakeups import Wakeups
from .wire import Wire, open_wire

_logger = logging.getLogger("aiodlock")

Address = tuple[str, int]
_T = TypeVar("_T")

#: How long entering waits for primaries that do not answer, when others do.
_WAIT_FOR_ALL = 2.0
_ASK_WITHIN = 1.0
#: Between two looks at the slots, at the least: many requests notice the same change at once.
_LOOK_AGAIN = 0.1
_REDIRECTIONS = 4
#: Between attempts to use a node that refuses this user.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0


class ChannelPerName:
    """One channel for each name, which a node has while requests of ours wait for that name.

    The channel has the name's slot, so that the notice stays on this node (sharded pub/sub). On servers
    before 7.0 it is a plain channel, and the cluster sends its messages to all nodes. The client subscribes
    after the request was queued, and asks about the request again when the subscription is confirmed.

    Breaks are rare. They come on the client's own channel, on the connection to each node.
    """

    def __init__(self, server: Server) -> None:
        self._server = server

    def words(self, base: str) -> Words:
        server = self._server
        return (self._channel_of(base), server.settings.retention_ms, server.publish)

    def _channel_of(self, base: str) -> str:
        return f"{self._server.settings.channels}{base[base.index('{') :]}:"

    def on_waiting(self, request: Request) -> None:
        wakeups = self._server.wakeups
        if wakeups is None:
            return
        stop_listening(request, but=wakeups)
        if request.listening is None:
            base = base_of(self._server.settings.prefix, request.kind, request.name)
            channel = self._channel_of(base) + self._server.label
            wakeups.listen(channel, request.id)
            request.listening = (wakeups, channel)

    def on_leaving(self, request: Request) -> None:
        stop_listening(request)


def stop_listening(request: Request, but: Wakeups | None = None) -> None:
    """Stop to listen for notices of a request, unless that happens on the connection ``but``."""
    if request.listening is not None:
        wakeups, channel = request.listening
        if wakeups is not but:
            wakeups.unlisten(channel, request.id)
            request.listening = None


class Node:
    """One primary.

    Mutable state: ``up`` (set when it can be used), ``scope`` (its cancellation ends the node).

    :param on_moved: called when another node owns a name that is listened for here.
    """

    def __init__(
        self,
        source: Source,
        address: Address,
        settings: Settings,
        label: str,
        on_moved: Callable[[], None],
    ) -> None:
        self.address = address
        self.server: Server = Server(
            source,
            settings,
            label,
            prepare=self._find_out_how_to_publish,
            on_channel_moved=on_moved,
            # A key for the probe would have to be of a slot of this node. Events are listened for anyway.
            notifications=True,
        )
        self.calls: Calls = Calls(self.server, ChannelPerName(self.server))
        self.inspection: Inspection = Inspection(self.server)
        self.up: asyncio.Event = asyncio.Event()
        self.scope: anyio.CancelScope = anyio.CancelScope()

    def again(self, moved: Callable[[bytes], bool]) -> None:
        """Listen where that was refused: the owners of slots have changed."""
        if self.server.wakeups is not None:
            self.server.wakeups.again(moved)

    async def _find_out_how_to_publish(self, wire: Wire) -> None:
        # Before anybody calls a script: one that says SPUBLISH in vain has half its writes done.
        server = self.server
        try:
            # Of no channel: only to see whether the server knows the command.
            await wire.send("PUBSUB", "SHARDNUMSUB")
            server.publish = "SPUBLISH"
        except ReplyError as refused:
            if will_pass(refused):
                raise BackendUnavailable(f"{server.described}: {refused}") from refused
            server.publish = "PUBLISH"
        if server.wakeups is not None:
            server.wakeups.sharded = server.publish == "SPUBLISH"
        self.calls.forget_packed()

    def ask(self, *, granting: bool) -> bool:
        """Announce that the next command on this node is for a slot that is on its way to it.

        :param granting: whether that command goes where grants do. With ``min_replicas`` that is a
            connection of its own, and each has to be told by itself.
        """
        wire = self.server.granting.wire if granting else self.server.wire
        if wire is None:
            return False
        wire.send("ASKING")
        return True

    async def slots(self) -> Any:
        """Return what this node knows of the owners of slots."""
        wire = await self.server.link.wait_up()
        async with asyncio.timeout(_ASK_WITHIN):
            return await wire.send("CLUSTER", "SLOTS")


class ClusterBackend:
    """The primaries of a cluster, and the way from a name to its node.

    Mutable state: ``_nodes`` (by address), ``_owners`` (the address that owns each slot, None for
    unknown), ``_learned`` (the same, as the nodes said last; the former follows redirections too),
    ``_changed`` (set when somebody noticed that these may be wrong), ``_entering`` (until nodes are up:
    until then a refusal is fatal)."""

    def __init__(self, seeds: Sequence[Source], settings: Settings) -> None:
        self.capabilities: Capabilities = capabilities(settings.min_replicas)
        self._seeds = list(seeds)
        self._settings = settings
        self.label: str = make_label()
        self._nodes: dict[Address, Node] = {}
        self._owners: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._learned = list(self._owners)
        self._changed = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._listener: Listener | None = None
        self._failure: Exception | None = None
        self._entering = True

    def __repr__(self) -> str:
        return f"<ClusterBackend {self._seeds[0].described}, {len(self._nodes)} nodes>"

    # -- life ------------------------------------------------------------------------------------

    async def run(self, listener: Listener, ready: Callable[[], None]) -> None:
        self._listener = listener
        self._entering = True
        try:
            async with asyncio.TaskGroup() as self._tasks:
                while not await self._look():  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_AGAIN)
                with anyio.move_on_after(_WAIT_FOR_ALL):
                    for node in list(self._nodes.values()):
                        await node.up.wait()
                while not any(node.up.is_set() for node in self._nodes.values()):
                    await asyncio.sleep(_LOOK_AGAIN)
                    await self._look()
                self._entering = False
                ready()
                while True:
                    await self._changed.wait()
                    await self._look()
                    await asyncio.sleep(_LOOK_AGAIN * random.uniform(1.0, 2.0))
        finally:
            self._tasks = None
            self._nodes.clear()

    async def _run_node(self, node: Node) -> None:
        assert self._listener is not None
        pauses = _FIRST_PAUSE
        with node.scope:
            while True:
                try:
                    await node.server.run(self._listener, node.up.set)
                except (BackendError, ExceptionGroup) as failed:
                    refusal = refusal_in(failed)
                    if self._entering:
                        raise
                    # One node that does not know this user yet: the others' names go on.
                    level = logging.WARNING if pauses == _FIRST_PAUSE else logging.DEBUG
                    extra = {"event": "node_refuses"}
                    _logger.log(level, "a node of the cluster: %s", refusal or failed, extra=extra)
                await asyncio.sleep(pauses * random.uniform(0.5, 1.0))
                pauses = min(2 * pauses, _LONGEST_PAUSE)

    @property
    def failure(self) -> Exception | None:
        """Why there is no connection to one of the nodes, or to any, if so."""
        failures = (node.server.failure for node in self._nodes.values())
        return next((failure for failure in failures if failure), self._failure)

    # -- who owns what -----------------------------------------------------------------------------

    async def _look(self) -> bool:
        """Ask one node after the other which primary owns which slots, until one tells."""
        self._changed.clear()
        nodes = list(self._nodes.values())
        random.shuffle(nodes)
        # A node that is alone knows nothing of a failover.
        nodes.sort(key=lambda node: node.server.failure is not None)
        for node in nodes:
            try:
                self._learn(await node.slots(), node.address[0])
                return True
            except (BackendError, ReplyError, TimeoutError) as failed:
                self._failure = failed
        return await self._look_at_seeds()

    async def _look_at_seeds(self) -> bool:
        """Ask all at once: some may be addresses that nobody answers at any more."""
        refusals: list[BackendError] = []
        learned = False

        async def ask(seed: Source) -> None:
            nonlocal learned
            try:
                slots = await _ask_seed(seed)
                if not learned:
                    self._learn(slots, _host_of(seed))
                    learned = True
                    tasks.cancel_scope.cancel()
            except (BackendError, ReplyError, RedisError, OSError) as failed:
                if not learned:
                    self._failure = failed
                # Once entered, another server may have its address, or the right may be gone for a moment.
                if self._entering and isinstance(failed, ReplyError) and not will_pass(failed):
                    refusal = BackendError(f"{seed.described} is no cluster: {failed}")
                    refusal.__cause__ = failed
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
                address = (_host_in(primary, asked), int(primary[1]))
                owners[int(first) : int(last) + 1] = [address] * (int(last) - int(first) + 1)
        except (ValueError, TypeError, AttributeError, IndexError) as wrong:
            raise BackendError(f"CLUSTER SLOTS has the wrong shape: {slots!r:.200}") from wrong
        before, self._learned = self._learned, owners
        self._owners, self._failure = list(owners), None
        present = {owner for owner in owners if owner is not None}
        for address in present - self._nodes.keys():
            self._start(address)
        gone = self._nodes.keys() - present
        for address in gone:
            self._nodes.pop(address).scope.cancel()
        if before == owners:
            return

        def moved(channel: bytes) -> bool:
            slot = key_slot(channel)
            return before[slot] != owners[slot]

        for node in self._nodes.values():
            node.again(moved)
        if gone and self._listener is not None:
            # Whatever took its names over may not have heard of the last grants.
            self._listener.on_other_server()

    def _start(self, address: Address) -> Node:
        source = _at(self._seeds[0], *address)
        node = Node(source, address, self._settings, self.label, self._changed.set)
        self._nodes[address] = node
        start_soon(self._tasks, self._run_node(node))
        return node

    def _node_of(self, name: str) -> Node:
        owner = self._owners[_slot_of(name)]
        node = self._nodes.get(owner) if owner is not None else None
        if node is None:
            self._changed.set()
            raise BackendUnavailable(f"no node of the cluster owns the slot of {name!r} for now")
        return node

    def _follow(self, name: str, redirected: Redirected, node: Node, *, granting: bool) -> Node:
        """Return where a request is to be sent instead."""
        host, port = redirected.address
        address = (host or node.address[0], port)
        if host == "?":  # it is to be called by a name, and has none
            self._changed.set()
            known = [known for known in self._nodes if known[1] == port]
            if len(known) != 1:
                raise BackendUnavailable(
                    f"the cluster does not say where {name!r} is: {redirected}"
                )
            address = known[0]
        if not redirected.asking:
            self._owners[_slot_of(name)] = address
            self._changed.set()
        target = self._nodes.get(address) or self._start(address)
        if redirected.asking and not target.ask(granting=granting):
            raise BackendUnavailable(f"no connection to the node that takes over {name!r}")
        return target

    async def _at(
        self, name: str, call: Callable[[Node], Awaitable[_T]], *, granting: bool = False
    ) -> _T:
        """Call the node that owns the name, and where it sends us instead."""
        node = self._node_of(name)
        for _ in range(_REDIRECTIONS):
            try:
                return await call(node)
            except Redirected as redirected:
                node = self._follow(name, redirected, node, granting=granting)
            except BackendUnavailable:
                self._changed.set()
                raise
        raise BackendUnavailable(f"the cluster's nodes do not agree yet on who owns {name!r}")

    # -- requests --------------------------------------------------------------------------------

    async def acquire(self, request: Request, *, wait: bool) -> Granted | Waiting | Refused | Gone:
        return await self._at(
            request.name, lambda node: node.calls.acquire(request, wait=wait), granting=True
        )

    def extend(
        self, batch: Sequence[tuple[Request, float]]
    ) -> Sequence[Awaitable[Granted | Waiting | Gone]]:
        per_node: dict[Node, list[int]] = {}
        outcomes: list[Awaitable[Granted | Waiting | Gone]] = [_UNKNOWN] * len(batch)
        for index, (request, _) in enumerate(batch):
            owner = self._owners[_slot_of(request.name)]
            node = self._nodes.get(owner) if owner is not None else None
            if node is None:
                self._changed.set()
            else:
                per_node.setdefault(node, []).append(index)
        for node, indices in per_node.items():
            answers = node.calls.extend([batch[index] for index in indices])
            for index, answer in zip(indices, answers, strict=True):
                outcomes[index] = self._outcome(node, *batch[index], answer)
        return outcomes

    def server_of(self, request: Request) -> object:
        return self._owners[_slot_of(request.name)]

    def _outcome(
        self,
        node: Node,
        request: Request,
        length: float,
        first: Awaitable[Granted | Waiting | Gone],
    ) -> Outcome:
        async def outcome() -> Granted | Waiting | Gone:
            answer, asked = first, node
            for _ in range(_REDIRECTIONS):
                try:
                    return await answer
                except Redirected as redirected:
                    asked = self._follow(request.name, redirected, asked, granting=True)
                    (answer,) = asked.calls.extend([(request, length)])
                except BackendUnavailable:
                    self._changed.set()
                    raise
            raise BackendUnavailable("the cluster's nodes do not agree yet on who owns the slot")

        return Outcome(outcome)

    async def leave(
        self, request: Request, *, lost: bool = False, within: float | None = None
    ) -> Left:
        stop_listening(request)  # also when its node is not there to be told
        return await self._at(
            request.name, lambda node: node.calls.leave(request, lost=lost, within=within)
        )

    def leave_later(
        self, request: Request, done: Callable[[Left | BackendError], object], *, lost: bool = False
    ) -> bool:
        owner = self._owners[_slot_of(request.name)]
        node = self._nodes.get(owner) if owner is not None else None

        def on_result(result: Left | BackendError) -> None:
            if isinstance(result, Redirected | BackendUnavailable):
                self._changed.set()
            done(result)

        return node is not None and node.calls.leave_later(request, on_result, lost=lost)

    async def leave_unknown(self, request_id: str, where: str) -> None:
        await self._at(name_of(where)[1], lambda node: node.calls.leave_unknown(request_id, where))

    async def settle(self) -> None:
        """Every answer is waited for by a call."""

    def watch(self, request: Request, watching: bool) -> None:
        for node in self._nodes.values():
            if not watching or node.address == self._owners[_slot_of(request.name)]:
                node.calls.watch(request, watching)

    def announce(self, kind: str, name: str) -> None:
        with suppress(BackendUnavailable):
            self._node_of(name).calls.announce(kind, name)

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        return self._node_of(name).calls.observe(kind, name, changed)

    # -- for people ------------------------------------------------------------------------------

    async def inspect(self, kind: str, name: str) -> LockInfo:
        return await self._at(name, lambda node: node.inspection.inspect(kind, name))

    async def inspect_all(self, kind: str, names: Sequence[str]) -> list[LockInfo]:
        return await asyncio.gather(*(self.inspect(kind, name) for name in names))

    async def names(self, match: str) -> AsyncIterator[str]:
        seen: set[str] = set()
        for node in list(self._nodes.values()):
            async for name in node.inspection.names(match):
                if name not in seen:  # its slot may have moved meanwhile
                    seen.add(name)
                    yield name

    async def break_lock(self, name: str) -> int:
        return await self._at(name, lambda node: node.inspection.break_lock(name))


def seeds_of(source: str | RedisCluster) -> list[Source]:
    """Return the nodes to ask first: those of a URL or of a client, or raise ValueError."""
    if isinstance(source, RedisCluster):
        nodes = source.nodes_manager.startup_nodes.values()
        return [
            Source(
                ConnectionPool(connection_class=node.connection_class, **node.connection_kwargs),
                f"{type(source).__name__} at {node.host}:{node.port}",
            )
            for node in nodes
        ]
    parts = urlsplit(source)
    login, at, hosts = parts.netloc.rpartition("@")
    if not hosts or not all(hosts.split(",")):
        raise ValueError("name the nodes: redis+cluster://host1:6379,host2:6379")
    if parts.path.strip("/") not in ("", "0"):
        raise ValueError("a cluster has database 0 and no other")
    scheme = parts.scheme.partition("+")[0]
    query = f"?{parts.query}" if parts.query else ""
    return [Source.from_url(f"{scheme}://{login}{at}{host}{query}") for host in hosts.split(",")]


def _host_in(primary: Sequence[Any], asked: str) -> str:
    """Return the host of a node in CLUSTER SLOTS.

    A node that does not know its own address leaves it out. One that is to be called by a name and has none
    says "?", and tells its address elsewhere.
    """
    host: bytes | None = primary[0]
    if host == b"?" and len(primary) > 3:
        besides = primary[3]
        host = dict(zip(besides[::2], besides[1::2], strict=True)).get(b"ip")
    return asked if not host or host == b"?" else host.decode()


def _host_of(source: Source) -> str:
    return str(source._kwargs.get("host", "localhost"))


def _at(source: Source, host: str, port: int) -> Source:
    """Return the same settings for another server."""
    other = copy(source)
    other._kwargs = source._kwargs | {"host": host, "port": port}
    other.described = f"{host}:{port}"
    return other


def _slot_of(name: str) -> int:
    return key_slot(quote(name, safe="").encode())


async def _ask_seed(seed: Source) -> Any:
    connection = seed.make_connection()
    try:
        with anyio.fail_after(_ASK_WITHIN):
            await connection.connect()  # type: ignore[no-untyped-call]
            wire = open_wire(connection, _ASK_WITHIN)
            try:
                return await wire.send("CLUSTER", "SLOTS")
            finally:
                await wire.closed()
    except TimeoutError as silent:
        raise BackendUnavailable(f"{seed.described} does not answer") from silent
    finally:
        await connection.disconnect(nowait=True)


async def _unknown() -> Granted | Waiting | Gone:
    raise BackendUnavailable("no node of the cluster owns the slot for now")


_UNKNOWN = Outcome(_unknown)
