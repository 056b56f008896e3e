"""Sentinels that are behind, silent, or do not agree; two servers that take themselves for primaries."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import pytest
from redis.asyncio.sentinel import MasterNotFoundError

import aiodlock
from aiodlock._embedded import EmbeddedServer
from aiodlock.backends.redis import RedisBackend, Source

from ..scenes import is_held, store_of, until
from ..security.fake_server import FakeServer
from ..servers import embedded

FOR_EVER = 300.0
SILENT = b""
UNKNOWN = b"-ERR No such master with that name\r\n"


def _bulk(*parts: str) -> bytes:
    return b"*%d\r\n" % len(parts) + b"".join(
        b"$%d\r\n%b\r\n" % (len(p), p.encode()) for p in parts
    )


class LyingSentinel(FakeServer):
    """Names what the test wants it to name."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = self._answer
        self.host = "127.0.0.1"
        self.names: int | bytes = SILENT
        #: What SENTINEL MASTER says, where that is something else.
        self.says_still: int | None = None
        self.epoch = 0
        self.flags = "master"
        self.asked = 0

    def _answer(self, command: tuple[bytes, ...]) -> bytes | None:
        if command[0] != b"SENTINEL":
            return None
        if isinstance(self.names, bytes):
            return self.names
        if command[1].upper() != b"MASTER":
            return _bulk(self.host, str(self.names))
        self.asked += 1
        facts = {"ip": self.host, "port": str(self.says_still or self.names), "flags": self.flags}
        facts |= {"config-epoch": str(self.epoch), "num-other-sentinels": "2"}
        return _bulk(*(part for fact in facts.items() for part in fact))

    @property
    def address(self) -> str:
        return self.url.partition("//")[2].partition("/")[0]

    def name(self, server: EmbeddedServer, epoch: int) -> None:
        self.names, self.epoch = _port(server), epoch


def _port(server: EmbeddedServer) -> int:
    return int(server.url.rpartition(":")[2].partition("/")[0])


@pytest.fixture
def two() -> Iterator[list[EmbeddedServer]]:
    """Give two servers that take themselves for primaries: the old one, and the new one."""
    with ExitStack() as stack:
        yield [stack.enter_context(embedded("valkey9", tcp=True)) for _ in range(2)]


@pytest.fixture
async def sentinels() -> AsyncIterator[list[LyingSentinel]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(LyingSentinel()) for _ in range(3)]


def _url(sentinels: list[LyingSentinel]) -> str:
    return f"redis+sentinel://{','.join(one.address for one in sentinels)}/service/0"


def _client(sentinels: list[LyingSentinel], **options: float) -> aiodlock.Client:
    return aiodlock.Client(_url(sentinels), ttl=FOR_EVER, waiter_ttl=FOR_EVER, **options)  # type: ignore[arg-type]


def _ports(client: aiodlock.Client) -> set[int | None]:
    backend = store_of(client)
    assert isinstance(backend, RedisBackend)
    peers = [
        link.wire.peer if link.wire is not None else None
        for link in backend.server.connections.links
    ]
    return {peer[1] if isinstance(peer, tuple) else None for peer in peers}


def _is_at(client: aiodlock.Client, server: EmbeddedServer) -> Callable[[], bool]:
    return lambda: _ports(client) == {_port(server)}


@pytest.mark.parametrize("first_to_know", [0, 1, 2])
async def test_one_sentinel_that_knows_of_a_failover_is_enough(
    two: list[EmbeddedServer], sentinels: list[LyingSentinel], first_to_know: int
) -> None:
    old, new = two
    for sentinel in sentinels:
        sentinel.name(old, 1)
    async with _client(sentinels) as client, _client(sentinels) as other:
        assert _is_at(client, old)()
        lease = await client.lock("name").acquire()
        sentinels[first_to_know].name(new, 2)
        lost = await asyncio.wait_for(lease.wait_lost(), 5.0)
        assert lost.reason == "gone"
        await until(_is_at(client, new), "all connections at the new primary")
        await until(_is_at(other, new), "all connections at the new primary")
        async with other.lock("name") as successor:
            # The others still name the old one, every second: it does not lead back.
            await asyncio.sleep(1.5)
            assert _is_at(client, new)()
            assert is_held(successor)


