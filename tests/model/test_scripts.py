"""The scripts against the reference: any sequence of calls, the same answers, the same grants.

The clock is virtual: in the test's copy of the scripts, the time is their last argument. So nothing is
waited for, and a run means the same on fakeredis and on a server. Leases are minutes long, that no key
expires by the real clock meanwhile.
"""

from __future__ import annotations

from collections.abc import Coroutine
from itertools import count
from typing import Any, TypeVar

import fakeredis
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from aiodlock.backends.redis.keys import keys_of
from aiodlock.backends.redis.scripts import Script

from ..protocol.direct import PREFIX, Direct
from ..servers import Store
from .reference import Answer, Entry, Reference

MINUTE = 60_000
TTLS = st.sampled_from([2 * MINUTE, 5 * MINUTE])
DELAYS = st.sampled_from([0, 0, 0, MINUTE])
STEPS = st.sampled_from([1, MINUTE - 1, MINUTE, 2 * MINUTE, 3 * MINUTE])
PLACES = st.integers(0, 1_000)

_TIME = "local clock = redis.call('TIME')"
_VIRTUAL = "local clock = {math.floor(ARGV[#ARGV] / 1000), ARGV[#ARGV] % 1000 * 1000}"
_names = count()

_T = TypeVar("_T")


class VirtualDirect(Direct):
    """The scripts on a name of its own, at a time that the test says, by a blocking connection."""

    def __init__(self, connection: redis.Redis, kind: str) -> None:
        self.connection = connection
        self.keys = keys_of(PREFIX, kind, f"name {next(_names)}")
        self.time = 0

    async def _run(self, script: Script, keys: list[str], arguments: list[str | int]) -> Any:
        source = script.source.decode()
        assert source.count(_TIME) == 1
        source = source.replace(_TIME, _VIRTUAL)
        return self.connection.eval(source, len(keys), *keys, *map(str, arguments), str(self.time))


def run(call: Coroutine[Any, Any, _T]) -> _T:
    """Run what never really waits."""
    try:
        call.send(None)
    except StopIteration as done:
        result: _T = done.value
        return result
    raise AssertionError("it waited")


def read(reply: list[Any]) -> Answer:
    """Return a reply as the reference puts it: numbers, and of the reasons only whether it was broken.

    (``expired``, ``gone`` and ``taken_over`` tell how far the sweep has come, which is no promise.)
    """
    word, *rest = reply
    if word == "gone" and rest:
        return (word, "broken" if rest == ["broken"] else "not broken")
    return (word, *map(int, rest))


