"""``aiodlock run``: hold a lock while a command runs, and end the command before the lock is lost.

Over 400 lines: one child's life, from the wait for its lock to its exit code. What is said of it is in
``_run_words``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from .. import (
    AcquireTimeout,
    BackendError,
    BackendUnavailable,
    Client,
    ClientClosed,
    Lease,
    LockError,
    LockLost,
    NotHeld,
)
from .._clock import CLOCK, now
from ._guardian import groups_of, signal_group
from ._run_options import Run
from ._run_words import say, say_losing, say_lost, say_not_acquired, say_waiting
from ._source import read_source

_T = TypeVar("_T")

UNAVAILABLE, SOFTWARE, SYSTEM, NOT_ACQUIRED, LOST = 69, 70, 71, 75, 76
#: A guardian that is stopped has that much time to kill by itself (seconds).
_GRACE = 0.25

_FORWARDED = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH")
)
_ENDING = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT))
_ASK_EVERY = 0.5
#: After SIGTERM, so long is waited for the answer to the release.
_LAST_CALL = 2.0


async def run(wanted: Run) -> int:
    """Return the exit code."""
    signals = _Signals()
    with signals.caught(), _Orphans() as orphans:
        acquiring = asyncio.create_task(_acquire(wanted))
        ended = asyncio.create_task(signals.ending.wait())
        try:
            await asyncio.wait({acquiring, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not acquiring.done():
                acquiring.cancel()
                await asyncio.wait({acquiring})
                if acquiring.cancelled():
                    return 128 + signals.first_ending
        finally:
            ended.cancel()
        acquired = acquiring.result()
        if isinstance(acquired, int):
            return acquired
        client, held = acquired
        try:
            return await _guarded(wanted, held, signals, orphans)
        finally:
            with contextlib.suppress(BackendUnavailable):
                await signals.last_call(client.__aexit__(None, None, None))


class _Signals:
    """What this process is sent: for the command, and some of them ask this process to end, too.

    Mutable state: ``waiting``, those that the command has not been sent; ``ending``, whether one has come
    that asks to end, and ``first_ending``, which one that was.
    """

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self.ending = asyncio.Event()
        self.first_ending = 0

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        # What is ignored stays so: under nohup, and in what a script has started in the background.
        caught = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
        for number in caught:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in caught:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        self.waiting.put_nowait(number)
        if number in _ENDING:
            self.first_ending = self.first_ending or number
            self.ending.set()

    async def last_call(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the last work with the store. A signal ends the wait for a store that does not answer.

        :raises BackendUnavailable: if it was ended so.
        """
        working, asked = asyncio.ensure_future(work), asyncio.ensure_future(self.ending.wait())
        try:
            await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({working}, timeout=_LAST_CALL)
            if not working.done():
                raise BackendUnavailable("a signal ended the wait for the store's answer")
            await working
        finally:
            asked.cancel()
            working.cancel()
            await asyncio.wait({asked, working})


class _Orphans:
    """Reaps what has ended and was left to this process, as the first one of a container has to.

    Mutable state: ``guardian``, the one child that asyncio waits for: 0 while it starts, and its pid is not
    known; -1 before.
    """

    def __init__(self) -> None:
        self.guardian = -1

    def __enter__(self) -> _Orphans:
        # Also where SIGCHLD was ignored from the start: then no child would leave an exit code.
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.reap)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    def reap(self) -> None:
        if os.getpid() != 1 or not self.guardian:
            return
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid == self.guardian:
                    return
                os.waitpid(ended.si_pid, os.WNOHANG)


@dataclass
class Held:
    """The lease that the command runs under, and how it ends with the command's exit code."""

    lease: Lease
    end: Callable[[int], Coroutine[Any, Any, None]]


async def _acquire(wanted: Run) -> tuple[Client, Held] | int:
    client = Client(read_source(wanted.url), **wanted.client_options)
    entered = False
    try:
        await client.__aenter__()
        entered = True
        options: dict[str, Any] = {
            "ttl": wanted.ttl,
            "timeout": wanted.timeout,
            "margin": wanted.margin,
            "on_lost": "flag",
            "hold_at_least": wanted.hold_at_least,
            "note": wanted.note,
        }
        try:
            held = await _hold(wanted, client, options)
            if held is not None:
                return client, held
            say(wanted, "done", f"{wanted.name!r} is done already: its success is on record")
            code = 0
        except (AcquireTimeout, LockLost):
            await say_not_acquired(wanted, client)
            code = wanted.conflict_exit_code
    except (BackendError, ClientClosed) as away:
        say(wanted, "unavailable", str(away))
        code = UNAVAILABLE
    except BaseException:
        if entered:
            await client.__aexit__(None, None, None)
        raise
    if entered:
        await client.__aexit__(None, None, None)
    return code


