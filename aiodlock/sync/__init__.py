"""The same locks for threads: Django views, Celery tasks, scripts. No ``await``.

    client = aiodlock.sync.Client("redis://localhost:6379/0")

    with client.lock("order:42", timeout=2) as lease:
        pay(fence=lease.token)

Threads and asyncio services that use the same names wait for each other, in one fair queue: what runs
underneath is ``aiodlock.Client``, on one event loop in a background thread of the process.

A map of the package. Each module knows those above it, and no other::

    _portal.py       the background thread, and how a call gets there and back
    _running.py      what runs of a client in one process: made on first use, in each process for itself
    _jobs.py         which job of a pool of threads runs
    _holds.py        what each thread holds, in blocks and without
    _body.py         what one call has acquired for a body, and how that begins and ends
    _block.py        the open blocks of one object, and which of them an exit belongs to
    _life.py         a client over all its processes
    _lease.py        Lease, MultiLease
    _recipe.py       how the twin of a lock, for tasks, is made in each process, and acquired
    _lock.py         Lock, ReadWriteLock, Semaphore
    _multilock.py    several locks as one       _election.py, _once.py  Election, Once
    _client.py       Client: what a user can ask for

Beside them stand ``_options.py`` (for type checkers), ``_source.py`` (a redis.Redis as a source) and
``_twin.py`` (docstrings, from the class for tasks).
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
