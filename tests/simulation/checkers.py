"""What must hold, looked at after every command that the server carried out and every turn of a loop.

Each check belongs to a checker, whose name a violation carries:

exclusion   live records on the server, and leases that are held at the same true time, are compatible
honesty     while ``lease.held`` is true, the server has the record, and longer
deadline    a local deadline is what the answered messages say, each counted from its own sending
told        a body is cancelled when its lease is lost, at once: it takes no second step
fairness    grants follow arrival; nobody who came later is let in first
handoff     whoever can be granted when a request leaves is granted then, and is told; nobody else is
extension   a deadline never comes nearer, a live record never vanishes, a delay and a hold are kept
closed      a name is closed as long as its body's hold says, and never for a body that did not begin
record      one success on record, of a holder, told to all, for as long as it is kept: see ``onces.py``
token       tokens grow with every grant, and a re-entry has its owner's
store       a store that compares tokens takes nothing from an older writer
ghost       what a client has left never comes back
keys        every key has a TTL that covers its records
idle        a free name is not kept from a waiter that is well
broken      what an operator broke is not held once its client has heard of it, whatever comes later
hint        who is told acts on it at once: see ``hints.py``
storm       no request asks one server again and again without a pause
liveness    after the faults everybody is served
leak        afterwards nothing is left, neither keys nor tasks nor places
failure     no background task dies, nothing unexpected is raised

``forgetful``: the server loses acknowledged writes, or its clock is stepped forward. Then exclusion between
clients and honesty about the server are not promised and not checked; the rest is.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from aiodlock._lease import Lease
from aiodlock._request import HELD, WAITING, Request, State

from ..inside import check_request, holds_of
from .server import Command, SimServer
from .world import Process, World, Wrong

if TYPE_CHECKING:
    from aiodlock._session import Session

#: How long after the moment a loop may take to act on it, in seconds. It turns every 10 µs.
_PROMPT = 0.001
#: How long after its machine has woken up a process may take to notice.
_AFTER_SLEEP = 1.0 + _PROMPT
#: So often a request may ask one server in a second, with all beats, looks and repetitions there are; and
#: so often within the length of a short lease, since what fails is repeated after a twelfth of it or later.
_MOST_ASKED, _MOST_IN_A_LEASE = 40, 16
#: ``local_deadline`` allows for this; it is part of the contract.
_DRIFT_SHARE, _DRIFT = 0.01, 0.002


class Record(NamedTuple):
    """A holder as the server has it. Times are milliseconds of the server's clock."""

    id: str
    mode: str
    token: int
    deadline: int
    length: int
    delay: int
    owner: str
    client: str
    #: What its hold_at_least is, and until when that keeps the name closed: 0 unless its body has begun.
    hold: int = 0
    hold_until: int = 0

    @property
    def closed_until(self) -> int:
        return max(self.deadline + self.delay, self.hold_until)

    def kept_until(self, now: int, *, used: bool = True) -> int:
        """Return until when it has to block, also if the clock was set back meanwhile."""
        hold = min(self.hold_until, now + self.hold) if used else 0
        return max(min(self.deadline, now + self.length) + self.delay, hold)


class Waiter(NamedTuple):
    id: str
    mode: str
    owner: str
    deadline: int
    length: int
    place: str | int


class Name(NamedTuple):
    """What the server has of one name: holders by id, waiters in the order of the queue."""

    holders: dict[str, Record]
    waiters: dict[str, Waiter]

    def live(self, now: int) -> list[Record]:
        return [record for record in self.holders.values() if now < record.deadline]

    def blockers(self, now: int) -> list[Record]:
        return [r for r in self.holders.values() if now < r.closed_until]


_EMPTY = Name({}, {})