async def _hold(wanted: Run, client: Client, options: dict[str, Any]) -> Held | None:
    """Wait for the turn; None if it is done already."""
    if wanted.once is None:
        lock = client.rwlock(wanted.name, **options)
        mode = lock.read if wanted.shared else lock.write
        lease = await _wait(wanted, client, mode.acquire)
        return Held(lease, lambda _: lease.release())
    once = client.once(wanted.name, keep=wanted.once, **options)
    run = await _wait(wanted, client, once.__aenter__)
    if run.lease is None:
        return None

    async def end(code: int) -> None:
        failed = None if code == 0 else ChildProcessError(f"the command ended with {code}")
        await once.__aexit__(None if failed is None else type(failed), failed, None)

    return Held(run.lease, end)


async def _wait(wanted: Run, client: Client, acquire: Callable[[], Awaitable[_T]]) -> _T:
    """Acquire, and say once what is waited for."""
    if wanted.quiet:
        return await acquire()
    telling = asyncio.create_task(say_waiting(wanted, client))
    try:
        return await acquire()
    finally:
        telling.cancel()
        await asyncio.wait({telling})


def _guardian_program() -> list[str]:
    """Return what starts the guardian: its file, or its text where that is in a zip."""
    path = Path(__file__).with_name("_guardian.py")
    if path.exists():
        return [str(path)]
    return ["-c", (files(__package__) / "_guardian.py").read_text()]


async def _guarded(wanted: Run, held: Held, signals: _Signals, orphans: _Orphans) -> int:
    """Run the command under the lease, through the guardian."""
    lease = held.lease
    ours, theirs = socket.socketpair()
    theirs.set_inheritable(True)
    environment = {
        **os.environ,
        "AIODLOCK_NAME": lease.name.replace("\0", "%00"),
        "AIODLOCK_TOKEN": str(lease.token),
        "AIODLOCK_SEQUENCER": lease.sequencer,
    }
    orphans.guardian = 0
    try:
        guardian = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", *_guardian_program(), str(theirs.fileno()), str(CLOCK)),
            *wanted.command,
            env=environment,
            # What was inherited is the command's: a pipe of the shell, a jobserver's.
            close_fds=False,
            # What a terminal sends to its processes must not reach the guardian and the child twice.
            start_new_session=True,
        )
    except BaseException as failed:
        ours.close()
        if not isinstance(failed, OSError | RuntimeError):  # no process, no thread, too many words
            raise
        say(wanted, "failed", f"cannot run {wanted.command[0]!r}: {failed}")
        code = 126 if isinstance(failed, OSError) and failed.errno == errno.E2BIG else SYSTEM
        with contextlib.suppress(LockError):
            await held.end(code)
        return code
    finally:
        theirs.close()
    orphans.guardian = guardian.pid
    orphans.reap()
    unread = ours.dup()
    reader, writer = await asyncio.open_connection(sock=ours)
    parts = _Supervision(wanted, held, guardian.pid, reader, writer, unread, signals)
    try:
        return await parts.run()
    finally:
        writer.close()
        unread.close()
        with contextlib.suppress(ProcessLookupError):
            if parts.guardian_failed:
                guardian.kill()
        await guardian.wait()


