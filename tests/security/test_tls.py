"""TLS with a private CA and client certificates, against Debian's redis-server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import redis.asyncio
import trustme

import aiodlock
from aiodlock._embedded import EmbeddedServer, EmbeddedServerError, _free_port, find_redis_on_path

from ..scenes import store_of, takes, until

BINARY = find_redis_on_path()

pytestmark = pytest.mark.skipif(BINARY is None, reason="no redis-server on PATH")


@dataclass
class Secured:
    """A server that speaks TLS alone, and wants to see a certificate of its CA."""

    port: int
    folder: Path

    def url(self, host: str = "localhost", **options: str) -> str:
        given = {
            "ssl_ca_certs": str(self.folder / "ca.pem"),
            "ssl_certfile": str(self.folder / "client.pem"),
            "ssl_keyfile": str(self.folder / "client.key"),
        } | options
        query = urlencode({key: value for key, value in given.items() if value})
        return f"rediss://:the-password@{host}:{self.port}/0?{query}"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    ca, stranger = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(folder / "ca.pem")
    stranger.cert_pem.write_to_path(folder / "stranger.pem")
    _write(ca.issue_cert("localhost"), folder / "server")
    _write(ca.issue_cert("client.example"), folder / "client")
    _write(stranger.issue_cert("client.example"), folder / "strange-client")
    for _ in range(5):  # somebody else may take the port meanwhile
        port = _free_port()
        settings: dict[str, str | int] = {
            "tls-port": port,
            "bind": "127.0.0.1",
            "tls-ca-cert-file": str(folder / "ca.pem"),
            "tls-cert-file": str(folder / "server.pem"),
            "tls-key-file": str(folder / "server.key"),
            "tls-auth-clients": "yes",
            "requirepass": "the-password",
        }
        server = EmbeddedServer(BINARY, config=settings)
        try:
            server.start()
            break
        except EmbeddedServerError as failed:
            if "ddress already in use" not in str(failed):
                raise
    try:
        yield Secured(port, folder)
    finally:
        server.stop()


def _write(certificate: trustme.LeafCert, path: Path) -> None:
    certificate.cert_chain_pems[0].write_to_path(path.with_suffix(".pem"))
    certificate.private_key_pem.write_to_path(path.with_suffix(".key"))


async def test_locks_work_over_tls_with_a_client_certificate(secured: Secured) -> None:
    async with aiodlock.Client(secured.url()) as client, aiodlock.Client(secured.url()) as other:
        async with client.lock("name"):
            assert await other.lock("name").locked()
        async with other.lock("name", timeout=5.0):
            pass


async def test_settings_of_a_ready_client_are_used(secured: Secured) -> None:
    async with redis.asyncio.Redis.from_url(secured.url()) as own:
        async with aiodlock.Client(own) as client, client.lock("name"):
            assert await client.lock("name").locked()


async def test_who_does_not_fit_is_told_within_five_seconds(secured: Secured) -> None:
    folder, unchecked = str(secured.folder), "cannot reach"
    # Or there was no time for a handshake, on a machine that is too busy.
    certificate = "CERTIFICATE_VERIFY_FAILED|Timeout connecting|no answer"
    strange = {
        "ssl_certfile": f"{folder}/strange-client.pem",
        "ssl_keyfile": f"{folder}/strange-client.key",
    }
    attempts = {
        "a strange CA": (
            secured.url(ssl_ca_certs=f"{folder}/stranger.pem"),
            certificate,
        ),
        "not the name in the certificate": (secured.url("127.0.0.1"), certificate),
        "no client certificate": (secured.url(ssl_certfile="", ssl_keyfile=""), unchecked),
        "a client certificate of a strange CA": (secured.url(**strange), unchecked),
        "no TLS": (f"redis://:the-password@localhost:{secured.port}/0", unchecked),
    }

    async def is_refused(url: str, why: str) -> None:
        with pytest.raises(aiodlock.BackendError, match=why) as refused:
            async with aiodlock.Client(url):
                pass
        assert "the-password" not in str(refused.value)

    async with takes(at_most=9.0):  # five at the same time, and leaving them
        await asyncio.gather(*(is_refused(*attempt) for attempt in attempts.values()))


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile", "ssl_keyfile"])
async def test_file_that_cannot_be_read_is_named_at_once(secured: Secured, option: str) -> None:
    absent = str(secured.folder / "absent.pem")
    async with takes(at_most=2.0):
        with pytest.raises(aiodlock.BackendError, match=f"{option}: '{absent}'") as error:
            async with aiodlock.Client(secured.url(**{option: absent})):
                pass
    assert not isinstance(error.value, aiodlock.BackendUnavailable)


async def test_file_that_is_no_certificate_is_named_at_once(secured: Secured) -> None:
    key = str(secured.folder / "client.key")
    with pytest.raises(aiodlock.BackendError, match=f"no TLS with ssl_ca_certs='{key}'"):
        async with aiodlock.Client(secured.url(ssl_ca_certs=key)):
            pass


async def test_server_that_does_not_speak_tls_at_all_is_named_with_what_it_did_not_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = aiodlock.Client(f"rediss://127.0.0.1:{silent.getsockname()[1]}/0")
        with pytest.raises(aiodlock.BackendUnavailable, match="no answer "):
            await client.__aenter__()


async def test_clients_killed_at_once_come_back_with_one_connection_per_link(
    secured: Secured,
) -> None:
    """A handshake takes the server a millisecond or more: attempts that are thrown away would add up."""
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(redis.asyncio.Redis.from_url(secured.url()))
        clients = [
            await stack.enter_async_context(aiodlock.Client(secured.url(), ttl=30.0))
            for _ in range(40)
        ]
        leases = [await client.lock(f"tls:{n}").acquire() for n, client in enumerate(clients)]
        servers: list[Any] = [store_of(client).server for client in clients]
        links = [link for it in servers for link in (it.commands, it.wakeups.link)]
        before = [link.wire for link in links]
        dialled = (await admin.info("stats"))["total_connections_received"]
        for kind in ("normal", "pubsub"):
            await admin.client_kill_filter(_type=kind, skipme=True)

        def back() -> bool:
            pairs = zip(links, before, strict=True)
            return all(link.wire not in (None, old) for link, old in pairs)

        await until(back, "all connections", within=30.0)
        dialled = (await admin.info("stats"))["total_connections_received"] - dialled
        assert dialled < 1.2 * len(links)
        assert all(lease.held for lease in leases)
        for lease in leases:
            await lease.release()
