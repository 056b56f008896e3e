"""Two never hold: a follower that is cut off goes on answering, while its leader ends the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..zookeeper import ZooKeeperEnsemble, installed
from .zookeeper_rounds import INIT_LIMIT, SYNC_LIMIT, TICK, rounds

pytestmark = pytest.mark.skipif(not installed(), reason="no ZooKeeper")

#: Of each kind. ``python -m tests.topology.zookeeper_rounds`` plays a hundred.
ROUNDS = 3


@pytest.fixture(scope="module")
def ensemble() -> Iterator[ZooKeeperEnsemble]:
    with ZooKeeperEnsemble(tick=TICK, sync_limit=SYNC_LIMIT, init_limit=INIT_LIMIT) as ensemble:
        yield ensemble


async def test_holder_behind_a_follower_that_is_cut_off_loses_before_the_next_one_holds(
    ensemble: ZooKeeperEnsemble,
) -> None:
    played = await rounds(ensemble, ["ack", "random"] * ROUNDS, print)
    assert min(one.margin for one in played) > 0.0
    # The same rounds show that a follower's answer to a ping is no promise.
    assert min(one.naive["ping sent + timeout"] for one in played) < 0.0
