"""A later version of aiodlock says by a mark that it is at work: this one refuses to work beside it."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio
from typer.testing import CliRunner

import aiodlock
from aiodlock.cli import _app

from ..conftest import MakeClient
from ..scenes import until
from ..servers import Store

KEY = "aiodlock:versions"


@pytest.fixture
def redis_store(store: Store) -> Store:
    """Give an empty store on Redis or Valkey, of any topology."""
    if not (store.server or store.cluster or store.service or store.quorum):
        pytest.skip("the mark is a key of Redis")
    return store


async def set_mark(store: Store, mark: str) -> None:
    for node in store.quorum:
        async with redis.asyncio.Redis.from_url(node.url) as raw:
            await raw.set(KEY, mark)
    if not store.quorum:
        await (await store.raw()).set(KEY, mark)


@pytest.mark.parametrize("mark", ["3 3", "0 1", "2", "later", "", "2 2x", "-1 9", "9" * 30 + " 9"])
async def test_client_refuses_to_work_beside_another_version(redis_store: Store, mark: str) -> None:
    await set_mark(redis_store, mark)
    with pytest.raises(aiodlock.BackendError, match="this release has version 2"):
        async with aiodlock.Client(redis_store.source):
            pass


@pytest.mark.parametrize("mark", ["2 2", "1 3", "2 9 and what a later version adds"])
async def test_client_works_beside_a_version_that_allows_it(
    redis_store: Store, make_client: MakeClient, mark: str
) -> None:
    await set_mark(redis_store, mark)
    client = await make_client()
    async with client.lock("name"):
        pass


async def test_client_that_meets_the_mark_when_it_connects_again_waits_until_it_is_gone(
    redis_store: Store, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    if redis_store.server is None:
        pytest.skip("connections are cut at one server")
    client = await make_client()
    lease = await client.lock("held", ttl=60).acquire()
    await set_mark(redis_store, "3 4")
    raw = await redis_store.raw()
    await raw.client_kill_filter(_type="normal", skipme=True)
    await raw.client_kill_filter(_type="pubsub")
    await until(lambda: "this release has version 2" in caplog.text)
    with pytest.raises(aiodlock.BackendError):
        await client.lock("other").acquire(timeout=1)
    assert lease.held, "until its deadline"
    await raw.delete(KEY)
    async with client.lock("other", timeout=30):
        assert lease.held
    await lease.extend()
    await lease.release()


async def test_mark_is_read_when_the_client_has_subscribed(
    redis_store: Store, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """A later version writes the mark, and looks for the channels of this one's clients afterwards."""
    if redis_store.server is None:
        pytest.skip("connections are cut at one server")
    client = await make_client()
    await set_mark(redis_store, "3 4")
    await (await redis_store.raw()).client_kill_filter(_type="pubsub")
    await until(lambda: "this release has version 2" in caplog.text)
    with pytest.raises(aiodlock.BackendError):
        await client.lock("name").acquire(timeout=1)
    await (await redis_store.raw()).delete(KEY)
    async with client.lock("name", timeout=30):
        pass


async def test_doctor_tells_of_another_version(redis_store: Store) -> None:
    await set_mark(redis_store, "3 4")
    source = ",".join(node.url for node in redis_store.quorum) or redis_store.url
    ended = await asyncio.to_thread(CliRunner().invoke, _app.app, ["doctor", "--url", source])
    assert ended.exit_code
    assert "this release has version 2" in " ".join(ended.output.split())
