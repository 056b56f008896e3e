"""What the nodes of a cluster have to do for their clients: ``python -m benchmarks.scale``.

Two cores cannot carry three busy nodes and their clients, so the throughput of a cluster is not what is
measured here. A node is measured: its processor time, commands, bytes, connections and memory for
each thing that clients do, with more and more nodes beside it. As long as these do not grow with the
number of nodes, as many nodes do as many times the work. Two busy nodes on two cores show it directly:
their load comes from a *replay*, which sends what a client sent before and does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import selectors
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest import mock

import hiredis
import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

import aiodlock
from aiodlock._embedded import EmbeddedServer, find_valkey9
from aiodlock._request import State
from aiodlock.backends.redis.wire import TransportWire
from tests.topology.cluster import Cluster, port

#: What clients send. What their scripts call is counted by the server too, and is not meant here.
_SENT = ("evalsha", "subscribe", "unsubscribe", "ssubscribe", "sunsubscribe")
_NAMES_PER_TASK = 20
#: A waiter is extended every third of its lease; each look lasts three of them.
_WAITER_BEAT = 10 / 3
_PREDICTED = (1, 3, 10, 100)
#: What is compared takes turns in so many slices of a round: what disturbs one disturbs the others.
_SLICES = 8


@dataclass(frozen=True, slots=True)
class Used:
    """What a node did until now, or between two looks."""

    cpu: float
    commands: float
    bytes_in: float
    bytes_out: float
    memory: float
    connections: float
    channels: float

    def __sub__(self, other: Used) -> Used:
        return Used(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


class Table:
    """Rows of medians; a column for each thing that is compared."""

    def __init__(self, title: str, columns: Sequence[str]) -> None:
        self._title = title
        self._columns = columns
        self._rows: dict[tuple[str, str], dict[str, list[float]]] = {}
        self._ratios: dict[str, list[str]] = {}

    def add(self, what: str, column: str, value: float, form: str = ",.0f") -> None:
        self._rows.setdefault((what, form), {}).setdefault(column, []).append(value)

    def median(self, what: str, column: str) -> float:
        return statistics.median(self._row(what)[column])

    def compare(self, what: str) -> None:
        """Add a row of ratios to the first column, taken within each round; with quartiles."""
        row, cells = self._row(what), []
        for column in self._columns:
            pairs = zip(row[column], row[self._columns[0]], strict=True)
            low, middle, high = statistics.quantiles((a / b for a, b in pairs), n=4)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})" if low < high else "1")
        self._ratios[f"{what}: of the first column's in the same round, quartiles"] = cells

    def _row(self, what: str) -> dict[str, list[float]]:
        (row,) = (row for (name, _), row in self._rows.items() if name == what)
        return row

    def show(self) -> None:
        """Print it; behind a median the lowest and the highest."""
        print(f"### {self._title}\n")
        print("| |", " | ".join(self._columns), "|")
        print("|---|", "---:|" * len(self._columns), sep="")
        for (what, form), row in self._rows.items():
            cells = (_cell(row.get(column, []), form) for column in self._columns)
            print(f"| {what} |", " | ".join(cells), "|")
        for what, ratios in self._ratios.items():
            print(f"| {what} |", " | ".join(ratios), "|")
        print(flush=True)


def _cell(values: list[float], form: str) -> str:
    if not values:
        return ""
    middle, low, high = (
        format(value, form) for value in (statistics.median(values), min(values), max(values))
    )
    return middle if low == high else f"{middle} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    add = parser.add_argument
    add("--nodes", type=_numbers, default=[1, 2, 3, 10], help="sizes of the clusters")
    add("--rounds", type=int, default=5, help="how often each thing is measured")
    add("--seconds", type=float, default=2.0, help="how long a round of load lasts")
    add("--only", choices=_PARTS, help="one part alone")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with cluster_of(1) as cluster:
        info: Any = cluster.call(cluster.nodes[0], "INFO", "server")
    version = next(line for line in info.splitlines() if "valkey_version" in line)
    print(
        f"{time.strftime('%Y-%m-%d')}; Python {platform.python_version()}; {version}; "
        f"redis-py {redis.__version__}; {platform.machine()}, {os.cpu_count()} cores; "
        f"load before: {load:.1f}; {options.rounds} rounds; median (lowest to highest)\n",
        flush=True,
    )
    for name, part in _PARTS.items():
        if options.only in (None, name):
            part(options)
    print(f"load after: {os.getloadavg()[0]:.1f}")


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


# -- clusters, and looks at them ---------------------------------------------------------------------


@contextmanager
def cluster_of(primaries: int, replicas: int = 0) -> Iterator[Cluster]:
    """Start a cluster on the last core, and keep this process on the first."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[-1:])  # inherited by the servers
    try:
        with Cluster(find_valkey9(), primaries=primaries, replicas=replicas) as cluster:
            # The tests' 0.6 s would let nodes that share a core take each other for dead.
            cluster.configure("cluster-node-timeout", "15000")
            os.sched_setaffinity(0, cpus[:1])
            yield cluster
    finally:
        os.sched_setaffinity(0, cpus)


