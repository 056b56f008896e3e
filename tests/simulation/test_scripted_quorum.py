"""Courses of events on a quorum, each once found by a seed and cut to the shortest that shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

from aiodlock import AcquireTimeout, BackendUnavailable, LockLost
from aiodlock.backends.redis.quorum.requests import Requests

from .quorum import QuorumSimulation
from .scenario import SimClient, Simulation
from .server import Command
from .world import Process

Main = Callable[[SimClient], Coroutine[None, None, None]]


def _all_nodes_well(simulation: Simulation) -> None:
    assert isinstance(simulation, QuorumSimulation)
    simulation.deaths.clear()
    simulation.wrong_clocks.clear()


class Scripted(QuorumSimulation):
    """Three nodes, and processes that do what a test says, under faults that come when it says."""

    def __init__(self, *mains: Main, until: float, nodes: int = 3, dead: int | None = None) -> None:
        super().__init__(0, _all_nodes_well, nodes=nodes)
        self._mains = mains
        self._until = until
        self.style.faults = ()
        self.restart_delay = 1.5
        #: The numbers of processes that come after a second.
        self.enter_late: list[int] = []
        if dead is not None:
            self.networks[dead].stop_server()

    def run(self) -> None:
        with self._everything_virtual():
            self._log_errors_are_failures()
            try:
                processes = [Process(self.world, f"p{i}") for i in range(len(self._mains))]
                started = [
                    process.start(self._enter(process, main))
                    for process, main in zip(processes, self._mains, strict=True)
                ]
                self.world.run_until(self._until)
                for process, task in zip(processes, started, strict=True):
                    if not process.dead:
                        assert task.done(), process
                        task.result()
            finally:
                for process in self.world.processes:
                    process.bury()

    async def _enter(self, process: Process, main: Main) -> None:
        if self.world.processes.index(process) in self.enter_late:
            await self.moment(1.0)
        async with SimClient(self, process, ttl=1.5, waiter_ttl=1.0) as client:
            session = client._core.session
            assert session is not None
            self.checkers.sessions[process] = [session]
            await main(client)
        del self.checkers.sessions[process]

    async def moment(self, when: float) -> None:
        """Let a process sleep until a moment of true time."""
        process = self.world.current
        assert process is not None
        come: asyncio.Future[None] = process.loop.create_future()

        def arrive() -> None:
            if not come.done():
                come.set_result(None)

        self.world.at(when, process.deliver, arrive)
        await come

    def delay(self, process: int, *usual: float) -> None:
        """Say how long messages of a process take, to each node."""
        for network, seconds in zip(self.networks, usual, strict=True):
            network.path(self.world.processes[process]).usual = seconds

    def tallies(self, process: int) -> list[Any]:
        """Return what the client of a process knows of its requests."""
        [session] = self.checkers.sessions[self.world.processes[process]]
        backend: Any = session.backend
        return list(backend.store._requests._tallies.values())

    def hold_back(self, node: int, process: int, held_back: bool) -> None:
        """Let what a process says to a node wait on its way; it hears the node."""
        self.networks[node].path(self.world.processes[process]).out_blocked = held_back
        self.networks[node].released()

    def block(self, node: int, process: int, blocked: bool) -> None:
        path = self.networks[node].path(self.world.processes[process])
        path.out_blocked = path.in_blocked = blocked
        if not blocked:
            self.networks[node].released()


def test_holder_goes_on_when_one_node_is_silent_and_another_votes_for_someone_else() -> None:
    """The round ends without a failure, a moment after the two that answered; only one of them counts."""

    async def hold(client: SimClient) -> None:
        await asyncio.sleep(0.1)
        simulation.block(1, 0, True)
        async with client.lock("n") as lease:
            await asyncio.sleep(0.6)  # the other has the vote of node 1 meanwhile
            simulation.block(1, 0, False)
            simulation.block(0, 0, True)
            await asyncio.sleep(0.6)  # an extension hears nodes 1 and 2 alone
            simulation.block(0, 0, False)
            await asyncio.sleep(2.0)
            assert lease.held

    async def wait(client: SimClient) -> None:
        await asyncio.sleep(0.3)
        try:
            await client.lock("n").acquire(timeout=1.5)
        except AcquireTimeout:
            return
        raise AssertionError("two held at once")

    simulation = Scripted(hold, wait, until=30.0)
    simulation.run()


def test_place_that_outlasts_max_hold_is_not_believed_in_once_another_majority_votes() -> None:
    """Its place is kept by nodes 1 and 2; its token is taken by 0 and 1, and 0 is behind."""

    async def hold(client: SimClient) -> None:
        async with client.lock("n"):
            await asyncio.sleep(0.68)

    async def wait(client: SimClient) -> None:
        await asyncio.sleep(0.1)
        asking = asyncio.ensure_future(client.lock("n", max_hold=0.2).acquire())
        await asyncio.sleep(0.2)
        simulation.nodes[0].refuses = "BUSY Redis is busy running a script."
        await asyncio.sleep(0.3)  # an extension of the place is taken by nodes 1 and 2 alone
        simulation.nodes[0].refuses = None
        simulation.block(2, 1, True)
        lease = await asking  # the nodes' answers are held against what is believed
        simulation.block(2, 1, False)
        await lease.release()

    simulation = Scripted(hold, wait, until=30.0)
    simulation.run()


NEAR, FAR = 0.001, 0.04


def test_yield_that_is_lost_is_said_again_when_nobody_asks_for_the_vote_any_more() -> None:
    """The older one has left by then; one node is dead, so the vote that was given back is needed."""

    async def older(client: SimClient) -> None:
        async with client.lock("another"):
            """The nodes know which leases are in use, and are not told again."""
        simulation.delay(0, FAR, NEAR, NEAR)
        await simulation.moment(1.0)
        with pytest.raises(AcquireTimeout):
            await client.lock("n").acquire(timeout=0.25)

    async def younger(client: SimClient) -> None:
        async with client.lock("another"):
            """Likewise."""
        simulation.delay(1, NEAR, FAR, NEAR)
        await simulation.moment(1.005)
        lease = await client.lock("n").acquire(timeout=4.0)
        await lease.release()

    def refuse_yields(refused: bool) -> None:
        simulation.nodes[0].refuses_yields = refused

    simulation = Scripted(older, younger, until=30.0, dead=2)
    simulation.world.at(0.9, refuse_yields, True)
    simulation.world.at(1.2, refuse_yields, False)
    simulation.run()
    assert simulation.nodes[0].refused_yields, "a yield was lost"


@pytest.mark.parametrize("dead", [None, 2])
def test_vote_by_an_owner_that_has_left_elsewhere_is_asked_back(dead: int | None) -> None:
    """The owner's first release has not reached some nodes when its second request does."""
    late = [0, 1] if dead is None else [0]

    async def first(client: SimClient) -> None:
        async with client.lock("n", owner="ann", confirm_release=False):
            await simulation.moment(1.5)
            for node in late:
                simulation.block(node, 0, True)
        await simulation.moment(2.0)
        for node in late:
            simulation.block(node, 0, False)

    async def second(client: SimClient) -> None:
        await simulation.moment(1.6)
        async with client.lock("n", owner="ann", timeout=6.0):
            pass

    async def other(client: SimClient) -> None:
        await simulation.moment(1.0)
        async with client.lock("n", timeout=6.0):
            pass

    nodes = 3 if dead is not None else 4
    simulation = Scripted(first, second, other, until=40.0, nodes=nodes, dead=dead)
    simulation.run()