class Locks(RuleBasedStateMachine):
    """Requests, re-entries, extensions, withdrawals, releases, expiries and breaks, in both modes."""

    modes: tuple[str, ...] = ("x", "s")
    kind = "lock"
    steps = 0

    def __init__(self, connection: redis.Redis) -> None:
        super().__init__()
        self.scripts = VirtualDirect(connection, self.kind)
        self.reference = Reference(now=1_700_000_000_000)
        self.ids = (f"r{number}" for number in count())
        self.known: list[Entry] = []

    def teardown(self) -> None:
        self.scripts.connection.delete(*self.scripts.keys[:5])

    # -- steps -------------------------------------------------------------------------------------

    @rule(
        mode=st.integers(0, 1),
        owner=st.sampled_from(["", "", "", "uA", "uB", "again"]),
        place=PLACES,
        ttl=TTLS,
        delay=DELAYS,
        wait=st.sampled_from([True, True, True, False]),
    )
    def request(self, mode: int, owner: str, place: int, ttl: int, delay: int, wait: bool) -> None:
        id = next(self.ids)
        holders = self.reference.holders()
        if self.kind == "semaphore" or not owner or (owner == "again" and not holders):
            owner = f"t{id}"
        elif owner == "again":  # a task's, which asks for the other mode too, or anybody's
            owner = holders[place % len(holders)].owner
        entry = Entry(id, self.modes[mode % len(self.modes)], owner, delay, 0)
        self.known.append(entry)
        self._acquire(entry, ttl, wait)

    @precondition(lambda self: self.known)
    @rule(place=PLACES, ttl=TTLS)
    def repeat_a_request(self, place: int, ttl: int) -> None:
        """As a client does that has had no reply; also late, after the leave that refuses it."""
        entry = self._any(place)
        if self.reference.find(entry.id) or entry.id in self.reference.refused:
            self._acquire(entry, ttl, True)

    @precondition(lambda self: self.known)
    @rule(place=PLACES, length=TTLS)
    def extend(self, place: int, length: int) -> None:
        entry = self._any(place)
        reply = run(self.scripts.extend(entry.id, length, owner=entry.owner))
        assert read(reply) == self.reference.extend(entry.id, length)

    @precondition(lambda self: self.known)
    @rule(place=PLACES, ambiguous=st.booleans())
    def leave(self, place: int, ambiguous: bool) -> None:
        entry = self._any(place)
        overdue = self.reference.find(entry.id) is None
        answer = read(run(self.scripts.leave(entry.id, ambiguous=ambiguous)))
        expected = self.reference.leave(entry.id, ambiguous=ambiguous)
        # A waiter that is overdue may not have been met by a sweep yet; nobody cares.
        assert answer == expected or (overdue and answer == ("withdrawn",))

    @rule()
    def break_lock(self) -> None:
        assert run(self.scripts.break_lock()) == self.reference.break_lock()

    @rule(by=STEPS)
    def time_passes(self, by: int) -> None:
        self.reference.now += by

    @rule(by=STEPS)
    def time_passes_and_some_are_heard_of(self, by: int) -> None:
        """Every second request is extended in time, the others are ghosts."""
        for entry in self.reference.holders()[::2] + self.reference.waiters()[::2]:
            reply = run(self.scripts.extend(entry.id, 5 * MINUTE, owner=entry.owner))
            assert read(reply) == self.reference.extend(entry.id, 5 * MINUTE)
        self.time_passes(by)

    # -- what must be the same ---------------------------------------------------------------------

    @invariant()
    def same_holders_and_waiters(self) -> None:
        type(self).steps += 1
        reference = self.reference
        self.scripts.time = reference.now
        connection, keys = self.scripts.connection, self.scripts.keys
        pipe = connection.pipeline(transaction=False)
        pipe.hgetall(keys.state)
        pipe.hgetall(keys.waiters)
        pipe.xrange(keys.queue)
        pipe.get(keys.token)
        state, waiters, queue, token = pipe.execute()
        holding = set()
        for id, text in state.items():
            mode, own_token, deadline, _, _, owner, _ = text.split(" ")
            if reference.now < int(deadline):
                holding.add((id, mode, int(own_token), int(deadline), owner))
        assert holding == {
            (e.id, e.mode, e.token, e.deadline, e.owner) for e in reference.holders()
        }
        waiting = []
        for stream_id, fields in queue:
            own_entry, deadline, _ = waiters.get(fields["id"], "- 0 0").split(" ")
            if own_entry == stream_id and reference.now < int(deadline):
                waiting.append((fields["id"], int(deadline)))
        assert waiting == [(e.id, e.deadline) for e in reference.waiters()]
        # Every grant of a new owner has a token of its own, so equal tokens are the same order.
        assert int(token or 0) == reference.token

    @invariant()
    def exclusion(self) -> None:
        holders = self.reference.holders()
        if any(entry.mode == "x" for entry in holders):
            assert len({entry.owner for entry in holders}) == 1
        for entry in holders:
            assert len(holders) <= int(entry.mode[1:] or 1_000_000)

    # -- parts -------------------------------------------------------------------------------------

    def _acquire(self, entry: Entry, ttl: int, wait: bool) -> None:
        self.scripts.time = self.reference.now
        reply = run(
            self.scripts.acquire(
                entry.id,
                entry.mode,
                owner=entry.owner,
                ttl=ttl,
                waiter_ttl=2 * MINUTE,
                delay=entry.delay,
                wait=wait,
                retention=100 * MINUTE,
            )
        )
        assert read(reply) == self.reference.acquire(
            entry.id, entry.mode, entry.owner, ttl, 2 * MINUTE, entry.delay, wait
        )

    def _any(self, place: int) -> Entry:
        """Return one of the requests there are, sometimes one of those there were."""
        present = [e for e in self.known if self.reference.find(e.id)]
        return (self.known[-8:] + 3 * present)[place % (len(self.known[-8:]) + 3 * len(present))]


class Semaphores(Locks):
    """The same with a limit of two."""

    modes = ("s2",)
    kind = "semaphore"


@pytest.mark.parametrize("machine", [Locks, Semaphores])
@pytest.mark.stores("memory", "valkey9", "redis62")
def test_scripts_answer_and_grant_as_the_reference(store: Store, machine: type[Locks]) -> None:
    connection = (
        fakeredis.FakeRedis(decode_responses=True)
        if store.is_memory
        else redis.Redis.from_url(store.url, decode_responses=True)
    )
    machine.steps = 0
    examples = 120 if machine is Locks else 40
    with connection:
        run_state_machine_as_test(
            lambda: machine(connection),  # type: ignore[arg-type]
            settings=settings(
                max_examples=examples,
                stateful_step_count=50,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    assert machine.steps > examples * 10
