"""Measure aiodlock beside its peers; markdown on standard output."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import redis

from . import contenders as who
from . import load
from .contenders import Contender
from .pairs import Case, Measured, cases, measure
from .report import (
    DEFAULT_LOOP,
    Report,
    fill,
    markdown,
    measured_markdown,
    table_markdown,
)
from .servers import Servers

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

#: Cases that are about the client and the server as a whole, not about one acquire and release.
_LOADS = ("processes", "second", "waiters", "leases", "queue", "memory")


def main() -> None:
    options = _options()
    if options.saved is not None:
        report = Report.load(options.saved)
    else:
        with Servers(options.url) as servers:
            report = _run(options, servers)
    if options.page is not None:
        fill(options.page, markdown(report))
    if options.plot is not None:
        from .plot import draw

        draw(report, options.plot)


def _options() -> argparse.Namespace:
    keys = [case.key for case in cases(quick=False)] + list(_LOADS)
    peers = ["ours", *(c.key for c in who.ALL if not c.key.startswith("ours"))]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"Cases: {', '.join(keys)}. Contenders: {', '.join(peers)}.",
    )
    several = _several
    add = parser.add_argument
    add("--url", help="the Redis server; default: a private one, started for this run")
    add("--quick", action="store_true", help="fewer repetitions, smaller loads")
    add("--cases", type=several(keys), default=keys, help="only these, separated by commas")
    add("--peers", type=several(peers), default=peers, help="only these; raw is always measured")
    add("--loops", type=several(["asyncio", "uvloop"]), default=["asyncio", "uvloop"])
    add("--cores", choices=("two", "one", "free"), help="where all cases run, instead of their own")
    add("--repetitions", type=int, help="of each case, by turns; default: 15, with --quick 5")
    add("--json", type=Path, help="keep what was measured in this file")
    add("--from", dest="saved", type=Path, help="measure nothing, use a file of --json")
    add("--page", type=Path, help="put the tables into this page, between its two marks")
    add("--plot", type=Path, help="draw the cases as a PNG")
    return parser.parse_args()


def _several(allowed: list[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        for each in chosen:
            if each not in allowed:
                raise argparse.ArgumentTypeError(f"{each!r} is none of {', '.join(allowed)}")
        return chosen

    return parse


def _run(options: argparse.Namespace, servers: Servers) -> Report:
    report = Report(_setting(servers, options))
    print("; ".join(f"{name}: {value}" for name, value in report.setting.items()), "\n", flush=True)
    repetitions = _repetitions(options)
    for loop, factory in _loops(options.loops).items():
        for case in cases(quick=options.quick):
            if case.key not in options.cases:
                continue
            chosen = _chosen(case, options.peers, loop)
            servers.place(options.cores or case.cores)
            with asyncio.Runner(loop_factory=factory) as runner:
                measured: Measured = runner.run(measure(case, loop, chosen, servers, repetitions))
            if measured.times:
                report.measured.append(measured)
                _keep(report, options)
                print(measured_markdown(measured), "\n", flush=True)
    _run_loads(options, servers, report)
    return report


def _keep(report: Report, options: argparse.Namespace) -> None:
    """Save what there is so far: a complete run takes a quarter of an hour."""
    if options.json is not None:
        report.save(options.json)


def _chosen(case: Case, peers: list[str], loop: str) -> list[Contender]:
    """Return who is measured. What does not run on asyncio's loops is not measured twice."""
    return [
        each
        for each in case.contenders
        if (
            each is who.RAW
            or each.key in peers
            or (each.key.startswith("ours") and "ours" in peers)
        )
        and (loop == DEFAULT_LOOP or each.open_holds is not None)
    ]


def _run_loads(options: argparse.Namespace, servers: Servers, report: Report) -> None:
    servers.place(options.cores or "two")
    quick: bool = options.quick
    rounds = 1 if quick else 3
    many = 2_000 if quick else 10_000
    url = servers.redis

    def show(table: load.Table) -> None:
        report.tables.append(table)
        _keep(report, options)
        print(table_markdown(table), "\n", flush=True)

    if "processes" in options.cases:
        contenders = [
            each
            for each in (who.OURS, who.LINGERING, who.REDIS_PY, who.FIFO, who.POSTGRES)
            if each.key in options.peers or (each is who.LINGERING and "ours" in options.peers)
        ]
        show(load.processes(servers, contenders, 8, 2.0 if quick else 5.0, rounds))
    if "second" in options.cases:
        show(load.second(servers, [who.OURS, who.LINGERING], 1.0 if quick else 5.0, 2 * rounds + 1))
    coroutines: dict[str, Coroutine[Any, Any, load.Table]] = {
        "waiters": load.waiters(url, 1_000, rounds),
        "leases": load.leases(url, many, 2 if quick else 6),
        "queue": load.queue_length(url, (10, many), rounds),
        "memory": load.memory(url, 2_000, rounds),
    }
    for key, coroutine in coroutines.items():
        if key in options.cases:
            show(asyncio.run(coroutine))
        else:
            coroutine.close()


def _loops(wanted: list[str]) -> dict[str, LoopFactory]:
    loops: dict[str, LoopFactory] = {}
    if "asyncio" in wanted:
        loops[DEFAULT_LOOP] = asyncio.new_event_loop
    if "uvloop" in wanted:
        try:
            import uvloop
        except ImportError:
            print("uvloop: not installed, left out", file=sys.stderr)
        else:
            loops["uvloop"] = uvloop.new_event_loop
    return loops


def _setting(servers: Servers, options: argparse.Namespace) -> dict[str, str]:
    with redis.Redis.from_url(servers.redis) as client:
        info: Any = client.info("server")
    name = info.get("server_name", "redis")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "Python": platform.python_version(),
        "server": f"{name} {info.get('valkey_version', info['redis_version'])}",
        "redis-py": redis.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "load of the machine before": f"{os.getloadavg()[0]:.1f}",
        "repetitions": f"{_repetitions(options)}{', --quick' if options.quick else ''}",
    }


def _repetitions(options: argparse.Namespace) -> int:
    return options.repetitions or (5 if options.quick else 15)


if __name__ == "__main__":
    main()
