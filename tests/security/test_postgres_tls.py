"""TLS with a private CA, against Debian's PostgreSQL."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from aiodlock import BackendUnavailable, Client
from aiodlock.backends.postgres.schema import create_statements

from ..postgres import PostgresServer
from ..servers import installed, postgres_server

pytestmark = pytest.mark.skipif(not installed("postgres"), reason="postgres is not installed")

_ENCRYPTED = "select count(*) from pg_stat_ssl join pg_stat_activity using (pid) where ssl"


@dataclass
class Secured:
    server: PostgresServer
    folder: Path


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    ca, stranger = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(folder / "ca.pem")
    stranger.cert_pem.write_to_path(folder / "stranger.pem")
    certificate = ca.issue_cert("localhost")
    with postgres_server("postgres") as server:
        server.execute(create_statements())
        server.keep("server.crt", certificate.cert_chain_pems[0].bytes())
        server.keep("server.key", certificate.private_key_pem.bytes())
        server.configure("ssl", "on")
        yield Secured(server, folder)


@pytest.mark.parametrize("mode", ["prefer", "require", "verify-full"])
async def test_client_enters_with_tls(secured: Secured, mode: str) -> None:
    url = f"postgresql://postgres@localhost:{secured.server.port}/postgres?sslmode={mode}"
    async with Client(f"{url}&sslrootcert={secured.folder / 'ca.pem'}") as client:
        async with client.lock("name"):
            assert secured.server.execute(_ENCRYPTED)[0][0] >= 2


async def test_server_of_another_ca_is_refused(secured: Secured) -> None:
    url = f"postgresql://postgres@localhost:{secured.server.port}/postgres?sslmode=verify-full"
    with pytest.raises(BackendUnavailable) as refused:
        async with Client(f"{url}&sslrootcert={secured.folder / 'stranger.pem'}"):
            pass
    assert isinstance(refused.value.__cause__, ssl.SSLCertVerificationError)
