"""Broken clients of etcd, in the simulation only: proof that the checkers see what they are for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from aiodlock._clock import now
from aiodlock._errors import BackendError
from aiodlock._model import End, Left
from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd import room, transactions, watching
from aiodlock.backends.etcd.ending import Ending
from aiodlock.backends.etcd.leases import Leases, SharedLease
from aiodlock.backends.etcd.login import Login
from aiodlock.backends.etcd.recipe import Queue, Record
from aiodlock.backends.etcd.room import Room
from aiodlock.backends.etcd.watching import Watch

from ..scenario import Simulation
from ..variants import Prepare, Variant
from .etcd import EtcdScene


def _patched(target: object, name: str, value: object) -> Prepare:
    def prepare(simulation: Simulation) -> None:
        simulation.patch(target, name, value)

    return prepare


def _takes_it_at_once(*args: Any, **options: Any) -> m.TxnRequest:
    request = _ENTER(*args, **options)
    return replace(request, compare=[])


_ENTER = transactions.enter


def _readers_pass(self: Queue) -> Iterator[Record]:
    """All shared requests hold when the first one does."""
    held = list(_HOLDERS(self))
    yield from held
    if held and all(record.mode == "shared" and not record.limit for record in held):
        for record in self.requests.values():
            if record.mode == "shared" and record not in held:
                yield record


_HOLDERS = Queue.holders


def _skips_one_change(watch: Watch) -> m.WatchRequest:
    request = _CREATE(watch)
    assert request.create_request is not None
    request.create_request.start_revision += 1
    return request


_CREATE = watching._create


def _begins_with_now(watch: Watch) -> m.WatchRequest:
    """After a cut a watch tells what comes from then on."""
    request = _CREATE(watch)
    assert request.create_request is not None
    request.create_request.start_revision = 0
    return request


async def _leaves_once(self: Ending, end: End, **options: Any) -> Left:
    try:
        return await _LEAVE(self, end, **options)
    except BackendError:
        return Left("released")


_LEAVE = Ending.leave


def _token_is_the_last_write(self: Queue, record: Record, holders: list[Record]) -> Any:
    return replace(_TURN(self, record, holders), order=record.written)


_TURN = Queue.turn_among


def _ends_unheard(self: Leases, lease: SharedLease) -> None:
    """A lease has ended at the cluster, and is renewed on."""
    lease.confirm(now())


def _looks_at_nobody(self: Room) -> None:
    pass


def _counts_from_the_answer(self: SharedLease, sent: float) -> None:
    """A renewal counts from when it was answered."""
    _CONFIRM(self, now())


_CONFIRM = SharedLease.confirm


def _keeps_its_token(self: Login, token: str | None) -> None:
    """A user's token counts for ever."""


def _misses_it_calmly(self: Room) -> None:
    """What was forgotten before it was told is not read."""


#: Where the search for what is caught rarely begins.
_BEGIN = {
    "a leave is sent once": 519,
    "a lease that has ended is believed in": 12,
    "a token that has ended is kept": 19,
    "a compacted watch is given up": 66,
}

ETCD_VARIANTS = {
    f"etcd: {name}": Variant(prepare, caught_by, seed=_BEGIN.get(name, 0), kind=EtcdScene)
    for name, prepare, caught_by in (
        (
            "a name is taken whoever has it",
            _patched(transactions, "enter", _takes_it_at_once),
            ("fairness", "exclusion", "honesty"),
        ),
        (
            "readers pass writers that wait",
            _patched(Queue, "holders", _readers_pass),
            ("fairness", "exclusion"),
        ),
        (
            "a watch skips a change",
            _patched(watching, "_create", _skips_one_change),
            ("idle", "liveness"),
        ),
        (
            "a watch begins with what comes",
            _patched(watching, "_create", _begins_with_now),
            ("idle", "liveness"),
        ),
        (
            "a leave is sent once",
            _patched(Ending, "leave", _leaves_once),
            ("idle", "liveness", "ghost", "fairness"),
        ),
        (
            "the token is the last write",
            _patched(Queue, "turn_among", _token_is_the_last_write),
            ("token", "store", "fairness"),
        ),
        (
            "a lease that has ended is believed in",
            _patched(Leases, "ended", _ends_unheard),
            ("honesty", "exclusion", "fairness", "liveness"),
        ),
        (
            "a renewal counts from its answer",
            _patched(SharedLease, "confirm", _counts_from_the_answer),
            ("honesty", "exclusion"),
        ),
        (
            "a token that has ended is kept",
            _patched(Login, "drop", _keeps_its_token),
            ("liveness", "idle", "leak", "ghost", "storm"),
        ),
        (
            "a compacted watch is given up",
            _patched(Room, "_missed", _misses_it_calmly),
            ("idle", "liveness", "leak"),
        ),
        ("nobody looks at a name", _patched(room.Room, "_look", _looks_at_nobody), ("idle",)),
    )
}
