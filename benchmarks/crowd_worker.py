"""The process that ``benchmarks.crowd`` watches: thousands of tasks of one client come and go.

It is run by path, so that the same load runs on another tree's package.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import selectors
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from types import FrameType
from typing import Any

_TIMEOUT = 600.0
_LEASES = 50
#: A machine that is too busy makes waiters give up, and then not all of them wait at any time.
_GIVE_UP_AFTER = 120.0


class Turns:
    """What the event loop does in one turn: CPU time of this thread, and calls of aiodlock's functions.

    Mutable state: the figures of this turn and of this callback, and ``worst``, the largest of each.
    """

    def __init__(self) -> None:
        self.worst: dict[str, float] = {}
        self.calls = 0
        self.inside = False
        self._began = self._collecting = self._collected = 0.0

    def begin(self) -> None:
        self._began, self._collected, self.calls, self.inside = time.thread_time(), 0.0, 0, True

    def end(self) -> None:
        if self.inside:
            took = time.thread_time() - self._began
            self.inside = False
            self._note("turn", took * 1e3)
            self._note("turn without collector", (took - self._collected) * 1e3)
            self._note("calls in a turn", self.calls)

    def on_callback(self, before: int) -> None:
        self._note("calls in a callback", self.calls - before)

    def on_collector(self, phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.thread_time()
            return
        took = time.thread_time() - self._collecting
        self._collected += took
        if about["generation"] == 2:
            self._note("full run of the collector", took * 1e3)
            self.worst["full runs"] = self.worst.get("full runs", 0) + 1

    def on_profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/aiodlock/" in frame.f_code.co_filename:
            self.calls += 1

    def _note(self, what: str, value: float) -> None:
        self.worst[what] = max(self.worst.get(what, 0.0), value)


turns = Turns()


class Selector(selectors.DefaultSelector):
    """A turn begins when there is something to do."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        turns.begin()
        return ready


class Loop(asyncio.SelectorEventLoop):
    """Its clock can be put forward: all timeouts of a crowd end in one turn."""

    forward = 0.0

    def time(self) -> float:
        return super().time() + self.forward

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        turns.end()


def count_callbacks() -> None:
    """Have the calls of each callback of the loop counted, too."""
    handles: Any = asyncio.Handle
    run = handles._run

    def counted(handle: asyncio.Handle) -> None:
        before = turns.calls
        run(handle)
        turns.on_callback(before)

    handles._run = counted


class Crowd:
    """The tasks, and the figures of each phase."""

    def __init__(self, number: int, profiled: bool) -> None:
        self.number = number
        self.found: dict[str, dict[str, float]] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self._profiled = profiled

    def start(self, make: Callable[[int], Coroutine[Any, Any, object]]) -> None:
        for task in self.tasks:
            if not task.cancelled():
                task.exception()
        self.tasks = [asyncio.create_task(make(number)) for number in range(self.number)]

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()

    def all_done(self) -> bool:
        return all(task.done() for task in self.tasks)

    async def phase(self, name: str, until: Callable[[], bool]) -> None:
        turns.worst = {"full runs": 0}
        sys.setprofile(turns.on_profile if self._profiled else None)
        give_up_at = time.monotonic() + _GIVE_UP_AFTER
        while not until():
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"{name}: did not come to its end")
            await asyncio.sleep(0.002)
        sys.setprofile(None)
        self.found[name] = turns.worst
        await asyncio.sleep(0.2)


async def of_asyncio(crowd: Crowd, loop: Loop) -> None:
    """The floor: tasks that wait for an ``asyncio.Event``."""
    event: Any = asyncio.Event()

    def all_wait() -> bool:
        return len(event._waiters) == crowd.number

    async def limited(_: int) -> None:
        async with asyncio.timeout(_TIMEOUT):
            await event.wait()

    crowd.start(lambda _: event.wait())
    await crowd.phase("floor: queue", all_wait)
    crowd.cancel()
    await crowd.phase("floor: are cancelled", crowd.all_done)
    crowd.start(limited)
    await crowd.phase("floor: queue with a timeout", all_wait)
    loop.forward += _TIMEOUT
    await crowd.phase("floor: time out", crowd.all_done)
    crowd.start(lambda _: event.wait())
    await crowd.phase("floor: queue", all_wait)
    event.set()
    await crowd.phase("floor: are woken", crowd.all_done)


async def of_aiodlock(crowd: Crowd, loop: Loop, url: str, names: Sequence[str]) -> int:
    """Return how many leases of the same client were lost meanwhile."""
    import aiodlock
    from aiodlock._request import State

    client: Any = aiodlock.Client(url)
    await client.__aenter__()
    leases = [await client.lock(f"small:{n}", ttl=5.0).acquire() for n in range(_LEASES)]
    requests = client._core.session.requests

    def all_wait() -> bool:
        if len(requests) < crowd.number + _LEASES:
            return False
        waiting = State.WAITING
        return sum(request.state is waiting for request in requests.values()) == crowd.number

    def all_left() -> bool:
        return len(requests) == _LEASES and crowd.all_done()

    one, limited = client.lock(names[0]), client.lock(names[0], timeout=_TIMEOUT)
    crowd.start(lambda _: one.acquire())
    await crowd.phase("queue on one name", all_wait)
    crowd.cancel()
    await crowd.phase("are cancelled", all_left)
    crowd.start(lambda _: limited.acquire())
    await crowd.phase("queue with a timeout", all_wait)
    loop.forward += _TIMEOUT
    await crowd.phase("time out", all_left)
    locks = [client.lock(name) for name in names]
    crowd.start(lambda number: locks[number].acquire())
    await crowd.phase("queue on as many names", all_wait)
    crowd.cancel()
    await crowd.phase("are cancelled there", all_left)
    crowd.start(lambda _: one.acquire())
    await crowd.phase("queue on one name", all_wait)
    lost = sum(lease.lost is not None for lease in leases)
    closing = asyncio.create_task(client.__aexit__(None, None, None))
    await crowd.phase("their client is left", lambda: closing.done() and crowd.all_done())
    return lost


async def main(url: str, number: int, profiled: bool) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    crowd = Crowd(number, profiled)
    names = [f"crowd:{n}" for n in range(number)]
    if gc.get_threshold()[2] > 10:
        gc.collect()
        gc.freeze()
    lost = await of_aiodlock(crowd, loop, url, names)
    await of_asyncio(crowd, loop)
    json.dump({"lost": lost, "phases": crowd.found}, sys.stdout)


if __name__ == "__main__":
    where, how_many, collector, what = sys.argv[1:]
    logging.disable(logging.CRITICAL)  # losing the leases of a client that is left is no news here
    gc.callbacks.append(turns.on_collector)
    if collector == "off":
        gc.disable()
    elif collector == "seldom":
        gc.set_threshold(700, 10, 1000)
    if what == "calls":
        count_callbacks()
    with asyncio.Runner(loop_factory=lambda: Loop(Selector())) as runner:
        runner.run(main(where, int(how_many), what == "calls"))
