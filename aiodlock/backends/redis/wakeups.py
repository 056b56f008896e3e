"""The second connection: notices and hints for this client, and the end of what blocks its heads.

A message here is either a notice of a grant, of a break, a hint to look, or a keyspace event of a
state key on which one of our waiters stands at the head. All but the notices only say: look. After
every (re)subscription all waiting requests are looked at, since messages may have been missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ..._errors import BackendError, BackendUnavailable
from ..base import Listener
from .link import Link
from .source import Source
from .wire import Wire, will_pass

_logger = logging.getLogger("aiodlock")

#: Events after which a blocker may be gone. A hand-off changes the key and fires none of them.
_ENDS = frozenset((b"expired", b"del", b"evicted", b"rename_from"))
#: How long the answer to a ping may take (seconds).
_PONG_WITHIN = 5.0


class Wakeups:
    """Subscriptions of one client.

    Mutable state: ``_watched`` (keyspace channel -> the head's request id), ``_listened`` (channel of one
    name -> requests that wait for it; a cluster's nodes have one channel per name), ``_observers`` (channel
    of a name's changes -> whom to call), ``_pending`` (channels
    whose confirmation is awaited), ``_heard`` (channels of the probe), ``_pong`` (an answer that is
    awaited), ``_listener``.
    """

    def __init__(
        self, source: Source, channel: str, *, on_up: Callable[[Wire], None] | None = None
    ) -> None:
        self._channel = channel.encode()
        self._keyspace = f"__keyspace@{source.db}__:"
        self._watched: dict[bytes, str] = {}
        self._listened: dict[bytes, set[str]] = {}
        self._observers: dict[bytes, list[Callable[[], object]]] = {}
        #: Whether channels of single names are sharded ones.
        self.sharded = False
        self._pending: dict[bytes, asyncio.Future[None]] = {}
        self._heard: dict[bytes, asyncio.Event] = {}
        self._pong: asyncio.Future[None] | None = None
        self._listener: Listener | None = None
        self.link: Link = Link(
            source, prepare=self._subscribe_all, on_up=on_up, on_message=self._on_message
        )

    async def run(self, listener: Listener) -> None:
        """Receive until cancelled."""
        self._listener = listener
        try:
            await self.link.run()
        finally:
            for channel in tuple(self._observers):
                self._tell_observers(channel)

    async def ping(self) -> bool:
        """Return True when all that was sent to us by now has arrived, False if the connection is lost."""
        wire = await self.link.first_up()
        pong = self._pong = asyncio.get_running_loop().create_future()
        wire.post("PING")
        await asyncio.wait(
            {pong, wire.lost}, timeout=_PONG_WITHIN, return_when=asyncio.FIRST_COMPLETED
        )
        if not pong.done():
            wire.close()
        return pong.done()

    def watch(self, state_key: str, request_id: str) -> None:
        """Listen for the end of the holders of a name, for its head."""
        channel = (self._keyspace + state_key).encode()
        known = channel in self._watched
        self._watched[channel] = request_id
        if not known and self.link.wire is not None:
            self.link.wire.post("SUBSCRIBE", channel)

    def unwatch(self, state_key: str, request_id: str) -> None:
        """Stop listening, unless another of our requests has become the head since."""
        channel = (self._keyspace + state_key).encode()
        if self._watched.get(channel) != request_id:
            return
        del self._watched[channel]
        if self.link.wire is not None:
            self.link.wire.post("UNSUBSCRIBE", channel)

    def listen(self, channel: str, request_id: str) -> None:
        """Hear notices for this request. It is looked at when the subscription is confirmed."""
        ids = self._listened.setdefault(channel.encode(), set())
        ids.add(request_id)
        if len(ids) == 1 and self.link.wire is not None:
            self.link.wire.post(self._verb("SUBSCRIBE"), channel)
        elif self._listener is not None:
            self._listener.on_look(request_id)

    def unlisten(self, channel: str, request_id: str) -> None:
        """Undo ``listen``."""
        ids = self._listened.get(channel.encode())
        if ids is None:
            return
        ids.discard(request_id)
        if not ids:
            del self._listened[channel.encode()]
            if self.link.wire is not None:
                self.link.wire.post(self._verb("UNSUBSCRIBE"), channel)

    def observe(self, channel: str, changed: Callable[[], object]) -> Callable[[], object]:
        """Call ``changed`` at every message, and when the subscription is (again) confirmed."""
        name = channel.encode()
        observers = self._observers.setdefault(name, [])
        observers.append(changed)
        if len(observers) == 1 and self.link.wire is not None:
            self.link.wire.post("SUBSCRIBE", name)

        def stop() -> None:
            observers.remove(changed)
            if not observers:
                del self._observers[name]
                if self.link.wire is not None:
                    self.link.wire.post("UNSUBSCRIBE", name)

        return stop

    def _verb(self, word: str) -> str:
        return f"S{word}" if self.sharded else word

    async def expect(self, key: str) -> asyncio.Event:
        """Subscribe to the events of a key; the event is set when one arrives (for the probe)."""
        channel = (self._keyspace + key).encode()
        heard = self._heard[channel] = asyncio.Event()
        await self._subscribe(await self.link.first_up(), channel)
        return heard

    def stop_expecting(self, key: str) -> None:
        """Undo ``expect``."""
        channel = (self._keyspace + key).encode()
        del self._heard[channel]
        if self.link.wire is not None:
            self.link.wire.post("UNSUBSCRIBE", channel)

    async def _subscribe_all(self, wire: Wire) -> None:
        await self._subscribe(wire, self._channel)
        for channel in (*self._watched, *self._observers):
            wire.post("SUBSCRIBE", channel)
        for channel in self._listened:
            wire.post(self._verb("SUBSCRIBE"), channel)
        if self._listener is not None:
            self._listener.on_look(None)

    async def _subscribe(self, wire: Wire, channel: bytes) -> None:
        confirmed = self._pending[channel] = asyncio.get_running_loop().create_future()
        wire.post("SUBSCRIBE", channel)
        try:
            await asyncio.wait({confirmed, wire.lost}, return_when=asyncio.FIRST_COMPLETED)
            if not confirmed.done():
                raise wire.lost.result()
            confirmed.result()
        finally:
            self._pending.pop(channel, None)

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Exception):
            self._on_refusal(message)
            return
        match message:
            case [b"message", self._channel, b""]:
                pass  # of our own: the server has counted us
            case [b"message", self._channel, bytes(payload)]:
                self._on_notice(payload)
            case [b"message" | b"smessage", bytes(channel), bytes(payload)] if (
                channel in self._listened
            ):
                self._on_notice(payload)
            case [b"message", bytes(channel), _] if channel in self._observers:
                self._tell_observers(channel)
            case [b"message", bytes(channel), event]:
                if channel in self._heard:
                    self._heard[channel].set()
                elif event in _ENDS and channel in self._watched and self._listener:
                    self._listener.on_look(self._watched[channel])
            case [b"subscribe", bytes(channel), _]:
                confirmed = self._pending.get(channel)
                if confirmed is not None and not confirmed.done():
                    confirmed.set_result(None)
                self._look_at(channel)
                self._tell_observers(channel)
            case [b"ssubscribe" | b"sunsubscribe", bytes(channel), _]:
                # The server says the latter by itself when the slot has moved.
                self._look_at(channel)
            case [b"pong", *_] | b"PONG":
                if self._pong is not None and not self._pong.done():
                    self._pong.set_result(None)
            case _:
                pass  # unsubscribe confirmations

    def _tell_observers(self, channel: bytes) -> None:
        for changed in tuple(self._observers.get(channel, ())):
            changed()

    def _look_at(self, channel: bytes) -> None:
        if self._listener is not None:
            for request_id in tuple(self._listened.get(channel, ())):
                self._listener.on_look(request_id)

    def _on_refusal(self, error: Exception) -> None:
        for channel, confirmed in self._pending.items():
            if not confirmed.done():
                # A busy server's refusal ends this connection, not the client.
                kind = BackendUnavailable if will_pass(error) else BackendError
                refused = kind(f"SUBSCRIBE {channel.decode()} was refused: {error}")
                refused.__cause__ = error
                confirmed.set_exception(refused)
                return
        _logger.warning("subscription refused: %s", error, extra={"event": "subscription_refused"})

    def _on_notice(self, payload: bytes) -> None:
        try:
            word, state_key, request_id, token = payload.decode().split(" ")
            number = int(token)
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
            self._listener.on_granted(request_id, number, state_key)
        elif word == "look":
            self._listener.on_look(request_id)
        elif word == "broken":
            self._listener.on_broken(request_id)
