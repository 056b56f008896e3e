"""linger: the client keeps a lease between two bodies, until its time or until others want the name."""

from __future__ import annotations

import asyncio
import gc
import os
import time
import weakref
from collections.abc import Callable
from typing import Any, Literal

import pytest

from aiodlock import (
    AcquireTimeout,
    BackendUnavailable,
    Client,
    ClientClosed,
    Hooks,
    Lease,
    Lock,
    LockLost,
    NotHeld,
    RequestInfo,
    Unsupported,
    WouldBlock,
    _short_way,
)
from aiodlock._clock import now
from aiodlock._linger import Lingering
from aiodlock._request import Request, State
from aiodlock.backends.zookeeper.store import ZooKeeperBackend

from ..conftest import MakeClient
from ..inside import check_request, holds_of_task, lingering_of, session_of
from ..proxy import FaultProxy
from ..scenes import LASTING, keeper_of, takes, until, until_free, until_held, until_waiting
from ..servers import (
    CLUSTER,
    ETCD,
    MEMORY,
    POSTGRES,
    QUORUM,
    REAL,
    REPLICATED,
    SCRIPTED,
    SENTINEL,
    ZOOKEEPER,
    Store,
)

#: Where each request has a lease of its own, which a keeper extends.
KEPT = (MEMORY, *SCRIPTED, CLUSTER, SENTINEL, REPLICATED, *POSTGRES)
pytestmark = pytest.mark.stores(*KEPT, *ETCD, *ZOOKEEPER)
#: Longer than any test.
LONG = 60.0


def lingering(client: Client) -> Lingering:
    return lingering_of(client)


def kept(client: Client, name: str = "a") -> Request:
    """Return what is kept of a name, checked."""
    request = lingering(client).kept[name]
    check_request(session_of(client), request)
    return request


def is_kept(client: Client, name: str = "a") -> bool:
    return name in lingering(client).kept


def has_own_length(client: Client) -> bool:
    """Tell whether a lease may get another length than others have: on ZooKeeper the session has it."""
    assert client._core.session is not None
    return not isinstance(client._core.session.backend, ZooKeeperBackend)


async def body(client: Client, name: str = "a", **options: Any) -> Lease:
    """Have one short body, and return its lease."""
    async with client.lock(name, **({"linger": LONG} | options)) as lease:
        assert lease.held
    return lease


# -- what is kept ------------------------------------------------------------------------------------


async def test_next_body_has_a_fresh_lease_with_the_same_token(client: Client) -> None:
    first = await body(client)
    assert await client.lock("a").locked()
    async with client.lock("a", linger=LONG) as second:
        assert second.token == first.token
        assert second.held
        assert not first.held
        assert first.lost is None
        with pytest.raises(NotHeld):
            first.ensure_held()
        with pytest.raises(NotHeld):
            await first.release()
        assert await client.check_sequencer(first.sequencer)


@pytest.mark.stores(*KEPT)
async def test_no_message_is_sent_between_two_bodies(client: Client) -> None:
    await body(client)
    request, keeper = kept(client), keeper_of(client)
    asked: list[object] = []

    def acquire(*about: object, **_: object) -> Any:
        asked.append(about)
        raise AssertionError("it was asked")

    keeper.store.acquire = keeper.store.leave_later = acquire  # type: ignore[method-assign]
    for _ in range(300):
        await body(client)
    assert not asked
    assert kept(client) is request
    del keeper.store.acquire, keeper.store.leave_later


async def test_another_task_of_the_client_gets_it(client: Client) -> None:
    first = await body(client)
    second = await asyncio.create_task(body(client))
    assert second.token == first.token
    lease = await client.lock("a", linger=LONG).acquire()
    assert lease.token == first.token
    await client.lock("a", linger=LONG).release()
    assert kept(client).token == first.token


async def test_lease_is_released_when_its_time_is_over(client: Client) -> None:
    await body(client, linger=0.05)
    await until_free(client, "a")
    assert not lingering(client).kept
    assert len(session_of(client).deadlines) == 0


async def test_time_counts_from_the_last_release(client: Client) -> None:
    await body(client, linger=LONG)
    request = kept(client)
    first = request.kept_until
    await body(client, linger=LONG)
    assert kept(client) is request
    assert request.kept_until > first
    await body(client, linger=0.02)  # of a lock that keeps it for a shorter time
    await until_free(client, "a")


async def test_lock_without_linger_uses_what_is_kept_and_releases_it(client: Client) -> None:
    first = await body(client)
    async with client.lock("a") as lease:
        assert lease.token == first.token
    await until_free(client, "a")


async def test_kept_lease_is_extended(client: Client) -> None:
    await body(client, ttl=LASTING)
    request = kept(client)
    first = request.place.deadline
    await until(lambda: request.place.deadline > first + 0.1 * LASTING)
    assert kept(client) is request


