"""The channels that one connection should be subscribed to; missing subscriptions are made again.

A server may refuse a subscription: another node owns the slot, the cluster is down, the user lacks the
permission. A cluster's node ends a subscription when the slot has moved. Neither closes the connection.
So wanted channels are kept apart from confirmed ones, and the difference is requested again with growing
pauses.

Every command on such a connection has one answer, in order. So an error belongs to the oldest command.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from ..._backoff import pause_after
from .refusals import code_of, will_pass
from .wire import Wire

_logger = logging.getLogger("aiodlock")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
#: Between attempts when a permission is missing: it may be given (seconds).
_RARELY = 30.0
_PING = ("PING", b"")


class Subscriptions:
    """What is subscribed to on the present wire, and what is to be.

    Mutable state: ``_wanted`` (channel -> SUBSCRIBE or SSUBSCRIBE), ``_standing`` (confirmed on this
    wire), ``_asked`` (sent and not answered yet), ``_missing`` (wanted and refused, or ended by the
    server; whether there is hope), ``_attempts`` (in a row, at what is missing) and ``_timer`` (of the
    next one), ``_is_soon`` (whether that is for something that has hope), ``_is_logged`` (whether the log
    tells of what is missing), ``_pong``.

    :param on_confirmed: called with each channel that stands now: messages may have been missed before.
    :param on_moved: called with a channel that is not this server's any more.
    :param on_refused: called with a channel and an error; True if somebody waits for this and takes it.
    """

    def __init__(
        self,
        *,
        on_confirmed: Callable[[bytes], None],
        on_moved: Callable[[bytes], None],
        on_refused: Callable[[bytes, Exception], bool],
    ) -> None:
        self._on_confirmed = on_confirmed
        self._on_moved = on_moved
        self._on_refused = on_refused
        self._wire: Wire | None = None
        self._wanted: dict[bytes, str] = {}
        self._standing: set[bytes] = set()
        self._asked: deque[tuple[str, bytes]] = deque()
        self._missing: dict[bytes, bool] = {}
        self._attempts = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_soon = False
        self._is_logged = False
        self._pong: asyncio.Future[None] | None = None

    # -- what is wanted ------------------------------------------------------------------------------

    def want(self, channel: bytes, verb: str = "SUBSCRIBE") -> None:
        """Subscribe, now and on every later connection."""
        if self._wanted.get(channel) != verb:
            self._wanted[channel] = verb
            self._subscribe(channel)

    def unwant(self, channel: bytes) -> None:
        """Undo ``want``."""
        verb = self._wanted.pop(channel, None)
        if verb is None:
            return
        self._standing.discard(channel)
        if self._missing.pop(channel, None) is None:
            self._post(verb.replace("SUBSCRIBE", "UNSUBSCRIBE"), channel)

    def stands(self, channel: bytes) -> bool:
        """Tell whether messages of the channel arrive."""
        return channel in self._standing

    def connected(self, wire: Wire) -> None:
        """Begin on a new connection: nothing stands there."""
        self._wire = wire
        self._standing.clear()
        self._asked.clear()
        self._missing.clear()
        self._attempts = 0
        self.stop()
        for channel in self._wanted:
            self._subscribe(channel)
        wire.lost.add_done_callback(lambda _: self._on_lost(wire))

    def stop(self) -> None:
        """Make no further attempts."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def again(self) -> None:
        """Request missing subscriptions now: there is news that may change the answer."""
        self._attempts = 0
        self._ask_again()

    def ping(self, wire: Wire) -> asyncio.Future[None]:
        """Return what is done when all that was sent to us by now has arrived."""
        pong = self._pong = asyncio.get_running_loop().create_future()
        self._asked.append(_PING)
        wire.post("PING")
        return pong

    # -- what the server says ------------------------------------------------------------------------

    def take(self, message: Any) -> bool:
        """Take a message, if it is about subscriptions; tell whether it was."""
        if isinstance(message, Exception):
            verb, channel = self._asked.popleft() if self._asked else _PING
            if (verb, channel) == _PING:
                self._on_pong()
            elif verb == self._wanted.get(channel):
                self._refused(channel, message)
            return True
        match message:
            case [b"subscribe" | b"ssubscribe" as word, bytes(channel), _]:
                self._answered(word.decode().upper(), channel)
                self._confirmed(channel)
            case [b"unsubscribe" | b"sunsubscribe" as word, bytes(channel), _]:
                if self._answered(word.decode().upper(), channel):
                    self._standing.discard(channel)
                else:
                    self._ended(channel)  # by the server: its slot has moved
            case [b"pong", *_] | b"PONG":
                self._answered(*_PING)
                self._on_pong()
            case _:
                return False
        return True

    def _answered(self, verb: str, channel: bytes) -> bool:
        """Tell whether this answers the oldest command."""
        if self._asked and self._asked[0] == (verb, channel):
            self._asked.popleft()
            return True
        return False

    def _on_pong(self) -> None:
        if self._pong is not None and not self._pong.done():
            self._pong.set_result(None)

    def _confirmed(self, channel: bytes) -> None:
        self._missing.pop(channel, None)
        if not self._missing:
            self._attempts, self._is_logged = 0, False
        if channel in self._wanted:
            self._standing.add(channel)
            self._on_confirmed(channel)

    def _ended(self, channel: bytes) -> None:
        self._standing.discard(channel)
        if channel in self._wanted:
            self._is_missing(channel, hopeful=True)
            self._on_moved(channel)

    def _refused(self, channel: bytes, error: Exception) -> None:
        self._standing.discard(channel)
        if self._on_refused(channel, error):
            return
        moved = code_of(error) == "MOVED"
        self._is_missing(channel, hopeful=moved or will_pass(error))
        level = logging.DEBUG if moved or self._is_logged else logging.WARNING
        self._is_logged = self._is_logged or not moved
        what = {"event": "subscription_refused"}
        _logger.log(level, "subscription refused: %s", error, extra=what)
        if moved:
            self._on_moved(channel)

    # -- what is missing -----------------------------------------------------------------------------

    def _is_missing(self, channel: bytes, *, hopeful: bool) -> None:
        self._missing[channel] = hopeful
        if self._timer is not None and (self._is_soon or not hopeful):
            return
        # What will pass does not wait for the attempt at what will not.
        self.stop()
        self._attempts += 1
        self._is_soon = any(self._missing.values())
        pause = pause_after(self._attempts, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE)
        if not self._is_soon:
            pause = _RARELY * random.uniform(0.5, 1.0)
        self._timer = asyncio.get_running_loop().call_later(pause, self._ask_again)

    def _ask_again(self) -> None:
        self.stop()
        missing, self._missing = self._missing, {}
        for channel in missing:
            self._subscribe(channel)

    def _subscribe(self, channel: bytes) -> None:
        self._post(self._wanted[channel], channel)

    def _post(self, verb: str, channel: bytes) -> None:
        if self._wire is not None:
            self._asked.append((verb, channel))
            self._wire.post(verb, channel)

    def _on_lost(self, wire: Wire) -> None:
        if self._wire is wire:
            self._wire = None
            self.stop()
