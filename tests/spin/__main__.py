"""Explore the models with Spin: ``python -m tests.spin``, or with ``--small`` what CI runs."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .configurations import CONFIGURATIONS
from .run import Result, check, missing

#: Minutes for a search that is not exhaustive anyway.
_SUPERTRACE = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.spin", description=__doc__)
    parser.add_argument("--small", action="store_true", help="only what takes seconds")
    parser.add_argument("-k", default="", metavar="WORD", help="only configurations with it")
    parser.add_argument("--memory", type=int, default=6000, help="MB for one run (default: 6000)")
    parser.add_argument("--minutes", type=float, default=10.0, help="for one run (default: 10)")
    parser.add_argument("--quiet", action="store_true", help="print no counterexamples")
    chosen = parser.parse_args()
    program = missing()
    if program is not None:
        print(f"{program} is not installed (Debian: apt-get install spin gcc)", file=sys.stderr)
        return 2
    print(_ROW.format("configuration", "states", "depth", "errors", "time", "memory", ""))
    bad = []
    for configuration in CONFIGURATIONS:
        if (chosen.small and not configuration.small) or chosen.k not in configuration.name:
            continue
        with tempfile.TemporaryDirectory() as directory:
            minutes = min(chosen.minutes, _SUPERTRACE) if configuration.bits else chosen.minutes
            result = check(configuration, Path(directory), chosen.memory, minutes * 60)
        print(_row(result), flush=True)
        if not result.as_expected:
            bad.append(result)
        if result.counterexample and not (chosen.quiet and result.as_expected):
            print(result.counterexample, flush=True)
    for result in bad:
        print(f"not as it should be: {result.configuration.name}", file=sys.stderr)
    return bool(bad)


_ROW = "{:66} {:>12} {:>6} {:>6} {:>9} {:>9}  {}"


def _row(result: Result) -> str:
    if result.configuration.caught:
        verdict = "refuted, as it should be" if result.errors else "NOT REFUTED"
    elif result.errors:
        verdict = "VIOLATED"
    else:
        verdict = "holds" if result.complete else "no violation, not explored to the end"
    return _ROW.format(
        result.configuration.name,
        f"{result.states:,}",
        result.depth,
        result.errors,
        f"{result.seconds:.1f} s",
        f"{result.megabytes:.0f} MB",
        verdict,
    )


if __name__ == "__main__":
    sys.exit(main())
