"""Hand-overs of a quorum that ask nobody, breaks that arrive at one node first, and variants of both."""

from __future__ import annotations

import gc

import pytest

from .catching import assert_caught, one_of_each
from .handover import BrokenHandOver, HandOver
from .quorum import QuorumSimulation
from .quorum_variants import QUORUM_VARIANTS, broken_at_hand_overs
from .run import run_seed

_SEEDS = 8
#: A waiter that has a vote gives it back and asks again in its first moment; one keeps a vote, with a token
#: of its own, until it is handed the others.
_OTHERS_ASK_TOO = (918212, 918286, 918325)
#: A variant is caught within so many seeds.
_SEARCH = 30


@pytest.fixture(autouse=True)
def collected() -> None:
    gc.collect()


def test_who_waits_at_all_nodes_is_handed_the_name_without_a_question() -> None:
    handed_over = 0
    for seed in (*range(_SEEDS), *_OTHERS_ASK_TOO):
        outcome = run_seed(seed, kind=HandOver)
        assert not outcome.checker, (
            f"replay it: python -m tests.simulation --handover --seed {seed}\n{outcome}"
        )
        handed_over += outcome.turns["handed over"]
    assert handed_over > 10 * _SEEDS


def test_nobody_holds_with_what_an_operator_broke_at_another_node() -> None:
    for seed in range(_SEEDS):
        outcome = run_seed(seed, broken_at_hand_overs, QuorumSimulation)
        assert not outcome.checker, str(outcome)


@pytest.mark.parametrize(
    "seed", [3, pytest.param(6, marks=pytest.mark.long), pytest.param(10, marks=pytest.mark.long)]
)
def test_waiter_asks_a_node_one_thing_at_a_time_and_not_in_a_hurry_whatever_is_broken(
    seed: int,
) -> None:
    outcome = run_seed(seed, kind=BrokenHandOver)
    assert not outcome.checker, str(outcome)


@pytest.mark.parametrize("name", one_of_each(QUORUM_VARIANTS))
def test_broken_quorum_is_caught_by_its_checker(name: str) -> None:
    assert_caught(QUORUM_VARIANTS[name], _SEARCH)
