"""Take out each condition of the protocol once, run its fast tests, and list the survivors.

    python -m tests.mutation --of machine --campaign machine.jsonl
    python -m tests.mutation --of lua --only extend.lua --list
    python -m tests.mutation --summary machine.jsonl

The tests of a mutant run until the first one fails. A campaign's file has a line per mutant; one that is in
it is not run again unless the file it was taken from has changed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from time import monotonic

import pytest

from .. import servers
from .conditions import Language, Mutant, conditions, described
from .forks import Forks, Try

_ROOT = Path(__file__).parents[2]

_HEART = ("locking", "shared", "semaphore", "lock_delay", "once", "hold_at_least", "linger")
_CONTRACT = f"contract/test_({'|'.join(_HEART)})"


@dataclass(frozen=True)
class _Subject:
    language: Language
    files: str
    #: Where the tests are: pytest's arguments.
    arguments: tuple[str, ...]
    #: Which of them run, in this order: what finds their ids. A busy machine fails none of the first ones.
    stages: tuple[str, ...]
    #: The last stage with ``--thorough``.
    contract: str
    #: PostgreSQL servers, of which one start takes longer than most tests.
    servers: tuple[str, ...] = ()
    #: The parts, files or functions of PL/pgSQL, that the tests of a stage run nothing of.
    blind: Mapping[str, str] = field(default_factory=dict)


_HISTORIES = r"model/test_histories\.py"
_RANDOM = r"model/test_scripts\.py"
_VOTES = r"protocol/test_votes\.py"
#: Not those of the text of scripts, of other mutants, of speed, and of random histories.
_SCRIPTS = (
    r"protocol/test_(?!votes|guards|lua_headers|leave.py::test_time_to|versions.py::test_two)"
)
_SIMULATED_VOTES = r"simulation/test_votes\.py"
_SIMULATED_QUORUM = r"simulation/test_scripted_quorum\.py"
_OF_A_QUORUM = "vote|unvote|break_votes|inspect_votes|tickets|tokens"
_OF_ONE_SERVER = "acquire|extend|leave|break|inspect"

#: By which functions of PostgreSQL the histories by hand go.
_GENERAL, _SHORT, _BY_TURNS = (
    rf"by_hand_as_the_machine\[{ways}\]" for ways in (r"\w+-general", r"\w+-short", ".*-or-.*")
)
_OTHERS = r"model/test_postgres\.py(?!::test_functions_answer)"
_SWEPT = "sweeps_change_no_answer_of_histories_by_hand|pauses_is_not_swept"
#: What no history calls.
_BESIDE = "sweep|hello|names|check_isolation|opened"

_SUBJECTS = {
    "lua": _Subject(
        "lua",
        "aiodlock/backends/redis/lua/*.lua",
        (
            *("tests/protocol", "tests/model/test_histories.py", "tests/model/test_scripts.py"),
            *("tests/simulation/test_votes.py", "tests/simulation/test_scripted_quorum.py"),
            *("tests/contract", "--store", "valkey9"),
        ),
        (_HISTORIES, _SIMULATED_VOTES, _VOTES, _SCRIPTS, _RANDOM, _SIMULATED_QUORUM),
        "contract/",
        blind={
            **dict.fromkeys((_HISTORIES, _SCRIPTS, _RANDOM), _OF_A_QUORUM),
            **dict.fromkeys((_VOTES, _SIMULATED_VOTES, _SIMULATED_QUORUM), _OF_ONE_SERVER),
        },
    ),
    "sql": _Subject(
        "sql",
        "aiodlock/backends/postgres/schema.sql",
        (
            *("tests/model/test_postgres.py", "tests/model/test_postgres_short_ways.py"),
            *("tests/model/test_sweeps.py", "tests/contract", "--store", "postgres"),
            *("-k", "not taken_out and not postgres18"),
        ),
        (
            *(_GENERAL, _BY_TURNS, _SHORT, "by_hand_go_their_ways", _OTHERS, _SWEPT),
            r"contract/test_postgres\.py",
            r"model/test_postgres\.py",
            r"model/test_postgres_short_ways\.py",
            r"model/test_sweeps\.py",
            _CONTRACT,
        ),
        "contract/",
        blind={
            _GENERAL: f"queue_behind|hand_over|many|rows_of|{_BESIDE}",
            _BY_TURNS: _BESIDE,
            _SHORT: _BESIDE,
            _SWEPT: "turn|queue_behind|hand_over|many|rows_of",
        },
        servers=("postgres",),
    ),
    "machine": _Subject(
        "python",
        "aiodlock/backends/memory/machine.py",
        (
            *("tests/unit/test_machine.py", "tests/model/test_histories.py"),
            *("tests/model/test_scripts.py", "tests/contract", "--store", "valkey9,memory"),
        ),
        (r"unit/test_machine\.py", _HISTORIES, _RANDOM, rf"{_CONTRACT}.*\[memory"),
        r"contract/.*\[memory",
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


def _mutants(subject: _Subject, only: Sequence[str]) -> list[tuple[Path, str, Mutant]]:
    found = []
    paths = sorted(_ROOT.glob(subject.files))
    for path in [path for part in only for path in paths if path.name.startswith(part)]:
        text = path.read_text()
        found += [(path, text, mutant) for mutant in conditions(text, subject.language)]
    return found


def _part(path: Path, text: str, mutant: Mutant) -> str:
    """Return what a condition is in: a function of PL/pgSQL, or a file."""
    part = path.stem
    for found in re.finditer(
        r"^create function aiodlock\.(\w+)", text[: mutant.start], re.MULTILINE
    ):
        part = found[1]
    return part


def _read(path: Path) -> list[Outcome]:
    if not path.exists():
        return []
    read = [Outcome(**json.loads(line)) for line in path.read_text().split("\n")[:-1]]
    return [*{one.text: one for one in read}.values()]  # the last one counts


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
    parser.add_argument(
        "--only", nargs="+", default=[""], help="how the files' names begin, in order"
    )
    parser.add_argument("--list", action="store_true", help="list the conditions, and run nothing")
    parser.add_argument("--first", type=int, default=0, help="begin with this one of the list")
    parser.add_argument("--step", type=int, default=1, help="run each so many-th: a sample")
    parser.add_argument("--stages", type=int, help="run so many of the stages only")
    parser.add_argument("--again", action="store_true", help="run the campaign's survivors again")
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
    stages = [*subject.stages, subject.contract] if options.thorough else [*subject.stages]
    past = _read(options.campaign) if options.campaign else []
    known = {one.text: one for one in past if one.noticed_by or not options.again}
    outcomes: list[Outcome] = []

    def run(noticed_by: Try) -> None:
        began = monotonic()
        if unchanged := noticed_by(mutants[0][0], "", mutants[0][1]):
            print(f"the tests fail without a mutant: {unchanged}")
            return
        print(f"{len(mutants)} mutants; the tests take {monotonic() - began:.1f} s without one")
        for path, text, mutant in mutants:
            changed = mutant.of(text)
            outcome = known.get(_hash(changed))
            if outcome is None:
                began = monotonic()
                first = noticed_by(path, _part(path, text, mutant), changed)
                outcome = Outcome(
                    path.name, described(text, mutant), _hash(changed), first,
                    round(monotonic() - began, 1),
                )  # fmt: skip
                print(f"{path.name}:{outcome.what}: {first or 'SURVIVED'}", flush=True)
                if options.campaign:
                    with options.campaign.open("a") as file:
                        file.write(json.dumps(asdict(outcome)) + "\n")
            outcomes.append(outcome)

    forks = Forks(subject.language, stages[: options.stages], subject.blind, run)
    usual = ("-q", "-s", "--assert=plain", "-p", "no:cacheprovider", "--hypothesis-profile=mutants")
    with servers.kept_for_forks(*subject.servers):
        pytest.main([*usual, *subject.arguments], plugins=[forks])
    print(summary(outcomes))
    return int(len(outcomes) < len(mutants) or any(not one.noticed_by for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
