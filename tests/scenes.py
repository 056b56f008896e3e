"""What tests of every kind do again and again: wait for a state, queue, hold elsewhere, take the time."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiodlock
from aiodlock._model import Kind
from aiodlock.backends.keeper import Keeper
from aiodlock.backends.kept_backend import KeptBackend

#: For a state that has to come: far more than any machine needs.
PATIENCE = 60.0
#: What takes effect without waiting for a lease to end takes far less than this.
SOON = 2.0
#: For what a process of its own has to reach, which must start first.
STARTING = 120.0
#: A timeout that is to run out after the store has answered, also when the machine stalls meanwhile.
BRIEF = 1.0
#: A ttl that is extended in time, also when the machine stalls, and that a test may outlive.
LASTING = 2.0

_TICK = 0.01
#: How often is looked for what does not come soon.
_RARELY = 0.01

T = TypeVar("T")


async def until(
    condition: Callable[[], object], what: str = "the state", *, within: float = PATIENCE
) -> None:
    """Look again and again until the condition (or what it awaits) is true; fail after a while.

    A bound shorter than our patience says something of the library: when the machine stalls, it may take
    longer.
    """
    if within < PATIENCE:
        async with stalls() as stalled:
            await _until(condition, what, within, stalled)
    else:
        await _until(condition, what, within, lambda: 0.0)


async def _until(
    condition: Callable[[], object], what: str, within: float, stalled: Callable[[], float]
) -> None:
    # The longer it takes the less often: some hundred tests wait like this, several at the same time.
    began = time.monotonic()
    unanswered = ""
    while True:
        try:
            answer = condition()
            if inspect.isawaitable(answer):
                answer = await answer
            if answer:
                return
        except aiodlock.BackendUnavailable as error:  # a busy machine answers the next look
            unanswered = f": {error}"
        took = time.monotonic() - began
        assert took < within or took < within + stalled(), (
            f"{what} did not come within {within:g} s{unanswered}"
        )
        await asyncio.sleep(min(max(0.002, took / 20), _RARELY))


async def until_waiting(
    client: aiodlock.Client,
    name: str,
    number: int = 1,
    *,
    kind: Kind = "lock",
    within: float = PATIENCE,
) -> None:
    """Wait until that many requests are queued for the name."""

    async def queued() -> bool:
        return len((await client.inspect(name, kind=kind)).waiters) == number

    await until(queued, f"{number} waiting for {name!r}", within=within)


async def until_held(client: aiodlock.Client, *names: str, within: float = PATIENCE) -> None:
    """Wait until somebody holds each of the names."""
    for name in names:
        await until(client.lock(name).locked, f"a holder of {name!r}", within=within)


async def until_free(client: aiodlock.Client, *names: str) -> None:
    """Wait until nobody holds one of the names or waits for it."""
    await until(lambda: is_free(client, *names), f"freedom of {names}")


async def is_free(client: aiodlock.Client, *names: str) -> bool:
    """Tell whether nobody holds one of the names or waits for it."""
    infos = [await client.inspect(name) for name in names]
    return not any(info.holders or info.waiters for info in infos)


def keeper_of(client: aiodlock.Client) -> Keeper:
    """Return what extends the leases of an entered client, on a store with a lease per request."""
    assert client._core.session is not None
    backend = client._core.session.backend
    assert isinstance(backend, KeptBackend)
    return backend.keeper


def store_of(client: aiodlock.Client) -> Any:
    """Return what an entered client sends its requests through: a RedisBackend, or its like."""
    return keeper_of(client).store


async def until_cancelled() -> None:
    """Stand for a body that is to be cancelled: works on, and fails when nobody stops it."""
    await asyncio.sleep(PATIENCE)
    raise AssertionError("the body was not cancelled")


async def until_outlived(lease: aiodlock.Lease) -> None:
    """Wait until the lease has been extended by a whole ttl."""
    clock = asyncio.get_running_loop().time
    first = clock() + lease.remaining()
    await until(lambda: clock() + lease.remaining() >= first + 0.9 * lease.ttl, "a longer life")


async def until_extended(lease: aiodlock.Lease) -> None:
    """Wait until the lease has been extended once more."""
    clock = asyncio.get_running_loop().time
    ends_at = lease.remaining() + clock()
    await until(lambda: clock() + lease.remaining() > ends_at + 0.1 * lease.ttl, "an extension")


async def settled(*clients: aiodlock.Client) -> None:
    """Wait until the store has answered what the clients sent so far, and what they sent then.

    Answers come in the order of the questions: what is asked now is answered last.
    """
    for _ in range(2):
        await asyncio.gather(*(client.inspect("settled") for client in clients))


def granted_at(lease: aiodlock.Lease) -> float:
    """Return when the server granted it, on its own clock: the first token of its time."""
    return lease.token / 1e6


@asynccontextmanager
async def held_elsewhere(
    lock: aiodlock.Lock | aiodlock.Semaphore,
) -> AsyncIterator[aiodlock.Lease]:
    """Hold the lock in another task for as long as the block lasts."""
    held: asyncio.Future[aiodlock.Lease] = asyncio.get_running_loop().create_future()
    enough = asyncio.Event()

    async def hold() -> None:
        try:
            async with lock as lease:
                held.set_result(lease)
                await enough.wait()
        except BaseException as error:
            if not held.done():
                held.set_exception(error)
            raise

    task = asyncio.create_task(hold())
    try:
        yield await held
    finally:
        enough.set()
        await task


async def cancelled(task: asyncio.Task[object]) -> None:
    """Cancel the task and wait until it is over."""
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


def is_held(lease: aiodlock.Lease) -> bool:
    """Ask anew: a type checker believes that a property keeps the value it was asserted to have."""
    return lease.held


async def side_by_side(check: Callable[[T], Awaitable[object]], cases: Mapping[str, T]) -> None:
    """Check every case, all at the same time: for cases that wait long. What fails names its case."""

    async def one(name: str, case: T) -> None:
        try:
            await check(case)
        except Exception as error:
            error.add_note(f"in the case {name!r}")
            raise

    async with asyncio.TaskGroup() as group:
        for name, case in cases.items():
            group.create_task(one(name, case))


@asynccontextmanager
async def stalls() -> AsyncIterator[Callable[[], float]]:
    """Give for how many seconds of the block so far the machine did not let us run.

    "Us" is this process and those it started: a server that waits for a processor answers late too.
    An upper bound on elapsed time holds on a busy machine too when this is added to it. Nothing is
    forgiven to the library: what the process itself computed meanwhile does not count.
    """
    stalled, began, computed = 0.0, time.monotonic(), time.process_time()
    queued_before, stolen_before = _queued(), _stolen()

    def late() -> float:
        """How late the tick is that is waited for at this moment."""
        passed = time.monotonic() - began - (time.process_time() - computed)
        return passed - _TICK if passed > 1.2 * _TICK else 0.0

    def so_far() -> float:
        # A thread that ends takes its account with it: then there is less than before.
        queued = {
            pid: max(0.0, waited - queued_before.get(pid, 0.0)) for pid, waited in _queued().items()
        }
        own = queued.pop(os.getpid(), 0.0)
        # Late ticks are not only our own time in the run queue, and miss what is shorter than a tick.
        return max(stalled + late(), own) + sum(queued.values()) + _stolen() - stolen_before

    async def watch() -> None:
        nonlocal stalled, began, computed
        while True:
            await asyncio.sleep(_TICK)
            stalled += late()
            began, computed = time.monotonic(), time.process_time()

    watching = asyncio.create_task(watch())
    try:
        yield so_far
    finally:
        watching.cancel()
        await asyncio.wait([watching])


def _queued() -> dict[int, float]:
    """Return for how long this process and all below it have waited for a processor, by pid.

    Linux tells; elsewhere nothing is known of it. A process that is gone takes its account with it.
    """
    found: dict[int, float] = {}
    pids = [os.getpid()]
    while pids:
        pid = pids.pop()
        found[pid] = queued_for(pid)
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
        except (OSError, ValueError):
            continue
    return found


def queued_for(pid: int) -> float:
    """Return for how many seconds of its life the process has waited for a processor."""
    waited = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            waited += int((task / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return waited / 1e9


def _stolen() -> float:
    """Return for how many seconds other virtual machines were given the processors of this one."""
    try:
        first, *_ = Path("/proc/stat").read_text().splitlines()
        return int(first.split()[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


@asynccontextmanager
async def takes(*, at_least: float = 0.0, at_most: float) -> AsyncIterator[None]:
    """Assert how long the block takes, in seconds; when the machine stalls, it may take longer."""
    async with stalls() as stalled:
        began = time.monotonic()
        yield
        took, allowed = time.monotonic() - began, at_most + stalled()
    assert at_least <= took <= allowed, f"took {took:.3f} s, not {at_least:g} to {allowed:.3f}"


@asynccontextmanager
async def bounded(seconds: float) -> AsyncIterator[None]:
    """End the block with a TimeoutError after that time; when the machine stalls, it may take longer."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    timer: asyncio.TimerHandle
    async with stalls() as stalled, asyncio.timeout(None) as ends:

        def look() -> None:
            nonlocal timer
            left = began + seconds + stalled() - loop.time()
            if left > 0:
                timer = loop.call_later(left, look)
            else:
                ends.reschedule(loop.time())

        timer = loop.call_later(seconds, look)
        try:
            yield
        finally:
            timer.cancel()


async def soon(awaitable: Awaitable[T]) -> T:
    """Await what takes effect without waiting for a lease to end."""
    async with takes(at_most=SOON), asyncio.timeout(PATIENCE):
        return await awaitable
