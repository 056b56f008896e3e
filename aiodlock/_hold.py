"""What tasks have of a granted request: leases that are not released, and bodies that rely on them."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

from ._scope import BodyScope


class Hold:
    """The part of a request that leases need.

    Mutable state: ``handles`` (serials of the leases not released; ``serial`` is the last), ``dropped``
    (those of them whose ``Lease`` nobody references any more), ``armed`` (what cancels the body, per task
    that is in a block), ``watchers`` (futures of those who wait for the loss), ``on_task_end`` (watches for
    the end of the task while there are dropped handles), ``scope`` (what cancelled the body of a lease that
    lingers, for the next one of the same task). ``task`` and ``task_id`` tell whose it is.
    """

    __slots__ = (
        "__weakref__",
        "armed",
        "dropped",
        "handles",
        "on_task_end",
        "scope",
        "serial",
        "task",
        "task_id",
        "watchers",
    )

    task: weakref.ref[asyncio.Task[Any]] | None
    task_id: int
    scope: BodyScope | None

    def __init__(self, task: asyncio.Task[Any] | None) -> None:
        self.armed: dict[asyncio.Task[Any], BodyScope] | None = None
        self.watchers: list[asyncio.Future[None]] | None = None
        self.handles: tuple[int, ...] = ()
        self.dropped: tuple[int, ...] = ()
        self.on_task_end: Callable[[asyncio.Task[Any]], None] | None = None
        self.serial: int = 0
        self.belongs_to(task)

    def belongs_to(self, task: asyncio.Task[Any] | None) -> None:
        """The task whose it is; None: it belongs to its ``Lease``."""
        self.scope = None
        # id(task) is reused after a task is gone: the reference tells.
        self.task = weakref.ref(task) if task is not None else None
        self.task_id = id(task)

    def end_handle(self, serial: int) -> bool:
        """One acquisition ends; return whether it was the last."""
        if self.handles == (serial,):  # as nearly always
            self.handles = ()
        else:
            assert serial in self.handles
            self.handles = tuple(handle for handle in self.handles if handle != serial)
        if self.dropped:
            self.dropped = tuple(dropped for dropped in self.dropped if dropped != serial)
        if not self.handles:
            return True
        self.one_ended()
        return False

    def one_ended(self) -> None:
        """One acquisition has ended, and others have not."""
        self.wake_watchers()

    @property
    def is_dropped(self) -> bool:
        """Whether nobody references any of its leases."""
        return len(self.dropped) == len(self.handles)

    def add_watcher(self, watcher: asyncio.Future[None]) -> None:
        """Have the future resolved when there is something to see."""
        self.watchers = [known for known in self.watchers or () if not known.done()]
        self.watchers.append(watcher)

    def forget_watchers(self) -> None:
        """Nobody waits for the loss any more."""
        self.watchers = None

    def wake_watchers(self) -> None:
        """Let those who wait for the loss look again."""
        for watcher in self.watchers or ():
            if not watcher.done():
                watcher.set_result(None)

    def forget_task_end(self) -> None:
        """Watch no longer for the end of the task."""
        if self.on_task_end is not None and self.task is not None:
            task = self.task()
            if task is not None:
                task.remove_done_callback(self.on_task_end)
            self.on_task_end = None
