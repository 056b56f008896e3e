"""The client of ZooKeeper against real servers: sessions, watches, who it is, TLS, several hosts."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from aiodlock import BackendError, BackendUnavailable, Client, WouldBlock, _backoff
from aiodlock._clock import now
from aiodlock.backends.zookeeper import jute
from aiodlock.backends.zookeeper.address import read_url
from aiodlock.backends.zookeeper.servers import Credentials, Ensemble
from aiodlock.backends.zookeeper.session import Session
from aiodlock.backends.zookeeper.store import ZooKeeperBackend

from ..ports import free_port
from ..scenes import PATIENCE, bounded, takes, until, until_waiting
from ..soak.wire import Wire
from ..zookeeper import Links, ZooKeeperEnsemble, ZooKeeperServer, installed, looking
from .zookeeper_places import asker, running
from .zookeeper_proxy import FrameProxy

pytestmark = pytest.mark.skipif(not installed(), reason="no ZooKeeper")

TICK = 0.05
TTL = 2.0


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeperServer]:
    with ZooKeeperServer(tick=TICK, java=["-Dznode.container.checkIntervalMs=500"]) as server:
        yield server


@pytest.fixture(scope="module")
def links() -> Iterator[Links]:
    links = Links()
    yield links
    links.stop()


def _ensemble(
    *ports: int,
    root: str = "/aiodlock",
    credentials: Credentials | None = None,
) -> Ensemble:
    hosts = tuple(("127.0.0.1", port) for port in ports)
    return Ensemble(hosts, root, TICK, credentials, None, "the test's servers")


@asynccontextmanager
async def _running(ensemble: Ensemble, ttl: float = TTL) -> AsyncIterator[Session]:
    session = Session(ensemble, ttl, f"test-{os.urandom(4).hex()}")
    running = asyncio.create_task(session.run())
    try:
        up = asyncio.create_task(session.wait_up(10.0))
        await asyncio.wait([running, up], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            up.cancel()
            await running
        await up
        yield session
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _until_it_beats(session: Session) -> None:
    async def answered() -> bool:
        try:
            await session.wait_up(1.0)
            await session.heartbeat()
        except BackendUnavailable:
            return False
        return True

    await until(answered, "an answer to a heartbeat", within=60.0)


class _Member:
    def __init__(self, session: Session) -> None:
        self.told: list[str] = []
        session.members.add(self)

    def on_up(self) -> None:
        self.told.append("up")

    def on_down(self, error: BackendUnavailable, silent: float) -> None:
        self.told.append("down")

    def on_over(self) -> None:
        self.told.append("over")

    def look_after(self) -> None:
        """There is nothing to see to."""


async def test_session_has_time_from_its_first_moment_and_keeps_it(server: ZooKeeperServer) -> None:
    async with _running(_ensemble(server.port)) as session:
        least = session.lifetime.deadline - now()
        assert TTL / 2 < least < TTL
        end = now() + TTL
        while now() < end:
            least = min(least, session.lifetime.deadline - now())
            await asyncio.sleep(0.02)
        assert least > TTL / 3


@pytest.mark.parametrize("asked", [0.05, 1000.0])
async def test_heartbeats_are_as_frequent_as_the_session_that_the_servers_grant_needs(
    asked: float,
) -> None:
    """A session for a short ``max_hold`` wrote a hundred times a second; one for a long ttl expired."""
    with ZooKeeperServer(tick=TICK, shortest=1.0, longest=1.0) as server:
        async with (
            FrameProxy(server.port) as proxy,
            _running(_ensemble(proxy.port), asked) as session,
        ):
            number, before = session.id, len(proxy.opcodes)
            await asyncio.sleep(2.0)
            assert 5 < len(proxy.opcodes) - before < 25
            assert session.id == number


async def test_session_that_is_closed_leaves_nothing(server: ZooKeeperServer) -> None:
    async with _running(_ensemble(server.port)) as watching:
        async with _running(_ensemble(server.port)) as session:
            path = f"/aiodlock/ids/{os.urandom(4).hex()}"
            await session.ask(jute.create(path, b"", jute.EPHEMERAL))
            await watching.ask(jute.sync("/"))
            await watching.ask(jute.exists(path))
        with pytest.raises(jute.ZooKeeperError):
            await watching.ask(jute.exists(path))


async def test_session_goes_on_after_a_cut_with_its_nodes_and_watches(
    server: ZooKeeperServer, links: Links
) -> None:
    link = links.add(server.port)
    async with (
        _running(_ensemble(link.port)) as session,
        _running(_ensemble(server.port)) as other,
    ):
        path = f"/aiodlock/ids/{os.urandom(4).hex()}"
        watched = f"/aiodlock/ids/{os.urandom(4).hex()}"
        await session.ask(jute.create(path, b"", jute.EPHEMERAL))
        await other.ask(jute.create(watched, b"", jute.EPHEMERAL))
        gone = asyncio.Event()
        await session.watches.data(watched, gone.set)
        member, number = _Member(session), session.id
        link.cut()
        await until(lambda: not session.is_up)
        with pytest.raises(BackendUnavailable):
            session.submit(jute.exists(path))
        await other.ask(jute.delete(watched))  # while nobody can be told
        link.heal()
        await session.wait_up(10.0)
        await asyncio.wait_for(gone.wait(), PATIENCE)
        assert session.id == number
        assert (await session.ask(jute.exists(path))).value.ephemeral_owner == number
        assert (member.told[0], member.told[-1]) == ("down", "up")


async def test_request_whose_answer_is_lost_says_so(server: ZooKeeperServer, links: Links) -> None:
    link = links.add(server.port)
    async with _running(_ensemble(link.port)) as session:
        link.stall("back")
        answer = session.submit(jute.exists("/aiodlock"))
        await asyncio.sleep(0.05)
        link.cut()
        with pytest.raises(BackendUnavailable, match="was lost"):
            await answer


async def test_server_that_is_silent_is_left_for_another(
    server: ZooKeeperServer, links: Links
) -> None:
    silent, well = links.add(server.port), links.add(server.port)
    async with _running(_ensemble(silent.port, well.port)) as session:
        number = session.id
        for _ in range(2):  # whichever it is connected to
            for link, other in ((silent, well), (well, silent)):
                other.heal()
                link.stall()
                link.cut()
                await _until_it_beats(session)
        assert session.id == number


async def test_silent_server_is_left_as_soon_as_patience_ends_and_not_at_a_heartbeat_after_that(
    server: ZooKeeperServer, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodlock.backends.zookeeper.heartbeats._LONGEST_SILENCE", 2.0)
    link = links.add(server.port)
    async with _running(_ensemble(link.port), 40.0) as session:
        await until(lambda: (beat := session._heartbeats._beating) is not None and beat.done())
        link.stall()
        await asyncio.sleep(0.2)
        async with takes(at_least=2.0, at_most=2.5):
            session.submit(jute.exists("/"))
            await until(lambda: not session.is_up)
        link.heal()


async def test_client_with_a_long_ttl_is_up_soon_though_the_first_server_is_silent(
    server: ZooKeeperServer, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had five seconds, which is all that a client has for entering."""
    monkeypatch.setattr("random.shuffle", lambda hosts: None)
    silent = links.add(server.port)
    silent.stall()
    ensemble = _ensemble(silent.port, server.port, server.port)
    async with takes(at_most=4.0), _running(ensemble, 30.0) as session:
        await session.heartbeat()


