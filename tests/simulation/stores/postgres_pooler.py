"""A pooler in transaction mode, as pgbouncer is one: a session is lent for a transaction, or for one call.

What a session hears by itself, notifications too, is nobody's. Process numbers are the pooler's own.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Any

from .postgres_servers import Server, Session
from .wire import Stream

ADDRESS = "10.0.1.1"
_SESSIONS = 3


class Pooler:
    """Mutable state: ``_free`` (sessions that nobody has), ``_made`` (how many there are), ``_waiting``
    (clients that need one)."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._free: deque[_Lent] = deque()
        self._made = 0
        self._waiting: deque[PooledClient] = deque()
        self.pids = count(90_001)
        server.cluster.wire.listening[ADDRESS, 5432] = lambda stream: PooledClient(self, stream)

    def lend(self, client: PooledClient) -> None:
        """Give a session to a client as soon as there is one."""
        self._waiting.append(client)
        self.go_on()

    def go_on(self) -> None:
        while self._waiting:
            if not self._free and self._made < _SESSIONS:
                self._make()
            if not self._free:
                return
            self._waiting.popleft().take(self._free.popleft())

    def _make(self) -> None:
        server = self.server
        if server.role == "down" or server.refuses is not None:
            waiting, self._waiting = self._waiting, deque()
            for client in waiting:
                client.refuse("08P01", "server login failed")
            return
        lent = _Lent(self)
        self._made += 1
        self._free.append(lent)

    def give_back(self, lent: _Lent) -> None:
        lent.client = None
        if lent.session.open:
            self._free.append(lent)
        self.go_on()

    def forget(self, client: PooledClient) -> None:
        if client in self._waiting:
            self._waiting.remove(client)

    def gone(self, lent: _Lent) -> None:
        self._made -= 1
        if lent in self._free:
            self._free.remove(lent)


class _Lent:
    """A session of the pool: what it says goes to the client that has it."""

    def __init__(self, pooler: Pooler) -> None:
        self._pooler = pooler
        self.client: PooledClient | None = None
        self.session = Session(pooler.server, self)

    def send(self, data: Any) -> None:
        client = self.client
        if client is None or data[0] == "notified":
            return
        client.stream.send(data)
        if data[0] in ("answer", "error") and self.session.transaction is None:
            client.lent = None
            self._pooler.give_back(self)
            client.go_on()

    def hang_up(self) -> None:
        client, self.client = self.client, None
        self._pooler.gone(self)
        if client is not None:
            client.lent = None
            client.stream.hang_up()


class PooledClient:
    """The pooler's end of a client's stream."""

    def __init__(self, pooler: Pooler, stream: Stream) -> None:
        self._pooler = pooler
        self.stream = stream
        self.lent: _Lent | None = None
        self._asked: deque[Any] = deque()
        self._pid = next(pooler.pids)

    def received(self, data: Any) -> None:
        if data[1] == "login":
            self.stream.send(("welcome", self._pid, self._pooler.server.role))
        elif self.lent is not None:
            self.lent.session.received(data)
        else:
            self._asked.append(data)
            if len(self._asked) == 1:
                self._pooler.lend(self)

    def take(self, lent: _Lent) -> None:
        lent.client, self.lent = self, lent
        lent.session.received(self._asked.popleft())

    def go_on(self) -> None:
        if self._asked:
            self._pooler.lend(self)

    def refuse(self, code: str, text: str) -> None:
        self._asked.clear()
        self.stream.send(("fatal", code, text))
        self.stream.hang_up()

    def ended(self) -> None:
        """A session in the middle of something is closed with its client."""
        self._pooler.forget(self)
        lent, self.lent = self.lent, None
        if lent is not None:
            lent.client = None
            lent.session.ended()
