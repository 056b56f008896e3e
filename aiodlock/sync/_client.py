"""Client: locks for threads. Each call is done by an ``aiodlock.Client`` on the portal's loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, Self, TypeVar, Unpack

from .. import _client as core
from .._hooks import Hooks
from .._lock import Acquirable as CoreAcquirable
from .._lock import Semaphore as CoreSemaphore
from .._locked import CallTemplate, check_returned
from .._model import Kind, LockInfo
from .._once import recordable
from .._options import CLIENTS_ELSEWHERE, answers
from ._election import Election
from ._life import Life
from ._lock import Lock, ReadWriteLock, Semaphore
from ._multilock import MultiLock, Several
from ._once import Once
from ._options import ClientOptions, LockOptions, OwnerlessOptions, UnnamedOptions
from ._recipe import OnLost, Recipe, Twin
from ._source import SourceLike, asynchronous
from ._twin import like

_T = TypeVar("_T")
_C = TypeVar("_C", bound=Twin)
_P = ParamSpec("_P")


@answers(CLIENTS_ELSEWHERE)
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
        self._life = Life(core.Client(asynchronous(source), **options))

    def __repr__(self) -> str:
        return repr(self._life)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._life.__reduce_ex__(protocol)

    # -- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._life.enter()
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
        self._life.close()

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
        return Lock(self._describe(name, options, lambda client, given: client.lock(name, **given)))

    @like(core.Client.rwlock)
    def rwlock(self, name: str, **options: Unpack[LockOptions]) -> ReadWriteLock:
        read = Lock(
            self._describe(name, options, lambda client, given: client.rwlock(name, **given).read)
        )
        return ReadWriteLock(self._life, read, self.lock(name, **options))

    @like(core.Client.semaphore)
    def semaphore(
        self, name: str, limit: int, *, resize: bool = False, **options: Unpack[OwnerlessOptions]
    ) -> Semaphore:
        def make(client: core.Client, given: dict[str, Any]) -> CoreSemaphore:
            return client.semaphore(name, limit, resize=resize, **given)

        return Semaphore(self._describe(name, options, make))

    @like(core.Client.once)
    def once(self, name: str, *, keep: float, **options: Unpack[OwnerlessOptions]) -> Once:
        def make(client: core.Client, given: dict[str, Any]) -> CoreAcquirable:
            return CoreAcquirable(client.once(name, keep=keep, **given)._described)

        return Once(self._describe(name, options, make), keep)

    @like(core.Client.once_per)
    def once_per(
        self, template: str, *, keep: float, **options: Unpack[OwnerlessOptions]
    ) -> Callable[[Callable[_P, _T]], Callable[_P, _T | str | bytes | None]]:
        parsed = CallTemplate(template)
        self.once("options", keep=keep, **options)  # wrong ones are told when decorating

        def decorate(function: Callable[_P, _T]) -> Callable[_P, _T | str | bytes | None]:
            name_of = parsed.of(function, coroutine=False, instead="aiodlock.Client.once_per")

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

    @like(core.Client.forget)
    def forget(self, name: str) -> bool:
        return self._life.ask(lambda client: client.forget(name))

    @like(core.Client.election)
    def election(self, name: str, **options: Unpack[OwnerlessOptions]) -> Election:
        on_lost, others = _split(options)
        timeout = options.get("timeout")
        return Election(
            self._life, lambda client: client.election(name, **others), on_lost, timeout
        )

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
        on_lost, others = _split(options)
        return MultiLock(Several(self._life, names_or_locks, timeout, others, on_lost))

    def locked(
        self, template: str, **options: Unpack[LockOptions]
    ) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
        """Hold a lock around each call of a function, or of a method; see ``aiodlock.Client.locked``.

        ```python
        @locks.locked("order:{order_id}", timeout=2)
        def pay(order_id: int) -> None: ...


        pay(42)
        ```

        :raises TypeError: (when decorating) for an async function and for a generator; (when calling) for a
            value that is not a str, an int or a UUID (a bool is not an int here), and when the function
            returns what would run without the lock: an awaitable, a generator, a context manager.
        :raises ValueError: (when decorating) for a field that is not a parameter, for two fields without a
            separator between them, and for wrong options; (when calling) for a name that is too long.
        """
        parsed = CallTemplate(template)
        self.lock("options", **options)  # wrong ones are told when decorating

        def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
            name_of = parsed.of(function, coroutine=False, instead="aiodlock.Client.locked")

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
        self._life.template.add_hooks(hooks)

    @like(core.Client.inspect)
    def inspect(self, name: str, *, kind: Kind = "lock") -> LockInfo:
        return self._life.ask(lambda client: client.inspect(name, kind=kind))

    @like(core.Client.locks)
    def locks(self, match: str = "*", *, kind: Kind | None = None) -> Iterator[LockInfo]:
        return self._life.iterate(lambda client: client.locks(match, kind=kind))

    @like(core.Client.break_lock)
    def break_lock(
        self, name: str, *, kind: Kind = "lock", tokens: Iterable[int] | None = None
    ) -> int:
        return self._life.ask(lambda client: client.break_lock(name, kind=kind, tokens=tokens))

    @like(core.Client.check_sequencer)
    def check_sequencer(self, sequencer: str) -> bool:
        return self._life.ask(lambda client: client.check_sequencer(sequencer))

    # -- inside ----------------------------------------------------------------------------------

    def _describe(
        self,
        name: str,
        options: Mapping[str, Any],
        make: Callable[[core.Client, dict[str, Any]], _C],
    ) -> Recipe[_C]:
        on_lost, given = _split(options)
        return Recipe(
            self._life,
            (name,),
            lambda client: make(client, given),
            on_lost,
            options.get("timeout"),
        )


def _split(options: Mapping[str, Any]) -> tuple[OnLost | None, dict[str, Any]]:
    """Return the function that is called on a loss, if there is one, and the options of the core."""
    others = {**options, "on_lost": "flag"}
    on_lost = options.get("on_lost", "flag")
    if callable(on_lost):
        return on_lost, others
    if on_lost != "flag":
        raise ValueError(
            f"on_lost must be 'flag' or a function that takes the LockLost, not {on_lost!r}: a thread "
            "cannot be cancelled"
        )
    return None, others
