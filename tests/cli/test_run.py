"""`aiodlock run` as a process, against a real server: nothing runs on without the lock."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiodlock
from aiodlock.cli import _guardian

from .. import forked
from ..conftest import MakeClient
from ..scenes import BRIEF, STARTING, stalls, takes, until, until_waiting
from ..servers import Store

pytestmark = pytest.mark.stores("valkey9")

Start = Callable[..., Awaitable[asyncio.subprocess.Process]]

#: For ``sh``: ``timeout`` puts itself and its command, which says the pids of both and does not end by
#: SIGTERM, into a group of their own.
WITH_TIMEOUT = """
timeout 300 sh -c 'trap "" TERM; echo $PPID $$ >"$PIDS.new"; mv "$PIDS.new" "$PIDS"; sleep 300 & wait; wait'
exit $?
"""
#: Says its pid, and does not end by SIGTERM; its own child neither.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, __file__, "inner"])
    open(os.environ["PIDS"] + ".new", "w").write(f"{os.getpid()} {child.pid}")
    os.rename(os.environ["PIDS"] + ".new", os.environ["PIDS"])
time.sleep(60)
"""


@pytest.fixture
async def start(store: Store, tmp_path: Path) -> AsyncIterator[Start]:
    """Give a way to start ``aiodlock run`` with options; all are ended when the test ends."""
    started: list[asyncio.subprocess.Process] = []

    async def start(
        *arguments: str, shell: str | None = None, stderr: int = asyncio.subprocess.PIPE
    ) -> asyncio.subprocess.Process:
        environment = {**os.environ, "AIODLOCK_URL": store.url, "PIDS": str(tmp_path / "pids")}
        environment.pop("PYTHONUNBUFFERED", None)  # it hides what fails at the exit
        pipes: Any = {"stdout": asyncio.subprocess.PIPE, "stderr": stderr}
        if shell is None:
            process = await forked.start("aiodlock", "run", *arguments, env=environment, **pipes)
        else:
            process = await asyncio.create_subprocess_exec(
                *("sh", "-c", shell, "sh", sys.executable, "-m", "aiodlock", "run", *arguments),
                env=environment,
                **pipes,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
    with contextlib.suppress(FileNotFoundError):
        for pid in map(int, (tmp_path / "pids").read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for process in started:
        await process.communicate()  # to the end of the pipes, which the commands have too


@pytest.fixture
def stubborn(tmp_path: Path) -> tuple[str, str]:
    path = tmp_path / "stubborn.py"
    path.write_text(STUBBORN)
    return sys.executable, str(path)


@pytest.fixture(params=["broken", "full", "closed"])
def start_mute(start: Start, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Give the same with a standard error that takes nothing: its reader has ended, its disk is full, or it
    is not open."""
    reader, broken = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb") as full:
        stderr = full.fileno() if request.param == "full" else broken
        shell = 'exec "$@" 2>&-' if request.param == "closed" else None
        yield functools.partial(start, shell=shell, stderr=stderr)
    os.close(broken)


async def pids_of(process: asyncio.subprocess.Process, tmp_path: Path) -> list[int]:
    """Wait until the stubborn child and its own child run."""
    path = tmp_path / "pids"
    while not path.exists():
        assert process.returncode is None, await process.communicate()
        await asyncio.sleep(0.01)
    return [int(pid) for pid in path.read_text().split()]


def alive(pids: list[int]) -> list[int]:
    """Return those that run; a zombie does not."""
    found = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.append(pid)
    return found


async def until_dead(pids: list[int], within: float) -> None:
    async with takes(at_most=within):
        await until(lambda: not alive(pids), "the end of the command")


async def guardian_of(pid: int) -> int:
    """Return the leader of the session in which this process runs."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])


async def test_command_has_the_lock_and_its_exit_code_comes_out(start: Start) -> None:
    script = 'echo "$AIODLOCK_NAME $AIODLOCK_TOKEN $AIODLOCK_SEQUENCER"; exit 7'
    process = await start("my job", "--", "sh", "-c", script)
    out, err = await process.communicate()
    name, token, sequencer = out.decode().rsplit(maxsplit=2)
    assert (process.returncode, err) == (7, b"")
    assert name == "my job"
    assert sequencer == f"my%20job:exclusive:{token}"


async def test_command_that_dies_by_a_signal_gives_128_more(start: Start) -> None:
    process = await start("job", "--", "sh", "-c", "kill -9 $$")
    await process.communicate()
    assert process.returncode == 128 + 9


@pytest.mark.parametrize(
    ("command", "code"), [("no-such-command", 127), ("/etc/passwd", 126)], ids=["none", "no-exec"]
)
async def test_command_that_cannot_start(start: Start, command: str, code: int) -> None:
    process = await start("job", "--", command)
    _, err = await process.communicate()
    assert process.returncode == code
    assert command in err.decode()


async def test_held_lock_gives_75(start: Start, client: aiodlock.Client) -> None:
    async def is_refused(*options: str) -> None:
        process = await start("job", *options, "--json", "--", "echo", "never")
        out, err = await process.communicate()
        assert (process.returncode, out) == (75, b"")
        assert json.loads(err.splitlines()[-1])["event"] == "not_acquired"

    async with client.lock("job"):
        await asyncio.gather(is_refused("--nonblock"), is_refused("--timeout", f"{BRIEF}"))
        assert not (await client.inspect("job")).waiters


async def test_conflict_exit_code_stands_for_75_and_no_other(
    start: Start, client: aiodlock.Client
) -> None:
    options = ("job", "--nonblock", "--conflict-exit-code", "0")
    async with client.lock("job"):
        process = await start(*options, "--", "false")
        _, err = await process.communicate()
        assert process.returncode == 0
        (holder,) = (await client.inspect("job")).holders
        expected = f"aiodlock: 'job' was not acquired: held by {holder.client}\n"
        assert err.decode() == expected
    process = await start(*options, "--", "sh", "-c", "exit 75")
    assert await process.wait() == 75


async def test_quiet_says_nothing_of_a_lock_that_others_hold(
    start: Start, client: aiodlock.Client
) -> None:
    async def is_silent(code: int, *options: str) -> None:
        process = await start("job", "--quiet", *options, "--", "echo", "ran")
        out, err = await process.communicate()
        assert (process.returncode, out, err) == (code, b"ran\n" if code == 0 else b"", b"")

    async with client.lock("job"):
        await asyncio.gather(
            is_silent(75, "--nonblock"), is_silent(75, "--timeout", str(2 * BRIEF))
        )
        waiter = asyncio.create_task(is_silent(0))
        await until_waiting(client, "job", within=STARTING)
        await asyncio.sleep(BRIEF)  # long enough for a word about it
    await waiter


async def test_quiet_still_tells_failures(start: Start, client: aiodlock.Client) -> None:
    process = await start("job", "--quiet", "--margin", "0.4", "--", "sh", "-c", "echo; sleep 60")
    assert process.stdout is not None
    assert await process.stdout.readline() == b"\n"
    assert await client.break_lock("job") == 1
    _, err = await process.communicate()
    assert process.returncode == 76
    assert "an operator released it by force" in err.decode()
    process = await start("job", "--quiet", "--url", "unix:///nowhere", "--", "true")
    _, err = await process.communicate()
    assert process.returncode == 69
    assert "cannot reach" in err.decode()


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
async def test_waiter_says_once_for_what_and_for_whom_it_waits(
    start: Start, client: aiodlock.Client, as_json: bool
) -> None:
    async with client.lock("job"):
        other = asyncio.create_task(client.lock("job").acquire())
        await until_waiting(client, "job")
        (holder,) = (await client.inspect("job")).holders
        options = ["--json"] if as_json else []
        process = await start("job", *options, "--", "true")
        assert process.stderr is not None
        line = (await process.stderr.readline()).decode()
        told = json.loads(line)["message"] if as_json else line.strip().removeprefix("aiodlock: ")
        expected = f"waiting for 'job': held by {holder.client}; 1 request ahead in the queue"
        assert told == expected
        if as_json:
            message = json.loads(line)
            assert (message["event"], message["held_by"]) == ("waiting", [holder.client])
    await (await other).release()
    assert await process.stderr.read() == b""
    assert await process.wait() == 0


async def test_command_that_need_not_wait_says_nothing(start: Start) -> None:
    process = await start("job", "--", "sleep", "1")
    _, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")


async def test_shared_runs_beside_readers_only(start: Start, client: aiodlock.Client) -> None:
    async with client.rwlock("job").read:
        reader = await start("job", "--shared", "--nonblock", "--", "true")
        writer = await start("job", "--nonblock", "--", "true")
        assert [await reader.wait(), await writer.wait()] == [0, 75]


async def test_waiter_that_is_interrupted_leaves_the_queue(
    start: Start, client: aiodlock.Client
) -> None:
    async with client.lock("job"):
        process = await start("job", "--", "echo", "never")
        await until_waiting(client, "job", within=STARTING)
        process.send_signal(signal.SIGTERM)
        out, _ = await process.communicate()
        assert (process.returncode, out) == (128 + signal.SIGTERM, b"")
        assert not (await client.inspect("job")).waiters


async def test_signals_reach_the_command_and_it_keeps_the_lock_to_its_end(
    start: Start, client: aiodlock.Client
) -> None:
    script = "trap 'sleep 0.2; echo bye; exit 5' TERM; echo ready; while :; do sleep 0.02; done"
    process = await start("job", "--", "sh", "-c", script)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    async with client.lock("job"):
        assert await process.stdout.read() == b"bye\n"
    assert await process.wait() == 5


async def test_signal_that_was_ignored_from_the_start_stays_so(
    start: Start, client: aiodlock.Client
) -> None:
    """As under nohup, and for what a script starts in the background."""
    script = "kill -HUP $$; kill -INT $$; echo ready; sleep 0.5; echo done"
    async with client.lock("job"):
        process = await start(
            "job", "--quiet", "--", "sh", "-c", script, shell='trap "" HUP INT; exec "$@"'
        )
        await until_waiting(client, "job", within=STARTING)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    assert await process.communicate() == (b"done\n", b"")
    assert process.returncode == 0


async def test_broken_lock_ends_a_stubborn_command_within_the_grace(
    start: Start, client: aiodlock.Client, stubborn: tuple[str, str], tmp_path: Path
) -> None:
    process = await start("job", "--margin", "0.4", "--", *stubborn)
    pids = await pids_of(process, tmp_path)
    assert await client.break_lock("job") == 1
    await until_dead(pids, within=0.4 + 1)
    assert await process.wait() == 76


async def test_lost_lock_also_ends_what_the_command_has_put_into_a_group_of_its_own(
    start: Start, client: aiodlock.Client, tmp_path: Path
) -> None:
    """``timeout`` does that, which many scripts call."""
    process = await start("job", "--margin", "0.4", "--", "sh", "-c", WITH_TIMEOUT)
    pids = await pids_of(process, tmp_path)
    assert await client.break_lock("job") == 1
    await until_dead(pids, within=0.4 + 1)
    assert await process.wait() == 76


@pytest.mark.scripted
async def test_data_loss_ends_a_command(
    start: Start, store: Store, stubborn: tuple[str, str], tmp_path: Path
) -> None:
    process = await start("job", "--margin", "0.3", "--", *stubborn)
    pids = await pids_of(process, tmp_path)
    await (await store.raw()).flushall()
    await until_dead(pids, within=0.3 + 1)
    assert await process.wait() == 76


@pytest.mark.scripted
@pytest.mark.parametrize(
    ("options", "code"), [((), 0), (("--once", "600"), 0), (("--once", "600"), 3)]
)
async def test_loss_that_only_the_release_finds_is_told(
    start: Start, store: Store, options: tuple[str, ...], code: int
) -> None:
    flush = f"import redis, sys; redis.Redis.from_url({store.url!r}).flushall(); sys.exit({code})"
    process = await start("job", *options, "--json", "--", sys.executable, "-c", flush)
    _, err = await process.communicate()
    told = [json.loads(line) for line in err.splitlines() if line.startswith(b"{")]
    assert process.returncode == 76, err.decode()
    assert (told[-1]["event"], told[-1]["reason"]) == ("lost", "gone")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
async def test_no_overlap_when_the_parent_is_gone(
    start: Start,
    make_client: MakeClient,
    stubborn: tuple[str, str],
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    client = await make_client()
    process = await start("job", "--ttl", "3", "--margin", "1", "--", *stubborn)
    pids = await pids_of(process, tmp_path)
    assert alive(pids) == pids
    waiting = asyncio.create_task(client.lock("job", timeout=STARTING).acquire())
    await until_waiting(client, "job")
    process.send_signal(number)
    async with stalls() as stalled:
        lease = await waiting
        # The guardian has to be given a processor, too.
        await until_dead(pids, within=0.001 + stalled())
    await lease.release()
    if number == signal.SIGSTOP:
        process.send_signal(signal.SIGCONT)
        assert await process.wait() == 76


async def test_guardian_that_has_ended_its_command_in_time_has_not_died(
    start: Start, tmp_path: Path
) -> None:
    script = f"trap 'exit 0' TERM; echo $$ >{tmp_path}/pids; sleep 60 & wait"
    process = await start("job", "--ttl", "1", "--", "sh", "-c", script)
    await until((tmp_path / "pids").exists, "the command", within=STARTING)
    await until((tmp_path / "pids").read_text, "its pid")
    stat = Path(f"/proc/{await guardian_of(int((tmp_path / 'pids').read_text()))}/stat")
    process.send_signal(signal.SIGSTOP)
    await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "its end")
    process.send_signal(signal.SIGCONT)
    _, told = await process.communicate()
    assert process.returncode == 76
    assert "guardian" not in told.decode()


async def test_stopped_server_ends_a_command_before_its_deadline(
    start: Start, store: Store, make_client: MakeClient, stubborn: tuple[str, str], tmp_path: Path
) -> None:
    client = await make_client()
    process = await start("job", "--ttl", "3", "--margin", "1", "--", *stubborn)
    pids = await pids_of(process, tmp_path)
    assert len((await client.inspect("job")).holders) == 1
    assert store.server is not None
    store.server.pause()
    try:
        await until_dead(pids, within=3)
        assert await process.wait() == 76
        assert process.stderr is not None
        told = (await process.stderr.read()).decode()
        # The lease is given up while a part of it is left, which is what the message has to say.
        left = re.search(r"in time, and has (\S+) s left: no connection to .*SIGTERM", told)
        assert left is not None, told
        assert 0.0 < float(left[1]) <= 1.0
        assert "ago" not in told
    finally:
        store.server.resume()


def test_guardian_signals_the_commands_group_also_where_no_other_can_be_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_: str) -> list[str]:
        raise OSError(errno.ENFILE, "too many open files in system")

    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "listdir", full)
    monkeypatch.setattr(os, "killpg", lambda *args: sent.append(args))
    guardian = _guardian.Guardian.__new__(_guardian.Guardian)
    guardian.pid = 4_000_000
    assert guardian.signal_all(signal.SIGTERM, signal.SIGCONT)
    assert sent == [(4_000_000, signal.SIGTERM), (4_000_000, signal.SIGCONT)]


async def test_dead_guardian_takes_the_command_along(
    start: Start, stubborn: tuple[str, str], tmp_path: Path
) -> None:
    process = await start("job", "--", *stubborn)
    pids = await pids_of(process, tmp_path)
    os.kill(await guardian_of(pids[0]), signal.SIGKILL)
    await until_dead(pids, within=2)
    assert await process.wait() == 70


async def test_guardian_that_dies_before_it_has_read_all_takes_the_command_along(
    start: Start, client: aiodlock.Client, stubborn: tuple[str, str], tmp_path: Path
) -> None:
    process = await start("job", "--json", "--", *stubborn)
    pids = await pids_of(process, tmp_path)
    guardian = await guardian_of(pids[0])
    os.kill(guardian, signal.SIGSTOP)
    try:
        assert await client.break_lock("job") == 1
        assert process.stderr is not None
        # It is told before the user is; what it has not read makes an error of its end.
        assert json.loads(await process.stderr.readline())["event"] == "losing"
    finally:
        os.kill(guardian, signal.SIGKILL)
    assert await process.wait() == 76
    assert not alive(pids)


async def test_dead_guardian_takes_along_what_the_command_has_put_into_a_group_of_its_own(
    start: Start, tmp_path: Path
) -> None:
    process = await start("job", "--", "sh", "-c", WITH_TIMEOUT)
    pids = await pids_of(process, tmp_path)
    os.kill(await guardian_of(pids[0]), signal.SIGKILL)
    assert await process.wait() == 70
    assert not alive(pids)


async def test_dead_guardian_takes_the_command_along_when_nothing_can_be_told(
    start_mute: Start, stubborn: tuple[str, str], tmp_path: Path
) -> None:
    process = await start_mute("job", "--", *stubborn)
    pids = await pids_of(process, tmp_path)
    os.kill(await guardian_of(pids[0]), signal.SIGKILL)
    assert await process.wait() == 70
    assert not alive(pids)


async def test_exit_codes_are_the_same_when_nothing_can_be_told(
    start_mute: Start, client: aiodlock.Client
) -> None:
    async def ends_with(code: int, *arguments: str) -> None:
        process = await start_mute(*arguments)
        out, _ = await process.communicate()
        assert (process.returncode, out) == (code, b"")

    async with client.lock("job"):
        await ends_with(75, "job", "--nonblock", "--", "true")
    await ends_with(69, "job", "--url", "unix:///nowhere", "--", "true")
    await ends_with(2, "job", "--url", "nothing://", "--", "true")
    await ends_with(2, "job", "--margin", "0.01", "--", "true")
    await ends_with(127, "job", "--", "no-such-command")
    lost = await start_mute("job", "--margin", "0.4", "--", "sh", "-c", "echo; sleep 60")
    assert lost.stdout is not None
    assert await lost.stdout.readline() == b"\n"
    assert await client.break_lock("job") == 1
    assert (await lost.communicate())[0] == b""
    assert lost.returncode == 76


async def test_stopped_guardian_cannot_keep_the_command_alive(
    start: Start,
    client: aiodlock.Client,
    stubborn: tuple[str, str],
    tmp_path: Path,
) -> None:
    process = await start("job", "--margin", "0.3", "--", *stubborn)
    pids = await pids_of(process, tmp_path)
    guardian = await guardian_of(pids[0])
    os.kill(guardian, signal.SIGSTOP)
    try:
        assert await client.break_lock("job") == 1
        await until_dead(pids, within=0.3 + 1)
    finally:
        os.kill(guardian, signal.SIGCONT)
    assert await process.wait() == 76


async def test_full_queue_runs_one_at_a_time_in_order(
    start: Start, client: aiodlock.Client, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    script = f'echo "+ $0" >> {log}; sleep 0.02; echo "- $0" >> {log}'
    processes = []
    async with client.lock("job"):
        for number in range(4):
            processes.append(await start("job", "--", "sh", "-c", script, str(number)))
            await until_waiting(client, "job", number + 1, within=STARTING)
    for process in processes:
        assert await process.wait() == 0
    assert log.read_text().split("\n")[:-1] == [f"{s} {n}" for n in range(4) for s in "+-"]


async def test_margin_must_leave_time(start: Start) -> None:
    wrong = (["--margin", "0.01"], ["--ttl", "1", "--margin", "1"])
    processes = [await start("job", *options, "--", "true") for options in wrong]
    assert [await process.wait() for process in processes] == [2, 2]


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["job", "echo", "-n", "--ttl", "5", "--"], "--ttl 5 --"),
        (["job", "--ttl", "5", "echo", "--quiet"], "--quiet\n"),
        (["--ttl=5", "job", "-qn", "--", "echo", "--", "--note"], "-- --note\n"),
        (["-E", "3", "job", "-E3", "echo", "-h"], "-h\n"),
        (["--note", "--", "job", "echo", "a", "--", "b"], "a -- b\n"),
        (["--", "-x", "echo", "--json"], "--json\n"),
        (["job", "--json", "--", "echo", "--nonblock"], "--nonblock\n"),
        (["job", "-", "echo"], ""),
    ],
)
async def test_words_behind_the_command_are_the_command_s(
    start: Start, words: list[str], printed: str
) -> None:
    process = await start(*words)
    out, told = await process.communicate()
    assert out.decode() == printed, told.decode()
    assert process.returncode == (127 if words[1] == "-" else 0)


