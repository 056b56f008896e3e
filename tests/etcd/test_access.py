"""TLS, users, and who may not: on a real server."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from aiodlock import BackendError, Client

from ..scenes import STARTING, bounded
from .servers import EtcdCluster, find_etcd

pytestmark = pytest.mark.skipif(find_etcd() is None, reason="etcd is not installed")


@pytest.fixture
def guarded() -> Iterator[EtcdCluster]:
    """Give a server with a user that may lock below one prefix alone."""
    with EtcdCluster() as cluster:
        _guard(cluster)
        yield cluster


def _guard(cluster: EtcdCluster) -> None:
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


async def test_url_with_a_user_works_before_the_cluster_asks_for_users_and_after(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """So users are switched on without a stop: first every client gets its URL."""
    with EtcdCluster() as cluster:
        async with Client(_login(cluster, "locker's pass"), prefix="mine") as client:
            lease = await client.lock("a", ttl=3).acquire()
            events = [getattr(record, "event", "") for record in caplog.records]
            assert events.count("no_users") == 1
            _guard(cluster)
            async with client.lock("b", timeout=STARTING):
                await lease.extend()
            # Known to the cluster as this user from now on.
            with pytest.raises(BackendError, match="permission denied"):
                await Client(_login(cluster, "locker's pass"), prefix="theirs").__aenter__()
            await lease.release()


@pytest.mark.parametrize("password", ["wrong", ""])
async def test_wrong_password_is_told_when_entering(guarded: EtcdCluster, password: str) -> None:
    with pytest.raises(BackendError, match="refused") as refused:
        await Client(_login(guarded, password), prefix="mine").__aenter__()
    assert "wrong" not in str(refused.value)


async def test_token_that_ended_is_renewed(guarded: EtcdCluster) -> None:
    async with Client(_login(guarded, "locker's pass"), prefix="mine") as client:
        async with client.lock("a"):
            pass
        session = client._core.session
        assert session is not None
        login = session.backend._link._login  # type: ignore[attr-defined]
        login.token = "ended"
        async with client.lock("b"):
            assert login.token not in ("ended", None)


def _as_root(cluster: EtcdCluster, path: str, **body: object) -> None:
    """Do what needs the rights of root. Each change of a user has the tokens of before end: that user's, or
    all, if they are JWTs."""
    cluster.token = cluster.call("auth/authenticate", name="root", password="root's pass")["token"]
    cluster.call(path, **body)


async def test_waiter_is_granted_although_the_token_of_its_stream_has_ended(
    guarded: EtcdCluster,
) -> None:
    """A stream has the token of when it was opened, and a client that does nothing for five minutes has
    none that counts."""
    url = _login(guarded, "locker's pass")
    async with Client(url, prefix="mine") as client, Client(url, prefix="mine") as other:
        _as_root(guarded, "auth/user/changepw", name="locker", password="locker's pass")
        async with bounded(5.0):
            for _ in range(2):
                lease = await client.lock("a").acquire()
                waiting = asyncio.create_task(other.lock("a").acquire())
                while not (await client.inspect("a")).waiters:
                    await asyncio.sleep(0.01)
                await lease.release()
                await (await waiting).release()


async def test_one_of_many_calls_asks_for_a_new_token(guarded: EtcdCluster) -> None:
    """A member checks ten passwords in a second: of 300 calls, all ended without an answer."""
    async with Client(_login(guarded, "locker's pass"), prefix="mine") as client:
        _as_root(guarded, "auth/user/changepw", name="locker", password="locker's pass")
        await asyncio.gather(*(client.inspect(f"name {n}") for n in range(300)))


@pytest.fixture
def signing(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Give a server whose tokens are JWTs."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    (tmp_path / "public.pem").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    token = f"jwt,pub-key={tmp_path}/public.pem,priv-key={tmp_path}/key.pem,sign-method=RS256"
    with EtcdCluster(auth_token=token) as cluster:
        _guard(cluster)
        yield cluster


async def test_change_of_another_user_ends_nothing(signing: EtcdCluster) -> None:
    """After each change of a user or a role, etcd takes no JWT of before."""
    url = _login(signing, "locker's pass")
    async with Client(url, prefix="mine") as client, Client(url, prefix="mine") as other:
        async with client.lock("a") as lease:
            _as_root(signing, "auth/user/add", name="other", password="other's pass")
            waiting = asyncio.create_task(other.lock("a").acquire())
            async with bounded(5.0):
                while not (await client.inspect("a")).waiters:
                    await asyncio.sleep(0.01)
            assert lease.held
        async with bounded(5.0):
            await (await waiting).release()


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[tuple[EtcdCluster, str]]:
    """Give a server that asks for certificates, and the options of a URL for it."""
    _write_certificates(tmp_path)
    with EtcdCluster(
        tls=True,
        cert_file=str(tmp_path / "server.pem"),
        key_file=str(tmp_path / "server.key"),
        trusted_ca_file=str(tmp_path / "ca.pem"),
        client_cert_auth="true",
    ) as cluster:
        options = f"ca={tmp_path}/ca.pem&cert={tmp_path}/client.pem&key={tmp_path}/client.key"
        yield cluster, options


def _write_certificates(folder: Path) -> None:
    authority = trustme.CA()
    for name in ("server", "client"):
        certificate = authority.issue_cert("127.0.0.1", "localhost")
        certificate.private_key_pem.write_to_path(folder / f"{name}.key")
        certificate.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")


async def test_locks_work_with_certificates(encrypted: tuple[EtcdCluster, str]) -> None:
    cluster, options = encrypted
    async with Client(f"etcds://{cluster.nodes[0].endpoint}?{options}") as client:
        async with client.lock("a") as lease:
            assert lease.held


async def test_file_that_is_not_there_is_told(encrypted: tuple[EtcdCluster, str]) -> None:
    cluster, _ = encrypted
    with pytest.raises(BackendError, match="cannot be read"):
        await Client(f"etcds://{cluster.nodes[0].endpoint}?ca=/nowhere.pem").__aenter__()


async def test_certificates_are_replaced_while_a_client_runs(
    encrypted: tuple[EtcdCluster, str], tmp_path: Path
) -> None:
    cluster, options = encrypted
    async with Client(f"etcds://{cluster.nodes[0].endpoint}?{options}") as client:
        async with client.lock("a"):
            pass
        cluster.nodes[0].kill()
        whole = (tmp_path / "client.key").read_bytes()
        (tmp_path / "client.key").write_bytes(whole[:100])  # as one may find it meanwhile
        await asyncio.sleep(0.3)
        _write_certificates(tmp_path)
        await asyncio.to_thread(cluster.start)
        async with client.lock("a", timeout=10.0) as lease:
            assert lease.held


async def test_connection_is_made_although_all_threads_of_the_loop_are_busy(
    encrypted: tuple[EtcdCluster, str],
) -> None:
    """Bodies that wait for a thread (``asyncio.to_thread``) may need all of them for long."""
    cluster, options = encrypted
    ended = threading.Event()
    loop = asyncio.get_running_loop()
    async with Client(f"etcds://{cluster.nodes[0].endpoint}?{options}") as client:
        async with client.lock("a"):
            pass
        jobs = [loop.run_in_executor(None, ended.wait) for _ in range(100)]
        try:
            cluster.nodes[0].kill()
            cluster.start()
            async with client.lock("a", timeout=10.0) as lease:
                assert lease.held
        finally:
            ended.set()
            await asyncio.gather(*jobs)
