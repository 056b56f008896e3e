"""Which wheel stands for the other release, how it is installed, and processes that run either one."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import subprocess
import sys
import sysconfig
import threading
import venv
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

#: The last release on the package index: the one that clients of this tree may meet. None before the first
#: release: then a wheel of this tree stands for it.
RELEASED: str | None = None
#: Another version, or the path of a wheel.
BESIDE = os.environ.get("AIODLOCK_BESIDE") or RELEASED

ROOT = Path(__file__).parents[2]
_PEER = Path(__file__).with_name("peer.py")


def install(home: Path) -> Path:
    """Make an environment with the other release, once for all processes of this run; return its Python."""
    with (home.parent / f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        python = home / "bin" / "python"
        done = home / "done"
        if not done.exists():
            venv.create(home, with_pip=False, symlinks=True, clear=True)
            add(python, _wheel(home))
            done.touch()
        return python


def add(python: Path, wheel: str) -> None:
    """Install one package, without what it needs: for that the environment looks into ours."""
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
    _run(*pip, "install", "--quiet", "--no-deps", wheel)
    site = _run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    # Comes after its own packages; the .pth files in there (our editable install) do not count.
    (Path(site.strip()) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")


def _wheel(home: Path) -> str:
    if BESIDE is None:
        built = home / "wheel"
        _run(
            sys.executable,
            "-m",
            "build",
            "--no-isolation",
            "--wheel",
            "--outdir",
            str(built),
            str(ROOT),
        )
        (wheel,) = built.glob("*.whl")
        return str(wheel)
    return BESIDE if BESIDE.endswith(".whl") else f"aiodlock=={BESIDE}"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Failed(Exception):
    """The call of a peer raised. ``kind`` is the name of the exception's class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Call:
    """One call of a peer that was begun: await it."""

    def __init__(self, id: int, answer: Future[Any]) -> None:
        self.id = id
        self._answer = answer

    @property
    def done(self) -> bool:
        return self._answer.done()

    def __await__(self) -> Any:
        return asyncio.wrap_future(self._answer).__await__()


class Peer:
    """A process that runs `peer.py`. Mutable state: the answers that are waited for."""

    def __init__(self, python: Path | str) -> None:
        self._process = subprocess.Popen(
            [str(python), "-I", str(_PEER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._ids = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, do: str, **arguments: Any) -> Call:
        """Have the peer begin with a call."""
        id = next(self._ids)
        answer = self._waiting[id] = Future[Any]()
        answer.set_running_or_notify_cancel()  # who stops waiting for it does not end it
        self._in.write(json.dumps({"id": id, "do": do, **arguments}).encode() + b"\n")
        self._in.flush()
        return Call(id, answer)

    def __getattr__(self, do: str) -> Callable[..., Call]:
        return lambda **arguments: self.begin(do, **arguments)

    def kill(self) -> None:
        """End it without a word to anybody."""
        self._process.kill()
        self._ended()

    def stop(self) -> None:
        """Let it leave its client, and end."""
        self._in.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._ended()

    def _ended(self) -> None:
        self._process.wait()
        self._reader.join()
        self._in.close()

    @property
    def _in(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                told = json.loads(line)
                answer = self._waiting.pop(told["id"])
                if "error" in told:
                    answer.set_exception(Failed(told["error"], told["message"]))
                else:
                    answer.set_result(told["value"])
        while self._waiting:
            self._waiting.popitem()[1].set_exception(Failed("Killed", "the process has ended"))