def read_name(server: SimServer, base: str) -> Name:
    """Read the records of a name; ``base`` is its keys up to the last part."""
    reads = getattr(server, "read_name", None)
    if reads is not None:  # it has no keys
        name: Name = reads(base)
        return name
    db = server.db
    state, queue, waiters = (db.get(f"{base}:{part}".encode()) for part in _PARTS)
    holders = {}
    if state is not None:
        for id, text in state.value._values.items():
            mode, token, *times, owner, client = (words := text.decode().split(" "))[:7]
            deadline, length, delay = map(int, times)
            more = dict(word.split("=", 1) for word in words[7:])
            hold = (int(more.get("h", 0)), int(more.get("u", 0)) if "b" in more else 0)
            holders[id.decode()] = Record(
                id.decode(), mode, int(token), deadline, length, delay, owner, client, *hold
            )
    known = {} if waiters is None else waiters.value._values
    waiting = {}
    if queue is not None:
        for key in queue.value._ids:
            fields = queue.value._values_dict[key]
            id, row = fields[1], fields[3].decode().split(" ")
            stream_id, deadline, length = known.get(id, b"- 0 0").decode().split(" ")
            if stream_id == f"{key.ts}-{key.seq}":
                waiting[id.decode()] = Waiter(
                    id.decode(), row[0], row[2], int(deadline), int(length), stream_id
                )
    return Name(holders, waiting)


_PARTS = ("state", "queue", "waiters")


def compatible(mode: str, blockers: list[Record]) -> bool:
    if mode == "x":
        return not blockers
    limit = int(mode[1:] or 1_000_000)
    return len(blockers) < limit and all(record.mode != "x" for record in blockers)


@dataclass
class Ledger:
    """What the checkers remember of one name."""

    known: Name = _EMPTY
    last_token: int = 0
    #: Requests in the order in which they first reached the server and were not granted at once.
    arrivals: list[str] = field(default_factory=list)
    #: The serial of the grant of each request; a re-entry has its owner's.
    grants: dict[str, int] = field(default_factory=dict)
    number: int = 0
    idle_since: float | None = None


@dataclass
class Body:
    """A block of a user's that runs with a lease."""

    process: Process
    task: asyncio.Task[Any]
    lease: Lease
    cancels: bool
    told: bool = False
    lost_at: float | None = None
    #: While its lease ends at ``fine``, it need not be looked at until this true time.
    fine: float = -1.0
    fine_until: float = 0.0


