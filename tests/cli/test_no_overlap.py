"""`aiodlock run` while parents, guardians and the server are stopped and killed: never two children.

The witness is a file lock that the kernel drops when its process is gone: a child that finds it taken
runs beside another, whatever clocks and logs say.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import aiodlock
from aiodlock._clock import CLOCK, now
from aiodlock.cli import _guardian

from .. import forked
from ..scenes import STARTING
from ..servers import embedded
from .test_run import alive, guardian_of, until_dead

#: Ends by nothing but SIGKILL, or after the seconds it is given.
_CHILD = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder, run, seconds = sys.argv[1:]
def note(what):
    with open(f"{folder}/log", "a") as log:
        log.write(f"{what} {run} {os.getpid()} {os.environ['AIODLOCK_TOKEN']}\\n")
witness = os.open(f"{folder}/witness", os.O_CREAT | os.O_RDWR)
try:
    fcntl.flock(witness, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    note("OVERLAP")
note("+")
time.sleep(float(seconds))
note("-")
"""
_FOR_EVER = 300.0
#: A run that the machine starves for that long before its child begins has lost its lease, and starts none.
_TTL = 6.0

pytestmark = pytest.mark.timeout(400)


class Scene:
    """Runs of ``aiodlock run`` on one name, one after the other in the queue."""

    def __init__(self, url: str, folder: Path, client: aiodlock.Client) -> None:
        self._url, self._folder, self._client = url, folder, client
        self.runs: list[asyncio.subprocess.Process] = []
        (folder / "child.py").write_text(_CHILD)
        (folder / "log").touch()

    def notes(self) -> list[tuple[str, int, int, int]]:
        """Return what the children noted: a word, the number of the run, the pid, the token."""
        lines = (self._folder / "log").read_text().splitlines()
        return [
            (word, int(run), int(pid), int(token))
            for word, run, pid, token in map(str.split, lines)
        ]

    async def queue(self, seconds: float, *, ttl: float = _TTL) -> asyncio.subprocess.Process:
        """Start one more, and wait until it holds or waits."""
        with (self._folder / f"{len(self.runs)}.err").open("w") as err:
            run = await forked.start(
                "aiodlock",
                "run",
                "job",
                *("--ttl", str(ttl), "--margin", "1", "--"),
                *(sys.executable, "-S", str(self._folder / "child.py"), str(self._folder)),
                *(str(len(self.runs)), str(seconds)),
                env={**os.environ, "AIODLOCK_URL": self._url},
                stderr=err,
            )
        self.runs.append(run)
        async with asyncio.timeout(STARTING):
            while True:
                info = await self._client.inspect("job")
                if len(info.holders) + len(info.waiters) >= len(self.runs):
                    return run
                assert run.returncode is None
                await asyncio.sleep(0.01)

    async def running(self, number: int) -> int:
        """Wait for the start of the child of the run of that number; return its pid."""
        async with asyncio.timeout(STARTING):
            while True:
                ended = self.runs[number].returncode
                for word, run, pid, _ in self.notes():
                    if word == "+" and run == number:
                        return pid
                said = (self._folder / f"{number}.err").read_text()
                assert ended is None, (
                    f"run {number} ended with {ended} before its child began: {said}"
                )
                await asyncio.sleep(0.01)

    def check(self) -> None:
        notes = self.notes()
        assert "OVERLAP" not in [word for word, *_ in notes], notes
        tokens = [token for word, _, _, token in notes if word == "+"]
        assert tokens == sorted(set(tokens)), notes


@asynccontextmanager
async def scene(url: str, folder: Path) -> AsyncIterator[Scene]:
    async with aiodlock.Client(url) as client:
        scene = Scene(url, folder, client)
        try:
            yield scene
        finally:
            for run in scene.runs:
                if run.returncode is None:
                    run.send_signal(signal.SIGCONT)
                    run.kill()
                await run.wait()
            children = [pid for word, _, pid, _ in scene.notes() if word == "+"]
            for pid in alive(children):
                os.kill(pid, signal.SIGKILL)


async def test_full_queue_whose_parents_and_guardians_are_stopped_and_killed(
    tmp_path: Path,
) -> None:
    with embedded("valkey9") as server:
        async with scene(server.url, tmp_path) as acts:
            for _ in range(4):
                await acts.queue(_FOR_EVER)
            await acts.queue(0.05)

            await acts.running(0)
            acts.runs[0].send_signal(signal.SIGSTOP)

            await acts.running(1)
            acts.runs[1].send_signal(signal.SIGKILL)

            child = await acts.running(2)
            os.kill(await guardian_of(child), signal.SIGKILL)

            child = await acts.running(3)
            guardian = await guardian_of(child)
            os.kill(guardian, signal.SIGSTOP)
            server.pause()
            try:
                # Only the parent is left, and it cannot extend.
                await until_dead([child], within=_TTL + 1)
            finally:
                server.resume()
                os.kill(guardian, signal.SIGCONT)

            await acts.running(4)
            assert await asyncio.wait_for(acts.runs[4].wait(), STARTING) == 0
            acts.runs[0].send_signal(signal.SIGCONT)
            assert await asyncio.wait_for(acts.runs[0].wait(), STARTING) == 76
            assert await asyncio.wait_for(acts.runs[2].wait(), STARTING) == 70
            assert await asyncio.wait_for(acts.runs[3].wait(), STARTING) == 76
            acts.check()


async def test_server_that_is_killed_and_comes_back_with_its_data(tmp_path: Path) -> None:
    durable = embedded("valkey9", appendonly="yes", appendfsync="always")
    with durable as server:
        async with scene(server.url, tmp_path) as acts:
            first = await acts.queue(_FOR_EVER)
            await acts.queue(0.05)
            child = await acts.running(0)
            server.kill()
            await until_dead([child], within=_TTL + 0.5)
            server.start()
            await acts.running(1)
            assert await asyncio.wait_for(acts.runs[1].wait(), STARTING) == 0
            assert await asyncio.wait_for(first.wait(), STARTING) == 76
            acts.check()


async def test_server_that_is_killed_and_comes_back_empty(tmp_path: Path) -> None:
    """Two at a time are possible then: the old child is gone within the grace and a second."""
    with embedded("valkey9") as server:
        async with scene(server.url, tmp_path) as acts:
            first = await acts.queue(_FOR_EVER, ttl=30)
            child = await acts.running(0)
            server.kill()
            server.start()
            await until_dead([child], within=1 + 1)
            assert await asyncio.wait_for(first.wait(), STARTING) == 76


def test_command_does_not_start_before_its_pid_is_known(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    script = f"echo started > {tmp_path}/started"
    with ours, theirs, ours.makefile("r") as heard:
        guardian = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", _guardian.__file__, str(theirs.fileno()), str(CLOCK)),
                *("sh", "-c", script),
            ],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        moment = now()
        ours.sendall(f"until {moment + 30} {moment + 30}\n".encode())
        word, pid = heard.readline().split()
        assert word == "pid"
        assert alive([int(pid)])
        guardian.kill()
        guardian.wait()
        assert heard.readline() == ""  # the child, too, is gone: it had the socket's other end
    assert not (tmp_path / "started").exists()
