"""What a lock asks for, held against what its store can do: refused before anything is sent."""

from __future__ import annotations

from ._errors import Unsupported
from ._model import Capabilities, Terms

_ONE = "one Redis or Valkey server, Sentinel, a cluster, PostgreSQL"
#: Which stores have what others have not.
_STORES = {
    "hold_at_least": f"{_ONE}, etcd or memory://",
    "linger": f"{_ONE}, etcd, ZooKeeper or memory://",
    "lock_delay": "a store that remembers lost holders: this one forgets them",
    "once": f"{_ONE}, etcd or memory://",
    "resize": f"{_ONE} or memory://",
}


def needs(what: str) -> Unsupported:
    """Return the error for what this store has not."""
    return Unsupported(f"{what} needs {_STORES[what]}")


def refuse_unsupported(can: Capabilities, terms: Terms, ttl: float, store: str) -> None:
    """Raise Unsupported for a lock that the store has not.

    :param ttl: as the user gave it: a shorter ``max_hold`` is kept by the client where the store cannot.
    :param store: the store in words.
    """
    name = terms.name
    if terms.hold_at_least and not can.hold_at_least:
        raise needs("hold_at_least")
    if terms.linger and not can.linger:
        raise needs("linger")
    if terms.lock_delay and not can.lock_delay:
        raise needs("lock_delay")
    if terms.resize and not can.resize:
        raise needs("resize")
    if terms.kind == "once" and not can.once:
        raise needs("once")
    if terms.kind == "semaphore" and not can.semaphores:
        raise Unsupported(
            f"semaphore {name!r}: a semaphore needs one place that counts its holders, and {store} has "
            "none: use one server, Sentinel or a cluster"
        )
    if terms.kind == "lock" and terms.mode == "shared" and not can.shared:
        raise Unsupported(f"lock {name!r}: {store} has no shared mode, only exclusive locks")
    refuse_short(can, f"lock {name!r}: ttl", ttl, store)


def refuse_short(can: Capabilities, what: str, seconds: float, store: str) -> None:
    """Raise Unsupported for a lease that is shorter than the store can make it."""
    if seconds < can.shortest_ttl:
        raise Unsupported(
            f"{what} is {seconds:g} s, and the shortest lease of {store} is {can.shortest_ttl:g} s"
        )