def test_owner_that_has_left_a_majority_is_not_refused_as_a_deadlock() -> None:
    async def reads(client: SimClient) -> None:
        async with client.rwlock("n", owner="ann", confirm_release=False).read:
            await simulation.moment(1.5)
            simulation.block(0, 0, True)
        await simulation.moment(2.0)
        simulation.block(0, 0, False)

    async def writes(client: SimClient) -> None:
        simulation.delay(1, NEAR, FAR, FAR)
        await simulation.moment(1.6)
        async with client.lock("n", owner="ann", timeout=6.0):
            pass

    simulation = Scripted(reads, writes, until=40.0)
    simulation.run()


def test_holder_believes_a_node_that_has_forgotten_it_whatever_the_clocks_say() -> None:
    """Its token is a minute ahead of the clock of the node that came back empty, and was waited for.

    (That node does not get the vote back which it gave meanwhile: the holder has no other to lose.)
    """

    async def hold(client: SimClient) -> None:
        await simulation.moment(1.0)
        lease = await client.lock("n").acquire()
        assert (await lease.wait_lost()).reason == "expired"
        assert simulation.world.time < 11.0

    async def wait(client: SimClient) -> None:
        for node in range(3):
            simulation.block(node, 1, True)
        await simulation.moment(0.99)
        asking = asyncio.ensure_future(client.lock("n").acquire())  # so its ticket is the older one
        await simulation.moment(1.1)
        for node in range(3):
            simulation.block(node, 1, False)
        lease = await asking
        await simulation.moment(13.0)
        await lease.release()

    def restart() -> None:
        simulation.networks[2].stop_server()
        simulation.nodes[2].restart("empty")
        simulation.nodes[2].refuses_yields = True

    simulation = Scripted(hold, wait, until=60.0)
    simulation.nodes[1].offset += 60.0
    simulation.world.at(2.0, lambda: simulation.block(2, 0, True))
    simulation.world.at(2.0, restart)
    simulation.world.at(2.6, lambda: simulation.block(2, 0, False))
    simulation.world.at(8.0, lambda: simulation.block(0, 0, True))
    simulation.world.at(12.5, lambda: simulation.block(0, 0, False))
    simulation.run()


