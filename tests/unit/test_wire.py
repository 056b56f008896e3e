"""What a wire does with replies that nobody awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from aiodlock._errors import BackendUnavailable
from aiodlock._patience import Patience
from aiodlock.backends.base import Unanswered
from aiodlock.backends.redis.messages import Call
from aiodlock.backends.redis.refusals import ReplyError
from aiodlock.backends.redis.scripts import LEAVE, TELL, Script
from aiodlock.backends.redis.server import Server
from aiodlock.backends.redis.settings import Settings
from aiodlock.backends.redis.source import Source
from aiodlock.backends.redis.wire import Awaited, Callback, TransportWire, Wire

from ..scenes import until


class Silent(Wire):
    """Writes to nobody. What is answered, and when, is up to the test."""

    def __init__(self, patience: float) -> None:
        super().__init__(Patience(patience))
        self.written: list[str] = []

    def _write(self, data: bytes) -> None:
        self.written += data.decode().split()

    def answer(self, reply: Any) -> None:
        self._receive(reply)

    def call(
        self, command: bytes, on_reply: Callable[[Any], object], within: float | None = None
    ) -> None:
        self.put(command, Callback(asyncio.get_running_loop(), on_reply), within=within)


async def test_reply_is_heard_while_it_is_read() -> None:
    wire, heard = Silent(60.0), list[Any]()
    wire.call(b"first", heard.append)
    second = wire.send_packed(b"second")
    wire.call(b"third", heard.append)
    wire.answer(b"1")
    assert heard == [b"1"]
    wire.answer(b"2")
    wire.answer(ReplyError("NOSCRIPT"))
    assert await second == b"2"
    assert isinstance(heard[1], ReplyError)
    assert len(heard) == 2
    wire.close()


async def test_reply_in_the_middle_of_which_a_command_is_sent_keeps_the_order() -> None:
    wire, heard = Silent(60.0), list[Any]()

    def hear(reply: Any) -> None:
        heard.append(reply)
        wire.call(b"again", heard.append)

    wire.call(b"first", hear)
    wire.call(b"second", heard.append)
    for reply in (b"1", b"2", b"3"):
        wire.answer(reply)
    assert heard == [b"1", b"2", b"3"]
    wire.close()


async def test_failure_is_heard_later_and_once() -> None:
    wire, heard = Silent(60.0), list[Any]()
    wire.call(b"command", heard.append, within=60.0)
    wire.close()
    wire.call(b"another", heard.append)
    assert not heard, "not from within"
    await until(lambda: len(heard) == 2)
    assert all(isinstance(one, Unanswered) for one in heard)


async def test_reply_that_is_late_is_heard_as_unanswered_and_dropped_when_it_comes() -> None:
    wire, heard = Silent(60.0), list[Any]()
    wire.call(b"command", heard.append, within=0.01)
    wire.call(b"another", heard.append, within=60.0)
    await until(lambda: len(heard) == 1)
    assert isinstance(heard[0], Unanswered)
    wire.answer(b"late")
    wire.answer(b"2")
    assert heard[1:] == [b"2"]
    wire.close()
    await asyncio.sleep(0)
    assert len(heard) == 2


async def test_hearing_that_fails_harms_neither_the_wire_nor_the_others() -> None:
    wire, heard, told = Silent(60.0), list[Any](), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, about: told.append(about))

    def fail(reply: Any) -> None:
        raise asyncio.CancelledError("a mistake")

    wire.call(b"first", fail)
    wire.call(b"second", heard.append)
    wire.answer(b"1")
    wire.answer(b"2")
    assert heard == [b"2"]
    wire.call(b"third", fail, within=0.01)
    wire.call(b"fourth", heard.append, within=0.02)
    await until(lambda: len(heard) == 2)
    assert isinstance(heard[1], Unanswered), "the limits go on"
    assert [str(about["exception"]) for about in told] == ["a mistake"] * 2
    wire.close()


async def test_of_thousands_of_commands_a_thousand_are_on_their_way_and_urgent_ones_pass() -> None:
    wire, heard, urgent = Silent(60.0), list[Any](), asyncio.get_running_loop().create_future()
    for number in range(2500):
        wire.call(b"%d " % number, heard.append)
    wire.put(b"urgent ", urgent, lease=60.0, urgent=True)
    await asyncio.sleep(0)
    order = [*map(str, range(1000)), "urgent", *map(str, range(1000, 2500))]
    assert wire.written == order[:1001]
    for replied, command in enumerate(order):
        assert len(wire.written) == min(max(1001, 1000 + replied), 2501)
        wire.answer(command)
        await asyncio.sleep(0)
    assert wire.written == order
    assert heard == [*map(str, range(2500))]
    assert await urgent == "urgent"
    wire.close()


async def test_what_a_reply_leads_to_is_behind_the_commands_that_wait() -> None:
    wire, heard = Silent(60.0), list[Any]()
    wire.call(b"0 ", lambda reply: wire.call(b"last ", heard.append))
    for number in range(1, 1100):
        wire.call(b"%d " % number, heard.append)
    for number in range(1100):
        wire.answer(b"%d" % number)
    await asyncio.sleep(0)
    assert wire.written == [*map(str, range(1100)), "last"]
    wire.answer(b"last")
    assert heard == [b"%d" % number for number in range(1, 1100)] + [b"last"]
    wire.close()


async def test_commands_that_wait_end_with_the_connection_and_with_their_time() -> None:
    wire, heard = Silent(60.0), list[Any]()
    for _ in range(1000):
        wire.call(b"command ", heard.append)
    wire.call(b"late ", heard.append, within=0.01)
    await until(lambda: len(heard) == 1)
    wire.call(b"another ", heard.append)
    wire.close()
    await until(lambda: len(heard) == 1002)
    assert all(isinstance(one, Unanswered) for one in heard)
    assert set(wire.written) == {"command"}


class Transport:
    """Says whether it would read."""

    def __init__(self) -> None:
        self.reads = False

    def set_protocol(self, protocol: object) -> None: ...

    def resume_reading(self) -> None:
        self.reads = True

    def pause_reading(self) -> None:
        self.reads = False

    def write(self, data: bytes) -> None: ...

    def abort(self) -> None: ...


def on_transport(answers: int) -> tuple[TransportWire, Transport, list[Any]]:
    """Return a wire on which so many commands are in flight, and what becomes of them."""
    transport, heard = Transport(), list[Any]()
    writer: Any = SimpleNamespace(transport=transport)
    wire = TransportWire(writer, Patience(60.0))
    for _ in range(answers):
        reader = Callback(asyncio.get_running_loop(), heard.append)
        wire.put(b"command", reader, within=0.0)
    return wire, transport, heard


async def test_thousands_of_replies_in_one_packet_are_taken_in_slices_and_in_order() -> None:
    wire, transport, heard = on_transport(5000)
    wire.data_received(b"".join(b":%d\r\n" % number for number in range(5000)))
    in_each = [len(heard)]
    assert not transport.reads, "not more than there is already"
    while len(heard) < 5000:
        await asyncio.sleep(0)
        in_each.append(len(heard) - sum(in_each))
    assert heard == list(range(5000)), "and none of them has run out of time"
    assert max(in_each) <= 200
    await until(lambda: transport.reads)
    wire.close()


async def test_replies_that_came_before_the_end_of_a_connection_count() -> None:
    wire, _, heard = on_transport(1001)
    wire.data_received(b":1\r\n" * 1000)
    wire.connection_lost(None)
    await asyncio.sleep(0)
    assert heard[:1000] == [1] * 1000
    assert isinstance(heard[1000], Unanswered)
    await asyncio.sleep(0)
    assert len(heard) == 1001


def _slow_server(wire: Silent, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what sends one command and answers it after so many seconds of the wire's clock."""
    moment = wire._loop.time()
    monkeypatch.setattr(wire, "_loop", SimpleNamespace(time=lambda: moment, call_later=Mock()))

    def ask(takes: float) -> None:
        nonlocal moment
        wire.call(b"command", lambda reply: None)
        moment += takes
        wire.answer(b"reply")

    return ask


