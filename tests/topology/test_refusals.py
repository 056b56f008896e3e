"""A server that does not know this client's user, later on: an outage of that server, no more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
import redis
from redis.asyncio import Redis
from redis.credentials import CredentialProvider

import aiodlock
from aiodlock._embedded import EmbeddedServer, find_valkey9
from aiodlock._patience import Further
from aiodlock.backends.redis import Source
from aiodlock.backends.redis.cluster.seeds import ask_seed
from aiodlock.backends.redis.cluster.topology import slot_of
from aiodlock.backends.redis.keys import keys_of
from aiodlock.backends.redis.refusals import ReplyError

from ..scenes import bounded, is_held, until, until_outlived, until_waiting
from ..servers import embedded
from .cluster import Cluster, port

#: A ttl that outlives a refusal also where a busy machine stands still for seconds.
LONGER = 6.0

RULES = ("on", ">secret", "~*", "&*", "+@all")


def _let_in(*ports: int) -> None:
    for one in ports:
        with redis.Redis(port=one) as admin:
            admin.execute_command("ACL", "SETUSER", "locks", *RULES)


def _shut_out(*ports: int) -> None:
    """Delete the user; its connections are closed by the server."""
    for one in ports:
        with redis.Redis(port=one) as admin:
            admin.execute_command("ACL", "DELUSER", "locks")


def _as_user(server: EmbeddedServer) -> str:
    return f"redis://locks:secret@127.0.0.1:{port(server)}"


@pytest.fixture
def servers() -> Iterator[list[EmbeddedServer]]:
    with ExitStack() as stack:
        started = [stack.enter_context(embedded("valkey9", tcp=True)) for _ in range(3)]
        _let_in(*map(port, started))
        yield started


async def test_user_that_is_missing_for_a_moment_costs_no_lease(
    servers: list[EmbeddedServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = servers[0]
    async with aiodlock.Client(_as_user(server), ttl=LONGER, waiter_ttl=LONGER) as client:
        held = await client.lock("name").acquire()
        waiting = asyncio.create_task(client.lock("name").acquire())
        _shut_out(port(server))
        await until(lambda: "no connection" in caplog.text, "a refusal")
        await asyncio.sleep(0.15)
        _let_in(port(server))
        await held.extend()
        await held.release()
        async with bounded(5.0):
            await (await waiting).release()
    refusals = [r for r in caplog.records if getattr(r, "event", "") == "no_connection"]
    assert any(r.levelno == logging.WARNING for r in refusals), "it is told"


@pytest.mark.parametrize("nodes", [1, 3])
async def test_wrong_password_is_told_to_who_enters_and_is_no_bug_in_the_log(
    servers: list[EmbeddedServer], caplog: pytest.LogCaptureFixture, nodes: int
) -> None:
    urls = [_as_user(server).replace("secret", "wrong") for server in servers[:nodes]]
    with pytest.raises(aiodlock.BackendError, match=r"refuses this client: .*password") as told:
        async with aiodlock.Client(urls if nodes > 1 else urls[0]):
            pass
    assert not isinstance(told.value, aiodlock.BackendUnavailable)
    assert isinstance(told.value.__cause__, redis.AuthenticationError)
    assert not [one for one in caplog.records if one.exc_info or one.levelno > logging.WARNING]


async def test_user_that_stays_away_makes_the_store_unavailable_and_not_the_client_dead(
    servers: list[EmbeddedServer],
) -> None:
    server = servers[0]
    async with aiodlock.Client(_as_user(server), unavailable_after=1.0) as client:
        _shut_out(port(server))
        with pytest.raises(aiodlock.BackendUnavailable):
            await client.lock("name").acquire()
        _let_in(port(server))

        async def is_served() -> bool:
            # The pause until the next login may be longer than what this client calls unavailable.
            with suppress(aiodlock.BackendUnavailable):
                async with client.lock("name") as lease:
                    return lease.held
            return False

        await until(is_served, "a login")


@pytest.mark.parametrize("nodes", [1, 3])
async def test_who_holds_and_who_waits_are_told_of_the_refusal_that_ended_it(
    servers: list[EmbeddedServer], nodes: int
) -> None:
    """A password is rotated, and somebody has the old one: "no connection" says nothing of that."""
    urls = [_as_user(server) for server in servers[:nodes]]
    source = urls if nodes > 1 else urls[0]
    async with aiodlock.Client(source, unavailable_after=3.0, restart_delay=None) as client:
        lease = await client.lock("name", ttl=4.0, on_lost="flag").acquire()
        waiting = asyncio.create_task(client.lock("name").acquire())
        await until_waiting(client, "name")
        _shut_out(*map(port, servers[:nodes]))
        with pytest.raises(aiodlock.BackendUnavailable, match="invalid username-password"):
            await waiting
        assert "invalid username-password" in str(await lease.wait_lost())


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
async def test_entering_with_a_wrong_password_is_refused_at_once(
    servers: list[EmbeddedServer], scheme: str
) -> None:
    url = _as_user(servers[0]).replace("secret", "wrong").replace("redis", scheme)
    with pytest.raises(aiodlock.BackendError, match="refuses this client") as refused:
        await aiodlock.Client(url).__aenter__()
    assert not isinstance(refused.value, aiodlock.BackendUnavailable)


async def test_entering_with_a_database_that_the_server_does_not_have_is_refused_at_once(
    servers: list[EmbeddedServer],
) -> None:
    with pytest.raises(aiodlock.BackendError, match="DB index is out of range") as refused:
        await aiodlock.Client(f"{_as_user(servers[0])}/9999").__aenter__()
    assert not isinstance(refused.value, aiodlock.BackendUnavailable)


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ("-cluster|slots", "the server's ACL does not allow .*cluster"),
        ("-client|setname", "refuses this client: .*no permissions to run"),
    ],
)
async def test_entering_a_cluster_whose_nodes_do_not_tell_this_user_their_slots_is_refused_at_once(
    servers: list[EmbeddedServer], rules: str, why: str
) -> None:
    with redis.Redis(port=port(servers[0])) as admin:
        admin.execute_command("ACL", "SETUSER", "locks", rules)
    url = _as_user(servers[0]).replace("redis", "redis+cluster") + "?client_name=x"
    with pytest.raises(aiodlock.BackendError, match=why) as refused:
        await aiodlock.Client(url).__aenter__()
    assert not isinstance(refused.value, aiodlock.BackendUnavailable)


async def test_entering_a_cluster_without_the_password_says_so() -> None:
    with embedded("valkey9", tcp=True, requirepass="secret") as server:
        url = server.url.replace("redis", "redis+cluster")
        with pytest.raises(
            aiodlock.BackendError, match=r"refuses this client: .*uthentication"
        ) as refused:
            await aiodlock.Client(url).__aenter__()
    assert not isinstance(refused.value, aiodlock.BackendUnavailable)


async def test_entering_a_cluster_with_a_file_that_cannot_be_read_names_it() -> None:
    url = "rediss+cluster://localhost:1?ssl_ca_certs=/nowhere/ca.pem"
    with pytest.raises(aiodlock.BackendError, match=r"/nowhere/ca\.pem' cannot be read") as refused:
        await aiodlock.Client(url).__aenter__()
    assert not isinstance(refused.value, aiodlock.BackendUnavailable)


@pytest.mark.parametrize("what", ["/1", "/0?client_name=x"])
async def test_entering_with_a_setting_that_the_user_may_not_use_is_refused_at_once(
    servers: list[EmbeddedServer], what: str
) -> None:
    with redis.Redis(port=port(servers[0])) as admin:
        admin.execute_command("ACL", "SETUSER", "locks", "-select", "-client|setname")
    with pytest.raises(aiodlock.BackendError, match="no permissions to run") as refused:
        await aiodlock.Client(f"{_as_user(servers[0])}{what}").__aenter__()
    assert not isinstance(refused.value, aiodlock.BackendUnavailable)


@pytest.mark.parametrize("command", ["PEXPIRE", "XDEL"])
async def test_entering_a_server_without_a_command_of_the_scripts_is_refused(command: str) -> None:
    """A script would be refused half-way, and leave what it has written."""
    with embedded("valkey9", rename_command=f'{command} ""') as server:
        with pytest.raises(aiodlock.BackendError, match=f"does not have .*: {command}"):
            await aiodlock.Client(server.url).__aenter__()


# -- what users' code raises ---------------------------------------------------------------------------


class TokenError(Exception):
    """As a cloud's own errors: neither a RedisError nor an OSError."""


