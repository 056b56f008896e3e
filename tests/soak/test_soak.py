"""The soak itself: a short one ends without violations, and its checks find what they look for."""

from __future__ import annotations

import asyncio
import random
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import pytest

from aiodlock._clock import now
from aiodlock.backends.postgres.schema import create_statements
from tests.postgres import PostgresServer
from tests.scenes import until
from tests.servers import installed
from tests.soak import campaign
from tests.soak.faults import Fault, Span, Tormentor
from tests.soak.journal import Hold, Journal, Record, Wait, check, gaps, read
from tests.soak.memory import Series
from tests.soak.records import first_mismatch, of_lease
from tests.soak.soak import Options, Result, Soak
from tests.soak.tormentors import PostgresTormentor, RedisTormentor
from tests.soak.wire import Wire
from tests.soak.worker import FORGOTTEN


def hold(mode: str, token: int, began: float, ended: float, name: str = "name") -> Hold:
    return Hold(name, mode, token, began, ended)


@pytest.mark.parametrize(
    ("holds", "found"),
    [
        ([hold("x", 1, 1.0, 2.0), hold("x", 2, 1.9, 3.0)], "exclusion"),
        ([hold("x", 1, 1.0, 9.0), hold("s", 2, 2.0, 2.0)], "exclusion"),
        ([hold("s", 1, 1.0, 4.0), hold("s", 2, 2.0, 3.0), hold("x", 3, 3.5, 5.0)], "exclusion"),
        ([hold("s2", 1, 1.0, 9.0), hold("s2", 2, 1.0, 9.0), hold("s2", 3, 2.0, 2.5)], "limit"),
        ([hold("x", 2, 1.0, 2.0), hold("x", 1, 3.0, 4.0)], "token"),
        ([hold("x", 2, 1.0, 2.0), hold("s", 1, 3.0, 4.0)], "token"),
        ([hold("s", 2, 1.0, 2.0), hold("s", 2, 1.0, 2.0)], "token"),
        ([hold("l", 2, 1.0, 2.0), hold("l", 3, 3.0, 4.0), hold("l", 1, 5.0, 6.0)], "token"),
        ([hold("l", 2, 1.0, 2.0), hold("l", 2, 1.5, 4.0)], "exclusion"),
    ],
)
def test_broken_promise_is_found(holds: list[Hold], found: str) -> None:
    assert [what.partition(":")[0] for what in check(holds)] == [found]


@pytest.mark.parametrize(("name", "queues"), [("part-1", 1), ("part-1+part-4+part-7", 3)])
def test_wait_for_several_names_is_one_in_several_queues(
    tmp_path: Path, name: str, queues: int
) -> None:
    Journal(tmp_path / "journal-1").waited(name, 1.0, 9.0)
    (wait,) = read([tmp_path / "journal-1"]).waits
    assert wait.queues == queues
    assert len(gaps(Record(waits=[wait]), [])) == (queues == 1)


def test_kept_promises_are_not_mistaken_for_broken_ones() -> None:
    assert not check(
        [
            hold("x", 1, 1.0, 2.0),
            hold("s", 3, 2.0, 5.0),
            hold("s", 2, 2.5, 4.0),
            hold("x", 4, 5.0, 6.0),
            hold("x", 1, 1.5, 1.6, "other"),
            hold("l", 1, 1.0, 1.6, "warm"),
            hold("l", 1, 2.0, 2.6, "warm"),
            hold("s2", 1, 1.0, 9.0, "pool"),
            hold("s2", 2, 1.0, 2.0, "pool"),
            hold("s2", 3, 2.0, 3.0, "pool"),
        ]
    )


def test_readers_of_a_quorum_may_have_the_same_token_and_no_writer_may() -> None:
    readers = [hold("s", 2, 1.0, 2.0), hold("s", 2, 1.0, 2.0)]
    assert not check(readers, readers_share_tokens=True)
    for late in (hold("x", 2, 3.0, 4.0), hold("x", 1, 3.0, 4.0)):
        assert check([*readers, late], readers_share_tokens=True)
    between = [hold("x", 3, 3.0, 4.0), hold("s", 2, 5.0, 6.0)]
    assert check([*readers, *between], readers_share_tokens=True)


