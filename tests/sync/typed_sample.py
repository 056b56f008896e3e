"""What a user's module looks like to mypy; a test runs `mypy --strict` on it."""

from __future__ import annotations

from typing import assert_type
from uuid import UUID

from aiodlock import sync

locks = sync.Client("redis://localhost:6379/0", ttl=10.0, prefix="shop")


def stop(lost: sync.LockLost) -> None:
    print(lost.reason)


def pay(order_id: int) -> int:
    with locks.lock(f"order:{order_id}", timeout=2, on_lost=stop) as lease:
        assert_type(lease, sync.Lease)
        assert_type(lease.lost, sync.LockLost | None)
        return lease.token


@locks.locked("order:{order_id}:{customer}")
def ship(order_id: int, customer: UUID) -> list[str]:
    return [str(order_id), str(customer)]


def more() -> None:
    assert_type(ship(1, UUID(int=1)), list[str])
    assert_type(locks.rwlock("x").read.acquire(timeout=None), sync.Lease)
    assert_type(locks.inspect("x"), sync.LockInfo)
    assert_type(locks.break_lock("x"), int)
    assert_type([info.name for info in locks.locks()], list[str])
    with locks.multilock("a", locks.lock("b")) as leases:
        assert_type(leases, sync.MultiLease)
        assert_type(leases["a"], sync.Lease)
    with locks.semaphore("x", 3, timeout=1), locks.election("x").lead("me") as lease:
        assert_type(lease, sync.Lease)
    with locks as again:
        assert_type(again, sync.Client)


def wrong() -> None:
    ship("1", UUID(int=1))  # type: ignore[arg-type]
    locks.lock("x", blocking=False)  # type: ignore[call-arg]
    locks.lock("x", on_lost="cancel")  # type: ignore[arg-type]
    locks.lock("x").acquire(blocking=False)  # type: ignore[arg-type]
    locks.semaphore("x", 2, owner="me")  # type: ignore[call-arg]
