"""Random histories on the functions in PostgreSQL and on the machine, in parts with a seed each.

``python -m tests.model --steps 50000`` takes about so many steps, 1,000 to a part. ``--start`` is the seed
of the first part. So a long run can be continued, and a part that failed runs alone:
``--start 17 --steps 1000``. With ``--sweeps`` the histories are of several names, and the database sweeps
between their steps.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback

from hypothesis import seed

from ..servers import POSTGRES, postgres_server
from .sweeps import Swept, SweptLocks, SweptOnces, SweptSemaphores
from .test_scripts import Locks, Onces, Semaphores, take_steps
from .turns import Database, VirtualTurns

#: So many steps of each part are of locks; of the others a third, since there is less to go wrong.
_PART = 1_000
_USUAL: list[type[Locks]] = [Locks, Semaphores, Onces]
_SWEPT: list[type[Locks]] = [SweptLocks, SweptSemaphores, SweptOnces]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", choices=sorted(POSTGRES), default="postgres")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--start", type=int, default=0, help="the seed of the first part")
    parser.add_argument("--sweeps", action="store_true")
    asked = parser.parse_args()
    machines = _SWEPT if asked.sweeps else _USUAL
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or a server would be left
    parts, failed = max(1, asked.steps // _PART), []
    taken: dict[str, int] = {}
    with postgres_server(asked.server, fsync="off") as server:
        database = Database(server.url)
        for part in range(asked.start, asked.start + parts):
            started = time.monotonic()
            try:
                for machine in machines:
                    _take_part(database, machine, part, taken)
            except Exception:
                failed.append(part)
                traceback.print_exc()
            counts = ", ".join(f"{count:,} of {name}" for name, count in taken.items())
            print(f"part {part}: {counts} ({time.monotonic() - started:.0f} s)", flush=True)
        database.close()
    print(f"{sum(taken.values()):,} steps in {parts} parts; failed: {failed or 'none'}")
    sys.exit(bool(failed))


def _take_part(database: Database, machine: type[Locks], part: int, taken: dict[str, int]) -> None:
    machine.steps = 0

    @seed(part)
    def make() -> Locks:
        if issubclass(machine, Swept):
            return machine(database)
        return machine(VirtualTurns(database, machine.kind))

    steps = _PART if machine.kind == "lock" else _PART // 3
    try:
        take_steps(make, steps, database=None)
    finally:
        name = machine.kind
        taken[name] = taken.get(name, 0) + machine.steps


if __name__ == "__main__":
    main()
