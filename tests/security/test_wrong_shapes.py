"""A server whose replies have the wrong shape: BackendError, and neither a hang nor a dead client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable

import pytest

import aiodlock
from aiodlock.backends.redis.scripts import ACQUIRE, BREAK, EXTEND, INSPECT, LEAVE, Script

from ..scenes import SOON, side_by_side, store_of, takes, until, until_cancelled
from .fake_server import FakeServer

#: Long enough for a connection to be made anew, also when the machine stalls.
UNAVAILABLE_AFTER = 2.0


def resp(value: object) -> bytes:
    """Pack what a script may return."""
    if isinstance(value, list):
        return b"*%d\r\n" % len(value) + b"".join(map(resp, value))
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    if isinstance(value, int):
        return b":%d\r\n" % value
    return b"$-1\r\n"


WRONG = {
    "nil": resp(None),
    "an integer": resp(7),
    "a string": resp(b"granted"),
    "nothing in it": resp([]),
    "nothing": resp(b""),
    "an unknown word": resp(b"perhaps 1 2"),
    "too long": resp(b"granted 1 2 3"),
    "no number": resp(b"granted x 1000"),
    "not even text": resp(b"granted \xff\xfe 1000"),
    "a number too long": resp(b"granted %b 1000" % (b"9" * 5000)),
    "a number too large": resp(b"granted 1 %b" % (b"9" * 400)),
    "two spaces": resp(b"granted  1000"),
    "a list": resp([b"granted", b"17", b"60000"]),
    "a redirection to nowhere": b"-MOVED nonsense\r\n",
    "no time": resp([b"granted", b"17", None]),
    "lists in it": resp([[b"granted"], [b"17"], []]),
    "waiting without times": resp(b"waiting x y z"),
    "an unknown reason": resp(b"gone wind"),
    "a reason that is not text": resp(b"gone \xff"),
    "a limit that is no number": resp(b"limit sx"),
    "a nil array": b"*-1\r\n",
    "an error": b"-ERR something is wrong\r\n",
    "an error without a word": b"-\r\n",
    "a huge string": resp(b"x" * 1_000_000),
}


@pytest.fixture
async def fake() -> AsyncIterator[FakeServer]:
    async with FakeServer() as fake:
        yield fake


@pytest.fixture
async def client(fake: FakeServer) -> AsyncIterator[aiodlock.Client]:
    async with client_of(fake) as client:
        yield client


def client_of(fake: FakeServer, within: float = UNAVAILABLE_AFTER) -> aiodlock.Client:
    return aiodlock.Client(fake.url, unavailable_after=within, close_timeout=0.2)


def is_call(command: tuple[bytes, ...], script: Script) -> bool:
    return command[0] in (b"EVALSHA", b"EVAL") and command[1] in (script.sha, script.source)


def answering(fake: FakeServer, **replies: bytes) -> None:
    """Let the scripts answer so; what is not given, as it should."""
    scripts = {"acquire": ACQUIRE, "extend": EXTEND, "leave": LEAVE, "inspect": INSPECT}
    scripts["break_"] = BREAK
    sane = {
        "acquire": resp(b"granted 17 60000"),
        "extend": resp(b"held 17 60000"),
        "leave": resp(b"released"),
        "inspect": resp([[b"17", b"0", [], [], 0, []], b"0"]),
        "break_": resp(0),
    } | replies

    def answer(command: tuple[bytes, ...]) -> bytes | None:
        return next(
            (sane[name] for name, script in scripts.items() if is_call(command, script)), None
        )

    fake.answer = answer


async def works(fake: FakeServer, client: aiodlock.Client) -> None:
    """Assert that the client is as good as new once the server is."""
    answering(fake)
    async with takes(at_most=SOON):
        async with client.lock("another") as lease:
            await lease.extend()
        assert (await client.inspect("another")).holders == ()


async def fails(call: Awaitable[object]) -> None:
    async with takes(at_most=UNAVAILABLE_AFTER + SOON):
        with pytest.raises(aiodlock.BackendError):
            await call


@pytest.mark.parametrize("reply", WRONG.values(), ids=WRONG)
async def test_wrong_reply_to_an_acquire(
    fake: FakeServer, client: aiodlock.Client, reply: bytes
) -> None:
    answering(fake, acquire=reply)
    await fails(client.lock("name").acquire())
    await fails(client.lock("name").acquire_nowait())
    await fails(client.semaphore("name", 3).acquire(timeout=1.0))
    await works(fake, client)


@pytest.mark.parametrize("reply", WRONG.values(), ids=WRONG)
async def test_wrong_replies_to_extensions_end_the_lease_at_its_deadline(
    fake: FakeServer, client: aiodlock.Client, reply: bytes
) -> None:
    answering(fake, acquire=resp(b"granted 17 300"), extend=reply)
    async with takes(at_most=0.3 + 0.5):
        with pytest.raises(aiodlock.LockLost) as raised:
            async with client.lock("name", ttl=0.3):
                await until_cancelled()
    reason = raised.value.reason
    assert reason == "expired" or (reason == "gone" and b"gone" in reply)
    await works(fake, client)


async def test_wrong_reply_to_a_leave() -> None:
    async def check(reply: bytes) -> None:
        # A connection that is cut each time is dialled with growing pauses.
        async with FakeServer() as fake, client_of(fake, within=30.0) as client:
            answering(fake, acquire=resp(b"granted 17 1500"), leave=reply)
            async with takes(at_most=1.0 + 1.5 + 2 * SOON):
                async with client.lock("name", ttl=1.5):
                    pass  # goes on in the background, a second at most
                lease = await client.lock("name", ttl=1.5).acquire()
                with pytest.raises((aiodlock.LockLost, aiodlock.BackendError)):
                    await lease.release()
            await works(fake, client)

    await side_by_side(check, WRONG)


@pytest.mark.parametrize("reply", WRONG.values(), ids=WRONG)
async def test_wrong_replies_to_what_people_ask(
    fake: FakeServer, client: aiodlock.Client, reply: bytes
) -> None:
    answering(fake, inspect=reply)
    await fails(client.inspect("name"))
    await fails(client.lock("name").locked())
    await fails(client.check_sequencer("name:exclusive:17"))
    if reply != resp(7):
        answering(fake, break_=reply)
        await fails(client.break_lock("name"))
    await works(fake, client)


@pytest.mark.parametrize(
    "reply",
    [
        resp([[b"17", b"0", [b"u1"], [], 0, []], b"0"]),
        resp([[b"17", b"0", [b"u", b"x", b"17", b"soon", b"c", b"", b"9"], [], 0, []], b"0"]),
        resp([[b"17", b"0", [b"u\xff", b"x", b"17", b"5", b"c", b"", b"9"], [], 0, []], b"0"]),
        resp([[b"17", b"0", [b"u", b"x", b"17", b"5", b"c", b"", b"soon"], [], 0, []], b"0"]),
        resp([[b"17", b"0", [], [b"u", b"x", None, b"c"], 0, []], b"0"]),
        resp([[b"17", b"0", 3, 4, 0, []], b"0"]),
        resp([[b"x", b"0", [], [], 0, []], b"0"]),
        resp([[b"17", b"0", [], [], 0, [b"x", b"y"]], b"0"]),
        resp([[b"17", b"0", [], [], 0, []], b"soon"]),
        resp([]),
        resp([b"0"]),
        resp([[b"17", b"0", [], [], 0, []], [b"17", b"0", [], [], 0, []], b"0"]),
    ],
)
async def test_wrong_details_of_an_inspection(
    fake: FakeServer, client: aiodlock.Client, reply: bytes
) -> None:
    answering(fake, inspect=reply)
    await fails(client.inspect("name"))
    await works(fake, client)


SCANS = {
    "nil": resp(None),
    "one of two": resp([b"0"]),
    "an integer": resp(5),
    "no list of keys": resp([b"0", 5]),
    "keys that are not text": resp([b"0", [b"\xff\xfe"]]),
    "keys that are no keys": resp([b"0", [5]]),
    "an error": b"-ERR no\r\n",
}


@pytest.mark.parametrize("reply", SCANS.values(), ids=SCANS)
async def test_wrong_replies_to_scan(
    fake: FakeServer, client: aiodlock.Client, reply: bytes
) -> None:
    sane = fake.answer
    fake.answer = lambda command: reply if command[0] == b"SCAN" else sane(command)

    async def listing() -> None:
        [info async for info in client.locks()]

    await fails(listing())
    await works(fake, client)


BROKEN = {
    "no RESP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a length that is none": b"$x\r\n",
    "a type that is none": b"@1\r\n",
    "a reply too many": resp(b"granted 17 60000") * 2,
    "half a reply": b"*3\r\n$7\r\ngrant",
}


async def test_broken_protocol_costs_the_connection_and_not_the_client() -> None:
    async def check(reply: bytes) -> None:
        async with FakeServer() as fake, client_of(fake) as client:
            answering(fake, acquire=reply)
            try:
                async with takes(at_most=UNAVAILABLE_AFTER + SOON):
                    await (await client.lock("name").acquire()).release()
            except aiodlock.LockError:
                pass  # a reply too many comes after a good one
            await works(fake, client)

    await side_by_side(check, BROKEN)


@pytest.mark.parametrize(
    "message",
    [
        resp(None),
        resp(5),
        resp([]),
        resp([b"message"]),
        resp([b"message", b"x", b"y", b"z"]),
        resp([b"message", None, None]),
        resp([[b"message"], b"x", b"y"]),
        b"-ERR out of the blue\r\n",
        b"+OK\r\n",
    ],
)
async def test_wrong_messages_to_the_second_connection_do_no_harm(
    fake: FakeServer, client: aiodlock.Client, message: bytes
) -> None:
    answering(fake)
    async with client.lock("name") as lease:
        fake.say(message)
        await lease.extend()
    await works(fake, client)


async def test_wrong_notices_do_no_harm(fake: FakeServer, client: aiodlock.Client) -> None:
    answering(fake)
    channel = store_of(client).server.wakeups._channel
    async with client.lock("name") as lease:
        for payload in (
            b"",
            b"\xff",
            b"granted",
            b"granted a b c",
            b"granted  no-key-of-ours some-id 5",
            b"granted aiodlock:2:lock:{%ff}:state some-id 5",
            b"granted x " + lease.owner.encode() + b" 5",
            b"broken x y 99999999999999999999999999",
            b"sing a b 5",
        ):
            fake.say(resp([b"message", channel, payload]))
        await lease.extend()
        assert lease.held
    await works(fake, client)


HANDSHAKE = (b"SUBSCRIBE", b"SET", b"EXISTS", b"SCRIPT", b"PING", b"CLIENT")
ENTERING = {
    f"{shape} to {command.decode()}": (command, reply)
    for shape, reply in {
        "an error": b"-ERR no\r\n",
        "a list": resp([]),
        "no RESP": b"@\r\n",
    }.items()
    for command in HANDSHAKE
}


async def test_wrong_replies_while_entering_end_within_five_seconds() -> None:
    async def check(case: tuple[bytes, bytes]) -> None:
        command, reply = case
        async with FakeServer() as fake:
            fake.answer = lambda given: reply if given[0] == command else None
            async with takes(at_most=5.5):
                try:
                    async with aiodlock.Client(fake.url, close_timeout=0.2):
                        pass
                except aiodlock.BackendError:
                    pass

    await side_by_side(check, ENTERING)


async def test_service_that_does_not_count_who_hears_a_message_is_connected_to_all_the_same() -> (
    None
):
    """Several servers behind one address: the connections cannot be compared, and are left alone."""
    async with FakeServer() as server:
        server.answer = lambda command: b":0\r\n" if command[0] == b"PUBLISH" else None
        async with aiodlock.Client(server.url):
            await until(lambda: server.commands.count(b"SUBSCRIBE") >= 1, "a subscription")
            await asyncio.sleep(2.0)
            assert len(server._writers) == 2
            connected = server.commands.count(b"SUBSCRIBE")
            await asyncio.sleep(1.0)
            assert server.commands.count(b"SUBSCRIBE") == connected <= 6