async def test_of_quick_replies_one_in_a_while_is_a_sample_and_of_slow_ones_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Silent(1.0)
    ask, samples = _slow_server(wire, monkeypatch), list[float]()
    learn = wire.patience.answered

    def answered(took: float) -> None:
        samples.append(round(took, 3))
        learn(took)

    monkeypatch.setattr(wire.patience, "answered", answered)
    for _ in range(10):
        ask(0.001)
    assert samples == [0.001], "the first one"
    assert wire._watchdog is not None
    wire._watch(wire.answers, 1.0)  # nothing is on its way
    for _ in range(3):
        ask(0.5)
    assert samples == [0.001, 0.5, 0.5, 0.5]
    for _ in range(40):
        ask(0.001)
    assert 10 < len(samples) < 40, "until what is learned is short again"
    wire.close()


async def test_reply_after_one_that_did_not_come_in_time_is_a_sample() -> None:
    wire = Silent(1.0)
    wire.call(b"quick", lambda reply: None)
    wire.answer(b"reply")
    late, heard = wire.send_packed(b"late", within=0.01), list[Any]()
    before = wire._timed
    await until(late.done)
    wire.call(b"next", heard.append)
    assert (before, wire._timed is None) == (None, False)
    wire.close()


@pytest.mark.parametrize("forgotten", [False, True])
async def test_reply_that_comes_too_late_for_its_task_is_read_all_the_same(forgotten: bool) -> None:
    settings = Settings("p", token_retention=60.0, unavailable_after=30.0)
    server = Server(Source.from_url("redis://localhost:1"), settings, "label")
    wire, read, call = Silent(60.0), list[Any](), Call.of(LEAVE, ("key",), ("id",))
    if forgotten:
        refused = ReplyError("NOSCRIPT No matching script")
        waiting = server.run_again(wire, refused, call, 0.01, read.append)
    else:
        reader = Awaited(read.append)
        wire.put(call.packed, reader, within=0.01)

        async def wait() -> Any:
            return await reader.answered

        waiting = wait()
    with pytest.raises(Unanswered):
        await waiting
    wire.answer([b"released", b"key", b"another", b"17"])
    assert read == [[b"released", b"key", b"another", b"17"]]
    wire.close()


