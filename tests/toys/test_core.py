"""The core of the contract on two toys: what a new store passes before it has any faults."""

from __future__ import annotations

import pytest

from ..contract.test_blocks import *  # noqa: F403
from ..contract.test_client_life import *  # noqa: F403
from ..contract.test_election import *  # noqa: F403
from ..contract.test_locking import *  # noqa: F403
from ..contract.test_losing import *  # noqa: F403
from ..contract.test_multilock import *  # noqa: F403
from ..contract.test_sequencer import *  # noqa: F403
from ..contract.test_shared import *  # noqa: F403

#: Not that of one of these modules: which stores it runs on.
pytestmark: list[object] = []

#: What these toys leave out. Both: prefixes, keys that can be looked at, and deleting all there is.
_NOT_HERE = (
    "test_free_name_leaves_only_its_token",
    "test_prefixes_are_separate_worlds",
    "test_loss_found_on_release_is_told",
    "test_body_whose_release_finds_the_lease_lost_is_cancelled_at_its_next_await",
    "test_exception_of_a_release_that_finds_the_lease_lost_comes_out_of_the_body",
)
#: With a shared lease: one token for all holds of an owner, remaining times of others, a waiter's lease
#: that is shorter than its holder's, and a keeper.
_NOT_WITH_A_LEASE = (
    "test_extending_by_hand_again_and_again_takes_no_memory",
    "test_named_owner_is_one_over_tasks",
    "test_named_owner_is_one_over_clients_and_counted_on_the_server",
    "test_inspect_tells_holders_and_waiters",
    "test_granted_waiter_lives_longer_than_its_ttl",
    "test_new_ttl_holds_from_then_on",
    "test_what_is_taken_is_extended_while_the_rest_is_waited_for",
    "test_abandoned_head_costs_one_waiter_ttl",
    "test_sequencer_that_no_lease_made_is_not_valid",
)


@pytest.fixture(autouse=True)
def _left_out(request: pytest.FixtureRequest) -> None:
    name = request.node.originalname
    if name in _NOT_HERE or ("toy-lease" in request.node.name and name in _NOT_WITH_A_LEASE):
        pytest.skip("not a part of the core")