@asynccontextmanager
async def _named(
    server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch, *, turns: bool = False
) -> AsyncIterator[tuple[Ensemble, asyncio.Event]]:
    """Have a name lead to a server that says nothing, and then to this one; give what tells that the first
    was dialled."""
    asked, dialled = itertools.count(), asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.set()
        with suppress(OSError):
            await reader.read(-1)
        writer.transport.abort()

    real = socket.getaddrinfo

    def resolve(host: Any, port: Any, *args: Any, **options: Any) -> list[tuple[Any, ...]]:
        if host != "zookeeper.internal":
            return list(real(host, port, *args, **options))
        found = ["127.0.0.2", "127.0.0.1"]
        if turns and next(asked) % 2:
            found.reverse()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in found]

    silent = await asyncio.start_server(say_nothing, "127.0.0.2", server.port)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        yield read_url(f"zookeeper://zookeeper.internal:{server.port}", "aiodlock"), dialled
    finally:
        silent.close()


@pytest.mark.skipif(sys.platform != "linux", reason="it needs a second address of this machine")
@pytest.mark.parametrize("turns", [False, True])
async def test_each_address_of_a_name_has_its_turn(
    server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch, turns: bool
) -> None:
    """One that said nothing took all the time, again and again; also where name servers turn them round."""
    async with _named(server, monkeypatch, turns=turns) as (ensemble, _):
        async with takes(at_most=4.5), _running(ensemble, 30.0) as session:
            await session.heartbeat()