@pytest.mark.parametrize("wrong", [3600.0, -3600.0, 86400.0 * 365])
@pytest.mark.parametrize("follows", ["the newcomer", "the others"])
def test_all_get_in_whatever_the_clock_of_one_node_says_and_whichever_nodes_one_has_heard(
    wrong: float, follows: str
) -> None:
    """Node 1 is wrong, node 2 is dead before the newcomers come, and the old ones have heard it.

    (Or the other way round: the newcomers have heard a right clock that the old ones have not.)
    """
    turns = dict.fromkeys(range(4), 0)

    def taking(number: int, begins: float) -> Main:
        async def take(client: SimClient) -> None:
            await simulation.moment(begins)
            while simulation.world.time < 3.0:
                async with client.lock("n"):
                    await asyncio.sleep(0.002)
                turns[number] += 1

        return take

    mains = [taking(number, 2.0) for number in range(4)]
    simulation = Scripted(*mains, until=60.0)
    simulation.enter_late = [3] if follows == "the newcomer" else [0, 1, 2]
    simulation.nodes[1].offset += wrong
    simulation.world.at(0.9, simulation.networks[2].stop_server)
    simulation.run()
    assert min(turns.values()) > max(turns.values()) / 3, turns


def test_waiter_does_not_ask_without_a_pause_while_a_node_is_silent() -> None:
    """The silent node has told when to look, and that moment is over: there is nothing new to hear."""
    asked: list[float] = []

    async def hold(client: SimClient) -> None:
        async with client.lock("n"):
            await simulation.moment(5.0)

    async def wait(client: SimClient) -> None:
        await simulation.moment(0.5)
        async with client.lock("n"):
            pass

    def count(command: Command, reply: object) -> None:
        if command.script == "vote" and command.id.startswith("p1."):
            asked.append(simulation.world.time)

    simulation = Scripted(hold, wait, until=30.0)
    simulation.nodes[0].executed.append(count)
    simulation.world.at(1.0, lambda: simulation.block(2, 1, True))
    simulation.world.at(6.0, lambda: simulation.block(2, 1, False))
    simulation.run()
    assert len([when for when in asked if 1.0 < when < 5.0]) < 40