def test_journal_of_a_killed_worker_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    first = journal.began("name", "x", 7, 1.0)
    journal.lasts(first, 2.5)
    journal.began("name", "x", 8, 3.0)
    journal.violation("something")
    journal.totals({"acquisitions": 2, "longest wait": 1.5})
    with path.open("a") as file:
        file.write('t {"acquisitio')
    record = read([path])
    assert record.holds == [hold("x", 7, 1.0, 2.5), hold("x", 8, 3.0, 3.0)]
    assert record.counts == {"acquisitions": 2}
    assert record.longest_wait == 1.5
    assert len(record.violations) == 1


def test_growing_memory_is_not_flat() -> None:
    mebibyte = 1024 * 1024
    warming_up = [(float(at), min(at, 20) * mebibyte) for at in range(100)]
    leaking = [(float(at), (30 + at // 5) * mebibyte) for at in range(100)]
    assert Series("warming up", warming_up).is_flat
    assert not Series("leaking", leaking).is_flat


def test_time_without_a_holder_is_told_without_the_time_of_faults() -> None:
    record = Record(
        holds=[hold("x", 1, 0.0, 1.0), hold("x", 2, 9.0, 9.5), hold("x", 3, 9.6, 12.0)],
        waits=[Wait("name", 0.5, 9.0), Wait("name", 0.5, 9.6), Wait("name", 9.2, 9.6)],
    )
    one, two, three = gaps(record, [(2.0, 4.0), (3.0, 5.0), (8.0, 20.0)])
    assert (one.began, one.ended, one.quiet) == (1.0, 9.0, 4.0)
    assert two == one
    assert three.quiet == 0.0


class Harmless(Tormentor):
    """Faults that do not end, and whose clean-up fails."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def source(self, *, through_lines: bool) -> str:
        return "memory://"

    async def heal(self) -> None: ...

    async def left(self) -> list[str]:
        return []

    async def memory(self) -> tuple[str, int]:
        return "nothing", 0

    def lose(self, line: Any, *, replies: bool, times: int) -> None: ...

    def of_workers(self) -> dict[str, Fault]:
        return self.of_server()

    def of_network(self) -> dict[str, Fault]:
        return self.of_server()

    def of_server(self) -> dict[str, Fault]:
        async def fault() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                raise ConnectionError("and the server is away")

        return {"fault": fault}


class Away(Harmless):
    """No client can be entered."""

    def source(self, *, through_lines: bool) -> str:
        return "nowhere://"


class Swallowing(Harmless):
    """A driver's clean-up fails, and the driver tries again: nothing is left of a cancellation."""

    def of_server(self) -> dict[str, Fault]:
        async def fault() -> None:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

        return {"fault": fault}

    async def memory(self) -> tuple[str, int]:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return "nothing", 0


async def test_time_in_which_servers_are_mended_counts_as_a_fault_of_servers() -> None:
    tormentor = Harmless(random.Random(1), None)
    began = now()
    await tormentor.mend()
    (span,) = tormentor.spans
    assert span.to_servers
    assert began <= span.began <= span.ended <= now()


@pytest.mark.skipif(not installed("valkey9"), reason="no server")
async def test_own_questions_wait_for_a_server_that_is_away() -> None:
    """A fault may hit the soak's own connection, and that was an error of the soak."""
    async with RedisTormentor(random.Random(1), None) as tormentor:
        (server,) = tormentor.servers
        server.kill()
        asking = asyncio.create_task(tormentor.memory())
        await asyncio.wait([asking], timeout=1.5)
        await asyncio.to_thread(server.start)
        _, used = await asking
        assert used > 0


@pytest.mark.parametrize("kind", [Harmless, Swallowing])
async def test_tormentor_ends_whatever_drivers_do_with_a_cancellation(
    kind: type[Harmless],
) -> None:
    tormentor = kind(random.Random(1), None)
    running = asyncio.create_task(tormentor.run(0.001))
    await until(lambda: tormentor.counts["fault"] == 3)
    running.cancel()
    await asyncio.wait({running}, timeout=10)
    assert running.cancelled()


async def test_sampling_ends_though_a_driver_swallows_the_cancellation(tmp_path: Path) -> None:
    soak = Soak(Options("valkey9", 1.0, 1, 1, 1.0, 1), tmp_path)
    soak._tormentor = Swallowing(random.Random(1), None)
    sampling = asyncio.create_task(soak._sample(now()))
    await until(lambda: len(soak.memory) == 1)
    sampling.cancel()
    await asyncio.wait({sampling}, timeout=5)
    assert sampling.cancelled()


@pytest.mark.parametrize("is_leak", [False, True])
async def test_what_postgresql_keeps_for_a_time_is_not_taken_for_a_leak(
    postgres: PostgresServer, is_leak: bool
) -> None:
    """A holder has died, and a marker of another request keeps the row of its name for two minutes."""
    postgres.execute("drop schema if exists aiodlock cascade;")
    postgres.execute(create_statements("logged"))
    for message in (
        r"leave\taiodlock:l:part-7\tanother\t120000\tended",
        r"acquire\taiodlock:l:part-7\tdead\tx\ttdead\t1\t2000\t0\twait",
    ):
        postgres.execute(f"select aiodlock.turn('me', 10000, E'{message}')")
    if is_leak:
        postgres.execute("update aiodlock.name set keep_until = 10 * keep_until")
    tormentor = PostgresTormentor(random.Random(1), None)
    tormentor.server = postgres
    assert [what.partition(" ")[0] for what in await tormentor.left()] == ["name"] * is_leak


_MADE = "7:34:12 AM session 0x2aa cxid 0x4 zxid 0x10c multi create:/aiodlock/ids/9-1;create:{}"
_NODE = "/aiodlock/locks/a%2Fb/x:9-1::0000000003"
_DELETED = "7:34:13 AM session 0x2aa cxid 0x5 zxid 0x10d multi delete:{};delete:/aiodlock/ids/9-1"
_CLOSED = "7:34:19 AM session 0x2aa cxid 0x6 zxid 0x10e closeSession v{...}"


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        ([_DELETED.format(_NODE)], "deleted by 0x10d of session 0x2aa"),
        ([_CLOSED], "its session was closed by 0x10e of session 0x2aa"),
        (
            [_CLOSED.replace("0x2aa", "0x2bb"), _DELETED.format(_NODE + "4")],
            "no server has its end",
        ),
    ],
)
def test_ensemble_tells_what_ended_a_lease(ends: list[str], told: str) -> None:
    others = [_MADE.format("/aiodlock/locks/c/x:9-2::0000000003").replace("0x10c", "0x10b"), "EOF"]
    records = {
        1: [*others, _MADE.format(_NODE), *ends],
        2: [*others, _MADE.format(_NODE)],
        3: others,
    }
    logs = {1: "at Expiring session 0x2aa\nat Expiring session 0x2bb\n", 2: ""}
    made, end, *rest = of_lease("a/b", 0x10C, records, logs)
    assert made.startswith("made by 0x10c of session 0x2aa")
    assert made.endswith("on servers 1, 2")
    assert end.startswith(told)
    assert rest == ["server 1: at Expiring session 0x2aa"]
    assert of_lease("a/b", 0x999, records, logs) == ["no server has transaction 0x999 on record"]


def test_server_that_has_lost_data_says_when() -> None:
    at = datetime.now(UTC) - timedelta(seconds=60)
    log = f"{at.isoformat()} [main] INFO started\njava.io.IOException: No space\n"
    assert first_mismatch(log) is None
    found = first_mismatch(f"{log}{at.isoformat()} [main] ERROR First digest mismatch on txn: 5\n")
    assert found is not None
    assert found[0] == pytest.approx(now() - 60.0, abs=5.0)
    assert found[1].endswith("First digest mismatch on txn: 5")


def test_lease_that_a_quorum_may_forget_is_told_and_not_judged(tmp_path: Path) -> None:
    """One node comes back empty, and another one was full when the lease began."""
    lost = f"100.000 {FORGOTTEN}: LockLost('gone')"
    full = Span(95.0, 99.0, "memory full", to_servers=True)
    early = Span(90.0, 96.0, "memory full", to_servers=True)
    stopped = Span(99.0, 101.0, "SIGSTOP of a worker", to_servers=False)
    restarted = Span(99.5, 105.0, "server killed and restarted", to_servers=True)
    for store, spans, judged in (
        ("quorum", [full, restarted], 0),
        ("quorum", [early, stopped, restarted], 1),
        ("quorum", [full], 1),
        ("valkey9", [full, restarted], 1),
    ):
        soak = Soak(Options(store, 1.0, 1, 1, 1.0, 1), tmp_path)
        soak.violations = [lost, "100.000 exclusion: of these"]
        tormentor = RedisTormentor(random.Random(1), None, store)
        tormentor.spans += spans
        result = soak._judge(tormentor, Record(), 60.0, 40.0)
        assert (len(result.violations), len(result.not_judged)) == (1 + judged, 1 - judged)


def test_what_is_seen_after_servers_lost_data_is_told_and_not_judged(tmp_path: Path) -> None:
    soak = Soak(Options("zookeeper", 1.0, 1, 1, 1.0, 1), tmp_path)
    soak.violations = ["99.000 lost: early", "101.000 lost: late", "leak: at the end"]
    tormentor = Harmless(random.Random(1), None)
    assert len(soak._judge(tormentor, Record(), 60.0, 40.0).violations) == 3
    soak._broke = (100.0, "First digest mismatch")
    soak.violations = soak.violations[:3]
    result = soak._judge(tormentor, Record(), 60.0, 40.0)
    assert [what.partition(" (")[0] for what in result.violations] == ["99.000 lost: early"]
    assert (len(result.not_judged), result.judged) == (2, 1.0)
    assert str(result).endswith("1 violations; servers lost data after 1.0 min, 2 not judged")
    path = tmp_path / "soak.jsonl"
    campaign.run(path, "zookeeper", 1.0, lambda minutes: result)
    row = campaign.summary([path]).splitlines()[2].split(" | ")
    assert (row[1], row[11:]) == ("1 (1 judged)", ["1", "2 |"])


async def test_wire_carries_loses_and_cuts() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, Wire(server.sockets[0].getsockname()[1]) as wire:

        async def said(words: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)
            try:
                writer.write(words)
                return await asyncio.wait_for(reader.read(100), 10.0)
            except ConnectionError:
                return b""
            finally:
                writer.transport.abort()

        assert await said(b"one") == b"one"
        wire.lose_replies(1)
        assert await said(b"two") == b""
        wire.stall()
        waiting = asyncio.create_task(said(b"three"))
        await until(lambda: bool(wire._links))
        assert not (await asyncio.wait({waiting}, timeout=0.1))[0]
        await wire.heal()
        assert await waiting == b"three"
        wire.half_open()
        swallowed = asyncio.create_task(said(b"four"))
        await until(lambda: any(link.swallowed for link in wire._links))
        await wire.heal()
        assert await swallowed == b""
        assert await said(b"five") == b"five"


def test_campaign_goes_on_until_a_store_has_its_minutes_and_adds_up(tmp_path: Path) -> None:
    path, asked = tmp_path / "soak.jsonl", []

    def part(minutes: float) -> Result | None:
        asked.append(minutes)
        if len(asked) == 2:
            return None  # stopped
        return Result("etcd", 6.0, 1, {"kill": 2}, {"acquisitions": 5}, 3, 1.5, 0.5, 9.0, {}, 2.0)

    assert not campaign.run(path, "etcd", 12.0, part)
    assert not campaign.run(path, "etcd", 12.0, part)
    assert not campaign.run(path, "etcd", 12.0, part)
    assert asked == [12.0, 6.0, 6.0]
    with path.open("a") as file:
        file.write('{"store": "et')  # it was killed while it wrote
    assert not campaign.run(path, "etcd", 18.0, part)
    row = campaign.summary([path]).splitlines()[2].split(" | ")
    assert (row[0], row[1], row[2], row[4], row[7]) == ("| etcd", "18", "3", "15", "6")


async def test_soak_gives_up_when_no_worker_gets_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.soak.soak._ENTERS_WITHIN", 0.01)
    soak = Soak(Options("valkey9", 1.0, 1, 1, 1.0, 1), tmp_path)
    soak._tormentor = Away(random.Random(1), None)
    with pytest.raises(RuntimeError, match="no worker has entered its client"):
        await soak._start(through_lines=False)


async def test_short_soak_ends_without_a_violation() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.soak", "--minutes", "0.1", "--pause", "0.7"),
        cwd=Path(__file__).parents[2],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(60):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
    assert process.returncode == 0, (out.decode(), err.decode())
    assert out.decode().rstrip().endswith(" 0 violations")
