"""Which files the seeds of a kind load: modules of this tree, and the scripts.

``python -m tests.simulation.loaded tests.simulation.memory MachineSimulation`` runs a few seeds, and prints
them. Nothing of the tree is imported here before that.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: Seeds after which all is loaded: modules are imported at the head of others, or when a client is made.
_SEEDS = 3
_FOLDERS = ("aiodlock", "tests")


def tree_hash(kind: type, root: Path = ROOT) -> str:
    """Return a hash of all that seeds of a kind load; of nothing else."""
    return hash_of(loaded_by(kind, root), root)


def hash_of(files: Iterable[str], root: Path = ROOT) -> str:
    """Return a hash of the names of files and of what is in them now."""
    digest = sha256()
    for file in files:
        digest.update(f"{file}\0".encode() + (root / file).read_bytes())
    return digest.hexdigest()[:16]


@cache
def loaded_by(kind: type, root: Path = ROOT) -> list[str]:
    """Return the files that seeds of a kind load, below ``root``."""
    command = [sys.executable, "-m", __name__, kind.__module__, kind.__qualname__]
    ran = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return ran.stdout.splitlines()


def _print_loaded(module: str, name: str) -> None:
    opened: set[str] = set()

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str):
            opened.add(args[0])

    sys.addaudithook(note)
    kind = getattr(import_module(module), name)
    run_seed = import_module("tests.simulation.run").run_seed
    for seed in range(_SEEDS):
        run_seed(seed, None, kind)
    modules = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    opened |= {file for name, file in modules.items() if file and name != "__main__"}
    found = set()
    for file in opened:
        path = Path(file).resolve()
        if "__pycache__" not in path.parts and path.is_relative_to(ROOT):
            relative = path.relative_to(ROOT)
            if relative.parts[0] in _FOLDERS:
                found.add(relative.as_posix())
    print("\n".join(sorted(found)))


if __name__ == "__main__":
    _print_loaded(*sys.argv[1:])
