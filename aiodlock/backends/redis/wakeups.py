"""The second connection: notices and hints for this client, and the end of what blocks its heads.

A message here is either a notice of a grant, of a break, a hint to look, or a keyspace event of a
state key on which one of our waiters stands at the head. All but the notices only say: look. After
every (re)subscription all waiting requests are looked at, since messages may have been missed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ..._errors import BackendError
from ..base import Listener
from .link import Link
from .source import Source
from .wire import Wire

_logger = logging.getLogger("aiodlock")

#: Events after which a blocker may be gone. A hand-off changes the key and fires none of them.
_ENDS = frozenset((b"expired", b"del", b"evicted", b"rename_from"))
_PING_EVERY = 10.0


class Wakeups:
    """Subscriptions of one client.

    Mutable state: ``_watched`` (keyspace channel -> the head's request id), ``_pending`` (channels
    whose confirmation is awaited), ``_listener``.
    """

    def __init__(self, source: Source, channel: str) -> None:
        self._channel = channel.encode()
        self._keyspace = f"__keyspace@{source.db}__:"
        self._watched: dict[bytes, str] = {}
        self._pending: dict[bytes, asyncio.Future[None]] = {}
        self._heard: dict[bytes, asyncio.Event] = {}
        self._pong = asyncio.Event()
        self._listener: Listener | None = None
        self.link = Link(source, prepare=self._subscribe_all, on_message=self._on_message)

    async def run(self, listener: Listener) -> None:
        """Receive until cancelled."""
        self._listener = listener
        await self.link.run()

    async def keep_alive(self) -> None:
        """Notice a connection that is open and dead: notices would be missed in silence."""
        while True:
            await asyncio.sleep(_PING_EVERY)
            wire = self.link.wire
            if wire is None:
                continue
            self._pong.clear()
            wire.post("PING")
            try:
                async with asyncio.timeout(_PING_EVERY / 2):
                    await self._pong.wait()
            except TimeoutError:
                wire.close()

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
        for channel in self._watched:
            wire.post("SUBSCRIBE", channel)
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
            case [b"message", self._channel, bytes(payload)]:
                self._on_notice(payload)
            case [b"message", bytes(channel), event]:
                if channel in self._heard:
                    self._heard[channel].set()
                elif event in _ENDS and channel in self._watched and self._listener:
                    self._listener.on_look(self._watched[channel])
            case [b"subscribe", bytes(channel), _]:
                confirmed = self._pending.get(channel)
                if confirmed is not None and not confirmed.done():
                    confirmed.set_result(None)
            case [b"pong", *_] | b"PONG":
                self._pong.set()
            case _:
                pass  # unsubscribe confirmations

    def _on_refusal(self, error: Exception) -> None:
        for confirmed in self._pending.values():
            if not confirmed.done():
                refused = BackendError(f"SUBSCRIBE was refused: {error}")
                refused.__cause__ = error
                confirmed.set_exception(refused)
                return
        _logger.warning("subscription refused: %s", error)

    def _on_notice(self, payload: bytes) -> None:
        try:
            word, state_key, request_id, token = payload.decode().split(" ")
            number = int(token)
        except ValueError:
            _logger.warning("notice of the wrong shape ignored: %r", payload[:100])
            return
        if self._listener is None:
            return
        if word == "granted":
            self._listener.on_granted(request_id, number, state_key)
        elif word == "look":
            self._listener.on_look(request_id)
        elif word == "broken":
            self._listener.on_broken(request_id)
