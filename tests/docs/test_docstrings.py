"""Every public function and method has an example in its docstring, and every example runs."""

from __future__ import annotations

import ast
import asyncio
import inspect
import pydoc
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from fakeredis.aioredis import FakeRedis

import aiodlock

from .pages import ROOT

_EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)
#: Values that are only read.
_RECORDS = {"LockInfo", "HolderInfo", "WaiterInfo", "RequestInfo"}
#: What is shown in the example of its class.
_TOLD_ELSEWHERE = re.compile(r"Hooks\.\w+|MultiLease\.(get|keys|items|values)")


def documented() -> Iterator[tuple[str, Any]]:
    """Give everything that the reference shows and that people call."""
    for page in ROOT.glob("docs/reference/*.md"):
        for path in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE):
            value = pydoc.locate(path)
            name = path.rpartition(".")[2]
            if inspect.isfunction(value):
                yield name, value
            elif inspect.isclass(value) and is_used(value):
                yield from methods(value)


def is_used(kind: type) -> bool:
    return not issubclass(kind, BaseException) and kind.__name__ not in _RECORDS


def methods(kind: type) -> Iterator[tuple[str, Any]]:
    yield kind.__name__, kind
    for name, value in inspect.getmembers(kind, inspect.isfunction):
        path = f"{kind.__name__}.{name}"
        if not name.startswith("_") and not _TOLD_ELSEWHERE.fullmatch(path):
            yield path, value


DOCUMENTED = dict(documented())


def examples(value: Any) -> list[str]:
    return [textwrap.dedent(code) for code in _EXAMPLE.findall(inspect.getdoc(value) or "")]


def test_the_public_names_are_found() -> None:
    assert {"Client", "Client.lock", "Lock.acquire", "Lease.extend", "Election.lead"} <= set(
        DOCUMENTED
    )
    assert {"instrument", "lifespan", "Locked", "hold", "RedisGuard.set"} <= set(DOCUMENTED)


@pytest.mark.parametrize("name", DOCUMENTED)
async def test_docstring_has_an_example_that_runs(name: str) -> None:
    shown = examples(DOCUMENTED[name])
    assert shown, f"{name} has no example"
    async with aiodlock.Client("memory://") as client, FakeRedis() as redis:
        for code in shown:
            compiled = compile(
                code.replace("redis://localhost:6379/0", "memory://"),
                name,
                "exec",
                flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
                dont_inherit=True,
            )
            names = {"aiodlock": aiodlock, "asyncio": asyncio, "client": client, "redis": redis}
            result = eval(compiled, names)
            if inspect.iscoroutine(result):
                await asyncio.wait_for(result, 30)
