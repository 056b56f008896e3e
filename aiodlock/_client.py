"""Client: what a user can ask for, in one place. What it hands out, and what runs, is in other files.

Over 400 lines: half of them are the docstrings that make the reference.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, ParamSpec, Self, TypeAlias, TypeVar, Unpack

from ._capabilities import needs
from ._core import Core
from ._description import Description
from ._election import Election
from ._hooks import Hooks
from ._keywords import LockKeywords, OwnerlessKeywords, UnnamedKeywords
from ._lease import read_sequencer
from ._lock import Lock, ReadWriteLock, Semaphore
from ._locked import done_once, held_around
from ._model import Kind, LockInfo
from ._multilock import MultiLock, described_once
from ._once import Once, check_hold
from ._options import (
    CLIENTS_ELSEWHERE,
    CLOSING_ELSEWHERE,
    SHORTEST_TTL,
    OnLost,
    answers,
    check_flag,
    check_int,
    check_kind,
    check_limit,
    check_note,
    check_prefix,
    check_seconds,
    check_text,
    check_timeout,
    check_tokens,
    lock_options,
    refuse_keywords,
)
from .backends.sources import StoreOptions, read_source

if TYPE_CHECKING:
    from redis.asyncio import Redis, RedisCluster

SourceLike: TypeAlias = "str | Redis | RedisCluster | Sequence[str | Redis]"

_T = TypeVar("_T")
_P = ParamSpec("_P")


@answers(CLIENTS_ELSEWHERE | CLOSING_ELSEWHERE)
class Client:
    """Locks on Redis or Valkey, alone, in a cluster or a quorum, PostgreSQL, etcd, ZooKeeper, or in memory.

    Constructing does no I/O and binds no event loop. Entering (``async with``) connects, within 5 s;
    leaving ends every wait with ``ClientClosed``, cancels bodies that still hold, releases, and stops.
    It may be entered again afterwards. All tasks share its two connections per server.

    ```python
    async with aiodlock.Client("redis://localhost:6379/0", ttl=10) as client:
        async with client.lock("order:42") as lease:
            print(lease.token)
    ```

    :param source: ``redis://``, ``rediss://``, ``unix://``, ``postgresql://``, ``etcd://``, ``memory://``
        (private to this client), ``memory://NAME`` (shared by all clients of this process, on any loop),
        ``zookeeper://HOST:PORT,HOST:PORT/CHROOT`` (``zookeepers://`` for TLS),
        ``redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB``, ``redis+cluster://HOST:PORT,HOST:PORT`` (those
        nodes are asked first), or a ready ``redis.asyncio.Redis`` (as ``Sentinel.master_for`` makes) or
        ``RedisCluster``, whose connection settings are used and which stays yours. A list of at least
        three of the others is a quorum of independent servers: a majority of them decides.
    :param prefix: what every key and channel begins with: letters, digits and ``_.:-``.
    :param ttl: seconds a lease lives without being extended, for locks that say nothing else.
    :param waiter_ttl: seconds a waiter keeps its place without being heard of.
    :param token_retention: seconds for which the last token of a name is remembered.
    :param min_replicas: replicas that must have a grant or an extension before it counts. Entering
        raises BackendUnavailable when so many are not connected. Costs a third connection.
    :param unavailable_after: seconds without any answer after which ``acquire`` gives up.
    :param close_timeout: seconds that leaving waits for bodies to end.
    :param configure_notifications: turn the server's keyspace events on (CONFIG SET) if they are off.
    :param restart_delay: with a quorum, seconds for which a server does not count after it came back
        without its memory, or after its clock stepped, at least. Need not be set: the clients learn the
        longest lease in use, with its lock-delay, through the servers. 0 for servers that lose nothing
        (``appendfsync always``).
    :param listen_source: with PostgreSQL, the URL of the connection that listens for notifications, where
        ``source`` leads to a pooler in transaction mode.
    :param create: with PostgreSQL, create the schema that the locks live in if it is not there.
    :param description: shown to people beside what this client holds and waits for; at most 200 characters.
    :param deadlock_after: seconds after which a wait without a timeout, of a task that is inside other
        blocks, is checked for a deadlock; see ``DeadlockError``. None: never.
    :raises TypeError: for input of a wrong type.
    :raises ValueError: for other bad input.
    :raises Unsupported: for ``min_replicas`` on ``memory://`` and on a quorum.
    """

    def __init__(
        self,
        source: SourceLike,
        *,
        prefix: str = "aiodlock",
        ttl: float = 30.0,
        waiter_ttl: float = 10.0,
        token_retention: float = 3600.0,
        min_replicas: int = 0,
        unavailable_after: float = 30.0,
        close_timeout: float = 5.0,
        configure_notifications: bool = False,
        restart_delay: float | None = None,
        listen_source: str | None = None,
        create: bool = False,
        description: str = "",
        deadlock_after: float | None = 2.0,
    ) -> None:
        if check_int("min_replicas", min_replicas) < 0:
            raise ValueError(f"min_replicas must not be negative, and is {min_replicas}")
        self._ttl = check_seconds("ttl", ttl, least=SHORTEST_TTL)
        waiter_ttl = check_seconds("waiter_ttl", waiter_ttl, least=SHORTEST_TTL)
        token_retention = check_seconds("token_retention", token_retention, least=1.0)
        unavailable_after = check_seconds("unavailable_after", unavailable_after)
        close_timeout = check_seconds("close_timeout", close_timeout)
        if deadlock_after is not None:
            deadlock_after = check_seconds("deadlock_after", deadlock_after)
        check_flag("configure_notifications", configure_notifications)
        check_flag("create", create)
        if listen_source is not None and not isinstance(listen_source, str):
            raise TypeError(f"listen_source must be a URL, not {listen_source!r}")
        store = read_source(
            source,
            StoreOptions(
                prefix=check_prefix(prefix),
                ttl=self._ttl,
                token_retention=token_retention,
                unavailable_after=unavailable_after,
                configure_notifications=configure_notifications,
                min_replicas=min_replicas,
                restart_delay=None
                if restart_delay is None
                else check_seconds("restart_delay", restart_delay),
                listen_source=listen_source,
                create=create,
                description=check_note("description", description),
            ),
        )
        self._core = Core(
            store,
            prefix=prefix,
            waiter_ttl=waiter_ttl,
            unavailable_after=unavailable_after,
            close_timeout=close_timeout,
            deadlock_after=deadlock_after,
        )

    def __repr__(self) -> str:
        return repr(self._core)

    def __copy__(self) -> Self:
        """Return one with the same options and hooks, to be entered by itself: for ``aiodlock.sync``."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, _core=copy.copy(self._core))
        return twin

    async def __aenter__(self) -> Self:
        await self._core.enter()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._core.leave()

    # -- locks -----------------------------------------------------------------------------------

    def lock(
        self,
        name: str,
        *,
        ttl: float | None = None,
        timeout: float | None = None,
        auto_extend: bool = True,
        max_hold: float | None = None,
        lock_delay: float = 0.0,
        margin: float = 0.0,
        on_lost: OnLost = "cancel",
        confirm_release: bool = True,
        owner: str | None = None,
        hold_at_least: float = 0.0,
        note: str = "",
        linger: float = 0.0,
        **wrong: Never,
    ) -> Lock:
        """Describe an exclusive lock. No I/O; needs no running client.

        ```python
        lock = client.lock("order:42", ttl=10, timeout=5)
        async with lock as lease:
            ...
        ```

        :param name: any text of 1 to 512 bytes of UTF-8.
        :param ttl: seconds the lease lives without being extended; at least 0.05. Default: the client's.
        :param timeout: seconds ``acquire`` and ``async with`` wait; None for ever, 0 tries once.
        :param auto_extend: extend in the background at a third of the ttl.
        :param max_hold: seconds after which the lease ends whatever happens.
        :param lock_delay: seconds for which the name stays closed when the holder was lost.
        :param margin: seconds before its local deadline at which the lease counts as lost.
        :param on_lost: ``"cancel"`` the body, or only ``"flag"`` the lease.
        :param confirm_release: with False, leaving returns when the release is on its way; a release
            that fails is then known to the log and hooks alone.
        :param owner: makes one owner of several tasks, clients or processes. Default: the task.
        :param hold_at_least: seconds from its grant for which the name stays closed, also when the body
            ends or its process dies sooner.
        :param note: shown to people who inspect the name; at most 200 characters.
        :param linger: seconds for which the client keeps the lease after its last release, unless somebody
            else wants it. An acquire meanwhile, by any task, with the same mode, ttl, lock_delay, owner and
            auto_extend needs no message, and has the same token.
        :raises Unsupported: for ``hold_at_least`` and ``linger`` where the store has none.
        """
        if wrong:
            refuse_keywords("lock()", wrong)
        options = lock_options(
            self._ttl if ttl is None else ttl,
            timeout,
            auto_extend,
            max_hold,
            lock_delay,
            margin,
            on_lost,
            confirm_release,
            owner,
            hold_at_least,
            note,
            linger,
        )
        return Lock(Description(self._core, check_text("name", name), "exclusive", options))

    def rwlock(self, name: str, **options: Unpack[LockKeywords]) -> ReadWriteLock:
        """Describe both modes of a lock; ``.write`` is the same as ``lock(name)``. Options as there.

        ```python
        page = client.rwlock("page:7")
        async with page.read:  # together with other readers
            ...
        async with page.write:  # alone
            ...
        ```
        """
        write = self._describe(name, **options)
        return ReadWriteLock(Lock(write.in_mode("shared")), Lock(write), self._core)

    def semaphore(
        self, name: str, limit: int, *, resize: bool = False, **options: Unpack[OwnerlessKeywords]
    ) -> Semaphore:
        """Describe a lock with ``limit`` holders. Options as of ``lock``, without ``owner``.

        A ``limit`` that differs from the one in use raises ValueError when acquiring. With
        ``resize=True`` it is the one in use from then on, and the others follow it. Growing grants all
        that fit, shrinking throws nobody out.

        ```python
        async with client.semaphore("mail", limit=3):  # three at a time
            ...
        ```
        """
        _refuse(
            options,
            "a semaphore is not reentrant: owner has no meaning",
            "a semaphore: its places are not a task's own",
        )
        plain = self._describe(name, **options)
        check_flag("resize", resize)
        limit, given = check_limit(limit), plain.options
        return Semaphore(
            Description(
                self._core,
                plain.name,
                "shared",
                given,
                kind="semaphore",
                limit=limit,
                resize=resize,
            )
        )

    def once(self, name: str, *, keep: float, **options: Unpack[OwnerlessKeywords]) -> Once:
        """Describe something to be done once: at most one success on record, for ``keep`` seconds.

        The body that is first does it. When it ends without an exception, its success is on record with
        the result that it assigned, and all others get that result at once. When it fails, the next one
        is first. A crash between the effect and the record means that it is done again: hand the key on
        to whatever has the effect, as an idempotency key.

        ```python
        async with client.once("order:42", keep=86400) as once:
            if once.first:
                once.result = "charged"
        print(once.result)
        ```

        :param keep: seconds for which the success stays on record.
        :param options: as of ``lock``, without ``owner``, ``linger`` and ``confirm_release``.
            ``hold_at_least`` closes the name behind a body that fails; it must not be longer than ``keep``.
        :raises ValueError: for an option that has no meaning here, or ``hold_at_least`` above ``keep``.
        :raises Unsupported: on a store that keeps no records, such as a quorum.
        """
        _refuse(options, "owner has no meaning for what is done once", "what is done once")
        if options.get("confirm_release") is False:
            raise ValueError("confirm_release=False would not tell whether a success is on record")
        check_seconds("keep", keep, least=0.001)
        plain = self._describe(name, **options)
        check_hold(plain.options.hold_at_least, keep)
        return Once(self._core, plain.name, plain.options, keep)

    def once_per(
        self, template: str, *, keep: float, **options: Unpack[OwnerlessKeywords]
    ) -> Callable[
        [Callable[_P, Coroutine[Any, Any, _T]]],
        Callable[_P, Coroutine[Any, Any, _T | str | bytes | None]],
    ]:
        """Let each call of an async function, or of a method, be done once; see ``once`` and ``locked``.

        The call that is first returns what the function returns, every other call the result on record. A
        result that is not a str, bytes or None, or is longer than 64 KiB, is recorded without value: the
        other calls then return None.

        ```python
        @client.once_per("report:{day}", keep=86400)
        async def report(day: str) -> str:
            return "sent"


        await report("2026-11-22")
        ```
        """
        self.once("options", keep=keep, **options)  # wrong ones are told when decorating
        return done_once(template, lambda name: self.once(name, keep=keep, **options))

    async def forget(self, name: str) -> bool:
        """Take the success of ``once`` off the record, so that it can be done again; touch no running body.

        ```python
        await client.forget("order:42")
        ```

        :returns: whether a success was on record.
        :raises BackendUnavailable: when nothing answered within 2 s, or the connection was lost before the
            answer came: then it may be done, and is not tried again, since it could take a newer success.
        """
        check_text("name", name)
        if not self._core.store.capabilities.once:
            raise needs("once")
        await self._core.inspect(
            "once", name
        )  # the connection may just have been lost: this reconnects
        return await self._core.answer_soon(lambda store: store.forget(name), name, repeats=False)

    def election(self, name: str, **options: Unpack[OwnerlessKeywords]) -> Election:
        """Describe an election: one leader at a time. Options as of ``lock``, without ``owner``.

        ```python
        async with client.election("scheduler").lead("host-1") as lease:
            ...  # this process leads
        ```
        """
        _refuse(
            options,
            "an election makes an owner of each candidacy: owner has no meaning",
            "an election: a leader that resigns leads no more",
        )
        return Election(self._describe(name, **options))

    def multilock(
        self,
        *names_or_locks: str | Lock,
        timeout: float | None = None,
        **options: Unpack[UnnamedKeywords],
    ) -> MultiLock:
        """Describe several locks as one, all or none; see ``MultiLock``.

        ```python
        async with client.multilock("account:1", "account:2") as leases:
            print(leases["account:1"].token)
        ```

        :param names_or_locks: names, which are taken exclusively with ``options``, and locks, which keep
            their mode and options. A name that is repeated is taken once, exclusively if any of them is.
        :param timeout: seconds for all together; None for ever, 0 tries each once.
        :raises ValueError: without names, for locks of another client, and when one name is given with
            different owners.
        """
        timeout = check_timeout(timeout)
        if not names_or_locks:
            raise ValueError("multilock needs at least one name")
        self.lock("options", **options)  # wrong ones are an error also when all come as locks
        described = described_once(
            self._core, names_or_locks, lambda name: self._describe(name, **options)
        )
        return MultiLock(self._core, described, timeout)

    def _describe(self, name: str, **options: Any) -> Description:
        """Describe an exclusive lock, which other kinds are made of, by options as of ``lock``."""
        return self.lock(name, **options)._described

    def locked(
        self, template: str, **options: Unpack[LockKeywords]
    ) -> Callable[[Callable[_P, Coroutine[Any, Any, _T]]], Callable[_P, Coroutine[Any, Any, _T]]]:
        """Hold a lock around each call of an async function, or of a method.

        ```python
        @client.locked("order:{order_id}", timeout=2)
        async def pay(order_id: int) -> None: ...


        await pay(42)
        ```

        The lock's name is filled from the call's arguments, by the names of the parameters, with defaults
        applied. In values, ``%`` and the punctuation of the template are percent-encoded, so two different
        calls never share a name. ``aiodlock.name`` makes the same name.

        :param template: the name, with a parameter of the function in each pair of braces. ``{{`` and
            ``}}`` are braces of the name itself.
        :param options: as of ``lock``.
        :raises TypeError: (when decorating) for a function that is not async, and for a generator; (when
            calling) for a value that is not a str, an int or a UUID. A bool is not an int here.
        :raises ValueError: (when decorating) for a field that is not a parameter, for two fields without a
            separator between them, and for wrong options; (when calling) for a name that is too long.
        """
        self.lock("options", **options)  # wrong ones are told when decorating
        return held_around(template, lambda name: self.lock(name, **options))

    # -- for people ------------------------------------------------------------------------------

    def add_hooks(self, hooks: Hooks) -> None:
        """Let ``hooks`` hear of every request and lease that begins from now on; see ``Hooks``.

        ```python
        class Slow(aiodlock.Hooks):
            def acquired(self, request: aiodlock.RequestInfo, waited: float) -> None:
                if waited > 1:
                    print(f"waited {waited:.1f} s for {request.name}")


        client.add_hooks(Slow())
        ```
        """
        if not isinstance(hooks, Hooks):
            raise TypeError(f"hooks must be an aiodlock.Hooks, not {hooks!r}")
        for event in vars(Hooks):
            if inspect.iscoroutinefunction(getattr(hooks, event)):
                raise TypeError(
                    f"{event} of {hooks!r} is async, and nobody would await it: write 'def'"
                )
        self._core.hooks.append(hooks)

    async def inspect(self, name: str, *, kind: Kind = "lock") -> LockInfo:
        """Return who holds the lock and who waits for it, as of one moment.

        ``kind`` is ``"lock"``, ``"semaphore"`` or ``"once"``: each has names of its own.

        ```python
        info = await client.inspect("order:42")
        print(len(info.holders), "hold it,", len(info.waiters), "wait")
        ```

        :raises BackendUnavailable: when nothing answers within 2 s.
        """
        return await self._core.inspect(check_kind(kind), check_text("name", name))

    def locks(self, match: str = "*", *, kind: Kind | None = None) -> AsyncIterator[LockInfo]:
        """Iterate over everything held or waited for whose name matches the glob: all kinds, or one.

        Of kind ``"once"`` also over what is on record. Not over a name that nobody waits for and only a
        lock-delay keeps closed; ``inspect`` tells that.

        ```python
        async for info in client.locks("order:*"):
            print(info.name, [holder.owner for holder in info.holders])
        ```
        """
        if not isinstance(match, str):
            raise TypeError(f"match must be a str, not {match!r}")
        return self._core.locks(match, self._core.kinds() if kind is None else (check_kind(kind),))

    async def break_lock(
        self, name: str, *, kind: Kind = "lock", tokens: Iterable[int] | None = None
    ) -> int:
        """Release holders by force; return their number. Waiters stay.

        Without ``tokens``, all holders are released, and what keeps the name closed is opened
        (``lock_delay``, ``hold_at_least``). With ``tokens``, only holders with these tokens are released:
        those that you have seen. A holder that came after them is spared.

        The holders learn it at once, at worst at their next extension. When the connection is lost before
        the answer comes, it is done again, unless all who held have gone: who holds then is spared, and the
        number is that of those who have gone.

        ```python
        info = await client.inspect("order:42")
        released = await client.break_lock("order:42", tokens=[holder.token for holder in info.holders])
        print(released, "of the holders that were shown have lost it")
        ```

        :raises BackendUnavailable: when nothing answered within 2 s; it may be done.
        """
        check_text("name", name)
        check_kind(kind)
        meant = check_tokens(tokens)
        return await self._core.break_lock(kind, name, meant)

    async def check_sequencer(self, sequencer: str) -> bool:
        """Return whether exactly the grant that this string was made from holds at this moment.

        ```python
        async with client.lock("order:42") as lease:
            assert await client.check_sequencer(lease.sequencer)
        ```
        """
        if not isinstance(sequencer, str):
            raise TypeError(f"sequencer must be a str, not {sequencer!r}")
        parsed = read_sequencer(sequencer)
        if parsed is None:
            return False
        kind, name, mode, token = parsed
        if kind == "once" and not self._core.store.capabilities.once:
            return False
        return await self._core.answer_soon(
            lambda store: store.holds(kind, name, mode, token), name
        )


def core_of(client: Client) -> Core:
    """Return the inside of a client, for the rooms of this package that are built on clients."""
    return client._core


def _refuse(options: OwnerlessKeywords, owner: str, linger: str) -> None:
    """Raise ValueError if one of these options was given in spite of what the types say."""
    given: dict[str, Any] = {**options}
    if given.get("owner") is not None:
        raise ValueError(owner)
    if given.get("linger"):
        raise ValueError(f"linger has no meaning for {linger}")