def look(cluster: Cluster) -> list[Used]:
    """Ask each node what it did so far."""
    return [_look(cluster, node) for node in cluster.primaries]


def _look(cluster: Cluster, node: EmbeddedServer) -> Used:
    info = _info(cluster, node)
    return Used(
        cpu=float(info["used_cpu_user"]) + float(info["used_cpu_sys"]),
        commands=sum(_calls_in(info).values()),
        bytes_in=float(info["total_net_input_bytes"]),
        bytes_out=float(info["total_net_output_bytes"]),
        memory=float(info["used_memory"]),
        connections=float(info["connected_clients"]),
        channels=float(info["pubsubshard_channels"]),
    )


def _info(cluster: Cluster, node: EmbeddedServer) -> dict[str, str]:
    text: str = cluster.call(node, "INFO", "everything")
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value for name, _, value in pairs}


def _calls(cluster: Cluster) -> Counter[str]:
    """Return how often the only node was called, by command."""
    return _calls_in(_info(cluster, cluster.nodes[0]))


def _calls_in(info: dict[str, str]) -> Counter[str]:
    told = {word: info.get(f"cmdstat_{word}", "calls=0,") for word in _SENT}
    return Counter(
        {word: int(text.removeprefix("calls=").partition(",")[0]) for word, text in told.items()}
    )


def done_since(cluster: Cluster, before: list[Used]) -> list[Used]:
    """Return what each node did since an earlier look."""
    return [now - then for now, then in zip(look(cluster), before, strict=True)]


# -- pairs over distinct names -----------------------------------------------------------------------


def _pairs(options: argparse.Namespace) -> None:
    """64 tasks for each node; this process is the limit, not the nodes."""
    table = Table("64 tasks for each node, one client", _columns(options))
    with ExitStack() as stack:
        clusters = {count: stack.enter_context(cluster_of(count)) for count in options.nodes}
        asyncio.run(_pairs_by_turns(clusters, table, options))
    table.compare("node's CPU per pair, µs")
    table.show()


def _columns(options: argparse.Namespace) -> list[str]:
    return [_column(count) for count in options.nodes]


def _column(count: int) -> str:
    return f"{count} nodes" if count > 1 else "1 node"


async def _pairs_by_turns(
    clusters: dict[int, Cluster], table: Table, options: argparse.Namespace
) -> None:
    """All sizes in each round, so that a noisy minute hurts all alike."""
    async with AsyncExitStack() as stack:
        clients = {}
        for count, cluster in clusters.items():
            clients[count] = await stack.enter_async_context(aiodlock.Client(cluster.url))
            await _lock_names([clients[count]], 64 * count, 0.2)
        for count, cluster in clusters.items():
            for _ in range(options.rounds):
                before = look(cluster)
                await asyncio.sleep(1.0)
                idle = statistics.mean(each.cpu for each in done_since(cluster, before))
                table.add("idle node: % of a core", _column(count), idle * 100, ".2f")
        short = argparse.Namespace(**vars(options) | {"seconds": options.seconds / _SLICES})
        for _ in range(options.rounds * _SLICES):
            for count, cluster in clusters.items():
                client = [clients[count]]
                await _tell_round(cluster, table, _column(count), client, 64 * count, short)


