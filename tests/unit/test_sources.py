"""Which URLs and ready clients name a Sentinel service, and what the others are told."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import SSLConnection
from redis.asyncio.sentinel import Sentinel

from aiodlock import Client, Unsupported
from aiodlock.backends.redis import Source


def sentinels(source: Source) -> list[tuple[str, int]]:
    addresses: list[tuple[str, int]] = source._kwargs["connection_pool"]._addresses
    return addresses


def for_sentinels(source: Source) -> dict[str, Any]:
    settings: dict[str, Any] = source._kwargs["connection_pool"]._for_sentinels
    return settings


def test_url_names_sentinels_service_and_database() -> None:
    source = Source.from_url("redis+sentinel://one:1,two:2/mymaster/3")
    assert sentinels(source) == [("one", 1), ("two", 2)]
    assert source._kwargs["connection_pool"]._service == "mymaster"
    assert source.db == 3


def test_port_and_database_have_defaults() -> None:
    source = Source.from_url("redis+sentinel://one,two/mymaster")
    assert sentinels(source) == [("one", 26379), ("two", 26379)]
    assert source.db == 0


def test_ipv6_addresses_stand_in_brackets() -> None:
    source = Source.from_url("redis+sentinel://[::1]:1,h,[fe80::2]/m")
    assert sentinels(source) == [("::1", 1), ("h", 26379), ("fe80::2", 26379)]


def test_service_may_be_percent_encoded() -> None:
    source = Source.from_url("redis+sentinel://h/my%2Fmaster/1")
    assert source._kwargs["connection_pool"]._service == "my/master"


def test_login_is_for_the_servers_and_sentinels_have_their_own() -> None:
    source = Source.from_url(
        "redis+sentinel://user:p%40ss@h/m/0?sentinel_username=s&sentinel_password=t&socket_timeout=2"
    )
    assert (source._kwargs["username"], source._kwargs["password"]) == ("user", "p@ss")
    assert source._kwargs["socket_timeout"] == 2.0
    assert (for_sentinels(source)["username"], for_sentinels(source)["password"]) == ("s", "t")


def test_password_of_the_servers_does_not_go_to_the_sentinels() -> None:
    assert "password" not in for_sentinels(Source.from_url("redis+sentinel://:secret@h/m"))


def test_tls_is_for_servers_and_sentinels() -> None:
    source = Source.from_url("rediss+sentinel://h/m?ssl_cert_reqs=none")
    assert isinstance(source.make_connection(), SSLConnection)
    assert for_sentinels(source)["ssl"] is True
    assert for_sentinels(source)["ssl_cert_reqs"] == "none"


def test_client_shows_no_password_of_a_service() -> None:
    client = Client("redis+sentinel://u:secret@h:1/m/0?sentinel_password=secret")
    assert "secret" not in repr(client)
    assert "redis+sentinel://h:1/m/0" in repr(client)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis+sentinel://h:1", "the service"),
        ("redis+sentinel://h:1/", "the service"),
        ("redis+sentinel:///m/0", "at least one sentinel"),
        ("redis+sentinel://h:1/m/zero", "a database's number"),
        ("redis+sentinel://h:1/m/0/1", "a database's number"),
        ("redis+sentinel://h:x/m", "host:port"),
        ("redis+sentinel://h:99999/m", "host:port"),
        ("redis+sentinel://h:1,,g:1/m", "host:port"),
        ("redis+sentinel://::1/m", "brackets"),
        ("redis+sentinel://h:1/m?nonsense=1", "option"),
        ("redis+sentinel://h:1/m?sentinel_nonsense=1", "sentinel_username and sentinel_password"),
        ("redis+sentinel:h:1/m", "both slashes"),
    ],
)
def test_bad_url_is_a_value_error_that_says_what_to_write(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Client(url)


async def test_client_of_a_sentinel_is_asked_for_its_sentinels() -> None:
    manager = Sentinel([("one", 1), ("two", 2)], sentinel_kwargs={"password": "s"})  # type: ignore[no-untyped-call]
    source = Source.from_client(manager.master_for("m", db=3, password="p"))
    assert sentinels(source) == [("one", 1), ("two", 2)]
    assert for_sentinels(source)["password"] == "s"
    assert source._kwargs["password"] == "p"
    assert source.db == 3


async def test_client_of_a_replica_is_refused() -> None:
    manager = Sentinel([("one", 1)])  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="master_for"):
        Client(manager.slave_for("m"))


async def test_settings_of_a_ready_client_make_connections_of_our_own() -> None:
    ready = Redis(host="h", port=1, password="p")
    connection: Any = Source.from_client(ready).make_connection()
    assert (connection.host, connection.port, connection.password) == ("h", 1, "p")


def test_replicas_of_a_store_in_memory_are_unsupported() -> None:
    with pytest.raises(Unsupported, match="memory"):
        Client("memory://", min_replicas=1)


@pytest.mark.parametrize("url", ["redis://h", "redis+sentinel://h/m", "redis+cluster://h"])
def test_notice_of_a_grant_is_only_a_hint_where_replicas_have_to_confirm_it(url: str) -> None:
    assert Client(url)._make_backend().capabilities.notices == "grants"
    assert Client(url, min_replicas=1)._make_backend().capabilities.notices == "hints"