@pytest.mark.skipif(sys.platform != "linux", reason="it needs a second address of this machine")
async def test_address_that_was_lost_is_dialled_after_the_others_of_its_name(
    server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _named(server, monkeypatch) as (ensemble, dialled), _running(ensemble) as session:
        dialled.clear()
        server.pause()
        try:
            await until(lambda: not session.is_up)
            async with takes(at_most=0.5):
                await dialled.wait()
        finally:
            server.resume()


async def test_expired_session_tells_and_the_next_one_begins_at_once(
    server: ZooKeeperServer, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[int] = []

    def pause_after(number: int, **bounds: float) -> float:
        failures.append(number)
        return _backoff.pause_after(number, **bounds)

    monkeypatch.setattr("aiodlock.backends.zookeeper.session.pause_after", pause_after)
    link = links.add(server.port)
    async with _running(_ensemble(link.port), 0.5) as session:
        member, number, lifetime = _Member(session), session.id, session.lifetime
        link.cut()
        async with _running(_ensemble(server.port)) as other:

            async def expired() -> bool:
                await other.ask(jute.sync("/"))
                nodes = (await other.ask(jute.get_children("/aiodlock/clients"))).value[0]
                return not any(node.startswith(session._heartbeats.node._label) for node in nodes)

            await until(expired)
        assert now() > lifetime.deadline
        await until(lambda: failures)
        link.heal()
        await session.wait_up(10.0)
        assert session.id != number
        assert failures.count(1) > 1, "a server has answered"
        assert member.told[-1] == "over"
        assert lifetime.over
        assert not session.lifetime.over
        assert session.lifetime.deadline > now()


async def test_chroot_is_made(server: ZooKeeperServer) -> None:
    root = f"/deep/{os.urandom(4).hex()}/aiodlock"
    async with _running(_ensemble(server.port, root=root)) as session:
        await session.ask(jute.exists(f"{root}/locks"))


async def test_chroot_that_may_not_be_made_is_told(server: ZooKeeperServer) -> None:
    closed = f"/{os.urandom(4).hex()}"
    async with _running(_ensemble(server.port)) as session:
        await session.ask(
            jute.create(closed, b"", jute.PERSISTENT, (jute.Acl(1, "world", "anyone"),))
        )
    with pytest.raises(BackendError, match=f"{closed}/deep does not exist, and the ACL"):
        async with _running(_ensemble(server.port, root=f"{closed}/deep/aiodlock")):
            pass


async def test_everything_that_was_deleted_is_made_anew(server: ZooKeeperServer) -> None:
    root = f"/{os.urandom(4).hex()}"
    async with _running(_ensemble(server.port, root=root)) as session:
        for path in (f"{root}/ids", f"{root}/locks"):
            await session.ask(jute.delete(path))
        await session.make_root()
        await session.ask(jute.exists(f"{root}/ids"))


async def test_container_is_deleted_by_the_servers_and_create2_tells_its_stat(
    server: ZooKeeperServer,
) -> None:
    async with _running(_ensemble(server.port)) as session:
        path = f"/aiodlock/locks/{os.urandom(4).hex()}"
        answer = await session.ask(jute.create2(path, b"", jute.CONTAINER))
        told, stat = answer.value
        assert (told, stat.created) == (path, answer.zxid)
        node = (await session.ask(jute.create2(f"{path}/a", b"x", jute.EPHEMERAL))).value[1]
        assert node.ephemeral_owner == session.id
        await session.ask(jute.delete(f"{path}/a"))
        gone = asyncio.Event()
        try:
            await session.watches.data(path, gone.set)
        except jute.ZooKeeperError as none:  # they have looked already
            if none.code != jute.NO_NODE:
                raise
        else:
            await asyncio.wait_for(gone.wait(), PATIENCE)


async def test_watches_of_children_and_of_nodes_to_come_are_told_once(
    server: ZooKeeperServer,
) -> None:
    async with _running(_ensemble(server.port)) as session:
        path = f"/aiodlock/locks/{os.urandom(4).hex()}"
        made, changed = asyncio.Event(), asyncio.Event()
        session.watches.creation(path, made.set)
        await session.ask(jute.create(path, b"", jute.PERSISTENT))
        await asyncio.wait_for(made.wait(), PATIENCE)
        session.watches.children(path, changed.set)
        await session.ask(jute.create(f"{path}/a", b"", jute.EPHEMERAL))
        await asyncio.wait_for(changed.wait(), PATIENCE)


async def test_user_of_digest_owns_its_nodes_and_strangers_are_refused(
    server: ZooKeeperServer,
) -> None:
    root = f"/{os.urandom(4).hex()}"
    alice = Credentials("digest", "alice", "secret")
    async with _running(_ensemble(server.port, root=root, credentials=alice)) as session:
        await session.ask(jute.create(f"{root}/ids/a", b"", jute.EPHEMERAL, (jute.CREATOR,)))
        async with _running(_ensemble(server.port)) as stranger:
            with pytest.raises(jute.ZooKeeperError, match="not permitted"):
                await stranger.ask(jute.get_children(root))
    with pytest.raises(BackendError, match="does not admit this client"):
        async with _running(_ensemble(server.port, root=root)):
            pass


_JAAS = """
Server {
    org.apache.zookeeper.server.auth.DigestLoginModule required
    user_alice="se cret" user_jürgen="s€" user_zoë="é";
};
"""


def test_sasl_proves_the_password_both_ways(tmp_path: Path) -> None:
    (tmp_path / "jaas.conf").write_text(_JAAS, encoding="utf-8")
    java = [
        f"-Djava.security.auth.login.config={tmp_path / 'jaas.conf'}",
        "-Dzookeeper.authProvider.1=org.apache.zookeeper.server.auth.SASLAuthenticationProvider",
    ]

    async def enter(port: int, user: str, password: str) -> None:
        credentials = Credentials("sasl", user, password)
        root = f"/{os.urandom(4).hex()}"
        async with _running(_ensemble(port, root=root, credentials=credentials)) as session:
            await session.ask(jute.create(f"{root}/ids/a", b"", jute.EPHEMERAL, (jute.CREATOR,)))

    with ZooKeeperServer(tick=TICK, java=java) as server:
        for user, password in (("alice", "se cret"), ("jürgen", "s€"), ("zoë", "é")):
            asyncio.run(enter(server.port, user, password))
        with pytest.raises(BackendError, match="user or the password"):
            asyncio.run(enter(server.port, "alice", "wrong"))


async def test_server_that_refuses_the_user_of_a_client_in_use_is_left_for_another(
    tmp_path: Path,
) -> None:
    """As while passwords are changed, server by server. The client ended, and with it all its leases."""
    jaas = tmp_path / "jaas.conf"
    jaas.write_text(_JAAS, encoding="utf-8")
    java = [
        f"-Djava.security.auth.login.config={jaas}",
        "-Dzookeeper.authProvider.1=org.apache.zookeeper.server.auth.SASLAuthenticationProvider",
    ]
    with ZooKeeperServer(tick=TICK, java=java) as server:
        url = f"zookeeper://alice:se%20cret@127.0.0.1:{server.port}?auth=sasl&tick_time={TICK}"
        async with Client(url, ttl=40.0) as client, client.lock("name") as lease:
            backend: Any = client._core.session.backend  # type: ignore[union-attr]
            jaas.write_text(_JAAS.replace("se cret", "another"), encoding="utf-8")
            server.crash()
            await asyncio.to_thread(server.start)
            await until(lambda: "user or the password" in str(backend.failure))
            with pytest.raises(BackendUnavailable, match="user or the password"):
                await client.lock("other", ttl=30.0).acquire_nowait()
            jaas.write_text(_JAAS, encoding="utf-8")
            server.crash()
            await asyncio.to_thread(server.start)
            await backend._main.wait_up(10.0)
            assert lease.held


@pytest.mark.long
async def test_who_holds_and_who_waits_are_told_of_the_refusal_that_ended_it(
    tmp_path: Path,
) -> None:
    """A password was changed, and somebody has the old one: "no connection" says nothing of that."""
    jaas = tmp_path / "jaas.conf"
    jaas.write_text(_JAAS, encoding="utf-8")
    java = [
        f"-Djava.security.auth.login.config={jaas}",
        "-Dzookeeper.authProvider.1=org.apache.zookeeper.server.auth.SASLAuthenticationProvider",
    ]
    with ZooKeeperServer(tick=TICK, java=java) as server:
        url = f"zookeeper://alice:se%20cret@127.0.0.1:{server.port}?auth=sasl&tick_time={TICK}"
        # A restart takes a part of the lease, and of what may be unavailable: seconds on a busy machine.
        async with Client(url, ttl=20.0, unavailable_after=15.0) as client:
            lease = await client.lock("name", on_lost="flag").acquire()
            waiting = asyncio.create_task(client.lock("name").acquire())
            await until_waiting(client, "name")
            jaas.write_text(_JAAS.replace("se cret", "another"), encoding="utf-8")
            server.crash()
            await asyncio.to_thread(server.start)
            assert "user or the password" in str(await lease.wait_lost())
            with pytest.raises(BackendUnavailable, match="user or the password"):
                await waiting


def _write_certificates(ca: trustme.CA, folder: Path) -> None:
    """Write the authority, and what a server shows."""
    certificate = ca.issue_cert("127.0.0.1")
    key = serialization.load_pem_private_key(certificate.private_key_pem.bytes(), None)
    # Java reads no other format.
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (folder / "server.pem").write_bytes(private + certificate.cert_chain_pems[0].bytes())
    ca.cert_pem.write_to_path(folder / "ca.pem")


def _encrypted(folder: Path, port: int) -> ZooKeeperServer:
    lines = [
        f"secureClientPort={port}",
        "secureClientPortAddress=127.0.0.1",
        f"ssl.keyStore.location={folder / 'server.pem'}",
        "ssl.keyStore.type=PEM",
        f"ssl.trustStore.location={folder / 'ca.pem'}",
        "ssl.trustStore.type=PEM",
        "ssl.clientAuth=none",
    ]
    java = ["-Dzookeeper.serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory"]
    return ZooKeeperServer(tick=TICK, lines=lines, java=java)


async def test_certificates_are_replaced_while_a_client_runs(tmp_path: Path) -> None:
    _write_certificates(trustme.CA(), tmp_path)
    port = free_port()
    url = f"zookeepers://127.0.0.1:{port}?ca={tmp_path / 'ca.pem'}"
    with _encrypted(tmp_path, port) as server:
        async with _running(read_url(url, "aiodlock"), 60.0) as session:
            server.crash()
            (tmp_path / "ca.pem").write_text("just being written")
            await until(lambda: session.outage.failure is not None)
            _write_certificates(trustme.CA(), tmp_path)
            await asyncio.to_thread(server.start)
            await session.wait_up(10.0)


def test_tls_checks_the_servers_name(tmp_path: Path) -> None:
    ca, stranger = trustme.CA(), trustme.CA()
    _write_certificates(ca, tmp_path)
    stranger.cert_pem.write_to_path(tmp_path / "stranger.pem")
    secure = free_port()

    async def enter(ca: str) -> None:
        ensemble = read_url(
            f"zookeepers://127.0.0.1:{secure}?ca={tmp_path / ca}&tick_time={TICK}", "aiodlock"
        )
        async with _running(ensemble) as session:
            await session.heartbeat()

    with _encrypted(tmp_path, secure) as server:
        assert server.running
        asyncio.run(enter("ca.pem"))
        with pytest.raises(BackendUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            asyncio.run(enter("stranger.pem"))


async def test_server_that_speaks_no_tls_and_hangs_up_is_told() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        session = Session(read_url(f"zookeepers://127.0.0.1:{port}", "aiodlock"), TTL, "test")
        running = asyncio.create_task(session.run())
        with pytest.raises(BackendUnavailable, match="the server closed the connection"):
            await session.wait_up(0.5)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.long
async def test_session_moves_to_another_server_when_its_own_stops() -> None:
    with ZooKeeperEnsemble(tick=TICK) as ensemble:
        ports = [door.port for door in ensemble.doors.values()]
        # Longer than elections take on a busy machine.
        async with _running(_ensemble(*ports), 60.0) as session:
            session._heartbeats.pace = session._heartbeats.pace._replace(silent=1.0)
            number = session.id
            path = f"/aiodlock/ids/{os.urandom(4).hex()}"
            await session.ask(jute.create(path, b"", jute.EPHEMERAL))
            for one in ensemble.servers.values():
                one.pause()
                await _until_it_beats(session)
                one.resume()
                await until(one.mode, "a server that serves again", within=60.0)
            assert session.id == number
            assert (await session.ask(jute.exists(path))).value.ephemeral_owner == number
            assert session.lifetime.deadline > now()


async def test_servers_that_lost_their_data_are_used_again() -> None:
    """They have seen less than their clients, and refuse whoever says so."""
    with ZooKeeperServer(tick=TICK) as server:
        async with _running(_ensemble(server.port), 0.5) as session:
            member, number = _Member(session), session.id
            for _ in range(20):
                await session.heartbeat()
            for _ in range(2):  # the second time in the session of after that
                server.crash()
                if session.id == number:
                    shutil.rmtree(server.directory / "data")
                await asyncio.to_thread(server.start)
                await _until_it_beats(session)
            assert session.id != number
            assert "over" in member.told


async def test_node_that_a_restored_backup_brings_back_blocks_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its session lives on, and no request counts it: it would be there for as long as its client."""
    with ZooKeeperServer(tick=TICK) as server:
        data = server.directory / "data"
        url = f"{server.url}?tick_time={TICK}"
        async with (
            Client(url, ttl=TTL, unavailable_after=1.0) as one,
            Client(url, ttl=TTL, unavailable_after=1.0) as other,
        ):
            async with one.lock("name"):
                await asyncio.to_thread(shutil.copytree, data, server.directory / "backup")
            for _ in range(50):
                async with other.lock("another name"):
                    pass
            await asyncio.sleep(TTL / 2)  # both have seen newer transactions than the backup's
            server.crash()
            shutil.rmtree(data)
            (server.directory / "backup").rename(data)
            await asyncio.to_thread(server.start)
            async with bounded(20.0):
                while True:
                    with suppress(BackendUnavailable):
                        async with other.lock("name", timeout=15.0):
                            break
    assert any(getattr(one, "event", "") == "store_replaced" for one in caplog.records)


async def test_servers_of_others_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """They stand where the known ones stood, and have seen more transactions. The session is another's."""
    with ZooKeeperServer(tick=0.1) as server, ZooKeeperServer(tick=0.1) as foreign:
        async with Client(f"{foreign.url}?tick_time=0.1") as busy:
            for _ in range(30):
                async with busy.lock("name"):
                    pass
        url, port = f"{server.url}?tick_time=0.1", server.port
        async with Client(url, ttl=60.0, unavailable_after=60.0) as client:
            lease = await client.lock("name").acquire()
            server.crash()
            foreign.crash()
            foreign.lines.append(f"clientPort={port}")
            foreign.port = port
            await asyncio.to_thread(foreign.start)
            await until(lambda: "not the store that this client entered" in caplog.text, "a word")
            with pytest.raises(BackendUnavailable):
                await client.lock("another", timeout=1.0).acquire()
            assert lease.held
            foreign.crash()
            await asyncio.to_thread(server.start)
            await lease.extend()
            async with client.lock("another", timeout=10.0):
                pass
            await lease.release()
    told = [one for one in caplog.records if getattr(one, "event", "") == "other_store"]
    assert len(told) == 1
    assert told[0].levelno == logging.WARNING


async def test_idle_client_does_not_take_its_servers_for_silent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had a connection until now, though its session was told of nothing for long."""
    monkeypatch.setattr("random.shuffle", lambda hosts: None)
    with ZooKeeperServer(tick=TICK) as server, ZooKeeperServer(tick=TICK) as foreign:
        async with Client(
            f"{foreign.url}?tick_time={TICK}"
        ) as busy:  # it has seen more transactions
            for _ in range(30):
                async with busy.lock("name"):
                    pass
        async with Wire(server.port) as wire:
            url = f"zookeeper://127.0.0.1:{wire.port},127.0.0.1:{foreign.port}?tick_time={TICK}"
            async with Client(url, ttl=60.0, unavailable_after=60.0) as client:
                session = client._core.session
                assert session is not None
                session.backend.acquaintance._heard_at -= 100.0  # type: ignore[attr-defined]
                await wire.refuse()
                wire.cut()
                words = ("not the store that this client entered", "is another store than")
                await until(lambda: any(one in caplog.text for one in words), "a word")
                await wire.heal()
                async with client.lock("name", timeout=20.0):
                    pass
    events = [getattr(one, "event", "") for one in caplog.records]
    assert "store_replaced" not in events


async def test_later_versions_are_left_alone() -> None:
    with ZooKeeperServer(tick=TICK) as server:
        url = f"{server.url}?tick_time={TICK}"
        async with Client(url, ttl=TTL):
            pass
        async with looking(url) as (session, _):
            mark = b'{"id": "a", "min": 2, "max": 3}'
            await session.ask(jute.set_data("/aiodlock/store", mark))
        with pytest.raises(BackendError, match="later versions"):
            await Client(url, ttl=TTL).__aenter__()


@pytest.mark.parametrize("longest", [100.0, 1.0])
async def test_session_that_servers_shorten_is_not_counted_on(longest: float) -> None:
    with ZooKeeperServer(tick=TICK) as server:
        async with _running(_ensemble(server.port), 20.0) as session:
            lifetime, member, number = session.lifetime, _Member(session), session.id
            server.crash()
            server.lines.append(f"maxSessionTimeout={round(longest * 1000)}")
            await asyncio.to_thread(server.start)
            await session.wait_up(10.0)
            if longest < 20.0:
                assert (session.id != number, member.told[-1]) == (True, "over")
                assert lifetime.deadline < now() + longest
            else:
                assert (session.id, member.told[-1]) == (number, "up")


async def test_waiting_for_a_connection_that_was_lost_in_this_turn_leaves_the_loop_its_turns(
    server: ZooKeeperServer,
) -> None:
    async with looking(server.url) as (session, _):
        lost = session._connection
        assert lost is not None
        lost.connection_lost(None)
        assert session._up.is_set()
        assert not session.is_up
        await session.wait_up(10.0)
        assert session.is_up


async def test_waiting_for_a_session_that_was_closed_leaves_the_loop_its_turns(
    server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with looking(server.url) as (session, _):
        pass
    turns, sleep = 0, asyncio.sleep

    async def counted(pause: float) -> None:
        nonlocal turns
        turns += 1
        await sleep(pause)

    monkeypatch.setattr(asyncio, "sleep", counted)
    with pytest.raises(BackendUnavailable, match="closed"):
        await session.wait_up(0.2)
    assert turns < 10


async def test_receipts_directory_that_somebody_deleted_is_made_anew(
    server: ZooKeeperServer,
) -> None:
    name = f"name-{os.urandom(4).hex()}"
    async with running(server.url, tick=TICK) as backend:
        for _ in range(2):
            asked = asker(backend, name=name)
            async with bounded(5.0):
                await asked.acquire()
            await asked.leave()
            session, ids = backend._main, f"{backend.queues.root}/ids"
            for node in (await session.ask(jute.get_children(ids))).value[0]:
                await session.ask(jute.delete(f"{ids}/{node}"))
            await session.ask(jute.delete(ids))
        await session.make_root()


async def test_lease_is_extended_by_hand_though_somebody_deleted_its_clients_node(
    server: ZooKeeperServer,
) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        asked = asker(backend, name=f"name-{os.urandom(4).hex()}", ttl=TTL)
        await asked.acquire()
        session = backend._main
        await session.ask(jute.delete(session._heartbeats.node.path))
        await asked.place.extend(None)
        assert (
            await session.ask(jute.exists(session._heartbeats.node.path))
        ).value.ephemeral_owner == session.id
        await asked.leave()


async def test_clients_whose_nodes_somebody_deleted_with_what_they_stood_in_go_on(
    server: ZooKeeperServer,
) -> None:
    """Their heartbeats wrote to nothing: leases ended, and none could begin."""
    root = f"/{os.urandom(4).hex()}"
    url, ttl = f"{server.url}{root}", 1.0
    async with (
        running(url, tick=TICK, ttl=ttl) as backend,
        _running(_ensemble(server.port)) as other,
    ):
        asked = asker(backend, name="name", ttl=ttl)
        await asked.acquire()
        paths = (backend._main._heartbeats.node.path, f"{backend.queues.root}/clients")
        deletion = jute.multi([jute.delete(path) for path in paths])
        await other.ask(deletion)
        await asyncio.sleep(ttl)
        assert asked.place.deadline > now()
        await other.ask(deletion)
        await asked.place.extend(None)
        await asked.leave()


async def test_holder_whose_receipt_somebody_deleted_is_broken(server: ZooKeeperServer) -> None:
    name = f"name-{os.urandom(4).hex()}"
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        asked = asker(backend, name=name, ttl=TTL)
        await asked.acquire()
        await backend._main.ask(jute.delete(f"{backend.queues.root}/ids/{asked.place._node.id}"))
        assert await backend.break_lock(name) == 1
        await until(lambda: asked.heard.told == ["gone"])
        await asked.leave()


def test_backend_that_is_run_again_on_another_loop_watches_its_nodes(
    server: ZooKeeperServer,
) -> None:
    """It was left before it had begun to watch the nodes of before."""
    ensemble = read_url(f"{server.url}?tick_time={TICK}", "aiodlock")
    backend = ZooKeeperBackend(ensemble, ttl=2.0, unavailable_after=30.0)
    name = f"name-{os.urandom(4).hex()}"

    async def hold(*, breaks: bool) -> None:
        ready = asyncio.Event()
        task = asyncio.create_task(backend.run(ready.set))
        async with bounded(20.0):
            await ready.wait()
            asked = asker(backend, name=name)
            await asked.acquire()
            if breaks:
                await backend.break_lock(name)
                await until(lambda: asked.heard.told == ["broken"])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(hold(breaks=False))
    asyncio.run(hold(breaks=True))


async def test_next_session_of_a_client_knows_the_servers_that_the_dead_one_knew(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.shuffle", lambda hosts: None)
    with ZooKeeperServer(tick=TICK) as server, ZooKeeperServer(tick=TICK) as foreign:
        options = f"?tick_time={TICK}"
        async with Client(f"{foreign.url}{options}") as busy:  # it has seen more transactions
            for _ in range(30):
                async with busy.lock("name"):
                    pass
        both = f"zookeeper://127.0.0.1:{server.port},127.0.0.1:{foreign.port}{options}"
        async with (
            Client(both, ttl=TTL) as client,
            Client(f"{server.url}{options}", ttl=TTL) as ours,
            ours.lock("name"),
        ):
            session = client._core.session
            assert session is not None
            monkeypatch.setattr("random.shuffle", lambda hosts: hosts.reverse())

            async def bug() -> None:
                raise ZeroDivisionError("a bug of ours")

            session.start_soon(bug)
            await until(lambda: session.death is not None, "death")
            with pytest.raises(WouldBlock):
                await client.lock("name").acquire_nowait()
    assert sum(getattr(one, "event", "") == "other_store" for one in caplog.records) == 1


async def test_many_sessions_are_told_once_though_idle_ones_end_and_others_begin(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ensemble = read_url("zookeeper://nowhere.invalid", "aiodlock")
    backend = ZooKeeperBackend(ensemble, ttl=2.0, unavailable_after=30.0)
    for ttl in range(2, 30):
        backend._session(float(ttl))
        if ttl > 21:
            del backend._sessions[(ttl - 1) * 1000]
    assert sum(getattr(one, "event", "") == "many_sessions" for one in caplog.records) == 1
