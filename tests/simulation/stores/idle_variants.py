"""Broken clients that show when nobody uses them: proof that the world of idle clients sees them."""

from __future__ import annotations

from aiodlock.backends._identity import IdentityT, Known
from aiodlock.backends.redis import dialing
from aiodlock.backends.zookeeper import session

from ..scenario import Simulation
from ..variants import Prepare, Variant
from .idle import IDLE


def _patched(target: object, name: str, value: object) -> Prepare:
    def prepare(simulation: Simulation) -> None:
        simulation.patch(target, name, value)

    return prepare


def _not_heard(self: Known[IdentityT]) -> None:
    """Silence begins with the last question, not with the last connection."""


def _tells_each_time(self: Known[IdentityT], seen: IdentityT, where: str) -> bool:
    self._told.clear()
    return _MEET(self, seen, where)


_MEET = Known.meet


def _in_each_world(
    name: str, prepare: Prepare, caught_by: tuple[str, ...], stores: tuple[str, ...] = tuple(IDLE)
) -> dict[str, Variant]:
    return {
        f"idle {store}: {name}": Variant(prepare, caught_by, kind=IDLE[store]) for store in stores
    }


IDLE_VARIANTS: dict[str, Variant] = {
    **_in_each_world(
        "whoever answers is believed",
        _patched(Known, "may_be_replaced", property(lambda self: True)),
        ("stranger", "honesty"),
    ),
    **_in_each_world(
        "another store is never believed",
        _patched(Known, "may_be_replaced", property(lambda self: False)),
        ("liveness", "leak"),
    ),
    **_in_each_world(
        "a store that is asked nothing counts as silent",
        _patched(Known, "heard", _not_heard),
        ("stranger",),
    ),
    **_in_each_world("each meeting is logged", _patched(Known, "meet", _tells_each_time), ("log",)),
    **_in_each_world(
        "servers are dialled as if a session lived",
        _patched(session, "_LONGEST_PAUSE", 0.1),
        ("storm",),
        ("zookeeper",),
    ),
    **_in_each_world(
        "nodes are dialled without a pause",
        _patched(dialing, "_LONGEST_PAUSE", 0.05),
        ("storm",),
        ("cluster",),
    ),
}
