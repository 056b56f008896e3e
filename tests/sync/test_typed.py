"""The public names are typed: a user's module passes mypy in its strict mode."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from aiodlock import sync


@pytest.mark.timeout(300)
def test_a_users_module_passes_mypy_strict(tmp_path: Path) -> None:
    sample = Path(__file__).with_name("typed_sample.py")
    options = ("--strict", "--warn-unused-ignores", "--config-file=", "--cache-dir", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(sample)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout


def test_every_public_method_shows_an_example() -> None:
    for kind in (
        sync.Client,
        sync.Lock,
        sync.Lease,
        sync.MultiLock,
        sync.MultiLease,
        sync.Election,
    ):
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            if name.startswith("_") or not method.__module__.startswith("aiodlock"):
                continue
            assert "Example::" in (method.__doc__ or ""), f"{kind.__name__}.{name}"
