"""Client: locks for threads. Each call is done by an ``aiodlock.Client`` on the portal's loop.

Over 400 lines: half of them are the docstrings that make the reference.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NoReturn, ParamSpec, Self, TypeVar, Unpack

from .. import _client as core
from .. import _lock as core_lock
from .._clock import now
from .._errors import BackendUnavailable, ClientClosed, LockLost
from .._hooks import Hooks
from .._locked import CallTemplate, check_function, check_returned
from .._model import Kind, LockInfo
from .._once import recordable
from .._options import check_timeout
from .._patience import LEAST, soon
from .._request import State
from ._blocks import LOOK_EVERY, here, watch
from ._election import Election
from ._iterate import iterate
from ._lease import Lease
from ._lock import Lock, ReadWriteLock, Semaphore
from ._multilock import MultiLock
from ._once import Once
from ._options import ClientOptions, LockOptions, OnLost, OwnerlessOptions, UnnamedOptions
from ._portal import Portal, TakeBack, check_no_loop, portal
from ._source import SourceLike, asynchronous

_T = TypeVar("_T")
_P = ParamSpec("_P")

#: Seconds for the first call to connect, before its thread asks whether the loop turns.
_CONNECT_WITHIN = 5.0
#: At the end of the process: seconds for waiters to leave. Daemon threads do not end their bodies any more.
_CLOSE_AT_EXIT = 0.5


@dataclass(frozen=True)
class Description:
    """What a lock is, from which each process makes its own on its own client."""

    kind: Literal["write", "read", "semaphore", "once"]
    name: str
    options: dict[str, Any]
    limit: int = 0
    on_lost: Callable[[LockLost], object] | None = field(default=None)

    def make(self, client: core.Client) -> core_lock.Acquirable:
        if self.kind == "semaphore":
            return client.semaphore(self.name, self.limit, **self.options)
        if self.kind == "once":
            return client.once(self.name, **self.options)._lock
        if self.kind == "read":
            return client.rwlock(self.name, **self.options).read
        return client.lock(self.name, **self.options)


class Running:
    """One client in one process, from its first use to its closing.

    Mutable state, all changed in the loop's thread: ``is_open``, ``_opening`` (the task that connects),
    ``_closing``. In any: ``_watching``.
    """

    def __init__(self, inner: core.Client, portal: Portal) -> None:
        self.inner = inner
        self.portal = portal
        self.pid: int = portal.pid
        self.is_open: bool = False
        self._opening: asyncio.Task[None] | None = None
        self._closing = False
        self._watching = False

    def call(
        self, call: Callable[[], Coroutine[Any, Any, _T]], take_back: TakeBack[_T] | None = None
    ) -> _T:
        """Connect if need be, then run the coroutine on the loop and wait for it."""

        async def opened() -> _T:
            if not self.is_open:
                await self.open()
            return await call()

        return self.portal.call(opened, take_back, within=_CONNECT_WITHIN)

    def watch(self) -> None:
        """Look from time to time at what threads hold without a block. From any thread."""
        if not self._watching:
            self._watching = True
            self.portal.call_later(LOOK_EVERY, self._look)

    def _look(self) -> None:
        self._watching = False
        if self.is_open and watch(self):
            self.watch()

    async def open(self) -> None:
        """Connect, once for all threads that need it."""
        if self.is_open:
            return
        if self._closing:
            raise ClientClosed("the client was closed: it does nothing more")
        if self._opening is None or self._opening.done():  # it has failed: try again
            self._opening = asyncio.create_task(self._open(), name="aiodlock.sync: connecting")
            self._opening.add_done_callback(_look_at)
        opening = self._opening
        await asyncio.wait({opening})
        if opening.cancelled():
            raise ClientClosed("the client was closed while it connected")
        error = opening.exception()
        if error is not None:
            # Several threads may wait: each gets an exception of its own.
            fresh = copy.copy(error)
            fresh.__cause__ = error.__cause__
            raise fresh

    async def open_within(self, timeout: float | None) -> float | None:
        """Connect; return what is left of the timeout."""
        if timeout is None:
            await self.open()
            return None
        started, limit = now(), timeout or soon(LEAST)
        try:
            async with asyncio.timeout(limit):
                await self.open()
        except TimeoutError as elapsed:
            raise BackendUnavailable(
                f"{self.inner!r} was not connected within {limit:g} s"
            ) from elapsed
        return max(0.001, timeout - (now() - started)) if timeout else 0.0

    async def _open(self) -> None:
        await self.inner.__aenter__()
        self.is_open = True
        self.portal.at_exit(self, self._close_at_exit)

    async def close(self, bodies: list[Lease]) -> None:
        """Leave the client; ``bodies`` are those that the closing thread is inside of."""
        self._closing = True
        self.portal.closed(self)
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait({self._opening})
        for lease in bodies:
            if lease._core._request.armed:
                lease._core._request.armed.pop(lease._body, None)  # type: ignore[call-overload]
        self.is_open = False
        await self.inner.__aexit__(None, None, None)

    async def _close_at_exit(self) -> None:
        self.inner._close_timeout = _CLOSE_AT_EXIT
        session = self.inner._session
        if session is not None:
            for request in list(session.requests.values()):
                if request.state is State.HELD and not request.armed:
                    session.departure.in_background(request)  # released, not lost
        await self.close([])


#: Reentrant: a signal handler or a finalizer may come in at any step of the thread that has it.
_changing = threading.RLock()


def _after_fork_in_child() -> None:
    global _changing
    _changing = threading.RLock()  # another thread of the parent may have had it


os.register_at_fork(after_in_child=_after_fork_in_child)


class Client:
    """Locks for threads, on the stores of ``aiodlock.Client`` and together with its users.

    Make one per process, for instance as a global of a module: constructing does no I/O. The first call
    connects, within 5 s, or raises ``BackendUnavailable``. A process that is forked later makes its own
    connections on first use, and what the parent holds it does not. The end of the process closes the
    client; ``close()``, or leaving ``with client:``, does it earlier.

    All clients of a process share one background thread, which extends their leases.

    ```python
    from aiodlock import sync

    locks = sync.Client("redis://localhost:6379/0")
    with locks.lock("order:42", timeout=2) as lease:
        print(lease.token)
    ```

    :param source: as of ``aiodlock.Client``; a ``redis.Redis`` is taken too, for its connection
        settings.
    :param options: as of ``aiodlock.Client``.
    :raises TypeError: for input of a wrong type.
    :raises ValueError: for other bad input.
    :raises Unsupported: for what the source cannot do.
    """

    def __init__(self, source: SourceLike, **options: Unpack[ClientOptions]) -> None:
        # Checks what it is given; is never entered, only copied.
        self._template = core.Client(asynchronous(source), **options)
        self._pid = os.getpid()
        # At most one, from its process's first use to its closing. A dict: ``setdefault`` is one step.
        self._runnings: dict[int, Running] = {}
        self._entered = False
        self._closed = False

    def __repr__(self) -> str:
        running = self._runnings.get(os.getpid())
        state = "closed"
        if not self._closed:
            is_open = running is not None and running.is_open
            state = "open" if is_open else "not connected yet"
        return f"<aiodlock.sync.Client {self._template._described} {state}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be copied or pickled: share it between threads, and make one in each "
            "process, such as a global of a module"
        )

    # -- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        check_no_loop()
        with _changing:
            if self._entered:
                raise RuntimeError(
                    f"{self!r} is entered already: make another Client, or share this one"
                )
            self._entered, self._closed = True, False
        try:
            running = self._use()
            running.portal.call(running.open)
        except BaseException:
            self._entered = False
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every wait with ``ClientClosed``, release what is held, disconnect.

        Blocks of other threads that are still open get ``LockLost`` (reason ``closed``) when they are left;
        they are waited for, ``close_timeout`` seconds at most. Closing twice does nothing. Entering the
        client opens it again.

        ```python
        locks.close()  # releases what is held
        ```
        """
        with _changing:
            running = self._runnings.pop(os.getpid(), None)
            self._closed, self._entered = True, False
        if running is None or running.portal.ended:
            return
        bodies = [lease for lease in here().blocks if lease._running is running]
        if asyncio._get_running_loop() is not None:
            running.portal.start_soon(lambda: running.close(bodies))
            check_no_loop()
        running.portal.call(lambda: running.close(bodies))

    def __del__(self) -> None:
        running = getattr(self, "_runnings", {}).get(os.getpid())
        if running is not None and not running.portal.ended:
            running.portal.start_soon(lambda: running.close([]))

    def _use(self, name: str | None = None) -> Running:
        """Return what runs in this process; the first call makes it."""
        running = self._runnings.get(os.getpid())
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
            check_memory(self._template._described, self._pid)
            # With the same hooks, also those that are added from now on.
            return self._runnings.setdefault(
                os.getpid(), Running(copy.copy(self._template), through)
            )

    # -- locks -----------------------------------------------------------------------------------

    def lock(self, name: str, **options: Unpack[LockOptions]) -> Lock:
        """Describe an exclusive lock. No I/O; needs no open client.

        ```python
        with locks.lock("order:42", ttl=10, timeout=5) as lease:
            ...
        ```

        :param name: any text of 1 to 512 bytes of UTF-8.
        :param options: as of ``aiodlock.Client.lock``, but for ``on_lost``: ``"flag"`` (default), or a
            function. It is called with the ``LockLost`` in a thread of its own; what it raises is logged.
        """
        return Lock(self, self._describe("write", name, options))

    def rwlock(self, name: str, **options: Unpack[LockOptions]) -> ReadWriteLock:
        """Describe both modes of a lock; ``.write`` is the same as ``lock(name)``. Options as there.

        ```python
        page = locks.rwlock("page:7")
        with page.read:  # together with other readers
            ...
        with page.write:  # alone
            ...
        ```
        """
        read = Lock(self, self._describe("read", name, options))
        return ReadWriteLock(read, Lock(self, self._describe("write", name, options)))

    def semaphore(
        self, name: str, limit: int, *, resize: bool = False, **options: Unpack[OwnerlessOptions]
    ) -> Semaphore:
        """Describe a lock with ``limit`` holders. Options as of ``lock``, without ``owner``.

        ```python
        with locks.semaphore("mail", limit=3):  # three at a time
            ...
        ```
        """
        return Semaphore(
            self, self._describe("semaphore", name, {**options, "resize": resize}, limit)
        )

    def once(self, name: str, *, keep: float, **options: Unpack[OwnerlessOptions]) -> Once:
        """Describe something to be done once: at most one success on record; see ``aiodlock.Client.once``.

        ```python
        with locks.once("order:42", keep=86400) as once:
            if once.first:
                once.result = "charged"
        print(once.result)
        ```
        """
        return Once(self, self._describe("once", name, {**options, "keep": keep}), keep)

    def once_per(
        self, template: str, *, keep: float, **options: Unpack[OwnerlessOptions]
    ) -> Callable[[Callable[_P, _T]], Callable[_P, _T | str | bytes | None]]:
        """Let each call of a function, or of a method, be done once; see ``aiodlock.Client.once_per``.

        ```python
        @locks.once_per("report:{day}", keep=86400)
        def report(day: str) -> str:
            return "sent"


        report("2026-11-22")
        ```
        """
        parsed = CallTemplate(template)
        self.once("options", keep=keep, **options)  # wrong ones are told when decorating

        def decorate(function: Callable[_P, _T]) -> Callable[_P, _T | str | bytes | None]:
            check_function(function, coroutine=False, instead="aiodlock.Client.once_per")
            name_of = parsed.of(function)

            @functools.wraps(function)
            def once_per(*args: _P.args, **kwargs: _P.kwargs) -> _T | str | bytes | None:
                with self.once(name_of(*args, **kwargs), keep=keep, **options) as once:
                    if not once.first:
                        return once.result
                    result = check_returned(function, function(*args, **kwargs))
                    once.result = recordable(result)
                    return result

            return once_per

        return decorate

    def forget(self, name: str) -> bool:
        """Take the success of ``once`` off the record; return whether there was one.

        ```python
        locks.forget("order:42")
        ```
        """
        running = self._use()
        return running.call(lambda: running.inner.forget(name))

    def election(self, name: str, **options: Unpack[OwnerlessOptions]) -> Election:
        """Describe an election: one leader at a time. Options as of ``lock``, without ``owner``.

        ```python
        with locks.election("scheduler").lead("host-1") as lease:
            ...  # this process leads
        ```
        """
        on_lost, others = _split(dict(options))
        return Election(self, name, others, on_lost)

    def multilock(
        self,
        *names_or_locks: str | Lock,
        timeout: float | None = None,
        **options: Unpack[UnnamedOptions],
    ) -> MultiLock:
        """Describe several locks as one, all or none; see ``MultiLock``.

        ```python
        with locks.multilock("account:1", "account:2") as leases:
            print(leases["account:1"].token)
        ```

        :param names_or_locks: names, which are taken exclusively with ``options``, and locks, which keep
            their mode and options. The ``on_lost`` function of such a lock is called when its own name is
            lost; that of ``options`` when the first of all names is.
        :param timeout: seconds for all together; None for ever, 0 tries each once.
        """
        on_lost, others = _split(dict(options))
        for one in names_or_locks:
            if isinstance(one, Lock) and one._client is not self:
                raise ValueError(f"{one!r} belongs to another client than {self!r}")
        return MultiLock(self, names_or_locks, check_timeout(timeout), others, on_lost)

    def _describe(
        self,
        kind: Literal["write", "read", "semaphore", "once"],
        name: str,
        options: Any,
        limit: int = 0,
    ) -> Description:
        on_lost, others = _split(dict(options))
        return Description(kind, name, others, limit, on_lost)

    def locked(
        self, template: str, **options: Unpack[LockOptions]
    ) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
        """Hold a lock around each call of a function, or of a method.

        The lock's name is filled from the call's arguments, by the names of the parameters, with defaults
        applied. In values, ``%`` and the punctuation of the template are percent-encoded, so two different
        calls never share a name. ``aiodlock.name`` makes the same name.

        ```python
        @locks.locked("order:{order_id}", timeout=2)
        def pay(order_id: int) -> None: ...


        pay(42)
        ```

        :param template: the name, with a parameter of the function in each pair of braces. ``{{`` and
            ``}}`` are braces of the name itself.
        :param options: as of ``lock``.
        :raises TypeError: (when decorating) for an async function and for a generator; (when calling) for a
            value that is not a str, an int or a UUID (a bool is not an int here), and when the function
            returns what would run without the lock: an awaitable, a generator, a context manager.
        :raises ValueError: (when decorating) for a field that is not a parameter, for two fields without a
            separator between them, and for wrong options; (when calling) for a name that is too long.
        """
        parsed = CallTemplate(template)
        self.lock("options", **options)  # wrong ones are told when decorating

        def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
            check_function(function, coroutine=False, instead="aiodlock.Client.locked")
            name_of = parsed.of(function)

            @functools.wraps(function)
            def locked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
                with self.lock(name_of(*args, **kwargs), **options):
                    return check_returned(function, function(*args, **kwargs))

            return locked

        return decorate

    # -- for people ------------------------------------------------------------------------------

    def add_hooks(self, hooks: Hooks) -> None:
        """Let ``hooks`` hear of every request and lease that begins from now on; see ``aiodlock.Hooks``.

        They are called in the background thread, and must return at once.

        ```python
        from aiodlock import sync


        class Slow(sync.Hooks):
            def acquired(self, request, waited):
                if waited > 1:
                    print(f"waited {waited:.1f} s for {request.name}")


        locks.add_hooks(Slow())
        ```
        """
        self._template.add_hooks(hooks)

    def inspect(self, name: str, *, kind: Kind = "lock") -> LockInfo:
        """Return who holds the lock and who waits for it, as of one moment.

        ``kind`` is ``"lock"``, ``"semaphore"`` or ``"once"``: each has names of its own.

        ```python
        info = locks.inspect("order:42")
        print(len(info.holders), "hold it,", len(info.waiters), "wait")
        ```

        :raises BackendUnavailable: when nothing answers within 2 s.
        """
        running = self._use()
        return running.call(lambda: running.inner.inspect(name, kind=kind))

    def locks(self, match: str = "*", *, kind: Kind | None = None) -> Iterator[LockInfo]:
        """Iterate over everything held or waited for whose name matches the glob: all kinds, or one.

        Of kind ``"once"`` also over what is on record.

        ```python
        for info in locks.locks("order:*"):
            print(info.name)
        ```
        """
        running = self._use()
        return iterate(self, running, running.inner.locks(match, kind=kind))

    def break_lock(
        self, name: str, *, kind: Kind = "lock", tokens: Iterable[int] | None = None
    ) -> int:
        """Release all holders by force, or those with these tokens; return their number.

        Waiters stay. Without ``tokens``, lock-delay and ``hold_at_least`` are ignored.

        ```python
        released = locks.break_lock("order:42")
        print(released, "holders have lost it")
        ```
        """
        running = self._use()
        return running.call(lambda: running.inner.break_lock(name, kind=kind, tokens=tokens))

    def check_sequencer(self, sequencer: str) -> bool:
        """Return whether exactly the grant that this string was made from holds at this moment.

        ```python
        with locks.lock("order:42") as lease:
            assert locks.check_sequencer(lease.sequencer)
        ```
        """
        running = self._use()
        return running.call(lambda: running.inner.check_sequencer(sequencer))


def _look_at(opening: asyncio.Task[None]) -> None:
    """Let asyncio log nothing: those who wait are told of the failure."""
    if not opening.cancelled():
        opening.exception()


def check_memory(described: str, pid: int) -> None:
    """Refuse a store in the memory of another process: the child has only a copy."""
    if described.startswith("memory:") and pid != os.getpid():
        raise RuntimeError(
            f"{described} is in the memory of process {pid}: this one was forked from it, and has a copy "
            "that excludes nobody; use a store that both reach"
        )


def _split(options: dict[str, Any]) -> tuple[Callable[[LockLost], object] | None, dict[str, Any]]:
    """Return the function that is called on a loss, if there is one, and the options of the core."""
    on_lost: OnLost = options.pop("on_lost", "flag")
    options["on_lost"] = "flag"
    if callable(on_lost):
        return on_lost, options
    if on_lost != "flag":
        raise ValueError(
            f"on_lost must be 'flag' or a function that takes the LockLost, not {on_lost!r}: a thread "
            "cannot be cancelled"
        )
    return None, options
