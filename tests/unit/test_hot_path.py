"""What each acquire and release does so often that it must be cheap."""

from __future__ import annotations

import ast
import asyncio
import gc
import weakref
from pathlib import Path

import pytest

import aiodlock
from aiodlock import sync
from aiodlock._client import Client
from aiodlock._lease import Lease
from aiodlock._lock import Lock
from aiodlock._model import Terms
from aiodlock._options import LockOptions
from aiodlock._request import Request, State
from aiodlock._session import Session
from aiodlock.backends.keeper import Keeper
from aiodlock.backends.kept_place import KeptPlace
from aiodlock.backends.stage import Stage

PACKAGE = Path(aiodlock.__file__).parent


@pytest.mark.parametrize(
    "kind",
    [Client, Keeper, KeptPlace, Lease, Lock, LockOptions, Request, Session, Terms, sync.Lock],
)
def test_attributes_are_read_without_a_hook(kind: type) -> None:
    """With ``__getattr__`` on its class, each attribute of a lock took ten times as long to read."""
    for base in kind.__mro__[:-1]:
        assert not {"__getattr__", "__getattribute__"} & vars(base).keys(), base


def test_states_are_read_as_globals() -> None:
    """On Python 3.11 an attribute of an Enum takes a hundred times as long, and a pair reads thirty."""
    enums = {State.__name__, Stage.__name__, "_State"}
    modules = [*PACKAGE.glob("_*.py"), *PACKAGE.glob("backends/ke*.py")]
    modules += PACKAGE.glob("backends/zookeeper/*.py")
    gc.disable()  # a finalizer that formats a traceback parses, too: CPython 3.11 takes that for an error
    try:
        trees = {module: ast.parse(module.read_text()) for module in modules}
    finally:
        gc.enable()
    read = [
        f"{module.name}:{node.lineno}: {ast.unparse(node)}"
        for module, tree in trees.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in enums
    ]
    assert len(modules) > 20
    assert not read, "import the state itself"


async def test_time_out_that_was_caught_is_freed_without_the_collector() -> None:
    """Thousands may time out at once: a full run of the collector would stall the loop for long."""

    async def time_out() -> weakref.ref[aiodlock.AcquireTimeout]:
        with pytest.raises(aiodlock.AcquireTimeout):
            await lock.acquire(timeout=0.01)  # what is done once only has been done
        try:
            await lock.acquire(timeout=0.01)
        except aiodlock.AcquireTimeout as elapsed:
            return weakref.ref(elapsed)
        raise AssertionError("it was granted")

    async with aiodlock.Client("memory://") as client:
        lock = client.lock("x")
        async with lock:
            gc.collect()
            gc.disable()
            try:
                elapsed = await asyncio.create_task(time_out())
                assert elapsed() is None
            finally:
                gc.enable()


@pytest.mark.parametrize("how", ["time out", "cancel"])
async def test_task_that_an_acquire_has_ended_is_freed_without_the_collector(how: str) -> None:
    async with aiodlock.Client("memory://") as client:
        lock = client.lock("x")

        async def begin() -> asyncio.Task[aiodlock.Lease]:
            task = asyncio.create_task(lock.acquire(timeout=0.01 if how == "time out" else None))
            await asyncio.sleep(0.02)
            task.cancel() if how == "cancel" else None
            await asyncio.wait({task})
            assert how == "cancel" or isinstance(task.exception(), aiodlock.AcquireTimeout)
            return task

        async with lock:
            await begin()  # what is done once only has been done
            gc.collect()
            gc.disable()
            try:
                ended = weakref.ref(await begin())
                assert ended() is None
            finally:
                gc.enable()