@pytest.mark.parametrize(("ahead", "grows"), [(0.0, True), (1.3, True), (5.0, False)])
def test_token_that_its_nodes_forget_is_passed_unless_a_clock_is_ahead_by_the_restart_delay(
    ahead: float, grows: bool
) -> None:
    """Nodes 0 and 1 know the token, by the clock of 1; 0 forgets it, 1 dies, and 2 has never known it."""
    tokens: list[int] = []

    async def first(client: SimClient) -> None:
        simulation.block(2, 0, True)
        await simulation.moment(1.0)
        async with client.lock("n") as lease:
            tokens.append(lease.token)
        await simulation.moment(10.0)

    async def second(client: SimClient) -> None:
        await simulation.moment(asks_at)
        async with client.lock("n", timeout=10.0) as lease:
            tokens.append(lease.token)

    def forget() -> None:
        for node in (0, 1):
            simulation.networks[node].stop_server()
        simulation.nodes[0].restart("empty")

    passed: list[bool] = []
    # The node does not count yet, and votes all the same.
    for asks_at in (1.11, 1.5, 2.0, 2.5):  # noqa: B007
        tokens.clear()
        simulation = Scripted(first, second, until=40.0)
        simulation.checkers.forget_tokens = not grows
        simulation.nodes[1].offset += ahead
        simulation.world.at(0.0, lambda s=simulation: s.block(1, 1, True))
        simulation.world.at(1.1, forget)
        simulation.run()
        passed.append(tokens[1] > tokens[0])
    assert all(passed) is grows, passed


def test_vote_that_was_broken_while_its_request_waited_helps_nobody_to_hold() -> None:
    """Node 0 votes for it, and is broken before node 1 does; node 2 has not heard of it."""

    async def hold(client: SimClient) -> None:
        simulation.delay(0, NEAR, 0.06, 0.04)
        async with client.lock("n"):
            await simulation.moment(1.5)

    async def wait(client: SimClient) -> None:
        simulation.block(2, 1, True)
        await simulation.moment(1.0)
        async with client.lock("n", timeout=10.0):
            await asyncio.sleep(0.3)

    async def wait_too(client: SimClient) -> None:
        await simulation.moment(1.1)
        with suppress(LockLost):  # the break reaches other nodes later, where it holds
            async with client.lock("n", timeout=10.0):
                await asyncio.sleep(0.3)

    async def operate(client: SimClient) -> None:
        for node in (1, 2):
            simulation.block(node, 3, True)
        await simulation.moment(1.51)
        breaking = asyncio.ensure_future(client.break_lock("n"))
        await simulation.moment(2.0)
        for node in (1, 2):
            simulation.block(node, 3, False)
        await asyncio.wait([breaking])

    simulation = Scripted(hold, wait, wait_too, operate, until=60.0)
    simulation.world.at(3.0, lambda: simulation.block(2, 1, False))
    simulation.run()


def test_token_is_not_written_again_while_a_node_whose_vote_counts_is_dead() -> None:
    """Nodes 0 and 1 vote for it, node 1 dies before it has the token, node 2 is not heard for a second."""
    written: list[float] = []
    died: list[float] = []

    async def take(client: SimClient) -> None:
        simulation.block(2, 0, True)
        async with client.lock("n", timeout=20.0):
            pass

    def watch(command: Command, reply: object) -> None:
        if command.script == "vote" and not died:
            died.append(simulation.world.time)
            simulation.world.after(0.0, simulation.networks[1].stop_server)

    def count(command: Command, reply: object) -> None:
        if command.script == "vote" and b"fence" in command.arguments:
            written.append(simulation.world.time)

    simulation = Scripted(take, until=60.0)
    simulation.nodes[1].executed.append(watch)
    simulation.nodes[0].executed.append(count)
    simulation.world.at(3.0, lambda: simulation.block(2, 0, False))
    simulation.run()
    assert died
    # Once, when its votes were enough; then with pauses that grow.
    assert min(later - earlier for earlier, later in pairwise(written)) > 0.02, written
    assert len(written) < 10, written


def test_hold_that_ran_out_before_its_body_began_does_not_come_back_with_its_token() -> None:
    """Its margin was all that was left. Its extensions reach the nodes when another has held since: the
    first gets the votes again, and its answer is too late; the second finds them."""
    tokens: dict[str, int] = {}

    async def hold(client: SimClient) -> None:
        async with client.lock("n"):
            await simulation.moment(1.5)

    async def wait(client: SimClient) -> None:
        await simulation.moment(0.9)
        async with client.lock("n", margin=0.9) as lease:
            tokens["first"] = lease.token

    async def wait_too(client: SimClient) -> None:
        await simulation.moment(1.3)
        async with client.lock("n") as lease:
            tokens["second"] = lease.token
            await asyncio.sleep(0.1)

    simulation = Scripted(hold, wait, wait_too, until=30.0)
    for node in range(3):
        simulation.world.at(1.5, simulation.hold_back, node, 1, True)
        simulation.world.at(2.7, simulation.hold_back, node, 1, False)
    simulation.run()
    assert tokens["first"] > tokens["second"]


