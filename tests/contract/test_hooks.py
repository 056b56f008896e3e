"""What listeners hear of requests and leases: every beginning, and exactly one end of each."""

from __future__ import annotations

import asyncio
import collections
import gc
import logging
import random
from contextlib import suppress
from typing import Any

import pytest

import aiodlock
from aiodlock import testing

from ..conftest import MakeClient
from ..inside import session_of
from ..scenes import BRIEF, bounded, takes, until
from ..servers import Store

pytestmark = pytest.mark.stores("memory", "valkey9")


class Heard(aiodlock.Hooks):
    """Keeps what it hears: (event, request, the rest)."""

    def __init__(self) -> None:
        self.all: list[tuple[str, aiodlock.RequestInfo, tuple[Any, ...]]] = []

    @property
    def events(self) -> list[str]:
        return [event for event, _, _ in self.all]

    def acquiring(self, request: aiodlock.RequestInfo) -> None:
        self.all.append(("acquiring", request, ()))

    def acquired(self, request: aiodlock.RequestInfo, waited: float) -> None:
        self.all.append(("acquired", request, (waited,)))

    def not_acquired(
        self, request: aiodlock.RequestInfo, waited: float, error: BaseException
    ) -> None:
        self.all.append(("not_acquired", request, (waited, error)))

    def done(self, request: aiodlock.RequestInfo, waited: float) -> None:
        self.all.append(("done", request, (waited,)))

    def released(self, request: aiodlock.RequestInfo, held: float) -> None:
        self.all.append(("released", request, (held,)))

    def lost(self, request: aiodlock.RequestInfo, held: float, reason: str) -> None:
        self.all.append(("lost", request, (held, reason)))

    def extension_failed(self, request: aiodlock.RequestInfo, error: Exception) -> None:
        self.all.append(("extension_failed", request, (error,)))

    async def until(self, event: str) -> tuple[aiodlock.RequestInfo, tuple[Any, ...]]:
        async with bounded(10):
            while event not in self.events:
                await asyncio.sleep(0.005)
        return next((request, rest) for name, request, rest in self.all if name == event)


@pytest.fixture
def heard(client: aiodlock.Client) -> Heard:
    heard = Heard()
    client.add_hooks(heard)
    return heard


async def test_hold_is_told_from_its_beginning_to_its_end(
    client: aiodlock.Client, heard: Heard
) -> None:
    async with client.lock("x", owner="me") as lease:
        token = lease.token
        async with client.lock("x", owner="me"):  # another request of the same owner
            pass
    assert heard.events == ["acquiring", "acquired"] * 2 + ["released"] * 2
    (_, asked, _), (_, got, (waited,)) = heard.all[:2]
    _, over, (held,) = heard.all[-1]
    assert (asked.name, asked.mode, asked.kind, asked.owner) == ("x", "exclusive", "lock", "me")
    assert (asked.token, got.token) == (0, token)
    assert asked.id == got.id
    assert over == got
    assert 0 < waited < 5
    assert 0 < held < 5


async def test_entering_again_is_no_new_request(client: aiodlock.Client, heard: Heard) -> None:
    async with client.lock("x"), client.lock("x"):
        pass
    assert heard.events == ["acquiring", "acquired", "released"]


async def test_waiting_time_is_told(
    client: aiodlock.Client, heard: Heard, make_client: MakeClient
) -> None:
    other = await make_client()
    lease = await other.lock("x").acquire()
    waiting = asyncio.create_task(client.lock("x").acquire())
    async with bounded(10):
        while not (await other.inspect("x")).waiters:
            await asyncio.sleep(0.005)
    assert heard.events == ["acquiring"]
    await asyncio.sleep(0.1)
    await lease.release()
    await (await waiting).release()
    assert (await heard.until("acquired"))[1][0] >= 0.1


async def test_once_that_is_done_already_is_told_as_no_failure(
    client: aiodlock.Client, heard: Heard
) -> None:
    if not client._core.use().backend.capabilities.once:
        pytest.skip("nothing is recorded here")
    for first in (True, False):
        heard.all.clear()
        async with client.once("x", keep=60) as once:
            assert once.first is first
    assert heard.events == ["acquiring", "done"]
    (_, begun, _), (_, over, (waited,)) = heard.all
    assert over == begun
    assert waited >= 0


