"""Clients act at once on what they are told.

hint        a client that hears that its waiter should ask (the name may be free, or the work is done), or
            that it was granted, asks or begins to hold within a millisecond of its loop's running, whatever
            else is read in that turn; so does each of its waiters when it listens again
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiodlock._request import ASKING, WAITING

from .checkers import _PROMPT
from .world import Process

if TYPE_CHECKING:
    from .scenario import Simulation


class Hints:
    """What clients have heard and not acted on: ``_open``, by request id, with since when they can."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._checkers = simulation.checkers
        self._world = simulation.world
        self._open: dict[str, float] = {}
        #: How much there was to look at.
        self.heard = 0
        network, on_reply = simulation.network, simulation.network.on_reply
        network.on_hint = self._hear
        network.on_ask = self._asked
        network.on_listening = self._listens

        def hear_reply(process: Process, command: Any, sent: float, reply: Any) -> None:
            on_reply(process, command, sent, reply)
            # A release tells its own client which of its waiters were granted.
            if command.script == "leave" and isinstance(reply, list) and reply[0] == b"released":
                for id in reply[2::2]:
                    self._hear(process, id.decode())

        network.on_reply = hear_reply
        simulation.world.after_turn.append(self._look)

    def _hear(self, process: Process, id: str) -> None:
        self.heard += 1
        self._open.setdefault(id, self._world.time)

    def _listens(self, process: Process) -> None:
        """It may have missed something."""
        for session in self._checkers.sessions.get(process, ()):
            for request in session.requests.values():
                if request.state is WAITING:
                    self._hear(process, request.id)

    def _asked(self, id: str) -> None:
        if self._open:
            self._open.pop(id, None)

    def _look(self, process: Process) -> None:
        if not self._open:
            return
        for session in self._checkers.sessions.get(process, ()):
            for id in self._open.keys() & session.requests.keys():
                self._look_at(process, session, id)

    def _look_at(self, process: Process, session: Any, id: str) -> None:
        now, state = self._world.time, session.requests[id].state
        if state is ASKING:
            self._open[id] = now  # it acts when it is answered
        elif state is not WAITING or session.backend.failure is not None:
            # Without a connection nobody can be asked. When there is one again, all waiters ask.
            del self._open[id]
        elif now - max(self._open[id], process.resumed_at) > _PROMPT:
            self._checkers.wrong("hint", f"{process}: {id} was told, and does not ask")
