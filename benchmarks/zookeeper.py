"""ZooKeeper as a store, beside kazoo's ``Lock`` and Curator's ``InterProcessMutex``, in one run.

``python -m benchmarks.zookeeper`` prints a table in Markdown. A server of its own is started, with fsync as
shipped. The repetitions of all contenders take turns, and the table has their medians. Beside the pairs
per second stand what a pair costs: the client's CPU time, messages that the server received, transactions
that it committed. ``--quick`` for a short run. Curator takes part where Debian's packages
``libcurator-recipes-java`` and ``default-jdk-headless`` are installed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiodlock
from tests.zookeeper import ZooKeeperServer


@dataclass(frozen=True)
class Case:
    """So many tasks, each on a name of its own or all on one, and how many pairs all do together."""

    called: str
    tasks: int
    one_name: bool
    pairs: int
    #: Of contenders with a thread per task.
    pairs_of_threads: int


CASES = (
    Case("one task", 1, False, 300, 300),
    Case("64 tasks on 64 names", 64, False, 2560, 640),
    Case("16 tasks on one name", 16, True, 800, 160),
    Case("1,000 waiters of one name", 1000, True, 1000, 0),
)

#: Does a case, and returns the seconds of CPU that the client took.
Run = Callable[[Case, int], Awaitable[float]]
Contender = Callable[[ZooKeeperServer], AbstractAsyncContextManager[Run]]


@asynccontextmanager
async def _ours(server: ZooKeeperServer) -> AsyncIterator[Run]:
    async with aiodlock.Client(server.url) as client:

        async def work(lock: aiodlock.Lock, pairs: int) -> None:
            for _ in range(pairs):
                async with lock:
                    pass

        async def run(case: Case, pairs: int) -> float:
            locks = [client.lock(_name(case, number)) for number in range(case.tasks)]
            began = time.process_time()
            await asyncio.gather(*(work(lock, pairs // case.tasks) for lock in locks))
            return time.process_time() - began

        yield run


@asynccontextmanager
async def _kazoo(server: ZooKeeperServer) -> AsyncIterator[Run]:
    from kazoo.client import KazooClient

    logging.getLogger("kazoo").setLevel(logging.CRITICAL)  # it tells of its own disconnecting
    client = KazooClient(hosts=f"127.0.0.1:{server.port}")
    await asyncio.to_thread(client.start, timeout=15)
    most = max(case.tasks for case in CASES if case.pairs_of_threads)
    pool = ThreadPoolExecutor(most)

    def work(name: str, pairs: int) -> None:
        lock = client.Lock(f"/kazoo/{name}", name)
        for _ in range(pairs):
            with lock:
                pass

    async def run(case: Case, pairs: int) -> float:
        loop = asyncio.get_running_loop()
        began = time.process_time()
        names = [_name(case, number) for number in range(case.tasks)]
        pairs //= case.tasks
        await asyncio.gather(*(loop.run_in_executor(pool, work, name, pairs) for name in names))
        return time.process_time() - began

    try:
        yield run
    finally:
        pool.shutdown()
        await asyncio.to_thread(client.stop)
        client.close()


_JARS = Path("/usr/share/java")
_CURATOR = """
import java.util.concurrent.*;
import org.apache.curator.framework.*;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryOneTime;

