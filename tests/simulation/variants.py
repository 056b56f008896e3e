"""Deliberately broken protocols, in the simulation only: proof that the checkers see what they are for.

Each breaks one invariant, by another text in the scripts or another function in the clients, and names
the checkers of which one must catch it. ``seed`` is one that did; a change of the library moves it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from aiodlock import _body, _linger
from aiodlock import _request as core
from aiodlock._bodies import Bodies
from aiodlock._body import Body
from aiodlock._clock import now
from aiodlock._deadlines import Deadlines
from aiodlock._lease import Lease
from aiodlock._model import Gone, Granted, Refused, StoreRequest, Waiting
from aiodlock._register import Register
from aiodlock._scope import BodyScope
from aiodlock.backends.keeper import Keeper
from aiodlock.backends.kept_place import KeptPlace
from aiodlock.backends.memory import store as memory_store
from aiodlock.backends.redis import RedisBackend, replies
from aiodlock.backends.redis.connections import Connections
from aiodlock.backends.redis.deployment import Deployment
from aiodlock.backends.redis.keys import keys_of
from aiodlock.backends.redis.messages import wire_mode
from aiodlock.backends.redis.quorum.confirming import Confirming
from aiodlock.backends.redis.quorum.giving_back import GivingBack
from aiodlock.backends.redis.quorum.notices import NodeNotices
from aiodlock.backends.redis.quorum.requests import Requests
from aiodlock.backends.redis.quorum.tickets import Tickets
from aiodlock.backends.redis.quorum.trust import Trust
from aiodlock.backends.redis.quorum.votes import Answer, Ballot, Queued, Tally
from aiodlock.backends.redis.refusals import ReplyError
from aiodlock.backends.redis.scripts import ACQUIRE, ALL, VOTING
from aiodlock.backends.redis.sentinel import Address, Named
from aiodlock.backends.redis.sentinels import PrimaryLookup
from aiodlock.backends.stage import Stage

from ..model.mutant import mutated
from .failover import FailoverSimulation
from .forgotten import Forgotten
from .habits import Habits
from .lingers import Lingers, LingersOnTheMachine
from .memory import MachineSimulation
from .quorum import QuorumSimulation
from .rush import Rush
from .scenario import Simulation

Prepare = Callable[[Simulation], None]


@dataclass(frozen=True, slots=True)
class Variant:
    """One broken protocol; ``prepare`` breaks a simulation before it runs."""

    prepare: Prepare
    caught_by: tuple[str, ...]
    seed: int = 0
    kind: type[Simulation] = Simulation


def _lua(*changes: tuple[str, str]) -> Prepare:
    """Replace text of the scripts; a change that no script has room for is an error."""

    def prepare(simulation: Simulation) -> None:
        applied = set()
        for script in ALL:
            text = script.source.decode()
            for old, new in changes:
                if old in text:
                    text = text.replace(old, new)
                    applied.add(old)
            simulation.server.patches[script.source] = text.encode()
        assert applied == {old for old, _ in changes}, "the scripts have changed: adapt the variant"

    return prepare


def _backend(broken: type[RedisBackend]) -> Prepare:
    def prepare(simulation: Simulation) -> None:
        simulation.backend_class = broken

    return prepare


def _both(*parts: Prepare) -> Prepare:
    def prepare(simulation: Simulation) -> None:
        for part in parts:
            part(simulation)

    return prepare


# -- what is broken in a client ----------------------------------------------------------------------


class _TwoSteps(RedisBackend):
    """Asks whether the name is free, and then takes it, whoever has come meanwhile."""

    async def acquire(
        self, request: StoreRequest, *, wait: bool
    ) -> Granted | Waiting | Refused | Gone:
        link = self.server.link
        wire = link.wire or await link.wait_up()
        keys = keys_of(self.server.settings.prefix, request.kind, request.name)
        names = (keys.state, keys.queue, keys.waiters, keys.token, keys.marker + request.id)
        try:
            if not await wire.send("EXISTS", *names):
                ttl = (
                    round(s * 1000)
                    for s in (request.terms.ttl, request.terms.waiter_ttl, request.terms.lock_delay)
                )
                mode = wire_mode(request)
                who: tuple[str | int, ...]
                who = (
                    request.id,
                    mode,
                    request.owner,
                    *ttl,
                    self.label,
                    *self.server.to_clients,
                    "take",
                    "",
                    "",
                )
                sent = now()
                reply = await wire.send("EVALSHA", ACQUIRE.sha, 5, *names, *who)
                return replies.outcome_of(reply, sent)
        except ReplyError:
            pass
        return await super().acquire(request, wait=wait)


_FREE = "if present == 0 and how == '' then"


class _FromTheFirst(RedisBackend):
    """Counts a deadline from the first sending of a request, also when it was answered to the second."""

    async def acquire(
        self, request: StoreRequest, *, wait: bool
    ) -> Granted | Waiting | Refused | Gone:
        first = _sent.setdefault(request, now())
        again = now() - first
        answer = await super().acquire(request, wait=wait)
        if isinstance(answer, Granted | Waiting):
            return replace(answer, deadline=answer.deadline - again)
        return answer


_sent: dict[StoreRequest, float] = {}


def _from_the_reply(simulation: Simulation) -> None:
    right = replies.local_deadline
    simulation.patch(replies, "local_deadline", lambda _, left_ms: right(now(), left_ms))


def _believe_late_notices(simulation: Simulation) -> None:
    right = Keeper.hold

    def hold(self: Keeper, place: KeptPlace, token: int, deadline: float) -> None:
        if now() >= deadline:
            place.hold(token, now() + place.terms.waiter_ttl)
        right(self, place, token, deadline)

    simulation.patch(Keeper, "hold", hold)


def _rely_on_notices(simulation: Simulation) -> None:
    right = Keeper._beat_of

    def beat_of(self: Keeper, place: KeptPlace, latest: float = float("inf")) -> float:
        return float("inf") if place.stage is Stage.WAITING else right(self, place, latest)

    simulation.patch(Keeper, "_beat_of", beat_of)
    simulation.patch(
        Keeper, "look_at", lambda self, place, moment: self._plan(place, place.planned())
    )


def _forget_hints(simulation: Simulation) -> None:
    """Put a look off when the answer to an older question is read in the same turn."""
    right = Keeper.on_answer

    def on_answer(self: Keeper, place: KeptPlace, *answer: Any, **how: Any) -> None:
        if place.schedule is not None and place.schedule.beat == 0.0:
            place.schedule.beat = 1e-9  # due all the same, and not known as asked for
        right(self, place, *answer, **how)

    simulation.patch(Keeper, "on_answer", on_answer)


def _look_late(simulation: Simulation) -> None:
    right = Keeper._beat_of

    def beat_of(self: Keeper, place: KeptPlace, latest: float = float("inf")) -> float:
        if place.stage is Stage.WAITING:
            return now() + place.terms.waiter_ttl * 0.9
        return right(self, place, latest)

    # It shows when holders die, and nobody else comes who would look.
    simulation.style = replace(
        simulation.style,
        faults=("crash",),
        pause_between_faults=0.3,
        tasks=1,
        hold=0.4,
        ttls=(2.0,),
        waiter_ttl=2.0,
    )
    simulation.patch(Keeper, "_beat_of", beat_of)
    simulation.patch(
        Keeper, "look_at", lambda self, place, moment: self._plan(place, place.planned())
    )


def _tell_nobody(simulation: Simulation) -> None:
    right = core.Request.lose

    def lose(self: core.Request, *args: Any, **options: Any) -> None:
        armed, self.armed = self.armed, None
        right(self, *args, **options)
        self.armed = armed

    simulation.patch(core.Request, "lose", lose)


def _spare_who_notices(simulation: Simulation) -> None:
    right = core.Request.lose

    def lose(self: core.Request, *args: Any, **options: Any) -> None:
        right(self, *args, **{**options, "spare": asyncio.current_task()})

    simulation.patch(core.Request, "lose", lose)
    # It shows when a body extends its lease itself, and the server has forgotten it.
    simulation.style = replace(
        simulation.style,
        forgetful=True,
        faults=("flush_data",),
        pause_between_faults=0.1,
        hold=0.4,
        think=0.02,
    )
    simulation.checkers.forgetful = True


def _extend_too_late(simulation: Simulation) -> None:
    """Stop processes that wait, under a lock-delay: what they were granted is overdue when they extend it.

    In the stock worlds one seed of a hundred has an extension of a record that is overdue and still there.
    """
    simulation.style = replace(
        simulation.style,
        forgetful=False,
        faults=("pause",),
        pause_between_faults=0.2,
        tasks=2,
        names=1,
        ttls=(0.3,),
        waiter_ttl=0.3,
        delays=(0.5,),
        hold=0.02,
        think=0.02,
    )
    simulation.checkers.forgetful = False


def _mark_in_a_task(simulation: Simulation) -> None:
    on_timer = Deadlines._on_timer

    def in_a_task(self: Deadlines) -> None:
        async def collect() -> None:
            on_timer(self)

        if self._timer is not None:
            asyncio.ensure_future(collect())  # noqa: RUF006

    def cancel(self: BodyScope) -> None:
        if self._handle is None:
            self._handle = self._task.get_loop().call_soon(self._cancel)

    simulation.patch(Deadlines, "_on_timer", in_a_task)
    simulation.patch(BodyScope, "cancel", cancel)
    # It shows when a process was stopped for longer than its leases last.
    simulation.style = replace(
        simulation.style,
        forgetful=False,
        faults=("pause",),
        pause_between_faults=0.2,
        ttls=(0.3,),
        hold=0.4,
        think=0.02,
    )


def _guess_whose_block_ends(simulation: Simulation) -> None:
    """End the latest block of all when the task that leaves has entered none."""

    def guess(tasks: list[asyncio.Task[Any]]) -> int:
        current = _body.current_task()
        latest_first = range(len(tasks) - 1, -1, -1)
        own = (index for index in latest_first if tasks[index] is current)
        ended = (index for index in latest_first if tasks[index].done())
        return next(own, next(ended, len(tasks) - 1))

    simulation.patch(_body, "block_meant", guess)
    _mostly_odd(simulation)


def _forget_who_entered(simulation: Simulation) -> None:
    """Know a block by its task alone: of two generators that other tasks close, none leaves its own."""
    simulation.patch(_body, "OF_ITS_OWN", 0)


def _disarm_with_the_first_block(simulation: Simulation) -> None:
    """Disarm the body when the block that armed it is left, whichever blocks of its task stay."""
    right_arm, right_end = Body.arm, Body.end_block
    armed: set[Body] = set()
    ends_arming_block = False

    def arm(self: Body, task: asyncio.Task[Any] | None = None) -> asyncio.Task[Any]:
        request, _ = self.acquisitions[0]
        if not request.armed or asyncio.current_task() not in request.armed:
            armed.add(self)
        return right_arm(self, task)

    async def end_block(self: Body, *args: Any) -> None:
        nonlocal ends_arming_block
        ends_arming_block = self in armed
        armed.discard(self)
        await right_end(self, *args)

    def leave(self: Bodies, task: asyncio.Task[Any], left: list[core.Block], exc_type: Any) -> bool:
        blocks, ended = self.open[task], []
        for block in left:
            blocks.remove(block)
            request, _ = block
            if ends_arming_block and request.armed and task in request.armed:
                ended.append(request.armed.pop(task).leave(exc_type))
        if not blocks:
            del self.open[task]
        return any(ended)

    simulation.patch(Body, "arm", arm)
    simulation.patch(Body, "end_block", end_block)
    simulation.patch(Bodies, "leave", leave)
    _mostly_odd(simulation)


class _NeverCancels(BodyScope):
    def cancel(self) -> None:
        pass


def _arm_only_who_acquired(simulation: Simulation) -> None:
    """Cancel a body only if it runs in the task that acquired the lease."""
    right = Bodies.enter

    def enter(self: Bodies, task: asyncio.Task[Any], entered: list[core.Block]) -> None:
        right(self, task, entered)
        for block in entered:
            request, _ = block
            acquired_by = request.task() if request.task is not None else None
            if acquired_by is not task and request.armed:
                request.armed[task] = _NeverCancels(task)

    simulation.patch(Bodies, "enter", enter)
    _mostly_odd(simulation)


def _mostly_odd(simulation: Simulation) -> None:
    simulation.odd_turns = 0.5
    simulation.style = replace(
        simulation.style,
        forgetful=False,
        faults=("pause", "partition"),
        pause_between_faults=0.2,
        tasks=3,
        ttls=(0.3,),
        hold=0.2,
        think=0.02,
        cancels=0.0,
    )
    simulation.checkers.forgetful = False


def _forget_early_breaks(simulation: Simulation) -> None:
    """Drop a break whose grant is not known yet."""
    right = Keeper.on_broken

    def on_broken(self: Keeper, request_id: str, token: int) -> None:
        place = self.places.get(request_id)
        if place is not None and place.stage is Stage.HELD:
            right(self, request_id, token)

    simulation.patch(Keeper, "on_broken", on_broken)
    simulation.style = replace(
        simulation.style,
        forgetful=False,
        faults=("behind",),
        pause_between_faults=0.2,
        names=1,
        breaks=0.3,
        ttls=(2.0,),
        waiter_ttl=2.0,
    )
    simulation.checkers.forgetful = False


def _keep_requests(simulation: Simulation) -> None:
    simulation.patch(Register, "remove", lambda self, request: None)


def _compare_nothing(simulation: Simulation) -> None:
    def write(self: Simulation, lease: Lease, base: str) -> None:
        self.checkers.write(base, lease, accepted=True)

    simulation.patch(Simulation, "_write", write)


# -- what is broken in a quorum ------------------------------------------------------------------------


def _nodes_lua(*changes: tuple[str, str]) -> Prepare:
    def prepare(simulation: Simulation) -> None:
        assert isinstance(simulation, QuorumSimulation)
        applied = set()
        for script in VOTING:
            text = script.source.decode()
            for old, new in changes:
                if old in text:
                    text = text.replace(old, new)
                    applied.add(old)
            for node in simulation.nodes:
                node.patches[script.source] = text.encode()
        assert applied == {old for old, _ in changes}, "the scripts have changed: adapt the variant"

    return prepare


def _faults(*names: str, hold: float = 0.1) -> Prepare:
    """Make the seeds of a variant about what it is bad at."""

    def prepare(simulation: Simulation) -> None:
        assert isinstance(simulation, QuorumSimulation)
        simulation.deaths, simulation.wrong_clocks = {}, {}
        simulation.reads_every = 0.0
        simulation.style = replace(
            simulation.style,
            faults=names,
            pause_between_faults=0.3,
            names=1,
            processes=3,
            tasks=2,
            shared=0.0,
            named_owners=0.0,
            delays=(0.0,),
            breaks=0.02,
            hold=hold,
            think=0.02,
        )

    return prepare


def _nodes(
    *,
    dead: dict[int, float] | None = None,
    wrong: dict[int, float] | None = None,
    **style: Any,
) -> Prepare:
    """Say which nodes die when, and which clocks are wrong by how much; and more of the style."""

    def prepare(simulation: Simulation) -> None:
        assert isinstance(simulation, QuorumSimulation)
        simulation.deaths, simulation.wrong_clocks = dead or {}, wrong or {}
        simulation.style = replace(simulation.style, **style)

    return prepare


def _give_back_once(simulation: Simulation) -> None:
    def again(self: GivingBack, tally: Tally, ballot: Ballot) -> None:
        ballot.yielding = False

    assert isinstance(simulation, QuorumSimulation)
    for node in simulation.nodes:
        node.refuses_yields = True  # until the faults stop
    simulation.patch(Ballot, "disowned", property(lambda self: False))
    simulation.patch(GivingBack, "_repeat", again)


def _middle_clock(simulation: Simulation) -> None:
    """Order requests by the middle one of the clocks that a client has heard."""

    def middle(self: Tickets) -> int:
        moment = now()
        times = [voter.trust.time_at(moment) for voter in self._nodes.voters]
        heard = sorted(time for time in times if time is not None)
        return int(heard[len(heard) // 2] * 1e6)

    assert isinstance(simulation, QuorumSimulation)
    simulation.chaos_ends = 9.0
    simulation.patch(Tickets, "latest_clock", middle)
    simulation.patch(Tickets, "catch_up", lambda self, tally: False)


def _forget_breaks(simulation: Simulation) -> None:
    simulation.patch(Ballot, "lose", lambda self, token: None)


def _stick_to_large_tokens(simulation: Simulation) -> None:
    """Take an answer for older than what is known when its node has no token as large as that.

    (And forget nothing of a node that has become another server, which prevents it a second time.)
    """
    right = Ballot.take

    def take(self: Ballot, answer: Answer) -> None:
        if isinstance(answer, Queued) and self.token > answer.floor:
            self.deadline = max(self.deadline, answer.deadline)
            self.floor = max(self.floor, answer.floor)
        else:
            right(self, answer)

    simulation.patch(Ballot, "take", take)
    simulation.patch(Ballot, "restarted", lambda self: None)


def _each_misses_a_node(simulation: Simulation) -> None:
    """Cut each process off from another node, so that majorities have one node in common, and no more."""
    assert isinstance(simulation, QuorumSimulation)
    networks = simulation.networks

    def cut_off() -> None:
        for number, process in enumerate(simulation.mains):
            path = networks[number % len(networks)].path(process)
            path.out_blocked = path.in_blocked = True

    simulation.world.at(0.4, cut_off)


def _restart_quickly(simulation: Simulation) -> None:
    """Restart one node after another without its data, sooner than leases end."""
    assert isinstance(simulation, QuorumSimulation)
    nodes = list(zip(simulation.nodes, simulation.networks, strict=True))

    def restart(number: int) -> None:
        node, network = nodes[number % len(nodes)]
        network.stop_server()
        node.restart("empty")
        if simulation.world.time < simulation.chaos_ends:
            simulation.world.after(0.7, restart, number + 1)

    simulation.world.at(0.6, restart, 0)


def _clocks_apart(simulation: Simulation) -> None:
    assert isinstance(simulation, QuorumSimulation)
    simulation.nodes[0].offset += 2.0


def _count_who_answers(simulation: Simulation) -> None:
    def suffices(tally: Tally, votes: list[Ballot]) -> bool:
        answered = sum(ballot.stage is not None for ballot in tally.ballots)
        return len(votes) >= answered // 2 + 1

    def has_majority(self: Requests, tally: Tally) -> bool:
        return suffices(tally, self.votes(tally))

    def has_confirmed(self: Confirming, tally: Tally, token: int, known: int) -> bool:
        return suffices(tally, tally.confirmed(token, self._nodes.is_trusted))

    simulation.patch(Requests, "has_majority", has_majority)
    simulation.patch(Confirming, "_has_confirmed", has_confirmed)
    simulation.patch(
        Tally, "deadline", lambda self, ballots: min((b.deadline for b in ballots), default=0.0)
    )


def _trust_at_once(simulation: Simulation) -> None:
    simulation.patch(Trust, "given", property(lambda self: True))
    simulation.patch(Ballot, "restarted", lambda self: None)


def _hold_by_any_votes(simulation: Simulation) -> None:
    simulation.patch(
        Tally, "agreed", lambda self, votes: sorted(votes, key=lambda v: -v.token)[: self.majority]
    )


def _latest_of_all(simulation: Simulation) -> None:
    simulation.patch(
        Tally, "deadline", lambda self, ballots: max((b.deadline for b in ballots), default=0.0)
    )


def _ignore_yields(simulation: Simulation) -> None:
    simulation.patch(GivingBack, "consider", lambda self, tally, ballot: None)


def _give_back_always(simulation: Simulation) -> None:
    """Give a vote back also with a majority behind it, and count it as before."""

    def on_look(self: NodeNotices, request_id: str | None) -> None:
        tally, voter = self._requests.get(request_id), self._voter
        if tally is not None and not tally.leaving:
            voter.give_back(tally, tally.ballots[voter.node], lambda answer: None)
            tally.ballots[voter.node].given_back = 0

    simulation.patch(NodeNotices, "on_look", on_look)


# -- leases that linger -----------------------------------------------------------------------------------


def _keep_what_is_recalled(simulation: Simulation) -> None:
    """An idle client notes the recall, and releases when its time is over."""

    def recalled(self: core.Request) -> None:
        self.may_linger = False

    simulation.patch(core.Request, "recalled", recalled)


def _hear_recalls_of_idle_ones_only(simulation: Simulation) -> None:
    """What is in use while it is recalled is kept when its body has ended."""

    def recalled(self: core.Request) -> None:
        if self.state is core.State.KEPT:
            self.events.idle_over(self)

    simulation.patch(core.Request, "recalled", recalled)


def _share_with_anybody(simulation: Simulation) -> None:
    """A task's hold inside its own hold lingers, and is handed to another task."""
    simulation.patch(core.Request, "share_owner", lambda self: None)


