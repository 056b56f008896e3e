"""One primary of a cluster, and the channels on which its waiters are notified."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import anyio

from ...._errors import BackendUnavailable
from ...._model import StoreRequest
from ...kept import Notices
from ..calls import Calls
from ..inspection import Inspection
from ..keys import base_of, probe_key
from ..refusals import ReplyError, will_pass
from ..server import Server
from ..settings import Settings
from ..source import Source
from ..waits import Waits
from ..wire import Wire
from .identity import ClusterIdentity, Told, identity_on, told_on

_logger = logging.getLogger("aiodlock")

Address = tuple[str, int]

#: That is a matter of one turn of the event loop, unless the client ends (seconds).
_BEGINS_WITHIN = 0.5


class ChannelPerName:
    """One channel for each name, which a node has while requests of ours wait for that name.

    The channel has the name's slot, so that the notice stays on this node (sharded pub/sub). On servers
    before 7.0 it is a plain channel, and the cluster sends its messages to all nodes. The client subscribes
    after the request was queued, and asks about the request again when the subscription is confirmed.

    Breaks are rare. They come on the client's own channel, on the connection to each node.
    """

    def __init__(self, server: Server) -> None:
        self._server = server

    def words(self, base: str) -> tuple[str, int, str]:
        server = self._server
        return (self._channel_of(base), server.settings.retention_ms, server.publish)

    def _channel_of(self, base: str) -> str:
        return f"{self._server.settings.channels}{base[base.index('{') :]}:"

    def on_waiting(self, request: StoreRequest) -> None:
        wakeups = self._server.wakeups
        if wakeups is None or request.listening is _NEVER_AGAIN:
            return
        if request.listening is not None and request.listening[0] is not wakeups:
            _unlisten(request)
        if request.listening is None:
            base = base_of(self._server.settings.prefix, request.kind, request.name)
            channel = self._channel_of(base) + self._server.label
            wakeups.listen(channel, request.id)
            request.listening = (wakeups, channel)

    def on_leaving(self, request: StoreRequest) -> None:
        stop_listening(request)


#: Stands in a request that is left for where it is listened for: the answer to an extension may come later.
_NEVER_AGAIN: Final = ()


def stop_listening(request: StoreRequest) -> None:
    """Stop to listen for notices of a request, for good."""
    if request.listening:
        _unlisten(request)
    request.listening = _NEVER_AGAIN


def _unlisten(request: StoreRequest) -> None:
    wakeups, channel = request.listening
    wakeups.unlisten(channel, request.id)
    request.listening = None


class Node:
    """One primary.

    Mutable state: ``begun`` (set in the turn after the one in which the node was found: from then on its
    connection can be waited for), ``up`` (set when it can be used), ``refusal`` (why it could not be used
    the last time), ``kept_until`` (until when it is kept though it owns no slot), ``scope`` (its
    cancellation ends the node).

    :param on_news: called when another node may own names of this one: a channel that is listened for has
        moved, or the connection is lost.
    :param check: raises ``OtherStore`` when what answers is no node of the cluster.
    """

    def __init__(
        self,
        source: Source,
        address: Address,
        settings: Settings,
        label: str,
        on_news: Callable[[], None],
        check: Callable[[Node, ClusterIdentity], Awaitable[None]],
    ) -> None:
        self.address = address
        self._on_news = on_news
        self._check = check
        self.server: Server = Server(
            source,
            settings,
            label,
            prepare=self._prepare,
            identify=self._identify,
            on_channel_moved=on_news,
            # A key for the probe would have to be of a slot of this node. Events are listened for anyway,
            # unless this user may not.
            notifications=True,
        )
        self.calls: Calls = Calls(self.server, ChannelPerName(self.server))
        self.inspection: Inspection = Inspection(self.server)
        self.waits: Waits = Waits(self.server)
        self.begun: asyncio.Event = asyncio.Event()
        self.up: asyncio.Event = asyncio.Event()
        self.refusal: Exception | None = None
        self.kept_until: float = 0.0
        self.scope: anyio.CancelScope = anyio.CancelScope()

    async def run(self, listener: Notices, ready: Callable[[], None]) -> None:
        """Keep it connected until cancelled; see ``KeptStore.run``."""
        self.begun.set()
        self.calls.listener = listener
        await self.server.run(listener, ready)

    async def wait_begun(self) -> None:
        """Let a node that was found just now begin to connect; raise if it waits after a refusal."""
        if not self.begun.is_set():
            with suppress(TimeoutError):  # the client ends, and the node with it
                async with asyncio.timeout(_BEGINS_WITHIN):
                    await self.begun.wait()
        if self.refusal is not None and self.server.commands is None:
            raise BackendUnavailable(str(self.refusal)) from self.refusal

    @property
    def failure(self) -> Exception | None:
        """Why there is no connection to it, or why it could not be used the last time; with its address."""
        described, why = self.server.described, self.server.failure or self.refusal
        if why is None or str(why).startswith(described):
            return why
        failure = BackendUnavailable(f"{described}: {why}")
        failure.__cause__ = why
        return failure

    def again(self, moved: Callable[[bytes], bool]) -> None:
        """Listen where that was refused: the owners of slots have changed."""
        if self.server.wakeups is not None:
            self.server.wakeups.again(moved)

    async def _identify(self, wire: Wire) -> None:
        await self._check(self, await identity_on(wire))

    async def _prepare(self, wire: Wire) -> None:
        await self._find_out_how_to_publish(wire)
        await self._find_out_whether_to_listen(wire)
        wire.lost.add_done_callback(lambda _: self._on_news())

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
        self.calls.messages.forget()

    async def _find_out_whether_to_listen(self, wire: Wire) -> None:
        # Else the log would tell of a refused subscription for each request that comes to a queue's head.
        # Of no key that is ever written: a message between the two answers would be taken for one.
        server = self.server
        key = f"{probe_key(server.settings.prefix, server.label)}:none"
        channel = f"__keyspace@{server.source.db}__:{key}"
        subscribing = wire.send("SUBSCRIBE", channel)
        wire.send("UNSUBSCRIBE", channel)
        try:
            await subscribing
            server.notifications = True
        except ReplyError as refused:
            if will_pass(refused):
                raise BackendUnavailable(f"{server.described}: {refused}") from refused
            if server.notifications:
                what = {"event": "no_keyspace_events"}
                _logger.info(
                    "%s: keyspace events are refused: %s", server.described, refused, extra=what
                )
            server.notifications = False

    async def told(self, patience: float) -> Told:
        """Return what this node knows of the owners of slots, if it tells within so many seconds."""
        wire = await self.server.link.wait_up()
        async with asyncio.timeout(patience):
            return await told_on(wire)
