"""Servers that follow each other: a primary with replicas, and the sentinels that watch them."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

import redis

from aiodlock._embedded import EmbeddedServer

SERVICE = "primary"
#: A failover takes a few seconds; on a machine that is busy, far more.
FAILOVER_WITHIN = 60.0
#: How long a server has to be silent before a sentinel calls it down, in ms. On a machine that stalls,
#: servers are silent for a second though nothing is the matter with them.
DOWN_AFTER = 3000


def call(port: int, *command: str | int) -> Any:
    """Send one command to a server on this machine; return the plain reply.

    A client of redis-py costs ten times as much, and services are asked again and again how they are.
    """
    words = [str(word).encode() for word in command]
    message = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)
    with socket.create_connection(("127.0.0.1", port), timeout=30.0) as connection:
        connection.sendall(message)
        with connection.makefile("rb") as replies:
            return _read(replies)


def _read(replies: BinaryIO) -> Any:
    line = replies.readline()
    kind, rest = line[:1], line[1:-2].decode()
    if not line.endswith(b"\r\n"):
        raise ConnectionError("the connection was closed")
    if kind == b"-":
        raise redis.ResponseError(rest)
    if kind == b":":
        return int(rest)
    if kind == b"$":
        if rest == "-1":
            return None
        text = replies.read(int(rest) + 2)
        if not text.endswith(b"\r\n"):
            raise ConnectionError("the connection was closed")
        return text[:-2].decode()
    if kind == b"*":
        return None if rest == "-1" else [_read(replies) for _ in range(int(rest))]
    return rest


class Node(EmbeddedServer):
    """A server on a TCP port whose role can be changed while it is down."""

    def __init__(self, binary: Path, **config: str | int) -> None:
        options = {name.replace("_", "-"): value for name, value in config.items()}
        super().__init__(binary, tcp=True, config={"repl-diskless-sync-delay": 0} | options)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2].partition("/")[0])

    def call(self, *command: str | int) -> Any:
        """Send one command."""
        return call(self.port, *command)

    def follow(self, primary: Node) -> None:
        """Be a replica of another server from the next start on."""
        self._config["replicaof"] = f"127.0.0.1 {primary.port}"

    @property
    def is_primary(self) -> bool:
        return bool(self.call("ROLE")[0] == "master")

    def replicas(self) -> int:
        """Return how many replicas are connected and up to date."""
        return int(self.call("WAIT", 0, 0))


class Sentinel(Node):
    """Watches a primary."""

    def __init__(
        self, binary: Path, directory: Path, primary: Node, *, quorum: int, **config: str | int
    ) -> None:
        # The server becomes a sentinel by the name that it is called by.
        called = directory / f"{binary.name.partition('-')[0]}-sentinel"
        if not called.exists():
            called.symlink_to(binary)
        super().__init__(called)
        watching: dict[str, str | int] = {
            "sentinel monitor": f"{SERVICE} 127.0.0.1 {primary.port} {quorum}",
            "sentinel down-after-milliseconds": f"{SERVICE} {DOWN_AFTER}",
            "sentinel failover-timeout": f"{SERVICE} 5000",
        }
        self._config = watching | config


class Replicated:
    """A primary and its replicas, without anybody who would promote one."""

    def __init__(self, binary: Path, *, replicas: int = 2, **config: str | int) -> None:
        self.primary = Node(binary, **config)
        self.followers = [Node(binary, **config) for _ in range(replicas)]

    def __enter__(self) -> Self:
        try:
            self.primary.start()
            for node in self.followers:
                node.follow(self.primary)
                node.start()
            self.settle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.resume()
            node.stop()

    def is_settled(self) -> bool:
        """Tell whether all replicas follow the primary."""
        return self.primary.replicas() == len(self.followers)

    def settle(self) -> None:
        """Wait until everything follows the primary."""
        until(self.is_settled, "a settled service", within=FAILOVER_WITHIN)

    def cut_replicas_off(self) -> None:
        """Let the replicas have nothing of what is written from now on, until they are resumed."""
        for node in self.followers:
            node.pause()
        # What is in a socket's buffer would be read later.
        self.primary.call("CLIENT", "KILL", "TYPE", "replica")

    def resume_replicas(self) -> None:
        """Undo ``cut_replicas_off``."""
        for node in self.followers:
            node.resume()

    @property
    def nodes(self) -> list[Node]:
        return [self.primary, *self.followers]


class SentinelService(Replicated):
    """A primary with replicas, and three sentinels that promote one when the primary is gone.

    ``primary`` is the server that is the primary now, ``followers`` are the others.
    """

    def __init__(
        self, binary: Path, *, replicas: int = 2, down_after: int = DOWN_AFTER, **config: str | int
    ) -> None:
        super().__init__(binary, replicas=replicas, **config)
        self._binary = binary
        self._watching = {"sentinel down-after-milliseconds": f"{SERVICE} {down_after}"}
        self._directory: Path | None = None
        self.sentinels: list[Sentinel] = []

    def __enter__(self) -> Self:
        super().__enter__()  # with nobody to agree yet
        try:
            self._directory = Path(tempfile.mkdtemp(prefix="aiodlock-"))
            for _ in range(3):
                self.sentinels.append(
                    Sentinel(
                        self._binary,
                        self._directory,
                        self.primary,
                        quorum=2,
                        **self._watching,
                    )
                )
                self.sentinels[-1].start()
            self.settle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for sentinel in self.sentinels:
            sentinel.resume()
            sentinel.stop()
        super().__exit__()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def url(self) -> str:
        """A URL that names all sentinels."""
        return f"redis+sentinel://{','.join(self.addresses)}/{SERVICE}/0"

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels]

    def named_by(self, sentinel: Sentinel) -> int:
        """Return the port of the primary, as a sentinel sees it."""
        return int(sentinel.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])

    def is_settled(self) -> bool:
        """Tell whether the sentinels agree on a primary, its replicas and each other.

        Who that is may have changed meanwhile: a busy machine makes a server look dead.
        """
        named = {self.named_by(sentinel) for sentinel in self.sentinels}
        if len(named) != 1:
            return not self.sentinels and super().is_settled()
        self._has_been_promoted(named.pop())
        return super().is_settled() and all(map(self._knows_all, self.sentinels))

    def _has_been_promoted(self, port: int) -> None:
        nodes = self.nodes
        self.primary = next(node for node in nodes if node.port == port)
        self.followers = [node for node in nodes if node is not self.primary]

    def _knows_all(self, sentinel: Sentinel) -> bool:
        reply = sentinel.call("SENTINEL", "MASTER", SERVICE)
        about = dict(zip(reply[::2], reply[1::2], strict=True))
        return (
            about["flags"] == "master"
            and int(about["port"]) == self.primary.port
            and int(about["num-slaves"]) == len(self.followers)
            and int(about["num-other-sentinels"]) == len(self.sentinels) - 1
        )

    # -- what operators and fate do to them ----------------------------------------------------------

    def kill_primary(self) -> Node:
        """Kill the primary as a crash would, and return it."""
        return self._lose_primary(lambda node: node.kill())

    def pause_primary(self) -> Node:
        """Freeze the primary, and return it: it believes to be the primary when it is resumed."""
        return self._lose_primary(lambda node: node.pause())

    def _lose_primary(self, lose: Callable[[Node], None]) -> Node:
        lost = self.primary
        lose(lost)
        return lost

    def wait_promoted(self, lost: Node) -> Node:
        """Wait until all sentinels name another primary, and return it."""

        def all_agree() -> bool:
            named = {self.named_by(sentinel) for sentinel in self.sentinels}
            return len(named) == 1 and lost.port not in named

        until(all_agree, "a failover", within=FAILOVER_WITHIN)
        self._has_been_promoted(self.named_by(self.sentinels[0]))
        until(lambda: self.primary.is_primary, "the new primary")
        return self.primary

    def promote_another(self, *, old_lives: bool = False) -> tuple[Node, Node]:
        """Begin a planned failover; return the old and the new primary as soon as there are two.

        :param old_lives: the old one does not hear of it, as behind a cut network, and goes on.
        """
        old = self.primary
        if old_lives:
            old.call("ACL", "SETUSER", "default", "-slaveof", "-replicaof")
        until(lambda: self._begins_failover(), "the beginning of a failover")

        def promoted() -> list[Node]:
            return [node for node in self.followers if node.is_primary]

        until(promoted, "a new primary", within=FAILOVER_WITHIN)
        return old, promoted()[0]

    def _begins_failover(self) -> bool:
        try:
            self.sentinels[0].call("SENTINEL", "FAILOVER", SERVICE)
        except redis.ResponseError:  # NOGOODSLAVE: it has not heard of the replicas lately
            return False
        return True

    def demote(self, old: Node) -> None:
        """Let an old primary that lives hear of its end, and wait until all is well."""
        old.call("ACL", "SETUSER", "default", "+slaveof", "+replicaof")
        old.call("REPLICAOF", "127.0.0.1", self.primary.port)
        self.settle()

    def bring_back(self, node: Node) -> None:
        """Start a killed server as a replica of the present primary, and wait until all is well."""
        node.follow(self.primary)
        node.start()
        self.settle()


def until(condition: Callable[[], object], what: str, *, within: float = 30.0) -> None:
    """Look again and again; a server that does not answer at the moment does not fulfil it."""
    give_up_at = time.monotonic() + within
    while True:
        with suppress(redis.RedisError, OSError):
            if condition():
                return
        assert time.monotonic() < give_up_at, f"{what} did not come within {within:g} s"
        time.sleep(0.02)
