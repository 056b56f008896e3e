"""A host with cron: forks an ``aiodlock run`` for every line on standard input, and tells how each ended.

It has imported the command before, as real hosts have it in their caches: between the tick and the first
message to the store lies what a process does, and not half a second of imports on a busy machine.

In: ``number argument argument …`` as JSON. Out: ``number exit-code time``, on CLOCK_MONOTONIC.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time

import redis.asyncio  # noqa: F401

import aiodlock
import aiodlock.cli._app
import aiodlock.cli._run


def main() -> None:
    # What reads arguments is imported when the first one is read. These are refused before anything starts.
    aiodlock.Client(os.environ["AIODLOCK_URL"])._core.store.open()
    with contextlib.suppress(Exception):
        aiodlock.cli._app.app(["run", "--ttl", "0.1", "x", "--", "true"], standalone_mode=False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watchers
    print("ready", flush=True)
    for line in sys.stdin:
        number, *arguments = json.loads(line)
        if os.fork() == 0:
            watch(number, arguments)


def watch(number: int, arguments: list[str]) -> None:
    """Run one in a process of its own, and tell its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        sys.argv = ["aiodlock", *arguments]
        aiodlock.cli.main()
        raise AssertionError("the command returned")
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    os.write(1, f"{number} {code} {time.monotonic()}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main()
