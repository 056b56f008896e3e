"""What the public names stand on: a client over all its processes, used and closed in each for itself."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Generic, NoReturn, TypeVar

from .. import _client as core
from .. import _process
from .._errors import ClientClosed
from ._holds import here
from ._portal import check_no_loop, portal, runs_a_loop
from ._running import Running

_T = TypeVar("_T")

#: Reentrant: a signal handler or a finalizer may come in at any step of the thread that has it.
_changing = threading.RLock()


def _after_fork_in_child() -> None:
    global _changing
    _changing = threading.RLock()  # another thread of the parent may have had it


_process.after_fork(_after_fork_in_child)


class Life:
    """Locks, leases and the client itself keep it: once none of them is referenced, it is closed.

    Mutable state: ``_runnings`` (at most one, from its process's first use to its closing; a dict, because
    ``setdefault`` is one step), ``_entered``, ``_closed``.

    :param template: checks what it is given; is never entered, only copied.
    """

    def __init__(self, template: core.Client) -> None:
        self.template: core.Client = template
        self._described = core.core_of(template).described
        self._pid = os.getpid()
        self._runnings: dict[int, Running] = {}
        self._entered = False
        self._closed = False

    def __repr__(self) -> str:
        running = self._runnings.get(os.getpid())
        state = "closed"
        if not self._closed:
            is_open = running is not None and running.is_open
            state = "open" if is_open else "not connected yet"
        return f"<aiodlock.sync.Client {self._described} {state}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be copied or pickled: share it between threads, and make one in each "
            "process, such as a global of a module"
        )

    def enter(self) -> None:
        """Connect now, also when it was closed."""
        check_no_loop()
        with _changing:
            if self._entered:
                raise RuntimeError(
                    f"{self!r} is entered already: make another Client, or share this one"
                )
            self._entered, self._closed = True, False
        try:
            running = self.use()
            running.portal.call(running.open)
        except BaseException:
            self._entered = False
            raise

    def close(self) -> None:
        """As ``Client.close`` says."""
        entered = tuple(here().blocks)  # another thread may leave one meanwhile
        with _changing:
            running = self._runnings.pop(os.getpid(), None)
            self._closed, self._entered = True, False
        if running is None or running.portal.ended:
            return
        bodies = [hold for hold in entered if hold.running is running]

        async def close() -> None:
            for hold in bodies:
                hold.disarm()  # this thread cannot end them meanwhile
            await running.close()

        if runs_a_loop():
            running.portal.start_soon(close)
            check_no_loop()
        running.portal.call(close)

    def __del__(self) -> None:
        running = getattr(self, "_runnings", {}).get(os.getpid())
        if running is not None and not running.portal.ended:
            running.portal.start_soon(running.close)

    def use(self, name: str | None = None) -> Running:
        """Return what runs in this process; the first call makes it."""
        running = self._runnings.get(_process.look())
        if running is not None and not self._closed and not running.portal.ended:
            return running
        check_no_loop()
        through = portal()
        with _changing:
            if self._closed:
                raise ClientClosed(
                    f"{'' if name is None else f'{name!r}: '}{self!r} was closed: enter it again with "
                    "'with client:', or make another",
                    name=name,
                )
            running = self._runnings.get(os.getpid())
            if running is not None and running.portal is not through:
                self._runnings.pop(os.getpid(), None)  # the thread that it ran in was lost
            check_memory(self._described, self._pid)
            # With the same hooks, also those that are added from now on.
            return self._runnings.setdefault(
                os.getpid(), Running(copy.copy(self.template), through)
            )

    def ask(self, call: Callable[[core.Client], Coroutine[Any, Any, _T]]) -> _T:
        """Run a coroutine of the client for tasks in the loop's thread."""
        running = self.use()
        return running.call(lambda: call(running.inner))

    def iterate(self, items: Callable[[core.Client], AsyncIterator[_T]]) -> Iterator[_T]:
        """Return an iterator that makes one call into the loop per item."""
        running = self.use()
        return _iterate(self, running, items(running.inner))


def check_memory(described: str, pid: int) -> None:
    """Refuse a store in the memory of another process: the child has only a copy."""
    if described.startswith("memory:") and pid != os.getpid():
        raise RuntimeError(
            f"{described} is in the memory of process {pid}: this one was forked from it, and has a copy "
            "that excludes nobody; use a store that both reach"
        )


class _Ended(Generic[_T]):
    """Stands for the end: StopAsyncIteration cannot leave a coroutine as a result."""


def _iterate(_: Life, running: Running, items: AsyncIterator[_T]) -> Iterator[_T]:
    """Yield what the asynchronous iterator yields; dropped or closed, it is closed in the background."""

    async def following() -> _T | _Ended[_T]:
        try:
            return await anext(items)
        except StopAsyncIteration:
            return _Ended()

    async def close() -> None:
        aclose = getattr(items, "aclose", None)
        if aclose is not None:
            await aclose()

    try:
        while not isinstance(item := running.call(following), _Ended):
            yield item
    finally:
        running.portal.start_soon(close)