@pytest.mark.parametrize(
    "words", [["job"], [], ["job", "--"], ["--ttl"], ["--nope", "job", "true"]]
)
async def test_words_that_name_no_command_are_refused(start: Start, words: list[str]) -> None:
    process = await start(*words)
    await process.communicate()
    assert process.returncode == 2


@pytest.mark.parametrize("url", ["memory://", "MEMORY://", "memory://x", "memory://,memory://"])
async def test_store_of_this_process_alone_is_refused(start: Start, url: str) -> None:
    process = await start("--url", url, "job", "--", "echo", "ran")
    out, told = await process.communicate()
    assert (process.returncode, out) == (2, b"")
    assert b"own" in told


async def test_signal_ends_the_wait_for_a_store_that_is_silent_after_the_command(
    start: Start, store: Store
) -> None:
    assert store.server is not None
    stop = f"kill -STOP {store.server.pid}; echo stopped; exit 3"
    process = await start("job", "--ttl", "120", "--", "sh", "-c", stop)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"stopped\n"
    process.send_signal(signal.SIGTERM)
    try:
        async with takes(at_most=30.0):
            _, told = await process.communicate()
    finally:
        os.kill(store.server.pid, signal.SIGCONT)
    assert process.returncode in (3, 143), told.decode()


async def test_descriptors_of_the_caller_reach_the_command(start: Start, tmp_path: Path) -> None:
    shell = f'exec 9>{tmp_path}/log; exec "$@" 7<{tmp_path}/in'
    (tmp_path / "in").write_text("given")
    process = await start("job", "--", "sh", "-c", "cat <&7 >&9; ls /proc/self/fd", shell=shell)
    out, told = await process.communicate()
    assert process.returncode == 0, told.decode()
    assert (tmp_path / "log").read_text() == "given"
    # 3 is the folder that ls reads.
    assert set(out.decode().split()) == {"0", "1", "2", "3", "7", "9"}


