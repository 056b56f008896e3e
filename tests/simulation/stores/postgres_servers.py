"""Servers of PostgreSQL: sessions, transactions in steps, a standby, crashes and promotions.

A transaction takes the locks of its names, carries its calls out, is written to the log, waits for the disk
and for the standby, and is visible then: its names are free, and who listens is notified. Each of these
steps can be cancelled, or the session be ended in it, as with real ones. When a wait for the standby is
cancelled, the commit stands: it is visible, and perhaps nowhere else.

The log is a list of calls, as the tables follow from them. What a crash loses of it is what was not on the
disk: releases are not waited for. A standby has as much of it as it has received, and nothing else.

Left out: other isolation levels, installing, rights, savepoints, prepared statements (each call is one
round trip), two standbys promoted apart from each other, cascades, and checkpoints.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from itertools import count
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

from aiodlock.backends.postgres import calls

from ..world import World
from . import postgres_statements as statements
from .postgres_tables import Notified, Tables, Turned, copy_of, recorded
from .wire import Stream, Wire

_EPOCH = 1_700_000_000.0
#: So many bytes of the log has each call.
_BYTES = 64
#: How often a server looks whether the client of a call is still there, and writes what was not waited for.
_LOOKS_EVERY, _WRITES_EVERY = 1.0, 0.2
#: Nobody else says this, of which the client knows that a commit was not waited for.
_NO_STANDBY = "SyncRepWaitForLSN"

#: What a step waits for: told how to go on.
Wait = Callable[[Callable[[], None]], None]
Steps = Generator[Wait, None, Any]


class Refused(Exception):
    """An error of the server."""

    def __init__(self, sqlstate: str, text: str) -> None:
        super().__init__(text)
        self.sqlstate = sqlstate


class Ended(Exception):
    """The session is ended while it works."""


class Call(NamedTuple):
    """A record of the log: a call that may have changed something, and its time."""

    now_us: int
    caller: str
    retention: int
    text: str


class Peer(Protocol):
    """The other end of a session."""

    def send(self, data: Any) -> None: ...
    def hang_up(self) -> None: ...


class Transaction:
    """Mutable state: ``before`` (the names that it has touched, as they were), ``calls``, ``told``,
    ``durable``, ``aborted``, ``idle_limit`` (how long the next step may take)."""

    def __init__(self, *, explicit: bool) -> None:
        self.explicit = explicit
        self.before: dict[str, Any] = {}
        self.calls: list[Call] = []
        self.told: list[Notified] = []
        self.durable = self.aborted = False
        self.idle_limit: float | None = None


class Session:
    """One session of a server. It answers one message after the other.

    Mutable state: ``transaction``, ``listens``, ``open``, ``waits`` (for what the present call does: "",
    "lock", "disk" or "standby"), ``_steps`` (of the present call), ``_step`` (its number), ``_asked`` (what
    is to be done), ``_left`` (the client has closed), ``_notices`` (to be sent with the answer),
    ``_untold`` (notifications for when it is idle).
    """

    def __init__(self, server: Server, peer: Peer) -> None:
        self.server = server
        self.world = server.world
        self.peer = peer
        self.pid = next(server.cluster.pids)
        self.began = self.world.time
        self.open = True
        self.transaction: Transaction | None = None
        self.listens: set[str] = set()
        self.waits = ""
        self._steps: Steps | None = None
        self._step = 0
        self._asked: deque[tuple[int, str, tuple[Any, ...]]] = deque()
        self._serial = 0
        self._left = self._dying = False
        self._notices: list[str] = []
        self._untold: list[tuple[int, Notified]] = []
        self._idle_since = 0
        #: How often it was asked in vain, in a transaction that is aborted.
        self.in_vain = 0
        server.sessions[self.pid] = self

    def __repr__(self) -> str:
        return f"session {self.pid} of {self.server!r}"

    @property
    def is_given_up(self) -> bool:
        """Whether it works for a client that has closed its connection."""
        return self._left and self.open

    # -- the other end -------------------------------------------------------------------------------

    def received(self, data: Any) -> None:
        self.server.do(self._receive, data)

    def _receive(self, data: tuple[int, str, tuple[Any, ...]]) -> None:
        if self.open:
            self._asked.append(data)
            self._next()

    def ended(self) -> None:
        """The client has closed. A session that works finds out when it looks, and not while it waits for
        a standby."""
        self._left = True
        self.server.do(self._look_at_client)

    def _look_at_client(self) -> None:
        if not self.open or not self._left:
            return
        if self._steps is None and not self._asked:
            self.end()
        elif self.waits == "lock":
            self.terminate()
        else:
            self.world.after(_LOOKS_EVERY, self.server.do, self._look_at_client)

    # -- one call after the other --------------------------------------------------------------------

    def _next(self) -> None:
        if self._steps is not None or not self.open:
            return
        if not self._asked:
            self._be_idle()
            return
        self._serial, sql, args = self._asked.popleft()
        self._idle_since += 1
        self._steps = self._run(sql, args)
        self._go_on()

    def _be_idle(self) -> None:
        transaction = self.transaction
        if transaction is not None:
            if transaction.idle_limit is not None:
                self.world.after(
                    transaction.idle_limit, self.server.do, self._end_idle, self._idle_since
                )
            return
        untold, self._untold = self._untold, []
        for notified in untold:
            self._tell(*notified)
        if self._left:
            self.end()

    def _end_idle(self, since: int) -> None:
        if self.open and self._steps is None and self._idle_since == since:
            text = "terminating connection due to idle-in-transaction timeout"
            self.peer.send(("fatal", "25P03", text))
            self.end()

    def _go_on(self, thrown: Exception | None = None) -> None:
        steps = self._steps
        assert steps is not None
        self._step += 1
        step = self._step
        try:
            wait = next(steps) if thrown is None else steps.throw(thrown)
        except StopIteration as done:
            self._answer(("answer", self._serial, done.value, self._take_notices()))
        except Refused as refused:
            error = refused.sqlstate, str(refused)
            self._answer(("error", self._serial, error, self._take_notices()))
        except Ended:
            self._steps = None
            self.end()
        else:
            wait(lambda: self.server.do(self._resume, step))

    def _resume(self, step: int) -> None:
        if self.open and step == self._step:
            self._go_on()

    def _take_notices(self) -> list[str]:
        notices, self._notices = self._notices, []
        return notices

    def _answer(self, data: Any) -> None:
        self._steps, self.waits = None, ""
        self._step += 1
        if self._dying:
            self.end()
            return
        self.peer.send(data)
        self._next()

    # -- cancelling and ending -----------------------------------------------------------------------

    def cancel(self) -> None:
        """As ``pg_cancel_backend``: only what waits is cancelled."""
        if self.waits == "lock":
            self._go_on(Refused("57014", "canceling statement due to user request"))
        elif self.waits == "standby":
            self._notices.append(_NO_STANDBY)
            self._go_on()

    def terminate(self) -> None:
        """As ``pg_terminate_backend``."""
        if not self.open:
            return
        if self.waits == "lock":
            self.peer.send(
                ("fatal", "57P01", "terminating connection due to administrator command")
            )
            self._go_on(Ended())
        elif self.waits == "standby":
            self._dying = True  # the commit stands, and there is no answer
            self.peer.send(("notice", _NO_STANDBY))
            self._go_on()
        elif self.waits == "disk":
            self._dying = True
        else:
            self.peer.send(
                ("fatal", "57P01", "terminating connection due to administrator command")
            )
            self.end()

    def end(self) -> None:
        """The session is over; what it has not committed is undone."""
        if not self.open:
            return
        self.open = False
        self.roll_back()
        self.server.sessions.pop(self.pid, None)
        self.peer.hang_up()

    # -- transactions --------------------------------------------------------------------------------

    def _run(self, sql: str, args: tuple[Any, ...]) -> Steps:
        refuses = self.server.refuses_calls
        # Who enters and has no rights is told so, for good.
        if refuses is not None and (sql == calls.TURN or not refuses[0].startswith("42")):
            if self.transaction is not None:
                self._abort(self.transaction)
            raise Refused(*refuses)
        before = self.transaction
        if before is not None and before.aborted and sql not in ("rollback", "commit"):
            self.in_vain += 1
            text = "current transaction is aborted, commands ignored until end of transaction block"
            raise Refused("25P02", text)
        if before is None:
            self.transaction = Transaction(explicit=False)
        try:
            result = yield from statements.run(self, sql, args)
            if self.transaction is not None and not self.transaction.explicit:
                yield from self.commit()
        except Refused:
            if self.transaction is not None and self.transaction.explicit:
                self._abort(self.transaction)
            else:
                self.roll_back()
            raise
        return result

    def _abort(self, transaction: Transaction) -> None:
        """All is undone, settings too; it has to be left."""
        self._undo(transaction)
        transaction.idle_limit = None
        transaction.aborted = True

    @property
    def current(self) -> Transaction:
        assert self.transaction is not None
        return self.transaction

    def begin(self, idle_limit: float) -> None:
        self.transaction = Transaction(explicit=True)
        self.transaction.idle_limit = idle_limit

    def turn(self, caller: str, retention: int, text: str) -> Steps:
        """Carry messages out, each behind the lock of its name."""
        server, transaction = self.server, self.current
        for key in sorted({line.split("\t", 2)[1] for line in text.split("\n")}):
            if key not in transaction.before:
                yield from self._wait("lock", server.locker(key, self))
                # A call of its own is carried out at once, and what it has read is not undone.
                deep = transaction.explicit or server.standby_names
                transaction.before[key] = copy_of(server.tables.names.get(key), deep=deep)
        call = Call(server.clock_us(), caller, retention, text)
        turned = server.carry_out(call)
        transaction.calls.append(call)
        transaction.told += turned.told
        if turned.durable and (server.reads_wait or server.has_changed(transaction)):
            transaction.durable = True
        return turned.answer

    def commit(self) -> Steps:
        """Write it to the log, wait as long as it asks for, and be visible."""
        server, transaction = self.server, self.current
        if transaction.calls:
            position = server.append(transaction.calls)
            if transaction.durable:
                yield from self._wait("disk", lambda go_on: server.when_flushed(position, go_on))
                if server.standby_names and not self._dying:
                    yield from self._wait(
                        "standby", lambda go_on: server.when_replicated(position, go_on)
                    )
        self.transaction = None
        server.unlock(self)
        server.committed(self, transaction)

    def _wait(self, what: str, wait: Wait) -> Steps:
        self.waits = what
        yield wait
        self.waits = ""

    def roll_back(self) -> None:
        transaction, self.transaction = self.transaction, None
        if transaction is not None:
            self._undo(transaction)

    def _undo(self, transaction: Transaction) -> None:
        for key, name in transaction.before.items():
            if name is None:
                self.server.tables.names.pop(key, None)
            else:
                self.server.tables.names[key] = name
        transaction.before.clear()
        transaction.calls.clear()
        transaction.told.clear()
        self.server.unlock(self)

    # -- notifications -------------------------------------------------------------------------------

    def notify(self, pid: int, notified: Notified) -> None:
        """Somebody has notified. A session that works or is in a transaction tells it later."""
        if notified.channel in self.listens:
            self._untold.append((pid, notified))
            if self._steps is None and self.transaction is None:
                self._be_idle()

    def _tell(self, pid: int, notified: Notified) -> None:
        self.peer.send(("notified", pid, notified.channel, notified.payload))


class Server:
    """One server.

    Mutable state: ``role`` ("primary", "standby" or "down"), ``timeline``, ``log``, ``flushed`` (so many of
    its calls are on the disk), ``acknowledged`` (so many has its standby), ``tables`` (of a primary),
    ``standby_names`` (commits wait for a standby), ``sessions``, ``paused`` and ``_later``, ``refuses``
    (who comes new) and ``refuses_calls``, ``disk`` (how long writing takes), ``quiet`` (no room is left for
    notifications), ``_locks``, ``_unflushed`` and ``_unreplicated`` (who waits for that), ``life`` (how
    often it was started).
    """

    #: What broken variants take away: a call that only reads waits for the standby, too.
    reads_wait = True

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.number = number
        self.role = "down"
        self.timeline = 1
        self.log: list[Call] = []
        self.flushed = self.acknowledged = 0
        self.tables = Tables(unlogged=cluster.unlogged)
        self.standby_names = False
        self.sessions: dict[int, Session] = {}
        self.paused = self.quiet = False
        self.refuses: tuple[str, str] | None = None
        self.refuses_calls: tuple[str, str] | None = None
        self.disk = cluster.disk
        self.life = 0
        self._later: list[tuple[Callable[..., None], tuple[Any, ...], int]] = []
        self._locks: dict[str, deque[tuple[Session, Callable[[], None]]]] = {}
        self._unflushed: list[tuple[int, Callable[[], None]]] = []
        self._unreplicated: list[tuple[int, Callable[[], None]]] = []
        self._flushing = False

    def __repr__(self) -> str:
        return f"pg{self.number}({self.role}, {self.timeline})"

    @property
    def address(self) -> str:
        return f"10.0.0.{self.number + 1}"

    def clock_us(self) -> int:
        return round((self.world.time + _EPOCH) * 1_000_000)

    @staticmethod
    def true_time_of(ms: float) -> float:
        """Return when its clock shows that."""
        return ms / 1000 - _EPOCH

    # -- running -------------------------------------------------------------------------------------

    def do(self, call: Callable[..., None], *args: Any) -> None:
        """Do it now, or when the server goes on."""
        if self.paused:
            self._later.append((call, args, self.life))
        else:
            call(*args)

    def resume(self) -> None:
        self.paused = False
        later, self._later = self._later, []
        for call, args, life in later:
            if life == self.life:
                self.do(call, *args)

    def accept(self, stream: Stream) -> Greeter:
        return Greeter(self, stream)

    def open(self) -> None:
        """Listen."""
        self.life += 1
        self.cluster.wire.listening[self.address, 5432] = self.accept
        self._write_now_and_then(self.life)

    def crash(self) -> None:
        """Its processes are killed. What is not on the disk is lost."""
        self.cluster.wire.listening.pop((self.address, 5432), None)
        self.life += 1
        self.paused, self._later = False, []
        for session in list(self.sessions.values()):
            session.open = False
            if session.waits not in ("disk", "standby"):
                session.roll_back()  # else it is in the log
        self.sessions.clear()
        self._locks.clear()
        self._unflushed.clear()
        self._unreplicated.clear()
        self._flushing = False
        self.cluster.wire.close(self.address)
        if self.role == "primary":
            lost = self.log[self.flushed :]
            del self.log[self.flushed :]
            if lost:
                self._rebuild()
            self.tables.crash()
        self.role = "down"

    def _rebuild(self) -> None:
        """Make the tables of the log."""
        before = self.tables
        self.tables = Tables(unlogged=before.unlogged)
        self.tables.hints_only = before.hints_only
        self.tables.histories = before.histories
        self.tables.longest, self.tables.opened_at = before.longest, before.opened_at
        if not before.unlogged:
            for call in self.log:
                self.carry_out(call)

    def start(self, role: str) -> None:
        self.role = role
        self.refuses = self.refuses_calls = None
        self.open()

    def promote(self) -> None:
        """It was a standby, and is the primary of a new timeline."""
        old = self.cluster.primary
        self.log = self.log[: self.flushed]
        self.timeline = max(server.timeline for server in self.cluster.servers) + 1
        self.tables = Tables(unlogged=self.cluster.unlogged)
        self.tables.histories = dict(old.tables.histories)
        self.tables.longest = old.tables.longest
        self._rebuild()
        self.tables.crash()  # unlogged tables are empty on a standby
        self.set_standby(False)
        self.role = "primary"
        self.cluster.primary = self
        self.cluster.on_promotion()

    def follow(self, primary: Server) -> None:
        """Be its standby, with all that it has."""
        if self.role != "down":
            self.crash()
        self.set_standby(False)
        self.log = list(primary.log[: primary.flushed])
        self.flushed, self.acknowledged = len(self.log), 0
        self.timeline = primary.timeline
        self.start("standby")
        primary.ship()

    def set_standby(self, waits: bool) -> None:
        """Commits wait for a standby from now on, or no longer."""
        self.standby_names = self.tables.hints_only = waits
        self.acknowledged = 0
        if not waits:
            waiting, self._unreplicated = self._unreplicated, []
            for _, go_on in waiting:
                go_on()

    # -- the log -------------------------------------------------------------------------------------

    def carry_out(self, call: Call) -> Turned:
        return self.tables.turn(call.now_us, call.caller, call.retention, call.text)

    def has_changed(self, transaction: Transaction) -> bool:
        names = self.tables.names
        return any(
            _state_of(names.get(key)) != _state_of(name) for key, name in transaction.before.items()
        )

    def append(self, calls: list[Call]) -> int:
        self.log += calls
        return len(self.log)

    def when_flushed(self, position: int, go_on: Callable[[], None]) -> None:
        self._unflushed.append((position, go_on))
        self._flush()

    def _flush(self) -> None:
        if not self._flushing and self.flushed < len(self.log):
            self._flushing = True
            self.world.after(self.disk, self.do, self._on_disk, len(self.log), self.life)
        elif not self._flushing:
            self._wake_flushed()

    def _on_disk(self, position: int, life: int) -> None:
        if life != self.life:
            return
        self._flushing = False
        self.flushed = max(self.flushed, position)
        self.ship()
        self._wake_flushed()
        if self._unflushed:
            self._flush()

    def _wake_flushed(self) -> None:
        ready = [go_on for position, go_on in self._unflushed if position <= self.flushed]
        self._unflushed = [one for one in self._unflushed if one[0] > self.flushed]
        for go_on in ready:
            go_on()

    def _write_now_and_then(self, life: int) -> None:
        """What is not waited for is written a little later."""
        if life == self.life:
            if self.role == "primary":
                self._flush()
            self.world.after(_WRITES_EVERY, self.do, self._write_now_and_then, life)

    @property
    def flushed_bytes(self) -> int:
        return self.flushed * _BYTES + 0x1000000 * self.timeline

    # -- the standby ---------------------------------------------------------------------------------

    def ship(self) -> None:
        """Send what is on the disk to the standby."""
        standby = self.cluster.standby
        if standby is not None and self.cluster.primary is self and not self.cluster.stalled:
            self.world.after(
                self.cluster.between, standby.do, standby._take, self, self.flushed, standby.life
            )

    def _take(self, primary: Server, position: int, life: int) -> None:
        if self.role != "standby" or life != self.life or self.cluster.stalled:
            return
        if position > self.flushed:
            self.log += primary.log[self.flushed : position]
            self.flushed = position
        self.world.after(
            self.cluster.between + self.disk,
            primary.do,
            primary._acknowledge,
            position,
            primary.life,
        )

    def _acknowledge(self, position: int, life: int) -> None:
        if life != self.life or self.cluster.primary is not self:
            return
        self.acknowledged = max(self.acknowledged, position)
        ready = [go_on for until, go_on in self._unreplicated if until <= self.acknowledged]
        self._unreplicated = [one for one in self._unreplicated if one[0] > self.acknowledged]
        for go_on in ready:
            go_on()

    def when_replicated(self, position: int, go_on: Callable[[], None]) -> None:
        if position <= self.acknowledged:
            go_on()
        else:
            self._unreplicated.append((position, go_on))
            self.ship()

    # -- names ---------------------------------------------------------------------------------------

    def locker(self, key: str, session: Session) -> Wait:
        def lock(go_on: Callable[[], None]) -> None:
            queue = self._locks.setdefault(key, deque())
            queue.append((session, go_on))
            if len(queue) == 1:
                go_on()

        return lock

    def unlock(self, session: Session) -> None:
        """Let others in where this session has a lock, or waits for one."""
        for key, queue in list(self._locks.items()):
            if all(one is not session for one, _ in queue):
                continue
            first = queue[0][0] is session
            kept = deque(one for one in queue if one[0] is not session)
            if not kept:
                del self._locks[key]
                continue
            self._locks[key] = kept
            if first:
                kept[0][1]()

    def recorded(self, key: str) -> str | None:
        """Return a success, as it is committed."""
        return recorded(self.seen(key), self.clock_us())

    def sweep(self) -> None:
        """Delete what has had its time."""
        self.tables.sweep(self.clock_us(), set(self._locks))

    def seen(self, key: str) -> Any:
        """Return a name as it is committed."""
        for session in self.sessions.values():
            transaction = session.transaction
            if transaction is not None and key in transaction.before:
                return transaction.before[key]
        return self.tables.names.get(key)

    def committed(self, session: Session, transaction: Transaction) -> None:
        """A transaction is visible now: who listens is notified."""
        for notified in transaction.told:
            if not self.quiet:
                self.notify(session.pid, notified)
        self.cluster.on_commit(self, transaction)

    def notify(self, pid: int, notified: Notified) -> None:
        for session in list(self.sessions.values()):
            session.notify(pid, notified)


def _state_of(name: Any) -> Any:
    return None if name is None else [repr(getattr(name, what)) for what in _KEPT]


_KEPT = ("holders", "waiters", "token", "limit", "record", "markers", "broken")


class Greeter:
    """A server's end of a stream until it lets the client in."""

    def __init__(self, server: Server, stream: Stream) -> None:
        self._server = server
        self._stream = stream
        self._session: Session | None = None

    def received(self, data: Any) -> None:
        if self._session is not None:
            self._session.received(data)
        else:
            self._server.do(self._let_in, data)

    def _let_in(self, data: Any) -> None:
        server = self._server
        if self._session is not None:
            self._session.received(data)
            return
        if server.refuses is not None or server.role == "down":
            code, text = server.refuses or ("57P03", "the database system is starting up")
            self._stream.send(("fatal", code, text))
            self._stream.hang_up()
            return
        if self._stream.served is None:
            return
        self._session = Session(server, self._stream)
        self._stream.send(("welcome", self._session.pid, server.role))

    def ended(self) -> None:
        self._server.do(self._end)

    def _end(self) -> None:
        if self._session is not None:
            self._session.ended()


