"""Campaigns go on where they were stopped, on the same tree only; and failing seeds are cut short."""

from __future__ import annotations

import gc
import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from . import campaign
from .loaded import ROOT, hash_of, loaded_by, tree_hash
from .memory import MachineSimulation
from .quorum import QuorumSimulation
from .scenario import Simulation
from .shrink import diagram, shrink
from .world import Wrong


@pytest.fixture(autouse=True)
def few_seeds_in_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "_BLOCK", 2)


def _run(path: Path, seeds: int, start: int = 3) -> bool:
    return campaign.run(path, "machine", MachineSimulation, start, seeds)


def test_campaign_goes_on_behind_the_last_complete_block(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert not _run(whole, 5)
    _run(parts, 2)
    with parts.open("a") as file:
        file.write('{"first": 5, "see')  # stopped in the middle of a line
    _run(parts, 5)
    told = [campaign.read(path)[1] for path in (whole, parts)]
    assert [(b.first, b.seeds, b.grants) for b in told[0]] == [
        (b.first, b.seeds, b.grants) for b in told[1]
    ]
    assert [(block.first, block.seeds) for block in told[0]] == [(3, 2), (5, 2), (7, 1)]


def test_campaign_of_another_tree_or_range_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    _run(path, 1)
    before = path.read_text()
    with pytest.raises(campaign.OtherTree, match="from 3"):
        _run(path, 1, start=4)
    monkeypatch.setattr(campaign, "tree_hash", lambda kind: "other")
    with pytest.raises(campaign.OtherTree, match="other"):
        _run(path, 2)
    assert path.read_text() == before


def test_processes_find_what_one_finds(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    campaign.run(alone, "machine", MachineSimulation, 3, 4)
    campaign.run(together, "machine", MachineSimulation, 3, 4, jobs=2)
    told = [campaign.read(path)[1] for path in (alone, together)]
    assert [(b.first, b.grants) for b in told[0]] == [(b.first, b.grants) for b in told[1]]


_SHORT_BLOCKS = """
import sys
from tests.simulation import __main__ as simulation, campaign
campaign._BLOCK = 3
sys.exit(simulation.main())
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_campaign_that_is_terminated_loses_no_seed_and_runs_none_twice(
    tmp_path: Path, jobs: int
) -> None:
    path, most = tmp_path / "file", 100_000
    command = [sys.executable, "-c", _SHORT_BLOCKS, "--store", "memory", "--jobs", str(jobs)]
    command += ["--campaign", str(path), "--seeds", str(most)]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE) as process:
        while not path.exists() or path.read_text().count("\n") < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        told, _ = process.communicate()
    assert process.returncode == 130
    blocks = campaign.read(path)[1]
    seeds = [seed for block in blocks for seed in range(block.first, block.first + block.seeds)]
    assert told.startswith(f"{len(seeds)} seeds, ")
    assert len({*seeds}) == len(seeds) < most


def test_what_is_missing_of_blocks_is_run(tmp_path: Path) -> None:
    path = tmp_path / "file"
    _run(path, 6)
    header, one, other, last = path.read_text().splitlines()
    short = json.dumps({**json.loads(one), "seeds": 1})
    path.write_text("\n".join((header, last, short, "")))
    assert not _run(path, 7)
    blocks = [(block.first, block.seeds) for block in campaign.read(path)[1]]
    assert blocks == [(3, 1), (4, 2), (6, 1), (7, 2), (9, 1)]
    assert json.loads(other)["first"] == 5
    assert "| 3-9 |" in campaign.summary([path])
    path.write_text("\n".join((header, last, short, "")))
    assert "| 3-8 (3 of them) |" in campaign.summary([path])


def test_block_keeps_nothing_of_the_one_before() -> None:
    """What the collector is told to leave alone stays for ever; a seed's world must not be of it."""
    collects = gc.isenabled()
    campaign.run_block(MachineSimulation, 3, 1)
    kept = gc.get_freeze_count()
    campaign.run_block(MachineSimulation, 4, 1)
    assert gc.get_freeze_count() <= kept
    assert gc.isenabled() == collects


def test_summary_tells_ranges_grants_hours_and_violations(tmp_path: Path) -> None:
    path = tmp_path / "file"
    _run(path, 2)
    block = campaign.Block(5, 2, 11, 7200.0, 1.0, {"6": "token: two"})
    with path.open("a") as file:
        file.write(json.dumps(asdict(block)) + "\n")
    text = campaign.summary([path])
    grants = campaign.read(path)[1][0].grants + 11
    assert f"| machine | 3-6 | {tree_hash(MachineSimulation)}" in text
    assert f"4 seeds, {grants} grants, 2.0 h of virtual time, 1 violations" in text
    assert "machine seed 6: token: two" in text


#: What no seeds of the simulation use.
_NEVER_USED = ("etcd", "postgres", "zookeeper", "/web/", "/cli/", "/cluster/", "test_", "variants")


def test_hash_of_a_quorum_covers_its_nodes_and_their_scripts() -> None:
    files = loaded_by(QuorumSimulation)
    core, script = "aiodlock/_request.py", "aiodlock/backends/redis/lua/vote.lua"
    assert {core, script, "aiodlock/backends/redis/quorum/votes.py"} < {*files}
    assert not [file for file in files if any(other in file for other in _NEVER_USED)]


def test_hash_covers_what_seeds_use_and_nothing_else(tmp_path: Path) -> None:
    files = loaded_by(MachineSimulation)
    core, store = "aiodlock/_request.py", "aiodlock/backends/etcd/store.py"
    machine, server = "aiodlock/backends/memory/machine.py", "tests/simulation/memory.py"
    assert {core, machine, server} < {*files}
    others = (*_NEVER_USED, "/redis/", "__main__")
    assert not [file for file in files if any(other in file for other in others)]
    for file in (*files, store):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    before = tree_hash(MachineSimulation)
    assert hash_of(files, tmp_path) == before

    (tmp_path / store).write_text("changed")
    assert hash_of(files, tmp_path) == before
    with (tmp_path / core).open("a") as changed:
        changed.write("# changed\n")
    assert hash_of(files, tmp_path) != before


def _fails_at_the_third_grant(simulation: Simulation) -> None:
    checkers = simulation.checkers

    def look(command: object, reply: object) -> None:
        if checkers.grants >= 3:
            raise Wrong("told", "a third grant")

    simulation.server.executed.append(look)


def test_failing_seed_is_cut_short_and_drawn() -> None:
    shrunk = shrink(4, MachineSimulation, _fails_at_the_third_grant, most_runs=40)
    assert shrunk is not None
    assert shrunk.outcome.checker == "told"
    assert shrunk.steps < shrunk.steps_before
    drawn = diagram(shrunk.outcome)
    assert drawn.startswith("sequenceDiagram\n    participant p0")
    assert "->>server: " in drawn
    assert drawn.endswith("told: a third grant")


def test_seed_that_does_not_fail_is_not_cut() -> None:
    assert shrink(3, MachineSimulation) is None