class Tokens(CredentialProvider):
    """A service of tokens that may be away."""

    def __init__(self) -> None:
        self.is_away = False
        self.refused = 0

    def get_credentials(self) -> tuple[str, str]:
        if self.is_away:
            self.refused += 1
            raise TokenError("too many requests")
        return "locks", "secret"

    async def get_credentials_async(self) -> tuple[str, str]:
        return self.get_credentials()


@pytest.mark.parametrize("count", [1, 3])
async def test_credential_provider_that_fails_for_a_moment_costs_no_lease(
    servers: list[EmbeddedServer], count: int
) -> None:
    tokens = Tokens()
    clients = [Redis(port=port(server), credential_provider=tokens) for server in servers[:count]]
    async with aiodlock.Client(clients if count > 1 else clients[0], ttl=LONGER) as client:
        async with client.lock("name") as lease:
            tokens.is_away = True
            for server in servers[:count]:
                with redis.Redis(port=port(server)) as admin:
                    admin.client_kill_filter(_type="normal", skipme=True)
            await until(lambda: tokens.refused, "an attempt to connect")
            tokens.is_away = False
            await lease.extend()
        async with client.lock("name"):
            pass


async def test_credential_provider_that_fails_on_entering_is_told(
    servers: list[EmbeddedServer],
) -> None:
    tokens = Tokens()
    tokens.is_away = True
    raw = Redis(port=port(servers[0]), credential_provider=tokens)
    with pytest.raises(aiodlock.BackendUnavailable, match="too many requests"):
        await aiodlock.Client(raw).__aenter__()


