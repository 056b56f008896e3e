"""Which answers are of the cluster that a client knows."""

from __future__ import annotations

import logging

import pytest

from aiodlock.backends._identity import OtherStore
from aiodlock.backends.etcd.identity import Acquaintance
from aiodlock.backends.etcd.messages import Header


def client_that_knows(revision: int, *, silence: float) -> Acquaintance:
    acquaintance = Acquaintance("etcd://one", silence=silence, may_hold=lambda: False)
    acquaintance.look_at(Header(7, revision), 0, "one")
    return acquaintance


async def test_answer_that_was_asked_for_before_another_store_was_believed_is_of_that_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two were under way. The first is believed; the second must not be refused, and told, once more."""
    client = client_that_knows(1004, silence=0.0)
    set_back: list[int] = []
    client.on_set_back = set_back.append
    client.look_at(Header(7, 1), 1004, "one")
    client.look_at(Header(7, 1), 1004, "one")
    assert [getattr(record, "event", "") for record in caplog.records] == ["store_replaced"]
    assert caplog.records[0].levelno == logging.WARNING
    assert set_back == [1]


async def test_answer_with_less_than_was_known_when_it_was_asked_for_is_refused() -> None:
    client = client_that_knows(1004, silence=60.0)
    with pytest.raises(OtherStore, match="revision 1003, known is 1004"):
        client.look_at(Header(7, 1003), 1004, "one")
    client.look_at(Header(7, 1003), 1000, "one")  # it was overtaken by a newer one