def _keep_what_is_gone(simulation: Simulation) -> None:
    """A lease that is lost while nobody uses it is handed out all the same."""

    def gone(self: core.Request, reason: Any) -> None:
        if self.state is not core.State.KEPT:
            told(self, reason)

    told = core.Request.gone
    simulation.patch(core.Request, "gone", gone)


def _hand_out_in_any_mode(simulation: Simulation) -> None:
    """A writer gets the lease of a reader that is kept."""
    simulation.patch(_linger, "_same", lambda kept, asked: True)


# -- what is broken in the machine of memory:// ---------------------------------------------------------


def _machine(old: str, new: str) -> Prepare:
    def prepare(simulation: Simulation) -> None:
        simulation.patch(memory_store, "Name", mutated(old, new))

    return prepare


# -- all of them -------------------------------------------------------------------------------------

# -- what is broken in the way to the primary ---------------------------------------------------------


def _ask_only_for_new_connections(simulation: Simulation) -> None:
    async def watch(self: PrimaryLookup, *_: object) -> None:
        """Nobody asks while connected."""

    simulation.patch(PrimaryLookup, "watch", watch)


def _believe_any_sentinel(simulation: Simulation) -> None:
    def named_last(self: PrimaryLookup, sentinels: Any, **_: Any) -> list[Named]:
        return [one.heard[0] for one in sentinels if one.heard is not None]

    simulation.patch(PrimaryLookup, "_named_last", named_last)


