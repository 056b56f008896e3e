"""Many seeds with a record in a file: stopped at any time, continued later, summed up over several files.

The file has JSON lines: what is run and on which tree, then one line per block of seeds. SIGTERM and Ctrl-C
let each process end its seed, and record what it has of its block: what is missing is run by the next call.
A file of another tree is not continued: its seeds were seeds of other code.
The hash of a tree covers the files that seeds of that kind use (``loaded.py``), and no others.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from time import process_time
from typing import Any

from .loaded import ROOT, tree_hash
from .run import Total, collector_at_rest, run_seed
from .scenario import Simulation

_BLOCK = 50


class OtherTree(Exception):
    """The file was begun on other code, or for other seeds."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """What is run: the first line of a file."""

    kind: str
    start: int
    tree: str
    commit: str


@dataclass(slots=True)
class Block:
    """Some seeds in a row: a line of a file."""

    first: int
    seeds: int
    grants: int
    virtual_seconds: float
    #: Of CPU time: other work on the machine counts less in it.
    seconds: float
    violations: dict[str, str] = field(default_factory=dict)


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stdout.strip()


class Stopped(Exception):
    """A signal has ended the campaign; all that was run is on record."""


class _Stop:
    """Whether a signal has come, here or in the process that began this one."""

    def __init__(self) -> None:
        self._came = False
        #: What those that this one began are told by, and what this one is told by.
        self._tells: Any = None
        self._hears: Any = None

    def __bool__(self) -> bool:
        return self._came or (self._hears is not None and self._hears.is_set())

    def _come(self, number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # the next one ends it at once
        self._came = True
        if self._tells is not None:
            self._tells.set()

    @contextmanager
    def listening(self, tells: Any = None) -> Iterator[None]:
        """Signals stop the campaign, meanwhile."""
        self._came, self._tells = False, tells
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = [signal.signal(number, self._come) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def listen_to(self, hears: Any) -> None:
        """For good, as one of the processes of a campaign."""
        self._hears = hears
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._come)


_stop = _Stop()


def _listen_to(event: Any) -> None:
    _stop.listen_to(event)


def run_block(kind: type[Simulation], first: int, seeds: int) -> Block:
    """Run some seeds, or those until a signal comes."""
    began, total, violations = process_time(), Total(), {}
    with collector_at_rest() as collect:
        for seed in range(first, first + seeds):
            if _stop:
                break
            outcome = run_seed(seed, None, kind)
            total.add(outcome)
            collect()
            if outcome.checker:
                violations[str(seed)] = outcome.message
    seconds, virtual = round(process_time() - began, 3), round(total.virtual_seconds, 3)
    return Block(first, total.seeds, total.grants, virtual, seconds, violations)


def read(path: Path) -> tuple[Campaign, list[Block]]:
    """Return what a file tells, in the order of the seeds; the last line may have been cut off."""
    lines = path.read_text().split("\n")
    complete = [json.loads(line) for line in lines[:-1]]
    if not complete:
        raise ValueError(f"{path} has no complete line")
    blocks = [Block(**line) for line in complete[1:]]
    return Campaign(**complete[0]), sorted(blocks, key=lambda block: block.first)


def run(
    path: Path, name: str, kind: type[Simulation], start: int, seeds: int, jobs: int = 1
) -> bool:
    """Run what is missing of ``seeds`` seeds from ``start`` on; return whether there were violations.

    :raises Stopped: a signal came.
    """
    campaign = Campaign(name, start, tree_hash(kind), _commit())
    done: list[Block] = []
    if path.exists() and path.stat().st_size:
        known, done = read(path)
        if (known.kind, known.start, known.tree) != (name, start, campaign.tree):
            raise OtherTree(
                f"{path} is of {known.kind} from {known.start} on the tree {known.tree}, "
                f"this is {name} from {start} on {campaign.tree}: take another file"
            )
        _drop_half_a_line(path)
    else:
        path.write_text(json.dumps(asdict(campaign)) + "\n")
    missing = list(_missing(done, start, start + seeds))
    with path.open("a", buffering=1) as file:
        for block in _blocks(kind, missing, jobs):
            file.write(json.dumps(asdict(block)) + "\n")
            done.append(block)
            for seed, message in block.violations.items():
                print(f"seed {seed}: {message}", flush=True)
            print(f"... {summed([(campaign, done)])}", file=sys.stderr, flush=True)
    print(summed([(campaign, done)]), flush=True)
    if sum(block.seeds for block in done) < seeds:
        raise Stopped
    return any(block.violations for block in done)


def _missing(done: Sequence[Block], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Return what is to be run: first seeds, and how many."""
    for block in (*done, Block(end, 0, 0, 0.0, 0.0)):
        while start < min(block.first, end):
            yield start, min(_BLOCK, block.first - start)
            start += min(_BLOCK, block.first - start)
        start = max(start, block.first + block.seeds)