@pytest.mark.parametrize("end", ["exception", "bare", "confirm_release"])
async def test_however_the_body_ends(client: Client, end: str) -> None:
    if end == "exception":
        with pytest.raises(ValueError, match="failed"):
            async with client.lock("a", linger=LONG):
                raise ValueError("failed")
    elif end == "bare":
        lease = await client.lock("a", linger=LONG).acquire()
        await lease.release()
        with pytest.raises(NotHeld):
            await lease.release()
    else:
        await body(client, confirm_release=False)
    assert is_kept(client)


async def test_lease_that_was_forgotten_is_not_kept(client: Client) -> None:
    async def forget() -> None:
        await client.lock("a", linger=LONG).acquire()

    async def forgotten() -> None:
        await asyncio.create_task(forget())
        gc.collect()
        await until_free(client, "a")

    with pytest.warns(ResourceWarning):
        await forgotten()
    assert not lingering(client).kept


async def test_released_inside_of_its_block_it_is_not_kept(client: Client) -> None:
    """The block goes on, and would be cancelled by the loss of somebody else's lease."""
    async with client.lock("a", linger=LONG, on_lost="flag") as lease:
        await lease.release()
        assert not lingering(client).kept
    await until_free(client, "a")


@pytest.mark.stores(*KEPT, *ETCD)
async def test_extended_by_hand_to_another_ttl_it_is_not_kept(client: Client) -> None:
    async with client.lock("a", linger=LONG, ttl=20) as lease:
        await lease.extend(40)
    await until_free(client, "a")


