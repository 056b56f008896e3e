from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from ..proxy import FaultProxy, command_end, containing, named, parse_command, reply_end
from ..scenes import bounded, takes, until
from ..servers import Store

pytestmark = pytest.mark.stores("valkey9")

Make = Callable[..., redis.asyncio.Redis]

BROKEN = (redis.ConnectionError, ConnectionError)


@pytest.fixture(params=[2, 3], ids=["resp2", "resp3"])
async def connect(request: pytest.FixtureRequest, proxy: FaultProxy) -> AsyncIterator[Make]:
    """Give clients of the proxy, of one connection each, that do not try again."""
    clients: list[redis.asyncio.Redis] = []

    def make(**options: Any) -> redis.asyncio.Redis:
        client = redis.asyncio.Redis.from_url(
            proxy.url,
            protocol=request.param,
            decode_responses=True,
            single_connection_client=True,
            retry=Retry(NoBackoff(), 0),
            **options,
        )
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.aclose()


async def test_commands_pass_and_are_counted(proxy: FaultProxy, connect: Make) -> None:
    client = connect()
    await client.set("key", "value")
    assert await client.get("key") == "value"
    assert await client.get("key") == "value"
    (connection,) = proxy.connections
    assert proxy.accepted == 1
    assert connection.commands["GET"] == proxy.commands["GET"] == 2
    assert connection.bytes_from_client > 0
    assert connection.bytes_from_server > 0
    assert proxy.log[-1].args == (b"GET", b"key")
    proxy.forget()
    assert proxy.command_count == 0


async def test_large_values_and_pipelines_pass_unchanged(proxy: FaultProxy, connect: Make) -> None:
    client = connect()
    large = "x\r\n" * 200_000
    await client.set("key", large)
    assert await client.get("key") == large
    async with client.pipeline(transaction=False) as pipe:
        for number in range(500):
            pipe.set(f"key:{number}", number)
        assert await pipe.execute() == [True] * 500


async def test_dropped_reply_cuts_after_the_server_ran_the_command(
    proxy: FaultProxy, connect: Make, store: Store
) -> None:
    client, raw = connect(), await store.raw()
    await client.ping()
    fault = proxy.drop_reply(named("INCRBY", 2))
    assert await client.incr("number") == 1
    with pytest.raises(BROKEN):
        await client.incr("number")
    assert fault.happened.is_set()
    assert fault.command is not None
    assert fault.command.args == (b"INCRBY", b"number", b"1")
    assert await raw.get("number") == "2"
    again = connect()
    assert await again.incr("number") == 3


async def test_only_the_chosen_reply_of_a_pipeline_is_lost(proxy: FaultProxy, store: Store) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    proxy.drop_reply(containing(b"second"))
    writer.write(b"ECHO first\r\nECHO second\r\nECHO third\r\n")
    assert await reader.read() == b"$5\r\nfirst\r\n"
    writer.close()


async def test_dropped_command_never_reaches_the_server(
    proxy: FaultProxy, connect: Make, store: Store
) -> None:
    client, raw = connect(), await store.raw()
    fault = proxy.drop_command(named("INCRBY"))
    with pytest.raises(BROKEN):
        await client.incr("number")
    assert fault.happened.is_set()
    assert await raw.get("number") is None


async def test_held_command_arrives_late_though_its_client_is_gone(
    proxy: FaultProxy, connect: Make, store: Store
) -> None:
    client, raw = connect(), await store.raw()
    await client.ping()
    fault = proxy.hold_command(named("INCRBY"))
    sent = asyncio.ensure_future(client.incr("number"))
    await fault.happened.wait()
    proxy.cut()
    with pytest.raises(BROKEN):
        await sent
    assert await connect().incr("number") == 1
    fault.release()
    await fault.answered.wait()
    assert await raw.get("number") == "2"


async def test_held_command_goes_on_where_its_client_still_waits(
    proxy: FaultProxy, connect: Make
) -> None:
    client = connect()
    fault = proxy.hold_command(named("INCRBY"))
    sent = asyncio.ensure_future(client.incr("number"))
    await fault.happened.wait()
    fault.release()
    assert await sent == 1
    assert await client.incr("number") == 2


async def test_held_reply_is_delivered_when_released(
    proxy: FaultProxy, connect: Make, store: Store
) -> None:
    client, raw = connect(), await store.raw()
    fault = proxy.hold_reply(named("INCRBY"))
    sent = asyncio.ensure_future(client.incr("number"))
    await fault.happened.wait()
    assert await raw.get("number") == "1"
    assert not sent.done()
    fault.release()
    assert await sent == 1


async def test_lost_confirmation_of_a_subscription(proxy: FaultProxy, connect: Make) -> None:
    client = connect()
    fault = proxy.drop_reply(named("SUBSCRIBE"))
    async with client.pubsub() as events:
        await events.connect()
        await events.ping()
        await events.subscribe("channel")
        await fault.happened.wait()


async def test_messages_between_replies_are_not_taken_for_replies(
    proxy: FaultProxy, store: Store
) -> None:
    raw = await store.raw()
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"SUBSCRIBE a b\r\nPING\r\n")
    await reader.readuntil(b"pong\r\n$0\r\n\r\n")
    await raw.publish("a", "hello")
    await reader.readuntil(b"hello\r\n")
    proxy.drop_reply(named("PING"))
    await raw.publish("b", "again")
    writer.write(b"PING\r\n")
    rest = await reader.read()
    assert rest.endswith(b"again\r\n")
    assert b"pong" not in rest
    writer.close()