async def test_sentinels_that_disagree_do_not_make_connections_go_to_and_fro(
    two: list[EmbeddedServer], sentinels: list[LyingSentinel], caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a cut network, or with epochs that were lost: two name one server, and one the other."""
    old, new = two
    sentinels[0].name(old, 0)
    sentinels[1].name(new, 0)
    sentinels[2].name(new, 0)
    async with _client(sentinels) as client:
        first = _ports(client)
        assert len(first) == 1
        for _ in range(200):
            async with client.lock("name", timeout=2.0):
                pass
            await asyncio.sleep(0.01)
        assert _ports(client) == first
    assert not [r for r in caplog.records if getattr(r, "event", "") == "no_connection"]


async def test_failover_counts_from_the_promotion_on_not_from_when_all_replicas_follow(
    two: list[EmbeddedServer], sentinels: list[LyingSentinel]
) -> None:
    """Until then SENTINEL MASTER names the old primary, SENTINEL GET-MASTER-ADDR-BY-NAME the new one."""
    old, new = two
    for sentinel in sentinels:
        sentinel.name(old, 1)
    async with _client(sentinels) as client:
        sentinels[0].name(new, 2)
        sentinels[0].says_still, sentinels[0].flags = _port(old), "master,o_down,s_down"
        await until(_is_at(client, new), "all connections at the new primary")


async def test_new_client_believes_the_newest_answer_whichever_comes_first(
    two: list[EmbeddedServer], sentinels: list[LyingSentinel]
) -> None:
    old, new = two
    sentinels[0].name(old, 1)
    sentinels[1].name(old, 1)
    sentinels[2].name(new, 2)
    for _ in range(3):
        connection = Source.from_url(_url(sentinels)).make_connection()
        await connection.connect()  # type: ignore[no-untyped-call]
        assert connection.port == _port(new)  # type: ignore[attr-defined]
        await connection.disconnect()


async def test_newest_primary_that_is_down_is_waited_for_instead_of_the_old_one(
    two: list[EmbeddedServer], sentinels: list[LyingSentinel]
) -> None:
    old, new = two
    sentinels[0].name(old, 1)
    sentinels[1].name(new, 2)
    sentinels[1].flags = "master,s_down"
    connection = Source.from_url(_url(sentinels)).make_connection()
    with pytest.raises(MasterNotFoundError, match="calls it down"):
        await connection.connect()  # type: ignore[no-untyped-call]


async def test_old_primary_is_left_although_the_new_one_is_down(
    two: list[EmbeddedServer], sentinels: list[LyingSentinel]
) -> None:
    old, new = two
    for sentinel in sentinels:
        sentinel.name(old, 1)
    async with _client(sentinels, close_timeout=0.1) as client:
        sentinels[0].name(new, 2)
        sentinels[0].flags = "master,s_down"
        await until(lambda: _ports(client) == {None}, "no connection at all")
        sentinels[0].flags = "master"
        await until(_is_at(client, new), "all connections at the new primary")


async def test_silent_sentinels_delay_neither_entering_nor_the_news_of_a_failover(
    two: list[EmbeddedServer], sentinels: list[LyingSentinel]
) -> None:
    old, new = two
    sentinels[2].name(old, 1)
    async with _client(sentinels) as client:
        asked = sentinels[2].asked
        await until(lambda: sentinels[2].asked >= asked + 3, "questions", within=6.0)
        sentinels[2].name(new, 2)
        await until(_is_at(client, new), "all connections at the new primary", within=5.0)


async def test_sentinels_that_all_fall_silent_cost_nothing_but_a_warning(
    two: list[EmbeddedServer], sentinels: list[LyingSentinel], caplog: pytest.LogCaptureFixture
) -> None:
    old, _ = two
    for sentinel in sentinels:
        sentinel.name(old, 1)
    async with _client(sentinels) as client:
        async with client.lock("name") as lease:
            for sentinel in sentinels:
                sentinel.names = SILENT

            def told() -> bool:
                return any(getattr(r, "event", "") == "no_sentinel" for r in caplog.records)

            await until(told, "a warning")
            assert is_held(lease)
            await lease.extend()
        for sentinel in sentinels:
            sentinel.name(old, 1)
    warned = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert [getattr(r, "event", "") for r in warned] == ["no_sentinel"], "told once"


async def test_names_and_addresses_of_one_server_are_one_server(
    two: list[EmbeddedServer], sentinels: list[LyingSentinel], caplog: pytest.LogCaptureFixture
) -> None:
    """Sentinels that announce host names, some of them, as while that is being changed."""
    old, new = two
    for sentinel in sentinels:
        sentinel.name(old, 1)
    sentinels[1].host = "localhost"
    async with _client(sentinels) as client:
        for sentinel in sentinels:
            sentinel.host = "localhost" if sentinel.host == "127.0.0.1" else "127.0.0.1"
        asked = sentinels[0].asked
        await until(lambda: sentinels[0].asked >= asked + 2, "questions")
        assert not [r for r in caplog.records if getattr(r, "event", "") == "no_connection"]
        sentinels[0].host = "localhost"
        sentinels[0].name(new, 2)
        await until(_is_at(client, new), "all connections at the new primary")


async def test_name_that_leads_nowhere_for_now_closes_nothing(
    two: list[EmbeddedServer], sentinels: list[LyingSentinel], caplog: pytest.LogCaptureFixture
) -> None:
    old, _ = two
    for sentinel in sentinels:
        sentinel.name(old, 1)
    async with _client(sentinels) as client:
        for sentinel in sentinels:
            sentinel.host = "no-such-host.invalid"
        asked = sentinels[0].asked
        await until(lambda: sentinels[0].asked >= asked + 2, "questions")
        async with client.lock("name", timeout=2.0) as lease:
            assert lease.held
    assert not [r for r in caplog.records if getattr(r, "event", "") == "no_connection"]


async def test_slow_resolver_takes_one_thread_and_not_all_of_the_loop(
    two: list[EmbeddedServer],
    sentinels: list[LyingSentinel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop's threads are the user's, too: for `asyncio.to_thread`."""
    resolve, asked, answer = socket.getaddrinfo, [0], threading.Event()

    def slow(host: str, *arguments: Any, **options: Any) -> Any:
        if host != "slow.example":
            return resolve(host, *arguments, **options)
        asked[0] += 1
        assert answer.wait(60.0)
        raise socket.gaierror(socket.EAI_AGAIN, "temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    for sentinel in sentinels:
        sentinel.name(two[0], 1)
    async with _client(sentinels) as client, client.lock("name") as lease:
        for sentinel in sentinels:
            sentinel.host = "slow.example"
        try:
            before = sentinels[0].asked
            await until(lambda: sentinels[0].asked >= before + 3)
            assert asked == [1]
        finally:
            answer.set()
        await until(lambda: asked[0] > 1, "another question")
        assert is_held(lease)


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("", None),
        ("no..host", None),
        ("x" * 70, None),
        ("no\0host", None),
        ("127.0.0.1", 0),
        ("127.0.0.1", 99999),
    ],
)
async def test_address_that_no_server_can_have_counts_for_nothing(
    two: list[EmbeddedServer], sentinels: list[LyingSentinel], host: str, port: int | None
) -> None:
    """From the first sentinel, since a newer failover: while entered, and when entering."""
    for sentinel in sentinels:
        sentinel.name(two[0], 1)
    async with _client(sentinels) as client:
        async with client.lock("name") as lease:
            sentinels[0].host, sentinels[0].epoch = host, 2
            if port is not None:
                sentinels[0].names = port
            asked = sentinels[0].asked
            await until(lambda: sentinels[0].asked >= asked + 2)
            async with _client(sentinels) as other, other.lock("another"):
                assert _is_at(other, two[0])()
            assert is_held(lease)
            assert _is_at(client, two[0])()


