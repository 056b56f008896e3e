"""Take out each condition of the protocol once, run its fast tests, and list the survivors.

    python -m tests.mutation --of machine --campaign machine.jsonl
    python -m tests.mutation --of lua --only extend.lua --list
    python -m tests.mutation --summary machine.jsonl

Each mutant runs in a copy of the library, until the first test fails. A campaign's file has a line per
mutant; one that is in it is not run again unless the file it was taken from has changed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic

from .conditions import Language, Mutant, conditions, described

_ROOT = Path(__file__).parents[2]
#: What a mutant makes run for ever is noticed after so many seconds.
_LONGEST = 300.0

_HEART = ("locking", "shared", "semaphore", "lock_delay", "once", "hold_at_least", "linger")


@dataclass(frozen=True)
class _Subject:
    language: Language
    files: str
    #: Fast tests: pytest's arguments, one run after the other. A busy machine fails none of the first ones.
    runs: tuple[tuple[str, ...], ...]
    #: What is run besides with ``--thorough``.
    contract: tuple[str, ...]


_SUBJECTS = {
    "lua": _Subject(
        "lua",
        "aiodlock/backends/redis/lua/*.lua",
        (
            ("tests/protocol", "--ignore=tests/protocol/test_guards.py", "--store", "valkey9"),
            ("tests/model/test_histories.py", "--store", "valkey9"),
            ("tests/model/test_scripts.py", "--store", "valkey9"),
            ("tests/simulation/test_votes.py", "tests/simulation/test_scripted_quorum.py"),
        ),
        ("tests/contract", "--store", "valkey9"),
    ),
    "sql": _Subject(
        "sql",
        "aiodlock/backends/postgres/schema.sql",
        (
            ("tests/model/test_postgres.py", "--store", "postgres"),
            (
                "tests/model/test_postgres_short_ways.py",
                "-k",
                "not taken_out",
                "--store",
                "postgres",
            ),
            (
                *(f"tests/contract/test_{one}.py" for one in ("postgres", *_HEART)),
                "--store",
                "postgres",
            ),
        ),
        ("tests/contract", "--store", "postgres"),
    ),
    "machine": _Subject(
        "python",
        "aiodlock/backends/memory/machine.py",
        (
            ("tests/unit/test_machine.py",),
            ("tests/model/test_histories.py", "--store", "valkey9"),
            ("tests/model/test_scripts.py", "--store", "valkey9"),
            (*(f"tests/contract/test_{one}.py" for one in _HEART), "--store", "memory"),
        ),
        ("tests/contract", "--store", "memory"),
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant: a line of a campaign's file."""

    file: str
    what: str
    #: Of the mutated text: another text makes another mutant.
    text: str
    #: The test that failed first; empty for a survivor.
    noticed_by: str
    seconds: float


def _mutants(subject: _Subject, only: str) -> list[tuple[Path, str, Mutant]]:
    found = []
    for path in sorted(_ROOT.glob(subject.files)):
        text = path.read_text()
        if only in path.name:
            found += [(path, text, mutant) for mutant in conditions(text, subject.language)]
    return found


def _run(copy: Path, path: Path, text: str, runs: Sequence[Sequence[str]]) -> str:
    """Return the first test that notices, or nothing."""
    target = copy / path.relative_to(_ROOT)
    before = target.read_text()
    target.write_text(text)
    try:
        for arguments in runs:
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "--hypothesis-profile",
                "mutants",
                *arguments,
            ]
            environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
            try:
                ran = subprocess.run(
                    command, cwd=copy, env=environment, capture_output=True, text=True,
                    timeout=_LONGEST, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return "it does not end"
            if ran.returncode:
                lines = [
                    line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
                ]
                return (lines or [f"code {ran.returncode}"])[0][:200]
        return ""
    finally:
        target.write_text(before)


def _copied(folder: Path) -> Path:
    copy = folder / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    copy.mkdir()
    for name in ("aiodlock", "tests", "examples", "docs", "benchmarks", "tools"):
        shutil.copytree(_ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "Makefile", "README.md", "CHANGELOG.md"):
        shutil.copy(_ROOT / name, copy / name)
    return copy


def _read(path: Path) -> list[Outcome]:
    if not path.exists():
        return []
    return [Outcome(**json.loads(line)) for line in path.read_text().split("\n")[:-1]]


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return how many mutants of each file were noticed, and the survivors."""
    by_file = Counter(outcome.file for outcome in outcomes)
    noticed = Counter(outcome.file for outcome in outcomes if outcome.noticed_by)
    rows = [
        f"{file}: {noticed[file]} of {count} noticed" for file, count in sorted(by_file.items())
    ]
    survivors = [f"survived: {one.file}:{one.what}" for one in outcomes if not one.noticed_by]
    return "\n".join((*rows, *survivors))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--of", choices=_SUBJECTS, default="machine")
    parser.add_argument("--only", default="", help="a part of a file's name")
    parser.add_argument("--list", action="store_true", help="list the conditions, and run nothing")
    parser.add_argument("--first", type=int, default=0, help="begin with this one of the list")
    parser.add_argument("--step", type=int, default=1, help="run each so many-th: a sample")
    parser.add_argument("--thorough", action="store_true", help="run the contract, too")
    parser.add_argument("--campaign", type=Path, help="keep outcomes here, and run what is missing")
    parser.add_argument("--summary", type=Path, nargs="+", help="print what these files say")
    options = parser.parse_args(arguments)
    if options.summary:
        print(summary([one for path in options.summary for one in _read(path)]))
        return 0
    subject = _SUBJECTS[options.of]
    mutants = _mutants(subject, options.only)[options.first :: options.step]
    if options.list:
        for path, text, mutant in mutants:
            print(f"{path.name}:{described(text, mutant)}")
        return 0
    runs = [*subject.runs, subject.contract] if options.thorough else [*subject.runs]
    known = {one.text: one for one in _read(options.campaign)} if options.campaign else {}
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="aiodlock-mutation-") as folder:
        copy = _copied(Path(folder))
        unchanged = _run(copy, mutants[0][0], mutants[0][1], runs[:1]) if mutants else ""
        if unchanged:
            print(f"the tests fail without a mutant: {unchanged}")
            return 2
        for path, text, mutant in mutants:
            changed = mutant.of(text)
            outcome = known.get(_hash(changed))
            if outcome is None:
                began = monotonic()
                noticed_by = _run(copy, path, changed, runs)
                outcome = Outcome(
                    path.name, described(text, mutant), _hash(changed), noticed_by,
                    round(monotonic() - began, 1),
                )  # fmt: skip
                print(f"{path.name}:{outcome.what}: {noticed_by or 'SURVIVED'}", flush=True)
                if options.campaign:
                    with options.campaign.open("a") as file:
                        file.write(json.dumps(asdict(outcome)) + "\n")
            outcomes.append(outcome)
    print(summary(outcomes))
    return int(any(not outcome.noticed_by for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