@pytest.mark.parametrize("how", ["timeout", "cancelled", "busy"])
async def test_request_that_is_given_up_is_told_with_the_error(
    client: aiodlock.Client, heard: Heard, how: str
) -> None:
    async with testing.hold(client, "x"):
        heard.all.clear()
        if how == "busy":
            with pytest.raises(aiodlock.WouldBlock):
                await client.lock("x").acquire_nowait()
        elif how == "timeout":
            with pytest.raises(aiodlock.AcquireTimeout):
                await client.lock("x", timeout=BRIEF).acquire()
        else:
            task = asyncio.create_task(client.lock("x").acquire())
            await heard.until("acquiring")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert heard.events == ["acquiring", "not_acquired"]
        _, (waited, error) = await heard.until("not_acquired")
        assert waited >= 0
        wanted = asyncio.CancelledError if how == "cancelled" else aiodlock.AcquireTimeout
        assert isinstance(error, wanted)


async def test_loss_is_told_instead_of_a_release(client: aiodlock.Client, heard: Heard) -> None:
    with pytest.raises(aiodlock.LockLost):  # noqa: PT012
        async with client.lock("x"):
            assert await client.break_lock("x") == 1
            await asyncio.sleep(10)
    assert heard.events == ["acquiring", "acquired", "lost"]
    assert (await heard.until("lost"))[1][1] == "broken"


@pytest.mark.scripted
async def test_loss_found_on_release_is_told(
    client: aiodlock.Client, heard: Heard, store: Store
) -> None:
    lease = await client.lock("x", auto_extend=False).acquire()
    await (await store.raw()).flushall()
    with pytest.raises(aiodlock.LockLost):
        await lease.release()
    assert heard.events == ["acquiring", "acquired", "lost"]
    assert (await heard.until("lost"))[1][1] == "gone"


@pytest.mark.parametrize("how", ["unconfirmed", "forgotten", "closed"])
async def test_other_ends_are_told_once_too(store: Store, how: str) -> None:
    heard = Heard()
    client = aiodlock.Client(store.source)
    client.add_hooks(heard)
    async with client:
        if how == "unconfirmed":
            async with client.lock("x", confirm_release=False):
                pass
        else:
            lease = await asyncio.create_task(client.lock("x").acquire())
            await asyncio.sleep(0)  # the loop forgets what it has handed on
            if how == "forgotten":
                with pytest.warns(ResourceWarning):  # noqa: PT031
                    del lease
                    gc.collect()
                await heard.until("released")
    end = "lost" if how == "closed" else "released"
    assert heard.events == ["acquiring", "acquired", end]


@pytest.mark.stores("valkey9")
async def test_failing_extension_and_its_loss_are_told(
    client: aiodlock.Client, heard: Heard, store: Store
) -> None:
    lease = await client.lock("x", ttl=0.4).acquire()
    assert store.server is not None
    store.server.pause()
    try:
        assert (await lease.wait_lost()).reason == "expired"
        with pytest.raises(aiodlock.LockLost):
            await lease.release()
    finally:
        store.server.resume()
    assert heard.events[:2] == ["acquiring", "acquired"]
    assert heard.events.count("lost") == 1
    assert "released" not in heard.events


async def test_every_beginning_has_exactly_one_end_whatever_happens(store: Store) -> None:
    heard = Heard()
    client = aiodlock.Client(store.source, ttl=0.5, close_timeout=0.5)
    client.add_hooks(heard)
    dice = random.Random(7)

    async def use(number: int) -> None:
        lock = client.lock(
            f"x{number % 5}",
            timeout=dice.choice([None, 0.0, 0.01, 0.1]),
            confirm_release=dice.random() < 0.7,
            max_hold=dice.choice([None, None, 0.01]),
        )
        async with lock:
            await asyncio.sleep(dice.random() * 0.01)
            if dice.random() < 0.1:
                await client.break_lock(lock.name)

    async with client:
        tasks = [asyncio.create_task(use(number)) for number in range(150)]
        for task in dice.sample(tasks, 60):
            await asyncio.sleep(0.002)
            task.cancel()
        for end in ("released", "lost", "not_acquired"):
            await heard.until(end)
    await asyncio.gather(*tasks, return_exceptions=True)
    per_request: dict[str, list[str]] = collections.defaultdict(list)
    for event, request, _ in heard.all:
        if event != "extension_failed":
            per_request[request.id].append(event)
    lives = {tuple(events) for events in per_request.values()}
    assert lives <= {
        ("acquiring", "not_acquired"),
        ("acquiring", "acquired", "released"),
        ("acquiring", "acquired", "lost"),
    }
    assert len(lives) == 3
    assert len(per_request) >= 100


