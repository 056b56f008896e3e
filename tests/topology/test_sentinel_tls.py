"""A Sentinel service that speaks TLS alone, against Debian's redis-server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlencode

import pytest
import trustme

import aiodlock
from aiodlock._embedded import EmbeddedServer, EmbeddedServerError, _free_port, find_redis_on_path

from .servers import SERVICE

BINARY = find_redis_on_path()

pytestmark = pytest.mark.skipif(BINARY is None, reason="no redis-server on PATH")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a folder of certificates; what names the servers is their address."""
    ca, stranger = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    stranger.cert_pem.write_to_path(tmp_path / "stranger.pem")
    certificate = ca.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "server.key")
    return tmp_path


@pytest.fixture
def port(folder: Path) -> Iterator[int]:
    """Give the port of a sentinel that watches a primary."""
    assert BINARY is not None
    called = folder / "redis-sentinel"
    called.symlink_to(BINARY)
    with ExitStack() as stack:
        primary = _start(stack, BINARY, folder, {})
        yield _start(
            stack, called, folder, {"sentinel monitor": f"{SERVICE} 127.0.0.1 {primary} 1"}
        )


def _start(stack: ExitStack, binary: Path, folder: Path, config: dict[str, str]) -> int:
    attempts = 5
    while True:  # somebody else may take the port meanwhile
        port = _free_port()
        settings: dict[str, str | int] = {
            "tls-port": port,
            "bind": "127.0.0.1",
            "tls-ca-cert-file": str(folder / "ca.pem"),
            "tls-cert-file": str(folder / "server.pem"),
            "tls-key-file": str(folder / "server.key"),
            "tls-auth-clients": "no",
            "tls-replication": "yes",
        }
        try:
            stack.enter_context(EmbeddedServer(binary, config=settings | config))
            return port
        except EmbeddedServerError as failed:
            attempts -= 1
            if attempts == 0 or "ddress already in use" not in str(failed):
                raise


def url(port: int, authority: Path) -> str:
    query = urlencode({"ssl_ca_certs": str(authority)})
    return f"rediss+sentinel://127.0.0.1:{port}/{SERVICE}/0?{query}"


async def test_sentinel_and_server_are_reached_over_tls(port: int, folder: Path) -> None:
    async with aiodlock.Client(url(port, folder / "ca.pem")) as client:
        async with client.lock("name") as lease:
            assert lease.held


async def test_sentinel_of_a_strange_authority_is_refused(port: int, folder: Path) -> None:
    with pytest.raises(aiodlock.BackendUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        async with aiodlock.Client(url(port, folder / "stranger.pem")):
            pass
