"""What refuses a client that was let in is an outage: it lasts, and the client outlasts it."""

from __future__ import annotations

import asyncio
import base64
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from aiodlock import AcquireTimeout, BackendError, BackendUnavailable, Client
from aiodlock._client import core_of
from aiodlock._errors import LockError
from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd.recipe import Keys
from aiodlock.backends.etcd.refusals import TokenEnded
from aiodlock.backends.etcd.watching import Watches

from ..ports import free_ports
from ..scenes import bounded, until_waiting
from .servers import EtcdCluster, find_etcd
from .test_access import _as_root, _guard, _login
from .test_connection import Server

pytestmark = pytest.mark.skipif(find_etcd() is None, reason="etcd is not installed")


@pytest.fixture
def guarded() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        _guard(cluster)
        yield cluster


def _told(caplog: pytest.LogCaptureFixture, event: str) -> list[logging.LogRecord]:
    return [one for one in caplog.records if getattr(one, "event", "") == event]


async def _is_refused(client: Client) -> None:
    """Wait until a call fails as in an outage."""
    async with bounded(20.0):
        while True:
            try:
                async with client.lock("asked", timeout=1.0):
                    pass
            except BackendUnavailable:
                return
            await asyncio.sleep(0.05)


async def _is_served(client: Client, within: float = 20.0) -> None:
    async with asyncio.timeout(within):
        while True:
            with suppress(BackendUnavailable, AcquireTimeout):
                async with client.lock("asked", timeout=5.0):
                    return


Refusal = tuple[Callable[[EtcdCluster], None], Callable[[EtcdCluster], None]]


def _password(word: str) -> Callable[[EtcdCluster], None]:
    return lambda cluster: _as_root(cluster, "auth/user/changepw", name="locker", password=word)


def _make_again(cluster: EtcdCluster) -> None:
    _as_root(cluster, "auth/user/add", name="locker", password="locker's pass")
    _as_root(cluster, "auth/user/grant", user="locker", role="locks")