async def _pairs_of(
    cluster: Cluster,
    table: Table,
    column: str,
    tasks: int,
    clients: int,
    options: argparse.Namespace,
) -> None:
    async with AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(aiodlock.Client(cluster.url)) for _ in range(clients)
        ]
        await _lock_names(opened, tasks, 0.2)
        for _ in range(options.rounds):
            await _tell_round(cluster, table, column, opened, tasks, options)


async def _tell_round(
    cluster: Cluster,
    table: Table,
    column: str,
    clients: list[aiodlock.Client],
    tasks: int,
    options: argparse.Namespace,
) -> None:
    before, cpu = look(cluster), time.process_time()
    pairs = await _lock_names(clients, tasks, options.seconds)
    cpu = time.process_time() - cpu
    did = done_since(cluster, before)
    commands = [each.commands for each in did]
    per_pair = [each.cpu / (each.commands / 2) for each in did]
    share = max(commands) / sum(commands) * len(commands)
    table.add("pairs per second (the client is the limit)", column, pairs / options.seconds)
    table.add("client's CPU per pair, µs", column, cpu / pairs * 1e6)
    table.add("node's CPU per pair, µs", column, statistics.mean(per_pair) * 1e6)
    table.add("… of the dearest node", column, max(per_pair) * 1e6)
    table.add("commands per pair", column, sum(commands) / pairs, ".2f")
    table.add("bytes to the node per pair", column, sum(each.bytes_in for each in did) / pairs)
    table.add("bytes from the node per pair", column, sum(each.bytes_out for each in did) / pairs)
    table.add("load of the busiest node, of the average", column, share, ".2f")


async def _lock_names(clients: list[aiodlock.Client], tasks: int, seconds: float) -> int:
    """Let tasks lock and release names of their own, one after the other; return how often."""
    stop = time.perf_counter() + seconds

    async def work(task: int) -> int:
        client, done = clients[task % len(clients)], 0
        while time.perf_counter() < stop:
            async with client.lock(f"order:{task}-{done % _NAMES_PER_TASK}"):
                done += 1
        return done

    return sum(await asyncio.gather(*map(work, range(tasks))))


def _shapes(options: argparse.Namespace) -> None:
    """The same pairs of one node, in fewer or more commands at a time; and with a replica."""
    shapes = {"1 task": (1, 1), "64 tasks, 1 client": (64, 1), "64 tasks, 64 clients": (64, 64)}
    copied = "64 tasks, 1 client, 1 replica"
    table = Table("One node", [*shapes, copied])
    with cluster_of(1) as cluster:
        for column, (tasks, clients) in shapes.items():
            asyncio.run(_pairs_of(cluster, table, column, tasks, clients, options))
    with cluster_of(1, replicas=1) as cluster:
        asyncio.run(_pairs_of(cluster, table, copied, 64, 1, options))
    table.show()


# -- a replay of what a client sent ------------------------------------------------------------------


