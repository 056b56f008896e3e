"""What a wire does with replies that nobody awaits."""

from __future__ import annotations

import asyncio
from typing import Any

from aiodlock.backends.base import Unanswered
from aiodlock.backends.redis.refusals import ReplyError
from aiodlock.backends.redis.wire import Wire

from ..scenes import until


class Silent(Wire):
    """Writes to nobody. What is answered, and when, is up to the test."""

    def _write(self, data: bytes) -> None:
        pass

    def answer(self, reply: Any) -> None:
        self._receive(reply)


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