def test_vote_that_was_given_back_counts_again_when_its_node_has_the_token_of_the_hold() -> None:
    """All nodes offer the same token. The one of node 0 goes back to an older request, which gives up; the
    others suffice. Later, node 2 dies."""
    given_back: list[bool] = []

    async def hold(client: SimClient) -> None:
        async with client.lock("n"):
            await simulation.moment(1.5)

    async def younger(client: SimClient) -> None:
        await simulation.moment(1.3)
        async with client.lock("n") as lease:
            [tally] = simulation.tallies(1)
            given_back.append(tally.ballots[0].given_back == lease.token)
            await simulation.moment(6.0)
            assert lease.held

    async def older(client: SimClient) -> None:
        async with client.lock("first"):
            pass  # the nodes know from then on which leases are in use
        await simulation.moment(1.2)
        with suppress(BackendUnavailable):
            await client.lock("n").acquire(timeout=0.6)

    simulation = Scripted(hold, younger, older, until=30.0)
    # The older one reaches one node alone: it would take no vote.
    simulation.patch(Requests, "can_count", lambda self, tally: True)
    for node in range(3):
        simulation.world.at(1.19, simulation.block, node, 2, True)
    simulation.world.at(1.505, simulation.block, 0, 2, False)
    for node in (1, 2):
        simulation.world.at(1.49, simulation.block, node, 1, True)
        simulation.world.at(1.55, simulation.block, node, 1, False)
        simulation.world.at(2.3, simulation.block, node, 2, False)
    simulation.world.at(3.5, simulation.networks[2].stop_server)
    simulation.run()
    assert given_back == [True]


def test_holder_gets_the_vote_that_an_older_waiter_has_and_outlives_another_node() -> None:
    """The older one's question reaches node 2 first, and comes late to the others. Later, node 0 dies."""
    stages: list[list[str]] = []
    got_in: list[float] = []

    async def older(client: SimClient) -> None:
        await simulation.moment(1.995)
        async with client.lock("n"):
            got_in.append(simulation.world.time)

    async def hold(client: SimClient) -> None:
        await simulation.moment(2.0)
        async with client.lock("n") as lease:
            await simulation.moment(4.0)
            [tally] = simulation.tallies(1)
            stages.append([ballot.stage for ballot in tally.ballots])
            await simulation.moment(8.0)
            assert lease.held

    simulation = Scripted(older, hold, until=30.0)
    simulation.world.at(1.5, simulation.delay, 0, FAR, FAR, NEAR)
    simulation.world.at(1.5, simulation.delay, 1, NEAR, NEAR, FAR)
    for process in range(2):
        simulation.world.at(2.5, simulation.delay, process, NEAR, NEAR, NEAR)
    simulation.world.at(4.5, simulation.networks[0].stop_server)
    simulation.run()
    assert stages == [["c", "c", "c"]]
    assert 8.0 < got_in[0] < 8.2


def test_question_that_waited_does_not_open_the_vote_of_a_request_that_holds_by_then() -> None:
    """Node 2 would forget the lock-delay. The holder is cut off then; node 1 has never heard of it."""
    got_in: list[float] = []
    heard: list[bytes] = []

    async def hold(client: SimClient) -> None:
        async with client.lock("n"):
            await simulation.moment(1.5)

    async def wait(client: SimClient) -> None:
        await simulation.moment(1.0)
        with suppress(LockLost):
            async with client.lock("n", lock_delay=3.0):
                await simulation.moment(8.0)

    async def wait_too(client: SimClient) -> None:
        await simulation.moment(1.1)
        async with client.lock("n"):
            got_in.append(simulation.world.time)

    def look() -> None:
        [session] = simulation.checkers.sessions[simulation.world.processes[1]]
        backend: Any = session.backend
        backend.keeper.on_look(None)

    def watch(command: Command, reply: object) -> None:
        if command.script == "vote" and command.id.startswith("p1."):
            if b"ask" in command.arguments and b"fence" in heard:
                cut_off(True)
            heard.append(command.arguments[7])

    def cut_off(cut: bool) -> None:
        for node in range(3):
            simulation.block(node, 1, cut)

    simulation = Scripted(hold, wait, wait_too, until=40.0)
    simulation.nodes[2].executed.append(watch)
    for process in range(3):
        simulation.world.at(0.9, simulation.delay, process, NEAR, NEAR, NEAR)
    simulation.world.at(0.95, simulation.block, 1, 1, True)
    simulation.world.at(1.2, simulation.hold_back, 2, 1, True)
    simulation.world.at(1.45, lambda: simulation.world.processes[1].deliver(look))
    simulation.world.at(1.6, simulation.hold_back, 2, 1, False)
    simulation.world.at(1.65, cut_off, True)
    simulation.world.at(9.0, cut_off, False)
    simulation.run()
    assert got_in[0] > 1.6 + 1.5 + 3.0, got_in