async def test_waiter_that_is_granted_last_keeps_it(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    async with other.lock("a"):
        task = asyncio.create_task(body(client))
        await until_waiting(other, "a")
    lease = await task
    assert kept(client).token == lease.token


async def test_wait_for_the_loss_of_an_ended_body_ends(client: Client) -> None:
    lease = await client.lock("a", linger=LONG).acquire()
    watching = asyncio.create_task(lease.wait_lost())
    await asyncio.sleep(0)
    await lease.release()
    with pytest.raises(NotHeld):
        await watching


async def test_loss_of_a_later_body_is_not_that_of_an_earlier_one(client: Client) -> None:
    outer = await client.lock("a", linger=LONG).acquire()
    inner = await client.lock("a", linger=LONG).acquire()
    await inner.release()
    await outer.release()
    lease = await client.lock("a", linger=LONG).acquire()
    await client.break_lock("a")
    await lease.wait_lost()
    with pytest.raises(LockLost):
        await lease.release()
    assert lease.lost is not None
    for ended in (outer, inner):
        assert ended.lost is None
        assert "released" in repr(ended)
        with pytest.raises(NotHeld):
            ended.ensure_held()


# -- one Lock taken again and again: its blocks begin and end by a short way --------------------------


@pytest.fixture(params=["short", "long"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways do the same: each test of this part goes them both."""
    way: str = request.param
    if way == "long":
        monkeypatch.setattr(_short_way, "begin", lambda *about: None)
        monkeypatch.setattr(_short_way, "end", lambda *about: False)
    return way


def _state_of(client: Client) -> dict[str, object]:
    """Return what a session has of its requests, without times and serials."""
    session = client._core.session
    assert session is not None
    for request in session.requests.values():
        check_request(session, request)
    return {
        "kept": list(session.lingering.kept),
        "states": [request.state for request in session.requests.values()],
        "handles": [len(request.handles) for request in session.requests.values()],
        "armed": [list(request.armed or ()) for request in session.requests.values()],
        "open": {task: session.bodies.of(task) for task in session.bodies.open},
        "mine": holds_of_task(client, "a"),
        "told": [request.told is None for request in session.requests.values()],
    }


async def test_same_lock_again_and_again(client: Client, way: str) -> None:
    lock = client.lock("a", linger=LONG)
    leases = []
    async with lock as first:
        inside = _state_of(client)
    outside = _state_of(client)
    assert outside["kept"] == ["a"]
    assert not outside["open"]
    for _ in range(5):
        before = kept(client).kept_until
        async with lock as lease:
            lease.ensure_held()
            assert lease.token == first.token
            assert _state_of(client) == inside
        assert _state_of(client) == outside
        assert kept(client).kept_until >= before
        leases.append(lease)
        assert not lease.held
        assert lease.lost is None
    with pytest.raises(NotHeld):
        leases[0].ensure_held()
    with pytest.raises(RuntimeError):
        await lock.__aexit__(None, None, None)
    assert is_kept(client)


@pytest.mark.stores(MEMORY)
async def test_lock_that_is_described_anew_goes_the_short_way(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``async with client.lock(…)``, as most write it, makes a new object each time."""
    first = await body(client)
    monkeypatch.setattr(Lingering, "hand_out", lambda *_: pytest.fail("it went the long way"))
    for _ in range(3):
        assert (await body(client)).token == first.token


@pytest.mark.parametrize(
    "other", [{"margin": 1.0}, {"linger": 50.0}, {"on_lost": "flag"}, {"note": "b"}]
)
async def test_lock_that_is_described_otherwise_has_options_of_its_own(
    client: Client, other: dict[str, Any]
) -> None:
    first = await body(client)
    async with client.lock("a", **({"linger": LONG} | other)) as lease:
        assert lease.token == first.token
        request = lease._request
        for option, value in other.items():
            assert getattr(request.options, option) == value
    assert request.terms.margin == other.get("margin", 0.0)


async def test_same_lock_in_several_tasks(client: Client, way: str) -> None:
    lock, inside = client.lock("a", linger=LONG), 0

    async def work() -> int:
        nonlocal inside
        for number in range(12):
            async with lock as lease:
                inside += 1
                assert inside == 1
                assert client._core.session is not None
                assert holds_of_task(client, "a")
                if number % 3 == 0:
                    await asyncio.sleep(0)
                inside -= 1
            if number % 4 == 0:
                await asyncio.sleep(0)
        return lease.token

    tokens = [await asyncio.create_task(work()) for _ in range(3)]
    assert len(set(tokens)) == 1
    await asyncio.gather(*(work() for _ in range(3)))
    await until(lambda: client._core.session is not None and not client._core.session.bodies.open)


async def test_same_lock_inside_itself(client: Client, way: str) -> None:
    lock = client.lock("a", linger=LONG)
    for _ in range(3):
        async with lock as outer:
            async with lock as inner, client.lock("b", linger=LONG):
                assert inner.token == outer.token
            assert not is_kept(client)
            assert outer.held
        assert is_kept(client)


async def test_same_lock_inside_of_another_and_out_of_order(client: Client, way: str) -> None:
    a, b = client.lock("a", linger=LONG), client.lock("b", linger=LONG)
    for _ in range(3):
        async with a, b:
            assert not lingering(client).kept
        assert set(lingering(client).kept) == {"a", "b"}
        await a.__aenter__()
        await b.__aenter__()
        await a.__aexit__(None, None, None)
        await b.__aexit__(None, None, None)
        assert set(lingering(client).kept) == {"a", "b"}


@pytest.mark.parametrize("on_lost", ["cancel", "flag"])
async def test_same_lock_is_lost_in_a_later_body(
    client: Client, way: str, on_lost: Literal["cancel", "flag"]
) -> None:
    lock = client.lock("a", linger=LONG, on_lost=on_lost)
    for _ in range(2):
        async with lock:
            pass
        with pytest.raises(LockLost):
            await _break_in_its_body(client, lock, on_lost)
        assert not is_kept(client)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
    await until_free(client, "a")


async def _break_in_its_body(client: Client, lock: Lock, on_lost: str) -> None:
    async with lock as lease:
        await client.break_lock("a")
        if on_lost == "cancel":
            await asyncio.sleep(15)
        await lease.wait_lost()


@pytest.mark.stores(*KEPT)
async def test_same_lock_runs_out_in_a_later_body(client: Client, way: str) -> None:
    lock = client.lock("a", linger=LONG, on_lost="flag")
    async with lock:
        pass
    with pytest.raises(LockLost):
        async with lock as lease:
            lease._request.place.deadline = time.clock_gettime(time.CLOCK_BOOTTIME)  # type: ignore[misc]
    assert not is_kept(client)


@pytest.mark.parametrize("how", ["cancelled", "raises"])
async def test_same_lock_is_kept_however_its_later_body_ends(
    client: Client, way: str, how: str
) -> None:
    lock = client.lock("a", linger=LONG)
    async with lock:
        pass

    async def work() -> None:
        async with lock:
            if how == "raises":
                raise ValueError(how)
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else ValueError):
        await task
    assert is_kept(client)
    async with lock as lease:
        assert lease.held


async def test_same_lock_in_a_task_that_was_cancelled_before(client: Client, way: str) -> None:
    """What asyncio's own lock does, too: the cancellation comes at the next await that waits."""
    lock = client.lock("a", linger=LONG)
    async with lock:
        pass

    async def work() -> None:
        async with lock:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(60)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(work())
    assert is_kept(client)


async def test_same_lock_is_recalled_in_a_later_body(make_client: MakeClient, way: str) -> None:
    client, other = await make_client(), await make_client()
    lock = client.lock("a", linger=LONG)
    async with lock:
        pass
    async with lock:
        task = asyncio.create_task(other.lock("a", timeout=15).acquire())
        await until(lambda: not _held(client).may_linger)
    assert not is_kept(client)
    await (await task).release()


async def test_same_lock_released_or_extended_in_its_block_is_not_kept(
    client: Client, way: str
) -> None:
    lock = client.lock("a", ttl=20, linger=LONG, on_lost="flag")
    for spoil in ("release", "extend"):
        if spoil == "extend" and not has_own_length(client):
            continue
        await _entered(lock)
        await lock.__aexit__(None, None, None)
        async with lock as lease:
            await (lease.release() if spoil == "release" else lease.extend(40))
        assert not is_kept(client)
    await until_free(client, "a")


async def test_same_lock_left_by_another_task(client: Client, way: str) -> None:
    lock = client.lock("a", linger=LONG)
    for _ in range(2):
        await asyncio.create_task(_entered(lock))
        await lock.__aexit__(None, None, None)
        assert is_kept(client)


async def _entered(lock: Lock) -> None:
    await lock.__aenter__()


async def test_same_lock_in_a_block_whose_lease_was_lost(client: Client, way: str) -> None:
    lock = client.lock("a", linger=LONG, on_lost="flag")
    lost = await lock.__aenter__()
    await client.break_lock("a")
    await lost.wait_lost()
    await asyncio.create_task(body(client))
    assert is_kept(client)
    with pytest.raises(LockLost):
        await lock.__aenter__()
    with pytest.raises(LockLost):
        await lock.__aexit__(None, None, None)


async def test_hooks_hear_of_each_body_of_the_same_lock(client: Client, way: str) -> None:
    events, lock = _Events(), client.lock("a", linger=LONG)
    client.add_hooks(events)
    for _ in range(3):
        async with lock:
            pass
    words = [word for word, _ in events.heard]
    assert words == ["acquiring", "acquired", "released"] * 3
    assert len({id for _, id in events.heard}) == 3


async def test_same_lock_after_its_client_was_left_and_entered_again(
    store: Store, way: str
) -> None:
    client = Client(store.source, **store.options)
    lock = client.lock("a", linger=LONG, on_lost="flag")
    async with client:
        async with lock:
            pass
        await lock.__aenter__()
    async with client:
        with pytest.raises(LockLost):  # the block of the client that was left
            await lock.__aexit__(None, None, None)
        async with lock as lease:
            assert lease.held
        assert is_kept(client)


async def test_kept_lease_does_not_keep_the_task_that_had_it_last(client: Client, way: str) -> None:
    lock = client.lock("a", linger=LONG)

    async def work() -> None:
        for _ in range(3):
            async with lock:
                pass

    task = asyncio.create_task(work())
    await task
    ended = weakref.ref(task)
    del task
    await until(lambda: ended() is None)
    assert is_kept(client)


# -- recalled ----------------------------------------------------------------------------------------


async def test_who_wants_it_elsewhere_gets_an_idle_one_at_once(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    first = await body(client)
    async with other.lock("a", timeout=5) as lease:
        assert lease.token > first.token
    assert not lingering(client).kept


async def test_busy_one_is_handed_over_when_its_body_ends(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    await body(client)
    async with client.lock("a", linger=LONG):
        task = asyncio.create_task(other.lock("a", timeout=15).acquire())
        await until_waiting(client, "a")
        await until(lambda: not _held(client).may_linger)
        assert not task.done()
    await (await task).release()
    assert not lingering(client).kept


def _held(client: Client, name: str = "a") -> Request:
    assert client._core.session is not None
    found = client._core.session.requests.values()
    return next(one for one in found if one.name == name and one.state is State.HELD)


async def test_nowait_elsewhere_is_refused_and_recalls(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    await body(client)
    with pytest.raises(WouldBlock):
        await other.lock("a").acquire_nowait()
    await until_free(other, "a")
    await (await other.lock("a").acquire_nowait()).release()


async def test_task_of_the_client_that_queued_is_served_before_a_later_body(client: Client) -> None:
    order: list[str] = []

    async def take(who: str) -> None:
        async with client.lock("a", linger=LONG):
            order.append(who)

    async with client.lock("a", linger=LONG):
        first = asyncio.create_task(take("queued"))
        await until_waiting(client, "a")
        await until(lambda: not _held(client).may_linger)  # the recall has come
    async with client.lock("a", linger=LONG):
        order.append("later")
    await first
    assert order == ["queued", "later"]


async def test_reader_elsewhere_shares_with_a_kept_reader(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    async with client.rwlock("a", linger=LONG).read:
        pass
    async with other.rwlock("a", timeout=5).read:
        assert is_kept(client)
        with pytest.raises(WouldBlock):
            await asyncio.create_task(other.lock("a").acquire_nowait())
        await until(lambda: not lingering(client).kept)


async def test_each_client_that_blocks_is_told(make_client: MakeClient) -> None:
    clients = [await make_client() for _ in range(3)]
    writer = await make_client()
    for client in clients:
        async with client.rwlock("a", linger=LONG).read:
            pass
    assert all(lingering(client).kept for client in clients)
    async with writer.lock("a", timeout=15):
        pass
    assert not any(lingering(client).kept for client in clients)


@pytest.mark.stores(*KEPT)
async def test_recall_that_no_message_tells_comes_with_the_next_extension(
    make_client: MakeClient,
) -> None:
    client, other = await make_client(), await make_client()
    keeper_of(client).on_recalled = lambda request_id: None  # type: ignore[method-assign]
    await body(client, ttl=0.6)
    async with other.lock("a", timeout=15):
        pass


async def test_new_holder_is_recalled_at_once_when_others_wait_behind(
    make_client: MakeClient,
) -> None:
    client, other = await make_client(), await make_client()
    async with other.lock("a"):
        mine = asyncio.create_task(body(client))
        await until_waiting(other, "a", 1)
        theirs = asyncio.create_task(other.lock("a", timeout=15).acquire())
        await until_waiting(other, "a", 2)
    await mine
    await (await theirs).release()
    assert not lingering(client).kept


@pytest.mark.stores(*KEPT)
async def test_cancellation_in_the_turn_of_the_recall(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    await body(client)
    mine = asyncio.create_task(body(client))
    theirs = asyncio.create_task(other.lock("a", timeout=15).acquire())
    gone = asyncio.Event()
    keeper, recalled = keeper_of(client), keeper_of(client).on_recalled

    def recall(request_id: str) -> None:
        recalled(request_id)
        mine.cancel()
        gone.set()

    keeper.on_recalled = recall  # type: ignore[method-assign]
    await asyncio.wait([mine])
    async with await theirs:
        pass
    await until_free(other, "a")


# -- other terms -------------------------------------------------------------------------------------


_OTHER_TERMS: list[dict[str, Any]] = [
    {"ttl": 7},
    {"lock_delay": 1},
    {"owner": "me"},
    {"auto_extend": False, "linger": 0.0},
]


async def test_other_terms_release_it_first(client: Client) -> None:
    for options in _OTHER_TERMS:
        if "lock_delay" in options and not client._core.store.capabilities.lock_delay:
            continue
        for timeout in (None, 0, 8):
            name = f"{next(iter(options))} {timeout}"
            first = await body(client, name)
            second = await body(client, name, **(options | {"timeout": timeout}))
            assert second.token > first.token, name


async def test_other_mode_releases_it_first(client: Client) -> None:
    both = client.rwlock("a", linger=LONG, timeout=15)
    tokens = []
    for lock in (both.write, both.read, both.write):
        async with lock as lease:
            tokens.append(lease.token)
    assert tokens == sorted(set(tokens))


@pytest.mark.stores(MEMORY, *SCRIPTED, *POSTGRES)
async def test_hold_at_least_releases_it_first(client: Client) -> None:
    first = await body(client)
    second = await body(client, hold_at_least=0.01, linger=0.0, timeout=15)
    assert second.token > first.token


async def test_margin_and_on_lost_are_those_of_the_body(client: Client) -> None:
    await body(client, ttl=20)
    lock = client.lock("a", ttl=20, margin=5, on_lost="flag", linger=LONG)
    lease = await lock.__aenter__()
    assert lease.remaining() < 15
    await client.break_lock("a")
    await lease.wait_lost()
    await asyncio.sleep(0)  # nobody is cancelled
    with pytest.raises(LockLost):
        await lock.__aexit__(None, None, None)
    assert not lingering(client).kept


@pytest.mark.stores(*KEPT)
@pytest.mark.parametrize("before", [0.0, 12.0], ids=["other margin", "same margin"])
async def test_lease_with_little_but_the_margin_left_is_not_handed_out(
    client: Client, way: str, before: float
) -> None:
    """By any clock it lasts for half of its ttl still, and for the new body it is over, or nearly."""
    for left in (11.0, 13.0):
        first = await body(client, ttl=20, margin=before)
        kept(client).place.deadline = now() + left  # type: ignore[misc]
        async with client.lock("a", ttl=20, margin=12, linger=LONG) as lease:
            assert lease.held
            assert lease.remaining() > 4
            assert lease.token > first.token
        await lingering(client).give_back("a")


@pytest.mark.stores(*KEPT)
async def test_max_hold_counts_for_each_body(client: Client) -> None:
    lock = client.lock("a", ttl=20, max_hold=10, linger=LONG)
    first = await lock.acquire()
    request = first._request
    request.granted_at -= 4.0  # the body takes so long
    request.place.granted_at -= 4.0  # type: ignore[attr-defined]
    await first.release()
    assert request.kept_until <= request.granted_at + 10
    if (second := await lock.acquire()).token == first.token:
        assert second.remaining() > 7
    await second.release()


async def test_kept_lease_ends_with_its_max_hold(client: Client) -> None:
    await body(client, ttl=LASTING, max_hold=LASTING)
    await until_free(client, "a")


async def test_task_inside_its_own_block_gets_in_again(client: Client) -> None:
    await body(client)
    async with client.lock("a", linger=LONG) as outer:
        async with client.lock("a", linger=LONG) as inner:
            assert inner.token == outer.token
            assert not lingering(client).kept
        assert outer.held
    assert is_kept(client)


async def test_multilock_uses_and_keeps_leases(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    tokens = [(await body(client, name)).token for name in ("a", "b")]
    for _ in range(2):
        async with client.multilock("a", "b", linger=LONG) as leases:
            assert list(leases.tokens.values()) == tokens
    async with other.multilock("a", "b", timeout=15) as leases:
        assert all(new > old for new, old in zip(leases.tokens.values(), tokens, strict=True))


async def test_owner_of_several_tasks(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    first = await body(client, owner="me")
    async with other.lock("a", owner="me", linger=LONG) as second:
        assert second.token == first.token
        async with client.lock("a", owner="me", linger=LONG) as third:
            assert third.token == first.token
    async with other.lock("a", owner="you", timeout=15):
        pass


async def test_shared_lease_of_an_owner_that_is_kept_here_is_no_deadlock(client: Client) -> None:
    both = client.rwlock("a", owner="me", linger=LONG, timeout=15)
    async with both.read:
        pass
    async with both.write:
        pass


# -- exclusion ---------------------------------------------------------------------------------------


async def test_reader_inside_its_own_writer_is_not_handed_to_another_task(client: Client) -> None:
    """Else two would hold: the task inside its write lock, and another one with the read lock."""
    both = client.rwlock("a", linger=LONG)
    async with both.write:
        async with both.read:
            pass
        assert not lingering(client).kept
        reader = asyncio.create_task(both.read.acquire())
        await until_waiting(client, "a")
        assert not reader.done()
    await (await reader).release()


async def test_writer_that_was_left_for_its_own_reader_is_not_handed_on(client: Client) -> None:
    both = client.rwlock("a", linger=LONG)
    write = await both.write.acquire()
    async with both.read:
        await write.release()  # a downgrade
        assert not lingering(client).kept
        async with asyncio.timeout(8):
            await asyncio.create_task(_read(client))


async def _read(client: Client) -> None:
    async with client.rwlock("a").read:
        pass


async def test_two_tasks_are_never_handed_the_same_lease(client: Client) -> None:
    inside = 0

    async def work() -> None:
        nonlocal inside
        for _ in range(20):
            async with client.lock("a", linger=LONG):
                inside += 1
                assert inside == 1
                await asyncio.sleep(0)
                inside -= 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(work())


# -- losses ------------------------------------------------------------------------------------------


class _Events(Hooks):
    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def acquiring(self, request: RequestInfo) -> None:
        self.heard.append(("acquiring", request.id))

    def acquired(self, request: RequestInfo, waited: float) -> None:
        self.heard.append(("acquired", request.id))

    def released(self, request: RequestInfo, held: float) -> None:
        self.heard.append(("released", request.id))

    def lost(self, request: RequestInfo, held: float, reason: str) -> None:
        self.heard.append(("lost", request.id))


async def test_hooks_hear_of_each_body(client: Client) -> None:
    events = _Events()
    client.add_hooks(events)
    await body(client)
    await body(client)
    words = [word for word, _ in events.heard]
    assert words == ["acquiring", "acquired", "released"] * 2
    assert len({id for _, id in events.heard}) == 2


async def test_lease_that_is_broken_while_idle_is_not_handed_out_and_no_loss(
    client: Client,
) -> None:
    events = _Events()
    client.add_hooks(events)
    delay = 30.0 if client._core.store.capabilities.lock_delay else 0.0
    first = await body(client, lock_delay=delay)
    request = kept(client)
    await client.break_lock("a")
    await until(lambda: not lingering(client).kept)
    second = await body(client, lock_delay=delay, timeout=15.0)
    assert second.token > first.token
    assert "lost" not in [word for word, _ in events.heard]
    await until(lambda: request.state is State.OVER)


@pytest.mark.stores(*KEPT)
async def test_lease_that_ran_out_while_idle_is_not_handed_out_and_no_loss(client: Client) -> None:
    events = _Events()
    client.add_hooks(events)
    first = await body(client, lock_delay=30.0)
    request = kept(client)
    request.place.deadline = time.clock_gettime(time.CLOCK_BOOTTIME) - 1  # type: ignore[misc]
    second = await body(client, lock_delay=30.0, timeout=15.0)
    assert second.token > first.token
    assert "lost" not in [word for word, _ in events.heard]
    await until(lambda: request.state is State.OVER)


@pytest.mark.stores(*KEPT)
async def test_lease_whose_extensions_have_no_answer_is_not_handed_out(client: Client) -> None:
    await body(client)
    request = kept(client)
    request.place.silent = True  # type: ignore[misc]
    await body(client, timeout=15)
    assert request.state in (State.LEAVING, State.OVER)


async def test_bodies_that_await_nothing_leave_the_loop_its_turns(client: Client) -> None:
    """Else nothing would be extended, and the lease is lost in the middle of a body."""
    first, turns = await body(client), 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    for _ in range(50):
        async with client.lock("a", linger=LONG) as lease:
            time.sleep(0.003)  # longer than all tasks together have of one turn
            assert lease.token == first.token
    assert turns >= 12
    counting.cancel()


async def test_tasks_that_begin_eagerly_leave_the_loop_its_turns(client: Client) -> None:
    """Each is another task, and all of them run in one turn."""
    tasks = [asyncio.create_task(asyncio.sleep(0)) for _ in range(100)]
    moment = time.clock_gettime(time.CLOCK_BOOTTIME)
    given = [
        lingering(client).has_turn(task, moment + number * 0.001)
        for number, task in enumerate(tasks)
    ]
    await asyncio.gather(*tasks)
    assert given[0]
    assert given[1]
    assert not given[-1]


async def test_every_task_gets_bodies_while_one_never_awaits(client: Client) -> None:
    done = dict.fromkeys("bcde", 0)
    stop = False

    async def work(name: str) -> None:
        while not stop:
            await body(client, name)
            done[name] += 1

    async with asyncio.TaskGroup() as tasks:
        for name in done:
            tasks.create_task(work(name))
        await until(lambda: min(done.values()) >= 50)
        stop = True


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task has one block in a turn of the loop, and waits for the next turn before another."""
    monkeypatch.setattr("aiodlock._linger._TURN", 0.0)


async def begin_two_blocks(client: Client) -> tuple[Lock, asyncio.Task[Lease]]:
    """Return a lock, and a task that has had a block of it, and waits for the next turn."""
    lingering(client)._share = 0.0
    lock = client.lock("a", linger=LONG)
    async with lock:
        pass

    async def twice() -> Lease:
        async with lock:
            pass
        async with lock as lease:
            return lease

    task = asyncio.create_task(twice())
    await asyncio.sleep(0)
    assert not task.done()
    assert is_kept(client)
    return lock, task


@pytest.mark.usefixtures("no_time")
async def test_block_begins_in_the_next_turn(client: Client) -> None:
    _, task = await begin_two_blocks(client)
    token = kept(client).token
    await asyncio.sleep(0)
    assert task.done()
    assert (await task).token == token


@pytest.mark.usefixtures("no_time")
async def test_cancelled_before_the_next_turn_it_holds_nothing(client: Client) -> None:
    _, task = await begin_two_blocks(client)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not kept(client).handles
    await body(client)


@pytest.mark.usefixtures("no_time")
async def test_recalled_before_the_next_turn_it_queues_for_a_new_lease(client: Client) -> None:
    _, task = await begin_two_blocks(client)
    request = kept(client)
    request.recalled()
    assert (await task).token > request.token


@pytest.mark.usefixtures("no_time")
async def test_task_that_came_between_has_it_first(client: Client) -> None:
    lock, task = await begin_two_blocks(client)
    async with lock:
        await asyncio.sleep(0.05)
        assert not task.done()
    await task


@pytest.mark.usefixtures("no_time")
async def test_left_before_the_next_turn_the_client_is_closed(client: Client) -> None:
    _, task = await begin_two_blocks(client)
    await client.__aexit__(None, None, None)
    with pytest.raises(ClientClosed):
        await task
    await client.__aenter__()


# -- many --------------------------------------------------------------------------------------------


async def test_kept_leases_are_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodlock._linger._MOST", 20)
    for number in range(50):
        await body(client, f"n{number}")
        assert len(lingering(client).kept) <= 20
    await until_free(client, *(f"n{number}" for number in range(30)))
    assert list(lingering(client).kept) == [f"n{number}" for number in range(30, 50)]


@pytest.mark.stores(MEMORY)
async def test_what_was_released_before_its_time_is_forgotten(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodlock._linger._MOST", 10)
    for number in range(300):
        await body(client, f"n{number}", linger=1e6)
    assert client._core.session is not None
    assert len(client._core.session.deadlines) < 150


async def test_hundreds_whose_time_is_over_at_once_are_all_released(client: Client) -> None:
    await asyncio.gather(*(body(client, f"n{number}", linger=0.3) for number in range(350)))
    await until(lambda: not lingering(client).kept)
    session = client._core.session
    assert session is not None
    await until(lambda: not session.requests)
    assert len(session.deadlines) == 0


@pytest.mark.stores(
    MEMORY, *REAL, CLUSTER, SENTINEL, *POSTGRES
)  # fakeredis takes a second for so many scripts
async def test_leaving_the_client_releases_all_without_time_to_wait(store: Store) -> None:
    names = [f"n{number}" for number in range(300)]
    async with Client(store.source, **store.options, close_timeout=0.0) as client:
        await asyncio.gather(*(body(client, name) for name in names))
        assert len(lingering(client).kept) == 300
        linger = lingering(client)
    assert not linger.kept
    async with Client(store.source, **store.options) as other:
        for name in names:
            await (await other.lock(name).acquire(timeout=15)).release()  # its ttl was 30 s


async def test_leaving_the_client_while_a_body_goes_on(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    await body(client, "b")
    lock = client.lock("a", linger=LONG, on_lost="flag")
    await lock.__aenter__()
    await client.__aexit__(None, None, None)
    with pytest.raises(LockLost):
        await lock.__aexit__(None, None, None)
    await until_free(other, "a", "b")


# -- accidents ---------------------------------------------------------------------------------------


@pytest.mark.stores(MEMORY, "valkey9")
async def test_fork_has_nothing_of_it(client: Client) -> None:
    await body(client)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover - another process
        answer = b"wrong"
        try:
            coroutine = client.lock("a", linger=LONG).acquire()
            try:
                coroutine.send(None)
            except RuntimeError as error:
                answer = b"refused" if "fork" in str(error) else b"other"
        finally:
            os.write(write, answer)
            os._exit(0)
    os.close(write)
    answer = os.read(read, 100)
    os.close(read)
    os.waitpid(pid, 0)  # noqa: ASYNC222 - it has answered
    assert answer == b"refused"
    assert is_kept(client)
    assert (await body(client)).token == kept(client).token


@pytest.mark.stores("valkey9")
async def test_connection_lost_while_idle(
    proxy: FaultProxy, make_client: MakeClient, store: Store
) -> None:
    """A recall may have been missed: the client asks when it is back."""
    client, other = await make_client(proxy.url), await make_client()
    await body(client, ttl=20)
    await proxy.refuse()
    proxy.cut()
    task = asyncio.create_task(other.lock("a", timeout=25).acquire())
    await until_waiting(other, "a")
    await proxy.accept()
    await (await task).release()


@pytest.mark.stores("valkey9")
@pytest.mark.parametrize("timeout", [0, 0.6])
async def test_timeout_counts_once_when_the_store_is_silent(
    proxy: FaultProxy, make_client: MakeClient, timeout: float
) -> None:
    client = await make_client(proxy.url, close_timeout=0.0)
    await body(client)
    proxy.half_open()
    async with takes(at_most=8.0):  # in vain it would be told after 30 s
        with pytest.raises((BackendUnavailable, AcquireTimeout)):
            await body(client, ttl=7, timeout=timeout)
    session = client._core.session
    assert session is not None
    assert not any(one.state is State.ASKING for one in session.requests.values())


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.stores(QUORUM)
async def test_elsewhere_it_is_unsupported(client: Client) -> None:
    make: list[Callable[[], object]] = [
        lambda: client.lock("a", linger=1.0),
        lambda: client.rwlock("a", linger=1.0),
        lambda: client.multilock("a", linger=1.0),
    ]
    for describe in make:
        with pytest.raises(Unsupported, match="linger"):
            describe()


@pytest.mark.stores(MEMORY)
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"linger": -1}, ValueError),
        ({"linger": "1"}, TypeError),
        ({"linger": float("nan")}, ValueError),
        ({"linger": 1, "hold_at_least": 1}, ValueError),
        ({"linger": 1, "auto_extend": False}, ValueError),
    ],
)
async def test_options_that_are_refused(
    client: Client, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        client.lock("a", **options)


@pytest.mark.stores(MEMORY)
async def test_semaphores_and_elections_do_not_linger(client: Client) -> None:
    options: dict[str, Any] = {"linger": 1.0}
    with pytest.raises(ValueError, match="linger"):
        client.semaphore("a", 2, **options)
    with pytest.raises(ValueError, match="linger"):
        client.election("a", **options)


async def test_semaphore_of_the_same_name_is_another_thing(client: Client) -> None:
    await body(client)
    async with client.semaphore("a", 1, timeout=15):
        assert is_kept(client)
    await until_held(client, "a")
