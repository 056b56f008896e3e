"""The scope of a body: one cancellation, known again, and nobody else's taken for it."""

from __future__ import annotations

import asyncio

import pytest

from aiodlock._scope import BodyScope


def _scope() -> BodyScope:
    task = asyncio.current_task()
    assert task is not None
    return BodyScope(task)


async def test_body_is_cancelled_once_and_its_clean_up_may_await() -> None:
    scope = _scope()
    cleaned = False

    async def body() -> None:
        nonlocal cleaned
        try:
            scope.cancel()
            scope.cancel()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.001)
            cleaned = True

    with pytest.raises(asyncio.CancelledError) as ended:
        await body()
    assert cleaned
    assert scope.leave(ended.type)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_body_that_is_left_in_the_same_turn_is_not_cancelled() -> None:
    scope = _scope()
    scope.cancel()
    assert not scope.leave(None)
    await asyncio.sleep(0.001)


async def test_scope_that_was_not_used_claims_no_cancellation() -> None:
    assert not _scope().leave(asyncio.CancelledError)


@pytest.mark.parametrize("error", [None, ValueError])
async def test_body_that_ended_otherwise_is_not_said_to_be_cancelled(
    error: type[BaseException] | None,
) -> None:
    scope = _scope()
    scope.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.Event().wait()
    assert not scope.leave(error)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_cancellation_from_outside_is_not_taken_for_its_own() -> None:
    own: list[bool] = []

    async def body() -> None:
        scope = _scope()
        scope.cancel()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as ended:
            own.append(scope.leave(type(ended)))
            raise

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert own == [False]
    assert task.cancelled()