async def test_cut_breaks_open_connections_and_new_ones_work(
    proxy: FaultProxy, connect: Make
) -> None:
    client = connect()
    await client.ping()
    assert proxy.cut() == 1
    assert proxy.open_connections == []
    with pytest.raises(BROKEN):
        await client.ping()
    assert await connect().ping()


async def test_refused_until_accepted_on_the_same_port(proxy: FaultProxy, connect: Make) -> None:
    client, port = connect(), proxy.port
    await client.ping()
    await proxy.refuse()
    with pytest.raises(BROKEN):
        await connect().ping()
    assert await client.ping(), "open connections live on"
    await proxy.accept()
    assert proxy.port == port
    assert await connect().ping()


async def test_half_open_connection_swallows_and_is_cut_by_heal(
    proxy: FaultProxy, connect: Make
) -> None:
    client = connect(socket_timeout=1.0)
    await client.ping()
    proxy.half_open()
    with pytest.raises(redis.TimeoutError):
        await client.ping()
    await proxy.heal()
    assert await connect().ping()
    assert proxy.connections[0].open is False


async def test_stalled_bytes_arrive_after_heal(
    proxy: FaultProxy, connect: Make, store: Store
) -> None:
    client, raw = connect(), await store.raw()
    await client.ping()
    proxy.stall()
    sent = asyncio.ensure_future(client.incr("number"))
    await until(lambda: proxy.commands["INCRBY"])
    assert await raw.get("number") is None
    assert not sent.done()
    await proxy.heal()
    assert await sent == 1


async def test_delay_is_paid_once_by_a_pipeline(proxy: FaultProxy, connect: Make) -> None:
    client = connect()
    await client.ping()
    proxy.delay(0.1)
    async with takes(at_least=0.1, at_most=1.0):  # the pipeline connects first; 50 delays are 5 s
        async with client.pipeline(transaction=False) as pipe:
            for _ in range(50):
                pipe.incr("number")
            await pipe.execute()


async def test_trickled_replies_are_whole(proxy: FaultProxy, connect: Make) -> None:
    client = connect()
    proxy.trickle()
    await client.set("key", "value" * 100)
    assert await client.get("key") == "value" * 100


async def test_leaving_with_open_connections_and_held_commands_leaves_no_task(
    store: Store,
) -> None:
    async with FaultProxy(store.url) as proxy:
        fault = proxy.hold_command(named("PING"))
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"PING\r\n")
        await fault.happened.wait()
    writer.close()


@pytest.mark.parametrize("turns", range(8))
async def test_leaving_while_a_connection_is_accepted_closes_it(store: Store, turns: int) -> None:
    """Clients that connect again outlive a proxy: in any turn one may be between the port and the proxy."""
    loop = asyncio.get_running_loop()
    async with FaultProxy(store.url) as proxy:
        client = socket.create_connection(("127.0.0.1", proxy.port))
        client.setblocking(False)
        for _ in range(turns):
            await asyncio.sleep(0)
    with client, suppress(ConnectionResetError):
        async with bounded(5):
            assert await loop.sock_recv(client, 1) == b""
    gc.collect()  # a socket that was forgotten says so, and fails the test


async def test_connection_is_refused_when_the_upstream_is_away(store: Store) -> None:
    async with FaultProxy("redis://127.0.0.1:1/0") as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        with suppress(ConnectionError):  # an end or a reset, as the timing has it
            assert await reader.read() == b""
        assert proxy.open_connections == []
        writer.close()


@pytest.mark.parametrize(
    ("url", "path"),
    [("redis://127.0.0.1:1/3", "/3"), ("redis://127.0.0.1:1", "/0"), ("unix:///s?db=2", "/2")],
)
def test_url_keeps_the_database(url: str, path: str) -> None:
    assert FaultProxy(url).url == f"redis://127.0.0.1:0{path}"


def test_upstream_must_be_a_plain_connection() -> None:
    with pytest.raises(ValueError, match="rediss"):
        FaultProxy("rediss://localhost")


@pytest.mark.parametrize(
    "whole",
    [
        b"+OK\r\n",
        b"-ERR no\r\n",
        b":1\r\n",
        b"_\r\n",
        b",1.5\r\n",
        b"#t\r\n",
        b"(123\r\n",
        b"$-1\r\n",
        b"$0\r\n\r\n",
        b"$4\r\n\r\n\r\n\r\n",
        b"=7\r\ntxt:abc\r\n",
        b"!3\r\nERR\r\n",
        b"*-1\r\n",
        b"*0\r\n",
        b"*2\r\n*1\r\n:1\r\n$1\r\na\r\n",
        b"~1\r\n:1\r\n",
        b"%2\r\n+a\r\n:1\r\n+b\r\n*1\r\n:2\r\n",
        b">2\r\n+message\r\n+x\r\n",
        b"|1\r\n+ttl\r\n:1\r\n+OK\r\n",
    ],
)
def test_end_of_reply_is_found_wherever_it_is_split(whole: bytes) -> None:
    assert reply_end(whole) == len(whole)
    assert reply_end(whole + b"+next\r\n") == len(whole)
    for length in range(len(whole)):
        assert reply_end(whole[:length]) is None


def test_commands_are_parsed() -> None:
    raw = b"*2\r\n$4\r\nECHO\r\n$4\r\na\r\nb\r\n"
    assert command_end(raw + b"PING\r\n") == len(raw)
    assert command_end(raw[:-1]) is None
    assert command_end(b"PING\r\n") == 6
    assert parse_command(raw) == (b"ECHO", b"a\r\nb")
    assert parse_command(b"ECHO a\r\n") == (b"ECHO", b"a")
