"""What users install: the wheel, built from the sdist, without anything of this checkout."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Run by the Python of a fresh environment: import everything importable, list the data files.
_LOOK = """
import importlib.metadata, importlib.resources, json
import aiodlock
package = importlib.resources.files("aiodlock")
scripts = package / "backends" / "redis" / "lua"
lua = {f.name: f.read_text("utf-8") for f in scripts.iterdir() if f.name.endswith(".lua")}
print(json.dumps({
    "file": aiodlock.__file__,
    "version": importlib.metadata.version("aiodlock"),
    "lua": lua,
    "typed": (package / "py.typed").is_file(),
}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    # Without --wheel or --sdist, build makes the wheel out of the sdist: this tests both.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    assert len(list(out.glob("*.tar.gz"))) == 1
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a Python that has the wheel; for its dependencies it looks into our environment."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--no-deps", "--no-index", "--disable-pip-version-check", wheel),
        cwd=home,
    )
    (site,) = home.glob("lib/python*/site-packages")
    # Comes after its own packages; the .pth files in there (our editable install) do not count.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_wheel_has_the_scripts_and_the_types(python: Path, tmp_path: Path) -> None:
    seen = json.loads(run(python, "-I", "-W", "error", "-c", _LOOK, cwd=tmp_path))
    assert Path(seen["file"]).is_relative_to(python.parents[1])
    assert seen["version"] == "0.1.0"
    assert seen["typed"]
    here = {path.name: path.read_text("utf-8") for path in ROOT.glob("aiodlock/**/*.lua")}
    assert here, "the package has no scripts"
    assert seen["lua"] == here


def test_wheel_has_nothing_but_the_package(python: Path) -> None:
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    packages = {path.name for path in site.iterdir() if path.is_dir()}
    assert packages == {"aiodlock", "aiodlock-0.1.0.dist-info"}