@pytest.mark.parametrize("script", [TELL, LEAVE], ids=lambda script: script.name)
async def test_call_that_nobody_waits_for_is_not_sent_again_behind_its_own_leave(
    script: Script,
) -> None:
    settings = Settings("p", token_retention=60.0, unavailable_after=30.0)
    server = Server(Source.from_url("redis://localhost:1"), settings, "label")
    wire, read, call = Silent(60.0), list[Any](), Call.of(script, ("key",), ("words",))
    refused = ReplyError("NOSCRIPT No matching script")
    wire.reloaded.add(script.name)
    wanted = script is LEAVE  # a release goes on without its task
    on_read = read.append if wanted else None
    again = asyncio.create_task(server.run_again(wire, refused, call, on_read=on_read))
    await until(lambda: "EVALSHA" in wire.written)
    again.cancel()
    await asyncio.wait([again])
    wire.answer(refused)
    assert ("EVAL" in wire.written) == wanted
    wire.close()


async def test_of_a_batch_that_is_refused_one_call_has_the_source() -> None:
    settings = Settings("p", token_retention=60.0, unavailable_after=30.0)
    server = Server(Source.from_url("redis://localhost:1"), settings, "label")
    wire, call = Silent(60.0), Call.of(TELL, ("key",), ("words",))
    refused = ReplyError("NOSCRIPT No matching script")
    wire.reloaded.add("tell")
    again = asyncio.create_task(server.run_again(wire, refused, call))
    await until(lambda: "EVALSHA" in wire.written)
    assert "EVAL" not in wire.written
    wire.answer(refused)
    assert "EVAL" in wire.written, "refused once more, it has the source"
    wire.answer([b"told"])
    assert await again == [b"told"]
    assert "tell" in wire.reloaded
    once_more = asyncio.create_task(server.run_again(wire, ReplyError("BUSY script"), call))
    with pytest.raises(BackendUnavailable) as raised:
        await once_more
    assert isinstance(raised.value.__cause__, ReplyError)
    wire.close()
