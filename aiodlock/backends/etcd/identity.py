"""Which cluster a client knows, and how much of its history it has seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from .._identity import Known
from . import messages as m


@dataclass(frozen=True, slots=True)
class Seen:
    """A cluster at a moment. ``floor``: the revision that was known when it was asked, which it must
    have."""

    cluster: int
    revision: int
    floor: int = 0

    def conflict(self, known: Self) -> str:
        """Say why this is another cluster, or an older state of it."""
        if self.cluster != known.cluster:
            return f"cluster id {self.cluster:x}, known is {known.cluster:x}"
        if self.revision < self.floor:
            return f"revision {self.revision}, known is {self.floor}"
        return ""

    def after(self, known: Self) -> Self:
        """Return the newer one of both."""
        return replace(self, revision=max(self.revision, known.revision))


class Acquaintance(Known[Seen]):
    """What a client knows.

    Mutable state besides: ``revision`` (the largest that an answer had), ``on_set_back`` (called with the
    revision when another cluster, or an older state, is believed from now on).
    """

    def __init__(self, described: str, *, silence: float, may_hold: Callable[[], bool]) -> None:
        super().__init__(described, silence=silence, may_hold=may_hold)
        self.revision: int = 0
        self.on_set_back: Callable[[int], object] = lambda _: None

    def follow(self, dead: Self) -> None:
        super().follow(dead)
        self.revision = dead.revision

    def look_at(self, header: m.Header, floor: int, where: str) -> None:
        """Compare an answer with what is known; raise OtherStore if it is not this client's cluster.

        :param floor: what was known when it was asked for; 0 if it need not be newer.
        """
        before = self.value
        # It grows, unless another store was believed: what was asked for before is an answer of that one.
        seen = Seen(header.cluster_id, header.revision, min(floor, self.revision))
        if self.meet(seen, where) and before is not None:
            self.revision = seen.revision
            self.on_set_back(seen.revision if seen.cluster == before.cluster else 0)
        self.revision = max(self.revision, seen.revision)

    def compare(self, header: m.Header, where: str) -> None:
        """Raise OtherStore if an answer of any kind is another cluster's."""
        if self.value is not None and header.cluster_id != self.value.cluster:
            self.look_at(header, 0, where)

    def saw(self, revision: int) -> None:
        """The known cluster has answered a read or a write."""
        self.revision = max(self.revision, revision)
        self.heard()
