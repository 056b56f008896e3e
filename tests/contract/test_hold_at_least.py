"""hold_at_least: a body that began keeps its name closed, also when it ends sooner or its process dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiodlock import AcquireTimeout, Client, LockLost, WouldBlock
from aiodlock.backends.kept_place import KeptPlace

from .. import forked
from ..conftest import MakeClient
from ..scenes import PATIENCE, STARTING, until
from ..servers import CLUSTER, ETCD, MEMORY, POSTGRES, REAL, SCRIPTED, SENTINEL, Store

pytestmark = pytest.mark.stores(MEMORY, *SCRIPTED, *POSTGRES, *ETCD, CLUSTER, SENTINEL)


def rounded(client: Client, seconds: float) -> float:
    """Return how long a name may stay closed on a store that counts in larger steps."""
    return max(seconds, client._core.store.capabilities.granularity)


async def closed(client: Client, name: str = "a") -> float:
    return (await client.inspect(name)).closed


@pytest.mark.parametrize("kind", ["lock", "semaphore"])
async def test_short_body_leaves_the_name_closed_for_the_rest(
    make_client: MakeClient, kind: str
) -> None:
    client, other = await make_client(), await make_client()
    make: Callable[..., Any] = {
        "lock": lambda c, **o: c.lock("a", **o),
        "semaphore": lambda c, **o: c.semaphore("a", 1, **o),
    }[kind]
    started = asyncio.get_running_loop().time()
    async with make(client, hold_at_least=0.6):
        pass
    assert 0.0 < (await make(client).inspect()).closed <= rounded(client, 0.6)
    assert await make(other).locked()
    for one in (client, other):
        with pytest.raises(WouldBlock):
            await make(one).acquire_nowait()
    async with make(other, timeout=5):
        assert asyncio.get_running_loop().time() - started >= 0.59


async def test_longer_body_leaves_it_open(client: Client) -> None:
    async with client.lock("a", hold_at_least=0.05):
        await asyncio.sleep(0.08)
    assert await closed(client) == 0.0


@pytest.mark.parametrize("way", ["release", "confirm", "exception", "cancelled", "lost with ttl"])
async def test_whichever_way_the_body_is_left(make_client: MakeClient, way: str) -> None:
    client, other = await make_client(), await make_client()
    options: dict[str, Any] = {"hold_at_least": 30}
    if way == "release":
        lease = await client.lock("a", **options).acquire()
        await lease.release()
    elif way == "confirm":
        async with client.lock("a", confirm_release=False, **options):
            pass
    elif way == "exception":
        with pytest.raises(ValueError, match="failed"):
            async with client.lock("a", **options):
                raise ValueError("failed")
    elif way == "cancelled":
        began = asyncio.Event()

        async def body() -> None:
            async with client.lock("a", **options):
                began.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(body())
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        with pytest.raises(LockLost):
            async with client.lock("a", ttl=0.3, auto_extend=False, **options):
                await asyncio.sleep(5)

    async def is_closed() -> bool:
        return await closed(other) > 20

    await until(is_closed)


async def test_waiter_that_is_granted_closes_too(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    async with client.lock("a"):
        task = asyncio.create_task(other.lock("a", hold_at_least=30).acquire())
        await until(lambda: _waits(client))
    lease = await task
    await lease.release()
    assert await closed(client) > 20


async def _waits(client: Client, name: str = "a") -> bool:
    return bool((await client.inspect(name)).waiters)


async def test_body_that_never_began_closes_nothing(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    lock = other.lock("a", hold_at_least=30)
    async with client.lock("a"):
        task = asyncio.create_task(lock.acquire())
        await until(lambda: _waits(client))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(AcquireTimeout):
            await lock.acquire(timeout=0.3)
    for _ in range(30):  # cancelled at any moment of an acquire that nothing is in the way of
        task = asyncio.create_task(lock.acquire())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await closed(client) == 0.0
    async with client.lock("a", timeout=5):
        pass


async def test_name_is_closed_exactly_where_the_body_began_whenever_it_is_cancelled(
    make_client: MakeClient,
) -> None:
    client, other = await make_client(), await make_client()
    for turns in range(24):
        name, began = f"name {turns}", False

        async def body(name: str = name) -> None:
            nonlocal began
            async with other.lock(name, hold_at_least=30):
                began = True
                await asyncio.sleep(60)

        async with client.lock(name):
            task = asyncio.create_task(body())
            await until(lambda name=name: _waits(client, name))  # type: ignore[misc]
        for _ in range(turns):  # the grant is on its way
            await asyncio.sleep(0 if turns % 2 else 0.0002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await closed(client, name) > 20) == began, turns


@pytest.mark.parametrize(("delay", "hold"), [(30.0, 0.5), (0.5, 30.0)])
async def test_lost_lease_is_closed_for_the_longer_of_its_lock_delay_and_its_hold(
    make_client: MakeClient, delay: float, hold: float
) -> None:
    client, other = await make_client(), await make_client()
    lock = client.lock("a", ttl=0.5, auto_extend=False, lock_delay=delay, hold_at_least=hold)
    with pytest.raises(LockLost):
        async with lock:
            await asyncio.sleep(60)

    async def is_closed() -> bool:
        return await closed(other) > 20

    await until(is_closed)
    with pytest.raises(WouldBlock):
        await other.lock("a").acquire_nowait()


async def test_release_ends_the_lock_delay_and_not_the_hold(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    began = asyncio.get_running_loop().time()
    async with client.lock("a", lock_delay=60, hold_at_least=0.6):
        pass
    assert 0.0 < await closed(other) <= rounded(client, 0.6)
    async with other.lock("a", timeout=20):
        assert asyncio.get_running_loop().time() - began >= 0.59


#: Where a process of its own can be a client.
SERVERS = (*REAL, *POSTGRES, *ETCD, CLUSTER, SENTINEL)


@asynccontextmanager
async def process(store: Store, *names: str) -> AsyncIterator[asyncio.subprocess.Process]:
    module = ("tests.contract.hold_process", store.url, *names)
    started = await forked.start(*module, stdout=asyncio.subprocess.PIPE)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


@pytest.mark.stores(*SERVERS)
@pytest.mark.parametrize("names", [("a",), ("a", "b")], ids=["lock", "multilock"])
async def test_body_whose_process_is_killed_keeps_its_names_closed(
    client: Client, store: Store, names: tuple[str, ...]
) -> None:
    async with process(store, *names) as holder:
        assert holder.stdout is not None
        async with asyncio.timeout(STARTING):
            assert await holder.stdout.readline() == b"began\n"
        holder.kill()
        await holder.wait()
    for name in names:
        await until(lambda name=name: _has_no_holder(client, name))  # type: ignore[misc]
        assert await closed(client, name) > 10


@pytest.mark.stores(*SERVERS)
@pytest.mark.parametrize("names", [("a",), ("0", "a")], ids=["lock", "multilock"])
async def test_ghost_of_a_killed_process_closes_nothing(
    client: Client, store: Store, names: tuple[str, ...]
) -> None:
    """It waited for a name, and with a multilock had got another one."""
    async with process(store, *names) as waiter:
        async with client.lock("a"):
            await until(lambda: _waits(client), within=STARTING)
            waiter.kill()
            await waiter.wait()
    for name in names:
        async with client.lock(name, timeout=PATIENCE):
            pass


async def _has_no_holder(client: Client, name: str) -> bool:
    return not (await client.inspect(name)).holders


async def test_multilock_that_is_rolled_back_closes_nothing(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    async with client.lock("b"):
        with pytest.raises(AcquireTimeout):
            await other.multilock("a", "b", timeout=1, hold_at_least=30).acquire()
        assert await closed(client, "a") == 0.0
    async with other.multilock("a", "b", hold_at_least=30):
        pass
    assert await closed(client, "a") > 20
    assert await closed(client, "b") > 20


async def test_multilock_that_fails_while_it_begins_closes_nothing(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was told that the first one's body begins; the second one's message is cancelled."""
    client, other = await make_client(), await make_client()
    right = KeptPlace.begin

    async def begin(place: KeptPlace) -> None:
        if place.name == "b":
            taking.cancel()
            await asyncio.sleep(0)
        await right(place)

    monkeypatch.setattr(KeptPlace, "begin", begin)
    taking = asyncio.create_task(other.multilock("a", "b", hold_at_least=30).acquire())
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert await closed(client, "a") == await closed(client, "b") == 0.0
    async with client.multilock("a", "b", timeout=5):
        pass


