"""`Locked` and `Once` at WebSocket routes, spoken to as a server does; and behind a real one."""

import asyncio
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, WebSocket

from aiodlock import Client, Lease, OnceRun
from aiodlock.fastapi import LockClient, Locked, Once

from ..scenes import PATIENCE, until

pytestmark = pytest.mark.stores("memory", "valkey9")


class Peer:
    """A server's side of one WebSocket, and the caller behind it."""

    def __init__(self, app: FastAPI, path: str, *, denies: bool = True) -> None:
        self.inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        extensions: dict[str, Any] = {"websocket.http.response": {}} if denies else {}
        scope: dict[str, Any] = {
            "type": "websocket",
            "path": path,
            "raw_path": path.encode(),
            "scheme": "ws",
        }
        scope |= {"root_path": "", "query_string": b"", "headers": [(b"host", b"x")], "state": {}}
        scope |= {"client": ("1", 1), "server": ("x", 80), "subprotocols": []}
        scope |= {"extensions": extensions}
        self.say(type="websocket.connect")
        self.task = asyncio.ensure_future(app(scope, self.inbox.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    def say(self, **message: Any) -> None:
        self.inbox.put_nowait(message)

    def has(self, kind: str) -> bool:
        return any(message["type"] == kind for message in self.sent)

    async def end(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.task


async def accepts(socket: WebSocket) -> None:
    await socket.accept()


def make_app(client: Client, timeout: float | None = 5.0) -> tuple[FastAPI, list[str]]:
    app, router, ran = FastAPI(), APIRouter(), []
    app.dependency_overrides[LockClient] = lambda: client

    @router.websocket("/x")
    async def late(
        socket: WebSocket,
        room: int,
        lease: Annotated[Lease, Locked("room:{room}", timeout=timeout)],
    ) -> None:
        ran.append(lease.name)
        await socket.accept()
        while True:
            await socket.send_text(await socket.receive_text())

    @router.websocket("/early", dependencies=[Depends(accepts)])
    async def early(
        socket: WebSocket,
        room: int,
        lease: Annotated[Lease, Locked("room:{room}", timeout=timeout)],
    ) -> None:
        ran.append(lease.name)
        await socket.send_text(await socket.receive_text())

    @router.websocket("/once")
    async def once(
        socket: WebSocket, room: int, once: Annotated[OnceRun, Once("room:{room}", keep=60)]
    ) -> None:
        await socket.accept()
        if once.first:
            once.result = "done"
        await socket.send_text(str(once.result))

    app.include_router(router, prefix="/{room}")
    return app, ran


@pytest.mark.parametrize("path", ["/007/x", "/7/early"])
async def test_caller_that_hangs_up_while_it_waits_leaves_the_queue(
    client: Client, path: str
) -> None:
    app, ran = make_app(client, timeout=None)

    async def waiters() -> int:
        return len((await client.inspect("room:7")).waiters)

    async def none() -> bool:
        return not await waiters()

    async with client.lock("room:7", owner="another"):
        peer = Peer(app, path)
        await until(waiters, "queued")
        peer.say(type="websocket.disconnect", code=1001)
        await until(none, "left the queue")
    await peer.end()
    assert not ran
    assert not await client.lock("room:7").locked()


async def test_loss_after_accept_closes_with_a_code(client: Client) -> None:
    app, ran = make_app(client)
    peer = Peer(app, "/7/x")
    peer.say(type="websocket.receive", text="hello")
    await until(lambda: peer.has("websocket.send"), "answered")
    assert await client.break_lock("room:7") == 1
    await peer.end()
    assert ran == ["room:7"]
    assert [message["type"] for message in peer.sent] == [
        *("websocket.accept", "websocket.send", "websocket.close")
    ]
    assert peer.sent[-1]["code"] == 4409
    assert "lost" in peer.sent[-1]["reason"]


@pytest.mark.parametrize(
    ("path", "denies", "last"),
    [
        ("/7/x", True, "websocket.http.response.body"),
        ("/7/x", False, "websocket.close"),
        ("/7/early", True, "websocket.close"),
    ],
)
async def test_wait_that_times_out_is_an_answer_before_accept_and_a_close_behind_it(
    client: Client, path: str, denies: bool, last: str
) -> None:
    app, ran = make_app(client, timeout=0)
    async with client.lock("room:7", owner="another"):
        peer = Peer(app, path, denies=denies)
        await peer.end()
    assert not ran
    assert peer.sent[-1]["type"] == last
    if last == "websocket.close":
        assert peer.sent[-1]["code"] == 4423
    else:
        assert peer.sent[0]["status"] == 423


async def test_message_that_comes_while_it_waits_is_kept(client: Client) -> None:
    app, _ = make_app(client)

    async def waiters() -> int:
        return len((await client.inspect("room:7")).waiters)

    async with client.lock("room:7", owner="another"):
        peer = Peer(app, "/7/early")
        peer.say(type="websocket.receive", text="early bird")
        await until(waiters, "queued")
    await peer.end()
    assert [m["text"] for m in peer.sent if m["type"] == "websocket.send"] == ["early bird"]


async def test_caller_that_is_gone_when_the_lease_is_lost_gets_nothing(client: Client) -> None:
    app, _ = make_app(client)

    @app.websocket("/gone")
    async def gone(socket: WebSocket, lease: Annotated[Lease, Locked("gone")]) -> None:
        await socket.accept()
        await socket.close()
        await client.break_lock("gone")
        await lease.wait_lost()

    peer = Peer(app, "/gone")
    with pytest.raises(Exception, match="broken by an operator"):
        await peer.end()
    assert [message["type"] for message in peer.sent] == ["websocket.accept", "websocket.close"]


async def test_work_of_a_websocket_is_done_once(client: Client) -> None:
    app, _ = make_app(client)
    for room in ("7", "007"):
        peer = Peer(app, f"/{room}/once")
        await peer.end()
        assert peer.sent[-1] == {"type": "websocket.send", "text": "done"}
    assert (await client.inspect("room:7", kind="once")).name == "room:7"