class Cluster:
    """One server, or a primary and its standby.

    Mutable state: ``primary`` (that of the newest timeline), ``stalled`` (the standby receives nothing),
    ``alone`` (an old primary has worked without a standby beside a newer one).
    """

    def __init__(self, world: World, wire: Wire, servers: int, *, unlogged: bool) -> None:
        self.world = world
        self.wire = wire
        self.unlogged = unlogged
        self.system = "simulated"
        self.pids = count(100)
        self.disk = world.random.uniform(0.0001, 0.002)
        self.between = world.random.choice((0.0002, 0.003, 0.015))
        self.stalled = self.alone = False
        #: Told of each transaction that is visible now.
        self.on_commit: Callable[[Server, Transaction], None] = lambda server, transaction: None
        #: Told when there is a new primary.
        self.on_promotion: Callable[[], None] = lambda: None
        self.servers = [Server(self, number) for number in range(servers)]
        self.primary = self.servers[0]
        self.primary.start("primary")
        for server in self.servers[1:]:
            server.follow(self.primary)
        self.primary.set_standby(servers > 1)

    @staticmethod
    def key_of(kind: str, name: str) -> str:
        return f"aiodlock:{kind[0]}:{quote(name, safe='')}"

    @property
    def standby(self) -> Server | None:
        return next((server for server in self.servers if server.role == "standby"), None)

    def history_of(self, server: Server) -> tuple[str, int]:
        """Return the history of a primary, which the first one who asks makes."""
        histories = server.tables.histories
        if server.timeline not in histories:
            made = f"{self.world.random.getrandbits(64):016x}", server.clock_us()
            histories[server.timeline] = made
        return histories[server.timeline]

    def stall(self, stalled: bool) -> None:
        self.stalled = stalled
        if not stalled:
            self.primary.ship()

    def rejoin(self) -> None:
        """Whoever is not the primary becomes its standby."""
        for server in self.servers:
            if server is not self.primary and server.role != "standby":
                server.follow(self.primary)
                self.primary.set_standby(True)

    def calm(self) -> None:
        """All is well again."""
        for server in self.servers:
            server.refuses = server.refuses_calls = None
            server.quiet, server.disk = False, self.disk
            if server.paused:
                server.resume()
        if self.primary.role == "down":
            self.primary.start("primary")
        self.stall(False)
        self.rejoin()
