"""Processes that are forked from the tests are as those that begin as a Python."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .. import forked

_MODULE = "tests.unit.process_view"


async def test_it_finds_what_a_python_finds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "aiodlock")
    env = {**os.environ, "GIVEN": "1"}
    env.pop("PYTHONUNBUFFERED", None)
    process = await forked.start(
        _MODULE, "a", "b c", env=env, stdin=-1, stdout=-1, stderr=-1, cwd="/"
    )
    out, err = await process.communicate(b"said")
    real = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", _MODULE, "a", "b c"],
        env=env,
        capture_output=True,
        input=b"said",
    )
    assert (process.returncode, err) == (real.returncode, real.stderr) == (3, b"said\n")
    found, expected = json.loads(out), json.loads(real.stdout)
    assert [kind for _, kind in found.pop("warnings")] == [
        kind for action, kind in expected.pop("warnings") if action == "ignore"
    ]
    assert found == expected


@pytest.mark.parametrize(
    ("does", "code", "tells"),
    [
        ("", 0, ""),
        ("raise SystemExit('why')", 1, "why\n"),
        ("raise ValueError('this')", 1, "ValueError: this\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -2, "KeyboardInterrupt\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
        ("print('lost'); import os; os.close(1)", 120, ""),
        ("import threading, os; threading.Timer(0.1, os._exit, [7]).start()", 7, ""),
        ("import atexit, os; atexit.register(os._exit, 8)", 8, ""),
        ("import logging; logging.error('logged')", 0, "ERROR:root:logged\n"),
    ],
)
async def test_it_ends_as_a_python_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, code: int, tells: str
) -> None:
    (tmp_path / "ending.py").write_text(does)
    monkeypatch.syspath_prepend(tmp_path)
    for done in (
        forked.run("ending", capture_output=True, timeout=60),
        await asyncio.to_thread(forked.run, "ending", capture_output=True, timeout=60),
    ):
        assert done.returncode == code, done.stderr
        assert done.stderr.endswith(tells)
        assert bool(done.stderr) == bool(tells)


async def test_it_is_a_child_that_signals_reach() -> None:
    process = await forked.start(_MODULE, stdin=-1, stdout=-1)
    assert os.getpgid(process.pid) == os.getpgid(0)
    process.send_signal(signal.SIGKILL)
    await process.communicate()
    assert process.returncode == -signal.SIGKILL
