"""Servers that agree: a leader decides, a majority accepts, all apply in the same order, sooner or later.

What ZooKeeper's Zab and etcd's Raft have in common, and clients can tell from outside. Who has not heard
from its leader, or as one from a majority, for some ticks, closes or fails what its clients wait for and
looks for another leader. Left out: reconfiguration, snapshots, observers and learners.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ..world import World
from .wire import Wire

#: In ticks.
SYNC_LIMIT = 5


@dataclass(eq=False)
class Proposed:
    """A change on its way, and whose it is. ``answer`` is called at its origin with what applying gave."""

    number: int
    change: Any
    origin: int
    answer: Callable[[Any], None] | None = None
    accepted: set[int] = field(default_factory=set)


class Member:
    """One server; a store's own is a subclass.

    Mutable state: ``role`` ("leading", "following", "looking", "down"), ``epoch``, ``log`` (what it has
    accepted), ``applied`` (so many of these), ``committed`` (as a leader: so many are), ``paused`` and
    ``_later`` (what it does when it goes on), ``heard_at`` (when it last heard from its leader, or as one
    from each follower; -1: from itself).
    """

    letter = "m"

    def __init__(self, ensemble: Ensemble, number: int) -> None:
        self.ensemble = ensemble
        self.world = ensemble.world
        self.number = number
        self.rate = 1.0 + self.world.random.uniform(-0.004, 0.004)
        self.role = "looking"
        self.epoch = 0
        self.log: list[Proposed] = []
        self.applied = 0
        self.committed = 0
        self.paused = False
        self.heard_at: dict[int, float] = {}
        self._later: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        #: How long accepting a change takes, in true seconds.
        self.disk = self.world.random.uniform(0.0001, 0.002)

    def __repr__(self) -> str:
        return f"{self.letter}{self.number}({self.role})"

    # -- what a store says ---------------------------------------------------------------------------

    def apply(self, proposed: Proposed) -> Any:
        """Carry a change out; return what its answer is made of."""
        raise NotImplementedError

    def begin_to_lead(self) -> None:
        """All of the log is applied."""

    def report(self) -> Any:
        """Return what a follower answers when its leader asks, each half tick."""

    def take_report(self, report: Any) -> None:
        """The leader hears what a follower has answered."""

    def drop_clients(self) -> None:
        """It serves nobody any more, for now."""

    # -- running -------------------------------------------------------------------------------------

    @property
    def leader(self) -> Any:
        leader = self.ensemble.leader
        return leader if leader is not None and leader.epoch == self.epoch else None

    @property
    def last_number(self) -> int:
        return self.log[-1].number if self.log else 0

    @property
    def serves(self) -> bool:
        return self.role in ("leading", "following")

    def do(self, call: Callable[..., None], *args: Any) -> None:
        """Do it now, or when the server goes on."""
        if self.role == "down":
            return
        if self.paused:
            self._later.append((call, args))
        else:
            call(*args)

    def resume(self) -> None:
        self.paused = False
        later, self._later = self._later, []
        for call, args in later:
            self.do(call, *args)

    def send(self, to: Member, call: Callable[..., None], *args: Any) -> None:
        """Have another member do something, behind all that was sent to it before."""
        ensemble = self.ensemble
        ensemble.send((next(ensemble.serials), self, to, self.epoch, call, args))

    def tell(self, number: int, what: str, *args: Any) -> None:
        """Have a member do something, perhaps this one."""
        member = self.ensemble.members[number]
        if member is self:
            getattr(self, what)(*args)
        else:
            self.send(member, getattr(member, what), *args)

    def to_leader(self, what: str, *args: Any) -> bool:
        """Have the leader do something; False: there is none."""
        leader = self.leader
        if leader is None:
            return False
        self.tell(leader.number, what, *args)
        return True

    def down(self) -> None:
        """The process is killed. What it has accepted is on its disk."""
        self.drop_clients()
        self.role, self.paused, self._later = "down", False, []

    def start(self) -> None:
        if self.role == "down":
            self.role = "looking"

    def look(self) -> None:
        """Look for a leader."""
        if self.role != "down":
            self.drop_clients()
            self.role = "looking"

    # -- changes -------------------------------------------------------------------------------------

    def accept(self, proposed: Proposed) -> None:
        """Write it to the disk; the leader hears of that."""
        self.log.append(proposed)
        self.world.after(self.disk, self.do, self._accepted, proposed, self.epoch)

    def _accepted(self, proposed: Proposed, epoch: int) -> None:
        if epoch == self.epoch:
            self.to_leader("on_accepted", self.number, proposed)

    def apply_until(self, number: int) -> None:
        """The first so many changes are committed."""
        log, note_applied = self.log, self.ensemble.note_applied
        while self.applied < number and self.applied < len(log):
            proposed = log[self.applied]
            self.applied += 1
            result = self.apply(proposed)
            note_applied(self, proposed)
            if proposed.origin == self.number and proposed.answer is not None:
                proposed.answer(result)

    # -- following -----------------------------------------------------------------------------------

    def on_ping(self) -> None:
        self.heard_at[-1] = self.world.time
        self.to_leader("on_pong", self.number, self.report())

    def on_proposal(self, proposed: Proposed) -> None:
        if proposed.number > self.last_number:
            self.accept(proposed)  # else it was in the log that was taken over

    def on_commit(self, number: int) -> None:
        self.heard_at[-1] = self.world.time
        self.apply_until(number)

    # -- leading -------------------------------------------------------------------------------------

    def next_number(self) -> int:
        last = self.last_number
        return last + 1 if last >> 32 == self.epoch else (self.epoch << 32) + 1

    def propose(
        self, change: Any, origin: int, answer: Callable[[Any], None] | None = None
    ) -> None:
        """Have a change accepted by a majority."""
        proposed = Proposed(self.next_number(), change, origin, answer)
        for member in self.followers():
            self.send(member, member.on_proposal, proposed)
        self.accept(proposed)

    def followers(self) -> list[Any]:
        return [
            member
            for member in self.ensemble.members
            if member is not self and member.role == "following" and member.epoch == self.epoch
        ]

    def on_pong(self, number: int, report: Any) -> None:
        self.heard_at[number] = self.world.time
        self.take_report(report)

    def on_accepted(self, number: int, proposed: Proposed) -> None:
        self.heard_at[number] = self.world.time
        proposed.accepted.add(number)
        before = self.committed
        while (
            self.committed < len(self.log)
            and len(self.log[self.committed].accepted) >= self.ensemble.majority
        ):
            self.committed += 1
        if self.committed > before:
            # The leader applies what it then tells others to apply.
            self.apply_until(self.committed)
            for member in self.followers():
                self.send(member, member.on_commit, self.committed)

    def hears_a_majority(self) -> bool:
        limit = SYNC_LIMIT * self.ensemble.tick
        heard = sum(self.world.time - at <= limit for at in self.heard_at.values())
        return heard + 1 >= self.ensemble.majority or self.world.time - self.heard_at[-1] <= limit


#: From one member to another: a serial, by which messages are in order, who sends it to whom, the epoch,
#: and what it is. (A plain tuple: half of all that happens in a seed are these.)
_Message = tuple[int, Member, Member, int, Callable[..., None], tuple[Any, ...]]


class Ensemble:
    """All servers, what lies between them, and who leads.

    Mutable state: ``members``, ``leader``, ``epoch``, ``cut`` (pairs of members between which nothing
    passes), ``serials`` (of messages), ``_last`` (delivery times, for the order), ``_held`` (what waits for
    a cut to heal).
    """

    member_class: type[Member]

    def __init__(self, world: World, wire: Wire, members: int, tick: float) -> None:
        self.world = world
        self.wire = wire
        self.tick = tick
        self.members: list[Any] = [self.member_class(self, number) for number in range(members)]
        self.leader: Any = None
        self.epoch = 0
        self.cut: set[frozenset[int]] = set()
        self._last: dict[tuple[int, int], float] = {}
        self._held: list[_Message] = []
        self.serials = count()
        self.between = world.random.choice((0.0002, 0.003, 0.015))
        #: Told of each change that some member is the first to apply: the change, and that member.
        self.on_first: Callable[[Any, Any], None] = lambda change, member: None
        self._newest = 0
        self._tick()

    @staticmethod
    def address(member: Member) -> str:
        return f"10.0.0.{member.number + 1}"

    @property
    def majority(self) -> int:
        return len(self.members) // 2 + 1

    @property
    def newest(self) -> Any:
        """The member that has applied most."""
        return max(self.members, key=lambda m: m.log[m.applied - 1].number if m.applied else 0)

    def note_applied(self, member: Member, proposed: Proposed) -> None:
        if proposed.number > self._newest:
            self._newest = proposed.number
            self.on_first(proposed.change, member)

    def calm(self) -> None:
        """All servers are up, and reach each other."""
        for pair in list(self.cut):
            self.heal(pair)
        for member in self.members:
            member.disk = min(member.disk, 0.002)
            if member.paused:
                member.resume()
            member.start()

    # -- between members -----------------------------------------------------------------------------

    def is_cut(self, one: Member, other: Member) -> bool:
        return bool(self.cut) and frozenset((one.number, other.number)) in self.cut

    def send(self, message: _Message) -> None:
        _, one, to, _, _, _ = message
        if self.cut and self.is_cut(one, to):
            self._held.append(message)
            return
        world, key = self.world, (one.number, to.number)
        when = world.time + self.between * (0.5 + world.random.random())
        last = self._last.get(key, 0.0)
        if last > when:
            when = last
        self._last[key] = when
        world.at(when, self._arrive, message)

    def _arrive(self, message: _Message) -> None:
        _, one, to, epoch, call, args = message
        if self.cut and self.is_cut(one, to):
            self._held.append(message)
        elif to.paused:
            to.do(self._take, to, epoch, call, args)
        else:
            self._take(to, epoch, call, args)

    @staticmethod
    def _take(to: Member, epoch: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if to.epoch == epoch and to.role in ("leading", "following"):
            call(*args)

    def heal(self, pair: frozenset[int]) -> None:
        """What waited goes on, in its order."""
        self.cut.discard(pair)
        held, self._held = sorted(self._held), []  # some were under way when it was cut
        for message in held:
            self.send(message)

    # -- who leads -----------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Each half tick: leaders ask, and who hears nothing looks for another leader."""
        world, limit = self.world, SYNC_LIMIT * self.tick
        for member in self.members:
            if member.paused:
                continue
            if member.role == "leading" and not member.hears_a_majority():
                world.log(f"{member!r} hears no majority")
                member.look()
            elif member.role == "leading":
                for follower in member.followers():
                    member.send(follower, follower.on_ping)
            elif member.role == "following" and world.time - member.heard_at[-1] > limit:
                world.log(f"{member!r} hears no leader")
                member.look()
        self._elect()
        world.after(self.tick / 2, self._tick)

    def _elect(self) -> None:
        looking = [m for m in self.members if m.role == "looking" and not m.paused]
        leader = self.leader
        if leader is not None and leader.role == "leading" and not leader.paused:
            for member in looking:
                if not self.is_cut(member, leader):
                    self._join(member, leader)
            looking = [m for m in looking if m.role == "looking"]
        for best in sorted(looking, key=lambda m: (m.last_number, m.number), reverse=True):
            near = [m for m in looking if m is best or not self.is_cut(m, best)]
            newest = max(m.last_number for m in near)
            if len(near) >= self.majority and best.last_number >= newest:
                self._lead(best, near)
                return

    def _lead(self, best: Any, near: list[Any]) -> None:
        self.epoch += 1
        self.leader = best
        best.epoch, best.role = self.epoch, "leading"
        self.world.log(f"{best!r} leads epoch {self.epoch}")
        best.heard_at = {-1: self.world.time}
        best.committed = len(best.log)
        best.apply_until(best.committed)
        for member in near:
            if member is not best:
                self._join(member, best)
        best.begin_to_lead()

    def _join(self, member: Any, leader: Any) -> None:
        """Take over what the leader has accepted, and follow it."""
        known = leader.log
        assert member.log[: member.applied] == known[: member.applied]
        member.log = list(known)
        member.epoch, member.role = leader.epoch, "following"
        member.heard_at = {-1: self.world.time}
        leader.heard_at[member.number] = self.world.time
        for proposed in known[leader.committed :]:
            self.world.after(member.disk, member.do, member._accepted, proposed, member.epoch)
        member.apply_until(leader.committed)
        # Changes that were on their way to it are in its log.
        key = (leader.number, member.number)
        self._held = [m for m in self._held if m[1:3] != (leader, member)]
        self._last[key] = max(self._last.get(key, 0.0), self.world.time)
        self.world.log(f"{member!r} follows {leader!r}")
