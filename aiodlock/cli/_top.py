"""``aiodlock top``: a table that is drawn again and again, or lines for pipes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from .. import BackendError, Client, LockInfo
from . import _show
from ._hand_overs import HandOvers, counting
from ._source import collect, read_source

#: More lines fit into no terminal.
_LINES = 100
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Top:
    """What the user asked for. ``count`` 0: until somebody ends it."""

    url: str
    prefix: str
    match: str
    interval: float
    count: int
    as_json: bool
    header: bool


async def top(wanted: Top) -> None:
    """Print what is seen at each look, until ``q`` is pressed or ``count`` is reached.

    :raises BackendError: when the store fails. In a terminal only at the start; later it is shown.
    """
    watched = _show.for_people() and not wanted.as_json
    with _ended_by_signals():
        async with (
            Client(read_source(wanted.url), prefix=wanted.prefix) as client,
            counting(wanted.url, wanted.prefix) as hand_overs,
        ):
            with _q_pressed() if watched else contextlib.nullcontext(asyncio.Event()) as ended:
                if watched:
                    await _watch(wanted, client, hand_overs, ended)
                else:
                    await _print(wanted, client, hand_overs)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let a signal that ends this process leave the terminal as it was."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    came: list[int] = []

    def end(number: int) -> None:
        came.append(number)
        task.cancel()

    caught = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        caught = []  # signals are the main thread's
    for number in caught:
        loop.add_signal_handler(number, end, number)
    try:
        yield
    except asyncio.CancelledError:
        if not came:
            raise
        raise SystemExit(128 + came[0]) from None
    finally:
        for number in caught:
            loop.remove_signal_handler(number)


async def _print(wanted: Top, client: Client, hand_overs: HandOvers) -> None:
    looks = 0
    while True:
        infos = await collect(client, wanted.match)
        facts = _facts(infos, await hand_overs.per_second())
        if wanted.as_json:
            _show.print_json({**facts, "names": [_show.as_dict(info) for info in infos]})
        else:
            told = {key: "unknown" if value is None else value for key, value in facts.items()}
            _show.print_line(*(f"{key} {value}" for key, value in told.items()))
            _show.print_list(infos, header=wanted.header)
        looks += 1
        if looks == wanted.count:
            return
        await asyncio.sleep(wanted.interval)


async def _watch(wanted: Top, client: Client, hand_overs: HandOvers, ended: asyncio.Event) -> None:
    looks = 0
    shown: Group | None = None
    with Live(console=_show.console(), screen=True, auto_refresh=False) as live:
        while not ended.is_set():
            try:
                infos = await collect(client, wanted.match)
                shown = _screen(infos, _facts(infos, await hand_overs.per_second()))
            except BackendError as error:
                if shown is None:
                    raise
                live.update(Group(Text(f"{error}\n", style="red"), shown), refresh=True)
            else:
                live.update(shown, refresh=True)
            looks += 1
            if looks == wanted.count:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wanted.interval):
                    await ended.wait()


def _facts(infos: list[LockInfo], hand_overs: float | None) -> dict[str, Any]:
    waits = [waiter.waiting for info in infos for waiter in info.waiters]
    known = [wait for wait in waits if wait is not None]
    return {
        "locks": len(infos),
        "holders": sum(len(info.holders) for info in infos),
        "waiters": len(waits),
        # None where somebody waits, and the store does not know for how long.
        "longest_wait": round(max(known, default=0.0), 3) if known or not waits else None,
        "hand_overs_per_second": hand_overs,
    }


def _screen(infos: list[LockInfo], facts: dict[str, Any]) -> Group:
    rate, longest = facts["hand_overs_per_second"], facts["longest_wait"]
    told = [
        _show.plural(facts["locks"], "lock"),
        _show.plural(facts["holders"], "holder"),
        _show.plural(facts["waiters"], "waiter"),
        "longest wait unknown" if longest is None else f"longest wait {longest:.1f} s",
        "hand-overs unknown" if rate is None else f"{rate:.1f} hand-overs per second",
    ]
    busiest = sorted(infos, key=lambda info: (-len(info.waiters), info.name, info.kind))
    head = Text("   ".join(told), style="bold")
    return Group(head, Text("q: quit\n", style="dim"), _show.table(busiest[:_LINES]))


@contextlib.contextmanager
def _q_pressed() -> Iterator[asyncio.Event]:
    """Set the event when q is pressed, without Enter. Ctrl-C still works."""
    pressed = asyncio.Event()
    if not sys.stdin.isatty():
        yield pressed
        return
    loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        try:
            keys = os.read(keyboard, 64)
        except OSError:  # the terminal is gone
            keys = b""
        if not keys or b"q" in keys.lower():
            loop.remove_reader(keyboard)
            pressed.set()

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, read)
    try:
        yield pressed
    finally:
        loop.remove_reader(keyboard)
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
