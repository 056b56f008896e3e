"""For the tests of code that uses aiodlock: a store in memory, and what goes wrong, at will.

Plain functions; they need no plugin of pytest::

    async def test_report_stops_when_the_lock_is_lost():
        async with memory_client() as client:
            report = asyncio.create_task(write_report(client))
            ...
            lose(lease, "taken_over")

With ``pytest_plugins = ["aiodlock.testing"]`` in a ``conftest.py`` there are the fixtures
``aiodlock_client`` (one to enter: ``async with aiodlock_client as client``) and ``aiodlock_store`` (the
URL of a store for several clients); they work with every plugin, as they run no coroutine.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, get_args

from ._client import Client, core_of
from ._errors import BackendError, BackendUnavailable, LossReason, Unsupported
from ._lease import Lease
from ._lock import Acquirable
from ._model import ENDED
from ._session import Session
from .backends.kept_backend import KeptBackend

__all__ = [
    "drop_next_notice",
    "expire",
    "fail_next_call",
    "hold",
    "lose",
    "memory_client",
    "memory_url",
]


def memory_url() -> str:
    """Return the URL of a fresh store, for several clients of this process.

    ```python
    from aiodlock.testing import memory_client, memory_url

    url = memory_url()
    async with memory_client(url) as one, memory_client(url) as other:
        ...  # both see the same locks
    ```
    """
    return f"memory://test-{secrets.token_hex(8)}"


def memory_client(url: str | None = None, **options: Any) -> Client:
    """Return a client on a store of its own, or on ``url``, to be entered: ``async with``.

    ```python
    from aiodlock.testing import memory_client

    async with memory_client(ttl=0.5) as client:
        ...
    ```

    :param options: as of ``Client``. A short ``ttl`` makes a test of expiry short.
    """
    return Client(url if url is not None else "memory://", **options)


def hold(client: Client, name: str, **options: Any) -> Acquirable:
    """Return a lock that somebody else holds while the test is in it: ``async with hold(client, "x")``.

    Every use is an owner of its own, so code in the same task does not get in by reentrancy.

    ```python
    from aiodlock.testing import hold

    async with hold(client, "report"):
        assert await client.lock("report").locked()
    ```
    """
    return client.lock(name, **{"owner": f"test-{secrets.token_hex(8)}", **options})


def lose(lease: Lease, reason: LossReason) -> asyncio.Future[None]:
    """Let a lease be lost for a reason of ``LockLost``, now.

    It is lost when this returns: its body is cancelled and watchers are woken, as for any loss. The store
    gives the lock to the next waiter in the background; await the result where that matters.

    ```python
    from aiodlock.testing import lose

    lease = await client.lock("report").acquire()
    await lose(lease, "broken")
    assert lease.lost.reason == "broken"
    ```

    :raises ValueError: for an unknown reason, or when the lease is not held.
    :raises TypeError: for what is no lease of ``aiodlock.Client``: give one of those of a ``MultiLease``;
        in threads, use ``break_lock``.
    """
    if not isinstance(lease, Lease):
        raise TypeError(
            f"lease must be a lease of aiodlock.Client, not {lease!r}: of a MultiLease, give one of its "
            "leases; in threads, call the client's break_lock"
        )
    if reason not in get_args(LossReason):
        raise ValueError(f"reason must be one of {get_args(LossReason)}, not {reason!r}")
    if not lease.held:
        raise ValueError(f"{lease!r} is not held: there is nothing to lose")
    acquired = lease._acquired
    request, session = acquired.request, acquired.session
    session.register.lose(request, reason)
    gone: asyncio.Future[None] = session.loop.create_future()

    async def leave() -> None:
        try:
            await request.place.leave(ENDED)
        except BackendError:
            pass  # the store frees it when the lease ends
        finally:
            if not gone.done():
                gone.set_result(None)

    session.start_soon(leave)
    return gone


def expire(lease: Lease) -> asyncio.Future[None]:
    """Let a lease expire now, as if nothing had extended it. See ``lose``.

    ```python
    from aiodlock.testing import expire

    lease = await client.lock("report").acquire()
    await expire(lease)
    assert not lease.held
    ```
    """
    return lose(lease, "expired")


class _Injection(AbstractContextManager["_Injection"]):
    """Something that will go wrong once. As a context manager it is taken back at the end.

    Mutable state: ``happened``; ``_others``, those of the same method, the next one to happen first.
    """

    def __init__(self, where: object, method: str, stand_in: Callable[..., None]) -> None:
        self._of: dict[str, Any] = where.__dict__
        self._method: str = method
        self._others: list[_Injection] = self._of.setdefault(f"injected_{method}", [])
        self.happened: bool = False
        self.stand_in: Callable[..., None] = stand_in
        self._others.append(self)
        self._replace()

    def _replace(self) -> None:
        # On the object, in front of the class's own method.
        self._of.pop(self._method, None)
        if self._others:
            self._of[self._method] = self._others[0].happen

    def happen(self, *args: Any) -> None:
        """Stand in for the method, once."""
        self.take_back()
        self.happened = True
        self.stand_in(*args)

    def take_back(self) -> None:
        """Let it not happen any more."""
        if self in self._others:
            self._others.remove(self)
            self._replace()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.take_back()


def drop_next_notice(client: Client) -> _Injection:
    """Let the next notice of a grant to this client be lost on its way.

    Its waiter learns of the grant when it extends, a third of its lease later at the most.

    ```python
    from aiodlock.testing import drop_next_notice

    with drop_next_notice(client) as notice:
        ...  # let the code wait for a lock
    print(notice.happened)
    ```

    :raises Unsupported: for stores where a grant is not told by a message of its own.
    """
    backend = _session_of(client).backend
    if not isinstance(backend, KeptBackend):
        raise Unsupported(f"{backend!r} has no notices of grants that could be lost")
    return _Injection(backend.keeper, "on_granted", lambda *_: None)


def fail_next_call(client: Client, error: Exception | None = None) -> _Injection:
    """Let the next call that needs this client raise ``error``, and nothing be sent.

    A call is ``acquire``, entering a lock, ``Lock.release``, ``extend``, ``inspect`` and its like. Leaving
    a block and ``Lease.release`` are none, for they never fail that way. Two of these let the next two
    calls fail.

    ```python
    from aiodlock.testing import fail_next_call

    with fail_next_call(client):
        try:
            await client.lock("report").acquire()
        except aiodlock.BackendUnavailable:
            print("the code under test has to cope with this")
    ```

    :param error: default: ``BackendUnavailable``.
    """
    if error is None:
        error = BackendUnavailable("the store does not answer (a test made it so)")
    raised = error

    def fail() -> None:
        raise raised

    return _Injection(_session_of(client), "check_usable", fail)


def _session_of(client: Client) -> Session:
    if not isinstance(client, Client):
        raise TypeError(
            f"client must be an aiodlock.Client, not {client!r}: threads have no such tests"
        )
    # Not by ``use``, which what is injected already lets fail.
    core = core_of(client)
    return core.session or core.use()


try:
    import pytest
except ImportError:  # the functions above need nothing
    pass
else:

    @pytest.fixture
    def aiodlock_store() -> str:
        """The URL of a fresh store in memory."""
        return memory_url()

    @pytest.fixture
    def aiodlock_client(aiodlock_store: str) -> Client:
        """A client on ``aiodlock_store``, to be entered by the test: ``async with aiodlock_client``."""
        return memory_client(aiodlock_store)
