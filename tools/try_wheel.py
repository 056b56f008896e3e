"""What users get: the wheel, installed into an empty environment of each Python, used as README says.

``python -m tools.try_wheel dist/aiodlock-0.1.0-py3-none-any.whl python3.11 python3.13`` prints a table. It
ends with an error when something does not work.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from aiodlock._embedded import EmbeddedServer, find_valkey9

README = Path(__file__).parents[1] / "README.md"
_ROW = "| {} | {} | {} | {} | {} | {} |"
#: Times an import in a fresh process, without what the interpreter itself takes. In time of the processor:
#: that does not depend on what else runs.
_IMPORT = """
import time
began = time.process_time()
import aiodlock
print(time.process_time() - began)
aiodlock.Client({!r})
print(time.process_time() - began)
"""


def run(*command: str | Path, code: int | None = 0) -> str:
    """Return what a command prints; fail if its exit code is another one (None: any)."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if code is not None and done.returncode != code:
        sys.exit(f"{words} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout + done.stderr


def expect(what: str, text: str) -> None:
    if what not in text:
        sys.exit(f"{what!r} is not in:\n{text}")


def size(folder: Path) -> int:
    """Return the bytes of the files below, without byte code."""
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.suffix != ".pyc" and path.is_file()
    )


def imported(python: Path, url: str) -> tuple[float, float]:
    """Return the shortest times of five: of ``import aiodlock``, and with a client of that URL."""
    times = [run(python, "-I", "-c", _IMPORT.format(url)).split() for _ in range(5)]
    return min(float(first) for first, _ in times), min(float(second) for _, second in times)


def try_one(wheel: Path, interpreter: str, server: EmbeddedServer) -> str:
    """Install, use and measure; return a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        run(interpreter, "-m", "venv", home)
        python, command = home / "bin" / "python", home / "bin" / "aiodlock"
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        began = time.monotonic()
        run(*pip, wheel)
        took = time.monotonic() - began
        (site,) = home.glob("lib/python*/site-packages")
        own = size(site / "aiodlock")
        others = sum(
            size(path)
            for path in site.iterdir()
            if path.is_dir() and not re.match("pip|setuptools|aiodlock|_distutils", path.name)
        )
        # README's first program, as it stands there.
        program = re.findall(r"```python\n(import asyncio.*?)```", README.read_text(), re.DOTALL)[0]
        (home / "program.py").write_text(program)
        expect("I hold the lock. Its token is", run(python, "-W", "error", home / "program.py"))
        alone, redis = imported(python, "redis://localhost")
        expect("pip install 'aiodlock[cli]'", run(command, "doctor", code=70))
        run(*pip, f"{wheel}[cli]")
        expect("acquired and released", run(command, "doctor", "--url", server.url, code=None))
        version = run(python, "-V").split()[1]
        return _ROW.format(
            version,
            f"{took:.0f} s",
            f"{own / 1e6:.2f} MB",
            f"{others / 1e6:.1f} MB",
            f"{alone * 1000:.0f} ms",
            f"{redis * 1000:.0f} ms",
        )


def main() -> None:
    """Print the table of these Pythons."""
    wheel, *interpreters = sys.argv[1:]
    print(f"{Path(wheel).name}: {Path(wheel).stat().st_size / 1000:.0f} kB\n")
    heads = (
        "Python",
        "pip install",
        "aiodlock",
        "its dependencies",
        "import",
        "and a Redis client",
    )
    print(_ROW.format(*heads))
    print(_ROW.format(*["---"] * len(heads)))
    server = EmbeddedServer(find_valkey9())
    server.start()
    try:
        for interpreter in interpreters:
            print(try_one(Path(wheel).resolve(), interpreter, server), flush=True)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
