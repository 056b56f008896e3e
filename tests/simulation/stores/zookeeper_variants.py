"""Broken clients of ZooKeeper, in the simulation only: proof that the checkers see what they are for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiodlock._model import Left
from aiodlock.backends.zookeeper import jute, queue
from aiodlock.backends.zookeeper.blockers import Blockers
from aiodlock.backends.zookeeper.connection import Answer
from aiodlock.backends.zookeeper.leaving import Leaving
from aiodlock.backends.zookeeper.lifetime import Lifetime
from aiodlock.backends.zookeeper.node import QueueNode
from aiodlock.backends.zookeeper.place import ZooKeeperPlace
from aiodlock.backends.zookeeper.queue import Entry, Holds, Queue
from aiodlock.backends.zookeeper.waiting import Waiter
from aiodlock.backends.zookeeper.watches import Watches

from ..scenario import Simulation
from ..variants import Prepare, Variant
from .zookeeper import ZooKeeperScene


def _patched(target: object, name: str, value: object) -> Prepare:
    def prepare(simulation: Simulation) -> None:
        simulation.patch(target, name, value)

    return prepare


def _lives_since_each_write(self: Lifetime, sent: float, answered: float) -> None:
    """A session counts from the last write that was answered."""
    self._lives_since(sent)


def _lives_since_the_write_before(self: Lifetime, sent: float, answered: float) -> None:
    """Two writes, whatever the leader has heard meanwhile."""
    if self._attached is not None:
        self._lives_since(self._attached)
        self._attached = None
    if self._heard:
        self._lives_since(self._heard[-1][0])
    self._heard.append((sent, answered))


def _drop_events(self: Watches, event: jute.Event) -> None:
    self._data.pop(event.path, None)


def _readers_pass(entries: Queue, seat: int, mine: Entry, followed: bool) -> Any:
    """A shared request asks for the last exclusive one that holds, not for those that wait."""
    if mine.mode == "s" and seat and entries[0].mode == "s":
        return Holds(followed)
    return _STANDING_ALONE(entries, seat, mine, followed)


_STANDING_ALONE = queue._standing_alone


def _skips_one(entries: Queue, seat: int, mine: Entry, followed: bool) -> Any:
    """The nearest that conflicts is looked for from the one behind the last on."""
    return _STANDING_ALONE(entries, max(0, seat - 1), mine, followed)


async def _leaves_once(
    self: QueueNode,
    node: str,
    then: Callable[[asyncio.Future[Answer[list[object]]]], object],
) -> None:
    """A deletion that is not answered counts as done."""
    deleting = self.session.transact(self.deletion(node))
    deleting.add_done_callback(then)
    await asyncio.wait([deleting])


async def _finds_nothing(self: QueueNode) -> None:
    """After a lost answer there is nothing to delete."""


def _no_receipt(self: QueueNode, *, queue: bool = False) -> tuple[Any, ...]:
    calls = _CREATION(self, queue=queue)
    path = f"{self._queues.root}/ids/{self.id}.{len(calls)}{id(calls)}"
    return jute.create(path, b"", jute.EPHEMERAL, self._queues.acl), *calls[1:]


_CREATION = QueueNode.creation


def _over_is_not_told(self: ZooKeeperPlace) -> None:
    self._queues.live.discard(self._node.id)


def _always_has_time(self: ZooKeeperPlace) -> bool:
    return True


def _holds_whoever_was_in_front(self: Waiter, held_until: int) -> None:
    """What stood in front has gone, whether it had held or not."""
    if self._waits and not self._node.is_over():
        self._turn(False)


def _follows_nobody(self: Blockers, ahead: Any) -> None:
    self._ahead = ahead


def _token_is_the_number(self: ZooKeeperPlace, followed: bool) -> None:
    _HOLD(self, followed)
    assert self._node.path is not None
    self.token = int(self._node.path.rpartition(":")[2]) + 1


_HOLD = ZooKeeperPlace._hold


async def _gives_up_leaving(self: Leaving, *args: Any, **options: Any) -> Left:
    return Left("released")


ZOOKEEPER_VARIANTS = {
    "zookeeper: session counts from each write": Variant(
        _patched(Lifetime, "committed", _lives_since_each_write),
        ("honesty", "exclusion"),
        kind=ZooKeeperScene,
    ),
    "zookeeper: session counts from the write before": Variant(
        _patched(Lifetime, "committed", _lives_since_the_write_before),
        ("honesty", "exclusion"),
        kind=ZooKeeperScene,
    ),
    "zookeeper: events are dropped": Variant(
        _patched(Watches, "on_event", _drop_events),
        ("idle", "liveness"),
        kind=ZooKeeperScene,
    ),
    "zookeeper: readers pass writers that wait": Variant(
        _patched(queue, "_standing_alone", _readers_pass),
        ("fairness", "exclusion"),
        kind=ZooKeeperScene,
    ),
    "zookeeper: the nearest predecessor is skipped": Variant(
        _patched(queue, "_standing_alone", _skips_one),
        ("fairness", "exclusion"),
        kind=ZooKeeperScene,
    ),
    "zookeeper: a deletion is not repeated": Variant(
        _patched(QueueNode, "delete", _leaves_once),
        ("liveness", "ghost", "idle"),
        kind=ZooKeeperScene,
    ),
    "zookeeper: what a lost answer made is not looked for": Variant(
        _patched(QueueNode, "find", _finds_nothing),
        ("liveness", "ghost", "idle"),
        kind=ZooKeeperScene,
    ),
    "zookeeper: nobody is told that the session is over": Variant(
        _patched(ZooKeeperPlace, "on_over", _over_is_not_told),
        ("honesty", "exclusion", "liveness", "failure"),
        kind=ZooKeeperScene,
        seed=22,
    ),
    "zookeeper: holds whoever was in front": Variant(
        _patched(Waiter, "_on_ahead_gone", _holds_whoever_was_in_front),
        ("honesty", "fairness", "exclusion", "token"),
        kind=ZooKeeperScene,
    ),
    "zookeeper: nobody tells the one behind": Variant(
        _patched(Blockers, "follow", _follows_nobody),
        ("idle", "liveness"),
        kind=ZooKeeperScene,
    ),
    "zookeeper: the token is the node's number": Variant(
        _patched(ZooKeeperPlace, "_hold", _token_is_the_number),
        ("token", "store"),
        kind=ZooKeeperScene,
    ),
    "zookeeper: leaves are not sent": Variant(
        _patched(Leaving, "delete", _gives_up_leaving),
        ("idle", "liveness", "ghost", "honesty"),
        kind=ZooKeeperScene,
    ),
}