def _replay(options: argparse.Namespace) -> None:
    """A node that is the limit, with more and more others beside it; and two on two cores."""
    both = "both of 2, on 2 cores"
    columns = [f"1 of {count}" for count in options.nodes]
    table = Table("Busy nodes: 16 connections to each, a command at a time", [*columns, both])
    cpus = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        clusters = {
            column: stack.enter_context(cluster_of(count))
            for column, count in zip(columns, options.nodes, strict=True)
        }
        if len(cpus) > 1:
            clusters[both] = stack.enter_context(cluster_of(2))
            _move(clusters[both].nodes[0], cpus[-2:-1])
        written: dict[str, dict[int, list[bytes]]] = {}
        for column, cluster in clusters.items():
            recorded = asyncio.run(_record(cluster, 64 * len(cluster.nodes)))
            first = port(cluster.nodes[0])
            written[column] = recorded if column == both else {first: recorded[first]}
        for _ in range(options.rounds * _SLICES):
            for column, cluster in clusters.items():
                os.sched_setaffinity(0, cpus if column == both else cpus[:1])
                before, started, cpu = look(cluster), time.perf_counter(), time.process_time()
                _send_again(written[column], 16, options.seconds / _SLICES)
                seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
                did = done_since(cluster, before)[: len(written[column])]
                _tell_replay(table, column, did, seconds, cpu)
        os.sched_setaffinity(0, cpus)
    table.compare("node's CPU per pair, µs")
    table.compare("pairs per second")
    table.show()
    _predict(table.median("pairs per second of a node's CPU", columns[0]))


def _move(node: EmbeddedServer, cpus: list[int]) -> None:
    for task in os.listdir(f"/proc/{node.pid}/task"):
        os.sched_setaffinity(int(task), cpus)


def _tell_replay(
    table: Table, column: str, did: list[Used], seconds: float, replay_cpu: float
) -> None:
    pairs = sum(each.commands for each in did) / 2
    cpu = sum(each.cpu for each in did)
    table.add("pairs per second", column, pairs / seconds)
    table.add("nodes' CPU, % of a core", column, cpu / seconds * 100)
    table.add("the replay's own, % of a core", column, replay_cpu / seconds * 100)
    table.add("node's CPU per pair, µs", column, cpu / pairs * 1e6, ".1f")
    table.add("pairs per second of a node's CPU", column, pairs / cpu)


async def _record(cluster: Cluster, names: int) -> dict[int, list[bytes]]:
    """Return for each port what a client wrote to lock and release names: two commands each."""
    written: dict[int, list[bytes]] = {port(node): [] for node in cluster.nodes}
    write = TransportWire._write

    def record(wire: TransportWire, data: bytes) -> None:
        if b"EVALSHA" in data:
            written[wire._transport.get_extra_info("peername")[1]].append(data)
        write(wire, data)

    async with aiodlock.Client(cluster.url) as client:
        with mock.patch.object(TransportWire, "_write", record):
            for name in range(names):
                async with client.lock(f"order:{name}"):
                    pass
    return written


