"""TLS, users, and who may not: on a real server."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from aiodlock import BackendError, Client

from .servers import EtcdCluster, find_etcd

pytestmark = pytest.mark.skipif(find_etcd() is None, reason="etcd is not installed")


@pytest.fixture
def guarded() -> Iterator[EtcdCluster]:
    """Give a server with a user that may lock below one prefix alone."""
    with EtcdCluster() as cluster:

        def text(key: str) -> str:
            return base64.b64encode(key.encode()).decode()

        for user in ("root", "locker"):
            cluster.call("auth/user/add", name=user, password=f"{user}'s pass")
        cluster.call("auth/role/add", name="root")
        cluster.call("auth/user/grant", user="root", role="root")
        cluster.call("auth/role/add", name="locks")
        permission = {
            "permType": "READWRITE",
            "key": text("mine/"),
            "range_end": text("mine0"),
        }
        cluster.call("auth/role/grant", name="locks", perm=permission)
        cluster.call("auth/user/grant", user="locker", role="locks")
        cluster.call("auth/enable")
        yield cluster


def _login(cluster: EtcdCluster, password: str) -> str:
    return f"etcd://locker:{password}@{cluster.nodes[0].endpoint}"


async def test_user_locks_below_its_prefix(guarded: EtcdCluster) -> None:
    async with Client(_login(guarded, "locker's pass"), prefix="mine") as client:
        async with client.lock("a") as lease:
            assert lease.held
        await client.break_lock("a")


async def test_user_without_the_right_is_told(guarded: EtcdCluster) -> None:
    async with Client(_login(guarded, "locker's pass"), prefix="mine") as client:
        client_of_others = Client(_login(guarded, "locker's pass"), prefix="theirs")
        with pytest.raises(BackendError, match="permission denied"):
            await client_of_others.__aenter__()
        async with client.lock("a"):
            pass


@pytest.mark.parametrize("password", ["wrong", ""])
async def test_wrong_password_is_told_when_entering(guarded: EtcdCluster, password: str) -> None:
    with pytest.raises(BackendError, match="refused") as refused:
        await Client(_login(guarded, password), prefix="mine").__aenter__()
    assert "wrong" not in str(refused.value)


async def test_token_that_ended_is_renewed(guarded: EtcdCluster) -> None:
    async with Client(_login(guarded, "locker's pass"), prefix="mine") as client:
        async with client.lock("a"):
            pass
        session = client._session
        assert session is not None
        session.backend._link._token = "ended"  # type: ignore[attr-defined]
        async with client.lock("b"):
            pass


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[tuple[EtcdCluster, str]]:
    """Give a server that asks for certificates, and the options of a URL for it."""
    authority = trustme.CA()
    for name in ("server", "client"):
        certificate = authority.issue_cert("127.0.0.1", "localhost")
        certificate.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        certificate.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with EtcdCluster(
        tls=True,
        cert_file=str(tmp_path / "server.pem"),
        key_file=str(tmp_path / "server.key"),
        trusted_ca_file=str(tmp_path / "ca.pem"),
        client_cert_auth="true",
    ) as cluster:
        options = f"ca={tmp_path}/ca.pem&cert={tmp_path}/client.pem&key={tmp_path}/client.key"
        yield cluster, options


async def test_locks_work_with_certificates(encrypted: tuple[EtcdCluster, str]) -> None:
    cluster, options = encrypted
    async with Client(f"etcds://{cluster.nodes[0].endpoint}?{options}") as client:
        async with client.lock("a") as lease:
            assert lease.held


async def test_file_that_is_not_there_is_told(encrypted: tuple[EtcdCluster, str]) -> None:
    cluster, _ = encrypted
    with pytest.raises(BackendError, match="cannot be read"):
        await Client(f"etcds://{cluster.nodes[0].endpoint}?ca=/nowhere.pem").__aenter__()
