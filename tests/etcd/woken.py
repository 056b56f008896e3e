"""The leader is stopped for longer than a lease lives, and wakes: ``python -m tests.etcd.woken``.

In each round a client holds a name and another one waits for it. Beside them a lease is renewed as it is
usually done: an answered renewal counts. Printed at the end: how often the leader that woke had such a
lease revoked though the new leader had renewed it, and how often two held the name, which must be 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import urllib.request
from collections import Counter
from typing import Any

import aiodlock
from aiodlock._clock import now

from .servers import EtcdCluster, EtcdNode

_TTL = 3
_STOPPED = 5.0


def _call(node: EtcdNode, path: str, **body: object) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://{node.endpoint}/v3/{path}", data=json.dumps(body).encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=1.5) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def _leader(cluster: EtcdCluster) -> EtcdNode:
    status = [_call(node, "maintenance/status") for node in cluster.nodes]
    ids = [one["header"]["member_id"] for one in status]
    return cluster.nodes[ids.index(status[0]["leader"])]


def _renew_until(node: EtcdNode, lease: str, until: float) -> bool:
    """Renew a lease; tell whether it ended before the end that the last answer promised."""
    promised = now()
    while now() < until:
        sent = now()
        try:
            left = int(_call(node, "lease/keepalive", ID=lease)["result"].get("TTL", 0))
        except OSError:
            continue
        if not left:
            return now() < promised
        promised = sent + left
    return False


async def _hold(client: aiodlock.Client, inside: list[str], counts: Counter[str]) -> None:
    while True:
        try:
            async with client.lock("name", ttl=_TTL, timeout=30) as lease:
                if inside:
                    counts["violations"] += 1
                inside.append(str(lease.token))
                try:
                    await asyncio.sleep(3600)
                finally:
                    inside.remove(str(lease.token))
        except aiodlock.LockLost:
            counts["lost and told"] += 1
        except (aiodlock.AcquireTimeout, aiodlock.BackendUnavailable):
            pass


async def _round(cluster: EtcdCluster, number: int, counts: Counter[str]) -> None:
    inside: list[str] = []
    async with (
        aiodlock.Client(cluster.url, prefix=f"round{number}") as one,
        aiodlock.Client(cluster.url, prefix=f"round{number}") as two,
    ):
        tasks = [asyncio.create_task(_hold(client, inside, counts)) for client in (one, two)]
        while not inside:
            await asyncio.sleep(0.05)
        leader = await asyncio.to_thread(_leader, cluster)
        other = next(node for node in cluster.nodes if node is not leader)
        lease = (await asyncio.to_thread(_call, other, "lease/grant", TTL=_TTL))["ID"]
        until = now() + _STOPPED + 2.0
        leader.pause()
        renewing = asyncio.create_task(asyncio.to_thread(_renew_until, other, lease, until))
        await asyncio.sleep(_STOPPED)
        leader.resume()
        counts["revoked though renewed"] += await renewing
        counts["rounds"] += 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(cluster: EtcdCluster, rounds: int) -> int:
    counts: Counter[str] = Counter()
    for number in range(rounds):
        await asyncio.to_thread(cluster.until_healthy)
        await _round(cluster, number, counts)
    print({"violations": 0} | dict(counts))
    return int(counts["violations"] > 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.etcd.woken", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    logging.getLogger("aiodlock").setLevel(logging.ERROR)
    with EtcdCluster(3) as cluster:
        return asyncio.run(_run(cluster, rounds))


if __name__ == "__main__":
    sys.exit(main())