class _Supervision:
    """Tells the guardian the deadlines, passes signals on, waits for the end.

    Mutable state: ``_kill_at`` (what the guardian knows), ``_pid`` of the child, ``_lost``.

    :param session: the guardian's, and the command's.
    :param unread: the same socket as the reader's, which a failed write closes.
    """

    def __init__(
        self,
        wanted: Run,
        held: Held,
        session: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        unread: socket.socket,
        signals: _Signals,
    ) -> None:
        self._wanted, self._lease, self._held = wanted, held.lease, held
        self._reader, self._writer, self._signals = reader, writer, signals
        self._session, self._unread = session, unread
        self._kill_at = 0.0
        self._pid = 0
        self._lost: LockLost | None = None
        self.guardian_failed = False

    def _tell(self, line: str) -> None:
        self._writer.write(line.encode() + b"\n")

    async def run(self) -> int:
        self._tell_deadline()
        helpers = [
            asyncio.create_task(work())
            for work in (self._pass_signals, self._pass_deadlines, self._pass_loss, self._ask)
        ]
        try:
            code = await self._until_ended()
        except BaseException:
            await self._kill_and_wait()  # what comes out of here releases the lock
            raise
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.wait(helpers)
        return await self._conclude(code)

    async def _until_ended(self) -> int:
        """Return the child's code when nothing of it is left."""
        while True:
            line = asyncio.ensure_future(self._reader.readline())
            while not line.done():
                # A guardian that is stopped does nothing: then this process ends the child.
                pause = max(0.05, self._kill_at + _GRACE - now())
                await asyncio.wait({line}, timeout=min(pause, 1.0))
                if not line.done() and now() > self._kill_at + _GRACE:
                    self._kill()
                    if now() > self._kill_at + 2.0:
                        line.cancel()
                        self.guardian_failed = True
                        return SOFTWARE
            match self._words(line):
                case ["pid", pid]:
                    self._pid = int(pid)
                    self._tell("go")
                case ["exit", code]:
                    return int(code)
                case ["failed", code, why]:
                    say(self._wanted, "failed", why)
                    return int(code)
                case _:
                    self.guardian_failed = True
                    await self._kill_and_wait()
                    say(self._wanted, "failed", "the guardian process died: the command was killed")
                    return SOFTWARE

    def _words(self, line: asyncio.Future[bytes]) -> list[str]:
        """Return what the guardian told; nothing when it has died."""
        try:
            told = line.result()
        except OSError:
            # It has ended, and was told something since: how it ended is in the socket. Or it has died,
            # and had not read all that it was told.
            told = b""
            with contextlib.suppress(OSError):
                told = self._unread.recv(4096)
        return told.decode().strip().rpartition("\n")[2].split(maxsplit=2)

    async def _kill_and_wait(self) -> None:
        for _ in range(100):  # until nothing is left of it, a second at most
            if not self._kill():
                return
            await asyncio.sleep(0.01)

    def _kill(self) -> bool:
        """End the command, and the groups that it has made. Return whether anything was left of them."""
        if not self._pid:
            return False
        left = [signal_group(self._pid, signal.SIGKILL)]
        others = groups_of(self._session) - {self._pid}
        return any([*left, *(signal_group(group, signal.SIGKILL) for group in others)])

    async def _conclude(self, code: int) -> int:
        lost = self._lost or self._lease.lost
        if lost is not None:
            with contextlib.suppress(LockError):
                await self._signals.last_call(self._held.end(LOST))
            return self._was_lost(lost)
        try:
            await self._signals.last_call(self._held.end(code))
        except (LockLost, NotHeld, BackendError) as error:
            if isinstance(error, LockLost) and error.__cause__ is None:
                return self._was_lost(error)  # the store has answered; else the cause is why not
            text = f"the command has ended, but releasing {self._wanted.name!r} failed: {error}"
            if self._wanted.once is None:
                say(self._wanted, "release_failed", text)
            else:
                say(self._wanted, "lost", f"{text}; whether its success is on record is unknown")
                return LOST
        else:
            lost = self._lease.lost  # not raised by once() beside the failure of a command
            if lost is not None:
                return self._was_lost(lost)
        return code

    def _was_lost(self, lost: LockLost) -> int:
        say_lost(self._wanted, lost.reason, self._lease.token)
        return LOST

    # -- helpers -------------------------------------------------------------------------------

    def _tell_deadline(self) -> None:
        remaining = self._lease.remaining()
        if remaining <= 0.0:
            return
        term_at = now() + remaining
        kill_at = term_at + self._wanted.margin - self._wanted.spare
        if kill_at > self._kill_at + 0.001:
            self._kill_at = kill_at
            self._tell(f"until {term_at:.4f} {kill_at:.4f}")

    async def _pass_deadlines(self) -> None:
        pause = max(0.01, (self._wanted.ttl - self._wanted.margin) / 20)
        while True:
            self._tell_deadline()
            await asyncio.sleep(min(pause, 1.0))

    async def _ask(self) -> None:
        """Ask twice a second: after a loss of data others are in already, long before a third of a ttl."""
        while self._lease.held:
            await asyncio.sleep(_ASK_EVERY)
            with contextlib.suppress(LockError):
                await self._lease.extend()

    async def _pass_loss(self) -> None:
        try:
            self._lost = await self._lease.wait_lost()
        except NotHeld:
            return
        # After a break others may be in already: no reason to wait for the deadline.
        kill_at = now() + self._wanted.margin - self._wanted.spare
        self._kill_at = min(self._kill_at, kill_at)
        self._tell(f"lost {self._kill_at:.4f}")
        kill_in = max(0.0, self._kill_at - now())
        say_losing(self._wanted, self._lost.reason, self._lease._request.why_silent, kill_in)

    async def _pass_signals(self) -> None:
        while True:
            self._tell(f"signal {int(await self._signals.waiting.get())}")