public class Pairs {
    public static void main(String[] of) throws Exception {
        CuratorFramework client = CuratorFrameworkFactory.newClient(of[0], new RetryOneTime(100));
        client.start();
        ExecutorService pool = Executors.newFixedThreadPool(64);
        java.io.BufferedReader asked =
            new java.io.BufferedReader(new java.io.InputStreamReader(System.in));
        for (String line; (line = asked.readLine()) != null; ) {
            String[] words = line.split(" ");
            int tasks = Integer.parseInt(words[0]), pairs = Integer.parseInt(words[2]) / tasks;
            boolean one = words[1].equals("one");
            CountDownLatch done = new CountDownLatch(tasks);
            for (int task = 0; task < tasks; task++) {
                String path = "/curator/" + (one ? "one" : "name" + task);
                pool.submit(() -> {
                    InterProcessMutex mutex = new InterProcessMutex(client, path);
                    for (int pair = 0; pair < pairs; pair++) {
                        mutex.acquire();
                        mutex.release();
                    }
                    done.countDown();
                    return null;
                });
            }
            done.await();
            System.out.println("done");
        }
        pool.shutdown();
        client.close();
    }
}
"""


def _curator_jars() -> list[str] | None:
    names = ("curator-recipes", "curator-framework", "curator-client", "guava", "failureaccess")
    jars = [_JARS / f"{name}.jar" for name in (*names, "zookeeper", "zookeeper-jute", "slf4j-api")]
    found = [str(jar) for jar in (*jars, *_JARS.glob("netty*.jar")) if jar.exists()]
    ready = shutil.which("javac") is not None and all(jar.exists() for jar in jars[:3])
    return found if ready else None


@asynccontextmanager
async def _curator(server: ZooKeeperServer) -> AsyncIterator[Run]:
    jars = _curator_jars()
    assert jars is not None
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "Pairs.java"
        source.write_text(_CURATOR)
        classes = ":".join([directory, *jars])
        await asyncio.to_thread(subprocess.run, ["javac", "-cp", classes, str(source)], check=True)
        process = await asyncio.create_subprocess_exec(
            *("java", "-Xmx256m", "-cp", classes, "Pairs", f"127.0.0.1:{server.port}"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        said = process.stdout

        async def run(case: Case, pairs: int) -> float:
            assert process.stdin is not None
            began = _cpu_of(process.pid)
            names = "one" if case.one_name else "many"
            process.stdin.write(f"{case.tasks} {names} {pairs}\n".encode())
            while (line := await said.readline()) != b"done\n":
                assert line, "Curator's program has ended"
            return _cpu_of(process.pid) - began

        try:
            yield run
        finally:
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 10)
            if process.returncode is None:
                process.kill()
                await process.wait()


def _name(case: Case, number: int) -> str:
    return "one" if case.one_name else f"name{number}"


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Figures:
    """What one run of a case came to, per pair."""

    rate: float
    cpu: float
    messages: float
    commits: float


async def _measure_one(server: ZooKeeperServer, run: Run, case: Case, pairs: int) -> Figures:
    messages, commits = _counters(server)
    began = time.perf_counter()
    cpu = await run(case, pairs)
    lasted = time.perf_counter() - began
    messages, commits = (
        after - before for before, after in zip((messages, commits), _counters(server), strict=True)
    )
    return Figures(pairs / lasted, cpu / pairs, messages / pairs, commits / pairs)


def _counters(server: ZooKeeperServer) -> tuple[int, int]:
    """Return how many messages came, and how many transactions were committed (the zxid's lower half)."""
    told = dict(line.split(": ", 1) for line in server.ask("srvr").splitlines() if ": " in line)
    return int(told["Received"]), int(told["Zxid"], 16) & 0xFFFFFFFF


async def _measure(server: ZooKeeperServer, quick: bool) -> None:
    share, rounds = (4, 3) if quick else (1, 5)
    contenders: dict[str, Contender] = {"aiodlock": _ours, "kazoo": _kazoo}
    if _curator_jars() is not None:
        contenders["Curator"] = _curator
    found: dict[tuple[str, str], list[Figures]] = {}
    for _ in range(rounds):
        for who, opened in contenders.items():
            async with opened(server) as run:
                await run(CASES[0], 20)  # warm
                for case in CASES:
                    pairs = case.pairs if who == "aiodlock" else case.pairs_of_threads
                    if pairs:
                        pairs = max(case.tasks, pairs // share // case.tasks * case.tasks)
                        figures = await _measure_one(server, run, case, pairs)
                        found.setdefault((case.called, who), []).append(figures)
    _print_table(list(contenders), found)


def _print_table(contenders: list[str], found: dict[tuple[str, str], list[Figures]]) -> None:
    print(f"load {os.getloadavg()[0]:.1f}; a pair: client's CPU, messages, commits\n")
    print(f"| pairs per second | {' | '.join(contenders)} | beside kazoo |")
    print(f"|---|{'---|' * (len(contenders) + 1)}")
    for case in CASES:
        cells = []
        for who in contenders:
            some = found.get((case.called, who))
            cells.append(_cell(some) if some else "")
        ratios = [
            ours.rate / theirs.rate
            for ours, theirs in zip(
                found[case.called, "aiodlock"], found.get((case.called, "kazoo"), ()), strict=False
            )
        ]
        ratio = f"{statistics.median(ratios):.2f}" if ratios else ""
        print(f"| {case.called} | {' | '.join(cells)} | {ratio} |")


def _cell(some: list[Figures]) -> str:
    rate, cpu, messages, commits = (
        statistics.median(getattr(one, field) for one in some)
        for field in ("rate", "cpu", "messages", "commits")
    )
    return f"{rate:,.0f} ({cpu * 1e6:,.0f} µs, {messages:.1f}, {commits:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zookeeper", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the pairs, three rounds")
    quick = parser.parse_args().quick
    with ZooKeeperServer(tick=2.0, sync=True) as server:
        asyncio.run(_measure(server, quick))


if __name__ == "__main__":
    main()