def _blocks(
    kind: type[Simulation], missing: Sequence[tuple[int, int]], jobs: int
) -> Iterator[Block]:
    """Run them, and give those that have any seeds; in the order in which they end."""
    if jobs == 1:
        with _stop.listening():
            for first, seeds in missing:
                if (block := run_block(kind, first, seeds)).seeds:
                    yield block
                if _stop:
                    break
        return
    context = get_context("spawn")
    event = context.Event()
    with (
        _stop.listening(event),
        ProcessPoolExecutor(jobs, context, _listen_to, (event,)) as pool,
    ):
        waiting, under_way = deque(missing), set[Future[Block]]()
        while under_way or (waiting and not _stop):
            while waiting and not _stop and len(under_way) < 2 * jobs:
                under_way.add(pool.submit(run_block, kind, *waiting.popleft()))
            ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            yield from (block for one in ended if (block := one.result()).seeds)


def _drop_half_a_line(path: Path) -> None:
    text = path.read_text()
    path.write_text(text[: text.rindex("\n") + 1])


def summed(campaigns: Sequence[tuple[Campaign, Sequence[Block]]]) -> str:
    """Return in one line what campaigns came to."""
    blocks = [block for _, part in campaigns for block in part]
    seeds = sum(block.seeds for block in blocks)
    hours = sum(block.virtual_seconds for block in blocks) / 3600
    seconds = sum(block.seconds for block in blocks)
    bad = sum(len(block.violations) for block in blocks)
    rate = f", {seeds / seconds:.1f} seeds per second of CPU time" if seconds else ""
    grants = sum(block.grants for block in blocks)
    return f"{seeds} seeds, {grants} grants, {hours:.1f} h of virtual time, {bad} violations{rate}"


def summary(paths: Sequence[Path]) -> str:
    """Return a table of campaigns, with the seeds that failed."""
    rows = ["| store | seeds | tree | commit | grants | virtual hours | violations |"]
    rows.append("|---|---|---|---|---|---|---|")
    everything: list[tuple[Campaign, list[Block]]] = []
    bad: list[str] = []
    for path in paths:
        campaign, blocks = read(path)
        everything.append((campaign, blocks))
        last = max((block.first + block.seeds for block in blocks), default=campaign.start) - 1
        count = sum(block.seeds for block in blocks)
        holes = "" if campaign.start + count > last else f" ({count} of them)"
        found: dict[str, Any] = {s: m for block in blocks for s, m in block.violations.items()}
        hours = sum(block.virtual_seconds for block in blocks) / 3600
        rows.append(
            f"| {campaign.kind} | {campaign.start}-{last}{holes} | {campaign.tree} | {campaign.commit} "
            f"| {sum(block.grants for block in blocks)} | {hours:.1f} | {len(found)} |"
        )
        bad += [f"{campaign.kind} seed {seed}: {message}" for seed, message in found.items()]
    return "\n".join((*rows, "", summed(everything), *bad))
