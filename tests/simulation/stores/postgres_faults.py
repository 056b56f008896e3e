"""What goes wrong with servers of PostgreSQL, by name."""

from __future__ import annotations

from ..network import Path
from .postgres_servers import Server, Session
from .scene import StoreFaults
from .wire import Stream

SINGLE = (
    "pause_server", "crash_server", "slow_disk", "refuse_clients", "refuse_calls", "cancel", "terminate",
    "no_room", "come_late", "come_late",
)  # fmt: skip
PAIR = (
    *SINGLE, "stall_standby", "stall_standby", "cancel_waits", "lose_waits", "promote", "promote",
)  # fmt: skip

_ENTRY = (
    ("53300", "sorry, too many clients already"),
    ("57P03", "the database system is starting up"),
)
_CALLS = (
    ("53200", "out of memory"),
    ("53100", "could not extend file: No space left on device"),
    ("55P03", "canceling statement due to lock timeout"),
    ("57014", "canceling statement due to statement timeout"),
    ("40P01", "deadlock detected"),
    ("42501", "permission denied for function turn"),
)


class PostgresFaults(StoreFaults):
    """The faults."""

    @property
    def _primary(self) -> Server:
        server: Server = self.simulation.cluster.primary
        return server

    def _some_session(self) -> Session | None:
        sessions = list(self._primary.sessions.values())
        return self.random.choice(sessions) if sessions else None

    # -- one server ----------------------------------------------------------------------------------

    def _pause_server(self) -> None:
        server, length = self._primary, self._length()
        if server.role == "primary" and not server.paused:
            self._log(f"{server!r} is stopped for {length:.3f} s")
            server.paused = True
            self.world.after(length, server.resume)

    def _crash_server(self) -> None:
        server, away = self._primary, self.random.choice((0.05, 0.3, 1.0))
        if server.role == "primary":
            self._log(f"{server!r} is killed, and back after {away} s")
            server.crash()
            self.simulation.checkers.forgets()
            self.world.after(away, self._start_again, server)

    def _start_again(self, server: Server) -> None:
        if server.role == "down" and server is self._primary:
            self.world.log(f"{server!r} is back")
            server.start("primary")

    def _slow_disk(self) -> None:
        server, length = self._primary, self._length()
        server.disk = self.random.choice((0.02, 0.1, 0.4))
        self._log(f"writing takes {server.disk} s for {length:.3f} s")
        self.world.after(length, setattr, server, "disk", self.simulation.cluster.disk)

    def _refuse_clients(self) -> None:
        server, length = self._primary, self._length()
        server.refuses = self.random.choice(_ENTRY)
        self._log(f"{server!r} refuses new clients ({server.refuses[0]}) for {length:.3f} s")
        if self.random.random() < 0.5:
            self._terminate()
        self.world.after(length, setattr, server, "refuses", None)

    def _refuse_calls(self) -> None:
        server, length = self._primary, self.random.uniform(0.0, 0.5)
        server.refuses_calls = self.random.choice(_CALLS)
        self._log(f"{server!r} refuses calls ({server.refuses_calls[0]}) for {length:.3f} s")
        self.world.after(length, setattr, server, "refuses_calls", None)

    def _cancel(self) -> None:
        session = self._some_session()
        if session is not None:
            self._log(f"{session!r} is cancelled")
            session.cancel()

    def _terminate(self) -> None:
        session = self._some_session()
        if session is not None:
            self._log(f"{session!r} is ended")
            session.terminate()

    def _no_room(self) -> None:
        server, length = self._primary, self._length()
        self._log(f"{server!r} has no room for notifications for {length:.3f} s")
        server.quiet = True
        self.world.after(length, setattr, server, "quiet", False)

    def _come_late(self) -> None:
        """What a process sends on one connection is held up, and overtaken by what it sends on another."""
        stream = self._some_stream()
        if stream is not None and stream.path in self.simulation.wire.paths.values():
            length = self.random.uniform(1.2, 3.0)
            self._log(f"what {stream.process} sends on a connection is held up for {length:.3f} s")
            usual, stream.path = stream.path, Path(self.world)
            stream.path.out_blocked = True
            self.world.after(length, self._let_go, stream, usual)

    def _let_go(self, stream: Stream, usual: Path) -> None:
        stream.path = usual
        stream.go_on()

    # -- a primary and its standby -------------------------------------------------------------------

    def _stall_standby(self) -> None:
        cluster, length = self.simulation.cluster, self._length() * self.random.choice((1, 1, 5))
        if not cluster.stalled:
            self._log(f"the standby receives nothing for {length:.3f} s")
            cluster.stall(True)
            self.world.after(length, cluster.stall, False)

    def _long_stall(self) -> None:
        cluster = self.simulation.cluster
        if not cluster.stalled:
            length = self.random.uniform(4.0, 12.0)
            self._log(f"the standby is away for {length:.3f} s")
            cluster.stall(True)
            self.world.after(length, cluster.stall, False)

    def _cancel_waits(self) -> None:
        """An operator sees calls that wait for the standby, and ends them."""
        for session in list(self._primary.sessions.values()):
            if session.waits == "standby":
                end = self.random.choice((session.cancel, session.terminate))
                self._log(f"the wait of {session!r} is ended by {end.__name__}")
                end()

    def _lose_waits(self) -> None:
        """The standby is away, waits are ended, and the standby is promoted: all that was lost."""
        cluster = self.simulation.cluster
        if cluster.standby is None or cluster.stalled:
            return
        self._log("the standby receives nothing")
        cluster.stall(True)
        when = self.random.uniform(0.02, 0.3)
        for _ in range(self.random.choice((1, 2, 4, 8))):
            self.world.after(when, self._cancel_waits)
            when += self.random.uniform(0.01, 0.3)
        self.world.after(when, self._fail_over, True)

    def _promote(self) -> None:
        self._fail_over()

    def _fail_over(self, soon: bool = False) -> None:
        """The standby takes over. The old primary is dead, or goes on and its commits wait, or works
        alone; later it is the standby."""
        cluster, old = self.simulation.cluster, self._primary
        new = cluster.standby
        if new is None:
            return
        how = "dead" if soon else self.random.choice(("dead", "waits", "alone", "alone", "alone"))
        self._log(f"{new!r} takes over, {old!r}: {how}")
        if how != "waits":
            old.crash()
        away = 0.0 if soon else self.random.choice((0.0, 0.1, 0.8))
        self.world.after(away, self._take_over, new, old, how)

    def _take_over(self, new: Server, old: Server, how: str) -> None:
        cluster = self.simulation.cluster
        if new.role != "standby" or cluster.primary is not old:
            return
        new.promote()
        cluster.stalled = False
        if how == "alone":
            self.world.after(self.random.uniform(0.0, 1.0), self._work_alone, old)
        # One that works alone does so for a while.
        rejoins = self.random.uniform(0.5, 4.0) + 2.0 * (how == "alone")
        self.world.after(rejoins, cluster.rejoin)

    def _work_alone(self, old: Server) -> None:
        """It was told to wait for nobody, and is started."""
        if old.role == "down" and old is not self._primary:
            self.world.log(f"{old!r} is back, alone")
            self.simulation.cluster.alone = True
            old.set_standby(False)
            old.start("primary")
            if not self.simulation.mains:
                return
            process, length = self._someone(), self.random.choice((0.3, 1.0, 3.0))
            path = self.simulation.wire.path(process, self._primary.address)
            path.out_blocked = path.in_blocked = True
            self._log(f"{process} does not reach the new primary for {length} s")
            self.world.after(length, self._heal, path)

    def _heal(self, path: Path) -> None:
        path.out_blocked = path.in_blocked = False
        self.simulation.wire.released()
