"""The fixtures themselves: what the other tests rely on."""

from __future__ import annotations

import pytest

from ..servers import MEMORY, Servers, Store


@pytest.mark.scripted
async def test_store_begins_empty(store: Store) -> None:
    raw = await store.raw()
    assert await raw.dbsize() == 0
    await raw.set("left over", "by this test on the store before")


@pytest.mark.scripted
async def test_raw_clients_share_the_store(store: Store) -> None:
    one, other = await store.raw(), await store.raw(decode_responses=False)
    await one.set("key", "value")
    assert await other.get("key") == b"value"


@pytest.mark.scripted
async def test_notifications_are_sent_when_asked_for(store: Store, notifications: bool) -> None:
    raw = await store.raw()
    async with raw.pubsub() as events:
        await events.subscribe("__keyspace@0__:key")
        assert await events.get_message(timeout=5.0) is not None
        await raw.set("key", "value")
        await raw.delete("key")
        await raw.publish("__keyspace@0__:key", "the end")
        seen: list[str] = []
        while not seen or seen[-1] != "the end":
            message = await events.get_message(timeout=5.0)
            assert message is not None
            seen.append(message["data"])
    assert ("del" in seen) == notifications


def test_real_store_is_a_server(real_store: Store) -> None:
    assert real_store.server is not None
    assert real_store.server.running


@pytest.mark.real_store
def test_marker_keeps_the_memory_store_out(store: Store) -> None:
    assert not store.is_memory


@pytest.mark.stores(MEMORY, "valkey9")
def test_marker_chooses_stores(store: Store) -> None:
    assert store.name in (MEMORY, "valkey9")


@pytest.mark.stores("valkey9")
def test_killed_or_paused_server_is_back_for_the_next_test(store: Store, servers: Servers) -> None:
    assert store.server is not None
    store.server.kill()
    again = servers.store("valkey9")
    assert again.url == store.url
    store.server.pause()
    assert servers.store("valkey9").url == store.url
