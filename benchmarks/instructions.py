"""Instructions of the client per pair, by valgrind: ``python -m benchmarks.instructions``.

A pair is one acquire and release. This is the one measure of the hot path that a busy machine does not
disturb: it is the same in every run, within half a percent. To compare with another tree, name the Python
of that tree's environment::

    git worktree add ../old v1.0 && make -C ../old setup
    python -m benchmarks.instructions --against ../old/.venv/bin/python

- Each load runs twice, with few and with many pairs, and the difference counts. So starting Python,
  importing and connecting cancel out.
- Valgrind makes the client some sixty times slower. Its timers (extensions, pings, checks for deadlocks)
  would come sixty times as often per pair. So its clocks are slowed down by as much. The slowed clock is a
  Python function in place of a builtin one: some 300 instructions for each reading, in both trees.
- The kernel's instructions and the server's are not counted.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from aiodlock._embedded import EmbeddedServer, find_valkey9

_WORKER = Path(__file__).with_name("instructions_worker.py")
_VALGRIND = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")
#: How many times slower a program runs under valgrind.
_SLOWER = 60
_COUNT = re.compile(r"I\s+refs:\s+([\d,]+)")


@dataclass(frozen=True, slots=True)
class Case:
    """A load: tasks, the names that they share evenly, and pairs of the short run and of the long one."""

    title: str
    tasks: int
    names: int
    few: int
    many: int
    linger: float = 0.0
    #: ``tasks``, or what blocks one thread: ``threads`` (``aiodlock.sync``) or ``redis-py``.
    contender: str = "tasks"


CASES: dict[str, Case] = {
    "one": Case("one task", 1, 1, 100, 600),
    "names": Case("64 tasks on 64 names", 64, 64, 128, 1408),
    "contended": Case("16 tasks on one name", 16, 1, 64, 704),
    "linger": Case("one task, `linger`", 1, 1, 200, 5_200, linger=600.0),
    "lingers": Case("64 tasks on 64 names, `linger`", 64, 64, 640, 6_400, linger=600.0),
    "thread": Case("one thread, `aiodlock.sync`", 1, 1, 100, 600, contender="threads"),
    "redis-py": Case("one thread, redis-py's `Lock`", 1, 1, 100, 600, contender="redis-py"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.instructions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--against", metavar="PYTHON", help="the Python of another tree's environment"
    )
    parser.add_argument("--only", choices=CASES, help="one load alone")
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        parser.error("there is no valgrind on PATH")
    ratio = " other tree | this, of the other |" if options.against else ""
    print(f"| instructions per acquire and release | this tree |{ratio}")
    print(f"|---|---:|{'---:|---:|' if options.against else ''}")
    for key, case in CASES.items():
        if options.only in (None, key):
            ours = count(sys.executable, case)
            row = f"| {case.title} | {ours:,} |"
            if options.against:
                theirs = count(options.against, case)
                row += f" {theirs:,} | {ours / theirs:.3f} |"
            print(row, flush=True)


def count(python: str, case: Case) -> int:
    """Return the instructions per pair of the package in that Python's environment."""
    with EmbeddedServer(find_valkey9(), config={"notify-keyspace-events": "Kgxe"}) as server:
        few, many = (_run(python, server.url, case, pairs) for pairs in (case.few, case.many))
    return round((many - few) / (case.many - case.few))


def _run(python: str, url: str, case: Case, pairs: int) -> int:
    load = (url, case.contender, _SLOWER, case.tasks, case.names, pairs, case.linger)
    # Safe path: the modules beside the worker are not to be found by its imports.
    worker = [python, "-P", str(_WORKER), *map(str, load)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    # Starting is short with byte code on disk, and the same in both runs.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run(worker, env=environment, check=True)
    done = subprocess.run(
        [*_VALGRIND, *worker],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    found = _COUNT.search(done.stderr)
    if done.returncode or found is None:
        raise RuntimeError(f"valgrind failed:\n{done.stderr[-2000:]}")
    return int(found[1].replace(",", ""))


if __name__ == "__main__":
    main()
