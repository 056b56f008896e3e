"""Which answers are of the cluster that a client knows."""

from __future__ import annotations

import logging

import pytest

from aiodlock.backends._identity import OtherStore
from aiodlock.backends.etcd.link import Link, Seen, _Way
from aiodlock.backends.etcd.sources import read_url


def link_that_knows(revision: int, *, silence: float) -> tuple[Link, _Way]:
    access, described = read_url("etcd://one")
    link, way = Link(access, described, silence=silence), _Way("one", 0.0)
    link._meet(Seen(7, revision), way)
    return link, way


async def test_answer_that_was_asked_for_before_another_store_was_believed_is_of_that_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two were under way. The first is believed; the second must not be refused, and told, once more."""
    link, way = link_that_knows(1004, silence=0.0)
    set_back: list[int] = []
    link.on_set_back = set_back.append
    link._meet(Seen(7, 1, floor=1004), way)
    link._meet(Seen(7, 1, floor=1004), way)
    assert [getattr(record, "event", "") for record in caplog.records] == ["store_replaced"]
    assert caplog.records[0].levelno == logging.WARNING
    assert set_back == [1]


async def test_answer_with_less_than_was_known_when_it_was_asked_for_is_refused() -> None:
    link, way = link_that_knows(1004, silence=60.0)
    with pytest.raises(OtherStore, match="revision 1003, known is 1004"):
        link._meet(Seen(7, 1003, floor=1004), way)
    link._meet(Seen(7, 1003, floor=1000), way)  # it was overtaken by a newer one
