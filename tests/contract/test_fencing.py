"""The token put to use: guards in Redis and in SQL, and the bank that relies on them."""

from __future__ import annotations

import asyncio

import pytest
from fakeredis import FakeRedis
from fakeredis.aioredis import FakeRedis as AsyncFakeRedis

from aiodlock.fencing import RedisGuard, SQLFence
from examples import bank_transfer

from ..servers import Store


@pytest.mark.scripted
async def test_redis_guard_refuses_older_tokens_only(store: Store) -> None:
    redis = await store.raw()
    guard = RedisGuard(redis, prefix="guarded:")
    assert await guard.get("report") is None
    assert await guard.set("report", "first", token=1795208823051904)
    assert await guard.set("report", "again", token=1795208823051904)
    assert not await guard.set("report", "stale", token=1795208823051903)
    assert await guard.get("report") == ("again", 1795208823051904)
    assert await guard.set("report", "newer", token=1795208823051905)
    assert await guard.get("report") == ("newer", 1795208823051905)
    assert [key async for key in redis.scan_iter("*")] == ["guarded:report"]


@pytest.mark.scripted
async def test_redis_guard_expires_with_a_ttl_only(store: Store) -> None:
    redis = await store.raw()
    guard = RedisGuard(redis)
    await guard.set("report", b"\x00", token=5, ttl=60)
    assert 0 < await redis.pttl("report") <= 60_000
    assert not await guard.set("report", "stale", token=4)
    assert await redis.pttl("report") > 0, "a refused write changes nothing"
    await guard.set("report", "kept", token=5)
    assert await redis.pttl("report") == -1


@pytest.mark.scripted
@pytest.mark.parametrize("wrong", [0, -1, 2**53])
async def test_token_out_of_range_is_refused(store: Store, wrong: int) -> None:
    with pytest.raises(ValueError):
        await RedisGuard(await store.raw()).set("report", "", token=wrong)


@pytest.mark.scripted
@pytest.mark.parametrize("wrong", ["1", 1.5, True, None])
async def test_token_that_is_no_int_is_refused(store: Store, wrong: object) -> None:
    with pytest.raises(TypeError):
        await RedisGuard(await store.raw()).set("report", "", token=wrong)  # type: ignore[arg-type]


def test_pieces_of_sql() -> None:
    fence = SQLFence(column="account.lock_token", placeholder="%s")
    assert fence.assignment == "account.lock_token = %s"
    assert fence.condition == "account.lock_token <= %s"
    for wrong in ("", "a b", "x; DROP TABLE account", "a--"):
        with pytest.raises(ValueError):
            SQLFence(column=wrong)
        with pytest.raises(ValueError):
            SQLFence(placeholder=wrong)


async def test_bank_keeps_its_sum_and_refuses_the_stale_writer(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    async with asyncio.timeout(40):
        total = await bank_transfer.main(store.source)
    assert total == bank_transfer.ACCOUNTS * bank_transfer.OPENING_BALANCE
    assert "refused" in capsys.readouterr().out


def test_redis_guard_refuses_a_client_that_answers_at_once() -> None:
    """It would write, and raise then."""
    with pytest.raises(TypeError, match=r"redis\.asyncio"):
        RedisGuard(FakeRedis())


@pytest.mark.parametrize("ttl", [0, -1, float("inf"), float("nan"), 1e300, "5", True])
async def test_redis_guard_refuses_a_ttl_that_is_none(ttl: float) -> None:
    guard = RedisGuard(AsyncFakeRedis())
    with pytest.raises((TypeError, ValueError), match="ttl must be"):
        await guard.set("report", "x", token=1, ttl=ttl)
