"""Thousands of clients, names and leases on one server: ``python -m benchmarks.storms``.

Each probe is a row: what was counted, and its target. Counts, bytes and ratios of one run mean something
on a busy machine, too; seconds do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import redis
import trustme

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
    with _server() as server:
        _kill_all(server.url, server.url, options.clients, options.processes, "clients")


def _reconnect_with_tls(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as place, socket.socket() as free:
        folder, ca = Path(place), trustme.CA()
        certificate = ca.issue_cert("127.0.0.1")
        ca.cert_pem.write_to_path(folder / "ca.pem")
        certificate.cert_chain_pems[0].write_to_path(folder / "server.pem")
        certificate.private_key_pem.write_to_path(folder / "server.key")
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        config = {
            "maxclients": 30_000,
            "tls-port": port,
            "tls-ca-cert-file": str(folder / "ca.pem"),
            "tls-cert-file": str(folder / "server.pem"),
            "tls-key-file": str(folder / "server.key"),
            "tls-auth-clients": "no",
        }
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={quote(str(folder / 'ca.pem'))}"
        with EmbeddedServer(find_redis_on_path(), tcp=True, config=config) as server:
            _kill_all(server.url, url, options.clients // 2, options.processes, "clients with TLS")


def _kill_all(admin_url: str, url: str, clients: int, processes: int, what: str) -> None:
    with redis.Redis.from_url(admin_url) as admin:
        each = clients // processes
        command = [sys.executable, "-m", "benchmarks.storm_worker", url]
        workers = [
            subprocess.Popen(
                [*command, str(number), str(each), "25"],
                cwd=_ROOT,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            for number in range(processes)
        ]
        try:
            for worker in workers:
                _answer(worker)
            _storm(admin, workers, each * processes, what)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def _storm(
    admin: redis.Redis, workers: list[subprocess.Popen[str]], clients: int, what: str
) -> None:
    _ask(workers, "remember")
    before, extended = _info(admin)
    began = time.monotonic()
    for kind in ("normal", "pubsub"):
        admin.client_kill_filter(_type=kind, skipme=True)
    while True:
        time.sleep(0.2)
        back, links = _sums(_ask(workers, "back"), "back", "of")
        took = time.monotonic() - began
        if back == links or took > _GIVE_UP_AFTER:
            break
    after, extended_after = _info(admin)
    held, leases = _sums(_ask(workers, "leases"), "held", "of")
    dialled = after["total_connections_received"] - before["total_connections_received"]
    received = after["total_net_input_bytes"] - before["total_net_input_bytes"]
    cpu = sum(after[key] - before[key] for key in ("used_cpu_user", "used_cpu_sys"))
    _row(f"{clients:,} {what} killed: connections back", f"{back:,} of {links:,}", "all")
    _row("… seconds", f"{took:.1f}", "12")
    _row("… connections per link", f"{dialled / links:.2f}", "below 1.2")
    _row("… leases lost (ttl 30)", f"{leases - held:,} of {leases:,}", "0")
    _row("… bytes to the server per client, all told", f"{received / clients:,.0f}", "below 1,000")
    _row("… extensions in that time, per lease", f"{(extended_after - extended) / leases:.2f}", "")
    _row("… the server's CPU per client, µs", f"{cpu / clients * 1e6:,.0f}", "200")


def _info(admin: redis.Redis) -> tuple[Any, int]:
    commands: Any = admin.info("commandstats")
    return admin.info(), commands["cmdstat_evalsha"]["calls"]


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
        keeper: Any = client._core.session.backend.keeper  # type: ignore[union-attr]
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
        backend: Any = client._core.session.backend.store  # type: ignore[union-attr]
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


# -- over a long way -----------------------------------------------------------------------------------

_ROUND_TRIP = 0.1


def _round_trips(options: argparse.Namespace) -> None:
    with _server() as server:
        asyncio.run(_go_far(server))


async def _go_far(server: EmbeddedServer) -> None:
    async with aiodlock.Client(server.url):
        pass  # what is imported on first use
    async with _far(server) as url:
        began = time.perf_counter()
        async with aiodlock.Client(url, ttl=60.0) as client:
            entered = time.perf_counter() - began
            began = time.perf_counter()
            async with client.multilock(*(f"together:{number}" for number in range(5))):
                pass
            together = time.perf_counter() - began
    _row("entering a client: round trips", f"{entered / _ROUND_TRIP:.1f}", "5")
    _row("a multilock of 5 names: round trips", f"{together / _ROUND_TRIP:.1f}", "6")


@asynccontextmanager
async def _far(server: EmbeddedServer) -> AsyncIterator[str]:
    """Give the address of a relay: all takes a round trip through it, connecting too."""
    there = urlsplit(server.url)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(65536):
            loop.call_later(_ROUND_TRIP / 2, writer.write, data)
        loop.call_later(_ROUND_TRIP / 2, writer.close)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.CancelledError):
            await asyncio.sleep(_ROUND_TRIP)
            beyond = await asyncio.open_connection(there.hostname, there.port)
            await asyncio.gather(pump(reader, beyond[1]), pump(beyond[0], writer))

    relay = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{relay.sockets[0].getsockname()[1]}/0"
    finally:
        relay.close()


_PROBES: dict[str, Callable[[argparse.Namespace], None]] = {
    "reconnect": _reconnect,
    "bursts": _bursts,
    "listing": _listing,
    "far": _round_trips,
    "tls": _reconnect_with_tls,
}


if __name__ == "__main__":
    main()
