"""Time per acquire and release, all contenders by turns, so that a noisy minute hurts all alike."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from . import contenders as who
from .contenders import Contender, Load, Run
from .servers import Cores, NotThere, Servers


@dataclass(frozen=True, slots=True)
class Case:
    """A load, who can carry it, and where it runs."""

    key: str
    title: str
    load: Load
    contenders: tuple[Contender, ...]
    cores: Cores = "two"


@dataclass(slots=True)
class Measured:
    """Microseconds per acquire and release, a figure per repetition; in the same order for all.

    Contenders are named by their titles; ``missing`` says why there is no figure.
    """

    key: str
    title: str
    loop: str
    times: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def cases(*, quick: bool) -> list[Case]:
    """Return all cases.

    The number of acquisitions is the same for every contender: a lock whose waiters poll looks far
    better when one task may take it many times in a row, far worse when each takes it once.
    """
    share = 4 if quick else 1
    on_redis = (
        who.RAW,
        who.OURS,
        who.UNCONFIRMED,
        who.LINGERING,
        who.REDIS_PY,
        who.FIFO,
        who.POTTERY,
    )
    everybody = (*on_redis, who.THREADED, who.NODE, who.POSTGRES, who.KAZOO)
    one = Case("one-task", "One task", Load(1, 1, 800 // share), everybody)
    return [
        one,
        replace(
            one,
            key="one-task-one-core",
            title="One task, client and server on the same core",
            cores="one",
        ),
        Case("64-names", "64 tasks on 64 names", Load(64, 64, 32 // share), everybody),
        # The other peers would need a thousand connections or threads.
        Case(
            "1000-names",
            "1,000 tasks on 1,000 names",
            Load(1_000, 1_000, 8),
            (who.RAW, who.OURS, who.UNCONFIRMED, who.FEW, who.NODE),
        ),
        # pottery's waiters hardly ever get it.
        Case(
            "16-on-one",
            "16 tasks on one name",
            Load(16, 1, 20),
            tuple(c for c in everybody if c not in (who.RAW, who.POTTERY)),
        ),
        Case(
            "read-mostly",
            "32 tasks on one name, 9 of 10 acquisitions shared, 1 ms each",
            Load(32, 1, 10, body=0.001, read_mostly=True),
            (who.OURS, who.EXCLUSIVE, who.FIFO, who.POSTGRES, who.KAZOO),
        ),
    ]


async def measure(
    case: Case, loop: str, chosen: Iterable[Contender], servers: Servers, repetitions: int
) -> Measured:
    """Let the chosen contenders of the case take turns. The one who begins changes every time."""
    result = Measured(case.key, case.title, loop)
    runs: dict[str, Run] = {}
    load = case.load
    async with AsyncExitStack() as stack:
        for contender in chosen:
            try:
                run = await stack.enter_async_context(contender.open(servers))
                await run(replace(load, count=min(3, load.count)))
                runs[contender.title] = run
            except ImportError as missing:
                result.missing[contender.title] = f"not installed ({missing.name})"
            except NotThere as missing:
                result.missing[contender.title] = str(missing)
            except Exception as failed:
                result.missing[contender.title] = f"failed: {type(failed).__name__}"
        order = list(runs)
        for _ in range(repetitions):
            for title in order:
                if title in result.missing:
                    continue
                gc.collect()
                try:
                    seconds = await runs[title](load)
                except Exception as failed:
                    result.missing[title] = f"failed: {type(failed).__name__}"
                    continue
                per_pair = seconds / (load.count * load.tasks) * 1e6
                result.times.setdefault(title, []).append(per_pair)
            order = order[1:] + order[:1]
    for title in result.missing:
        result.times.pop(title, None)
    result.times = {
        c.title: result.times[c.title] for c in case.contenders if c.title in result.times
    }
    return result
