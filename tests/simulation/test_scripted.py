"""Courses of events on one server, each once found by a seed and cut to the shortest that shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from aiodlock import AcquireTimeout, BackendUnavailable, LockLost

from ..scenes import store_of
from .checkers import Checkers, Name, Record, read_name
from .memory import MachineSimulation
from .onces import RecordCheckers
from .scenario import SimClient, Simulation
from .server import Command, SimServer
from .world import Process, World, Wrong

Main = Callable[[SimClient], Coroutine[None, None, None]]


class Scripted(Simulation):
    """Processes that do what a test says, under faults that come when it says."""

    def __init__(self, *mains: Main, until: float) -> None:
        super().__init__(0)
        self._mains = mains
        self._until = until
        self.style.faults = ()
        self.ended: list[BaseException | None] = []

    def at(self, when: float, call: Callable[[], None]) -> None:
        self.world.at(when, call)

    def process(self, number: int) -> Process:
        return self.world.processes[number]

    def run(self) -> None:
        with self._everything_virtual():
            self._log_errors_are_failures()
            try:
                started = []
                for number, main in enumerate(self._mains):
                    process = Process(self.world, f"p{number}")
                    started.append(process.start(self._enter(process, main)))
                self.world.run_until(self._until)
                assert all(task.done() for task in started)
                self.ended = [task.exception() for task in started]
            finally:
                for process in self.world.processes:
                    process.bury()

    async def _enter(self, process: Process, main: Main) -> None:
        async with SimClient(self, process, ttl=0.5, waiter_ttl=0.5) as client:
            session = client._core.session
            assert session is not None
            self.checkers.sessions[process] = [session]
            await main(client)
        del self.checkers.sessions[process]


def test_client_outlives_a_busy_server_that_refuses_its_subscription() -> None:
    async def main(client: SimClient) -> None:
        async with client.lock("name", ttl=5.0) as lease:
            await asyncio.sleep(4.0)
            lease.ensure_held()

    simulation = Scripted(main, until=10.0)

    def cut_everything() -> None:
        simulation.server.refuses = "BUSY Redis is busy running a script."
        for conn in list(simulation.network.connections):
            conn.cut()

    simulation.at(1.0, cut_everything)
    simulation.at(2.0, lambda: setattr(simulation.server, "refuses", None))
    simulation.run()
    assert simulation.ended == [None]


def test_multilock_ends_in_peace_when_a_loss_and_its_timeout_come_at_once() -> None:
    async def main(client: SimClient) -> None:
        with pytest.raises((AcquireTimeout, BackendUnavailable, LockLost)):
            await client.multilock("a", "b", timeout=1.0).acquire()

    simulation = Scripted(main, until=10.0)

    def lose_the_answer(command: Command, reply: object) -> None:
        if command.script == "acquire" and b"{b}" in command.keys[0]:
            simulation.network.path(simulation.process(0)).in_blocked = True
            simulation.at(0.4, lambda: simulation.process(0).stop(sleeping=False))

    def go_on() -> None:
        simulation.process(0).resume()
        simulation.at(3.0, simulation.calm_down)

    simulation.server.executed.append(lose_the_answer)
    simulation.at(2.0, go_on)
    simulation.run()
    assert simulation.ended == [None]


def test_reply_that_nobody_waits_for_any_more_is_no_news_for_the_log() -> None:
    async def main(client: SimClient) -> None:
        session = client._core.session
        assert session is not None
        link = store_of(client).server.link
        wire = link.wire
        wire.send("PING", within=0.05)
        link._source._network.connections[0].mute = True
        await asyncio.sleep(0.2)
        wire.close()
        wire.send("PING")

    simulation = Scripted(main, until=10.0)
    simulation.run()
    assert simulation.ended == [None]


def test_body_is_told_within_a_second_of_its_machine_waking_up() -> None:
    told = []

    async def body(client: SimClient) -> None:
        async with client.lock("name", ttl=12.0):
            try:
                await asyncio.sleep(60.0)
            finally:
                told.append(simulation.world.time)

    async def main(client: SimClient) -> None:
        with pytest.raises(LockLost):
            await body(client)

    simulation = Scripted(main, until=50.0)
    simulation.at(1.0, lambda: simulation.process(0).stop(sleeping=True))
    simulation.at(31.0, lambda: simulation.process(0).resume())
    simulation.run()
    assert simulation.ended == [None]
    assert 31.0 <= told[0] <= 32.1


def test_lease_taken_after_its_machine_woke_up_is_extended_in_time() -> None:
    async def main(client: SimClient) -> None:
        bare = await client.lock("before", ttl=3.0).acquire()
        await asyncio.sleep(0.5)
        # The machine sleeps here: the extender's timer for the first lease is late from now on.
        async with client.lock("after", ttl=0.3) as lease:
            await asyncio.sleep(2.0)
            lease.ensure_held()
        with pytest.raises(LockLost):
            await bare.release()

    simulation = Scripted(main, until=50.0)
    simulation.at(0.2, lambda: simulation.process(0).stop(sleeping=True))
    simulation.at(20.2, lambda: simulation.process(0).resume())
    simulation.run()
    assert simulation.ended == [None]


def test_connecting_to_a_loading_server_floods_no_log() -> None:
    async def main(client: SimClient) -> None:
        await (await client.lock("name").acquire()).release()

    simulation = Scripted(main, until=10.0)
    simulation.server.refuses = "LOADING Redis is loading the dataset in memory"
    simulation.at(1.0, lambda: setattr(simulation.server, "refuses", None))
    simulation.run()
    assert simulation.ended == [None]


def test_call_that_does_not_wait_says_about_which_name_nothing_answered() -> None:
    async def main(client: SimClient) -> None:
        simulation.server.refuses = "BUSY Redis is busy running a script."
        with pytest.raises(BackendUnavailable, match=r"'name'.*BUSY") as away:
            await client.break_lock("name")
        assert away.value.name == "name"
        simulation.server.refuses = None

    simulation = Scripted(main, until=10.0)
    simulation.run()
    assert simulation.ended == [None]


class OnMachine(Scripted, MachineSimulation):
    """The same with the machine of ``memory://`` as the server."""


