"""What one uncontended acquire and release is spent on: ``python -m benchmarks.profile``.

What is counted (calls, bytecode instructions, system calls' processor time, bytes) hardly changes
from run to run on a noisy machine; what is timed does.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import redis
import redis.asyncio

import aiodlock

from . import contenders as who
from .contenders import Contender, Hold
from .servers import Servers

_PACKAGE = str(Path(aiodlock.__file__).parent)
_OURS = {c.key: c for c in (who.OURS, who.UNCONFIRMED, who.REDIS_PY, who.RAW)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("--url", help="the Redis server; default: a private one")
    parser.add_argument("--pairs", type=int, default=5_000)
    parser.add_argument("--tasks", type=int, default=1, help="so many tasks on as many names")
    parser.add_argument("--lines", type=int, default=25, help="of the list of functions")
    parser.add_argument("--cores", choices=("two", "one", "free"), default="two")
    parser.add_argument("--of", choices=_OURS, default="ours", help="whose lock")
    options = parser.parse_args()
    with Servers(options.url) as servers:
        servers.place(options.cores)
        asyncio.run(_profile(_OURS[options.of], servers, options))


async def _profile(contender: Contender, servers: Servers, options: argparse.Namespace) -> None:
    assert contender.open_holds is not None
    count = options.pairs // options.tasks
    pairs = count * options.tasks
    print(f"## {contender.title}: {pairs} pairs, {options.tasks} at a time\n")
    async with (
        redis.asyncio.Redis.from_url(servers.redis) as admin,
        contender.open_holds(servers) as make,
    ):
        holds = [make(f"profile{i}", False) for i in range(options.tasks)]
        await _lock(holds, 50)
        await _tell_times(admin, holds, count, pairs)
        await _tell_cpu_events(holds, count, pairs)
        await _tell_bytecode(holds)
        profiler = cProfile.Profile()
        profiler.enable()
        await _lock(holds, count)
        profiler.disable()
    _tell_calls(profiler, pairs, options.lines)


async def _lock(holds: list[Hold], count: int) -> None:
    async def work(hold: Hold) -> None:
        for _ in range(count):
            async with hold():
                pass

    if len(holds) == 1:
        await work(holds[0])
    else:
        await asyncio.gather(*map(work, holds))


async def _tell_times(
    admin: redis.asyncio.Redis, holds: list[Hold], count: int, pairs: int
) -> None:
    """Where the time is: in this process, in its system calls, in the server and in its scripts."""
    server = await _server(admin)
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    await _lock(holds, count)
    elapsed, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    served = await _server(admin)
    rows = [
        ("elapsed", elapsed),
        ("client's CPU, user", after.ru_utime - before.ru_utime),
        ("client's CPU, system", after.ru_stime - before.ru_stime),
        *((what, served[what] - server[what]) for what in served),
    ]
    print("| per acquire and release | µs |\n|---|---:|")
    for what, seconds in rows:
        print(f"| {what} | {seconds / pairs * 1e6:.1f} |")
    slept = (after.ru_nvcsw - before.ru_nvcsw) / pairs
    print(f"\nTimes the client slept, per acquire and release: {slept:.2f}\n")


async def _server(admin: redis.asyncio.Redis) -> dict[str, float]:
    cpu: dict[str, Any] = await admin.info("cpu")
    stats: dict[str, Any] = await admin.info("commandstats")
    scripts = stats.get("cmdstat_evalsha", {}).get("usec", 0)
    return {
        "server's CPU, user": float(cpu["used_cpu_user"]),
        "server's CPU, system": float(cpu["used_cpu_sys"]),
        "of that within EVALSHA": float(scripts) / 1e6,
    }


async def _tell_cpu_events(holds: list[Hold], count: int, pairs: int) -> None:
    """Instructions of this process as its CPU counts them, where `perf` is there and may look."""
    perf = shutil.which("perf")
    if perf is None:
        print("Instructions: no perf.\n")
        return
    events = "instructions:u,instructions:k,branch-misses,context-switches"
    command = (perf, "stat", "-x", ";", "-e", events, "-p", str(os.getpid()))
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    await asyncio.sleep(0.3)  # it says nothing when it is ready
    await _lock(holds, count)
    process.send_signal(signal.SIGINT)
    _, told = await process.communicate()
    print("| per acquire and release | |\n|---|---:|")
    for line in told.decode().splitlines():
        value, _, event = line.split(";")[:3] if line.count(";") > 2 else ("", "", "")
        if event:
            number = value.replace(".", "", 1)
            each = f"{float(value) / pairs:.1f}" if number.isdigit() else "not counted here"
            print(f"| {event} | {each} |")
    print()


async def _tell_bytecode(holds: list[Hold], count: int = 50) -> None:
    """Bytecode instructions of Python by file: the same in every run."""
    with _counted() as opcodes:
        await _lock(holds, count)
    pairs = count * len(holds)
    of_file: Counter[str] = Counter()
    for code, number in opcodes.items():
        of_file[_short(code.co_filename)] += number
    print("| bytecode instructions per acquire and release | |\n|---|---:|")
    for name, number in of_file.most_common():
        if number >= pairs:
            print(f"| `{name}` | {number / pairs:.0f} |")
    print(f"| all | {sum(of_file.values()) / pairs:.0f} |\n")


@contextmanager
def _counted() -> Iterator[Counter[CodeType]]:
    counts: Counter[CodeType] = Counter()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            counts[frame.f_code] += 1
        return trace

    sys.settrace(trace)
    try:
        yield counts
    finally:
        sys.settrace(None)


def _tell_calls(profiler: cProfile.Profile, pairs: int, lines: int) -> None:
    stats: Any = pstats.Stats(profiler)
    ranked = sorted(stats.stats.items(), key=lambda item: -item[1][2])
    # Waiting for the server is no work.
    ranked = [item for item in ranked if "'poll' of 'select." not in item[0][2]]
    total = sum(own for _, (_, _, own, *_) in ranked)
    of_place: Counter[str] = Counter()
    for (file, _, name), (_, _, own, *_) in ranked:
        of_place[_place(file, name)] += round(own * 1e9)
    print(
        f"Calls per acquire and release: {stats.total_calls / pairs:.0f}. Own time under cProfile,"
    )
    print("which makes calls dearer than system calls; waiting for the server is left out:\n")
    print("| place | share |\n|---|---:|")
    for place, own in of_place.most_common(12):
        print(f"| {place} | {own / 1e9 / total:.0%} |")
    print("\n| function | calls per pair | share |\n|---|---:|---:|")
    for (file, line, name), (_, calls, own, *_) in ranked[:lines]:
        where = name if file == "~" else f"{_short(file)}:{line} {name}"
        print(f"| `{where}` | {calls / pairs:.1f} | {own / total:.1%} |")


def _place(file: str, name: str) -> str:
    if "'_socket.socket'" in name:
        method = name.split("'")[1]
        return f"`{method}` of the socket"
    if file == "~":
        return "hiredis" if "hiredis" in name else "other builtins"
    if file.startswith(_PACKAGE):
        return f"`{_short(file)}`"
    short = _short(file)
    if short.startswith("redis/"):
        return "redis-py"
    return "asyncio" if short.startswith(("asyncio/", "selectors")) else "other"


def _short(path: str) -> str:
    if path.startswith(_PACKAGE):
        return f"aiodlock{path[len(_PACKAGE) :]}"
    for directory in (f"{os.sep}site-packages{os.sep}", os.path.dirname(os.__file__) + os.sep):
        _, found, rest = path.partition(directory)
        if found:
            return rest
    return "/".join(Path(path).parts[-2:])


if __name__ == "__main__":
    main()
