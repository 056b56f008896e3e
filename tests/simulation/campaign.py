"""Many seeds with a record in a file: stopped at any time, continued later, summed up over several files.

The file has JSON lines: what is run and on which tree, then one line per block of seeds. A block that was
not finished is run again. A file of another tree is not continued: its seeds were seeds of other code.
The hash of a tree covers the files that seeds of that kind use (``loaded.py``), and no others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
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


def run_block(kind: type[Simulation], first: int, seeds: int) -> Block:
    """Run some seeds."""
    began, total, violations = process_time(), Total(), {}
    with collector_at_rest() as collect:
        for seed in range(first, first + seeds):
            outcome = run_seed(seed, None, kind)
            total.add(outcome)
            collect()
            if outcome.checker:
                violations[str(seed)] = outcome.message
    seconds = process_time() - began
    return Block(
        first, seeds, total.grants, round(total.virtual_seconds, 3), round(seconds, 3), violations
    )


def read(path: Path) -> tuple[Campaign, list[Block]]:
    """Return what a file tells; the last line may have been cut off."""
    lines = path.read_text().split("\n")
    complete = [json.loads(line) for line in lines[:-1]]
    if not complete:
        raise ValueError(f"{path} has no complete line")
    return Campaign(**complete[0]), [Block(**line) for line in complete[1:]]


def run(
    path: Path, name: str, kind: type[Simulation], start: int, seeds: int, jobs: int = 1
) -> bool:
    """Run what is missing of ``seeds`` seeds from ``start`` on; return whether there were violations."""
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
    following = max((block.first + block.seeds for block in done), default=start)
    firsts = iter(range(following, start + seeds, _BLOCK))
    with path.open("a", buffering=1) as file:
        for block in _blocks(kind, firsts, start + seeds, jobs):
            file.write(json.dumps(asdict(block)) + "\n")
            done.append(block)
            for seed, message in block.violations.items():
                print(f"seed {seed}: {message}", flush=True)
            print(f"... {summed([(campaign, done)])}", file=sys.stderr, flush=True)
    print(summed([(campaign, done)]))
    return any(block.violations for block in done)


def _blocks(kind: type[Simulation], firsts: Iterator[int], end: int, jobs: int) -> Iterator[Block]:
    def length(first: int) -> int:
        return min(_BLOCK, end - first)

    if jobs == 1:
        for first in firsts:
            yield run_block(kind, first, length(first))
        return
    # In order, so that a file has no holes. No process waits for the slowest one of some blocks.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        under_way: deque[Future[Block]] = deque()
        for first in firsts:
            under_way.append(pool.submit(run_block, kind, first, length(first)))
            if len(under_way) >= 4 * jobs:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


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
        found: dict[str, Any] = {s: m for block in blocks for s, m in block.violations.items()}
        hours = sum(block.virtual_seconds for block in blocks) / 3600
        rows.append(
            f"| {campaign.kind} | {campaign.start}-{last} | {campaign.tree} | {campaign.commit} "
            f"| {sum(block.grants for block in blocks)} | {hours:.1f} | {len(found)} |"
        )
        bad += [f"{campaign.kind} seed {seed}: {message}" for seed, message in found.items()]
    return "\n".join((*rows, "", summed(everything), *bad))
