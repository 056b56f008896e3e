"""Ten minutes of killed, stopped and restarted members under load: ``python -m tests.etcd.soak
--minutes 10``.

Three clients take four names in both modes. A register in this process sees who is in which body. Every
few seconds one of three members is killed, stopped, or cut from the clients, or all of them are cut, and
come back. Printed at the end: acquisitions, losses, errors, and violations, which must be 0.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from contextlib import AsyncExitStack

import aiodlock
from aiodlock._clock import now

from .cuts import Cut
from .servers import EtcdCluster, free_ports

_NAMES = [f"name {number}" for number in range(4)]


class Register:
    """Who is inside. Mutable state: ``inside`` (modes by name), ``last`` (tokens of writers),
    ``counts``."""

    def __init__(self) -> None:
        self.inside: dict[str, list[str]] = {name: [] for name in _NAMES}
        self.last: dict[str, int] = {}
        self.counts: Counter[str] = Counter()

    def enter(self, name: str, mode: str, token: int) -> None:
        others = self.inside[name]
        if others and (mode == "exclusive" or "exclusive" in others):
            self._violation(f"{mode} in {name!r} beside {others}")
        if mode == "exclusive":
            if token <= self.last.get(name, 0):
                self._violation(f"token {token} of {name!r} after {self.last[name]}")
            self.last[name] = token
        others.append(mode)
        self.counts["acquired"] += 1

    def leave(self, name: str, mode: str) -> None:
        self.inside[name].remove(mode)

    def _violation(self, text: str) -> None:
        self.counts["violations"] += 1
        print("VIOLATION:", text, flush=True)


async def _work(client: aiodlock.Client, register: Register, until: float) -> None:
    while now() < until:
        name, shared = random.choice(_NAMES), random.random() < 0.3
        lock = client.rwlock(name, ttl=random.choice([3, 6, 20]), timeout=20)
        mode = "shared" if shared else "exclusive"
        try:
            async with lock.read if shared else lock.write as lease:
                register.enter(name, mode, lease.token)
                try:
                    await asyncio.sleep(random.uniform(0, 0.1))
                finally:
                    register.leave(name, mode)
        except aiodlock.LockLost:
            register.counts["lost"] += 1
        except (aiodlock.AcquireTimeout, aiodlock.BackendUnavailable) as error:
            register.counts[type(error).__name__] += 1
        await asyncio.sleep(random.uniform(0, 0.05))


async def _disturb(cluster: EtcdCluster, cuts: list[Cut], register: Register, until: float) -> None:
    while now() < until - 10:
        await asyncio.sleep(random.uniform(2, 5))
        number = random.randrange(len(cluster.nodes))
        node, how = cluster.nodes[number], random.choice(["kill", "pause", "cut", "cut all"])
        register.counts[how] += 1
        some = cuts if how == "cut all" else [cuts[number]]
        if how.startswith("cut"):
            for cut in some:
                cut.cut()
        else:
            getattr(node, how)()
        await asyncio.sleep(random.uniform(0.5, 8))
        for cut in some:
            cut.heal()
        node.resume()
        if not node.running:
            await asyncio.to_thread(node.start)
        await asyncio.to_thread(cluster.until_healthy)


async def _soak(cluster: EtcdCluster, minutes: float) -> int:
    register, until = Register(), now() + minutes * 60
    async with AsyncExitStack() as stack:
        cuts = [
            await stack.enter_async_context(Cut(port, node.port))
            for port, node in zip(free_ports(3), cluster.nodes, strict=True)
        ]
        url = "etcd://" + ",".join(f"127.0.0.1:{cut.port}" for cut in cuts)
        clients = [await stack.enter_async_context(aiodlock.Client(url)) for _ in range(3)]
        workers = [_work(client, register, until) for client in clients for _ in range(4)]
        await asyncio.gather(_disturb(cluster, cuts, register, until), *workers)
        await asyncio.sleep(1.0)
        left = [key for key in await asyncio.to_thread(cluster.keys) if "/q/" in key]
    print(dict(register.counts), f"keys left: {len(left)}")
    return int(bool(register.counts["violations"] or left))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.etcd.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    minutes = parser.parse_args().minutes
    with EtcdCluster(3) as cluster:
        return asyncio.run(_soak(cluster, minutes))


if __name__ == "__main__":
    sys.exit(main())
