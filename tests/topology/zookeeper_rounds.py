"""A holder's server is cut off from its leader, until the next one holds: rounds of it.

    python -m tests.topology.zookeeper_rounds --rounds 100 --cut ack
    python -m tests.topology.zookeeper_rounds --rounds 100 --cut random

The cut comes right after an answer to the holder (ack), or at a random moment. Each round tells by how much
the holder's deadline came before the next holder's grant, and what simpler rules would have believed. The
command fails if two held in any round, and also if no simpler rule fails: then the rounds showed nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

from aiodlock._clock import now
from aiodlock.backends.zookeeper import jute
from aiodlock.backends.zookeeper.session import Session
from aiodlock.backends.zookeeper.store import ZooKeeperBackend

from ..scenes import until
from ..zookeeper import ZooKeeperEnsemble
from .zookeeper_places import asker, running

#: Large enough for a JVM on a busy machine: the leader asks its followers each half tick.
TICK = 0.2
TTL = 2.0
Cut: TypeAlias = Literal["ack", "random"]
#: Ticks for which a follower goes on without its leader. Longer than the session lives.
SYNC_LIMIT = 60
#: Ticks after which a server that cannot follow a leader tries again.
INIT_LIMIT = 50


@dataclass
class Naive:
    """What simpler rules believe: the deadline of each, from the same messages."""

    deadlines: dict[str, float] = field(
        default_factory=lambda: {
            "ping sent + timeout": 0.0,
            "write sent + timeout": 0.0,
            "write sent + timeout - 2 ticks": 0.0,
        }
    )

    def wrote(self, sent: float) -> None:
        self._push("write sent + timeout", sent + TTL)
        self._push("write sent + timeout - 2 ticks", sent + TTL - 2 * TICK)

    def pinged(self, sent: float) -> None:
        self._push("ping sent + timeout", sent + TTL)

    def _push(self, rule: str, deadline: float) -> None:
        self.deadlines[rule] = max(self.deadlines[rule], deadline)


@dataclass(frozen=True)
class Round:
    """Seconds by which the deadline came before the next grant; negative: two held."""

    margin: float
    naive: dict[str, float]


async def _ping(session: Session, naive: Naive) -> None:
    """Ping as other clients do, each half tick, and note what is answered."""
    while True:
        if session.is_up:
            session.submit(jute.PING_CALL).add_done_callback(partial(_pinged, naive, now()))
        await asyncio.sleep(TICK / 2)


def _pinged(naive: Naive, sent: float, answer: asyncio.Future[Any]) -> None:
    if answer.exception() is None:
        naive.pinged(sent)


def _listen_for_writes(session: Session, naive: Naive) -> asyncio.Event:
    """Note each write's answer; the event is set at each."""
    answered = asyncio.Event()
    before = session._on_commit

    def on_commit(sent: float) -> None:
        before(sent)
        naive.wrote(sent)
        answered.set()

    connection = session._connection
    assert connection is not None
    connection._on_commit = on_commit
    return answered


async def play(ensemble: ZooKeeperEnsemble, *, cut: Cut, chance: random.Random) -> Round:
    """Play one round."""
    follower = ensemble.follower()
    elsewhere = next(number for number in ensemble.servers if number != follower)
    async with (
        running(ensemble.url_of(follower), tick=TICK, ttl=TTL) as near,
        running(ensemble.url_of(elsewhere), tick=TICK, ttl=TTL) as far,
    ):
        holder, next_one = asker(near, ttl=TTL), asker(far, ttl=TTL)
        await holder.acquire()
        await next_one.queue()
        session = _session_of(near)
        naive = Naive()
        answered = _listen_for_writes(session, naive)
        pinging = asyncio.create_task(_ping(session, naive))
        try:
            await asyncio.sleep(chance.uniform(0.5, 1.0) * TTL)
            if cut == "ack":
                answered.clear()
                await answered.wait()
            else:
                await asyncio.sleep(chance.uniform(0.0, TTL / 4))
            ensemble.isolate(follower)
            await asyncio.wait_for(next_one.heard.changed.wait(), 10 * TTL)
            moment = next_one.heard.at
            assert next_one.heard.told == ["granted"], next_one.heard.told
            return Round(
                moment - holder.place.deadline,
                {rule: moment - deadline for rule, deadline in naive.deadlines.items()},
            )
        finally:
            pinging.cancel()
            for link in ensemble.peers.values():
                link.heal()
            await next_one.leave()


def _session_of(backend: ZooKeeperBackend) -> Session:
    (session,) = backend._sessions.values()
    return session


async def rounds(
    ensemble: ZooKeeperEnsemble,
    cuts: Iterable[Cut],
    tell: Callable[[Round], object],
    seed: int = 1,
) -> list[Round]:
    """Play a round for each of these cuts."""
    chance = random.Random(seed)
    played = []
    for cut in cuts:
        one = await play(ensemble, cut=cut, chance=chance)
        played.append(one)
        tell(one)
        await until(
            lambda: all(server.mode() for server in ensemble.servers.values()),
            "servers that serve",
            within=60.0,
        )
    return played


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="(default: 100)")
    parser.add_argument("--cut", choices=("ack", "random"), default="ack")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()

    def tell(one: Round) -> None:
        others = ", ".join(f"{rule}: {margin:+.2f}" for rule, margin in one.naive.items())
        print(f"{one.margin:+.2f} s ({others})", flush=True)

    with ZooKeeperEnsemble(tick=TICK, sync_limit=SYNC_LIMIT, init_limit=INIT_LIMIT) as ensemble:
        played = asyncio.run(rounds(ensemble, [chosen.cut] * chosen.rounds, tell, chosen.seed))
    margins = {"as it is": [one.margin for one in played]}
    margins |= {rule: [one.naive[rule] for one in played] for rule in played[0].naive}
    print(f"{len(played)} rounds, the cut: {chosen.cut}")
    wrong = {rule: sum(margin < 0 for margin in some) for rule, some in margins.items()}
    for rule, some in margins.items():
        print(
            f"  {rule}: two held in {wrong[rule]}; margins {min(some):+.2f} to {max(some):+.2f} s"
        )
    return 0 if not wrong.pop("as it is") and any(wrong.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