def test_connection_that_swallows_all_that_is_sent_is_given_up_by_the_machine_s_client_too() -> (
    None
):
    async def main(client: SimClient) -> None:
        await asyncio.sleep(2.0)
        async with client.lock("name"):
            pass

    def swallow() -> None:
        for conn in simulation.network.connections:
            conn.mute = conn.stuck = True

    simulation = OnMachine(main, until=20.0)
    simulation.at(1.5, swallow)
    simulation.run()
    assert simulation.ended == [None]


def test_second_grant_of_one_id_lends_its_owner_no_number_of_the_first() -> None:
    """What the checkers remember: the id's place ran out, and it was queued and granted anew."""
    world = World(0)
    checkers = Checkers(world, SimServer(world), forgetful=False)
    ledger = checkers.ledger("n")

    def grant(*records: Record) -> None:
        after = Name({record.id: record for record in records}, {})
        checkers._check_grants(ledger, Name({}, {}), after, list(records), 0)

    def record(id: str, token: int, owner: str) -> Record:
        return Record(id, "x", token, 1000, 1000, 0, owner, "client")

    grant(record("a", 1, "ann"))
    grant(record("b", 2, "bob"))
    grant(record("c", 3, "ann"), record("a", 3, "ann"))
    assert ledger.grants == {"a": 3, "b": 2, "c": 3}


def test_reentry_whose_own_record_was_overdue_is_granted_anew_with_its_owners_token() -> None:
    """Its answers were lost until its record was overdue; its owner's other record was extended."""
    world = World(0)
    checkers = Checkers(world, SimServer(world), forgetful=False)
    first = Record("a", "x", 1, 3000, 2000, 0, "ann", "client")
    again = Record("b", "s", 1, 2000, 2000, 0, "ann", "client")
    before = Name({"a": first, "b": again}, {})
    after = Name({"a": first, "b": again._replace(deadline=4100)}, {})
    command: Any = SimpleNamespace(id="b", script="acquire", lost=False, unused=False)
    checkers._check_what_stays(command, before, after, 2100, refused=False)
    extension: Any = SimpleNamespace(id="b", script="extend", lost=False, unused=False)
    with pytest.raises(Wrong, match="revived"):
        checkers._check_what_stays(extension, before, after, 2100, refused=False)


def test_hold_of_a_reentry_that_is_granted_anew_counts_anew() -> None:
    """It has the token of before: its owner held meanwhile."""
    world = World(0)
    records = RecordCheckers(Checkers(world, SimServer(world), forgetful=False))
    base = "aiodlock:2:lock:{n}"

    def see(record: Record, command: str, now: int) -> None:
        records._checkers.ledger(base).known = Name({"b": record}, {})
        seen = SimpleNamespace(id="b", script=command, begins=True, lost=False, record=None)
        records._check_closed(base, seen, None, now)

    granted = Record("b", "x", 1, 2000, 1000, 0, "ann", "client", 300, 1300)
    see(granted, "acquire", 1000)
    see(granted._replace(deadline=3100, hold_until=2400), "acquire", 2100)
    with pytest.raises(Wrong, match="counts its hold until another time"):
        see(granted._replace(deadline=3900, hold_until=3200), "extend", 2900)


def test_success_of_a_holder_that_forgetting_has_clamped_comes_too_late() -> None:
    """The clock was set back, and forgetting the name's success met that, as each command does."""
    world = World(0)
    records = RecordCheckers(Checkers(world, SimServer(world), forgetful=False))
    base = "aiodlock:2:once:{n}"
    held = Record("b", "x", 1, 5000, 200, 0, "ann", "client", 0, 0)
    clamped = Name({"b": held._replace(deadline=2200)}, {})
    server = SimpleNamespace(
        read_name=lambda _: clamped, meets_all=True, read_record=lambda _: None
    )
    records._server = server
    records._ledger(base).known = Name({"b": held}, {})

    def see(now: int, forgets: str, script: str, reply: list[bytes]) -> None:
        server.now_ms = lambda: now
        about = dict(base=base, id="b", lost=False, begins=True, record=("result", 1000))
        records._executed(SimpleNamespace(script=script, forgets=forgets, **about), reply)
        records._checkers.ledger(base).known = clamped

    see(2000, base, "forget", [b"forgot"])
    see(2300, "", "leave", [b"gone", b"expired"])
    with pytest.raises(Wrong, match="is not put on record"):
        see(2100, "", "leave", [b"gone", b"expired"])


def test_hold_of_another_holder_may_be_clamped_later_when_the_clock_was_set_back() -> None:
    """A holder's extension meets its own record alone; the other's is cut as soon as it is met."""

    async def main(client: SimClient) -> None:
        semaphore = client.semaphore("name", 2, ttl=2.0, hold_at_least=0.3)
        async with semaphore as first, client.semaphore("name", 2, ttl=2.0) as second:
            simulation.checkers.clock_steps(-3.0)
            await second.extend(1.0)
            kept = read_name(simulation.server, "aiodlock:2:semaphore:{name}").holders
            assert [r.hold_until - simulation.server.now_ms() > 3000 for r in kept.values()] == [
                True,
                False,
            ]
            await first.extend(1.0)

    simulation = Scripted(main, until=10.0)
    simulation.run()
    assert simulation.ended == [None]
