"""The calls of etcd's API that are used, and how long they are waited for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from . import messages as m

_Q = TypeVar("_Q", bound=m.Message)
_A = TypeVar("_A", bound=m.Message)

#: A call is waited for so long at least (seconds; a renewal shorter, see ``Patience.within``).
CALL_WITHIN = 2.0
#: A reconnection's pauses (seconds): the first, and the longest.
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0


@dataclass(frozen=True, slots=True)
class Method(Generic[_Q, _A]):
    """A call of the API: its path, and what it answers."""

    path: str
    answer: type[_A]
    request: type[_Q]
    #: Whether its answer proves that there is a leader, and how fast that is.
    needs_leader: bool = True


def _kv(name: str) -> str:
    return f"/etcdserverpb.KV/{name}"


def _lease(name: str) -> str:
    return f"/etcdserverpb.Lease/{name}"


RANGE = Method(_kv("Range"), m.RangeResponse, m.RangeRequest)
TXN = Method(_kv("Txn"), m.TxnResponse, m.TxnRequest)
LEASE_GRANT = Method(_lease("LeaseGrant"), m.LeaseGrantResponse, m.LeaseGrantRequest)
LEASE_REVOKE = Method(_lease("LeaseRevoke"), m.LeaseRevokeResponse, m.LeaseRevokeRequest)
LEASE_TIME_TO_LIVE = Method(
    _lease("LeaseTimeToLive"), m.LeaseTimeToLiveResponse, m.LeaseTimeToLiveRequest
)
STATUS = Method(
    "/etcdserverpb.Maintenance/Status", m.StatusResponse, m.StatusRequest, needs_leader=False
)
#: To check a password takes much longer than anything else.
AUTHENTICATE = Method(
    "/etcdserverpb.Auth/Authenticate",
    m.AuthenticateResponse,
    m.AuthenticateRequest,
    needs_leader=False,
)
KEEP_ALIVE = Method(_lease("LeaseKeepAlive"), m.LeaseKeepAliveResponse, m.LeaseKeepAliveRequest)
WATCH = Method("/etcdserverpb.Watch/Watch", m.WatchResponse, m.WatchRequest)