@pytest.mark.stores("valkey9")
async def test_release_that_is_never_answered_is_told_when_the_client_is_left(store: Store) -> None:
    heard = Heard()
    client = aiodlock.Client(store.source, close_timeout=0.1)
    client.add_hooks(heard)
    assert store.server is not None
    async with client:
        lease = await client.lock("x").acquire()
        store.server.pause()
        releasing = asyncio.create_task(lease.release())
        await asyncio.sleep(0)
        releasing.cancel()
        await asyncio.wait({releasing})
        assert releasing.cancelled()
        assert heard.events == ["acquiring", "acquired"]
    assert heard.events == ["acquiring", "acquired", "released"]


class Broken(aiodlock.Hooks):
    """Raises whenever something is told that is of some weight."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def acquired(self, *_: object) -> None:
        raise self.error

    def lost(self, *_: object) -> None:
        raise self.error


# What ``result()`` of a cancelled future raises is no cancellation of the task that the hook runs in.
RAISED = pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError])


@RAISED
async def test_hook_that_raises_does_no_harm(
    client: aiodlock.Client,
    heard: Heard,
    caplog: pytest.LogCaptureFixture,
    error: type[BaseException],
) -> None:
    client.add_hooks(Broken(error))
    async with client.lock("x") as lease:
        assert lease.held
    assert [getattr(record, "event", None) for record in caplog.records] == ["hook_failed"]
    assert heard.events == ["acquiring", "acquired", "released"]


async def test_hooks_hear_of_what_begins_after_they_were_added(client: aiodlock.Client) -> None:
    heard = Heard()
    async with client.lock("x"):
        client.add_hooks(heard)
    assert heard.all == []
    async with client.lock("x"):
        pass
    assert heard.events == ["acquiring", "acquired", "released"]


def test_hooks_must_be_hooks() -> None:
    with pytest.raises(TypeError, match="Hooks"):
        aiodlock.Client("memory://").add_hooks(print)  # type: ignore[arg-type]


async def test_log_records_have_a_name_and_the_lock(
    client: aiodlock.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiodlock")
    lease = await client.lock("x").acquire()
    testing.expire(lease)
    with pytest.raises(aiodlock.LockLost):
        await lease.release()
    (record,) = [r for r in caplog.records if getattr(r, "event", None) == "lost"]
    assert record.name == "aiodlock"
    assert record.levelname == "WARNING"
    assert vars(record)["lock"] == "x"
    assert vars(record)["reason"] == "expired"


@RAISED
async def test_losses_behind_a_hook_that_raises_are_told_on_time(
    client: aiodlock.Client, error: type[BaseException]
) -> None:
    async def hold(name: str, max_hold: float) -> None:
        async with takes(at_least=max_hold - 0.1, at_most=max_hold + 0.1):
            with suppress(aiodlock.LockLost):
                async with client.lock(name, max_hold=max_hold):
                    await asyncio.sleep(5)

    client.add_hooks(Broken(error))
    await asyncio.gather(hold("a", 0.2), hold("b", 0.4))


@RAISED
async def test_client_with_a_hook_that_raises_leaves_nothing_behind(
    make_client: MakeClient, client: aiodlock.Client, error: type[BaseException]
) -> None:
    leaving = await make_client()
    leaving.add_hooks(Broken(error))
    for name in "abc":
        await leaving.lock(name).acquire()
    await leaving.__aexit__(None, None, None)
    for name in "abc":
        assert not await client.lock(name).locked()


class Exiting(aiodlock.Hooks):
    """Ends the program, which somebody catches, when a lock was acquired."""

    class Exit(BaseException):
        """As ``KeyboardInterrupt``, which would end the loop, too."""

    def __init__(self) -> None:
        self.has_exited = False

    def acquired(self, *_: object) -> None:
        if not self.has_exited:
            self.has_exited = True
            raise self.Exit


@pytest.mark.parametrize("how", ["acquire", "block"])
@pytest.mark.parametrize("lingers", [False, True])
async def test_task_that_goes_on_after_a_hook_has_raised_an_exit_has_nothing(
    client: aiodlock.Client, how: str, lingers: bool
) -> None:
    lock = client.lock("name", linger=30.0 if lingers else 0.0)
    if lingers:
        async with lock:
            pass
    client.add_hooks(Exiting())
    with pytest.raises(Exiting.Exit):
        await (lock.acquire() if how == "acquire" else lock.__aenter__())
    await until(lambda: not session_of(client).requests, "the end of the lease")
    async with lock as lease:
        assert lease.held


def test_hook_that_nobody_would_await_is_refused() -> None:
    class Async(aiodlock.Hooks):
        async def lost(  # type: ignore[override]
            self, request: aiodlock.RequestInfo, held: float, reason: str
        ) -> None:
            raise NotImplementedError

    with pytest.raises(TypeError, match=r"lost of .* is async"):
        aiodlock.Client("memory://").add_hooks(Async())
