"""Every public function and method has an example in its docstring, and every example runs."""

from __future__ import annotations

import ast
import asyncio
import inspect
import pydoc
import re
import textwrap
from collections.abc import Iterator
from types import CodeType
from typing import Any

import pytest
from fakeredis.aioredis import FakeRedis

import aiodlock
from aiodlock import sync

from .pages import ROOT

_EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)
_SHOWN = re.compile(r"^<!-- reference: ([\w.]+)(?: bare)? -->$", re.MULTILINE)
#: Values that are only read.
_RECORDS = {"LockInfo", "HolderInfo", "WaiterInfo", "RecordedInfo", "RequestInfo"}
#: What is shown in the example of its class.
_TOLD_ELSEWHERE = re.compile(r"\.(Hooks\.\w+|MultiLease\.(get|keys|items|values))$")


def documented() -> Iterator[tuple[str, Any]]:
    """Give everything that the reference shows and that people call."""
    for page in ROOT.glob("docs/reference/*.md"):
        for path in _SHOWN.findall(page.read_text()):
            value = pydoc.locate(path)
            if inspect.isfunction(value):
                yield path, value
            elif inspect.isclass(value) and is_used(value):
                yield from methods(path, value)


def is_used(kind: type) -> bool:
    return not issubclass(kind, BaseException) and kind.__name__ not in _RECORDS


def methods(path: str, kind: type) -> Iterator[tuple[str, Any]]:
    yield path, kind
    for name, value in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") and not _TOLD_ELSEWHERE.search(f"{path}.{name}"):
            yield f"{path}.{name}", value


DOCUMENTED = dict(documented())


def examples(value: Any) -> list[str]:
    return [textwrap.dedent(code) for code in _EXAMPLE.findall(inspect.getdoc(value) or "")]


def test_the_public_names_are_found() -> None:
    some = {"Client.lock", "Lock.acquire", "Lease.extend", "Election.lead", "testing.hold"}
    some |= {"otel.instrument", "fastapi.Locked", "fencing.RedisGuard.set", "sync.Lease.release"}
    assert {f"aiodlock.{name}" for name in some} <= set(DOCUMENTED)


@pytest.mark.parametrize("name", DOCUMENTED)
async def test_docstring_has_an_example_that_runs(name: str) -> None:
    shown = examples(DOCUMENTED[name])
    assert shown, f"{name} has no example"
    for code in shown:
        if ".sync." in name:
            await asyncio.wait_for(asyncio.to_thread(run_in_thread, code, name), 30)
        else:
            await asyncio.wait_for(run(code, name), 30)


async def run(code: str, name: str) -> None:
    async with (
        aiodlock.Client("memory://") as client,
        FakeRedis() as redis,
        aiodlock.Client("memory://") as holder,
        holder.lock("given") as lease,
        holder.multilock("given too", "and") as leases,
    ):
        given = {"aiodlock": aiodlock, "asyncio": asyncio, "client": client, "redis": redis}
        given |= {"lease": lease, "leases": leases}
        result = eval(compiled(code, name, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), given)
        if inspect.iscoroutine(result):
            await result


def run_in_thread(code: str, name: str) -> None:
    with (
        sync.Client("memory://") as locks,
        sync.Client("memory://") as holder,
        holder.lock("given") as lease,
        holder.multilock("given too", "and") as leases,
    ):
        given = {"sync": sync, "locks": locks, "lease": lease, "leases": leases}
        eval(compiled(code, name, 0), given)


def compiled(code: str, name: str, flags: int) -> CodeType:
    shown = code.replace("redis://localhost:6379/0", "memory://")
    made: CodeType = compile(shown, name, "exec", flags=flags, dont_inherit=True)
    return made