async def test_first_node_of_a_cluster_whose_login_takes_a_while_is_waited_for(
    servers: list[EmbeddedServer],
) -> None:
    """As a single server is: a service of tokens, TLS on a busy machine, a distant place."""

    class Slow(Tokens):
        async def get_credentials_async(self) -> tuple[str, str]:
            await asyncio.sleep(1.2)
            return self.get_credentials()

    raw = Redis(port=port(servers[0]), credential_provider=Slow())
    with pytest.raises(ReplyError, match="cluster support disabled"):
        await ask_seed(Source.from_client(raw), Further())


# -- one node after another ----------------------------------------------------------------------------


async def test_nodes_of_a_quorum_that_lose_the_user_one_after_another_are_away_one_by_one(
    servers: list[EmbeddedServer],
) -> None:
    async with aiodlock.Client(list(map(_as_user, servers)), ttl=LONGER) as client:
        async with client.lock("name") as lease:
            for server in servers:
                _shut_out(port(server))
                await asyncio.sleep(0.15)
                _let_in(port(server))
                await asyncio.sleep(0.3)
            await until_outlived(lease)
            assert is_held(lease)


async def test_entering_a_quorum_most_of_which_refuses_the_user_is_refused(
    servers: list[EmbeddedServer],
) -> None:
    _shut_out(port(servers[0]), port(servers[1]))
    with pytest.raises(aiodlock.BackendError, match="refuses") as refused:
        await aiodlock.Client(list(map(_as_user, servers))).__aenter__()
    assert not isinstance(refused.value, aiodlock.BackendUnavailable)


async def test_new_node_of_a_cluster_without_the_user_costs_only_its_own_names() -> None:
    with Cluster(find_valkey9(), primaries=2, replicas=0) as cluster:
        for node in cluster.nodes:
            cluster.call(node, "ACL", "SETUSER", "locks", *RULES)
        url = cluster.url.replace("//", "//locks:secret@", 1)
        async with aiodlock.Client(url, ttl=LONGER, waiter_ttl=LONGER) as client:
            source = cluster.nodes[0]
            names = [f"name {n}" for n in range(50)]
            moved = next(n for n in names if _node_of(cluster, n) is source)
            elsewhere = next(n for n in names if _node_of(cluster, n) is not source)
            async with client.lock(elsewhere) as lease:
                new = await asyncio.to_thread(cluster.add_primary)
                cluster.move_slot(slot_of(moved), source, new).finish()
                with pytest.raises(aiodlock.BackendUnavailable):
                    await client.lock(moved).acquire_nowait()
                await until_outlived(lease)
                cluster.call(new, "ACL", "SETUSER", "locks", *RULES)
                async with bounded(10.0):
                    async with client.lock(moved) as other:
                        assert other.held
                assert is_held(lease)


async def test_cluster_that_does_not_tell_its_slots_any_more_is_an_outage_and_no_end_of_the_client() -> (
    None
):
    with Cluster(find_valkey9(), primaries=2, replicas=0) as cluster:

        def on_all_nodes(*command: str) -> None:
            for node in cluster.nodes:
                cluster.call(node, *command)

        on_all_nodes("ACL", "SETUSER", "locks", *RULES)
        url = cluster.url.replace("//", "//locks:secret@", 1)
        async with aiodlock.Client(url, ttl=LONGER, waiter_ttl=LONGER) as client:
            async with client.lock("name") as lease:
                on_all_nodes("ACL", "SETUSER", "locks", "-cluster|slots")
                # They connect again, and have to be asked who owns what.
                on_all_nodes("CLIENT", "KILL", "USER", "locks")
                async with client.lock("other"):
                    pass
                await until_outlived(lease)
                assert is_held(lease)
                on_all_nodes("ACL", "SETUSER", "locks", *RULES)


def _node_of(cluster: Cluster, name: str) -> EmbeddedServer:
    return cluster.primary_of(keys_of("aiodlock", "lock", name).state)
