"""``make bench``: all cases, as markdown on standard output."""

from __future__ import annotations

import argparse
import asyncio
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import redis

from aiodlock._embedded import EmbeddedServer, find_redis_on_path, find_valkey9

from . import load
from .contenders import LIMIT, OURS, PEERS
from .pairs import Case, Figure, measure

_BASE = "redis-py Lock"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--url", help="the server; default: a private one, started for this run")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, smaller loads")
    options = parser.parse_args()
    with _server(options.url) as url:
        _run(url, quick=options.quick)


@contextmanager
def _server(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with EmbeddedServer(find_redis_on_path() or find_valkey9(), tcp=True) as server:
        yield server.url


def _run(url: str, *, quick: bool) -> None:
    _print_setting(url)
    repetitions = 5 if quick else 9
    loops = _loops()
    for name, runner in loops.items():
        for case in _cases(quick):
            figures = runner(measure(case, {**LIMIT, **OURS, **PEERS}, url, repetitions))
            _print_figures(f"{case.title} ({name})", figures)
    seconds = 3.0 if quick else 10.0
    many = 2_000 if quick else 10_000
    _print_rows("8 processes on one name", load.processes(url, 8, seconds))
    run = loops["asyncio's own loop"]
    for title, coroutine in (
        ("1,000 waiters", load.waiters(url, 1_000)),
        (f"{many:,} leases held", load.leases(url, many, beats=2 if quick else 6)),
        ("Length of the queue", load.queue_length(url, (10, many), 100)),
        ("Memory of the server", load.memory(url, 2_000)),
    ):
        _print_rows(title, run(coroutine))


def _cases(quick: bool) -> list[Case]:
    # The same number for every contender: a lock whose waiters poll looks far better when one task
    # may take it many times in a row, far worse when each takes it once.
    share = 4 if quick else 1
    no_limit = frozenset(LIMIT)
    return [
        Case("One task", 1, 1, 800 // share),
        Case("64 tasks on 64 names", 64, 64, 32 // share),
        # The peers' pools do not open a thousand connections.
        Case("1,000 tasks on 1,000 names", 1_000, 1_000, 4, frozenset(PEERS)),
        Case("16 tasks on one name", 16, 1, 20, no_limit | {"pottery AIORedlock"}),
    ]


def _loops() -> Mapping[str, Callable[[Any], Any]]:
    loops: dict[str, Callable[[Any], Any]] = {"asyncio's own loop": asyncio.run}
    try:
        import uvloop
    except ImportError:
        print("uvloop: not installed, left out")
    else:
        loops["uvloop"] = uvloop.run
    return loops


def _print_setting(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        info: Any = client.info("server")
    server = (
        f"{info.get('server_name', 'redis')} {info.get('valkey_version', info['redis_version'])}"
    )
    print(f"Python {platform.python_version()}, {server}, {platform.machine()}\n", flush=True)


def _print_figures(title: str, figures: Mapping[str, Figure | str]) -> None:
    base = figures.get(_BASE)
    print(f"### {title}\n\n| | µs per acquire + release | quartiles | redis-py Lock's = 1 |")
    print("|---|---:|---:|---:|")
    for name, figure in figures.items():
        if isinstance(figure, str):
            print(f"| {name} | {figure} | | |")
            continue
        ratio = f"{figure.median / base.median:.3g}" if isinstance(base, Figure) else ""
        spread = f"{figure.low:.0f} to {figure.high:.0f}"
        print(f"| {name} | {figure.median:.0f} | {spread} | {ratio} |")
    print(flush=True)


def _print_rows(title: str, rows: load.Rows) -> None:
    print(f"### {title}\n\n| | |\n|---|---:|")
    for what, value in rows:
        print(f"| {what} | {value} |")
    print(flush=True)


if __name__ == "__main__":
    main()
