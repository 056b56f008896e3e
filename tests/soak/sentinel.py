"""A primary, a replica and three sentinels that know each other by names, and the names move.

Each name leads to a line on an address of its own. When a name moves, the line listens on another address
from then on, and a foreign server takes the old one over, as in a network that gives addresses again.
A grant counts when the replica has it, so nothing that was told is lost with a primary.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Final, Self

import redis

from aiodlock._clock import now
from aiodlock._embedded import _free_port

from ..servers import BINARIES
from ..topology.servers import SERVICE, Node, Sentinel
from .disk import Disk
from .faults import Fault, Span, Tormentor
from .wire import Wire

_HOSTS: Final = Path("/etc/hosts")
_OWN_MOUNTS: Final = "AIODLOCK_SOAK_HAS_ITS_OWN_MOUNTS"
#: What is kept of names for a while, though nobody holds them.
_PASSING: Final = (":token", ":quorum", ":members")


def have_own_names() -> None:
    """Begin this program anew in a mount namespace of its own: there it may have its own hosts file."""
    if os.environ.get(_OWN_MOUNTS) is None:
        os.environ[_OWN_MOUNTS] = "1"
        module = ["-m", "tests.soak", *sys.argv[1:]]
        os.execvp("unshare", ["unshare", "--mount", sys.executable, *module])


class Names:
    """The hosts file of this program and its children. ``where`` each name leads to."""

    def __init__(self) -> None:
        self.where: dict[str, str] = {}
        self._before = _HOSTS.read_text()
        self._folder = Path(tempfile.mkdtemp(prefix="aiodlock-hosts-"))
        self._file = self._folder / "hosts"

    def __enter__(self) -> Self:
        if os.environ.get(_OWN_MOUNTS) is None:
            raise RuntimeError("the hosts file of the machine is left alone: see have_own_names")
        self._file.write_text(self._before)
        subprocess.run(["mount", "--bind", str(self._file), str(_HOSTS)], check=True)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", str(_HOSTS)], check=True)
        shutil.rmtree(self._folder)

    def lead(self, name: str, address: str) -> None:
        """Have a name lead to an address. Who reads meanwhile sees the old ones or the new ones."""
        self.where[name] = address
        lines = [f"{address} {name}" for name, address in self.where.items()]
        # In place: it is this very file that is mounted.
        with self._file.open("r+") as file:
            file.write(self._before + "\n".join(lines) + "\n")
            file.truncate()


class SentinelTormentor(Tormentor):
    """Mutable state: ``nodes`` and ``sentinels``, ``_strangers`` on addresses that names have left."""

    #: Sentinels call a server down after three seconds, and elect another; a node that comes back is given
    #: its role after some seconds more, and until it follows no grant counts.
    recovery = 25.0
    client_options = {"min_replicas": 1}  # noqa: RUF012 - nobody writes to it

    def __init__(self, rng: random.Random, disk: Disk | None) -> None:
        super().__init__(rng, disk)
        self._names = Names()
        self._addresses = (f"127.0.{n // 250 + 1}.{n % 250 + 1}" for n in count())
        self._stack = AsyncExitStack()
        self.nodes: list[Node] = []
        self.sentinels: list[Sentinel] = []
        self._strangers: list[AsyncExitStack] = []

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self._names)
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="aiodlock-")))
        binary = BINARIES["valkey9"]()
        for number in range(2):
            node = Node(
                binary,
                appendonly="yes",
                appendfsync="always",
                replica_announce_ip=f"data-{number}.soak",
                enable_debug_command="yes",
            )
            await self._line(f"data-{number}.soak", node)
            node._config["replica-announce-port"] = self._port(node)
            self.nodes.append(node)
            if number == 1:
                first = self.nodes[0]
                node._config["replicaof"] = f"data-0.soak {self._port(first)}"
            self._stack.callback(self._end, node)
            await asyncio.to_thread(node.start)
        self._foreign = Node(binary)
        self._stack.enter_context(self._foreign)
        for number in range(3):
            sentinel = Sentinel(binary, folder, self.nodes[0], quorum=2)
            sentinel._config = {
                "sentinel resolve-hostnames": "yes",
                "sentinel announce-hostnames": "yes",
                "sentinel monitor": f"{SERVICE} data-0.soak {self._port(self.nodes[0])} 2",
                "sentinel down-after-milliseconds": f"{SERVICE} 3000",
                "sentinel failover-timeout": f"{SERVICE} 5000",
            }
            await self._line(f"sentinel-{number}.soak", sentinel)
            self.sentinels.append(sentinel)
            self._stack.callback(self._end, sentinel)
            await asyncio.to_thread(sentinel.start)
        await self._until_one_follows()
        return self

    async def __aexit__(self, *_: object) -> None:
        for line in self.lines:
            await line.__aexit__(None, None, None)
        for stranger in self._strangers:
            await stranger.aclose()
        await self._stack.aclose()

    def source(self, *, through_lines: bool) -> str:
        hosts = ",".join(
            f"sentinel-{number}.soak:{self._port(one)}" for number, one in enumerate(self.sentinels)
        )
        return f"redis+sentinel://{hosts}/{SERVICE}/0"

    async def heal(self) -> None:
        for one in (*self.nodes, *self.sentinels):
            one.resume()
            if not one.running:
                await asyncio.to_thread(one.start)

    async def left(self) -> list[str]:
        try:
            return await asyncio.to_thread(self._left)
        except (redis.RedisError, OSError) as error:  # a server is being given its role
            return [f"no answer: {error!r}"]

    def _left(self) -> list[str]:
        for node in self.nodes:
            if node.is_primary:
                keys = [str(key) for key in node.call("KEYS", "*")]
                found = [k for k in keys if not k.endswith(_PASSING) and ":marker:" not in k]
                return found + [
                    f"{key} without a TTL" for key in keys if node.call("TTL", key) == -1
                ]
        return ["no primary"]

    async def memory(self) -> tuple[str, int]:
        text = await asyncio.to_thread(self.nodes[0].call, "INFO", "memory")
        (used,) = (line for line in text.splitlines() if line.startswith("used_memory:"))
        return "used_memory", int(used.partition(":")[2])

    def of_server(self) -> dict[str, Fault]:
        return {
            "name of a server moved": self._move_data,
            "name of a sentinel moved": self._move_sentinel,
            "primary killed and restarted": self._kill_primary,
            "replica killed and restarted": self._kill_replica,
            "SIGSTOP of the primary": self._stop_primary,
            "SIGSTOP of the replica": self._stop_replica,
            "fail-over by hand": self._fail_over,
            "sentinel killed and restarted": self._kill_sentinel,
            "SIGSTOP of all sentinels": self._stop_sentinels,
            "all connections killed at once": self._kill_clients,
        }

    async def run(self, pause: float) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._note_when_nothing_is_granted())
            group.create_task(super().run(pause))

    async def _note_when_nothing_is_granted(self) -> None:
        """A fault lasts until a primary has a replica again. With more faults before the sentinels had made
        one, both servers were primaries for two minutes."""
        seen = now()
        while True:
            with suppress(redis.RedisError, OSError):
                if await asyncio.to_thread(lambda: self._roles()[0].replicas()):
                    if now() - seen > 2.0:
                        self.spans.append(Span(seen, now(), "no replica", to_servers=True))
                    seen = now()
            await asyncio.sleep(0.5)

    # -- lines and names -------------------------------------------------------------------------

    async def _line(self, name: str, server: Node) -> None:
        """Lead a name to a server that has not been started, by a line at an address of its own."""
        server._port = server._wanted_port = _free_port()
        address = next(self._addresses)
        line = Wire(server.port, host=address)
        self.lines.append(await line.__aenter__())
        self._names.lead(name, address)

    def _port(self, server: Node) -> int:
        """On what port a server's line listens, wherever its name leads."""
        return int(self.lines[self._number(server)].port)

    def _number(self, server: Node) -> int:
        return [line.target for line in self.lines].index(server.port)

    async def _move(self, name: str, server: Node) -> None:
        """A name leads to another address from now on. After a while its old one is somebody else's."""
        number = self._number(server)
        old = self.lines[number]
        new = Wire(server.port, old.port, host=next(self._addresses))
        self.lines[number] = await new.__aenter__()
        self._names.lead(name, new.host)
        try:
            await asyncio.sleep(self.up_to(4.0))
        finally:
            await asyncio.shield(self._give_away(old))

    async def _give_away(self, old: Wire) -> None:
        await old.__aexit__(None, None, None)
        stranger = AsyncExitStack()
        await stranger.enter_async_context(Wire(self._foreign.port, old.port, host=old.host))
        self._strangers.append(stranger)
        if len(self._strangers) > 20:
            await self._strangers.pop(0).aclose()

    async def _move_data(self) -> None:
        number = self._rng.randrange(2)
        await self._move(f"data-{number}.soak", self.nodes[number])

    async def _move_sentinel(self) -> None:
        number = self._rng.randrange(3)
        await self._move(f"sentinel-{number}.soak", self.sentinels[number])

    # -- servers ---------------------------------------------------------------------------------

    @staticmethod
    def _end(node: Node) -> None:
        node.resume()
        node.stop()

    async def _until_one_follows(self, within: float = 60.0) -> None:
        async with asyncio.timeout(within):
            while True:
                with suppress(redis.RedisError, OSError):
                    if await asyncio.to_thread(lambda: self._roles()[0].replicas()):
                        return
                await asyncio.sleep(0.1)

    def _roles(self) -> tuple[Node, Node]:
        """Return the primary and the other one."""
        one, other = self.nodes
        return (one, other) if one.is_primary else (other, one)

    @staticmethod
    def _crash(node: Node) -> None:
        """Kill a server; it comes back in the role that it has, as if that stood in its file."""
        role, *rest = node.call("ROLE")
        node._config.pop("replicaof", None)
        if role == "slave":
            node._config["replicaof"] = f"{rest[0]} {rest[1]}"
        node.kill()

    async def _kill_primary(self) -> None:
        primary, _ = await asyncio.to_thread(self._roles)
        await asyncio.to_thread(self._crash, primary)
        await self.after(self.up_to(8.0))

    async def _kill_replica(self) -> None:
        _, other = await asyncio.to_thread(self._roles)
        await asyncio.to_thread(self._crash, other)
        await self.after(self.up_to(4.0))

    async def _stop_primary(self) -> None:
        (await asyncio.to_thread(self._roles))[0].pause()
        await self.after(self.up_to(8.0))

    async def _stop_replica(self) -> None:
        (await asyncio.to_thread(self._roles))[1].pause()
        await self.after(self.up_to(4.0))

    async def _fail_over(self) -> None:
        # Sentinel makes a replica of the old primary after 8 s or more. The next one before that makes
        # primaries of both, and when it goes on so, nothing can be granted for minutes.
        await self._until_one_follows(within=30.0)
        sentinel = self._rng.choice(self.sentinels)
        await asyncio.to_thread(sentinel.call, "SENTINEL", "FAILOVER", SERVICE)
        await asyncio.sleep(self.up_to(4.0))

    async def _kill_sentinel(self) -> None:
        await asyncio.to_thread(self._rng.choice(self.sentinels).kill)
        await self.after(self.up_to(6.0))

    async def _stop_sentinels(self) -> None:
        for sentinel in self.sentinels:
            sentinel.pause()
        # After 2 s they would do nothing for half a minute (TILT), each time: on a busy machine two were
        # primaries for minutes, and neither had a replica.
        await self.after(self.up_to(1.5))

    async def _kill_clients(self) -> None:
        for node in self.nodes:
            for kind in ("normal", "pubsub"):
                await asyncio.to_thread(node.call, "CLIENT", "KILL", "TYPE", kind)