class _Connection:
    """Sends its commands again and again, each when the one before is answered."""

    def __init__(self, to: int, commands: list[bytes]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", to))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._commands = commands
        self._next = 0
        self._reader = hiredis.Reader()

    def send(self) -> None:
        self.socket.sendall(self._commands[self._next])
        self._next = (self._next + 1) % len(self._commands)

    def receive(self) -> bool:
        """Take what came; tell whether it is an answer, and all of it."""
        self._reader.feed(self.socket.recv(65536))
        reply = self._reader.gets()
        if isinstance(reply, Exception):
            raise reply
        return reply is not False

    @property
    def between_pairs(self) -> bool:
        return self._next % 2 == 0


def _send_again(written: dict[int, list[bytes]], connections: int, seconds: float) -> None:
    """Each connection has names of its own; it stops after a release."""
    opened = []
    for to, commands in written.items():
        pairs = [commands[i : i + 2] for i in range(0, len(commands), 2)]
        for index in range(connections):
            own = [command for pair in pairs[index::connections] for command in pair]
            opened.append(_Connection(to, own))
    with selectors.DefaultSelector() as selector:
        for connection in opened:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            connection.send()
        stop, running = time.perf_counter() + seconds, len(opened)
        while running:
            over = time.perf_counter() > stop
            for key, _ in selector.select(5.0):
                connection = key.data
                if not connection.receive():
                    continue
                if over and connection.between_pairs:
                    selector.unregister(connection.socket)
                    connection.socket.close()
                    running -= 1
                else:
                    connection.send()


# -- who waits ---------------------------------------------------------------------------------------


def _waiters(options: argparse.Namespace) -> None:
    count = 1_000
    columns = {f"{count:,} on as many names": count, f"{count:,} on one name": 1}
    table = Table("Waiters of one client on one node", list(columns))
    turns = Table("A turn that was waited for: 64 names, two clients each", ["per turn"])
    for column, names in columns.items():
        with cluster_of(1) as cluster:
            asyncio.run(_wait_for(cluster, table, column, names, count, options.rounds))
    with cluster_of(1) as cluster:
        asyncio.run(_turns(cluster, turns, 64, options))
    table.show()
    turns.show()


async def _wait_for(
    cluster: Cluster, table: Table, column: str, names: int, count: int, rounds: int
) -> None:
    async with aiodlock.Client(cluster.url) as holder, aiodlock.Client(cluster.url) as client:
        held = [await holder.lock(f"waited{n}", ttl=3600).acquire() for n in range(names)]
        await _queue(client, names, count)  # the buffers grow to their size
        for _ in range(rounds):
            (before,) = look(cluster)
            tasks = await _queue(client, names, count, stay=True)
            (queued,) = done_since(cluster, [before])
            table.add("memory per waiter, bytes", column, queued.memory / count)
            table.add("sharded channels per waiter", column, queued.channels / count, ".3f")
            table.add("commands to begin to wait", column, queued.commands / count, ".2f")
            then = look(cluster)
            await asyncio.sleep(3 * _WAITER_BEAT)
            (did,) = done_since(cluster, then)
            each = count * 3 * _WAITER_BEAT
            table.add("commands per waiter and second", column, did.commands / each, ".2f")
            table.add("bytes to the node per waiter and second", column, did.bytes_in / each)
            table.add("bytes from the node per waiter and second", column, did.bytes_out / each)
            table.add("node's CPU per waiter and second, µs", column, did.cpu / each * 1e6)
            await _cancel(tasks)
        for lease in held:
            await lease.release()


async def _queue(
    client: aiodlock.Client, names: int, count: int, *, stay: bool = False
) -> list[asyncio.Task[Any]]:
    """Let tasks wait; without ``stay`` they leave again."""
    tasks = [asyncio.create_task(client.lock(f"waited{n % names}").acquire()) for n in range(count)]
    session = client._core.session
    assert session is not None
    while sum(place.state is State.WAITING for place in session.requests.values()) < count:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)  # until all have subscribed and looked
    if not stay:
        await _cancel(tasks)
        await asyncio.sleep(0.5)
    return tasks


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _turns(cluster: Cluster, table: Table, names: int, options: argparse.Namespace) -> None:
    async with aiodlock.Client(cluster.url) as one, aiodlock.Client(cluster.url) as two:

        async def work(client: aiodlock.Client, name: int, stop: float) -> int:
            done = 0
            while time.perf_counter() < stop:
                async with client.lock(f"turn{name}"):
                    done += 1
                    await asyncio.sleep(0.01)
            return done

        for _ in range(options.rounds):
            before, calls = look(cluster), _calls(cluster)
            stop = time.perf_counter() + options.seconds
            works = [work(client, n, stop) for n in range(names) for client in (one, two)]
            turns = sum(await asyncio.gather(*works))
            (did,) = done_since(cluster, before)
            for word, called in (_calls(cluster) - calls).items():
                table.add(f"{word.upper()}", "per turn", called / turns, ".2f")
            table.add("bytes to the node", "per turn", did.bytes_in / turns)
            table.add("bytes from the node", "per turn", did.bytes_out / turns)
            table.add("node's CPU, µs", "per turn", did.cpu / turns * 1e6)


# -- memory and connections --------------------------------------------------------------------------


def _memory(options: argparse.Namespace) -> None:
    table = Table("Memory of a node, bytes", ["cluster mode"])
    for _ in range(options.rounds):
        with cluster_of(1) as cluster:
            asyncio.run(_names(cluster, table, "cluster mode", 10_000))
    table.show()


