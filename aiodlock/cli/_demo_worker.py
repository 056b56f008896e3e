"""One process of the demo: takes turns on a ledger, or holds until it is killed.

Told on its command line where the locks and the ledger are and what to do; starts at a line on stdin, and
says on stdout what happens, a JSON object per line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from .. import Client

NAME = "ledger"
DEPOSITS = 20
TTL, WAITER_TTL = 2.0, 1.0


def say(event: str, **details: object) -> None:
    print(json.dumps({"event": event, "at": time.monotonic(), **details}), flush=True)


def deposit(ledger: Path, line: dict[str, object]) -> None:
    """Read the balance, add one, append: the read-modify-write that needs a lock."""
    lines = ledger.read_text().splitlines()
    balance = json.loads(lines[-1])["balance"] if lines else 0
    time.sleep(0.002)  # some work between reading and writing
    with ledger.open("a") as file:
        file.write(json.dumps(line | {"balance": balance + 1}) + "\n")


async def work(url: str, ledger: Path, task: str) -> None:
    # Who dies is to be gone soon; who takes turns keeps its place, however slow the machine is.
    dies = task in ("hold", "take")
    times = (TTL, WAITER_TTL) if dies else (30.0, 30.0)
    async with Client(url, ttl=times[0], waiter_ttl=times[1]) as client:
        lock = client.lock(NAME)
        say("ready")
        await asyncio.to_thread(sys.stdin.readline)
        if task == "careless":
            for _ in range(DEPOSITS):
                deposit(ledger, {"worker": os.getpid()})
        elif task == "careful":
            for _ in range(DEPOSITS):
                async with lock as lease:
                    line = {"worker": os.getpid(), "token": lease.token, "request": lease.owner}
                    deposit(ledger, line)
        else:
            say("asking")
            async with lock as lease:
                say("acquired", token=lease.token)
                if task == "hold":
                    await asyncio.Event().wait()
        say("done")


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
