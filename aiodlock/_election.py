"""Election: one leader at a time, on top of the lock. Whoever holds the name leads.

The leader's value travels in the owner of its request, behind an id that makes each candidacy an
owner of its own. So it appears with the grant, in the same script, and is gone with the lease: there is
no second key that could outlive a leader, or come late.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import suppress
from types import TracebackType

from ._acquire import OwnRequests
from ._acquisition import Acquisition
from ._body import Blocks
from ._clock import now
from ._description import Description
from ._errors import BackendUnavailable
from ._lease import Lease
from ._model import CANDIDATE
from ._options import check_seconds

_LONGEST_VALUE = 400
#: Between two looks while the store does not answer (seconds).
_LOOK_AGAIN = 0.5


class Election:
    """Made by ``Client.election``; may be used by many tasks. It is the lock of the same name.

    So ``Client.inspect`` shows the leader and the candidates in their order, and ``Client.break_lock``
    deposes.

    ```python
    election = client.election("scheduler", ttl=10)
    async with election.lead("http://host-1:8080") as lease:
        ...  # cancelled when the lease is lost
    ```
    """

    def __init__(self, described: Description) -> None:
        self._described = described
        self._core = described.core

    @property
    def name(self) -> str:
        """The name, as given; the same as that of ``Client.lock(name)``."""
        return self._described.name

    def __repr__(self) -> str:
        return f"<Election {self.name!r} on {self._core!r}>"

    def lead(self, value: str = "") -> Candidacy:
        """Wait to be elected: ``async with election.lead("host-1") as lease``; leaving resigns.

        Candidates are elected in order of arrival. When the lease is lost, the body is cancelled and
        ``LockLost`` raised, as with a lock. A leader that stands again in its own body
        waits for itself, and gets ``DeadlockError`` after the client's ``deadlock_after``.

        ```python
        async with client.election("scheduler").lead("host-1") as lease:
            print("elected, with token", lease.token)
        ```

        :param value: what ``observe`` shows, such as an address; up to 400 bytes of UTF-8.
        :raises AcquireTimeout: (on entering) with the option ``timeout``, when it ran out.
        """
        if not isinstance(value, str):
            raise TypeError(f"value must be a str, not {value!r}")
        try:
            length = len(value.encode())
        except UnicodeEncodeError as surrogates:
            raise ValueError(f"value {value!r} has lone surrogates") from surrogates
        if length > _LONGEST_VALUE:
            raise ValueError(f"value must be up to {_LONGEST_VALUE} bytes long, not {length}")
        return Candidacy(self, self._described, value)

    def observe(self, *, interval: float = 5.0) -> AsyncGenerator[str, None]:
        """Iterate over the leaders' values: the present one's first, then that of each next one.

        A leader is announced when it begins to lead. As an announcement may be lost with a connection,
        it also looks every ``interval`` seconds. Yields nothing while nobody leads, and may miss a leader
        that led for a moment. Two leaders in a row with equal values are told twice. For information: what
        only the leader may do is protected by its lease and token.

        ```python
        async def follow(client: aiodlock.Client) -> None:
            async for address in client.election("scheduler").observe():
                print("the leader is at", address)
        ```

        :raises BackendUnavailable: when nothing answered for the client's ``unavailable_after``.
        :raises ClientClosed: when the client is left.
        """
        return self._observe(check_seconds("interval", interval, least=0.01))

    async def _observe(self, interval: float) -> AsyncGenerator[str, None]:
        seen, answered = 0, now()
        changed = asyncio.Event()
        session = await self._core.ready()
        stop = session.backend.observe("lock", self.name, changed.set)
        try:
            while True:
                if session.closing or session.death is not None:
                    session = await self._core.ready()
                    stop()
                    stop = session.backend.observe("lock", self.name, changed.set)
                changed.clear()
                pause = interval
                try:
                    info = await self._core.inspect("lock", self.name)
                except BackendUnavailable:
                    if now() - answered >= self._core.unavailable_after:
                        raise
                    pause = min(interval, _LOOK_AGAIN)
                else:
                    answered = now()
                    for holder in info.holders:
                        value = holder.value
                        if value is not None and holder.token != seen:
                            seen = holder.token
                            yield value
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await changed.wait()
        finally:
            stop()


class Candidacy:
    """``async with`` it to stand, lead and resign. May be entered again, and by several tasks.

    Mutable state: ``_entered`` (the blocks that are open, any task's).
    """

    def __init__(self, election: Election, described: Description, value: str) -> None:
        self._election = election
        self._described = described
        self._value = value
        self._entered: Blocks[Acquisition] = Blocks()

    async def __aenter__(self) -> Lease:
        acquired = await self._acquire(self._described.options.timeout)
        self._entered.enter(acquired.arm(), acquired)
        return Lease(acquired)

    async def _acquire(self, timeout: float | None, own: OwnRequests | None = None) -> Acquisition:
        # A fresh owner each time: equal owners would lead together.
        owner = f"{CANDIDATE}{secrets.token_hex(8)}:{self._value}"
        acquired = await self._described.of_owner(owner).acquire(timeout, own)
        acquired.session.backend.announce("lock", self._described.name)
        return acquired

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        meant = self._entered.take(self, exc)
        if meant is not None:
            task, acquired = meant
            await acquired.end_block(task, exc_type, exc)

    def __repr__(self) -> str:
        return f"<Candidacy {self._value!r} in {self._election!r}>"
