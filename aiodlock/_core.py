"""The inside of a client, which locks and inspectors ask: its store, and its session while entered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from itertools import count
from typing import NoReturn, Self, TypeVar

from ._clock import now
from ._cycles import Cycle
from ._deadlocks import standing
from ._errors import BackendError, BackendUnavailable, ClientClosed, Unsupported, concerning
from ._hooks import Hooks
from ._model import Kind, LockInfo
from ._patience import LEAST, soon
from ._renewal import Renewal
from ._session import Session
from .backends.base import Backend, Follower, Unanswered
from .backends.sources import Opener

_T = TypeVar("_T")

#: So many names are inspected together by ``locks``.
_PAGE = 500
#: A listing that fails within so many seconds had a connection that was just lost: it is repeated.
_JUST_LOST = 0.5
#: So many names are taken in one turn of the event loop: some 5 ms.
_IN_ONE_TURN = 100


class Core:
    """Entered and left with its client.

    Mutable state: ``session`` (the present one, while it is entered), ``hooks``, ``_renewal``,
    ``_entering``.

    :param store: what to connect to.
    :param waiter_ttl: seconds, and so are the others; as of ``Client``.
    """

    def __init__(
        self,
        store: Opener,
        *,
        prefix: str,
        waiter_ttl: float,
        unavailable_after: float,
        close_timeout: float,
        deadlock_after: float | None,
    ) -> None:
        self.store = store
        self.described: str = store.described
        self.waiter_ttl = waiter_ttl
        self.unavailable_after = unavailable_after
        self.close_timeout = close_timeout
        self.hooks: list[Hooks] = []
        self.session: Session | None = None
        self._prefix = prefix
        self._deadlock_after = deadlock_after
        self._renewal: Renewal | None = None
        self._entering = False

    def __repr__(self) -> str:
        return f"<aiodlock.Client {self.described} {self._state}>"

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"neither {self!r} nor what it has made can be pickled or copied deeply: make a client in each "
            "process, and share it there"
        )

    @property
    def named(self) -> str:
        """The store and the prefix, for people; without a password."""
        return f"{self.described}{'' if self._prefix == 'aiodlock' else f', prefix {self._prefix}'}"

    @property
    def _state(self) -> str:
        session = self.session
        if session is None:
            return "opening" if self._entering else "closed"
        if session.death is not None:
            return "begins a new session"
        if not session.closing:
            return "open"
        return "closing" if session.is_running else "closed"

    # -- life ------------------------------------------------------------------------------------

    async def enter(self) -> None:
        """Connect and begin; as ``Client`` says."""
        if self._entering:
            raise RuntimeError(
                f"{self!r} is being entered by another task: share it, or make another"
            )
        if self.session is not None and self.session.closing:
            raise RuntimeError(
                f"{self!r} is still being left: enter it again when that has ended, or make another"
            )
        if self.session is not None:
            raise RuntimeError(f"{self!r} is entered already: share it, or make another Client")
        self._entering = True
        try:
            session = self._make_session()
            await session.start()
        finally:
            self._entering = False
        self.session = session
        self._renewal = Renewal(session, self._make_session, self._use_session, self.close_timeout)

    async def leave(self) -> None:
        """End waits and bodies, release everything, stop."""
        if self.session is None or self._renewal is None:
            return
        self.session.check_here()  # else it is still running
        try:
            await self._renewal.stop()
        finally:
            session = self.session
            try:
                await session.close(self.close_timeout)
            finally:
                if self.session is session:
                    self.session = None

    def _make_session(self, predecessor: Session | None = None) -> Session:
        backend = self.store.open()
        if predecessor is not None and isinstance(backend, Follower):
            backend.follow(predecessor.backend)
        return Session(
            backend,
            unavailable_after=self.unavailable_after,
            hooks=self.hooks,
            deadlock_after=self._deadlock_after,
            predecessor=predecessor,
        )

    def _use_session(self, session: Session) -> None:
        self.session = session

    def use(self, name: str | None = None) -> Session:
        """Return the session, if calls can be made now."""
        session = self.session
        if session is None:
            raise ClientClosed(
                f"{'' if name is None else f'{name!r}: '}{self!r} is not open: enter it first, with "
                "'async with client:' or a lifespan",
                name=name,
            )
        try:
            session.check_usable()
        except ClientClosed:
            raise session.closed_error(name) from None
        return session

    async def ready(self, name: str | None = None, within: float | None = None) -> Session:
        """Return the session; if it has died, wait so long for the next one, as for a store that is away.

        :param within: seconds, as a timeout. None: ``unavailable_after``; 0: as long as a call takes that
            does not wait.
        """
        session = self.session
        if session is not None and session.death is not None and self._renewal is not None:
            session.check_here()
            if within is None:
                within = self.unavailable_after
            await self._renewal.wait(within or soon(LEAST))
            session = self.session
            if session is not None and session.death is not None:
                raise BackendUnavailable(
                    f"{self!r}, since a background task died: {session.death!r}", name=name
                ) from session.death
        return self.use(name)

    def kinds(self) -> tuple[Kind, ...]:
        """Return which kinds of locks the store has."""
        can = self.store.capabilities
        kinds: list[Kind] = ["lock"]
        if can.semaphores:
            kinds.append("semaphore")
        if can.once:
            kinds.append("once")
        return tuple(kinds)

    async def locks(self, match: str, kinds: Iterable[Kind]) -> AsyncIterator[LockInfo]:
        """Iterate over what is held, waited for or on record under the names that match."""
        await self.ready()
        try:
            match.encode()  # it may be longer than a name: escaped, or with stars
        except UnicodeEncodeError:
            return  # no name is like that
        if not match:
            return
        for kind in kinds:
            async for info in self._of_kind(match, kind):
                yield info

    async def _of_kind(self, match: str, kind: Kind) -> AsyncIterator[LockInfo]:
        seen: set[str] = set()
        started = now()
        while True:
            backend = (await self.ready()).backend
            try:
                page: list[str] = []
                async for name in _each(backend, match, kind):
                    if name not in seen:
                        page.append(name)
                    if len(page) >= _PAGE:
                        for info in await self._inspect_all(page, seen, kind):
                            yield info
                        page.clear()
                for info in await self._inspect_all(page, seen, kind):
                    yield info
                return
            except BackendUnavailable:
                if now() - started > _JUST_LOST:
                    raise  # else reconnect, from the start; it may fail without a turn of the loop
                await asyncio.sleep(_JUST_LOST / 10)

    async def _inspect_all(
        self, names: list[str], seen: set[str], kind: Kind = "lock"
    ) -> list[LockInfo]:
        """Return what is held or waited for of these."""
        if not names:
            return []
        found = await self.inspect_many(names, kind)
        seen.update(names)
        return [info for info in found if info.holders or info.waiters or info.recorded]

    async def deadlocks(self, clients: Iterable[str]) -> list[Cycle]:
        """Return the cycles of waits that these clients have told."""
        try:
            return await standing((await self.ready()).backend, clients)
        except TimeoutError:
            raise BackendUnavailable("no answer about deadlocks in time") from None

    async def held_names(self) -> dict[Kind, list[str]]:
        """Return every name that is held, waited for or on record, by kind."""
        return {kind: await self._names(kind) for kind in self.kinds()}

    async def _names(self, kind: Kind) -> list[str]:
        started = now()
        try:
            return [name async for name in _each(self.use().backend, "*", kind)]
        except BackendUnavailable:
            if now() - started > _JUST_LOST:
                raise
            return [name async for name in _each(self.use().backend, "*", kind)]

    async def inspect_many(self, names: Sequence[str], kind: Kind = "lock") -> list[LockInfo]:
        """Return what is known of at least one name, asked together."""
        return await self.answer_soon(lambda store: store.inspect_all(kind, names), names[0])

    async def inspect(self, kind: Kind, name: str) -> LockInfo:
        """Return what is known of a name."""
        return await self.answer_soon(lambda store: store.inspect(kind, name), name)

    async def answer_soon(
        self, call: Callable[[Backend], Awaitable[_T]], name: str, *, repeats: bool = True
    ) -> _T:
        """Return what the store answers about a name, within the time that answers take.

        :param repeats: whether what may have been carried out is done again.
        """
        backend = (await self.ready(name, 0)).backend
        within = soon(backend.answers_within)
        try:
            async with asyncio.timeout(within):
                try:
                    return await call(backend)
                except BackendUnavailable as lost:
                    if isinstance(lost, Unanswered) and not repeats:
                        raise
                    return await call(
                        backend
                    )  # the connection may just have been lost: reconnect once
        except BackendUnavailable as away:
            raise BackendUnavailable(f"no answer about {name!r}: {away}", name=name) from (
                away.__cause__ or away
            )
        except BackendError as error:
            raise concerning(error, name) from error.__cause__
        except TimeoutError:
            raise BackendUnavailable(
                f"no answer about {name!r} within {within:.3g} s from {self.described}", name=name
            ) from backend.failure

    async def break_lock(self, kind: Kind, name: str, meant: frozenset[int] | None) -> int:
        """Release holders by force; return their number; as ``Client.break_lock``."""
        if not self.store.capabilities.break_lock:
            raise Unsupported(f"{self.described}: this store cannot break a lock")
        asked: set[int] | None = None

        async def attempt(store: Backend) -> int:
            nonlocal asked
            info = await store.inspect(kind, name)
            holding = {holder.token for holder in info.holders}
            if meant is not None:
                holding &= meant
            if asked is None:
                asked = holding
            elif not asked & holding:
                return len(
                    asked
                )  # the first attempt did it, as it seems, and who holds now is another one
            return await store.break_lock(name, kind, meant)

        if meant is not None and not meant:
            return 0
        return await self.answer_soon(attempt, name)


async def _each(backend: Backend, match: str, kind: Kind) -> AsyncIterator[str]:
    """Return the names as they come. One step is waited for as long as any call that does not wait.

    Many names may be there already: everybody else has a turn now and then.
    """
    names = backend.names(match, kind)
    for number in count():
        if number % _IN_ONE_TURN == 0:
            await asyncio.sleep(0)
        within = soon(backend.answers_within)
        try:
            async with asyncio.timeout(within):
                name = await anext(names)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise BackendUnavailable(f"no answer within {within:.2g} s from {backend!r}") from None
        yield name
