"""The same locks for threads: Django views, Celery tasks, scripts. No ``await``.

    client = aiodlock.sync.Client("redis://localhost:6379/0")

    with client.lock("order:42", timeout=2) as lease:
        pay(fence=lease.token)

Threads and asyncio services that use the same names wait for each other, in one fair queue: what runs
underneath is ``aiodlock.Client``, on one event loop in a background thread of the process.

A map of the package::

    _portal.py     the background thread, and how a call gets there and back
    _client.py     Client: what a user can ask for
    _running.py    what runs of a client in one process: made on first use, in each process for itself
    _described.py  how a thread acquires, whatever it is
    _lock.py       Lock, ReadWriteLock, Semaphore     _multilock.py  several locks as one
    _election.py   Election                           _once.py       what is to be done once
    _lease.py      Lease, MultiLease: how a thread's body begins and ends
    _blocks.py     the open blocks of each thread     _source.py     a redis.Redis as a source
    _twin.py       docstrings, from the class for tasks
"""

from .._errors import AcquireTimeout as AcquireTimeout
from .._errors import BackendError as BackendError
from .._errors import BackendUnavailable as BackendUnavailable
from .._errors import ClientClosed as ClientClosed
from .._errors import DeadlockError as DeadlockError
from .._errors import LockError as LockError
from .._errors import LockLost as LockLost
from .._errors import NotHeld as NotHeld
from .._errors import Unsupported as Unsupported
from .._errors import WouldBlock as WouldBlock
from .._hooks import Hooks as Hooks
from .._model import HolderInfo as HolderInfo
from .._model import LockInfo as LockInfo
from .._model import RecordedInfo as RecordedInfo
from .._model import WaiterInfo as WaiterInfo
from ._client import Client as Client
from ._election import Election as Election
from ._lease import Lease as Lease
from ._lease import MultiLease as MultiLease
from ._lock import Lock as Lock
from ._lock import ReadWriteLock as ReadWriteLock
from ._lock import Semaphore as Semaphore
from ._multilock import MultiLock as MultiLock
from ._once import Once as Once
from ._once import OnceRun as OnceRun