class Checkers:
    """All of them, on one world. Mutable state is listed in ``__init__``."""

    def __init__(self, world: World, server: SimServer, *, forgetful: bool) -> None:
        self.world = world
        self.server = server
        self.forgetful = forgetful
        #: Requests that began before the server last lost data, or that an operator broke.
        self.excused: set[str] = set()
        self.ledgers: defaultdict[str, Ledger] = defaultdict(Ledger)
        self.sessions: dict[Process, list[Session]] = {}
        self.bodies: list[Body] = []
        #: Ids whose leave was answered.
        self.left: set[str] = set()
        #: The latest deadline that answered messages give, on the process's clock; with when it was heard.
        self.at_most: dict[str, float] = {}
        self.at_least: dict[str, tuple[float, float]] = {}
        #: The token of the grant that an operator broke, by id, of which its client has heard.
        self.known_broken: dict[str, int] = {}
        #: What the server's clock has shown at most, when it was stepped.
        self.latest_ms = 0
        self._asks: defaultdict[tuple[SimServer, str], deque[float]] = defaultdict(deque)
        #: What requests may count shorter than they were answered, by id.
        self._shorter: set[str] = set()
        self._seen: dict[str, float] = {}
        #: At which deadline a request that waits, and one that holds, was found right: until the next reply
        #: it need not be looked at again.
        self._fine_waiting: dict[str, float] = {}
        self._fine_held: dict[str, float] = {}
        #: In which state a request was checked last, and the turns of all processes.
        self._checked: dict[str, State] = {}
        self._turns = 0
        self._writes: dict[str, tuple[int, int]] = {}
        self.grants = 0
        #: Called when somebody waits, if nobody did.
        self.on_waiter: Callable[[], None] | None = None
        server.executed.append(self._executed)
        server.lost_data.append(self._lost_data)
        world.after_turn.append(self._after_turn)

    def entered(self, session: Session) -> None:
        """A client has been entered."""

    def ledger(self, base: str) -> Ledger:
        return self.ledgers[base]

    def wrong(self, checker: str, message: str) -> NoReturn:
        raise Wrong(checker, f"{message} (true time {self.world.time:.6f})")

    # -- the server --------------------------------------------------------------------------------

    def _lost_data(self) -> None:
        for session in self._all_sessions():
            self.excused.update(session.requests)
        self.excused |= self.left  # their markers may be lost too
        for base, ledger in self.ledgers.items():
            ledger.known = read_name(self.server, base)
            ledger.arrivals = list(ledger.known.waiters)
            if self.on_waiter is not None and ledger.known.waiters:
                self.on_waiter()

    def clock_steps(self, by: float) -> None:
        """Look at everything again: what was promised holds on the new clock too."""
        self.latest_ms = max(self.latest_ms, self.server.now_ms())
        self.server.offset += by
        for base, ledger in self.ledgers.items():
            self._check_honesty(base, ledger)

    def count(self, server: SimServer, command: Command, reply: Any) -> None:
        """A server has heard of a request once more."""
        if isinstance(reply, Exception) and str(reply).startswith("NOSCRIPT"):
            return  # it is sent again, with the script: here EVAL leaves none behind
        if server.repeats:
            return  # the client has said it once
        asks = self._asks[server, command.id]
        asks.append(self.world.time)
        while asks[0] <= self.world.time - 1.0:
            asks.popleft()
        if len(asks) > _MOST_ASKED and len(asks) > _MOST_IN_A_LEASE / self._usable(command):
            self.wrong("storm", f"{command} is the {len(asks)}th within a second")

    def _usable(self, command: Command) -> float:
        """Return what a lease has before its margin begins (seconds): the beats are in that."""
        length = command.length / 1000
        margins = (
            session.requests[command.id].terms.margin
            for sessions in self.sessions.values()
            for session in sessions
            if command.id in session.requests
        )
        return max(length - next(margins, 0.0), length / 10)

    def _executed(self, command: Command, reply: Any) -> None:
        published = self.server.published
        if command.script == "inspect":
            self._looked(command)
        if command.script not in ("acquire", "extend", "leave", "break"):
            return
        if command.script == "extend":
            self.count(self.server, command, reply)
        base = command.base
        ledger = self.ledger(base)
        before, now = ledger.known, self.server.now_ms()
        after = ledger.known = read_name(self.server, base)
        if self.on_waiter is not None and after.waiters:
            self.on_waiter()
        refused = isinstance(reply, Exception)
        if command.script == "break" and not refused:
            self.excused.update(before.holders)
        granted = [
            r
            for r in after.holders.values()
            if r.id not in before.holders or before.holders[r.id].token != r.token
        ]
        self._check_exclusion(after, granted, now)
        recorded = reply == [b"recorded"]
        if not recorded:
            self._check_what_stays(command, before, after, now, refused)
        self._check_grants(ledger, before, after, granted, now)
        self._check_ghosts(before, after)
        self._check_keys(base, after, now)
        if not refused and not recorded:
            self._check_handoff(command, reply, before, after, granted, published, now)
        # Of a record that is what it was, clients believe what they believed: see ``_check_deadline``.
        kept = after.holders
        for id, old in before.holders.items():
            new = kept.get(id)
            if new is None or new.deadline < old.deadline:
                self._check_honesty(base, ledger)
                break

    def _check_exclusion(self, after: Name, granted: list[Record], now: int) -> None:
        live = after.live(now)
        if len(live) < 2 and not granted:
            return
        if any(r.mode == "x" for r in live) and len({r.owner for r in live}) > 1:
            self.wrong("exclusion", f"the server has exclusive and other holders: {live}")
        for record in live:
            if record.mode.startswith("s") and len(live) > int(record.mode[1:] or 1_000_000):
                self.wrong("exclusion", f"the server has more holders than the limit: {live}")
        for new in granted:
            others = [r for r in after.blockers(now) if r is not new and r.owner != new.owner]
            if not compatible(new.mode, others):
                self.wrong("exclusion", f"{new} was granted beside {others}")

    def _looked(self, command: Command) -> None:
        """A look writes what it clamps, and nothing else."""
        now = self.server.now_ms()
        for base, ledger in self.ledgers.items():
            before = ledger.known
            after = ledger.known = read_name(self.server, base)
            self._check_what_stays(command, before, after, now, refused=False)

    def _check_what_stays(
        self, command: Command, before: Name, after: Name, now: int, refused: bool
    ) -> None:
        about, script = command.id, command.script
        # What was overdue before the clock was set back may have been dropped then.
        latest = max(now, self.latest_ms)
        for old in before.holders.values():
            if after.holders.get(old.id) == old:
                continue
            # Whoever is lost leaves, but its name stays closed for the lock-delay.
            held = old.hold > 0 and now < old.hold_until
            kept = now >= old.deadline or (command.lost and (old.delay or held))
            used = not (command.unused and old.id == about)
            left = script == "break" or (script == "leave" and old.id == about and not kept)
            left = left and not refused
            new = after.holders.get(old.id)
            if new is not None and new.token != old.token:
                new = None  # overdue, dropped and granted anew: a late repetition of the request
            elif script == "acquire" and old.id == about and self._reenters(old, before, now):
                new = None  # likewise, with the token of its owner
            if (
                new is None
                and not left
                and latest < (old.closed_until if used else old.deadline + old.delay)
                and now < old.kept_until(now, used=used)
            ):
                self.wrong("extension", f"{old} vanished before its time by {command}")
            if new is not None and old.deadline <= now < new.deadline:
                self.wrong("extension", f"{old} was overdue, and is revived by {command}")
            if new is not None and new.deadline < min(old.deadline, now + old.length) and not left:
                self.wrong("extension", f"{old} was brought nearer, to {new}, by {command}")
        for waiter in before.waiters.values():
            if latest >= waiter.deadline or after.waiters.get(waiter.id) == waiter:
                continue
            if not refused and script == "leave" and waiter.id == about:
                continue
            stays: Waiter | Record | None = after.waiters.get(waiter.id) or after.holders.get(
                waiter.id
            )
            if stays is None:
                self.wrong("extension", f"{waiter} vanished by {command}")
            elif stays.deadline < min(waiter.deadline, now + waiter.length):
                self.wrong("extension", f"{waiter} was brought nearer, to {stays}, by {command}")

    @staticmethod
    def _reenters(old: Record, before: Name, now: int) -> bool:
        """Whether an overdue record's owner holds by another one."""
        others = [r for r in before.holders.values() if r.owner == old.owner and r.id != old.id]
        return now >= old.deadline and any(now < r.deadline for r in others)

    def _check_grants(
        self, ledger: Ledger, before: Name, after: Name, granted: list[Record], now: int
    ) -> None:
        for id, waiter in after.waiters.items():
            old = before.waiters.get(id)
            if old is not None and old.place != waiter.place:
                if max(now, self.latest_ms) < old.deadline:
                    self.wrong("fairness", f"{old} lost its place")
                ledger.arrivals.remove(id)  # too late: it queues again, at the end
            if old is None or old.place != waiter.place:
                ledger.arrivals.append(id)
        for new in granted:
            # A request whose place or lease ran out may be granted a second time: that is another grant,
            # and the first one's number is not its owner's.
            ledger.grants.pop(new.id, None)
        for new in sorted(granted, key=lambda record: record.token):
            self.grants += 1
            if now >= new.deadline:
                self.wrong("handoff", f"{new} was granted after it was overdue")
            same = [
                r
                for r in [*before.live(now), *after.holders.values()]
                if r.owner == new.owner and r.id != new.id and r.id in ledger.grants
            ]
            again = [r for r in same if r.token == new.token]
            if again:
                ledger.grants[new.id] = ledger.grants[again[0].id]
                continue
            # What has left and keeps the name closed has a length of 0: it is no hold of the owner's.
            if any(r.id in after.holders and now < min(r.deadline, now + r.length) for r in same):
                self.wrong("token", f"{new} has another token than its owner's {same}")
            if new.token <= ledger.last_token:
                self.wrong("token", f"{new} after {ledger.last_token}")
            ledger.last_token = new.token
            ledger.number += 1
            ledger.grants[new.id] = ledger.number
            earlier = ledger.arrivals
            if new.id in earlier:
                earlier = earlier[: earlier.index(new.id)]
            for id in earlier:
                waits = after.waiters.get(id)
                if waits is not None and now < waits.deadline:
                    self.wrong(
                        "fairness", f"{new} was granted while {waits} waits, who came before"
                    )
        ledger.arrivals = [id for id in ledger.arrivals if id in after.waiters]

    def _check_ghosts(self, before: Name, after: Name) -> None:
        for id in (*after.holders, *after.waiters):
            if id in before.holders or id in before.waiters:
                continue
            if id in self.left and id not in self.excused:
                self.wrong("ghost", f"{id} is back after its leave was answered")

    def _check_keys(self, base: str, after: Name, now: int) -> None:
        db = self.server.db
        ends = {
            "state": max((r.closed_until for r in after.holders.values()), default=0),
            "queue": max((w.deadline for w in after.waiters.values()), default=0),
            "waiters": max((w.deadline for w in after.waiters.values()), default=0),
        }
        for part in ("state", "queue", "waiters", "token", "broken"):
            item = db._dict.get(f"{base}:{part}".encode())
            if item is None:
                continue
            if item.expireat is None:
                self.wrong("keys", f"{base}:{part} has no TTL")
            elif item.expireat * 1000 < ends.get(part, 0) - 0.01:
                self.wrong(
                    "keys", f"{base}:{part} ends {ends[part] / 1000 - item.expireat:.3f} s early"
                )

    def _check_handoff(
        self,
        command: Command,
        reply: Any,
        before: Name,
        after: Name,
        granted: list[Record],
        published: list[tuple[str, str]],
        now: int,
    ) -> None:
        told = {id for word, id in published if word == "granted"}
        if command.script == "leave" and reply[0] == b"released":
            own = {id.decode() for id in reply[2::2]}
            releaser = before.holders[command.id].client
            if own & told or any(r.client != releaser for r in granted if r.id in own):
                self.wrong("handoff", f"{command}: told {own} by its reply, {told} by notices")
            told |= own
        if granted or told:
            waited = {r.id for r in granted if r.id in before.waiters and r.id != command.id}
            if not waited <= told or not told <= {r.id for r in granted}:
                self.wrong("handoff", f"{command}: granted {waited}, told {told}")
        if len(published) > 1 and sum(word == "look" for word, _ in published) > 1:
            self.wrong("handoff", f"{command}: more than one hint: {published}")
        holder = before.holders.get(command.id)
        if command.script == "extend" and holder is not None and now < holder.deadline:
            return  # a holder's extension looks at nobody else
        if command.script == "acquire" and reply == [b"gone"]:
            return  # refused by its marker, before it has looked
        if not after.waiters:
            return
        head = next((w for w in after.waiters.values() if now < w.deadline), None)
        if head is not None and compatible(head.mode, after.blockers(now)):
            self.wrong("handoff", f"after {command} nobody blocks {head}, who still waits")

    # -- clients against the server ------------------------------------------------------------------

    def _all_sessions(self) -> list[Session]:
        return [one for many in self.sessions.values() for one in many]

    def _check_honesty(self, base: str, ledger: Ledger) -> None:
        if self.forgetful:
            return
        for process, sessions in self.sessions.items():
            if process.dead:
                continue
            for session in sessions:
                for request in session.requests.values():
                    if request.state is HELD and base_of(request) == base:
                        self._check_place(process, request, ledger.known)

    def _check_place(self, process: Process, request: Request, known: Name) -> None:
        """Held here until its local deadline: then there until at least the same true time."""
        if request.id in self.excused or process.boot() >= request.ends_at:
            return
        ends = process.true_time_of(request.ends_at)
        record = known.holders.get(request.id)
        if record is None:
            self.wrong(
                "honesty", f"{process} believes that {request.id} holds, the server does not"
            )
        elif self.server.true_time_of(record.deadline) < ends:
            early = ends - self.server.true_time_of(record.deadline)
            self.wrong("honesty", f"{process} believes in {request.id} for {early:.6f} s too long")

    def _after_turn(self, process: Process) -> None:
        if process.failures:
            self.wrong("failure", f"{process}: {process.failures[0]}")
        self._turns += 1
        now_and_then = not self._turns % 8
        checked, fine_held, fine_waiting = self._checked, self._fine_held, self._fine_waiting
        for session in self.sessions.get(process, ()):
            for id, request in session.requests.items():
                state = request.state
                if now_and_then or checked.get(id) is not state:
                    # Most turns change nothing, and this is a tenth of a seed's time.
                    check_request(session, request)
                    checked[id] = state
                if state is HELD:
                    fine = fine_held
                elif state is WAITING:
                    fine = fine_waiting
                else:
                    continue
                if self.known_broken:
                    self._check_broken(process, request)
                if fine.get(id) != request.place.deadline:
                    self._check_deadline(process, request)
        now = self.world.time
        for body in self.bodies:
            if body.process is process and body.cancels and not body.told:
                request = body.lease._request
                if request.loss is None and request.ends_at == body.fine and now < body.fine_until:
                    continue
                self._check_told(body)

    def on_broken(self, id: str, token: int) -> None:
        """A client hears that a grant was broken."""
        if not self.forgetful:  # else tokens may begin anew
            self.known_broken[id] = max(token, self.known_broken.get(id, 0))

    def _check_broken(self, process: Process, request: Request) -> None:
        known = self.known_broken.get(request.id, 0)
        if request.state is HELD and request.token <= known:
            self.wrong(
                "broken", f"{process} has heard that {request.id} was broken, and believes in it"
            )

    def _check_deadline(self, process: Process, request: Request) -> None:
        id, deadline = request.id, request.place.deadline
        if request.state is HELD and self._seen.get(id) != deadline:
            self._seen[id] = deadline
            if not self.forgetful:
                base = base_of(request)
                self._check_place(process, request, read_name(self.server, base))
                self._check_together(process, request)
        most, (known_at, least) = self.at_most.get(id), self.at_least.get(id, (0.0, 0.0))
        if most is None:
            self.wrong("deadline", f"{process}: {id} has a deadline before any answer")
        elif deadline > most + 1e-6:
            self.wrong(
                "deadline", f"{process}: {id} is believed for {deadline - most:.6f} s too long"
            )
        elif (
            deadline < least - 0.001
            and self.world.time - max(known_at, process.resumed_at) > _PROMPT
        ):
            self.wrong("deadline", f"{process}: {id} counts {least - deadline:.6f} s short")
        elif deadline >= least - 0.001:
            fine = self._fine_held if request.state is HELD else self._fine_waiting
            fine[id] = deadline

    def _check_together(self, process: Process, request: Request) -> None:
        if process.boot() >= request.ends_at:
            return
        for other_process, sessions in self.sessions.items():
            if other_process.dead:
                continue
            for session in sessions:
                for other in session.requests.values():
                    if other is request or base_of(other) != base_of(request):
                        continue
                    if other.state is not HELD or other_process.boot() >= other.ends_at:
                        continue
                    both_shared = request.terms.mode == other.terms.mode == "shared"
                    if both_shared or request.owner == other.owner:
                        continue
                    if not {request.id, other.id} & self.excused:
                        self.wrong(
                            "exclusion", f"{request.id} and {other.id} are held at the same time"
                        )

    # -- replies -------------------------------------------------------------------------------------

    def on_given_up(self, id: str) -> None:
        """Nobody waits any more for the answer to an extension by hand: it comes to nothing, even if it has
        come in this turn of the loop."""
        self._shorter.add(id)
        self.at_least.pop(id, None)

    def on_reply(self, process: Process, command: Command, sent: float, reply: Any) -> None:
        """An answer reaches a client: from now on it may count on it."""
        id = command.id
        if isinstance(reply, Exception) or not id:
            if str(reply).startswith("NOSCRIPT"):
                # Sent again with the script, it counts from the first sending: shorter, never longer.
                self._shorter.add(id)
            return
        word = reply[0]
        if command.script == "leave":
            self.left.add(id)
        elif word in (b"granted", b"held", b"recalled", b"waiting"):
            left = int(reply[2] if word != b"waiting" else reply[1]) / 1000
            deadline = sent + left - (left * _DRIFT_SHARE + _DRIFT)
            self._fine_held.pop(id, None)
            self._fine_waiting.pop(id, None)
            self.at_most[id] = max(self.at_most.get(id, 0.0), deadline)
            if id not in self._shorter:
                least = max(self.at_least.get(id, (0.0, 0.0))[1], deadline)
                self.at_least[id] = (self.world.time, least)

    # -- bodies --------------------------------------------------------------------------------------

    def _check_told(self, body: Body) -> None:
        process, request = body.process, body.lease._request
        if body.task.done():
            return
        now = self.world.time
        if request.loss is not None:
            if body.lost_at is None:
                body.lost_at = now
            if body.task.cancelling():
                body.told = True
            elif now - max(body.lost_at, process.resumed_at) > _PROMPT:
                self.wrong("told", f"{process}: {request.id} was lost, its body goes on")
        elif request.state is HELD:
            ends = process.true_time_of(request.ends_at)
            body.fine, body.fine_until = request.ends_at, ends
            overdue = now - ends
            if overdue <= _PROMPT or now - process.resumed_at <= _PROMPT:
                return
            if process.slept(now - _AFTER_SLEEP):
                return  # its timers stood still meanwhile, also one that a lease begun since relies on
            self.wrong("told", f"{process}: the body of {request.id} is {overdue:.6f} s overdue")

    async def step(self, lease: Lease) -> None:
        """A body has taken a step: when its lease has ended, there is no second one."""
        task = asyncio.current_task()
        request = lease._request
        mine = [
            b for b in self.bodies if b.task is task and b.lease._request is request and b.cancels
        ]
        if not mine or lease.held or task is None or task.cancelling():
            return
        process = mine[0].process
        if process.slept(self.world.time - _AFTER_SLEEP):
            return  # its timers stood still meanwhile
        await asyncio.sleep(0)
        self.wrong("told", f"{process}: the body of {request.id} goes on after its lease")

    def write(self, base: str, lease: Lease, accepted: bool) -> None:
        """A store that keeps the largest token has taken or refused a write of an exclusive holder."""
        number = self.ledger(base).grants.get(lease._request.id, 0)
        if accepted:
            last, token = self._writes.get(base, (0, 0))
            if number < last:
                self.wrong(
                    "store", f"grant {number} (token {lease.token}) written after {last} ({token})"
                )
            self._writes[base] = (number, lease.token)

    # -- from time to time, and at the end -----------------------------------------------------------

    def check_idle(self, patience: float) -> bool:
        """A name that nobody blocks, and a live waiter at its head whose process is well.

        Return whether anybody waits.
        """
        now, anybody = self.server.now_ms(), False
        for base, ledger in self.ledgers.items():
            if not ledger.known.waiters:  # nor are there any now
                ledger.idle_since = None
                continue
            anybody = True
            name = read_name(self.server, base)
            head = next((w for w in name.waiters.values() if now < w.deadline), None)
            process = self._process_of(head.id) if head is not None else None
            free = head is not None and compatible(head.mode, name.blockers(now))
            if not free or process is None or not process.running:
                ledger.idle_since = None
                continue
            if ledger.idle_since is None:
                ledger.idle_since = self.world.time
            since = max(ledger.idle_since, process.resumed_at)
            if self.world.time - since > patience:
                self.wrong("idle", f"{base} is free, and {head} has waited {patience:.3f} s for it")
        return anybody

    def _process_of(self, id: str) -> Process | None:
        """Return whose request that is, if its client is still there."""
        for process, sessions in self.sessions.items():
            if any(id in session.requests for session in sessions):
                return process
        return None

    def check_nothing_left(self, process: Process, session: Session) -> None:
        """All that its tasks began is over: the client has no request and no beat any more."""
        keeper: Any = session.backend.keeper  # type: ignore[attr-defined]
        server = getattr(keeper.store, "server", None)
        left = [list(session.requests), holds_of(session), len(session.deadlines)]
        left += [list(keeper.places), len(keeper)]
        left.append(server.wakeups._watched if server is not None and server.wakeups else [])
        if any(left):
            self.wrong("leak", f"{process} still has requests, holds, beats, watches: {left}")


def base_of(request: Request) -> str:
    terms = request.terms
    return base_key(terms.kind, terms.name)


@cache
def base_key(kind: str, name: str) -> str:
    """Return what the keys of a name begin with."""
    return f"aiodlock:2:{kind}:{{{name}}}"