def test_late_extensions_of_a_dead_client_do_not_give_its_token_to_others_of_its_owner() -> None:
    """Two extensions come when its lease is over and another has held: the first gets the votes again,
    the second confirms them with the old token. Then its owner asks elsewhere."""
    tokens: dict[str, int] = {}

    async def hold(client: SimClient) -> None:
        await simulation.moment(1.0)
        await client.lock("n", owner="ann").acquire()
        await simulation.moment(30.0)

    async def wait(client: SimClient) -> None:
        await simulation.moment(1.5)
        async with client.lock("n") as lease:
            tokens["other"] = lease.token
            await asyncio.sleep(0.1)

    async def hold_again(client: SimClient) -> None:
        await simulation.moment(4.1)
        async with client.lock("n", owner="ann") as lease:
            tokens["again"] = lease.token

    def crash() -> None:
        process = simulation.world.processes[0]
        process.crash()
        del simulation.checkers.sessions[process]
        for network in simulation.networks:
            for conn in network.connections_of(process):
                conn.close_by_kernel()

    simulation = Scripted(hold, wait, hold_again, until=30.0)
    for node in range(3):
        simulation.world.at(1.6, simulation.hold_back, node, 0, True)
        simulation.world.at(4.0, simulation.hold_back, node, 0, False)
    simulation.world.at(2.9, crash)
    simulation.run()
    assert tokens["again"] > tokens["other"]


def test_owner_does_not_get_in_again_with_a_token_that_it_has_heard_was_broken() -> None:
    """Nodes 1 and 2 confirm the second request just before all votes are broken. Node 0 tells of its break
    before their answers come, and their own notices come last."""
    confirmed: list[Command] = []
    tokens: list[int] = []

    async def hold(client: SimClient) -> None:
        with suppress(LockLost):
            async with client.lock("n", owner="ann") as lease:
                tokens.append(lease.token)
                await simulation.moment(3.0)

    async def hold_again(client: SimClient) -> None:
        await simulation.moment(1.0)
        for node, notices, answers in ((0, 0.0, 0.1), (1, 0.2, 0.02), (2, 0.2, 0.02)):
            for conn in simulation.networks[node].connections_of(simulation.world.processes[1]):
                conn.behind = notices if conn._subscribes else answers
        with suppress(LockLost):
            async with client.lock("n", owner="ann") as lease:
                tokens.append(lease.token)
                await simulation.moment(3.0)

    async def wait(client: SimClient) -> None:
        await simulation.moment(0.5)
        async with client.lock("n") as lease:
            tokens.append(lease.token)
            await asyncio.sleep(0.1)

    async def operate(client: SimClient) -> None:
        while len(confirmed) < 2:
            await asyncio.sleep(0.001)
        await client.break_lock("n")

    def watch(command: Command, reply: object) -> None:
        if (
            command.script == "vote"
            and command.id.startswith("p1.")
            and b"held" in command.arguments
        ):
            confirmed.append(command)

    simulation = Scripted(hold, hold_again, wait, operate, until=30.0)
    for node in range(3):
        simulation.nodes[node].executed.append(watch)
    for process in range(4):
        simulation.world.at(0.9, simulation.delay, process, NEAR, NEAR, NEAR)
    simulation.run()
    assert len(set(tokens)) == 3, tokens
    assert sorted(tokens) == tokens
