"""Fair distributed locks for asyncio, on Redis, Valkey, PostgreSQL, etcd and ZooKeeper.

A map of the package::

    _client.py     Client: opens a backend, makes locks
    _session.py    what runs while a client is entered: requests, the only task group
    _request.py    a request's state, from its first message to its last
    _hold.py       the part of it that leases need
    _deadlines.py  when a lease is lost by time
    _departure.py  how requests leave
    _lock.py       Lock: name, mode, options; the one acquire loop; reentrancy
    _lease.py      Lease: held, released, or lost with a reason; leaving a body
    _election.py  Election: a lock whose holder leads, and says who it is
    _multilock.py  several locks as one
    _model.py      frozen values        _options.py  what users hand in, checked
    _errors.py     the tree             _clock.py    the one clock of leases
    backends/      base: the seam to every store; keeper: extends leases, where each request has one;
                   sources: which module reads a source;
                   memory/: a state machine in plain Python; redis/: scripts, wire, wake-ups
"""

from ._client import Client as Client
from ._election import Election as Election
from ._errors import AcquireTimeout as AcquireTimeout
from ._errors import BackendError as BackendError
from ._errors import BackendUnavailable as BackendUnavailable
from ._errors import ClientClosed as ClientClosed
from ._errors import DeadlockError as DeadlockError
from ._errors import LockError as LockError
from ._errors import LockLost as LockLost
from ._errors import NotHeld as NotHeld
from ._errors import Unsupported as Unsupported
from ._errors import WouldBlock as WouldBlock
from ._hooks import Hooks as Hooks
from ._lease import Lease as Lease
from ._lock import Lock as Lock
from ._lock import ReadWriteLock as ReadWriteLock
from ._lock import Semaphore as Semaphore
from ._model import HolderInfo as HolderInfo
from ._model import LockInfo as LockInfo
from ._model import RecordedInfo as RecordedInfo
from ._model import RequestInfo as RequestInfo
from ._model import WaiterInfo as WaiterInfo
from ._multilock import MultiLease as MultiLease
from ._multilock import MultiLock as MultiLock
from ._naming import name as name
from ._once import Once as Once
from ._once import OnceRun as OnceRun