REFUSALS: dict[str, Refusal] = {
    "password": (_password("another"), _password("locker's pass")),
    "user": (lambda cluster: _as_root(cluster, "auth/user/delete", name="locker"), _make_again),
    "role": (
        lambda cluster: _as_root(cluster, "auth/user/revoke", name="locker", role="locks"),
        lambda cluster: _as_root(cluster, "auth/user/grant", user="locker", role="locks"),
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
async def test_user_that_is_refused_for_a_moment_costs_no_lease(
    guarded: EtcdCluster, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    refuse, allow = REFUSALS[what]
    url = _login(guarded, "locker's pass")
    async with Client(url, prefix="mine", ttl=30.0, waiter_ttl=30.0) as client:
        held = await client.lock("name").acquire()
        waiting = asyncio.create_task(client.lock("name").acquire())
        await asyncio.sleep(0.2)
        await asyncio.to_thread(refuse, guarded)
        await _is_refused(client)
        assert held.held
        assert not waiting.done()
        await asyncio.to_thread(allow, guarded)
        await _is_served(client)
        await held.extend()
        await held.release()
        async with bounded(10.0):
            await (await waiting).release()
    told = _told(caplog, "no_connection")
    assert sum(one.levelno == logging.WARNING for one in told) == 1
    assert "refused" in told[0].getMessage()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("password", "invalid user ID or password"),
        ("user", "user name not found|invalid user ID or password"),
        ("role", "permission denied"),
    ],
)
async def test_who_holds_and_who_waits_are_told_of_the_refusal_that_ended_it(
    guarded: EtcdCluster, what: str, words: str
) -> None:
    """That the leader has changed, or that a lease was not renewed, says nothing of that."""
    url = _login(guarded, "locker's pass")
    async with Client(url, prefix="mine", unavailable_after=3.0) as client:
        lease = await client.lock("name", ttl=6.0, on_lost="flag").acquire()
        waiting = asyncio.create_task(client.lock("name").acquire())
        await until_waiting(client, "name")
        await asyncio.to_thread(REFUSALS[what][0], guarded)
        lost = await lease.wait_lost()
        with pytest.raises(BackendUnavailable, match=words):
            await waiting
        assert re.search(words, str(lost)), lost


async def test_cluster_that_asks_for_no_users_for_a_moment_is_used_without(
    guarded: EtcdCluster,
) -> None:
    url = _login(guarded, "locker's pass")
    async with Client(url, prefix="mine", ttl=5.0) as client:
        async with client.lock("name") as lease:
            await asyncio.to_thread(_as_root, guarded, "auth/disable")
            guarded.token = ""
            guarded.nodes[0].kill()  # tokens are gone with it
            await asyncio.to_thread(guarded.start)
            await _is_served(client)
            await asyncio.to_thread(guarded.call, "auth/enable")
            await _is_served(client)
            assert lease.held


async def test_withdrawn_permission_is_asked_about_at_a_slow_pace(
    guarded: EtcdCluster,
) -> None:
    url = _login(guarded, "locker's pass")
    async with Client(url, prefix="mine", ttl=6.0) as client:
        lease = await client.lock("name").acquire()
        session = client._core.session
        assert session is not None
        link = session.backend._link  # type: ignore[attr-defined]
        asked, ask = 0, link._ask

        async def counted(*args: Any) -> Any:
            nonlocal asked
            asked += 1
            return await ask(*args)

        await asyncio.to_thread(REFUSALS["role"][0], guarded)
        generation, link._ask = link.generation, counted
        assert (await lease.wait_lost()).reason == "expired"
        assert asked < 6 * 5  # the reads of 6 s: ten a second it were
        assert link.generation == generation, "the connection is as good as ever"


class Switch:
    """A proxy of bytes that leads to a member, or to a server that is not etcd's."""

    def __init__(self, port: int, target: int) -> None:
        self.port, self.target = port, target
        self._writers: set[asyncio.StreamWriter] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far = await asyncio.open_connection("127.0.0.1", self.target)
        self._writers |= {writer, far}

        async def copy(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                while data := await source.read(65536):
                    to.write(data)
            to.close()

        await asyncio.gather(copy(reader, far), copy(far_reader, writer))

    def lead_to(self, target: int) -> None:
        self.target = target
        writers, self._writers = self._writers, set()
        for writer in writers:
            writer.transport.abort()


@asynccontextmanager
async def _switch(target: int) -> AsyncIterator[Switch]:
    (port,) = free_ports(1)
    switch = Switch(port, target)
    server = await asyncio.start_server(switch._serve, "127.0.0.1", port)
    try:
        yield switch
    finally:
        server.close()
        switch.lead_to(target)
        await asyncio.sleep(0.05)


@asynccontextmanager
async def _answering(
    head: list[tuple[str, str]], trailers: list[tuple[str, str]], *messages: bytes
) -> AsyncIterator[int]:
    """Serve HTTP/2 on a port, with one answer to all."""

    def answer(server: Server, stream: int) -> None:
        server.answer(stream, *messages, head=head, trailers=trailers)

    (port,) = free_ports(1)
    made: list[Server] = []

    def make() -> Server:
        made.append(Server(answer))
        return made[-1]

    listening = await asyncio.get_running_loop().create_server(make, "127.0.0.1", port)
    try:
        yield port
    finally:
        listening.close()
        for one in made:
            one.transport.abort()


_GRPC = [(":status", "200"), ("content-type", "application/grpc")]
_ANSWERS: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]], list[bytes]]] = {
    "404": ([(":status", "404"), ("content-type", "text/html")], [("x", "y")], []),
    "403": ([(":status", "403"), ("content-type", "text/html")], [("x", "y")], []),
    "500": ([(":status", "500"), ("content-type", "text/html")], [("x", "y")], []),
    "302": ([(":status", "302"), ("location", "/login")], [("x", "y")], []),
    "page": ([(":status", "200"), ("content-type", "text/html")], [("x", "y")], []),
    "unimplemented": (_GRPC, [("grpc-status", "12"), ("grpc-message", "no")], []),
    "denied": (_GRPC, [("grpc-status", "7"), ("grpc-message", "no")], []),
    "unauthenticated": (_GRPC, [("grpc-status", "16"), ("grpc-message", "no")], []),
    "internal": (_GRPC, [("grpc-status", "13"), ("grpc-message", "no")], []),
    "empty": (_GRPC, [("grpc-status", "0")], [b""]),
    "nothing": (_GRPC, [("grpc-status", "0")], []),
    "garbage": (_GRPC, [("grpc-status", "0")], [b"\xff" * 30]),
    "two": (_GRPC, [("grpc-status", "0")], [b"", b""]),
}


@pytest.mark.parametrize("what", _ANSWERS)
async def test_proxy_that_answers_something_else_for_a_moment_costs_no_lease(
    one_node: EtcdCluster, what: str
) -> None:
    head, trailers, messages = _ANSWERS[what]
    async with (
        _answering(head, trailers, *messages) as foreign,
        _switch(one_node.nodes[0].port) as switch,
        Client(f"etcd://127.0.0.1:{switch.port}", ttl=30.0, waiter_ttl=30.0) as client,
    ):
        held = await client.lock("name").acquire()
        waiting = asyncio.create_task(client.lock("name").acquire())
        await asyncio.sleep(0.2)
        switch.lead_to(foreign)
        await _is_refused(client)
        assert held.held
        switch.lead_to(one_node.nodes[0].port)
        await _is_served(client)
        await held.release()
        async with bounded(10.0):
            await (await waiting).release()


