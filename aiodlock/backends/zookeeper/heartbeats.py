"""Heartbeats: a little write, often. They prove that a session lives, and show when a server is silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Self

from ..._clock import now
from ..._errors import BackendUnavailable
from ..._patience import Patience
from . import jute
from .connection import Answer, Connection
from .members import BEATS
from .servers import Ensemble

_SHORTEST_PAUSE = 0.005
#: For how long a server may be silent (seconds, and a share of the timeout).
_LONGEST_SILENCE, _SHORTEST_SILENCE, _SILENCE = 5.0, 0.2, 1 / 3
#: However slow servers are known to be, no step is waited for longer (seconds).
_LONGEST_PATIENCE = 10.0


class Pace(NamedTuple):
    """What a session of some length needs: for how long a server may be ``silent`` while it owes answers,
    and the ``pause`` between heartbeats (seconds)."""

    silent: float
    pause: float

    @classmethod
    def of(cls, timeout: float) -> Self:
        """Return that of a session with this timeout (seconds)."""
        silent = min(_LONGEST_SILENCE, max(_SHORTEST_SILENCE, timeout * _SILENCE))
        return cls(silent, max(_SHORTEST_PAUSE, min(silent, timeout / BEATS)))


class OwnNode:
    """The node of a session: it tells that the session is there, and heartbeats are written to it.

    Mutable state: ``number`` (of the present session, among those of its owner).
    """

    def __init__(self, ensemble: Ensemble, label: str) -> None:
        self.number: int = 0
        self._ensemble = ensemble
        self._label = label

    @property
    def path(self) -> str:
        """Where it is."""
        return f"{self._ensemble.root}/clients/{self._label}-{self.number}"

    def creation(self) -> jute.Call[str]:
        """Return what makes it."""
        return jute.create(self.path, b"", jute.EPHEMERAL, self._ensemble.acl)

    def heartbeat(self) -> jute.Call[jute.Stat]:
        """Return what writes to it."""
        return jute.set_data(self.path, b"")


class Heartbeats:
    """Those of one session.

    Mutable state: that of ``node``; ``pace``, ``answers`` (patience with writes), ``_beating`` (the one on
    its way).

    :param sent: is called when one was sent.
    :param astray: is called when the node is not there.
    """

    def __init__(
        self,
        node: OwnNode,
        timeout: float,
        sent: Callable[[], object],
        astray: Callable[[], object],
    ) -> None:
        self.pace: Pace = Pace.of(timeout)
        self.answers: Patience = Patience(_SHORTEST_PAUSE, _LONGEST_PATIENCE)
        self.node: OwnNode = node
        self._sent = sent
        self._astray = astray
        self._beating: asyncio.Future[Answer[jute.Stat]] | None = None

    async def run(self, connection: Connection) -> None:
        """Write until the connection is lost."""
        while True:
            pause, since = self.pace.pause, connection.waiting_since
            if since is not None:
                since = max(since, connection.heard_at)
                pause = min(pause, max(_SHORTEST_PAUSE, since + self._silence - now()))
            done, _ = await asyncio.wait([connection.closed], timeout=pause)
            if done:
                return
            since = connection.waiting_since
            silent = 0.0 if since is None else now() - max(since, connection.heard_at)
            if silent > self._silence:
                connection.abort(
                    BackendUnavailable(f"{connection.server} has not answered for {silent:.1f} s")
                )
            elif self._beating is None or self._beating.done():
                self._beating = connection.submit(self.node.heartbeat())
                self._beating.add_done_callback(self._on_beat)
                self._sent()

    def _on_beat(self, answer: asyncio.Future[Answer[jute.Stat]]) -> None:
        error = answer.exception()
        if isinstance(error, jute.ZooKeeperError) and error.code == jute.NO_NODE:
            self._astray()

    @property
    def _silence(self) -> float:
        """For how long a server may say nothing while it owes answers: longer if it is known to be slow."""
        return max(self.pace.silent, self.answers.learned)
