"""Thousands of clients, names and leases on one server: ``python -m benchmarks.storms``.

Each probe is a row: what was counted, and its target. Counts, bytes and ratios of one run mean something
on a busy machine, too; seconds do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

import aiodlock
from aiodlock._embedded import EmbeddedServer, find_redis_on_path

_ROOT = Path(__file__).parents[1]
_GIVE_UP_AFTER = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storms", description=__doc__)
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--only", choices=_PROBES, help="one probe alone")
    options = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f}\n")
    print("| probe | measured | target |\n|---|---:|---:|")
    for name, probe in _PROBES.items():
        if options.only in (None, name):
            cpus = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, cpus[-1:])  # server, clients and this share one core
            try:
                probe(options)
            finally:
                os.sched_setaffinity(0, cpus)


def _row(probe: str, measured: str, target: str) -> None:
    print(f"| {probe} | {measured} | {target} |", flush=True)


def _server() -> EmbeddedServer:
    return EmbeddedServer(find_redis_on_path(), tcp=True, config={"maxclients": 30_000})


# -- all connections are killed ------------------------------------------------------------------------


def _reconnect(options: argparse.Namespace) -> None:
    with _server() as server, redis.Redis.from_url(server.url) as admin:
        each = options.clients // options.processes
        command = [sys.executable, "-m", "benchmarks.storm_worker", server.url]
        workers = [
            subprocess.Popen(
                [*command, str(number), str(each), "25"],
                cwd=_ROOT,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            for number in range(options.processes)
        ]
        try:
            for worker in workers:
                _answer(worker)
            _storm(admin, workers, each * options.processes)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def _storm(admin: redis.Redis, workers: list[subprocess.Popen[str]], clients: int) -> None:
    _ask(workers, "remember")
    before: Any = admin.info()
    began = time.monotonic()
    for kind in ("normal", "pubsub"):
        admin.client_kill_filter(_type=kind, skipme=True)
    while True:
        time.sleep(0.2)
        back, links = _sums(_ask(workers, "back"), "back", "of")
        took = time.monotonic() - began
        if back == links or took > _GIVE_UP_AFTER:
            break
    after: Any = admin.info()
    held, leases = _sums(_ask(workers, "leases"), "held", "of")
    dialled = after["total_connections_received"] - before["total_connections_received"]
    received = after["total_net_input_bytes"] - before["total_net_input_bytes"]
    cpu = sum(after[key] - before[key] for key in ("used_cpu_user", "used_cpu_sys"))
    _row(f"{clients:,} clients killed: connections back", f"{back:,} of {links:,}", "all")
    _row("… seconds", f"{took:.1f}", "12")
    _row("… connections per link", f"{dialled / links:.2f}", "below 1.2")
    _row("… leases lost (ttl 30)", f"{leases - held:,} of {leases:,}", "0")
    _row("… bytes to the server per client", f"{received / clients:,.0f}", "below 1,000")
    _row("… the server's CPU per client, µs", f"{cpu / clients * 1e6:,.0f}", "200")


def _ask(workers: list[subprocess.Popen[str]], word: str) -> list[dict[str, Any]]:
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(f"{word}\n")
        worker.stdin.flush()
    return [_answer(worker) for worker in workers]


def _answer(worker: subprocess.Popen[str]) -> dict[str, Any]:
    assert worker.stdout is not None
    answer: dict[str, Any] = json.loads(worker.stdout.readline())
    return answer


def _sums(answers: list[dict[str, Any]], *keys: str) -> list[int]:
    return [sum(answer[key] for answer in answers) for key in keys]


# -- thousands of leases are due together --------------------------------------------------------------


def _bursts(options: argparse.Namespace) -> None:
    with _server() as server:
        costs = [asyncio.run(_burst(server, leases)) for leases in (1_000, 10_000, 50_000)]
    _row("client's CPU per extension, 50,000 of 1,000", f"{costs[-1] / costs[0]:.2f}", "1")


async def _burst(server: EmbeddedServer, number: int) -> float:
    """Make all leases due in one moment; return the CPU of this process per extension."""
    async with (
        redis.asyncio.Redis.from_url(server.url) as admin,
        aiodlock.Client(server.url, ttl=600.0) as client,
    ):
        locks = [client.lock(f"burst:{number}:{index}") for index in range(number)]
        leases: list[aiodlock.Lease] = []
        for first in range(0, number, 500):
            leases += await asyncio.gather(*(lock.acquire() for lock in locks[first : first + 500]))
        keeper: Any = client._session.backend.keeper  # type: ignore[union-attr]
        places = list(keeper.places.values())
        await admin.config_resetstat()
        for place in places:
            place.beat = 0.0
            keeper._schedule(place)
        longest, cpu, turn = 0.0, time.process_time(), time.thread_time()
        while any(place.asked or place.beat == 0.0 for place in places[-3:]):
            await asyncio.sleep(0)
            longest, turn = max(longest, time.thread_time() - turn), time.thread_time()
        cpu = time.process_time() - cpu
        script = (await admin.info("commandstats"))["cmdstat_evalsha"]
        _row(
            f"{number:,} leases due at once: longest turn of the loop, ms of CPU",
            f"{longest * 1e3:.0f}",
            "20",
        )
        _row("… the script's time per extension, µs", f"{script['usec_per_call']:.1f}", "25")
        for first in range(0, number, 500):
            await asyncio.gather(*(lease.release() for lease in leases[first : first + 500]))
    return cpu / number


# -- everything is listed ------------------------------------------------------------------------------


def _listing(options: argparse.Namespace) -> None:
    with _server() as server:
        asyncio.run(_list(server))


async def _list(server: EmbeddedServer) -> None:
    number = 10_000
    async with (
        redis.asyncio.Redis.from_url(server.url) as admin,
        aiodlock.Client(server.url, ttl=600.0) as client,
    ):
        leases: list[aiodlock.Lease] = []  # a lease that nobody references ends with its task
        for first in range(0, number, 500):
            locks = [client.lock(f"order:{index}") for index in range(first, first + 500)]
            leases += await asyncio.gather(*(lock.acquire() for lock in locks))
        await admin.config_resetstat()
        backend: Any = client._session.backend.store  # type: ignore[union-attr]
        pages, inspect_all = 0, backend.inspect_all

        async def counted(*arguments: Any) -> Any:
            nonlocal pages
            pages += 1
            return await inspect_all(*arguments)

        backend.inspect_all = counted
        began = time.perf_counter()
        found = len([info async for info in client.locks("order:*")])
        took = time.perf_counter() - began
        scans = (await admin.info("commandstats"))["cmdstat_scan"]["calls"]
        _row(f"locks() over {number:,} names: found", f"{found:,}", "all")
        _row("… round trips", f"{pages + scans:,}", "60")
        _row("… seconds", f"{took:.2f}", "0.3")
        for first in range(0, number, 500):
            await asyncio.gather(*(lease.release() for lease in leases[first : first + 500]))


_PROBES: dict[str, Callable[[argparse.Namespace], None]] = {
    "reconnect": _reconnect,
    "bursts": _bursts,
    "listing": _listing,
}


if __name__ == "__main__":
    main()