def _believe_strangers(simulation: Simulation) -> None:
    def believed(self: Deployment, heard: Mapping[Address, Named], *, learns: bool) -> list[Named]:
        return list(heard.values())

    simulation.patch(Deployment, "believed", believed)


def _look_names_up_once(simulation: Simulation) -> None:
    async def leads_to(self: PrimaryLookup, address: Address, peer: object) -> bool:
        return True

    simulation.patch(PrimaryLookup, "_leads_to", leads_to)


def _keep_apart(simulation: Simulation) -> None:
    simulation.patch(Connections, "on_up", lambda self, newest: None)


def _believe_in_holds_elsewhere(simulation: Simulation) -> None:
    simulation.patch(Keeper, "_ask_about_held", lambda self, place, spread=0.0: None)


VARIANTS = {
    "grant in two steps": Variant(
        _both(
            _backend(_TwoSteps),
            _lua(
                (_FREE, _FREE.replace("if", "if ARGV[11] == 'take' or", 1)),
                (
                    "redis.call('PEXPIRE', state, int(ttl + delay + 2))",
                    "redis.call('PEXPIRE', state, int(math.max(9002, redis.call('PTTL', state))))",
                ),
            ),
        ),
        ("exclusion",),
        seed=60,
    ),
    "no marker after an ambiguous failure": Variant(
        _lua(("if ARGV[5] ~= '0' then", "if false then")), ("ghost",), seed=2
    ),
    "deadline from after the reply": Variant(_from_the_reply, ("honesty", "deadline")),
    "deadline from the first of two sends": Variant(_backend(_FromTheFirst), ("deadline",), seed=2),
    "extension that shortens": Variant(
        _lua(
            (
                "record.deadline = math.max(record.deadline, now + length)",
                "record.deadline = now + length",
            ),
        ),
        ("extension",),
        seed=3,
    ),
    "late notice believed": Variant(_believe_late_notices, ("honesty", "deadline"), seed=26),
    "readers barging": Variant(
        _lua(
            (
                "if not head and compatible(mode, holders) then",
                "if (not head or mode == 's') and compatible(mode, holders) then",
            ),
        ),
        ("fairness",),
    ),
    "ghosts not skipped": Variant(
        _lua(
            (
                "if own and now < waiter.deadline then\n      waiter.id",
                "if own then\n      waiter.id",
            ),
            (
                "local token, exclusive = hold_of(head.owner, holders)",
                "if now >= head.deadline then return head, changed end\n"
                "    local token, exclusive = hold_of(head.owner, holders)",
            ),
        ),
        ("handoff", "idle", "liveness"),
        seed=2,
    ),
    "token from a plain counter": Variant(
        _lua(
            ("local token, keep = stamp, retention", "local token, keep = '1', retention"),
            ("if last and tonumber(last) >= now_us then", "if last then"),
            ("keep = retention + math.ceil(token / 1000) - now", "keep = retention"),
        ),
        ("token", "store"),
        seed=3,
    ),
    "overdue holder revived": Variant(
        _both(
            _lua(("if record.live then\n    push(record)", "if true then\n    push(record)")),
            _extend_too_late,
        ),
        ("extension",),
    ),
    "lock-delay forgotten": Variant(
        _lua(("if now < record.closed_until then", "if now < record.deadline then")),
        ("extension",),
        seed=1,
    ),
    "leaving without a hand-off": Variant(
        _lua(
            (
                "local head, changed = grant_waiting(keys, options, others, granted)",
                "local head, changed = find_head(queue, waiters), false",
            )
        ),
        ("handoff",),
    ),
    "state key too short": Variant(
        _lua(
            (
                "redis.call('PEXPIRE', state, int(ttl + delay + 2))",
                "redis.call('PEXPIRE', state, int(ttl))",
            )
        ),
        ("keys",),
    ),
    "waiters that rely on notices": Variant(_rely_on_notices, ("liveness",)),
    "a hint is forgotten for an older answer": Variant(_forget_hints, ("hint",), seed=88),
    "heads that look late": Variant(_look_late, ("idle",), seed=26),
    "nobody is told of the end": Variant(_tell_nobody, ("told",), seed=6),
    "who notices the loss is spared": Variant(_spare_who_notices, ("told",), seed=27),
    "the loss is marked some turns later": Variant(_mark_in_a_task, ("told",), seed=35),
    "any block ends when it is not clear which": Variant(
        _guess_whose_block_ends, ("told",), seed=4
    ),
    "a block is known by its task alone": Variant(
        _forget_who_entered, ("failure",), seed=88, kind=Habits
    ),
    "the first block that is left disarms the body": Variant(
        _disarm_with_the_first_block, ("told",), seed=3
    ),
    "only the task that acquired is cancelled": Variant(_arm_only_who_acquired, ("told",), seed=6),
    "a break that overtakes its grant is dropped": Variant(_forget_early_breaks, ("broken",)),
    "a store that compares nothing": Variant(_compare_nothing, ("store",)),
    "requests are kept": Variant(_keep_requests, ("leak",)),
    "quorum: token not written back": Variant(
        _both(
            _nodes_lua(("      remember(fence)\n", ""), ("    remember(fence)\n", "")),
            _faults(hold=0.02),
            _clocks_apart,
            _each_misses_a_node,
            _nodes(think=0.3),
        ),
        ("token", "store"),
        kind=QuorumSimulation,
        seed=2,
    ),
    "quorum: majority of those that answer": Variant(
        _both(_count_who_answers, _faults("partition", "one_way", hold=0.4)),
        ("exclusion", "deadline"),
        kind=QuorumSimulation,
        seed=31,
    ),
    "quorum: believed at once after a restart": Variant(
        _both(
            _trust_at_once,
            _faults(hold=0.4),
            _each_misses_a_node,
            _restart_quickly,
        ),
        ("exclusion",),
        kind=QuorumSimulation,
        seed=40,
    ),
    "quorum: held by votes with several tokens": Variant(
        _both(_hold_by_any_votes, _faults("node_cut", "node_slow", "partition"), _clocks_apart),
        ("token", "store", "deadline"),
        kind=QuorumSimulation,
    ),
    "quorum: yielded vote still counted": Variant(
        _both(
            _nodes_lua(
                (
                    "local meant = vote and vote.live and is_open(vote) and vote.token == ARGV[4]",
                    "local meant = vote and vote.live",
                ),
                (
                    "oldest ~= nil and is_open(vote) and vote.live",
                    "oldest ~= nil and vote.live",
                ),
            ),
            _give_back_always,
            _faults("slow", "node_slow", "partition"),
        ),
        ("exclusion",),
        kind=QuorumSimulation,
        seed=33,
    ),
    "quorum: the latest deadline of all": Variant(
        _both(_latest_of_all, _faults("slow", "node_slow")), ("deadline",), kind=QuorumSimulation
    ),
    "quorum: a vote is given back once": Variant(
        _both(
            _give_back_once,
            _faults("slow", hold=0.02),
            _nodes(dead={2: 0.0}, cancels=0.5, breaks=0.0),
        ),
        ("liveness",),
        kind=QuorumSimulation,
        seed=92,
    ),
    "quorum: votes by owner stay": Variant(
        _both(
            _nodes_lua(
                ("  open_again(keys, options, votes)\n", ""),
                ("vote.live and vote.stage == 'c'", "vote.live and not is_open(vote)"),
            ),
            _faults("partition", "slow", "cut", hold=0.02),
            _nodes(dead={2: 0.0}, named_owners=0.7),
        ),
        ("liveness",),
        kind=QuorumSimulation,
        seed=5,
    ),
    "quorum: tickets by the middle clock": Variant(
        _both(
            _faults("restart_client", hold=0.005),
            _middle_clock,
            _nodes(
                dead={2: 1.0},
                wrong={1: 3600.0},
                ttls=(0.3,),
                breaks=0.0,
                cancels=0.0,
                pause_between_faults=1.5,
                think=0.001,
                tasks=3,
            ),
        ),
        ("passed",),
        kind=QuorumSimulation,
        seed=4,
    ),
    "quorum: breaks forgotten while waiting": Variant(
        _both(_forget_breaks, _faults("slow", "partition"), _nodes(breaks=0.3)),
        ("exclusion", "kept"),
        kind=QuorumSimulation,
        seed=6,
    ),
    "quorum: answers with small tokens taken for old ones": Variant(
        _stick_to_large_tokens, ("exclusion", "kept"), kind=Forgotten
    ),
    "quorum: yields ignored": Variant(_ignore_yields, ("split",), kind=Rush),
    "quorum: first come, first served": Variant(
        _nodes_lua(
            (
                "local score = waiter.ticket",
                "local score = now",
            )
        ),
        ("fairness", "split"),
        kind=Rush,
    ),
    "failover: sentinels asked for new connections only": Variant(
        _ask_only_for_new_connections, ("exclusion",), kind=FailoverSimulation, seed=130
    ),
    "failover: any sentinel is believed": Variant(
        _believe_any_sentinel,
        ("exclusion", "apart", "liveness"),
        kind=FailoverSimulation,
        seed=40,
    ),
    "failover: sentinels of others are believed": Variant(
        _believe_strangers, ("stranger",), kind=FailoverSimulation
    ),
    "failover: a host name is looked up once": Variant(
        _look_names_up_once, ("exclusion", "apart", "leak"), kind=FailoverSimulation, seed=44
    ),
    "failover: connections not compared": Variant(
        _keep_apart, ("apart",), kind=FailoverSimulation, seed=375
    ),
    "failover: holders not asked about at once": Variant(
        _believe_in_holds_elsewhere, ("exclusion",), kind=FailoverSimulation, seed=30
    ),
    "linger: an idle one is kept after its recall": Variant(
        _keep_what_is_recalled, ("linger",), kind=Lingers
    ),
    "linger: one in use is kept after its recall": Variant(
        _hear_recalls_of_idle_ones_only, ("linger",), kind=LingersOnTheMachine
    ),
    "linger: a reader inside its own writer is handed on": Variant(
        _share_with_anybody, ("linger",), kind=LingersOnTheMachine, seed=22
    ),
    "linger: what was lost while idle is handed out": Variant(
        _keep_what_is_gone, ("honesty", "broken"), kind=LingersOnTheMachine
    ),
    "linger: a reader's lease is handed to a writer": Variant(
        _hand_out_in_any_mode, ("exclusion", "linger"), kind=LingersOnTheMachine
    ),
    "linger: nobody is told who queues": Variant(
        _lua(("if lingers(record.words) then", "if false then")),
        ("linger",),
        kind=Lingers,
    ),
    "linger: who is granted before others is not recalled": Variant(
        _lua(
            ("if head and lingers(record.words) then", "if false then"),
            ("if second and lingers(words) then", "if false then"),
        ),
        ("linger",),
        kind=Lingers,
    ),
    "memory: nobody is told who queues": Variant(
        _machine("if asked.lingers and not entry.recalled:", "if False:"),
        ("linger",),
        kind=LingersOnTheMachine,
    ),
    "memory: no marker after an ambiguous failure": Variant(
        _machine(
            "if marker:\n            self._remember(self.markers, id, now + marker)\n        if not",
            "if not",
        ),
        ("ghost",),
        kind=MachineSimulation,
        seed=2,
    ),
    "memory: a hint is forgotten for an older answer": Variant(
        _forget_hints, ("hint",), kind=MachineSimulation, seed=20
    ),
    "memory: a break that overtakes its grant is dropped": Variant(
        _forget_early_breaks, ("broken",), kind=MachineSimulation
    ),
    "memory: extension that shortens": Variant(
        _machine(
            "self.deadline = max(self.deadline, now + length)", "self.deadline = now + length"
        ),
        ("extension",),
        kind=MachineSimulation,
        seed=6,
    ),
    "memory: readers barging": Variant(
        _machine(
            "if not self.waiters and self._fits(asked):",
            "if (not self.waiters or asked.mode == 'shared') and self._fits(asked):",
        ),
        ("fairness",),
        kind=MachineSimulation,
    ),
    "memory: ghosts not skipped": Variant(
        _machine(
            "                del self.waiters[head.asked.id]\n            elif",
            "                return changed\n            if",
        ),
        ("handoff", "idle", "liveness"),
        kind=MachineSimulation,
        seed=1,
    ),
    "memory: token from a plain counter": Variant(
        _machine("self.token = max(last + 1, self.now_us)", "self.token = last + 1"),
        ("token", "store"),
        kind=MachineSimulation,
        seed=14,
    ),
    "memory: overdue holder revived": Variant(
        _machine(
            "if holder is not None and now < holder.deadline:\n            holder.promise",
            "if holder is not None:\n            holder.promise",
        ),
        ("extension",),
        kind=MachineSimulation,
        seed=16,
    ),
    "memory: lock-delay forgotten": Variant(
        _machine("if now < e.closed_until}", "if now < e.deadline}"),
        ("extension", "exclusion"),
        kind=MachineSimulation,
        seed=2,
    ),
    "memory: leaving without a hand-off": Variant(
        _machine(
            "        nearer = id in self.holders and self._closed_until(id) < closed_until\n"
            "        changed = self._sweep_and_grant()",
            "        nearer = id in self.holders and self._closed_until(id) < closed_until\n"
            "        changed = False",
        ),
        ("handoff",),
        kind=MachineSimulation,
    ),
}
