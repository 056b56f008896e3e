"""Ports for the servers that tests start, each given to one process only.

That a port can be bound does not tell whether it is free: perhaps its server was killed, and is about to
start again. So whoever gets a port locks the byte of that number in a file that all test runs on the
machine share. The kernel drops a process's locks when it ends.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

# Below the range that the kernel takes ports of outgoing connections from.
_PORTS = range(20_000, 32_000)
_PATH = Path(tempfile.gettempdir()) / f"aiodlock-test-ports-{os.getuid()}"

#: The file, by process: closing it would drop the locks, and a forked child has none of its parent's.
_files: dict[int, int] = {}
#: What this process has, which its own locks would not refuse.
_given: set[int] = set()


def free_port() -> int:
    """Return a port that is this process's as long as it runs, whether or not something listens there."""
    for port in _PORTS:
        if port not in _given and _lock(port):
            _given.add(port)
            if _can_be_bound(port):  # else a server has it that no test has started
                return port
    raise AssertionError("no port is free")


def free_ports(number: int) -> list[int]:
    return [free_port() for _ in range(number)]


def _lock(port: int) -> bool:
    pid = os.getpid()
    if pid not in _files:
        _files[pid] = os.open(_PATH, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(_files[pid], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


def _can_be_bound(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
