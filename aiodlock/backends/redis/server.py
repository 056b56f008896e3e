"""One server as a client uses it: its connections, running scripts on it, and what its errors mean.

A single server's backend, a node of a cluster and a node of a quorum each have one ``Server``. It knows
nothing of requests, locks or votes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio

from ..._errors import BackendError, BackendUnavailable
from ..._patience import LEAST, Further, Patience
from ..base import Unanswered
from ..kept import Notices
from . import events, permissions, versions
from .connections import Connections
from .keys import probe_key
from .link import Link
from .messages import Call
from .permissions import check_permissions
from .refusals import Redirected, ReplyError, will_pass
from .replicas import ReplicatedLink, ReplicatedWire
from .replies import wrong_shape
from .scripts import ALL, Script, load_scripts
from .settings import Settings
from .source import Source
from .wakeups import Wakeups
from .wire import Awaited, Callback, Wire

_CHECK_AGAIN = 0.5


class Server:
    """One server and the connections of this client to it.

    Commands of all tasks share one connection; messages of the server arrive on another. With
    ``min_replicas`` a third one carries what grants and extends; see ``replicas``.

    Mutable state: ``commands``, ``wakeups`` and ``replicated`` (the three connections, while it runs),
    ``connections`` (compares them), ``_observers`` (channel of a name's changes -> whom to call; they
    outlive connections), ``publish``, ``notifications``, ``refusal``.

    :param prepare: called with each new connection for commands, before anybody may use it.
    :param identify: called before all else with each new connection that calls are made on; raises
        ``OtherStore`` when it leads to another store than the session's.
    :param on_channel_moved: called when another node of a cluster owns one of the channels.
    :param notifications: whether keyspace events arrive; None: the server is probed for them.
    :param scripts: the scripts that this server runs.
    :param checked: commands that the user of the connection must be allowed; see ``permissions``.
    """

    def __init__(
        self,
        source: Source,
        settings: Settings,
        label: str,
        *,
        prepare: Callable[[Wire], Awaitable[None]] | None = None,
        identify: Callable[[Wire], Awaitable[None]] | None = None,
        on_channel_moved: Callable[[], None] = lambda: None,
        notifications: bool | None = None,
        scripts: Sequence[Script] = ALL,
        checked: Mapping[str, tuple[str, ...]] = permissions.CHECKED,
    ) -> None:
        self.source = source
        self.settings = settings
        #: What this client is called by ``inspect``.
        self.label = label
        self._prepare = prepare
        self._identify = identify
        self._on_channel_moved = on_channel_moved
        self._probes = notifications is None
        self._further = Further()
        #: How long its answers take. It outlives connections.
        self.patience: Patience = Patience(min(LEAST, settings.unavailable_after / 2))
        self._scripts = scripts
        self._checked = checked
        #: The command that scripts notify clients with.
        self.publish = "PUBLISH"
        #: What scripts need to notify clients on their own channels, and to keep a token.
        self.to_clients: tuple[str, int, str] = (
            settings.channels,
            settings.retention_ms,
            self.publish,
        )
        self.commands: Link | None = None
        self.wakeups: Wakeups | None = None
        self._observers: dict[bytes, list[Callable[[], object]]] = {}
        self.replicated: ReplicatedLink | None = None
        self.connections: Connections = self._make_connections()
        #: Why the server, though it answers, did not do the last call; None since it did one.
        self.refusal: BackendUnavailable | None = None
        #: Whether keyspace events arrive; None until that is known.
        self.notifications: bool | None = notifications

    def __repr__(self) -> str:
        return f"<Server {self.described}>"

    @property
    def described(self) -> str:
        """What the server is called in messages; without secrets."""
        return self.source.described

    # -- connections -------------------------------------------------------------------------------

    async def run(self, listener: Notices, ready: Callable[[], None]) -> None:
        """Keep the connections up until cancelled; see ``KeptStore.run``."""
        connections = self.connections = self._make_connections()
        commands = self.commands = Link(
            self.source,
            prepare=self._on_connected,
            on_up=self._when_up(listener, connections),
            longest=self.settings.unavailable_after,
            patience=self.patience,
        )
        wakeups = self.wakeups = connections.wakeups = Wakeups(
            self.source,
            self.settings.channels + self.label,
            self._observers,
            on_up=connections.on_up,
            on_moved=self._on_channel_moved,
        )
        wakeups.link.lead = commands
        connections.commands.append(commands)
        try:
            async with anyio.create_task_group() as tasks:
                silence = self.settings.unavailable_after
                tasks.start_soon(connections.watch, listener.may_hold, silence)
                tasks.start_soon(commands.run)
                tasks.start_soon(wakeups.run, listener)
                if self.settings.min_replicas:
                    await self._find_replicas(tasks)
                await commands.first_up()
                await wakeups.link.first_up()
                self._further.reach(1)
                allowed = asyncio.Event()
                async with anyio.create_task_group() as asking:
                    asking.start_soon(self._check_permissions, allowed)
                    if self.settings.configure_notifications:
                        await events.turn_on(commands, self.translated)
                    if self._probes:
                        # Before anybody can list the store, and would find the probe's key.
                        key = probe_key(self.settings.prefix, self.label)
                        self.notifications = await events.arrive(
                            commands,
                            wakeups,
                            key,
                            allowed,
                            lambda times: self._further.reach(2 + times),
                        )
                connections.entered()
                ready()
                await connections.keep_alive()
        finally:
            self.commands = self.wakeups = self.replicated = None

    def _make_connections(self) -> Connections:
        settings = self.settings
        return Connections(self.source, settings.channels + self.label, settings.prefix)

    @staticmethod
    def _when_up(listener: Notices, connections: Connections) -> Callable[[Wire], None]:
        """Return what each new connection for commands is given to: the store may know less behind it."""
        peer: object = None

        def on_up(wire: Wire) -> None:
            nonlocal peer
            if peer not in (None, wire.peer):
                listener.on_other_server()
            else:
                # The answer to a release may have been lost, and the grants with it. Or the server was
                # restarted, and has lost everything.
                listener.on_back()
            peer = wire.peer
            connections.on_up(wire)

        return on_up

    async def _find_replicas(self, tasks: anyio.abc.TaskGroup) -> None:
        link = Link(
            self.source,
            prepare=self._on_replicated,
            on_up=self.connections.on_up,
            longest=self.settings.unavailable_after,
        )
        link.lead = self.commands
        replicated = self.replicated = ReplicatedLink(
            link,
            self.settings.min_replicas,
            self.described,
            self.settings.unavailable_after,
            suspect=self.source.suspect,
        )
        self.connections.commands.append(link)
        tasks.start_soon(link.run)
        await replicated.enough()

    async def _on_replicated(self, wire: Wire) -> None:
        if self._identify is not None:
            await self._identify(wire)
        mark = versions.ask(wire, self.settings.prefix)
        await load_scripts(wire, self._scripts)
        await versions.check(mark, self.settings.prefix)

    async def _on_connected(self, wire: Wire) -> None:
        await self._on_replicated(wire)
        if self._prepare is not None:
            await self._prepare(wire)

    async def _check_permissions(self, allowed: asyncio.Event) -> None:
        settings = self.settings
        while True:
            try:
                wire = await self.link.wait_up()
                await check_permissions(
                    wire,
                    key=probe_key(settings.prefix, self.label),
                    channel=f"{settings.channels}{self.label}:probe",
                    prefix=settings.prefix,
                    publish=self.publish,
                    checked=self._checked,
                )
                allowed.set()
                self._further.reach(2)
                return
            except ReplyError as refused:  # a replica takes no writes, until it is the primary
                self.translated(wire, refused)
            except BackendUnavailable:
                pass  # the connection was lost meanwhile
            await asyncio.sleep(_CHECK_AGAIN)

    @property
    def failure(self) -> Exception | None:
        """Why there is no connection, if there is none."""
        links = (self.commands, self.wakeups.link if self.wakeups else None, self.replicated)
        failures = (link.failure for link in links if link is not None and link.failure)
        return next(failures, self.refusal)

    @property
    def further_at(self) -> float:
        """When entering has last come further; see ``StoreBase``."""
        links = (link.dialling.further.at for link in self.connections.links)
        return max(self.source.further_at, self._further.at, *links)

    @property
    def answers_within(self) -> float:
        """How long the next answer may take (seconds)."""
        return self.patience.typical

    @property
    def wire(self) -> Wire | None:
        """The connection for commands, if it is up."""
        return self.commands.wire if self.commands is not None else None

    @property
    def link(self) -> Link:
        """The connection for commands, up or not; raise BackendUnavailable when it is not kept up."""
        if self.commands is None:
            raise BackendUnavailable(f"{self.described}: the client is not running")
        return self.commands

    @property
    def granting(self) -> Link | ReplicatedLink:
        """The connection that what grants and extends is sent on."""
        return self.replicated or self.link

    @property
    def granting_wire(self) -> Wire | ReplicatedWire | None:
        """The same, if it is up; never raises, also while no connection is kept up."""
        if self.settings.min_replicas:
            return self.replicated.wire if self.replicated is not None else None
        return self.wire

    def unreachable(self) -> BackendUnavailable:
        """Return the error that says why nothing can be sent."""
        why = f": {self.failure}" if self.failure else ""
        error = BackendUnavailable(f"no connection to {self.described}{why}")
        error.__cause__ = self.failure
        return error

    # -- scripts -----------------------------------------------------------------------------------

    async def eval(
        self,
        script: Script,
        keys: tuple[str, ...],
        arguments: tuple[str | int | bytes, ...] = (),
        *,
        hurry: bool = False,
    ) -> Any:
        """Run a script and return its result.

        :param hurry: the caller does not come back, so a lost connection is dialled again at once.
        """
        return await self.run_call(Call.of(script, keys, arguments), hurry=hurry)

    async def run_call(
        self, call: Call, *, hurry: bool = False, on_read: Callable[[Any], object] | None = None
    ) -> Any:
        """The same for a call that is packed; ``on_read`` as in ``run_again``."""
        link = self.link
        wire = link.wire or await link.wait_up(hurry=hurry)
        return await self.result(wire, _send(wire, call, on_read), call, on_read)

    async def result(
        self,
        wire: Wire,
        sent: asyncio.Future[Any],
        call: Call,
        on_read: Callable[[Any], object] | None = None,
    ) -> Any:
        """Return the result of a script that was sent."""
        try:
            return await sent
        except ReplyError as refused:
            return await self.run_again(wire, refused, call, on_read=on_read)
        finally:
            # Its exception knows this frame and so, from Python 3.12 on, all that called it: a lease
            # that a caller has dropped must not have to wait for the collector.
            del sent

    async def run_again(
        self,
        wire: Wire | ReplicatedWire,
        refused: ReplyError,
        call: Call,
        within: float | None = None,
        on_read: Callable[[Any], object] | None = None,
    ) -> Any:
        """Run a script that the server has forgotten; raise for any other refusal.

        :param on_read: called with the result as it is read, also if nobody waits for it any more. Without
            one, a call is not sent again when nobody waits: its own leave may be on the way.
        """
        again = Awaited(on_read)
        is_pointless = again.answered.done if on_read is None else lambda: False
        self._run_again(wire, refused, call, again.take, within, on_read, is_pointless)
        try:
            return await again.answered
        finally:
            del again  # as in `result`

    def _run_again(
        self,
        wire: Wire | ReplicatedWire,
        refused: ReplyError,
        call: Call,
        on_result: Callable[[Any], object],
        within: float | None,
        on_late: Callable[[Any], object] | None,
        is_pointless: Callable[[], bool],
    ) -> None:
        """Run a script that the server has forgotten; give the result, or what another refusal means."""
        # Asked before each repetition: whoever has given up meanwhile has sent a leave, which came first.
        if refused.code != "NOSCRIPT" or is_pointless():
            on_result(self.translated(wire, refused))
            return
        name = call.script.name
        # Of a batch that was refused only the first has to carry the source.
        known = name in wire.reloaded

        def on_reply(reply: Any) -> None:
            if isinstance(reply, ReplyError):
                if known and reply.code == "NOSCRIPT":
                    wire.reloaded.discard(name)
                    self._run_again(wire, reply, call, on_result, within, on_late, is_pointless)
                    return
                reply = self.translated(wire, reply)
            elif not isinstance(reply, Exception):
                wire.reloaded.add(name)
            on_result(reply)

        packed = call.packed if known else call.with_source
        reader = Callback(asyncio.get_running_loop(), on_reply, on_late)
        wire.put(packed, reader, within=within)

    async def answer(
        self, sent: asyncio.Future[Any], wire: Wire | ReplicatedWire | None = None
    ) -> Any:
        """Return the answer to a command that was sent; raise BackendError for a refusal."""
        try:
            return await sent
        except ReplyError as refused:
            raise self.translated(wire, refused) from refused
        finally:
            del sent  # as in `result`

    def call(
        self,
        wire: Wire,
        call: Call,
        on_result: Callable[[Any], None],
        *,
        within: float | None = None,
        later: bool = False,
        is_pointless: Callable[[], bool] = lambda: False,
        on_late: Callable[[Any], None] | None = None,
    ) -> None:
        """Run a script; call ``on_result`` with its result or an exception, never from within this call.

        :param within: after so many seconds it counts as unanswered.
        :param later: nobody waits for it. It is written with what this turn still brings.
        :param is_pointless: tells whether a script that the server has forgotten need not be sent again.
        :param on_late: called with a result that comes after ``on_result`` was told that there is none.
        """

        def on_reply(reply: Any) -> None:
            if isinstance(reply, ReplyError):
                self._run_again(wire, reply, call, on_result, within, on_late, is_pointless)
                return
            if not isinstance(reply, Exception):
                self.refusal = None
            on_result(reply)

        reader = Callback(asyncio.get_running_loop(), on_reply, on_late)
        wire.put(call.packed, reader, within=within, later=later)

    def translated(self, wire: Wire | ReplicatedWire | None, refused: ReplyError) -> BackendError:
        """Return the error that a refusal means; a server that is no primary is given up."""
        error = self._meaning(wire, refused)
        error.__cause__ = refused
        return error

    def _meaning(self, wire: Wire | ReplicatedWire | None, refused: ReplyError) -> BackendError:
        if refused.code in ("MOVED", "ASK"):
            try:
                return Redirected(self.described, str(refused))
            except ValueError:
                return wrong_shape("a script", refused)
        if will_pass(refused):
            if refused.code in ("READONLY", "NOREPLICAS"):
                self.source.suspect()
            if refused.code == "READONLY" and wire is not None:
                wire.close(refused)  # this server was demoted
            self.refusal = BackendUnavailable(f"{self.described} is not ready: {refused}")
            return self.refusal
        if refused.may_be_done:
            return Unanswered(f"{self.described}: {refused}")
        if refused.code == "NOPERM":
            return BackendError(
                f"{self.described}: the server's ACL does not allow what aiodlock needs: {refused}"
            )
        return BackendError(f"{self.described} refused: {refused}")

    # -- messages ----------------------------------------------------------------------------------

    def watch(self, state_key: str, request_id: str, watching: bool) -> None:
        """Start or stop to listen for the end of a name's holders, for the waiter at the head."""
        if self.wakeups is None or self.notifications is False:
            return
        change = self.wakeups.watch if watching else self.wakeups.unwatch
        change(state_key, request_id)

    def announce(self, channel: str) -> None:
        """Send a message that says nothing but that something has changed. It may be lost."""
        if self.wire is not None:
            self.wire.send("PUBLISH", channel, "", later=True).add_done_callback(_ignore)

    def observe(self, channel: str, changed: Callable[[], object]) -> Callable[[], object]:
        """Have ``changed`` called when messages arrive, or may have been missed; return what ends that."""
        name = channel.encode()
        observers = self._observers.setdefault(name, [])
        observers.append(changed)
        if self.wakeups is not None:
            self.wakeups.observe(name)

        def stop() -> None:
            observers.remove(changed)
            if not observers:
                del self._observers[name]
                if self.wakeups is not None:
                    self.wakeups.unobserve(name)

        return stop


def _ignore(reply: asyncio.Future[Any]) -> None:
    reply.exception()


def _send(wire: Wire, call: Call, on_read: Callable[[Any], object] | None) -> asyncio.Future[Any]:
    reader = Awaited(on_read)
    wire.put(call.packed, reader)
    return reader.answered
