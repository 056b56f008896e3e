"""Test runs side by side never get the same port, though nobody listens on it."""

from __future__ import annotations

import subprocess
import sys

from ..ports import free_ports

_ASK = "from tests.ports import free_ports; print(*free_ports(40), flush=True); input()"


def test_ports_are_given_to_one_process_only() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    given = free_ports(40)
    for process in processes:
        assert process.stdout is not None
        given += map(int, process.stdout.readline().split())
    for process in processes:
        process.communicate("\n")
    assert len(given) == 200
    assert len(set(given)) == 200