async def test_descriptors_above_1023_are_no_limit(start: Start) -> None:
    resource = pytest.importorskip("resource")
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1200:
        pytest.skip("no process may have so many descriptors here")
    code = (
        "import os, resource, sys; n = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1200, n)); "
        "fds = [os.dup(0) for _ in range(1100)]; [os.set_inheritable(fd, True) for fd in fds]; "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    process = await start(
        "job", "--", "echo", "ran", shell=f"exec {sys.executable} -c '{code}' \"$@\""
    )
    out, told = await process.communicate()
    assert (process.returncode, out) == (0, b"ran\n"), told.decode()


@pytest.mark.parametrize(("text", "code"), [("echo ran $1; exit 9\n", 9), ("", 0), ("\0\0\0", 126)])
async def test_script_without_a_first_line_runs_as_in_a_shell(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int
) -> None:
    script = tmp_path / "script"
    script.write_text(text)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in (str(script), "script"):
        process = await start("job", "--", name, "word")
        out, told = await process.communicate()
        assert process.returncode == code, told.decode()
        assert out.decode() == ("ran word\n" if code == 9 else "")


async def test_ignored_sigchld_changes_no_code_and_makes_no_noise(start: Start) -> None:
    code = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    shell = f"exec {sys.executable} -c '{code}' \"$@\""
    process = await start("job", "--", "sh", "-c", "exit 7", shell=shell)
    assert await process.communicate() == (b"", b"")
    assert process.returncode == 7


async def test_no_descriptor_left_is_told_in_a_line(start: Start) -> None:
    for number in (9, 11, 12):
        process = await start("job", "--", "true", shell=f'ulimit -n {number}; exec "$@"')
        _, told = await process.communicate()
        assert process.returncode in (0, 71, 69), told.decode()
        assert b"Traceback" not in told


async def test_command_that_is_too_long_gives_126(start: Start) -> None:
    process = await start("job", "--", "sh", "-c", 'exec "$@" "$0" sh "$(printf %0200000d 1)"')
    await process.communicate()
    assert process.returncode != 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
async def test_first_process_of_a_container_reaps_orphans(store: Store, tmp_path: Path) -> None:
    script = (
        "for i in 1 2 3 4 5; do sh -c 'sleep 0.1 & '; done; sleep 1.5; "
        "ps -eo ppid,stat | grep -c '^ *1 *Z'"
    )
    inside = f'mount -t proc proc /proc && exec "{sys.executable}" -m aiodlock run job sh -c "$0"'
    process = await asyncio.create_subprocess_exec(
        *("unshare", "--mount", "--pid", "--fork", "sh", "-c", inside, script),
        env={**os.environ, "AIODLOCK_URL": store.url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, told = await process.communicate()
    if b"unshare failed" in told:
        pytest.skip(told.decode())
    assert out == b"0\n", told.decode()