async def test_address_that_is_another_services_by_now_is_an_outage_and_not_the_end(
    two: list[EmbeddedServer], sentinels: list[LyingSentinel]
) -> None:
    """It refuses this user. The sentinels name another server later on."""
    old, new = two
    for sentinel in sentinels:
        sentinel.name(old, 1)
    with embedded("valkey9", tcp=True, requirepass="of-another-service") as reused:
        async with _client(sentinels) as client:
            lease = await client.lock("name").acquire()
            for sentinel in sentinels:
                sentinel.name(reused, 2)
            await until(lambda: _ports(client) == {None}, "no connection at all")
            assert is_held(lease)
            for sentinel in sentinels:
                sentinel.name(new, 3)
            await until(_is_at(client, new), "all connections at the new primary")
            assert (await lease.wait_lost()).reason == "gone"


async def test_service_that_is_unknown_to_all_sentinels_later_costs_nothing(
    two: list[EmbeddedServer], sentinels: list[LyingSentinel]
) -> None:
    for sentinel in sentinels:
        sentinel.name(two[0], 1)
    async with _client(sentinels) as client:
        for sentinel in sentinels:
            sentinel.names = UNKNOWN
        async with client.lock("name") as lease:
            await asyncio.sleep(1.5)
            assert is_held(lease)


async def test_sentinels_are_asked_once_a_second_on_connections_that_are_kept(
    two: list[EmbeddedServer], sentinels: list[LyingSentinel]
) -> None:
    for sentinel in sentinels:
        sentinel.name(two[0], 1)
    async with _client(sentinels):
        counted = [sentinel.asked for sentinel in sentinels]
        greeted = [sentinel.commands.count(b"CLIENT") for sentinel in sentinels]
        await asyncio.sleep(3.0)
        asked = [one.asked - before for one, before in zip(sentinels, counted, strict=True)]
        assert all(2 <= times <= 5 for times in asked)
        assert [one.commands.count(b"CLIENT") for one in sentinels] == greeted
    await until(lambda: not any(sentinel._writers for sentinel in sentinels), "their end")
