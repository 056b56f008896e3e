"""Deadlocks between tasks and clients are found; waits that end by themselves are left alone."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

import aiodlock
from aiodlock._acquire import Acquiring
from aiodlock._clock import now
from aiodlock._cycles import Cycle
from aiodlock._model import Waiting
from aiodlock._request import Request

from ..conftest import MakeClient
from ..scenes import PATIENCE, stalls, until, until_held, until_waiting
from ..servers import MEMORY

AFTER = 0.3


async def take(
    first: aiodlock.Lock | aiodlock.Semaphore,
    second: aiodlock.Lock | aiodlock.Semaphore,
    both: asyncio.Barrier,
    after: float = 0.0,
) -> aiodlock.DeadlockError | None:
    """Take two locks, the second when everybody has a first one; return why that failed."""
    async with first:
        await both.wait()
        await asyncio.sleep(after)
        try:
            async with second:
                return None
        except aiodlock.DeadlockError as error:
            return error


@asynccontextmanager
async def gathered(*coroutines: object) -> AsyncIterator[list[asyncio.Task[object]]]:
    tasks = [asyncio.ensure_future(one) for one in coroutines]  # type: ignore[call-overload]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_two_clients_in_two_orders(make_client: MakeClient) -> None:
    one, two = await make_client(deadlock_after=AFTER), await make_client(deadlock_after=AFTER)
    both = asyncio.Barrier(2)
    began = time.monotonic()
    async with asyncio.timeout(PATIENCE):
        first, second = await asyncio.gather(
            take(one.lock("a"), one.lock("b"), both),
            take(two.lock("b"), two.lock("a"), both, after=0.05),
        )
    assert time.monotonic() - began >= AFTER
    assert first is None
    assert second is not None
    assert second.name == "a"
    assert [member[0] for member in second.cycle] == ["a", "b"]
    assert len({member[2] for member in second.cycle}) == 2
    assert "waits for 'a'" in str(second)
    assert "waits for 'b'" in str(second)
    assert pickle.loads(pickle.dumps(second)).cycle == second.cycle


async def test_wait_that_was_told_as_late_as_it_may_be_is_met_at_the_second_look(
    make_client: MakeClient,
) -> None:
    """The older one's client has just looked when its wait gets long, and tells it half a second later."""
    one, two = await make_client(deadlock_after=AFTER), await make_client(deadlock_after=AFTER)
    looks: Any = one._core.use().deadlocks
    both = asyncio.Barrier(2)
    began = now()
    async with asyncio.timeout(PATIENCE), stalls() as stalled:
        looks._looked_at = now() + AFTER + 0.05
        first, second = await asyncio.gather(
            take(one.lock("a"), one.lock("b"), both),
            take(two.lock("b"), two.lock("a"), both, after=0.1),
        )
    assert first is None
    assert second is not None
    # The next look is two seconds later.
    assert now() - began < AFTER + 1.5 + stalled()


async def test_the_youngest_of_three_gives_up(make_client: MakeClient) -> None:
    clients = [await make_client(deadlock_after=AFTER) for _ in range(3)]
    everybody = asyncio.Barrier(3)
    names = ["a", "b", "c"]
    async with asyncio.timeout(PATIENCE):
        *older, youngest = await asyncio.gather(
            *(
                take(
                    client.lock(names[number]),
                    client.lock(names[(number + 1) % 3]),
                    everybody,
                    after=0.05 * number,
                )
                for number, client in enumerate(clients)
            )
        )
    assert older == [None, None]
    assert youngest is not None
    assert sorted(member[0] for member in youngest.cycle) == names


