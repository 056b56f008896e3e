"""A few hundred seeds, the broken variants, and that a seed is one run."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiodlock.backends.memory.store import Key

from .catching import assert_caught, one_of_each
from .failover import FailoverSimulation
from .forgotten import Forgotten
from .lingers import Lingers, LingersOnTheMachine
from .memory import Call, MachineSimulation
from .once_variants import ALL_VARIANTS, ONCE_VARIANTS
from .onces import Ledger, Success
from .quorum import QuorumSimulation
from .run import run_seed
from .rush import Rush
from .scenario import Simulation
from .world import Process, World

#: In blocks, so that several workers share them.
_BLOCKS, _BLOCK = 10, 20
_QUORUM_BLOCKS, _QUORUM_BLOCK = 10, 3
_FAILOVERS = 20
_RUSHES = 20
_FORGOTTEN = 20
#: On Redis, a margin leaves 50 ms of a lease: it is extended 60 times in a second.
_SHORT_BEATS = 918284
_LINGERS = 20
#: A variant is caught by the first seed of these as long as the library is what it was, else soon.
_SEARCH = 100
#: Those of what is done once and kept closed are met in every second seed or so.
_SEARCH_ONCE = 20


@pytest.fixture(autouse=True)
def collected() -> None:
    """The collector rests while a seed runs; whatever others left to it is taken before."""
    gc.collect()


@pytest.mark.parametrize("first", range(0, _BLOCKS * _BLOCK, _BLOCK))
def test_promises_hold_whatever_happens(first: int) -> None:
    for seed in range(first, first + _BLOCK):
        outcome = run_seed(seed)
        assert not outcome.checker, (
            f"replay it: python -m tests.simulation --seed {seed}\n{outcome}"
        )


@pytest.mark.parametrize("first", range(0, _BLOCKS * _BLOCK, _BLOCK))
def test_promises_hold_on_the_machine_whatever_happens(first: int) -> None:
    for seed in range(first, first + _BLOCK):
        outcome = run_seed(seed, kind=MachineSimulation)
        assert not outcome.checker, (
            f"replay it: python -m tests.simulation --store memory --seed {seed}\n{outcome}"
        )


@pytest.mark.parametrize("first", range(0, _QUORUM_BLOCKS * _QUORUM_BLOCK, _QUORUM_BLOCK))
def test_promises_of_a_quorum_hold_whatever_happens(first: int) -> None:
    for seed in range(first, first + _QUORUM_BLOCK):
        outcome = run_seed(seed, kind=QuorumSimulation)
        assert not outcome.checker, (
            f"replay it: python -m tests.simulation --quorum --seed {seed}\n{outcome}"
        )


def test_old_primary_that_lives_is_left_by_all_connections_in_time() -> None:
    for seed in range(_FAILOVERS):
        outcome = run_seed(seed, kind=FailoverSimulation)
        assert not outcome.checker, (
            f"replay it: python -m tests.simulation --failover --seed {seed}\n{outcome}"
        )


def test_split_votes_are_sorted_out_in_order_of_the_tickets_at_once() -> None:
    yields = 0
    for seed in range(_RUSHES):
        outcome = run_seed(seed, kind=Rush)
        assert not outcome.checker, (
            f"replay it: python -m tests.simulation --rush --seed {seed}\n{outcome}"
        )
        yields += outcome.turns["yields"]
    assert yields > _RUSHES, "votes did split"


def test_holder_that_a_node_has_forgotten_does_not_count_that_node() -> None:
    for seed in range(_FORGOTTEN):
        outcome = run_seed(seed, kind=Forgotten)
        assert not outcome.checker, (
            f"replay it: python -m tests.simulation --forgotten --seed {seed}\n{outcome}"
        )


@pytest.mark.parametrize("kind", [Lingers, LingersOnTheMachine])
def test_leases_that_linger_pass_no_waiter(kind: type[Lingers | LingersOnTheMachine]) -> None:
    for seed in (*range(_LINGERS), _SHORT_BEATS):
        outcome = run_seed(seed, kind=kind)
        assert not outcome.checker, (
            f"replay it: python -m tests.simulation --linger --seed {seed}\n{outcome}"
        )


def test_seeds_hand_leases_out_and_recall_them() -> None:
    handed_out = recalled = 0
    for seed in range(5):
        simulation = LingersOnTheMachine(seed)
        simulation.run()
        handed_out += simulation.recalls.handed_out
        recalled += len(simulation.recalls.heard)
    assert handed_out > 10
    assert recalled > 10


@pytest.mark.parametrize("name", one_of_each(ALL_VARIANTS))
def test_broken_variant_is_caught_by_its_checker(name: str) -> None:
    assert_caught(ALL_VARIANTS[name], _SEARCH_ONCE if name in ONCE_VARIANTS else _SEARCH)


@pytest.mark.parametrize(
    ("seed", "kind"),
    [
        (3, Simulation),
        (20, Simulation),
        (41, Simulation),
        (3, QuorumSimulation),
        (3, Rush),
        (3, FailoverSimulation),
        (3, MachineSimulation),
    ],
)
def test_seed_replays_exactly(seed: int, kind: type[Simulation]) -> None:
    first, second = run_seed(seed, kind=kind), run_seed(seed, kind=kind)
    assert first.schedule == second.schedule


def test_seed_replays_in_another_process() -> None:
    command = [sys.executable, "-m", "tests.simulation", "--seed", "3"]
    root = Path(__file__).parents[2]
    for hashes in ("1", "2"):  # the order of sets of strings
        environment = os.environ | {"PYTHONHASHSEED": hashes}
        ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout.strip() == str(run_seed(3)).strip()


def test_messages_come_together_each_connection_in_its_order() -> None:
    orders = set()
    for seed in range(20):
        world, read = World(seed), list[tuple[str, int, float]]()
        process = Process(world, "p")
        process.reads_every = 0.01
        for late, (connection, message) in enumerate([("a", 1), ("b", 1), ("a", 2), ("b", 2)]):

            def take(connection: str = connection, message: int = message) -> None:
                read.append((connection, message, world.time))  # noqa: B023

            world.at(0.001 * late, process.deliver, take, connection)
        world.run_until(0.02)
        assert len({moment for _, _, moment in read}) == 1, "in one turn"
        for connection in "ab":
            assert [m for c, m, _ in read if c == connection] == [1, 2]
        orders.add("".join(c for c, _, _ in read))
        process.bury()
    assert orders == {"aabb", "bbaa"}


def test_hints_are_heard() -> None:
    heard = 0
    for seed in range(5):
        simulation = MachineSimulation(seed)
        simulation.run()
        assert simulation.hints is not None
        heard += simulation.hints.heard
    assert heard > 20


def test_schedule_tells_what_happened() -> None:
    outcome = run_seed(0)
    assert outcome.grants > 0
    text = str(outcome)
    assert "Style(" in text
    assert "server: acquire" in text
    assert "fault: " in text


def test_break_meets_the_end_of_a_success() -> None:
    """So it does not count as on record again when the server's clock is set back."""
    simulation = MachineSimulation(0)
    assert simulation.onces is not None
    server: Any = simulation.server
    checkers, call = simulation.onces.checkers, Call("break", Key("aiodlock", "once", "o0"))
    call.options = {"remember": 0, "retention": 1000}
    ledger = checkers.ledgers[call.base] = Ledger(now=Success("a", b"", server.now_ms() - 1))

    server.run(None, call)

    assert ledger.now is None


def test_answer_to_an_extension_that_was_given_up_is_not_counted_on() -> None:
    """It took longer than what was left of the lease when it was sent: a later one is asked for."""
    simulation = MachineSimulation(0)
    checkers, process = simulation.checkers, Process(simulation.world, "p9")
    for id in ("given up", "given up as it came", "taken"):
        call: Any = Call("extend", Key("aiodlock", "lock", "n0"), id)
        if id == "given up":
            checkers.on_given_up(id)
        checkers.on_reply(process, call, 10.0, [b"held", 1, 1200])
        if id == "given up as it came":
            checkers.on_given_up(id)
        assert checkers.at_most[id] > 11.0
    assert list(checkers.at_least) == ["taken"]
    process.bury()


def test_one_seed_of_four_is_long_and_so_are_broken_variants() -> None:
    for seed in range(4, 8):
        stock, broken = MachineSimulation(seed), MachineSimulation(seed, lambda _: None)
        assert stock.chaos_ends == broken.chaos_ends * (1.0 if seed % 4 == 0 else 0.5)
