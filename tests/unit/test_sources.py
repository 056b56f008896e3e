"""Which URLs, ready clients and lists of them name what, and what the others are told."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
import redis.utils
import trustme
from fakeredis.aioredis import FakeRedis
from redis.asyncio import Redis
from redis.asyncio.connection import SSLConnection
from redis.asyncio.sentinel import Sentinel

from aiodlock import Client, Unsupported
from aiodlock.backends.etcd.sources import read_url as read_etcd_url
from aiodlock.backends.kept_backend import KeptBackend
from aiodlock.backends.redis import QuorumBackend, Source
from aiodlock.backends.redis.quorum.delays import Delays
from aiodlock.backends.zookeeper.address import read_url as read_zookeeper_url

from ..servers import Store


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


def test_connections_share_a_tls_context_until_a_certificate_is_another(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(authority)
    url = f"rediss://localhost/0?ssl_ca_certs={authority}"

    def context(url: str = url) -> ssl.SSLContext:
        connection = Source.from_url(url).make_connection()
        assert isinstance(connection, SSLConnection)
        return connection.ssl_context.get()

    first = context()
    assert context() is first, "another client's, too"
    assert context(f"{url}&ssl_check_hostname=false") is not first
    trustme.CA(organization_name="another one").cert_pem.write_to_path(authority)
    assert context() is not first


@pytest.mark.parametrize(
    "url", ["redis://localhost/abc", "rediss://h:1/1/2", "redis://localhost/-1"]
)
def test_database_that_is_no_number_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="database's number"):
        Client(url)


@pytest.mark.parametrize(
    "url", ["redis://localhost", "redis://localhost/", "redis://h/3", "unix:///a/b"]
)
def test_database_may_be_left_out(url: str) -> None:
    assert Source.from_url(url).db == (3 if url.endswith("3") else 0)


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
    assert Client(url)._core.store.open().capabilities.notices == "grants"
    assert Client(url, min_replicas=1)._core.store.open().capabilities.notices == "hints"


THREE = ["redis://one", "redis://two", "redis://three"]


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ([], "at least 3 servers for a quorum .5 survive the loss of 2., got 0"),
        (THREE[:2], "at least 3 servers for a quorum .5 survive the loss of 2., got 2"),
        ([*THREE, THREE[0]], "different servers, redis://one is there twice"),
        ([*THREE, "redis://user:secret@one"], "different servers, redis://one is there twice"),
        ([*THREE, "redis://one/"], "redis://one is there twice, also as redis://one/"),
        (
            [*THREE, "redis://ONE.:6379/1"],
            "redis://one is there twice, also as redis://ONE.:6379/1",
        ),
        ([*THREE, "rediss://one"], "redis://one is there twice, also as rediss://one"),
        (
            [*THREE, Redis(host="one", db=3)],
            "redis://one is there twice, also as Redis at one:6379",
        ),
        (
            ["unix:///a?db=0", "unix:///a?db=1", "unix:///b"],
            "different servers, unix:///a is there",
        ),
        (
            ["redis+sentinel://h,i/m", "redis+sentinel://i:26379,h/m/1", "redis://one"],
            "different servers, redis.sentinel://h,i/m is there twice",
        ),
        (["memory://a", "memory://b", "memory://a"], "different servers, memory://a is there"),
        ([*THREE, "http://four"], "must be a URL that begins with one of redis://"),
    ],
)
def test_bad_list_of_servers_is_a_value_error_that_says_what_is_wrong(
    sources: list[Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Client(sources)


def test_quorum_takes_urls_services_and_ready_clients_alike() -> None:
    client = Client(["redis://one", "redis+sentinel://h:1/m", Redis(host="three")])
    assert repr(client).startswith(
        "<aiodlock.Client a quorum of redis://one, redis+sentinel://h:1/m, Redis at three:6379"
    )


def test_quorum_in_memory_may_have_several_private_stores() -> None:
    assert "memory://, memory://" in repr(Client(["memory://"] * 3))


def test_quorum_shows_no_password_of_a_node() -> None:
    client = Client(["redis://u:secret@one", *THREE[1:]])
    assert "secret" not in repr(client)
    assert "redis://one" in repr(client)


@pytest.mark.parametrize("nested", [THREE, tuple(THREE)])
def test_list_in_a_list_is_a_type_error(nested: Any) -> None:
    with pytest.raises(TypeError, match="a flat list of servers"):
        Client([*THREE, nested])


def test_what_is_no_source_in_a_list_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"a URL or a redis\.asyncio\.Redis .*, not int"):
        Client([*THREE, 6379])  # type: ignore[list-item]


def test_cluster_is_no_node_of_a_quorum() -> None:
    with pytest.raises(
        Unsupported, match=r"independent servers, and redis\+cluster at .* is a cluster"
    ):
        Client([*THREE, "redis+cluster://four:1"])


def test_replicas_of_the_nodes_are_unsupported() -> None:
    with pytest.raises(Unsupported, match="min_replicas above 0 has no meaning with a quorum"):
        Client(THREE, min_replicas=1)


@pytest.mark.parametrize("source", ["redis://one", "memory://", "redis+cluster://one"])
def test_restart_delay_is_for_a_quorum(source: str) -> None:
    with pytest.raises(ValueError, match="restart_delay is for a quorum: give a list of sources"):
        Client(source, restart_delay=1)


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf")])
def test_restart_delay_is_a_number_of_seconds(wrong: float) -> None:
    with pytest.raises(ValueError, match="restart_delay"):
        Client(THREE, restart_delay=wrong)


def restart_delay_of(client: Client) -> Delays:
    backend = client._core.store.open()
    assert isinstance(backend, KeptBackend)
    store = backend.store
    assert isinstance(store, QuorumBackend)
    return store.nodes.delays


def test_restart_delay_may_be_zero() -> None:
    delays = restart_delay_of(Client(THREE, restart_delay=0))
    assert not delays.notes
    assert delays.longest == 0


def test_restart_delay_is_at_least_what_is_asked_for() -> None:
    delays = restart_delay_of(Client(THREE, restart_delay=7))
    assert delays.notes
    assert delays.longest == 7


def test_longest_lease_in_use_is_the_restart_delay() -> None:
    delays = restart_delay_of(Client(THREE))
    assert delays.longest == 0
    assert delays.use(40_000)
    assert delays.longest == 40
    delays.hear([b"3600000", b"5000", b"0", b"9"])
    assert delays.longest == 3600


def test_semaphore_of_a_quorum_is_unsupported_and_says_what_to_use() -> None:
    with pytest.raises(Unsupported, match="use one server, Sentinel or a cluster"):
        Client(THREE).semaphore("printers", 2)


def test_quorum_says_what_it_can_do() -> None:
    capabilities = Client(THREE)._core.store.open().capabilities
    assert (capabilities.fair, capabilities.semaphores) == ("by ticket", False)
    assert capabilities.notices == "hints"


# -- what connections are made of ----------------------------------------------------------------------


def test_metadata_of_redis_py_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Source.from_url("redis://one")

    def read_again() -> str:
        raise AssertionError("the metadata of a package is read for each connection")

    monkeypatch.setattr(redis.utils, "get_lib_version", read_again)
    Source.from_url("redis://two").make_connection()
    Source.from_url("redis+sentinel://h/m").make_connection()


@pytest.mark.stores("valkey9", "redis62")
async def test_server_is_told_of_redis_py_as_ever(store: Store) -> None:
    async with Client(store.url):
        raw = await store.raw()
        told = {(one.get("lib-name"), one.get("lib-ver")) for one in await raw.client_list()}
    assert len(told) == 1, "ours and redis-py's own say the same"


def test_name_of_the_users_own_is_told() -> None:
    named = pytest.importorskip("redis.driver_info").DriverInfo(name="mine")
    made = Source.from_client(Redis(host="one", driver_info=named)).make_connection()
    assert made.driver_info is named


@pytest.mark.parametrize(
    "source",
    [
        "postgresql://one,two..example/",
        "etcd://one,two..example/",
        "zookeeper://one,two..example/",
        "redis+sentinel://one,two..example/mymaster",
        "rediss://two..example/0",
        ["redis://one", "redis://two..example", "redis://three"],
        Redis(host="two..example"),
    ],
)
def test_host_that_no_resolver_takes_is_a_value_error(source: Any) -> None:
    with pytest.raises(ValueError, match="no host can be called"):
        Client(source)


@pytest.mark.parametrize("scheme", ["redis", "postgresql", "etcd"])
def test_port_0_is_a_value_error(scheme: str) -> None:
    with pytest.raises(ValueError, match="port 0"):
        Client(f"{scheme}://one:0/")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://%2Frun%2Fpostgresql%2Fa-directory-with-a-name-that-is-longer-than-a-label-may-be/db",
        "postgresql:///db?host=/run/postgresql",
        "postgresql://[::1],b\u00fccher.example:1/db",
        "etcd://[fe80::1%25eth0]:1,b\u00fccher.example",
        "zookeeper://[::1]:1,a_b.example.",
    ],
)
def test_hosts_of_all_kinds_are_taken(url: str) -> None:
    Client(url)


@pytest.mark.parametrize("prefix", [".", ".."])
def test_prefix_that_no_node_can_have_is_a_value_error(prefix: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name of a node"):
        Client("zookeeper://h", prefix=prefix)


def test_hosts_of_zookeeper_may_have_spaces_between_them() -> None:
    ensemble = read_zookeeper_url("zookeeper://one:1, two , [::1]:3/chroot", "aiodlock")
    assert ensemble.hosts == (("one", 1), ("two", 2181), ("::1", 3))


def test_hosts_of_etcd_may_have_spaces_between_them() -> None:
    access, _ = read_etcd_url("etcd://one:1, two , [::1]:3")
    assert access.endpoints == ("one:1", "two:2379", "[::1]:3")


@pytest.mark.parametrize("step", ["%F0%9F%98%80", "a%7F", "%09", "%EE%80%80", "..", "a%2Fb"])
def test_chroot_that_zookeepers_servers_refuse_is_a_value_error(step: str) -> None:
    with pytest.raises(ValueError, match="no node can be called"):
        Client(f"zookeeper://h/b\u00fccher/{step}")


@pytest.mark.parametrize(
    "url",
    [
        "redis://h/0?socket_timout=5",
        "rediss://h/0?ssl_cacerts=ca.pem",
        "redis://h/0?ssl_cert_reqs=none",
        "unix:///s?socket_timout=5",
        "redis+cluster://h?socket_timout=5",
    ],
)
def test_option_that_the_driver_does_not_know_is_a_value_error(url: str) -> None:
    with pytest.raises(ValueError, match=r"source.*option"):
        Client(url)


@pytest.mark.parametrize(
    "where", ["rediss://h/0", "rediss+cluster://h:1", "rediss+sentinel://h:1/s"]
)
def test_value_that_the_driver_does_not_take_is_a_value_error(where: str) -> None:
    with pytest.raises(ValueError, match=r"source.*CERT_NONE"):
        Client(f"{where}?ssl_cert_reqs=CERT_NONE")


@pytest.mark.parametrize(
    ("source", "options", "stores"),
    [
        ("zookeeper://h", {"hold_at_least": 1}, "PostgreSQL, etcd or memory"),
        (["memory://"] * 3, {"hold_at_least": 1}, "PostgreSQL, etcd or memory"),
        (["memory://"] * 3, {"linger": 1}, "PostgreSQL, etcd, ZooKeeper or memory"),
    ],
)
def test_unsupported_option_names_the_stores_that_have_it(
    source: Any, options: dict[str, Any], stores: str
) -> None:
    with pytest.raises(Unsupported, match=stores):
        Client(source).lock("x", **options)


def test_unsupported_kinds_name_the_stores_that_have_them() -> None:
    client = Client("zookeeper://h")
    with pytest.raises(Unsupported, match="PostgreSQL, etcd or memory"):
        client.once("x", keep=1)
    with pytest.raises(Unsupported, match="PostgreSQL or memory"):
        client.semaphore("x", 1, resize=True)


def test_ready_client_without_a_port_is_told() -> None:
    with pytest.raises(ValueError, match="source must have a port, not None"):
        Client(Redis(port=None))  # type: ignore[arg-type]


async def test_name_of_a_fake_server_is_no_host() -> None:
    fake = FakeRedis.from_url("redis://a..b")
    async with Client(fake) as client, client.lock("name") as lease:
        assert lease.held
