"""What the database says by itself: whom in this client it is for, and whether it arrives.

Behind a pooler that shares its connections it does not. Then waiters poll.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence

from ..._errors import BackendError
from .._identity import Known
from ..kept import Notices
from .calls import Calls
from .connection import Connection
from .history import History
from .listening import Listening
from .replies import token_of

_logger = logging.getLogger("aiodlock")

#: How long a notification of our own may take to come back.
_PROBE_WITHIN = 1.0
#: How often waiters poll where no notifications arrive (seconds).
POLL_EVERY = 1.0


class Notifications:
    """Those for one client.

    Mutable state: ``listener`` (while the store runs), ``polls`` (no notifications arrive here), ``known``
    (set once it is known whether they do), ``_probes`` (how many notifications of our own were sent),
    ``_probed`` (set when the last one arrives), ``_heard_on`` (the connection where the latest arrived),
    ``_awaits`` (whether somebody waits for it).
    Until it has arrived, what is heard may be of another database.
    """

    def __init__(
        self,
        calls: Calls,
        source: str,
        described: str,
        known: Known[History],
        *,
        sessions: bool,
    ) -> None:
        self.listener: Notices | None = None
        self.polls: bool = False
        self.known: asyncio.Event = asyncio.Event()
        self.listening: Listening = Listening(
            source, described, known=known, sessions=sessions, on_up=self._on_up
        )
        self._calls = calls
        self._messages = calls.messages
        self._channel = channel(calls.label)
        self._probes = 0
        self._probed = asyncio.Event()
        self._heard_on: Connection | None = None
        self._awaits = False

    def begin(self, listener: Notices) -> None:
        """Tell this one what is said from now on."""
        self.listener = listener
        self.listening.listen(self._channel, self._hear_one)

    async def _on_up(self) -> None:
        """See whether notifications arrive. Through a pooler that shares its connections they do not, nor
        from another server than that of the messages."""
        await self._messages.link.first_up()
        if self.listening.link.dialer.pooled:
            self._begin_to_poll()
            self._be_known()
            return
        connection = self.listening.link.connection
        self._probes += 1
        self._probed.clear()
        self._awaits = True
        try:
            await self._calls.notify(self._channel, self._probe)
            async with asyncio.timeout(max(_PROBE_WITHIN, self._messages.patience.learned)):
                await self._probed.wait()
        except BackendError:
            # It was refused, or the connection for messages was lost, or believed to be.
            self.listening.examine_later()
        except TimeoutError:
            if connection is not None and self._heard_on is connection:
                # The messages may go to another server now. Of a new connection we shall know.
                self.listening.link.give_up(TimeoutError("no notifications arrive any more"))
                return
            self._begin_to_poll()
        finally:
            self._awaits = False
        self._be_known()

    def _be_known(self) -> None:
        self.known.set()
        if self.listener is not None:
            self.listener.on_look(None)  # notifications may have been missed

    @property
    def _probe(self) -> str:
        return f"probe {self._probes}"

    def _begin_to_poll(self) -> None:
        if not self.polls:
            _logger.warning(
                "no notifications arrive from %s, as behind a pooler in transaction mode: waiters of "
                "this client poll every %g s; listen_source= names a way around the pooler",
                self.listening.link.described,
                POLL_EVERY,
                extra={"event": "polling"},
            )
        self.polls = True

    async def poll(self) -> None:
        """Have waiters look now and then while none arrive."""
        while True:
            await asyncio.sleep(POLL_EVERY)
            away = self.listening.link.connection is None
            deaf = self.polls or away or not self._is_proven
            if deaf and self._messages.link.connection is not None and self.listener is not None:
                self.listener.on_look(None)

    def _hear_one(self, message: str) -> None:
        if message == self._probe:
            # However late.
            self._heard_on = self.listening.link.connection
            self.polls = False
            self._probed.set()
            if not self._awaits and self.listener is not None:
                self.listener.on_look(None)  # what was notified before it was not heard
        elif message and self._is_proven and not message.startswith("probe"):
            self.hear([message])

    @property
    def _is_proven(self) -> bool:
        """Whether the latest notification of our own has arrived, and on the present connection."""
        return self._probed.is_set() and self._heard_on is self.listening.link.connection

    def hear(self, messages: Sequence[str]) -> None:
        """Take what was said, by a notification or behind the answers to a call."""
        listener = self.listener
        if listener is None:
            return
        for message in messages:
            try:
                _hear_message(listener, message)
            except ValueError:  # every role may notify on every channel
                extra = {"event": "bad_notice"}
                _logger.warning(
                    "a notification of the wrong shape was ignored: %.200r", message, extra=extra
                )


def _hear_message(listener: Notices, message: str) -> None:
    """Tell what a message says.

    :raises ValueError: it says nothing that is known.
    """
    match message.split(" "):
        case ["granted", request_id, key, token]:
            recalled = token.endswith("r")
            listener.on_granted(request_id, token_of(token.removesuffix("r")), key, recalled)
        case ["recall", request_id, _]:
            listener.on_recalled(request_id)
        case ["look" | "done", request_ids, _, *_]:
            # Of very many waiters not all ids fit into a notification.
            for request_id in request_ids.split(","):
                listener.on_look(None if request_id == "*" else request_id)
        case ["broken", request_id, _, token]:
            listener.on_broken(request_id, token_of(token))
        case _:
            raise ValueError(message)


def channel(client: str) -> str:
    """Return the channel of a client, or of something else with a name of any length."""
    return "aiodlock_" + hashlib.sha256(client.encode()).hexdigest()[:40]
