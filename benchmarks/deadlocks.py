"""What looking for deadlocks costs: thousands of tasks wait, each inside a block of its own.

    python -m benchmarks.deadlocks --url redis://localhost:6379/0 [--tasks 5000] [--clients 1]

Each client is a process. Its tasks hold a name each and wait for one hot name (``--names`` of them), which
a process without this search holds. After a while two more tasks of the first client deadlock. Printed:

- the longest turn of an event loop, with the search and without (``deadlock_after=None``): its CPU time,
  and its length, in which other processes may have had the CPU
- the CPU time of the server for each second, with and without
- how long after ``deadlock_after`` the deadlock was found
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

import redis.asyncio

import aiodlock

AFTER = 2.0
#: Tasks begin within so many seconds, and wait for so many more before the deadlock.
_RAMP, _SETTLE, _MEASURED = 6.0, 5.0, 12.0


class Lag:
    """The longest turn of the event loop, and the one that took most CPU time, in seconds."""

    def __init__(self) -> None:
        self.longest = self.busiest = 0.0

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            began, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(0)
            self.longest = max(self.longest, time.monotonic() - began)
            self.busiest = max(self.busiest, time.thread_time() - cpu)
            await asyncio.sleep(0.001)


async def wait_inside(client: aiodlock.Client, number: str, hot: str) -> None:
    """Hold a name and wait for another."""
    async with client.lock(f"order:{number}"), client.lock(hot):
        pass


async def take(client: aiodlock.Client, first: str, second: str, met: asyncio.Barrier) -> float:
    """Take two names; return when that failed by a deadlock, else 0.0."""
    async with client.lock(first):
        await met.wait()
        try:
            async with client.lock(second):
                return 0.0
        except aiodlock.DeadlockError:
            return time.monotonic()


async def work(url: str, index: int, tasks: int, names: int, after: float | None) -> dict[str, Any]:
    """Run one client; return what was measured."""
    options: dict[str, Any] = {"ttl": 60, "waiter_ttl": 60, "deadlock_after": after}
    async with aiodlock.Client(url, **options) as client:
        waiting = []
        for number in range(tasks):
            hot = f"hot:{number % names}"
            waiting.append(asyncio.create_task(wait_inside(client, f"{index}-{number}", hot)))
            if number % 50 == 49:
                await asyncio.sleep(_RAMP * 50 / tasks)
        await asyncio.sleep(_SETTLE)
        lag, began = Lag(), time.monotonic()
        watching = asyncio.create_task(lag.watch())
        cpu = time.process_time()
        found = 0.0
        if index == 0 and after is not None:
            met = asyncio.Barrier(2)
            pair = ("x", "y"), ("y", "x")
            ends = await asyncio.gather(*(take(client, *two, met) for two in pair))
            found = max(ends) - began - after
        await asyncio.sleep(max(0.0, began + _MEASURED - time.monotonic()))
        cpu = time.process_time() - cpu
        watching.cancel()
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
    return {"lag": lag.longest, "turn": lag.busiest, "cpu": cpu / _MEASURED, "found": found}


async def run(url: str, clients: int, tasks: int, names: int, after: float | None) -> None:
    """Run all clients beside a holder; print a line."""
    server = redis.asyncio.Redis.from_url(url)
    async with aiodlock.Client(url, ttl=60, deadlock_after=None) as holder:
        leases = [await holder.lock(f"hot:{number}").acquire() for number in range(names)]
        processes = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.deadlocks", "--url", url),
                *("--work", str(index), "--tasks", str(tasks), "--names", str(names)),
                *("--after", "" if after is None else str(after)),
                stdout=asyncio.subprocess.PIPE,
            )
            for index in range(clients)
        ]
        reading = [asyncio.create_task(process.communicate()) for process in processes]
        await asyncio.sleep(_RAMP + _SETTLE + 3.0)
        before, began = await server.info("cpu"), time.monotonic()
        await asyncio.sleep(_MEASURED - 5.0)
        info, length = await server.info("cpu"), time.monotonic() - began
        busy = sum(info[one] - before[one] for one in ("used_cpu_user", "used_cpu_sys")) / length
        found = [json.loads(out) for out, _ in await asyncio.gather(*reading)]
        for lease in leases:
            await lease.release()
    await server.aclose()
    late = "" if after is None else f"deadlock found {found[0]['found']:.2f} s after its time"
    print(
        f"{clients} clients of {tasks} tasks, {names} names, search {'on ' if after else 'off'}: "
        f"longest turn {max(one['turn'] for one in found) * 1e3:.0f} ms of CPU time "
        f"({max(one['lag'] for one in found) * 1e3:.0f} ms), CPU of the server {busy:.1%}, of a client "
        f"{max(one['cpu'] for one in found):.1%}  {late}",
        flush=True,
    )


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description="what looking for deadlocks costs")
    parser.add_argument("--url", required=True)
    parser.add_argument("--tasks", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--names", type=int, default=1)
    parser.add_argument("--after", default=str(AFTER), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=int, default=-1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    after = float(given.after) if given.after else None
    if given.work >= 0:
        result = asyncio.run(work(given.url, given.work, given.tasks, given.names, after))
        print(json.dumps(result))
        return
    for search in (None, after):
        asyncio.run(run(given.url, given.clients, given.tasks, given.names, search))


if __name__ == "__main__":
    main()
