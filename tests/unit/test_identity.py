"""A session knows its store again, and takes no other one for it."""

from __future__ import annotations

import dataclasses
import logging
from typing import Self

import pytest

from aiodlock.backends import _identity
from aiodlock.backends._identity import Known, OtherStore


@dataclasses.dataclass(frozen=True)
class Store:
    id: str
    position: int = 0

    def conflict(self, known: Self) -> str:
        if self.id != known.id:
            return f"id {self.id}, known {known.id}"
        if self.position < known.position:
            return f"position {self.position}, known {known.position}"
        return ""

    def after(self, known: Self) -> Self:
        return dataclasses.replace(self, position=max(self.position, known.position))


class Scene:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moment = 100.0
        self.holds = False
        monkeypatch.setattr(_identity, "now", lambda: self.moment)
        self.known: Known[Store] = Known("the store", silence=30.0, may_hold=lambda: self.holds)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_store_that_is_met_first_is_believed(scene: Scene) -> None:
    scene.known.meet(Store("a"), "h:1")
    assert scene.known.value == Store("a")


def test_another_store_is_refused_and_told_once_for_each_place(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.known.meet(Store("a"), "h:1")
    with caplog.at_level(logging.WARNING, "aiodlock"):
        for where in ("h:2", "h:2", "h:3"):
            with pytest.raises(OtherStore, match=where):
                scene.known.meet(Store("b"), where)
    assert [record.event for record in caplog.records] == ["other_store"] * 2  # type: ignore[attr-defined]


def test_older_state_of_the_same_store_is_refused(scene: Scene) -> None:
    scene.known.meet(Store("a", 7), "h:1")
    with pytest.raises(OtherStore):
        scene.known.meet(Store("a", 6), "h:2")
    scene.known.meet(Store("a", 9), "h:2")
    with pytest.raises(OtherStore):
        scene.known.meet(Store("a", 8), "h:1")


@pytest.mark.parametrize(("silent", "holds"), [(29.0, False), (31.0, True)])
def test_another_store_is_not_believed_too_early(scene: Scene, silent: float, holds: bool) -> None:
    scene.known.meet(Store("a"), "h:1")
    scene.moment += silent
    scene.holds = holds
    with pytest.raises(OtherStore):
        scene.known.meet(Store("b"), "h:2")


def test_another_store_is_believed_after_the_silence_and_without_a_lease(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.known.meet(Store("a", 7), "h:1")
    scene.moment += 31.0
    with caplog.at_level(logging.WARNING, "aiodlock"):
        scene.known.meet(Store("b"), "h:2")
    assert scene.known.value == Store("b")
    assert [record.event for record in caplog.records] == ["store_replaced"]  # type: ignore[attr-defined]
    with pytest.raises(OtherStore):
        scene.known.meet(Store("a", 8), "h:1")


def test_answers_of_the_known_store_begin_the_silence_anew(scene: Scene) -> None:
    scene.known.meet(Store("a"), "h:1")
    scene.moment += 20.0
    scene.known.heard()
    scene.moment += 20.0
    with pytest.raises(OtherStore):
        scene.known.meet(Store("b"), "h:2")
