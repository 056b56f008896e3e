"""The second connection: what the server says to this client without being asked.

Messages are:

- notices: a request was granted, its lease was broken, or it is recalled and must not linger;
- hints: the client should ask about a waiter, since something may have changed, or about all of a name,
  since a success is on record;
- changes: a name that this client observes may have another holder;
- keyspace events: a holder that blocks one of our waiters at the head of a queue may be gone.

Messages may be lost while the connection is down. So after every (re)subscription the client asks about all
of its waiting requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..kept import Notices
from .link import Link
from .refusals import will_pass
from .replies import token_of
from .source import Source
from .subscriptions import Subscriptions
from .wire import Wire

_logger = logging.getLogger("aiodlock")

#: Events after which a holder may be gone. A hand-off changes the key and fires none of them.
_ENDS = frozenset((b"expired", b"del", b"evicted", b"rename_from"))
_ECHO = b"echo"


class Wakeups:
    """Subscriptions of one client.

    Mutable state: ``_watched`` (keyspace channel -> the head's request id), ``_listened`` (channel of one
    name -> requests that wait for it, in their order; a cluster's nodes have one channel per name),
    ``_pending`` (channels whose confirmation is awaited), ``_expected`` (channels of the probe), ``_echo``
    (a message to ourselves that is awaited), ``_channels`` (all of these, as the server knows them),
    ``_listener``.

    :param observers: whom to call at the changes of a name, by channel. It is the owner's, and may have
        some already: they outlive these subscriptions.
    :param on_moved: called when a channel is found to be another node's now.
    """

    def __init__(
        self,
        source: Source,
        channel: str,
        observers: dict[bytes, list[Callable[[], object]]],
        *,
        on_up: Callable[[Wire], None] | None = None,
        on_moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._channel = channel.encode()
        self._channel_moved = on_moved
        self._keyspace = f"__keyspace@{source.db}__:"
        self._watched: dict[bytes, str] = {}
        self._listened: dict[bytes, dict[str, None]] = {}
        self._observers = observers
        #: Whether channels of single names are sharded ones.
        self.sharded = False
        self._pending: dict[bytes, asyncio.Future[None]] = {}
        self._expected: dict[bytes, asyncio.Event] = {}
        self._echo: asyncio.Future[None] | None = None
        self._channels = Subscriptions(
            on_confirmed=self._on_confirmed, on_moved=self._on_moved, on_refused=self._on_refused
        )
        for wanted in (self._channel, *observers):
            self._channels.want(wanted)
        self._listener: Notices | None = None
        self.link: Link = Link(
            source, prepare=self._subscribe_all, on_up=on_up, on_message=self._on_message
        )

    async def run(self, listener: Notices) -> None:
        """Receive until cancelled."""
        self._listener = listener
        try:
            await self.link.run()
        finally:
            self._channels.stop()
            for channel in tuple(self._observers):
                self._tell_observers(channel)

    async def ping(self) -> bool:
        """Return True when all that was sent to us by now has arrived, False if the connection is lost."""
        wire = await self.link.first_up()
        sent, patience = now(), self.link.dialling.patience
        pong: asyncio.Future[Any] = self._channels.ping(wire)
        await asyncio.wait(
            {pong, wire.lost}, timeout=self._silence, return_when=asyncio.FIRST_COMPLETED
        )
        if pong.done():
            patience.answered(now() - sent)
        else:
            wire.close()
        return pong.done()

    @property
    def _silence(self) -> float:
        """How long the answer to a ping, or to a message to ourselves, is waited for (seconds)."""
        return self.link.dialling.patience.silence(float("inf"))

    def watch(self, state_key: str, request_id: str) -> None:
        """Listen for the end of the holders of a name, for its head."""
        channel = (self._keyspace + state_key).encode()
        self._watched[channel] = request_id
        self._channels.want(channel)

    def unwatch(self, state_key: str, request_id: str) -> None:
        """Stop listening, unless another of our requests has become the head since."""
        channel = (self._keyspace + state_key).encode()
        if self._watched.get(channel) == request_id:
            del self._watched[channel]
            self._channels.unwant(channel)

    def listen(self, channel: str, request_id: str) -> None:
        """Subscribe to notices for this request; once that is confirmed, ask about it."""
        name = channel.encode()
        self._listened.setdefault(name, {})[request_id] = None
        self._channels.want(name, self._verb)
        if self._channels.stands(name) and self._listener is not None:
            self._listener.on_look(request_id)

    def unlisten(self, channel: str, request_id: str) -> None:
        """Undo ``listen``."""
        ids = self._listened.get(channel.encode())
        if ids is None:
            return
        ids.pop(request_id, None)
        if not ids:
            del self._listened[channel.encode()]
            self._channels.unwant(channel.encode())

    def observe(self, channel: bytes) -> None:
        """Tell the channel's observers of every message, and when the subscription is (again) confirmed."""
        self._channels.want(channel)

    def unobserve(self, channel: bytes) -> None:
        """The channel has no observers any more."""
        self._channels.unwant(channel)

    def again(self, moved: Callable[[bytes], bool]) -> None:
        """Subscribe now to missing channels, and ask about requests whose channel has moved."""
        self._channels.again()
        for channel in tuple(self._listened):
            if moved(channel):
                self._look_at(channel)

    @property
    def _verb(self) -> str:
        return "SSUBSCRIBE" if self.sharded else "SUBSCRIBE"

    async def expect(self, key: str) -> asyncio.Event:
        """Subscribe to the events of a key; the event is set when one arrives (for the probe)."""
        channel = (self._keyspace + key).encode()
        heard = self._expected[channel] = asyncio.Event()
        wire = await self.link.first_up()
        await self._confirmation(wire, channel, lambda: self._channels.want(channel))
        return heard

    async def echo(self, wire: Wire) -> bool:
        """Return True when all that was sent to us before the last command on ``wire`` has arrived.

        A message to ourselves goes out behind that command, so this takes no round trip of its own.
        False: a connection was lost.
        """
        echo = self._echo = asyncio.get_running_loop().create_future()
        wire.send("PUBLISH", self._channel, _ECHO).add_done_callback(lambda said: said.exception())
        receiving = await self.link.first_up()
        await asyncio.wait(
            {echo, receiving.lost, wire.lost},
            timeout=self._silence,
            return_when=asyncio.FIRST_COMPLETED,
        )
        return echo.done()

    def stop_expecting(self, key: str) -> None:
        """Undo ``expect``."""
        channel = (self._keyspace + key).encode()
        del self._expected[channel]
        self._channels.unwant(channel)

    async def _subscribe_all(self, wire: Wire) -> None:
        for channel in self._listened:
            self._channels.want(channel, self._verb)  # another server may know another word for it
        await self._confirmation(wire, self._channel, lambda: self._channels.connected(wire))
        if self._listener is not None:
            self._listener.on_look(None)

    async def _confirmation(
        self, wire: Wire, channel: bytes, subscribe: Callable[[], object]
    ) -> None:
        confirmed = self._pending[channel] = asyncio.get_running_loop().create_future()
        subscribe()
        try:
            await asyncio.wait({confirmed, wire.lost}, return_when=asyncio.FIRST_COMPLETED)
            if not confirmed.done():
                raise wire.lost.result()
            confirmed.result()
        finally:
            self._pending.pop(channel, None)

    def _on_message(self, message: Any) -> None:
        if self._channels.take(message):
            return
        match message:
            case [b"message", self._channel, b""]:
                pass  # our own, by which the server counts its subscribers
            case [b"message", self._channel, payload] if payload == _ECHO:
                if self._echo is not None and not self._echo.done():
                    self._echo.set_result(None)
            case [b"message", self._channel, bytes(payload)]:
                self._on_notice(payload)
            case [b"message" | b"smessage", bytes(channel), bytes(payload)] if (
                channel in self._listened
            ):
                self._on_notice(payload)
            case [b"message", bytes(channel), _] if channel in self._observers:
                self._tell_observers(channel)
            case [b"message", bytes(channel), event]:
                if channel in self._expected:
                    self._expected[channel].set()
                elif event in _ENDS and channel in self._watched and self._listener:
                    self._listener.on_look(self._watched[channel])
            case _:
                pass

    def _tell_observers(self, channel: bytes) -> None:
        for changed in tuple(self._observers.get(channel, ())):
            changed()

    def _look_at(self, channel: bytes) -> None:
        if self._listener is not None:
            for request_id in tuple(self._listened.get(channel, ())):
                self._listener.on_look(request_id)

    def _on_confirmed(self, channel: bytes) -> None:
        confirmed = self._pending.get(channel)
        if confirmed is not None and not confirmed.done():
            confirmed.set_result(None)
        self._look_at(channel)
        self._tell_observers(channel)

    def _on_moved(self, channel: bytes) -> None:
        # Asking about its waiters finds the node that has them now, where they are listened for then.
        self._look_at(channel)
        self._channel_moved()

    def _on_refused(self, channel: bytes, error: Exception) -> bool:
        confirmed = self._pending.get(channel)
        if confirmed is None or confirmed.done():
            return False
        # A busy server's refusal ends this connection, not the client.
        kind = BackendUnavailable if will_pass(error) else BackendError
        refused = kind(f"SUBSCRIBE {channel.decode()} was refused: {error}")
        refused.__cause__ = error
        confirmed.set_exception(refused)
        return True

    def _on_notice(self, payload: bytes) -> None:
        try:
            word, state_key, request_id, token = payload.decode().split(" ")
            number, recalled = token_of(token)
        except ValueError:
            _logger.warning(
                "notice of the wrong shape ignored: %r",
                payload[:100],
                extra={"event": "bad_notice"},
            )
            return
        if self._listener is None:
            return
        if word == "granted":
            self._listener.on_granted(request_id, number, state_key, recalled)
        elif word == "look":
            self._listener.on_look(request_id)
        elif word == "done":
            for waited in request_id.split(","):
                self._listener.on_look(waited)
        elif word == "broken":
            self._listener.on_broken(request_id, number)
        elif word == "recall":
            self._listener.on_recalled(request_id)
