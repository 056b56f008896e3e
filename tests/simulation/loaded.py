"""Which files the seeds of a kind use: modules of this tree, and the scripts.

``python -m tests.simulation.loaded tests.simulation.memory MachineSimulation`` runs a few seeds, and prints
them. Nothing of the tree is imported here before that. A package of which nothing runs in these seeds is
left out: the modules of a Cluster are imported with those of a server, and say nothing about its seeds.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
#: Seeds in which something of all packages runs that are used at all. In the first one, a quorum has Lua.
_SEEDS = 3
_FOLDERS = ("aiodlock", "tests")


def tree_hash(kind: type) -> str:
    """Return a hash of all that seeds of a kind use; of nothing else."""
    return hash_of(loaded_by(kind))


def hash_of(files: Iterable[str], root: Path = ROOT) -> str:
    """Return a hash of the names of files and of what is in them now."""
    digest = sha256()
    for file in files:
        digest.update(f"{file}\0".encode() + (root / file).read_bytes())
    return digest.hexdigest()[:16]


@cache
def loaded_by(kind: type) -> list[str]:
    """Return the files that seeds of a kind use."""
    command = [sys.executable, "-m", __name__, kind.__module__, kind.__qualname__]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return ran.stdout.splitlines()


def _print_loaded(module: str, name: str, seeds: int = _SEEDS) -> None:
    opened: set[str] = set()
    ran: set[str] = set()

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str):
            opened.add(args[0])

    def note_code(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            ran.add(frame.f_code.co_filename)

    sys.addaudithook(note)
    kind = getattr(import_module(module), name)
    run_seed = import_module("tests.simulation.run").run_seed
    run_seed(0, None, kind)
    sys.setprofile(note_code)
    for seed in range(seeds):
        run_seed(seed, None, kind)
    sys.setprofile(None)
    packages = {Path(file).parent for file in ran}
    modules = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    opened |= {file for name, file in modules.items() if file and name != "__main__"}
    found = set()
    for file in opened:
        path = Path(file).resolve()
        if "__pycache__" not in path.parts and path.is_relative_to(ROOT):
            relative = path.relative_to(ROOT)
            package = path.parent if path.suffix == ".py" else path.parents[1]
            if relative.parts[0] in _FOLDERS and package in packages:
                found.add(relative.as_posix())
    print("\n".join(sorted(found)))


if __name__ == "__main__":
    _print_loaded(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
