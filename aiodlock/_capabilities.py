"""What a lock asks for, held against what its store can do: refused before anything is sent."""

from __future__ import annotations

from ._errors import Unsupported
from ._model import Capabilities, Terms


def refuse_unsupported(can: Capabilities, terms: Terms, ttl: float, store: str) -> None:
    """Raise Unsupported for a lock that the store has not.

    :param ttl: as the user gave it: a shorter ``max_hold`` is kept by the client where the store cannot.
    :param store: the store in words.
    """
    name = terms.name
    if terms.kind == "semaphore" and not can.semaphores:
        raise Unsupported(
            f"semaphore {name!r}: a semaphore needs one place that counts its holders, and {store} has "
            "none: use one server, Sentinel or a cluster"
        )
    if terms.kind == "lock" and terms.mode == "shared" and not can.shared:
        raise Unsupported(f"lock {name!r}: {store} has no shared mode, only exclusive locks")
    if terms.lock_delay and not can.lock_delay:
        raise Unsupported(f"lock {name!r}: {store} cannot keep a name closed: leave lock_delay out")
    refuse_short(can, f"lock {name!r}: ttl", ttl, store)


def refuse_short(can: Capabilities, what: str, seconds: float, store: str) -> None:
    """Raise Unsupported for a lease that is shorter than the store can make it."""
    if seconds < can.shortest_ttl:
        raise Unsupported(
            f"{what} is {seconds:g} s, and the shortest lease of {store} is {can.shortest_ttl:g} s"
        )
