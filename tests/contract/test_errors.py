"""The tree of errors: bases, names, reasons, pickling, and what their messages say."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiodlock
from aiodlock.testing import lose

from ..conftest import MakeClient
from ..scenes import BRIEF, held_elsewhere, until_held
from ..servers import BEYOND

pytestmark = pytest.mark.stores("memory", "fakeredis", "valkey9", *BEYOND)

NAME = "order:42"

TREE: dict[type[Exception], tuple[type[BaseException], ...]] = {
    aiodlock.AcquireTimeout: (aiodlock.LockError, TimeoutError),
    aiodlock.WouldBlock: (aiodlock.LockError,),
    aiodlock.LockLost: (aiodlock.LockError,),
    aiodlock.NotHeld: (aiodlock.LockError, RuntimeError),
    aiodlock.DeadlockError: (aiodlock.LockError, RuntimeError),
    aiodlock.ClientClosed: (aiodlock.LockError, RuntimeError),
    aiodlock.Unsupported: (aiodlock.LockError, ValueError),
    aiodlock.BackendError: (aiodlock.LockError,),
    aiodlock.BackendUnavailable: (aiodlock.BackendError, ConnectionError),
}


@pytest.mark.parametrize("error", TREE)
def test_bases_are_exactly_those_of_the_tree(error: type[Exception]) -> None:
    assert set(error.__bases__) == set(TREE[error])


def test_lock_error_is_an_ordinary_exception() -> None:
    assert aiodlock.LockError.__bases__ == (Exception,)


def test_would_block_is_no_timeout() -> None:
    assert not issubclass(aiodlock.WouldBlock, TimeoutError)


async def raised_by_use(client: aiodlock.Client) -> AsyncIterator[aiodlock.LockError]:
    """Give one of each error that concerns a lock, as a user meets it."""
    lock = client.lock(NAME)
    async with held_elsewhere(lock):
        for attempt in (
            lock.acquire(timeout=0),
            lock.acquire(timeout=BRIEF),
            lock.acquire_nowait(),
        ):
            with pytest.raises(aiodlock.LockError) as raised:
                await attempt
            yield raised.value
    with pytest.raises(aiodlock.NotHeld) as not_held:
        await lock.release()
    yield not_held.value
    async with client.rwlock(NAME).read:
        with pytest.raises(aiodlock.DeadlockError) as deadlock:
            await lock.acquire()
        yield deadlock.value
    lease = await lock.acquire()
    await lease.release()
    with pytest.raises(aiodlock.NotHeld) as twice:
        await lease.release()
    yield twice.value


async def test_errors_of_use_carry_and_quote_the_name_and_pickle(client: aiodlock.Client) -> None:
    met = [error async for error in raised_by_use(client)]
    assert [type(error) for error in met] == [
        aiodlock.AcquireTimeout,
        aiodlock.AcquireTimeout,
        aiodlock.WouldBlock,
        aiodlock.NotHeld,
        aiodlock.DeadlockError,
        aiodlock.NotHeld,
    ]
    for error in met:
        check(error)


def check(error: aiodlock.LockError, name: str = NAME) -> None:
    assert error.name == name
    assert repr(name) in str(error)
    for twin in (
        *(
            pickle.loads(pickle.dumps(error, protocol))
            for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
        ),
        copy.copy(error),
        copy.deepcopy(error),
    ):
        assert type(twin) is type(error)
        assert twin.name == error.name
        assert str(twin) == str(error)
        assert twin.args == error.args
        assert getattr(twin, "reason", None) == getattr(error, "reason", None)


@pytest.mark.parametrize(
    "reason", ["expired", "broken", "taken_over", "gone", "max_hold", "closed"]
)
async def test_lock_lost_of_every_reason_pickles(client: aiodlock.Client, reason: Any) -> None:
    lease = await client.lock(NAME).acquire()
    await lose(lease, reason)
    lost = await lease.wait_lost()
    assert lost.reason == reason
    check(lost)
    assert str(lease.token) in str(lost)
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_client_closed_names_the_lock_that_was_waited_for(make_client: MakeClient) -> None:
    client = await make_client()
    async with held_elsewhere((await make_client()).lock(NAME)):
        waiting = asyncio.create_task(client.lock(NAME).acquire())
        await until_held(client, NAME)
        await client.__aexit__(None, None, None)
        with pytest.raises(aiodlock.ClientClosed) as closed:
            await waiting
        check(closed.value)
        await client.__aenter__()


async def test_an_odd_name_is_quoted_as_repr(client: aiodlock.Client) -> None:
    name = "a'b\"c\n{}\x00😀"
    lock = client.lock(name)
    async with held_elsewhere(lock):
        with pytest.raises(aiodlock.WouldBlock) as raised:
            await lock.acquire_nowait()
    check(raised.value, name)


@pytest.mark.parametrize("error", [*TREE, aiodlock.LockError])
def test_every_error_can_be_made_with_a_message_alone(error: type[aiodlock.LockError]) -> None:
    """Whoever writes fakes of the client makes errors by hand."""
    lost = aiodlock.LockLost("text", reason="gone")
    made = lost if error is aiodlock.LockLost else error("text")
    assert "text" in str(made)
    assert type(pickle.loads(pickle.dumps(made))) is error