async def _names(cluster: Cluster, table: Table, column: str, count: int) -> None:
    async with aiodlock.Client(cluster.url) as client:

        async def hold(word: str) -> list[aiodlock.Lease]:
            return [await client.lock(f"{word}:{n}", ttl=3600).acquire() for n in range(count)]

        for lease in await hold("before"):  # the buffers and tables grow to their size
            await lease.release()
        (before,) = look(cluster)
        held = await hold("order")
        (with_held,) = done_since(cluster, [before])
        for lease in held:
            await lease.release()
        (with_free,) = done_since(cluster, [before])
        table.add("a held name", column, with_held.memory / count)
        table.add("a free name that was held", column, with_free.memory / count)


def _connections(options: argparse.Namespace) -> None:
    copied = "min_replicas=1"
    table = Table("What one more client costs each node", [*_columns(options), copied])
    for _ in range(min(options.rounds, 3)):
        for count in options.nodes:
            with cluster_of(count) as cluster:
                asyncio.run(_enter(cluster, table, _column(count), 50, {}))
        with cluster_of(1, replicas=1) as cluster:
            asyncio.run(_enter(cluster, table, copied, 50, {"min_replicas": 1}))
    table.show()


async def _enter(
    cluster: Cluster, table: Table, column: str, count: int, options: dict[str, Any]
) -> None:
    async with AsyncExitStack() as stack:
        before = look(cluster)
        for _ in range(count):
            await stack.enter_async_context(aiodlock.Client(cluster.url, **options))
        entered = done_since(cluster, before)
        await asyncio.sleep(5.0)  # the server takes back what the buffers do not need
        did = [
            replace(now, cpu=then.cpu)
            for now, then in zip(done_since(cluster, before), entered, strict=True)
        ]
        for form, what, values in (
            (".2f", "connections", [each.connections for each in did]),
            (",.0f", "memory, bytes", [each.memory for each in did]),
            (",.0f", "bytes to the node, once", [each.bytes_in for each in did]),
            (",.0f", "node's CPU, once, µs", [each.cpu * 1e6 for each in did]),
        ):
            table.add(what, column, statistics.mean(values) / count, form)


# -- what follows ------------------------------------------------------------------------------------


def _predict(of_a_core: float) -> None:
    """A node whose one core is full, as many as there are, less what the busiest has too much."""
    print("### Predicted: pairs per second, one full core for each node\n")
    print("| | names on equally busy nodes | 100,000 names | 1,000 names |\n|---|---:|---:|---:|")
    for nodes in _PREDICTED:
        each = (of_a_core * nodes / share for share in (1, *_shares(nodes, (100_000, 1_000))))
        print(f"| {nodes} |", " | ".join(f"{round(value, -3):,.0f}" for value in each), "|")
    print(flush=True)


def _shares(nodes: int, counts: Sequence[int]) -> list[float]:
    return [statistics.median(_busiest(nodes, count, n) for n in range(5)) for count in counts]


def _imbalance(options: argparse.Namespace) -> None:
    """No server is asked: names to slots by the keys' own hash, slots to nodes evenly."""
    counts = (1_000, 10_000, 100_000)
    columns = {count: f"{count:,} names" for count in counts}
    title = "Load of the busiest node, of the average, names equally busy"
    table = Table(title, list(columns.values()))
    for nodes in _PREDICTED[1:]:
        for count, column in columns.items():
            for number in range(options.rounds):
                table.add(f"{nodes} nodes", column, _busiest(nodes, count, number), ".2f")
    table.show()


def _busiest(nodes: int, count: int, number: int) -> float:
    of_node: Counter[int] = Counter()
    for n in range(count):
        slot = key_slot(f"order:{number}-{n}".encode())
        of_node[slot * nodes // REDIS_CLUSTER_HASH_SLOTS] += 1
    return max(of_node.values()) / count * nodes


_PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "pairs": _pairs,
    "shapes": _shapes,
    "replay": _replay,
    "waiters": _waiters,
    "memory": _memory,
    "connections": _connections,
    "imbalance": _imbalance,
}


if __name__ == "__main__":
    main()
