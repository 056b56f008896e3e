"""When a client believes a node of a quorum: decisions over virtual time. On servers: tests/topology."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

import aiodlock._clock
from aiodlock._patience import Patience
from aiodlock.backends.base import Unanswered
from aiodlock.backends.redis.quorum.delays import Delays
from aiodlock.backends.redis.quorum.trust import Trust, judge

DELAY = 30.0
#: In which a client that takes the quorum for new has marked all nodes.
MARKED = 1.0


class Time:
    """The machine's clock, which goes on when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(aiodlock._clock, "_gettime", lambda _: time.now)
    return time


class Node:
    """What is at one address: a server with a run id and a clock of its own, and the one key."""

    _runs = count()
    patience = Patience()

    def __init__(self, time: Time) -> None:
        self.time = time
        self.is_silent = False
        #: What keeps a mark on its way to the node.
        self.marked: asyncio.Event | None = None
        self.offset = 5000.0
        self.asked_for_time = 0
        self.come_back_empty()

    def come_back_empty(self) -> None:
        """Another server is here now, for the first time or after a restart."""
        self.run = b"run%d" % next(self._runs)
        self.mark: bytes | None = None

    async def send(
        self, name: str, *arguments: bytes | str | int, within: float | None = None
    ) -> object:
        """Stand for a connection to it."""
        if self.is_silent:
            await asyncio.sleep(60.0 if within is None else 0.02)
            raise Unanswered("no reply in time")
        match name:
            case "TIME":
                self.asked_for_time += 1
                us = round((self.time.now + self.offset) * 1e6)
                return [b"%d" % (us // 1_000_000), b"%d" % (us % 1_000_000)]
            case "INFO":
                return b"# Server\r\nrun_id:%b\r\nuptime_in_seconds:1000000\r\n" % self.run
            case "GET":
                return self.mark
            case "PEXPIRE":
                return int(self.mark is not None)
            case "SET":
                if self.marked is not None:
                    await self.marked.wait()
                if "NX" in arguments and self.mark is not None:
                    return None
                assert isinstance(arguments[1], bytes)
                self.mark = arguments[1]
                return b"OK"
        raise AssertionError(f"{name} is not for a quorum")


class Client:
    """One client's opinions of some nodes."""

    def __init__(self, nodes: list[Node], delay: float = DELAY) -> None:
        self.nodes = nodes
        self.trusts = [Trust("key", Delays(delay), 3_600_000) for _ in nodes]

    async def connects(self, *numbers: int) -> None:
        """Connect, or reconnect, to some of the nodes, or to all."""
        for number in numbers or range(len(self.nodes)):
            await self.trusts[number].meet(self.nodes[number], "node")  # type: ignore[arg-type]

    async def judges(self, *numbers: int) -> list[bool]:
        """Form an opinion, connected to some of the nodes, or to all; return which are believed."""
        reached = numbers or range(len(self.nodes))
        met = [
            (trust, self.nodes[n] if n in reached else None) for n, trust in enumerate(self.trusts)
        ]
        await judge(met, len(self.nodes) // 2 + 1)  # type: ignore[arg-type]
        for trust in self.trusts:
            if trust.unsettled:
                trust.settle()  # the others have told which leases are in use
        return [trust.given for trust in self.trusts]

    async def enters(self, *numbers: int) -> list[bool]:
        """Do both."""
        await self.connects(*numbers)
        return await self.judges(*numbers)


@pytest.fixture
def nodes(time: Time) -> list[Node]:
    return [Node(time) for _ in range(3)]


async def test_new_quorum_is_believed_at_once_by_the_first_and_by_those_that_follow(
    nodes: list[Node],
) -> None:
    assert await Client(nodes).enters() == [True, True, True]
    assert await Client(nodes).enters() == [True, True, True]


async def test_new_quorum_is_believed_by_two_that_come_first_together(nodes: list[Node]) -> None:
    one, other = Client(nodes), Client(nodes)
    await one.connects()
    await other.connects()
    assert await one.judges() == [True, True, True]
    assert await other.judges() == [True, True, True]


async def test_new_quorum_is_believed_by_one_that_comes_while_another_marks_it(
    nodes: list[Node], time: Time
) -> None:
    nodes[1].marked = nodes[2].marked = marked = asyncio.Event()
    one = asyncio.create_task(Client(nodes).enters())
    while nodes[0].mark is None:
        await asyncio.sleep(0)
    other = Client(nodes)
    assert await other.enters() == [True, False, False]
    marked.set()
    assert await one == [True, True, True]
    time.passes(MARKED / 2)
    assert await other.judges() == [True, True, True]


async def test_nodes_that_nobody_marks_in_time_are_waited_for(
    nodes: list[Node], time: Time
) -> None:
    """The client that took the quorum for new has died after the first mark; or two nodes are empty."""
    one, other = Client(nodes), Client(nodes)
    await one.connects()
    await one.trusts[0].keep_mark(nodes[0], quorum_is_new=True, quorum_was_new=False)  # type: ignore[arg-type]
    assert await other.enters() == [True, False, False]
    time.passes(MARKED)
    assert await other.judges() == [True, False, False]
    time.passes(DELAY + 0.01)
    assert await other.judges() == [True, True, True]


async def test_fewer_than_a_majority_do_not_tell_that_a_quorum_is_new(nodes: list[Node]) -> None:
    client = Client(nodes)
    assert await client.enters(0) == [False, False, False]


async def test_silent_nodes_delay_no_decision_about_the_others(time: Time) -> None:
    client = Client([Node(time) for _ in range(5)])
    await client.connects()
    client.nodes[0].is_silent = client.nodes[3].is_silent = True
    async with asyncio.timeout(2.0):
        assert await client.judges() == [False, True, True, False, True]
    client.nodes[0].is_silent = client.nodes[3].is_silent = False
    await client.judges()
    time.passes(MARKED)
    await client.judges()
    time.passes(DELAY + 1)
    assert await client.judges() == [True] * 5


async def test_whether_a_quorum_is_new_is_not_told_by_fewer_answers_than_a_majority(
    nodes: list[Node],
) -> None:
    client = Client(nodes)
    await client.connects()
    nodes[1].is_silent = nodes[2].is_silent = True
    assert await client.judges() == [False, False, False]
    assert nodes[0].mark is None
    nodes[1].is_silent = False
    assert await client.judges() == [True, True, False]


async def test_node_that_was_away_when_the_quorum_was_new_is_waited_for(
    nodes: list[Node], time: Time
) -> None:
    """Its server may have voted, and forgotten, for clients that could reach it."""
    client = Client(nodes)
    assert await client.enters(0, 1) == [True, True, False]
    assert await client.enters(2) == [True, True, False]
    time.passes(DELAY + 0.01)
    assert await client.judges() == [True, True, True]


async def test_restarted_node_is_waited_for_from_when_it_was_met_again(
    nodes: list[Node], time: Time
) -> None:
    """However long its server has been running: it may have been running elsewhere."""
    client = Client(nodes)
    await client.enters()
    nodes[1].come_back_empty()
    time.passes(3600)
    assert await client.enters(1) == [True, False, True]
    time.passes(DELAY - 0.1)
    assert await client.judges() == [True, False, True]
    time.passes(0.2)
    assert await client.judges() == [True, True, True]


async def test_connection_that_was_only_lost_costs_no_trust(nodes: list[Node]) -> None:
    client = Client(nodes)
    await client.enters()
    assert await client.enters(1) == [True, True, True]


async def test_newcomers_count_from_when_the_first_client_met_the_node(
    nodes: list[Node], time: Time
) -> None:
    client = Client(nodes)
    await client.enters()
    nodes[1].come_back_empty()
    await client.enters(1)
    time.passes(DELAY / 2)
    within, shorter = Client(nodes), Client(nodes, delay=DELAY / 3)
    assert await within.enters() == [True, False, True]
    # However short its own leases are: the mark tells how long the longest one was.
    assert await shorter.enters() == [True, False, True]
    time.passes(DELAY / 2 + 0.01)
    assert await within.judges() == [True, True, True]
    assert await Client(nodes).enters() == [True, True, True]


async def test_node_restarted_while_no_client_was_there_is_waited_for_from_the_first_on(
    nodes: list[Node], time: Time
) -> None:
    await Client(nodes).enters()
    nodes[1].come_back_empty()
    time.passes(600)
    first = Client(nodes)
    assert await first.enters() == [True, False, True]
    time.passes(MARKED)
    assert await first.judges() == [True, False, True]
    time.passes(DELAY + 0.01)
    assert await first.judges() == [True, True, True]
    assert await Client(nodes).enters() == [True, True, True]


async def test_node_restarted_with_its_data_is_waited_for_too(
    nodes: list[Node], time: Time
) -> None:
    """The last votes may be missing; its mark names the server that was."""
    client = Client(nodes)
    await client.enters()
    mark = nodes[1].mark
    nodes[1].come_back_empty()
    nodes[1].mark = mark
    assert await client.enters(1) == [True, False, True]
    assert await Client(nodes).enters() == [True, False, True]
    time.passes(DELAY + 0.01)
    assert await client.judges() == [True, True, True]


async def test_server_that_comes_back_after_another_was_at_its_address_is_waited_for(
    nodes: list[Node], time: Time
) -> None:
    """It has all its memory, but not the votes that the other gave meanwhile."""
    client = Client(nodes)
    await client.enters()
    nodes[1].come_back_empty()
    await client.enters(1)
    time.passes(3 * DELAY)
    assert await client.judges() == [True, True, True]
    first = nodes[1].run, nodes[1].mark
    nodes[1].come_back_empty()
    await client.enters(1)
    time.passes(3 * DELAY)
    nodes[1].run, nodes[1].mark = first
    assert await client.enters(1) == [True, False, True]
    assert await Client(nodes).enters() == [True, False, True]
    time.passes(DELAY + 0.01)
    assert await client.judges() == [True, True, True]


async def test_server_that_another_client_has_met_before_is_not_waited_for_anew(
    nodes: list[Node], time: Time
) -> None:
    one, other = Client(nodes), Client(nodes)
    await one.enters()
    await other.enters()
    time.passes(1.0)
    nodes[1].come_back_empty()
    time.passes(1.0)
    await one.enters(1)
    time.passes(DELAY + 1.0)
    assert await other.enters(1) == [True, True, True]


async def test_all_restarted_at_once_are_no_new_quorum_for_who_has_known_them_nor_for_whom_it_tells(
    nodes: list[Node], time: Time
) -> None:
    client = Client(nodes)
    await client.enters()
    for node in nodes:
        node.come_back_empty()
    assert await client.enters() == [False, False, False]
    assert await Client(nodes).enters() == [False, False, False]
    time.passes(DELAY + 0.01)
    assert await client.judges() == [True, True, True]
    assert await Client(nodes).enters() == [True, True, True]


async def test_all_but_one_restarted_are_no_new_quorum_for_anybody(nodes: list[Node]) -> None:
    await Client(nodes).enters()
    nodes[0].come_back_empty()
    nodes[1].come_back_empty()
    assert await Client(nodes).enters() == [False, False, True]


async def test_who_has_known_a_quorum_corrects_a_newcomer_that_took_it_for_new(
    nodes: list[Node],
) -> None:
    client = Client(nodes)
    await client.enters()
    for node in nodes:
        node.come_back_empty()
    assert await Client(nodes).enters() == [True, True, True]  # nothing could tell it
    assert await client.enters() == [False, False, False]
    assert await Client(nodes).enters() == [False, False, False]


async def test_newcomer_that_judges_while_another_tells_believes_what_is_told(
    nodes: list[Node],
) -> None:
    client, newcomer = Client(nodes), Client(nodes)
    await client.enters()
    for node in nodes:
        node.come_back_empty()
    await newcomer.connects()
    await client.connects()
    assert await newcomer.judges() == [False, False, False]


async def test_mark_that_is_lost_costs_those_no_trust_who_were_there(nodes: list[Node]) -> None:
    client = Client(nodes)
    await client.enters()
    nodes[1].mark = None
    assert await client.enters(1) == [True, True, True]
    assert await Client(nodes).enters() == [True, False, True]


async def test_mark_is_kept_for_as_long_as_a_client_is_there(nodes: list[Node], time: Time) -> None:
    client = Client(nodes)
    await client.enters()
    kept = [node.mark for node in nodes]
    nodes[1].mark = None
    time.passes(3600)
    await client.judges()
    assert [node.mark for node in nodes] == kept


async def test_mark_of_a_client_that_kept_no_time_is_believed(nodes: list[Node]) -> None:
    """Versions before this wrote the run id alone, when they believed."""
    for node in nodes:
        node.mark = node.run
    assert await Client(nodes).enters() == [True, True, True]
    nodes[1].mark = b"-"
    assert await Client(nodes).enters() == [True, False, True]


async def test_mark_that_somebody_has_written_over_ends_no_client(
    nodes: list[Node], time: Time
) -> None:
    await Client(nodes).enters()
    nodes[1].mark = nodes[1].run + b" " + b"9" * 5000
    client = Client(nodes)
    assert await client.enters() == [True, False, True]
    time.passes(DELAY)
    assert await client.judges() == [True, True, True]


@pytest.mark.parametrize("step", [-3.0, -0.2, 0.2, 3.0])
async def test_node_whose_clock_stepped_is_waited_for(
    nodes: list[Node], time: Time, step: float
) -> None:
    client = Client(nodes)
    await client.enters()
    nodes[1].offset += step
    time.passes(1.0)
    clock = time.now + nodes[1].offset
    client.trusts[1].hear_clock(clock, time.now)
    assert await client.judges() == [True, False, True]
    time.passes(DELAY + 0.01)
    assert await client.judges() == [True, True, True]


@pytest.mark.parametrize("step", [-1.2, -0.2, 0.2, 1.2])
async def test_client_that_was_idle_for_an_hour_notices_a_step(
    nodes: list[Node], time: Time, step: float
) -> None:
    client = Client(nodes)
    await client.enters()
    for _ in range(3600):
        time.passes(1.0)
        assert await client.judges() == [True, True, True]
    nodes[1].offset += step
    client.trusts[1].hear_clock(time.now + nodes[1].offset, time.now)
    assert await client.judges() == [True, False, True]


async def test_node_is_asked_for_its_time_only_when_it_has_not_told_it_for_long(
    nodes: list[Node], time: Time
) -> None:
    client = Client(nodes)
    await client.enters()
    nodes[0].asked_for_time = nodes[1].asked_for_time = 0
    for _ in range(100):
        time.passes(1.0)
        client.trusts[1].hear_clock(time.now + nodes[1].offset, time.now)
        await client.judges()
    assert 9 <= nodes[0].asked_for_time <= 10
    assert nodes[1].asked_for_time == 0


@pytest.mark.parametrize("off", [-0.05, 0.05])
async def test_clock_that_is_slewed_costs_no_trust(
    nodes: list[Node], time: Time, off: float
) -> None:
    client = Client(nodes)
    await client.enters()
    for _ in range(100):
        time.passes(100.0)
        nodes[1].offset += off
        client.trusts[1].hear_clock(time.now + nodes[1].offset, time.now)
    assert await client.judges() == [True, True, True]


async def test_primary_that_comes_back_is_waited_for_by_a_client_that_has_not_met_the_one_in_between(
    nodes: list[Node], time: Time
) -> None:
    """A Sentinel service as a node: the mark of the other server was copied, its last votes were not."""
    client, other = Client(nodes), Client(nodes)
    await client.enters()
    await other.enters()
    first, mark = nodes[1].run, nodes[1].mark
    nodes[1].come_back_empty()
    nodes[1].mark = mark
    await other.enters(1)
    nodes[1].run = first
    time.passes(DELAY + 1.0)
    assert await client.enters(1) == [True, False, True]
    time.passes(DELAY + 0.01)
    assert await client.judges() == [True, True, True]


async def test_slow_answer_is_no_step(nodes: list[Node], time: Time) -> None:
    client = Client(nodes)
    await client.enters()
    sent = time.now
    time.passes(4.0)
    client.trusts[1].hear_clock(sent + nodes[1].offset + 0.5, sent)
    client.trusts[1].hear_clock(time.now + nodes[1].offset, time.now)
    assert await client.judges() == [True, True, True]


async def test_clock_set_back_does_not_shorten_the_wait_of_newcomers(
    nodes: list[Node], time: Time
) -> None:
    client = Client(nodes)
    await client.enters()
    nodes[1].come_back_empty()
    await client.enters(1)
    nodes[1].offset -= 3600
    time.passes(1.0)
    newcomer = Client(nodes)
    assert await newcomer.enters() == [True, False, True]
    time.passes(DELAY + 0.01)
    assert await newcomer.judges() == [True, True, True]


async def test_without_a_delay_whoever_is_there_is_believed(nodes: list[Node], time: Time) -> None:
    client = Client(nodes, delay=0)
    assert await client.enters() == [True, True, True]
    nodes[1].come_back_empty()
    assert await client.enters(1) == [True, True, True]
    nodes[1].offset += 5.0
    client.trusts[1].hear_clock(time.now + nodes[1].offset, time.now)
    assert await client.judges() == [True, True, True]
    # It is marked, for the leases of others: by this client's own, nobody need wait.
    assert nodes[1].mark is not None
    assert nodes[1].mark.split(b" ")[2] == b"0"
    newcomer = Client(nodes, delay=0)
    assert await newcomer.enters() == [True, True, True]
