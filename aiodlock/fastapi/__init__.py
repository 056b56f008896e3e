"""Locks for FastAPI: a client for the app's life, and dependencies that hold a lock for a request.

    app = FastAPI(lifespan=aiodlock.fastapi.lifespan("redis://localhost:6379/0"))

    @app.post("/orders/{order_id}/pay")
    async def pay(order_id: int, lease: Annotated[Lease, Locked("order:{order_id}", timeout=2)]):
        await db.execute(UPDATE, fence=lease.token)

What goes wrong comes out as an ``HTTPException`` whose ``detail`` holds the members of a problem
document (RFC 9457): 423 when the wait timed out, 409 when the lease was lost, 503 when the store is
away. The lock is released before the response is sent. In a handler that is not ``async`` a loss cannot
stop the thread: check ``lease.held``, and hand ``lease.token`` to whatever you write to.

A map of the package::

    _dependencies.py  lifespan, LockClient, Locked      _names.py       a lock's name out of a request
    _disconnect.py    leaving the queue when the client is gone      _once.py    requests that are done once
    _handlers.py      being around a handler          _problems.py    what goes wrong, as HTTP errors
    _threads.py       keeping the lock until a handler's thread has ended
    _fingerprint.py   which request something was done for
"""

from __future__ import annotations

try:
    import fastapi as _fastapi  # noqa: F401
except ImportError as _missing:
    raise ImportError(
        "aiodlock.fastapi needs FastAPI: pip install 'aiodlock[fastapi]'"
    ) from _missing

from ._dependencies import LockClient as LockClient
from ._dependencies import Locked as Locked
from ._dependencies import lifespan as lifespan
from ._once import Once as Once
from ._problems import ClientGone as ClientGone
from ._problems import KeyReused as KeyReused
from ._problems import LeaseLost as LeaseLost
from ._problems import LockProblem as LockProblem
from ._problems import LockTimedOut as LockTimedOut
from ._problems import NameRefused as NameRefused
from ._problems import StoreAway as StoreAway
from ._problems import responses as responses

__all__ = [
    "ClientGone",
    "KeyReused",
    "LeaseLost",
    "LockClient",
    "LockProblem",
    "LockTimedOut",
    "Locked",
    "NameRefused",
    "Once",
    "StoreAway",
    "lifespan",
    "responses",
]
