"""A soak: several processes, every mode, random faults, on any store, for as long as one likes.

    python -m tests.soak --minutes 10 --store postgres
    python -m tests.soak --minutes 60 --store etcd --campaign soak.jsonl
    python -m tests.soak --summary soak.jsonl

Ends with one line: load, faults, violations; and with code 0 only when there was no violation. A campaign
runs parts, each of ten minutes, until its file has the minutes of that store; SIGINT ends a part in order.
`sentinel` moves names, in a hosts file of its own: for that it needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import campaign
from .memory import plot
from .sentinel import have_own_names
from .soak import Options, Result, Soak
from .tormentors import STORES


def _part(options: argparse.Namespace, minutes: float) -> Result:
    seed = int.from_bytes(os.urandom(4)) if options.seed is None else options.seed
    one = Options(options.store, minutes, options.processes, options.tasks, options.pause, seed)
    with tempfile.TemporaryDirectory(prefix="aiodlock-soak-") as temporary:
        folder = Path(temporary)
        if options.journals is not None:
            folder = options.journals / f"{options.store}-{seed}"
            folder.mkdir(parents=True)
        soak = Soak(one, folder)
        result = asyncio.run(soak.run())
    print(
        json.dumps({"seed": seed, "faults": result.faults, "counts": result.counts}, sort_keys=True)
    )
    for violation in result.violations[:20]:
        print(f"violation: {violation}")
    for violation in result.not_judged[:20]:
        print(f"not judged: {violation}")
    print(result, flush=True)
    if options.plot is not None:
        path = options.plot
        if options.campaign is not None:
            path = path.with_name(f"{path.stem}-{options.store}-{seed}{path.suffix}")
        plot(soak.memory, soak.waits, str(result).replace("; ", ";\n", 2), path)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--store", choices=STORES, default="valkey9")
    parser.add_argument("--processes", type=int, default=4, help="the first two are never killed")
    parser.add_argument("--tasks", type=int, default=12, help="of each process")
    parser.add_argument(
        "--pause", type=float, default=3.0, help="mean seconds between faults of a kind"
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument("--plot", type=Path, help="draw memory and waits over time into this PNG")
    parser.add_argument("--journals", type=Path, help="keep in this folder what the workers wrote")
    parser.add_argument("--campaign", type=Path, help="go on until this file has the minutes")
    parser.add_argument("--part", type=float, default=10.0, help="minutes of a part of a campaign")
    parser.add_argument("--summary", type=Path, nargs="+", help="print what these files come to")
    options = parser.parse_args(arguments)
    if options.plot is not None:
        importlib.import_module("matplotlib")  # missed now, and not when the soak is over
    if options.summary:
        print(campaign.summary(options.summary))
        return 0
    if options.store == "sentinel":
        have_own_names()
    if options.campaign is None:
        return 1 if _part(options, options.minutes).violations else 0

    def part(minutes: float) -> Result | None:
        wanted = min(minutes, options.part)
        result = _part(options, wanted)
        stopped.append(result.minutes < wanted * 0.99)
        return result

    stopped: list[bool] = []
    wrong = campaign.run(
        options.campaign,
        options.store,
        options.minutes,
        lambda minutes: None if any(stopped) else part(minutes),
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