@pytest.mark.parametrize("what", ["404", "unimplemented", "empty", "garbage"])
async def test_what_is_not_etcd_is_told_when_entering(what: str) -> None:
    head, trailers, messages = _ANSWERS[what]
    async with _answering(head, trailers, *messages) as foreign:
        with pytest.raises(BackendError):
            await Client(f"etcd://127.0.0.1:{foreign}").__aenter__()


async def test_server_at_an_endpoint_that_is_not_etcd_is_passed_over(
    one_node: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    monkeypatch.setattr("random.randrange", lambda *_: 0)
    try:
        url = f"etcd://127.0.0.1:{port},{one_node.nodes[0].endpoint}"
        async with Client(url, ttl=20.0) as client, client.lock("name") as lease:
            session = client._core.session
            assert session is not None
            link = session.backend._link  # type: ignore[attr-defined]
            for _ in range(3):
                link.failed(link.generation, BackendUnavailable("moved by the test"))
                await _is_served(client)
            assert lease.held
    finally:
        await server.stop(None)


@pytest.mark.parametrize(("code", "words"), [("8", "too many requests"), ("14", "no leader")])
async def test_member_that_carries_nothing_out_for_now_does_not_keep_a_client_from_another(
    one_node: EtcdCluster, monkeypatch: pytest.MonkeyPatch, code: str, words: str
) -> None:
    monkeypatch.setattr("random.randrange", lambda *_: 0)
    refusal = [("grpc-status", code), ("grpc-message", f"etcdserver: {words}")]
    async with _answering(_GRPC, refusal) as busy:
        url = f"etcd://127.0.0.1:{busy},{one_node.nodes[0].endpoint}"
        async with Client(url) as client, client.lock("name") as lease:
            assert lease.held


def _forbid_middle(cluster: EtcdCluster) -> None:
    """Let the user of the locks use every name but those that begin with ``m``."""
    before, behind = Keys.of("mine", "lock", "m").base[:-1], Keys.of("mine", "lock", "n").base[:-1]
    _as_root(cluster, "auth/role/revoke", role="locks", key="bWluZS8=", range_end="bWluZTA=")
    for first, end in ((b"mine/", before), (behind, b"mine0")):
        key, range_end = (base64.b64encode(one).decode() for one in (first, end))
        permission = {"permType": "READWRITE", "key": key, "range_end": range_end}
        _as_root(cluster, "auth/role/grant", name="locks", perm=permission)


async def test_watch_that_is_forbidden_keeps_no_other_one_from_being_heard(
    guarded: EtcdCluster,
) -> None:
    url = _login(guarded, "locker's pass")
    async with Client(url, prefix="mine") as client, Client(url, prefix="mine") as other:
        await asyncio.to_thread(_forbid_middle, guarded)
        backend = core_of(client).use().backend
        told, heard = asyncio.Event(), asyncio.Event()
        over = [backend.observe("lock", "middle", told.set)]
        async with bounded(20.0):
            await told.wait()  # it is over for now, and tried again later
            over.append(backend.observe("lock", "a", heard.set))
            await heard.wait()  # it is watched
            heard.clear()
            async with other.lock("a"):
                await heard.wait()
        for end in over:
            end()


async def test_forbidden_watch_is_known_by_its_place_where_the_cluster_does_not_say_which_it_was() -> (
    None
):
    """etcd 3.5 and later tell -1 instead of the watch that they refuse."""
    watches = Watches(None)  # type: ignore[arg-type]
    over: list[bytes] = []
    for key in (b"a", b"forbidden", b"z"):
        watches.watch(key, b"", 1, lambda *_: None, partial(over.append, key))
    for told in ([], [b"forbidden"], [b"forbidden"]):
        sent: asyncio.Queue[m.WatchRequest] = asyncio.Queue()
        opened = asyncio.create_task(watches._send(sent.put))
        async with bounded(5.0):
            while True:
                created = (await sent.get()).create_request
                assert created is not None
                if created.key == b"forbidden":
                    with pytest.raises(TokenEnded):
                        watches._heard(m.WatchResponse(watch_id=-1, created=True, canceled=True))
                    break
                watches._heard(m.WatchResponse(m.Header(1), created.watch_id, created=True))
                if created.key == b"z":
                    break
        opened.cancel()
        assert over == told


async def test_who_was_never_let_write_is_told_at_once(guarded: EtcdCluster) -> None:
    _as_root(guarded, "auth/role/add", name="looks")
    permission = {"permType": "READ", "key": "bWluZS8=", "range_end": "bWluZTA="}
    _as_root(guarded, "auth/role/grant", name="looks", perm=permission)
    _as_root(guarded, "auth/user/revoke", name="locker", role="locks")
    _as_root(guarded, "auth/user/grant", user="locker", role="looks")
    async with Client(_login(guarded, "locker's pass"), prefix="mine") as client:
        assert not (await client.inspect("name")).holders
        with pytest.raises(LockError, match="permission denied") as refused:
            await client.lock("name").acquire()
        assert not isinstance(refused.value, BackendUnavailable)
