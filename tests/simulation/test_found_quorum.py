"""What seeds with a quorum have found, each as the shortest course of events that shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from aiodlock import AcquireTimeout

from .quorum import QuorumSimulation
from .scenario import SimClient
from .world import Process

Main = Callable[[SimClient], Coroutine[None, None, None]]


class Scripted(QuorumSimulation):
    """Three nodes, and processes that do what a test says, under faults that come when it says."""

    def __init__(self, *mains: Main, until: float) -> None:
        super().__init__(0, nodes=3)
        self._mains = mains
        self._until = until
        self.style.faults = ()

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
                assert all(task.done() for task in started)
                for task in started:
                    task.result()
            finally:
                for process in self.world.processes:
                    process.bury()

    async def _enter(self, process: Process, main: Main) -> None:
        async with SimClient(self, process, ttl=1.5, waiter_ttl=1.0) as client:
            session = client._session
            assert session is not None
            self.checkers.sessions[process] = [session]
            await main(client)
        del self.checkers.sessions[process]

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
