"""once: at most one success on record, told to everybody else."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any, Literal

import pytest

from aiodlock import (
    AcquireTimeout,
    Client,
    DeadlockError,
    LockLost,
    NotHeld,
    Unsupported,
)
from aiodlock.backends.kept_backend import KeptBackend

from ..conftest import MakeClient
from ..scenes import PATIENCE, bounded, until, until_waiting
from ..servers import CLUSTER, ETCD, MEMORY, POSTGRES, SCRIPTED, SENTINEL, Store

pytestmark = pytest.mark.stores(MEMORY, *SCRIPTED, *POSTGRES, *ETCD, CLUSTER, SENTINEL)


async def enter(client: Client, name: str = "a", **options: Any) -> tuple[bool, object]:
    async with client.once(name, keep=60, **options) as once:
        if once.first:
            once.result = "own"
        return once.first, once.result


async def fail(client: Client, name: str = "a") -> None:
    with pytest.raises(ValueError, match="failed"):
        async with client.once(name, keep=60):
            raise ValueError("failed")


async def waiting(client: Client, number: int, name: str = "a") -> None:
    async def all_wait() -> bool:
        return len((await client.inspect(name, kind="once")).waiters) == number

    await until(all_wait)


_RESULTS: list[str | bytes | None] = [
    *(None, "", "done", "charged 🔒"),
    *(b"", b"done", b"\x00\r\n\xff", "x" * 65536),
]


async def test_result_keeps_its_type_for_everybody(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    for number, result in enumerate(_RESULTS):
        name = f"order:{number}"
        async with client.once(name, keep=60) as once:
            assert once.first
            assert once.lease is not None
            assert once.lease.held
            if result is not None:
                once.result = result
        for one in (client, other):
            async with one.once(name, keep=60) as again:
                assert (again.first, again.lease) == (False, None)
                assert again.result == result
                assert type(again.result) is type(result)


async def test_success_ends_every_wait_on_several_clients(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    async with client.once("a", keep=60) as once:
        tasks = [asyncio.create_task(enter(one)) for one in (client, other) for _ in range(4)]
        await waiting(client, 8)
        once.result = b"done"
    async with asyncio.timeout(2.5):  # sooner than a waiter's next extension
        assert await asyncio.gather(*tasks) == [(False, b"done")] * 8
    assert (await client.inspect("a", kind="once")).waiters == ()


async def test_no_deadline_is_kept_of_a_wait_that_a_success_has_ended(
    make_client: MakeClient,
) -> None:
    """A wait inside of another block is watched for three ttls; that request stayed for as long."""
    client, other = await make_client(), await make_client()

    async def wait_inside() -> None:
        async with client.lock("b"):
            assert await enter(client) == (False, "own")

    async with other.once("a", keep=60) as once:
        task = asyncio.create_task(wait_inside())
        await waiting(client, 1)
        once.result = "own"
    await task
    assert client._core.session is not None
    assert len(client._core.session.deadlines) == 0


async def test_success_is_told_to_many_waiters_of_a_long_name(make_client: MakeClient) -> None:
    first, waits = await make_client(ttl=30), await make_client(ttl=30, waiter_ttl=30)
    # The ids of all in one message of 6,800 bytes, and with the longest name there is.
    assert waits._core.session is not None
    name, id_of_one = "ж" * 256, f"{waits._core.session.backend.label}-999,"
    many = 6800 // len(id_of_one)
    async with first.once(name, keep=60) as once:
        tasks = [asyncio.create_task(enter(waits, name)) for _ in range(many)]
        await until_waiting(first, name, many, kind="once")
        once.result = "sent"
    async with bounded(60):
        assert await asyncio.gather(*tasks) == [(False, "sent")] * many


async def test_waiters_of_a_success_ask_once_and_are_forgotten(make_client: MakeClient) -> None:
    first, other = await make_client(), await make_client()
    calls: list[str] = []
    async with first.once("a", keep=60) as once:
        waiting = [asyncio.create_task(enter(other)) for _ in range(3)]
        await until_waiting_once(other, 3)
        note_calls(other, calls)
        once.result = "done"
    assert await asyncio.gather(*waiting) == [(False, "done")] * 3
    # At most: the answer to an extension that was due may tell of it first.
    assert set(calls) == {"extend"}
    assert len(calls) <= 3
    assert other._core.session is not None
    assert not other._core.session.requests
    assert (await other.inspect("a", kind="once")).waiters == ()


async def until_waiting_once(client: Client, number: int) -> None:
    async def queued() -> bool:
        return len((await client.inspect("a", kind="once")).waiters) == number

    await until(queued)


def note_calls(client: Client, calls: list[str]) -> None:
    """Note what the client sends to its store about requests from now on."""
    session = client._core.session
    assert session is not None
    assert isinstance(session.backend, KeptBackend)
    store: Any = session.backend.store
    for name in ("acquire", "extend", "leave", "leave_later"):
        setattr(store, name, noting(name, getattr(store, name), calls))


def noting(name: str, call: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def noted(*args: Any, **options: Any) -> Any:
        calls.extend([name] * (len(args[0]) if name == "extend" else 1))
        return call(*args, **options)

    return noted


async def test_failure_records_nothing_and_the_next_is_first(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    with pytest.raises(ValueError, match="failed"):  # noqa: PT012
        async with client.once("a", keep=60) as once:
            task = asyncio.create_task(enter(other))
            await waiting(client, 1)
            once.result = "never seen"
            raise ValueError("failed")
    assert await task == (True, "own")
    assert await enter(client) == (False, "own")


async def test_cancelled_body_records_nothing(client: Client) -> None:
    async def body() -> None:
        async with client.once("a", keep=60):
            await asyncio.sleep(60)

    task = asyncio.create_task(body())
    await until(lambda: _held(client))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await enter(client) == (True, "own")


async def _held(client: Client) -> bool:
    return bool((await client.inspect("a", kind="once")).holders)


@pytest.mark.parametrize("on_lost", ["cancel", "flag"])
async def test_broken_body_records_nothing(
    make_client: MakeClient, on_lost: Literal["cancel", "flag"]
) -> None:
    client, other = await make_client(), await make_client()
    with pytest.raises(LockLost):  # noqa: PT012
        async with client.once("a", keep=60, on_lost=on_lost) as once:
            assert await other.break_lock("a", kind="once") == 1
            assert once.lease is not None
            await once.lease.wait_lost()
    assert await enter(other) == (True, "own")


async def test_releasing_by_hand_records_nothing(client: Client) -> None:
    with pytest.raises(NotHeld):  # noqa: PT012
        async with client.once("a", keep=60) as once:
            assert once.lease is not None
            await once.lease.release()
    assert await enter(client) == (True, "own")


async def test_record_ends_with_keep(client: Client) -> None:
    async with client.once("a", keep=0.3):
        pass

    async def first_again() -> bool:
        return (await enter(client))[0]

    await until(first_again)


async def test_forget_takes_back_and_touches_no_running_body(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    await enter(client)
    assert await other.forget("a")
    async with client.once("a", keep=60) as once:
        assert once.first
        assert not await other.forget("a")
        once.result = "second"
    assert await enter(other) == (False, "second")


async def test_entering_again_in_its_body_is_a_deadlock(client: Client) -> None:
    async with client.once("a", keep=60) as once:
        with pytest.raises(DeadlockError):
            await enter(client)
        async with client.lock("a"), client.once("b", keep=60):
            pass  # other things
        assert once.first


async def test_it_does_not_wait_longer_than_asked(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    async with client.once("a", keep=60):
        for timeout, why in ((0, "is held"), (0.5, "was not granted within 0.5 s:")):
            with pytest.raises(AcquireTimeout, match=why):
                await enter(other, timeout=timeout)
    assert await enter(other, timeout=0) == (False, None)


async def test_all_kinds_are_listed_and_told_apart(client: Client) -> None:
    async with client.once("a", keep=60), client.lock("a"), client.semaphore("a", 2):
        listed = [(info.name, info.kind) async for info in client.locks("a*")]
        assert sorted(listed) == [("a", "lock"), ("a", "once"), ("a", "semaphore")]
        assert [info.kind async for info in client.locks(kind="once")] == ["once"]
        assert [info.kind async for info in client.locks(kind="lock")] == ["lock"]
        info = await client.semaphore("a", 2).inspect()
        assert (info.kind, len(info.holders)) == ("semaphore", 1)


_BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"owner": "me"}, ValueError),
    ({"owner": ""}, ValueError),
    ({"owner": 0}, ValueError),
    ({"linger": 1.0}, ValueError),
    ({"linger": -1.0}, ValueError),
    ({"linger": None}, TypeError),
    ({"linger": False}, TypeError),
    ({"confirm_release": False}, ValueError),
    ({"confirm_release": None}, TypeError),
    ({"confirm_release": 1}, TypeError),
    ({"keep": 0}, ValueError),
    ({"keep": float("inf")}, ValueError),
    ({"keep": "60"}, TypeError),
    ({"hold_at_least": 60.5}, ValueError),
    ({"ttll": 3}, TypeError),
]


async def test_bad_options_are_refused(client: Client) -> None:
    def refused(options: dict[str, Any], error: type[Exception]) -> bool:
        try:
            client.once("a", **{"keep": 60, **options})
        except error:
            return True
        return False

    assert [one for one in _BAD_OPTIONS if not refused(*one)] == []


async def test_defaults_of_options_without_a_meaning_are_accepted(client: Client) -> None:
    options: dict[str, Any] = {"owner": None, "linger": 0, "confirm_release": True}
    async with client.once("a", keep=60, **options) as once:
        assert once.first


@pytest.mark.parametrize("unfit", [b"x" * 65537, "é" * 32769, "\ud800"])
async def test_result_that_cannot_be_kept_is_no_reason_to_do_it_again(
    make_client: MakeClient, unfit: str | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    client, other = await make_client(), await make_client()
    async with client.once("a", keep=60) as once:
        once.result = unfit
        assert once.result == unfit
    (warning,) = [r for r in caplog.records if getattr(r, "event", "") == "result_not_kept"]
    assert "'a'" in warning.getMessage()
    async with other.once("a", keep=60) as once:
        assert (once.first, once.result) == (False, None)


async def test_result_of_a_wrong_type_raises_and_the_success_is_on_record(
    client: Client,
) -> None:
    with pytest.raises(TypeError, match="must be a str"):
        async with client.once("a", keep=60) as once:
            once.result = {"receipt": 7}  # type: ignore[assignment]
    async with client.once("a", keep=60) as once:
        assert (once.first, once.result) == (False, None)

    # Another failure of the body is one.
    async def fail() -> None:
        async with client.once("b", keep=60) as once:
            with pytest.raises(TypeError):
                once.result = 42  # type: ignore[assignment]
            raise LookupError

    with pytest.raises(LookupError):
        await fail()
    async with client.once("b", keep=60) as once:
        assert once.first


async def test_fingerprint_is_kept_beside_the_result(client: Client) -> None:
    for number, result in enumerate(_RESULTS):
        name = f"order:{number}"
        async with client.once(name, keep=60) as once:
            assert once.fingerprint is None
            once.fingerprint = "of the request é"
            once.result = result
            with pytest.raises(TypeError, match="must be a str"):
                once.fingerprint = b"x"  # type: ignore[assignment]
            with pytest.raises(ValueError, match="255 bytes"):
                once.fingerprint = "x" * 256
        async with client.once(name, keep=60) as once:
            assert (once.result, once.fingerprint) == (result, "of the request é")
            with pytest.raises(RuntimeError):
                once.fingerprint = "late"


async def test_bad_results_are_refused_on_assignment(client: Client) -> None:
    async with client.once("a", keep=60) as once:
        for wrong in (42, ["x"]):
            with pytest.raises(TypeError):
                once.result = wrong  # type: ignore[assignment]
        once.result = "fine"
    async with client.once("a", keep=60) as once:
        with pytest.raises(RuntimeError):
            once.result = "late"
        assert once.result == "fine"


async def test_once_per_calls_the_function_once_per_name(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    calls: list[object] = []

    def decorated(one: Client) -> Any:
        @one.once_per("report:{day}", keep=60)
        async def report(day: object, *, loud: bool = False) -> object:
            calls.append(day)
            return f"sent {day}" if day != "nothing" else 42

        return report

    for one in (client, other):
        assert await decorated(one)("monday") == "sent monday"
        assert await decorated(one)(day="tuesday") == "sent tuesday"
    assert await decorated(client)("nothing") == 42
    assert await decorated(other)("nothing") is None
    key = uuid.uuid4()
    assert await decorated(client)(key) == await decorated(other)(key)
    assert calls == ["monday", "tuesday", "nothing", key]
    with pytest.raises(TypeError):
        await decorated(client)(4.2)


@pytest.mark.parametrize(
    "result",
    ["x" * 65537, b"x" * 65537, "é" * 40_000, "\ud800"],
    ids=["str", "bytes", "UTF-8", "surrogates"],
)
async def test_function_whose_result_cannot_be_kept_is_done_once_too(
    client: Client, result: object
) -> None:
    calls: list[int] = []

    @client.once_per("report:{day}", keep=60)
    async def report(day: int) -> object:
        calls.append(day)
        return result

    assert await report(1) == result
    assert await report(1) is None
    assert calls == [1]


async def test_hold_as_long_as_the_record_is_taken(client: Client) -> None:
    with pytest.raises(OSError, match="failed"):
        async with client.once("a", keep=60, hold_at_least=60):
            raise OSError("failed")
    with pytest.raises(AcquireTimeout):
        async with client.once("a", keep=60, timeout=0):
            pass
    await client.break_lock("a", kind="once")
    async with client.once("a", keep=60, hold_at_least=60) as once:
        assert once.first
    async with client.once("a", keep=60, timeout=0) as once:
        assert not once.first


async def test_one_object_serves_many_tasks(client: Client) -> None:
    once = client.once("a", keep=60)
    done = []

    async def click() -> None:
        async with once as run:
            if run.first:
                await asyncio.sleep(0.01)
                done.append(1)
                run.result = "ok"
        assert run.result == "ok"

    async with asyncio.TaskGroup() as tasks:
        for _ in range(20):
            tasks.create_task(click())
    assert done == [1]


async def test_block_that_is_not_the_first_may_be_left_in_another_task(client: Client) -> None:
    await enter(client)
    once = client.once("a", keep=60)
    await asyncio.create_task(once.__aenter__())  # as fixtures do
    await asyncio.create_task(once.__aexit__(None, None, None))
    with pytest.raises(RuntimeError, match="0 blocks of it are open"):
        await once.__aexit__(None, None, None)


async def test_blocks_of_one_object_and_task_are_left_in_the_opposite_order(client: Client) -> None:
    await enter(client)
    once = client.once("a", keep=60)
    outer = await once.__aenter__()
    await client.forget("a")
    inner = await once.__aenter__()
    assert (outer.first, inner.first) == (False, True)
    inner.result = "again"
    await once.__aexit__(None, None, None)  # the inner one
    assert await enter(client) == (False, "again")
    await once.__aexit__(None, None, None)


async def test_body_that_waits_for_who_waits_for_it_is_a_deadlock(make_client: MakeClient) -> None:
    one, two = await make_client(deadlock_after=0.3), await make_client(deadlock_after=0.3)
    both = asyncio.Barrier(2)

    async def do_it(client: Client) -> None:
        async with client.once("order", keep=60) as once:
            await both.wait()
            async with client.lock("row"):
                once.result = "done"

    async def use_it(client: Client) -> None:
        async with client.lock("row"):
            await both.wait()
            await until_waiting(two, "row")  # so this is the younger one
            with pytest.raises(DeadlockError) as error:
                async with client.once("order", keep=60):
                    raise AssertionError("it is being done")
            assert [member[0] for member in error.value.cycle] == ["order", "row"]

    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(do_it(one), use_it(two))
    assert await enter(two, "order") == (False, "done")


@pytest.mark.stores(MEMORY)
async def test_quorum_has_none(store: Store) -> None:
    client = Client(["memory://"] * 3)
    for call in (
        lambda: client.once("a", keep=60),
        lambda: client.once_per("a", keep=60),
        lambda: client.lock("a", hold_at_least=1),
    ):
        with pytest.raises(Unsupported):
            call()
    with pytest.raises(Unsupported):
        await client.forget("a")


async def test_name_is_entered_again_in_its_own_body_once_its_lease_was_released(
    client: Client,
) -> None:
    run = client.once("x", keep=60)
    first = await run.__aenter__()
    assert first.lease is not None
    await first.lease.release()
    async with client.once("x", keep=60) as again:
        assert again.first
    with pytest.raises(NotHeld):
        await run.__aexit__(None, None, None)
