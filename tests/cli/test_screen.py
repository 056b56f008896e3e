"""`top`, `break` and `demo` in a terminal, of which these tests hold the other end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import aiodlock

from ..scenes import STARTING
from ..servers import Store

pytestmark = pytest.mark.stores("valkey9")


class Terminal:
    """A command in a terminal of 100 columns, and all that it has printed."""

    def __init__(self, *arguments: str, url: str) -> None:
        self._ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "aiodlock", *arguments],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            env={**os.environ, "AIODLOCK_URL": url, "TERM": "xterm"},
            start_new_session=True,
        )
        self._printed = b""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while data := os.read(self._ours, 65536):
                self._printed += data
        except OSError:
            pass  # closed

    @property
    def printed(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._printed.decode(errors="replace"))

    def until(self, text: str, within: float = STARTING) -> None:
        give_up_at = time.monotonic() + within
        while text not in self.printed:
            assert time.monotonic() < give_up_at, self.printed
            assert self.process.poll() is None or text in self.printed, self.printed
            time.sleep(0.02)

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.theirs)
        os.close(self._ours)


@contextmanager
def terminal(*arguments: str, url: str) -> Iterator[Terminal]:
    opened = Terminal(*arguments, url=url)
    try:
        yield opened
    finally:
        opened.close()


async def test_q_leaves_top_and_the_terminal_is_as_before(
    store: Store, client: aiodlock.Client
) -> None:
    async with client.lock("x"):
        with terminal("top", "--interval", "60", url=store.url) as shown:
            before = termios.tcgetattr(shown.theirs)
            shown.until("1 holder ")
            assert "q: quit" in shown.printed
            assert re.search(r"^x +lock +exclusive", shown.printed, re.MULTILINE)
            during = termios.tcgetattr(shown.theirs)
            assert not during[3] & (termios.ICANON | termios.ECHO)
            shown.press(b"xq")
            assert shown.process.wait(STARTING) == 0
            assert termios.tcgetattr(shown.theirs) == before


def test_top_ends_in_order_when_its_terminal_is_gone(store: Store) -> None:
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "aiodlock", "top", "--interval", "0.1"],
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            env={**os.environ, "AIODLOCK_URL": store.url, "TERM": "xterm"},
            start_new_session=True,  # no signal tells it
        )
        os.close(theirs)
        printed = b""
        while b"0 locks" not in printed:
            printed += os.read(ours, 65536)
    finally:
        os.close(ours)
    _, told = process.communicate(timeout=STARTING)
    # What is noticed first: that nothing is printed, or the end of the keyboard, which is as q.
    cannot = (74, b"aiodlock: cannot write to standard output: Input/output error\n")
    assert (process.returncode, told) in (cannot, (0, b""))


async def test_top_goes_on_while_the_store_is_away(store: Store, client: aiodlock.Client) -> None:
    assert store.server is not None
    async with client.lock("x", on_lost="flag"):
        with terminal("top", "--interval", "0.1", url=store.url) as shown:
            shown.until("1 holder ")
            store.server.pause()
            try:
                shown.until("no answer")
            finally:
                store.server.resume()
            shown.press(b"q")
            assert shown.process.wait(STARTING) == 0


@pytest.mark.long
def test_last_table_of_the_demo_has_a_heading_for_each_column() -> None:
    with terminal("demo", url="unix:///nowhere") as shown:
        shown.until("as expected", within=300)
        shown.until("wait after the holder and 3 waiters were killed")
        assert shown.process.wait(STARTING) in (0, 1)  # 1: this machine was too slow
        heading = next(line for line in shown.printed.splitlines() if "as expected" in line)
        assert [cell.strip() for cell in re.split("[┃|│]", heading)[1:-1]] == [
            "what was shown",
            "measured",
            "as expected",
        ]


async def test_break_tells_whose_lock_it_is_before_it_asks(
    store: Store, client: aiodlock.Client
) -> None:
    lease = await client.lock("x", on_lost="flag").acquire()
    (holder,) = (await client.inspect("x")).holders
    with terminal("break", "x", url=store.url) as shown:
        shown.until("[y/N]")
        assert f"'x' is held by {holder.client}." in shown.printed
        shown.press(b"n\n")
        assert shown.process.wait(STARTING) == 1
    assert lease.held
    with terminal("break", "x", url=store.url) as shown:
        shown.until("[y/N]")
        shown.press(b"y\n")
        assert shown.process.wait(STARTING) == 0
    assert (await lease.wait_lost()).reason == "broken"
    with terminal("break", "x", url=store.url) as shown:
        shown.until("'x' is free.")
        assert shown.process.wait(STARTING) == 1


@pytest.mark.parametrize("closed", [False, True])
async def test_break_spares_who_holds_the_lock_by_the_time_it_is_confirmed(
    store: Store, client: aiodlock.Client, closed: bool
) -> None:
    """Also when what was shown had no holder: nobody holds a name that is closed."""
    lease = await client.lock("x", hold_at_least=600.0 if closed else 0.0).acquire()
    if closed:
        async with lease:
            pass
    with terminal("break", "x", url=store.url) as shown:
        shown.until("[y/N]")
        if closed:
            await client.break_lock("x")
        else:
            await lease.release()
        async with client.lock("x") as later:
            shown.press(b"y\n")
            shown.until("nothing was broken")
            assert shown.process.wait(STARTING) == 1
            assert later.held
    assert (await client.inspect("x")).token == later.token
