"""What users install: the wheel, built from the sdist, without anything of this checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Builds, installs, and has a type checker look at everything.
pytestmark = pytest.mark.timeout(900)

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
        [str(word) for word in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
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


def test_every_public_type_is_known_to_a_type_checker(python: Path, tmp_path: Path) -> None:
    """Pyright infers nothing: what users' editors show does not depend on the checker."""
    # Finds the Python whose packages it looks at on PATH.
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    command = ("pyright", "--verifytypes", "aiodlock", "--ignoreexternal", "--outputjson")
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(done.stdout)["typeCompleteness"]
    unknown = [symbol["name"] for symbol in found["symbols"] if not symbol["isTypeKnown"]]
    assert found["exportedSymbolCounts"]["withKnownType"] > 100
    assert unknown == []
    assert found["completenessScore"] == 1


def test_what_is_entered_is_a_context_manager_to_a_type_checker(
    python: Path, tmp_path: Path
) -> None:
    """For pyright, which is stricter than mypy about what ``__aexit__`` returns."""
    (tmp_path / "program.py").write_text(
        "from contextlib import AsyncExitStack\n"
        "import aiodlock\n"
        "async def main(client: aiodlock.Client, stack: AsyncExitStack) -> int:\n"
        "    lease = await stack.enter_async_context(client.lock('a'))\n"
        "    await stack.enter_async_context(client.rwlock('a').read)\n"
        "    await stack.enter_async_context(client.semaphore('a', 2))\n"
        "    await stack.enter_async_context(client.multilock('a', 'b'))\n"
        "    await stack.enter_async_context(client.once('a', keep=1))\n"
        "    await stack.enter_async_context(client.election('a').lead())\n"
        "    await stack.enter_async_context(await client.lock('a').acquire())\n"
        "    return lease.token\n"
    )
    command = ("pyright", "--pythonpath", str(python), "--outputjson", "program.py")
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert [one["message"] for one in found] == []


def test_command_of_the_wheel_runs(python: Path, tmp_path: Path) -> None:
    command = python.parent / "aiodlock"
    assert "run" in run(command, "--help", cwd=tmp_path)
    results = json.loads(
        run(command, "bench", "--url", "memory://", "--seconds", "0.1", "--json", cwd=tmp_path)
    )
    assert len(results) == 3