async def test_break_opens(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    async with client.lock("a", hold_at_least=30):
        pass
    assert await other.lock("a").break_lock() == 0
    async with other.lock("a", timeout=2):
        pass


async def test_its_own_task_waits_as_all_others(client: Client) -> None:
    async with client.lock("a", hold_at_least=30):
        async with client.lock("a", hold_at_least=30):
            pass  # entered again: one hold
        assert await closed(client) == 0.0
    with pytest.raises(WouldBlock):
        await client.lock("a").acquire_nowait()


async def test_note_and_description_are_shown(make_client: MakeClient) -> None:
    client = await make_client(description="billing@host7 🔒")
    other = await make_client()
    async with client.lock("a", note="invoice run 7"):
        task = asyncio.create_task(client.lock("a", note=" = % x=1").acquire())
        other_task = asyncio.create_task(other.lock("a").acquire())
        await until(lambda: _two_wait(other))
        info = await other.inspect("a")
        (holder,) = info.holders
        assert (holder.note, holder.description) == ("invoice run 7", "billing@host7 🔒")
        noted = {(one.note, one.description) for one in info.waiters}
        assert noted == {(" = % x=1", "billing@host7 🔒"), ("", "")}
        for one in (task, other_task):
            one.cancel()
        await asyncio.gather(task, other_task, return_exceptions=True)


async def _two_wait(client: Client) -> bool:
    return len((await client.inspect("a")).waiters) == 2


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"hold_at_least": -1}, ValueError),
        ({"hold_at_least": "1"}, TypeError),
        ({"note": 7}, TypeError),
        ({"note": "x" * 201}, ValueError),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Client("memory://").lock("a", **options)


async def test_resize_grants_all_that_fit_and_others_follow(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    small = client.semaphore("a", 1)
    first = await small.acquire()
    with pytest.raises(ValueError, match="limit 1"):
        await other.semaphore("a", 3).acquire()
    tasks = [asyncio.create_task(small.acquire()) for _ in range(2)]
    await until(lambda: _places(client, 1, 2))
    big = asyncio.create_task(other.semaphore("a", 4, resize=True).acquire())
    leases = [first, await big, *[await task for task in tasks]]
    assert await small.locked()
    with pytest.raises(WouldBlock):
        await small.acquire_nowait()
    for lease in leases:
        await lease.release()


async def _places(client: Client, holders: int, waiters: int) -> bool:
    info = await client.inspect("a", kind="semaphore")
    return (sum(one.count for one in info.holders), len(info.waiters)) == (holders, waiters)
