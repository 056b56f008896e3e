"""Run seeds: ``python -m tests.simulation --seeds 10000 --start 0``, and replay one: ``--seed 17``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from . import campaign
from .deadlock_variants import DEADLOCK_VARIANTS
from .deadlocks import Deadlocks, DeadlocksOnRedis
from .failover import FailoverSimulation
from .forgotten import Forgotten
from .habits import Habits, HabitsOnRedis
from .handover import BrokenHandOver, HandOver
from .lingers import Lingers, LingersOnTheMachine
from .memory import MachineSimulation
from .once_variants import ALL_VARIANTS
from .quorum import QuorumSimulation
from .quorum_variants import QUORUM_VARIANTS
from .run import Total, collector_at_rest, run_seed
from .rush import Rush
from .scenario import Simulation
from .shrink import diagram, shrink
from .stores.etcd import EtcdScene
from .stores.etcd_variants import ETCD_VARIANTS
from .stores.idle import IDLE
from .stores.idle_variants import IDLE_VARIANTS
from .stores.postgres import PostgresScene
from .stores.postgres_variants import POSTGRES_VARIANTS
from .stores.redis_cluster_scene import RedisClusterScene
from .stores.redis_cluster_variants import CLUSTER_VARIANTS
from .stores.zookeeper import ZooKeeperScene
from .stores.zookeeper_variants import ZOOKEEPER_VARIANTS
from .thread_variants import THREAD_VARIANTS
from .threads import Threads

VARIANTS = (
    ALL_VARIANTS
    | DEADLOCK_VARIANTS
    | QUORUM_VARIANTS
    | THREAD_VARIANTS
    | ZOOKEEPER_VARIANTS
    | ETCD_VARIANTS
    | POSTGRES_VARIANTS
    | CLUSTER_VARIANTS
    | IDLE_VARIANTS
)
WORLDS: dict[str, type[Simulation]] = {
    "zookeeper": ZooKeeperScene,
    "etcd": EtcdScene,
    "postgres": PostgresScene,
    "cluster": RedisClusterScene,
}
#: With ``--store memory``.
ON_THE_MACHINE: dict[type[Simulation] | None, type[Simulation]] = {
    None: MachineSimulation,
    Lingers: LingersOnTheMachine,
    HabitsOnRedis: Habits,
    DeadlocksOnRedis: Deadlocks,
    Threads: Threads,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one alone, and print its schedule")
    parser.add_argument(
        "--variant",
        choices=sorted(VARIANTS),
        metavar="NAME",
        help="with this broken variant, of those that --variants names",
    )
    parser.add_argument(
        "--variants", action="store_true", help="search a seed for each broken variant"
    )
    parser.add_argument(
        "--quorum",
        action="store_const",
        const=QuorumSimulation,
        dest="kind",
        help="three or five servers, and holding by a majority",
    )
    parser.add_argument(
        "--rush",
        action="store_const",
        const=Rush,
        dest="kind",
        help="the same, without faults, but all ask at once",
    )
    parser.add_argument(
        "--handover",
        action="store_const",
        const=HandOver,
        dest="kind",
        help="a quorum without faults, whose next holder waits at every node",
    )
    parser.add_argument(
        "--broken-handover",
        action="store_const",
        const=BrokenHandOver,
        dest="kind",
        help="the same, and an operator breaks the name six times at each hand-over",
    )
    parser.add_argument(
        "--failover",
        action="store_const",
        const=FailoverSimulation,
        dest="kind",
        help="a replica is promoted, and the old primary lives on",
    )
    parser.add_argument(
        "--forgotten",
        action="store_const",
        const=Forgotten,
        dest="kind",
        help="a node comes back empty, and never knows a token as large as the holder's",
    )
    parser.add_argument(
        "--linger",
        action="store_const",
        const=Lingers,
        dest="kind",
        help="most locks linger",
    )
    parser.add_argument(
        "--deadlocks",
        action="store_const",
        const=DeadlocksOnRedis,
        dest="kind",
        help="tasks take names inside of each other, in any order",
    )
    parser.add_argument(
        "--habits",
        action="store_const",
        const=HabitsOnRedis,
        dest="kind",
        help="users' code: swallowed cancellations, task groups, generators, blocked loops",
    )
    parser.add_argument(
        "--threads",
        action="store_const",
        const=Threads,
        dest="kind",
        help="threads in the place of tasks: aiodlock.sync, with --store memory",
    )
    parser.add_argument(
        "--idle",
        action="store_true",
        help="with --store: clients that nobody uses, while their store goes away and others come",
    )
    parser.add_argument(
        "--store",
        choices=("redis", "memory", *WORLDS),
        default="redis",
        help="memory: the machine of memory:// instead of the scripts; others have worlds of their own",
    )
    parser.add_argument(
        "--campaign", type=Path, metavar="FILE", help="record the seeds there, and go on there"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes of a campaign (default: 1)")
    parser.add_argument(
        "--summary", type=Path, nargs="+", metavar="FILE", help="print what campaigns came to"
    )
    parser.add_argument(
        "--shrink", action="store_true", help="with --seed: cut it short, and draw what is left"
    )
    chosen = parser.parse_args()
    if chosen.summary:
        print(campaign.summary(chosen.summary))
        return 0
    if chosen.idle and chosen.store not in IDLE:
        parser.error(f"--idle needs --store {' or '.join(IDLE)}")
    if chosen.store in WORLDS:
        if chosen.kind is not None:
            parser.error(f"--store {chosen.store} is a world of its own")
        chosen.kind = IDLE[chosen.store] if chosen.idle else WORLDS[chosen.store]
    if chosen.store == "memory":
        if chosen.kind not in ON_THE_MACHINE:
            parser.error("that world has scripts, and no --store memory")
        chosen.kind = ON_THE_MACHINE[chosen.kind]
    elif chosen.kind is Threads:
        parser.error("--threads needs --store memory")
    if chosen.variants:
        return _search(chosen.start, chosen.seeds)
    prepare = VARIANTS[chosen.variant].prepare if chosen.variant else None
    kind = VARIANTS[chosen.variant].kind if chosen.variant else chosen.kind or Simulation
    if chosen.campaign is not None:
        if prepare is not None:
            parser.error("a campaign is run on the library as it is")
        return _campaign(chosen, kind)
    if chosen.seed is not None and chosen.shrink:
        return _shrink(chosen.seed, kind, prepare)
    if chosen.seed is not None:
        outcome = run_seed(chosen.seed, prepare, kind)
        print(outcome)
        return bool(outcome.checker)
    total, bad = Total(began=perf_counter()), []
    with collector_at_rest() as collect:
        for seed in range(chosen.start, chosen.start + chosen.seeds):
            outcome = run_seed(seed, prepare, kind)
            total.add(outcome)
            collect()
            if outcome.checker:
                bad.append(seed)
                print(outcome if len(bad) == 1 else f"seed {seed}: {outcome.message}", flush=True)
            if total.seeds % 500 == 0:
                print(f"... {total.closing_line(len(bad))}", file=sys.stderr, flush=True)
    print(total.closing_line(len(bad)))
    return bool(bad)


def _campaign(chosen: argparse.Namespace, kind: type[Simulation]) -> int:
    name = kind.__name__.removesuffix("Simulation").lower() or "redis"
    name = "memory" if name == "machine" else name.removesuffix("scene")
    try:
        return campaign.run(
            chosen.campaign, name, kind, chosen.start, chosen.seeds, jobs=chosen.jobs
        )
    except campaign.OtherTree as other:
        print(other, file=sys.stderr)
        return 2
    except (campaign.Stopped, KeyboardInterrupt):
        print("stopped: the same command goes on", file=sys.stderr)
        return 130


def _shrink(seed: int, kind: type[Simulation], prepare: Callable[[Simulation], None] | None) -> int:
    shrunk = shrink(seed, kind, prepare)
    if shrunk is None:
        print(f"seed {seed} does not fail")
        return 0
    print(shrunk.outcome)
    steps = f"{shrunk.steps_before} steps to {shrunk.steps}, in {shrunk.runs} runs"
    print(f"\nfrom {steps}; left out: {sorted(shrunk.skipped)}\n")
    print(f"```mermaid\n{diagram(shrunk.outcome)}\n```")
    return 1


def _search(start: int, seeds: int) -> int:
    """Say for each variant which seed caught it, and which checker."""
    missed = 0
    for name, variant in VARIANTS.items():
        with collector_at_rest() as collect:
            for tried, seed in enumerate(range(start, start + seeds), 1):
                outcome = run_seed(seed, variant.prepare, variant.kind)
                collect()
                if outcome.checker:
                    other = (
                        "" if outcome.checker in variant.caught_by else "  (another was expected)"
                    )
                    what = outcome.message[:110] + other
                    print(f"{name:34} after {tried:4} seeds: {what}", flush=True)
                    break
            else:
                missed += 1
                print(f"{name:34} NOT CAUGHT by {seeds} seeds", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
