"""The servers that are measured, each a private one, and which core they run on.

A message that wakes a process on another core of a virtual machine goes through the hypervisor. On
the machine of the published figures that costs some 40 µs each way, more than all else in a round
trip, and left alone the kernel moves client and server together and apart as it likes. So each run
says where they are: see ``Cores``.
"""

from __future__ import annotations

import glob
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from aiodlock._embedded import _WATCHED, EmbeddedServer, find_redis_on_path, find_valkey9

#: ``two``: the servers on a core of their own. ``one``: all on one core. ``free``: as the kernel likes.
Cores = Literal["two", "one", "free"]


class NotThere(Exception):
    """A contender, or what it needs, is not on this machine."""


@dataclass
class Servers:
    """Started when first asked for, stopped in the end.

    :param url: the Redis server of a user, which is neither started nor moved; None for a private one.
    """

    url: str | None = None
    _stack: ExitStack = field(default_factory=ExitStack)
    _started: dict[str, str | NotThere] = field(default_factory=dict)
    _pids: list[int] = field(default_factory=list)
    _cpus: list[int] = field(default_factory=list)
    _all_cpus: list[int] = field(default_factory=list)

    @classmethod
    def at(cls, addresses: Mapping[str, str]) -> Self:
        """Return servers that another process started."""
        servers = cls()
        servers._started.update(addresses)
        return servers

    def __enter__(self) -> Self:
        self._all_cpus = _cpus()
        self._cpus = self._all_cpus
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        _move([os.getpid()], self._all_cpus)

    @property
    def redis(self) -> str:
        """A URL."""
        if self.url is not None:
            return self.url
        return self._get("redis")

    @property
    def postgres(self) -> str:
        """The directory of its socket."""
        return self._get("postgres")

    @property
    def zookeeper(self) -> str:
        """Host and port."""
        return self._get("zookeeper")

    def place(self, cores: Cores) -> None:
        """Move this process and the servers; what either starts later is born where it is."""
        cpus = self._all_cpus
        if self.url is not None or cores == "free" or len(cpus) < 2:
            client = self._cpus = cpus
        else:
            client, self._cpus = cpus[:1], cpus[:1] if cores == "one" else cpus[1:2]
        _move(_with_children(self._pids), self._cpus)
        _move([os.getpid()], client)

    def _get(self, kind: str) -> str:
        if kind not in self._started:
            here = _cpus()
            _move([os.getpid()], self._cpus)  # inherited by the server
            try:
                address, pid = self._stack.enter_context(_START[kind]())
                self._pids.append(pid)
                self._started[kind] = address
            except NotThere as reason:
                self._started[kind] = reason
            finally:
                _move([os.getpid()], here)
        address_or_reason = self._started[kind]
        if isinstance(address_or_reason, NotThere):
            raise address_or_reason
        return address_or_reason


@contextmanager
def _redis() -> Iterator[tuple[str, int]]:
    with EmbeddedServer(find_redis_on_path() or find_valkey9(), tcp=True) as server:
        yield server.url, server.pid


@contextmanager
def _postgres() -> Iterator[tuple[str, int]]:
    """On a socket of its own; as the user `postgres` when we are root, as whom it refuses to run."""
    binaries = _newest("/usr/lib/postgresql/*/bin") or _beside(shutil.which("initdb"))
    if binaries is None:
        raise NotThere("no PostgreSQL server")
    user = "postgres" if os.getuid() == 0 else None
    with _directory("bench-pg-", user) as directory:
        data = directory / "data"
        subprocess.run(
            [binaries / "initdb", "-D", data, "-U", "bench", "-A", "trust", "-E", "UTF8", "-N"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=directory,
            user=user,
        )
        with _process(
            [
                *(str(binaries / "postgres"), "-D", str(data), "-k", str(directory)),
                *("-c", "listen_addresses=", "-c", "max_connections=200", "-c", "fsync=off"),
            ],
            directory,
            user,
        ) as process:
            ready = [str(binaries / "pg_isready"), "-q", "-h", str(directory)]
            _wait_for(process, lambda: subprocess.run(ready).returncode == 0)
            yield str(directory), process.pid


@contextmanager
def _zookeeper() -> Iterator[tuple[str, int]]:
    """Debian's jars, or those of the distribution unpacked in ZOOKEEPER_HOME."""
    java = shutil.which("java")
    home = os.environ.get("ZOOKEEPER_HOME")
    jars = glob.glob(f"{home}/lib/*.jar") if home else glob.glob("/usr/share/java/zookeeper.jar")
    if java is None or not jars:
        raise NotThere("no ZooKeeper server")
    with _directory("bench-zk-", None) as directory:
        port = _free_port()
        settings = {
            "dataDir": directory / "data",
            "clientPort": port,
            "clientPortAddress": "127.0.0.1",
            "tickTime": 2000,
            "maxClientCnxns": 0,
            "admin.enableServer": "false",
            "forceSync": "no",  # nothing else here is written through to the disk either
        }
        config = directory / "zoo.cfg"
        config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        main = "org.apache.zookeeper.server.ZooKeeperServerMain"
        command = [java, "-Xmx256m", "-Dzookeeper.forceSync=no", "-cp", ":".join(jars), main]
        with _process([*command, str(config)], directory, None) as process:
            _wait_for(process, lambda: _listens(port))
            yield f"127.0.0.1:{port}", process.pid


_START = {"redis": _redis, "postgres": _postgres, "zookeeper": _zookeeper}


@contextmanager
def _directory(prefix: str, user: str | None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))  # a socket's path may not be long
    try:
        if user is not None:
            try:
                shutil.chown(path, user)
            except LookupError:
                raise NotThere(f"root cannot run it, and there is no user {user!r}") from None
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _process(
    command: list[str], directory: Path, user: str | None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server that is gone when we are, however we end."""
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHED, "aiodlock-bench", str(directory), *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=directory,
            user=user,
            start_new_session=True,  # Ctrl-C is for us, who then stop it
        )
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        try:
            process.stdin.write(b"stopped\n")
            process.stdin.close()
        except BrokenPipeError:
            pass  # the watchdog is gone already


def _wait_for(process: subprocess.Popen[bytes], answers: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not answers():
        if process.poll() is not None or time.monotonic() > give_up:
            raise NotThere(f"{process.args!r} does not start")
        time.sleep(0.05)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _newest(pattern: str) -> Path | None:
    found = [Path(path) for path in glob.glob(pattern)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _beside(binary: str | None) -> Path | None:
    return Path(binary).resolve().parent if binary else None


def _cpus() -> list[int]:
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))


def _with_children(pids: list[int]) -> list[int]:
    """Return also what the processes forked: PostgreSQL has a process per connection."""
    found = list(pids)
    for pid in found:
        for children in glob.glob(f"/proc/{pid}/task/*/children"):
            try:
                found += map(int, Path(children).read_text().split())
            except OSError:
                continue  # it ended just now
    return found


def _move(pids: list[int], cpus: list[int]) -> None:
    if len(cpus) == 0:
        return  # not Linux
    for pid in pids:
        for task in glob.glob(f"/proc/{pid}/task/*"):
            try:
                os.sched_setaffinity(int(Path(task).name), cpus)
            except OSError:
                continue
