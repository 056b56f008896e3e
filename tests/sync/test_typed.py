"""The public names are typed: a user's module passes mypy in its strict mode."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


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