@pytest.mark.stores(MEMORY)
async def test_who_asked_first_is_the_older_one_though_its_answer_came_later(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await make_client(deadlock_after=AFTER), await make_client(deadlock_after=AFTER)
    both, queued = asyncio.Barrier(2), asyncio.Event()
    ask = Acquiring._ask

    async def answered_late(self: Acquiring, started: float, *, wait: bool) -> object:
        answer = await ask(self, started, wait=wait)
        if isinstance(answer, Waiting) and self._name == "b":
            await queued.wait()
        return answer

    async def younger() -> None:
        async with two.lock("b"):
            await both.wait()
            await until_waiting(two, "b")
            with pytest.raises(aiodlock.DeadlockError):
                async with two.lock("a"):
                    raise AssertionError("it is held")

    async def answer() -> None:
        await until_waiting(two, "a")
        queued.set()

    monkeypatch.setattr(Acquiring, "_ask", answered_late)
    async with asyncio.timeout(PATIENCE):
        first, *_ = await asyncio.gather(
            take(one.lock("a"), one.lock("b"), both), younger(), answer()
        )
    assert first is None


async def test_two_tasks_of_one_client(make_client: MakeClient) -> None:
    client = await make_client(deadlock_after=AFTER)
    both = asyncio.Barrier(2)
    async with asyncio.timeout(PATIENCE):
        ends = await asyncio.gather(
            take(client.lock("a"), client.lock("b"), both),
            take(client.lock("b"), client.lock("a"), both),
        )
    assert ends.count(None) == 1


async def test_named_owners(make_client: MakeClient) -> None:
    one, two = await make_client(deadlock_after=AFTER), await make_client(deadlock_after=AFTER)
    both = asyncio.Barrier(2)
    async with asyncio.timeout(PATIENCE):
        ends = await asyncio.gather(
            take(one.lock("a", owner="x y"), one.lock("b", owner="x y"), both),
            take(two.lock("b", owner="ü"), two.lock("a", owner="ü"), both),
        )
    (error,) = [end for end in ends if end is not None]
    assert {member[1] for member in error.cycle} == {"x y", "ü"}


async def test_a_reader_behind_a_writer_that_holds_nothing(make_client: MakeClient) -> None:
    one, two, three = [await make_client(deadlock_after=AFTER) for _ in range(3)]
    if one._core.use().backend.capabilities.fair != "exact":
        pytest.skip("here the reader may pass the writer")
    both = asyncio.Barrier(2)

    async def write() -> None:
        await until_held(three, "a")
        async with three.lock("a"):
            pass

    async def read() -> aiodlock.DeadlockError | None:
        await until_waiting(two, "a")
        return await take(two.lock("b"), two.rwlock("a").read, both)

    async with asyncio.timeout(PATIENCE):
        first, second, _ = await asyncio.gather(
            take(one.rwlock("a").read, one.lock("b"), both), read(), write()
        )
    # The reader waits only because of the writer in front of it.
    (error,) = [end for end in (first, second) if end is not None]
    assert len(error.cycle) == 3


@pytest.mark.parametrize("limit", [1, 2])
async def test_semaphores_of_one_place_are_edges(make_client: MakeClient, limit: int) -> None:
    one, two = await make_client(deadlock_after=AFTER), await make_client(deadlock_after=AFTER)
    if not one._core.use().backend.capabilities.semaphores:
        pytest.skip("no semaphores")
    both = asyncio.Barrier(2)
    others = [await two.semaphore("a", limit).acquire() for _ in range(limit - 1)]

    async with gathered(
        take(one.semaphore("a", limit), one.lock("b"), both),
        take(two.lock("b"), two.semaphore("a", limit), both, after=0.05),
    ) as tasks:
        if limit > 1:
            await asyncio.sleep(5 * AFTER)
            assert not any(task.done() for task in tasks)
            await others[0].release()
        async with asyncio.timeout(PATIENCE):
            first, second = await asyncio.gather(*tasks)
    errors = [end for end in (first, second) if isinstance(end, aiodlock.DeadlockError)]
    assert len(errors) == (1 if limit == 1 else 0)
    for error in errors:
        assert {member[0] for member in error.cycle} == {"a", "b"}


async def test_names_of_a_multilock_are_edges_once_it_is_entered(make_client: MakeClient) -> None:
    one, two = await make_client(deadlock_after=AFTER), await make_client(deadlock_after=AFTER)
    both = asyncio.Barrier(2)

    async def several() -> aiodlock.DeadlockError | None:
        async with one.multilock("a", "c"):
            await both.wait()
            try:
                async with one.lock("b"):
                    return None
            except aiodlock.DeadlockError as error:
                return error

    async with asyncio.timeout(PATIENCE):
        ends = await asyncio.gather(several(), take(two.lock("b"), two.lock("c"), both))
    (error,) = [end for end in ends if end is not None]
    assert {member[0] for member in error.cycle} == {"b", "c"}


async def test_what_a_multilock_has_so_far_makes_no_edge(make_client: MakeClient) -> None:
    one, two = await make_client(deadlock_after=AFTER), await make_client(deadlock_after=AFTER)
    both = asyncio.Barrier(2)

    async def several() -> None:
        await both.wait()
        async with one.multilock("a", "b"):  # it gets a, and waits for b
            pass

    async def other() -> None:
        async with two.lock("b"):
            await both.wait()
            await until_held(two, "a")
            async with two.lock("a"):
                pass

    async with gathered(several(), other()) as tasks:
        await asyncio.sleep(5 * AFTER)
        assert not any(task.done() for task in tasks)


async def test_wait_with_a_timeout_makes_no_edge(make_client: MakeClient) -> None:
    one, two = await make_client(deadlock_after=AFTER), await make_client(deadlock_after=AFTER)
    both = asyncio.Barrier(2)
    async with asyncio.timeout(PATIENCE):
        ends = await asyncio.gather(
            take(one.lock("a"), one.lock("b"), both),
            take(two.lock("b"), two.lock("a", timeout=4 * AFTER), both),
            return_exceptions=True,
        )
    assert ends[0] is None
    assert isinstance(ends[1], aiodlock.AcquireTimeout)


async def test_bare_lease_makes_no_edge(make_client: MakeClient) -> None:
    one, two = await make_client(deadlock_after=AFTER), await make_client(deadlock_after=AFTER)
    both = asyncio.Barrier(2)

    async def bare() -> None:
        await one.lock("a").acquire()
        await both.wait()
        await one.lock("b").acquire()

    async with gathered(bare(), take(two.lock("b"), two.lock("a"), both)) as tasks:
        await asyncio.sleep(5 * AFTER)
        assert not any(task.done() for task in tasks)


async def test_nobody_looks_where_it_is_off(make_client: MakeClient) -> None:
    one, two = await make_client(deadlock_after=None), await make_client(deadlock_after=AFTER)
    both = asyncio.Barrier(2)
    async with gathered(
        take(one.lock("a"), one.lock("b"), both), take(two.lock("b"), two.lock("a"), both)
    ) as tasks:
        await asyncio.sleep(5 * AFTER)
        assert not any(task.done() for task in tasks)


async def test_long_waits_without_a_cycle_go_on(make_client: MakeClient) -> None:
    one, two = await make_client(deadlock_after=AFTER), await make_client(deadlock_after=AFTER)
    lease = await one.lock("a").acquire()

    async def wait() -> str:
        async with two.lock("b"):
            async with two.lock("a"):
                return "done"

    async with gathered(wait()) as (task,):
        await asyncio.sleep(4 * AFTER)
        assert not task.done()
        await lease.release()
        assert await task == "done"


async def test_nothing_that_was_told_stays(make_client: MakeClient) -> None:
    one, two = await make_client(deadlock_after=AFTER), await make_client(deadlock_after=AFTER)
    both = asyncio.Barrier(2)
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(
            take(one.lock("a"), one.lock("b"), both), take(two.lock("b"), two.lock("a"), both)
        )
    for client in (one, two):

        async def is_quiet(client: aiodlock.Client = client) -> bool:
            session = client._core.use()
            return not await session.backend.waits_of([session.backend.label])

        await until(is_quiet)
    assert [info async for info in one.locks()] == []


@pytest.mark.stores("memory")
@pytest.mark.parametrize("kind", ["lock", "once", "semaphore"])
async def test_task_that_waits_for_what_its_creator_has_open_is_warned_about(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    client = await make_client(deadlock_after=0.05)

    def named(name: str) -> Any:
        if kind == "lock":
            return client.lock(name)
        return client.once(name, keep=60) if kind == "once" else client.semaphore(name, 1)

    async def child() -> None:
        async with named("a"):
            pass

    async with named("a"):
        async with gathered(child()) as (task,):
            await until(lambda: "waits_for_parent" in events(caplog))
            assert not task.done()
    caplog.clear()
    async with client.lock("b"):
        async with gathered(child()) as (task,):
            await task
    assert events(caplog) == []


@pytest.mark.stores("memory")
@pytest.mark.parametrize("kind", ["once", "semaphore"])
async def test_nobody_is_warned_about_a_creator_that_has_another_thing_of_the_name_open(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    client = await make_client(deadlock_after=0.05)
    other = await make_client(deadlock_after=None)

    def named(client: aiodlock.Client) -> Any:
        return client.once("a", keep=60) if kind == "once" else client.semaphore("a", 1)

    async def wait_for_it() -> None:
        async with named(client):
            pass

    async with client.lock("a"):
        async with named(other):
            async with gathered(wait_for_it()) as (task,):
                await until_waiting_for(other, kind)
                await asyncio.sleep(0.3)
                assert not task.done()
    assert events(caplog) == []


async def until_waiting_for(client: aiodlock.Client, kind: Any) -> None:
    async def is_waiting() -> bool:
        return bool((await client.inspect("a", kind=kind)).waiters)

    await until(is_waiting)


@pytest.mark.stores("memory")
async def test_nobody_is_warned_about_a_creator_that_is_not_inside_any_more(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether its wait becomes long after the creator has left its block, or what it held, decides."""
    client = await make_client(deadlock_after=600.0)
    other = await make_client(deadlock_after=None)
    deadlocks = client._core.use().deadlocks
    assert deadlocks is not None
    goes_on = asyncio.Event()

    async def hold() -> None:
        async with other.lock("a"):
            await goes_on.wait()

    async def child() -> None:
        async with client.lock("a"):
            pass

    def waits_long() -> None:
        (request,) = deadlocks._short
        deadlocks._waits_long(request)

    async with gathered() as tasks:
        async with client.lock("a"):
            tasks.append(asyncio.create_task(hold()))
            await until_waiting(other, "a")
            tasks.append(asyncio.create_task(child()))
            await until_waiting(other, "a", 2)
        waits_long()
        goes_on.set()
        await asyncio.gather(*tasks)
    goes_on.clear()
    async with client.lock("a") as lease, gathered() as tasks:
        tasks.append(asyncio.create_task(hold()))
        await until_waiting(other, "a")
        tasks.append(asyncio.create_task(child()))
        await until_waiting(other, "a", 2)
        await lease.release()
        await until_held(other, "a")
        waits_long()
        goes_on.set()
        await asyncio.gather(*tasks)
    assert events(caplog) == []


@pytest.mark.stores("memory")
async def test_nobody_is_warned_about_waits_that_end_by_themselves_or_have_no_creator(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = await make_client(deadlock_after=0.05)

    async def impatient() -> None:
        with pytest.raises(aiodlock.AcquireTimeout):
            await client.lock("a").acquire(timeout=0.3)

    async def in_turn() -> None:
        async with client.semaphore("places", 3), client.lock("b"):
            await asyncio.sleep(0.3)

    async with client.lock("a"):
        await asyncio.create_task(impatient())
    await asyncio.gather(in_turn(), in_turn())
    assert events(caplog) == []


@pytest.mark.stores("memory")
async def test_victim_that_is_granted_in_the_turn_of_the_answer_is_no_victim(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await make_client(deadlock_after=0.05)
    other = await make_client(deadlock_after=None)
    deadlocks = client._core.use().deadlocks
    assert deadlocks is not None
    granted = Request.granted

    def granted_first(request: Request) -> None:
        granted(request)
        deadlocks._found({request: Cycle(())})

    async with gathered() as tasks:
        async with other.lock("b"):
            tasks.append(
                asyncio.create_task(take(client.lock("a"), client.lock("b"), asyncio.Barrier(1)))
            )
            await until(lambda: deadlocks._long)
            monkeypatch.setattr(Request, "granted", granted_first)
        assert await tasks[0] is None
    assert events(caplog) == []


async def block_of(lock: aiodlock.Lock) -> AsyncIterator[None]:
    """Be inside of a block for as long as somebody iterates."""
    async with lock:
        yield


async def leave(block: AsyncIterator[None]) -> None:
    async for _ in block:
        pass


async def until_told(client: aiodlock.Client) -> None:
    """Wait until the store knows of a wait of this client."""
    backend = client._core.use().backend

    async def is_told() -> bool:
        return bool(await backend.waits_of([backend.label]))

    await until(is_told)


async def test_block_that_another_task_has_left_makes_no_edge(make_client: MakeClient) -> None:
    one, two = await make_client(deadlock_after=AFTER), await make_client(deadlock_after=AFTER)
    if not one._core.use().backend.capabilities.linger:
        pytest.skip("nothing lingers here")
    lock = one.lock("a", linger=60.0)
    both = asyncio.Barrier(2)
    in_a, in_b = asyncio.Event(), asyncio.Event()

    block = block_of(lock)

    async def wait_for_b() -> None:
        await anext(block)
        await both.wait()
        async with one.lock("b"):
            pass

    async def wait_for_a() -> str:
        async with two.lock("b"):
            await both.wait()
            in_b.set()
            await in_a.wait()
            async with two.lock("a"):
                return "got it"

    async with asyncio.timeout(3 * PATIENCE), gathered(wait_for_b(), wait_for_a()) as tasks:
        await in_b.wait()
        await until_told(one)
        await asyncio.create_task(leave(block))
        async with lock:  # another task's body
            in_a.set()
            await until_waiting(two, "a")
            await asyncio.sleep(2 * AFTER)
        assert await tasks[1] == "got it"


async def test_block_that_another_task_has_left_makes_no_edge_though_its_owner_holds_on(
    make_client: MakeClient,
) -> None:
    """The owner's other request has the token of the one that was left."""
    one, two = await make_client(deadlock_after=AFTER), await make_client(deadlock_after=AFTER)
    in_b = asyncio.Event()

    block = block_of(one.lock("a", owner="ann"))

    async def wait_for_b() -> None:
        await anext(block)
        await in_b.wait()
        async with one.lock("b"):
            pass

    async def hold_b() -> str:
        async with two.lock("b"):
            in_b.set()
            await left.wait()
            async with two.lock("a"):
                return "got it"

    left = asyncio.Event()
    async with asyncio.timeout(3 * PATIENCE), gathered(wait_for_b(), hold_b()) as tasks:
        await in_b.wait()
        await until_told(one)
        async with one.lock("a", owner="ann"):
            await asyncio.create_task(leave(block))
            left.set()
            await until_waiting(two, "a")
            await asyncio.sleep(2 * AFTER)
        assert await tasks[1] == "got it"


async def test_lease_that_another_task_has_released_makes_no_edge_though_its_owner_holds_on(
    make_client: MakeClient,
) -> None:
    one, two = await make_client(deadlock_after=AFTER), await make_client(deadlock_after=AFTER)
    in_b, released = asyncio.Event(), asyncio.Event()
    lock = one.lock("a", owner="ann")
    mine = await lock.acquire()

    async def wait_for_b() -> None:
        async with mine:
            await in_b.wait()
            async with one.lock("b"):
                pass

    async def hold_b() -> str:
        async with two.lock("b"):
            in_b.set()
            await released.wait()
            async with two.lock("a"):
                return "got it"

    async with asyncio.timeout(3 * PATIENCE), gathered(wait_for_b(), hold_b()) as tasks:
        await in_b.wait()
        await until_told(one)
        async with one.lock("a", owner="ann"):
            await mine.release()
            released.set()
            await until_waiting(two, "a")
            await asyncio.sleep(2 * AFTER)
        assert await tasks[1] == "got it"


@pytest.mark.parametrize("told", [False, True])
async def test_block_whose_own_lease_was_released_makes_no_edge_though_a_bare_one_holds_on(
    make_client: MakeClient, told: bool
) -> None:
    client = await make_client(deadlock_after=AFTER)
    a, b = client.lock("a"), client.lock("b")
    both, released = asyncio.Barrier(3), asyncio.Event()
    leases: list[aiodlock.Lease] = []

    async def wait_for_b() -> str:
        leases.append(await a.acquire())
        async with a as lease:
            leases.append(lease)
            await both.wait()
            async with b:
                return "got it"

    async def hold_b() -> str:
        async with b:
            await both.wait()
            await released.wait()
            async with a:
                return "got it"

    async with asyncio.timeout(3 * PATIENCE), gathered(wait_for_b(), hold_b()) as tasks:
        await both.wait()  # else a quorum tells of a request as a waiter that is about to hold
        await until_waiting(client, "b")
        if told:
            await until_told(client)
        bare, lease = leases
        await lease.release()
        released.set()
        await until_waiting(client, "a")
        await asyncio.sleep(3 * AFTER)
        assert bare.held
        await bare.release()
        assert await asyncio.gather(*tasks) == ["got it"] * 2


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [event for record in caplog.records if (event := getattr(record, "event", ""))]


@pytest.mark.stores("memory")
async def test_bad_values_are_refused() -> None:
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError):
            aiodlock.Client("memory://", deadlock_after=wrong)
    with pytest.raises(TypeError):
        aiodlock.Client("memory://", deadlock_after="2")  # type: ignore[arg-type]


@pytest.mark.stores("memory")
async def test_short_waits_and_waits_of_tasks_that_hold_nothing_tell_nothing(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await make_client(deadlock_after=AFTER)
    backend = client._core.use().backend
    told: list[bytes] = []
    tell = backend.tell_waits

    async def note(serial: int, record: bytes, *, keep: float) -> None:
        told.append(record)
        await tell(serial, record, keep=keep)

    monkeypatch.setattr(backend, "tell_waits", note)

    async def inside(name: str) -> None:
        async with client.lock("outer"):
            async with client.lock(name):
                pass

    async def alone() -> None:
        async with client.lock("long"):
            pass

    async with client.lock("short"):
        async with gathered(inside("short")) as (task,):
            await until_waiting(client, "short")
    lease = await client.lock("long").acquire()
    async with gathered(alone()) as (task,):
        await asyncio.sleep(2 * AFTER)
        assert not told
        async with gathered(inside("long")):
            await until(lambda: len(told) == 1)
        await lease.release()
        await task


@pytest.mark.stores("memory")
async def test_many_waits_that_become_long_are_looked_at_together(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await make_client(deadlock_after=AFTER)
    search = client._core.use().deadlocks
    assert search is not None
    looks: list[float] = []
    seen: set[str] = set()
    plan = search._plan

    def count() -> bool:
        if not plan():
            return False
        looks.append(now())
        seen.update(request.name for request in search._long)
        return True

    monkeypatch.setattr(search, "_plan", count)

    async def inside(name: str) -> None:
        await asyncio.sleep(int(name) * 0.05)
        async with client.lock(f"outer {name}"), client.lock(name):
            pass

    names = [str(number) for number in range(20)]
    leases = [await client.lock(name).acquire() for name in names]
    async with gathered(*(inside(name) for name in names)) as tasks:
        await until(lambda: len(seen) == len(names))
        for lease in leases:
            await lease.release()
        await asyncio.gather(*tasks)
    assert all(later - earlier >= 0.45 for earlier, later in pairwise(looks))


@pytest.mark.stores("memory")
async def test_waits_of_one_look_are_looked_at_again_together(make_client: MakeClient) -> None:
    client = await make_client(deadlock_after=600.0)
    names, all_hold = ("a", "b", "c"), asyncio.Barrier(3)
    async with (
        client.lock("x"),
        gathered(*(take(client.lock(name), client.lock("x"), all_hold) for name in names)),
    ):
        await until_waiting(client, "x", 3)
        assert client._core.session is not None
        deadlocks: Any = client._core.session.deadlocks
        backend: Any = client._core.session.backend
        tell = backend.tell_waits

        async def tell_slowly(*about: object, **more: object) -> None:
            await asyncio.sleep(0.01)
            await tell(*about, **more)

        backend.tell_waits = tell_slowly
        for request in list(deadlocks._short):
            deadlocks._waits_long(request)
        long = list(deadlocks._long.values())
        assert len(long) == 3
        await until(lambda: all(one.due for one in long))
        assert not any(one.sure for one in long)
        await until(lambda: any(one.sure for one in long))
        assert len({(one.sure, one.due) for one in long}) == 1


@pytest.mark.stores("memory")
async def test_waits_are_looked_at_every_two_seconds_and_a_new_one_at_once(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await make_client(deadlock_after=600.0)
    deadlocks = client._core.use().deadlocks
    assert deadlocks is not None
    monkeypatch.setattr(deadlocks, "_start_soon", lambda *about: True)
    moments = iter(range(1000))
    async with (
        client.lock("x"),
        gathered(*(take(client.lock(n), client.lock("x"), asyncio.Barrier(1)) for n in "ab")),
    ):
        await until_waiting(client, "x", 2)
        first, second = list(deadlocks._short)
        deadlocks._waits_long(first)
        long = deadlocks._long[first]

        def look() -> float:
            deadlocks._looked_at = max(long.due, long.since + next(moments) / 1e3)
            assert deadlocks._plan()
            return long.due - deadlocks._looked_at

        pauses = [look() for _ in range(8)]
        assert pauses[1:] == pytest.approx([2.0] * 7)
        deadlocks._waits_long(second)
        assert deadlocks._plan()  # at once, whatever the other one has to wait for
        assert long.due - deadlocks._looked_at == pytest.approx(2.0)
