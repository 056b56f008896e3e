"""Fair distributed locks for asyncio, on Redis, Valkey, PostgreSQL, etcd and ZooKeeper.

A map of the package, from what users call to what stores do. `docs/internals/tour.md` has every file::

    _client.py     Client: checks what users hand in, makes locks
    _lock.py       Lock, ReadWriteLock, Semaphore: what users see of a description; holds nothing
    _description.py  what a lock asks for     _acquisition.py  what a holder has, until it is over
    _lease.py      Lease: held, released, or lost with a reason; leaving a body
    _multilock.py  several locks as one       _election.py  a lock whose holder leads, and says who it is
    _once.py       what is done once          _locked.py, _naming.py  names out of calls and templates
    _acquire.py    how a request gets its turn: reentrancy, the one waiting loop
    _short_way.py  the same on a lease that lingers, with few calls
    _core.py       the inside of a client     _session.py   what runs while it is entered
    _renewal.py    how a dead session is followed by another
    _register.py   which requests there are   _departure.py how they leave
    _linger.py     leases kept between bodies _forgotten.py leases that nobody references
    _deadlocks.py  who waits for whom         _deadlines.py when a lease is lost by time
    _request.py    a request's state, from its first message to its last; _hold.py: what leases need of it
    _body.py, _bodies.py, _scope.py           which block ends, and how a loss cancels it
    _hooks.py, _telling.py                    what hooks and the log hear
    _options.py    what users hand in         _model.py     frozen values
    _errors.py     the tree                   _clock.py     the one clock of leases
    backends/      base: the seam to every store; keeper: extends leases, where each request has one;
                   sources: which module reads a source;
                   memory/: a state machine in plain Python; redis/: scripts, wire, wake-ups;
                   postgres/, etcd/, zookeeper/
    sync/, fastapi/, web/, cli/, otel.py, fencing.py, testing.py: the doors
"""

import sys as _sys

if _sys.platform == "win32":
    raise ImportError(
        "aiodlock runs on Linux and macOS, and in WSL and containers, but not on Windows: the clock of its "
        "leases, its signals and 'aiodlock run' are those of POSIX, and no test runs on Windows"
    )

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
