"""ZooKeeper servers to test against: Debian's, one alone, or an ensemble of three with links to cut."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from aiodlock.backends.zookeeper import jute
from aiodlock.backends.zookeeper.address import read_url
from aiodlock.backends.zookeeper.session import Session

from .listening import Listener
from .ports import free_port

#: A tick that lets sessions be as short as most tests want them, in seconds.
TICK = 0.02
_DELAY, _SESSION = "it takes a lock-delay", "another ttl is another session"
_WRITES = "a lease is counted from the first of three writes"
_NOTICES = "nothing tells of a grant, late or twice: a waiter sees its turn in the queue"
#: What this store does in another way than the tests of all stores have it, by test.
DIFFERS = {
    "test_inspect_tells_holders_and_waiters": "the servers do not tell how long leases have left",
    "test_granted_waiter_lives_longer_than_its_ttl": "the servers do not tell for how long waiters wait",
    "test_inspect_remembers_the_last_token": "the servers keep nothing of a free name",
    "test_extending_by_hand_again_and_again_takes_no_memory": "its leases have no keeper",
    "test_hint_that_overtakes_the_answer_to_acquire_is_not_forgotten": "it looks into the keeper",
    "test_stale_notice_of_an_earlier_grant_starts_no_body": "it looks into the keeper",
    "test_abandoned_head_costs_one_waiter_ttl": "waiters end with their session",
    "test_holder_that_was_replaced_is_taken_over": "a node that is deleted is gone, whoever holds next",
    "test_request_that_nobody_has_is_given_back_once_and_for_all": "it asks without a place: see "
    "test_zookeeper_ghosts.py",
    "test_notice_that_crossed_its_leave_leaves_nothing": _NOTICES,
    "test_notice_that_comes_after_its_lease_was_lost_opens_no_name": _NOTICES,
    "test_notice_that_comes_after_a_leave_that_was_too_late_opens_no_name": _NOTICES,
    "test_extend_by_hand": _WRITES,
    "test_extending_without_a_ttl_starts_the_present_one_anew": _WRITES,
    "test_new_ttl_holds_from_then_on": _SESSION,
    "test_max_hold_ends_the_lease_whatever_happens": _SESSION,
    "test_extending_never_brings_the_deadline_nearer": _SESSION,
    "test_max_hold_is_never_extended_past_by_hand": _SESSION,
    "test_break_lock_tells_all_holders_and_lets_the_next_in": _DELAY,
    "test_places_that_a_lock_delay_closes_count_as_taken": _DELAY,
    "test_release_opens_at_once": _DELAY,
    "test_name_stays_closed_after_a_loss": _DELAY,
    "test_margin_does_not_make_a_release_of_a_loss": _DELAY,
    "test_waiter_is_let_in_when_the_delay_is_over": _DELAY,
    "test_late_leave_does_not_open_early": _DELAY,
    "test_readers_pass_where_a_reader_was_lost": _DELAY,
    "test_breaking_ignores_the_delay": _DELAY,
    "test_name_stays_closed_also_when_only_the_clock_knows_of_the_loss": _DELAY,
    "test_lost_reply_to_a_leave_does_not_hide_that_the_lease_had_expired": _DELAY,
    "test_lock_delay_keeps_the_name_closed_after_a_holder_was_lost": _DELAY,
    "test_break_lock_ignores_the_lock_delay": _DELAY,
    "test_ttl_is_what_was_asked_for": "the servers do not tell how long leases have left",
    "test_extending_moves_the_deadline_to_the_new_ttl": _SESSION,
    "test_extending_what_another_holds_by_now_is_an_error": _SESSION,
    "test_another_object_of_the_same_owner_is_in_at_once": _SESSION,
    "test_lease_is_extended_by_more_than_it_had_and_by_its_own_ttl": _SESSION,
}
_JAVA_HOME = Path("/usr/share/java")
#: Debian's release, or that of these classes. Debian's jar does not name what TLS and its tools need.
_CLASSES = os.environ.get("AIODLOCK_ZOOKEEPER_CLASSES") or ":".join(
    str(_JAVA_HOME / f"{jar}.jar") for jar in ("zookeeper", "netty-codec", "commons-cli")
)
#: With this one a server tells what it does.
_TELLING = _JAVA_HOME / "slf4j-simple.jar"
_MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
_READER = "org.apache.zookeeper.server.persistence.TxnLogToolkit"
_JAVA = (
    *("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"),
    "-XX:+IgnoreUnrecognizedVMOptions",
    *("-Dzookeeper.preAllocSize=512", "-Dzookeeper.jmx.log4j.disable=true"),
    # Else servers that start one after the other may take a minute to hear of each other.
    "-Dzookeeper.fastleader.minNotificationInterval=50",
    "-Dzookeeper.fastleader.maxNotificationInterval=500",
)
#: The moment of each line, in UTC.
_LOGGING = (
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSSXXX",
    "-Duser.timezone=UTC",
)
#: What a server has loaded, for the next ones to map into memory: a third of what a start costs. Java looks
#: itself whether the classes are still the same, and does without it otherwise.
_LOADED = Path(__file__).parents[1] / ".pytest_cache" / "zookeeper.jsa"


def installed() -> bool:
    """Tell whether this machine can run a server."""
    return shutil.which("java") is not None and Path(_CLASSES.partition(":")[0]).exists()


class ZooKeeperServer:
    """A private server. ``url`` stays the same over restarts."""

    def __init__(
        self,
        *,
        tick: float = TICK,
        shortest: float | None = None,
        longest: float = 100.0,
        sync: bool = False,
        lines: Sequence[str] = (),
        java: Sequence[str] = (),
        number: int = 0,
        port: int = 0,
        tells: bool = False,
    ) -> None:
        """:param sync: whether a commit waits for the disk. :param number: in an ensemble, from 1.
        :param tells: whether it writes what it does into its ``log``.
        """
        self.port = port or free_port()
        self._number = number
        shortest = 2 * tick if shortest is None else shortest
        #: Of its configuration. The last one of a name counts, from the next start on.
        self.lines = [
            f"tickTime={round(tick * 1000)}",
            f"clientPort={self.port}",
            "clientPortAddress=127.0.0.1",
            "admin.enableServer=false",
            "maxClientCnxns=0",
            f"minSessionTimeout={round(shortest * 1000)}",
            f"maxSessionTimeout={round(longest * 1000)}",
            "4lw.commands.whitelist=*",
            *("syncLimit=200", "initLimit=400"),
            *lines,
        ]
        self._java = [f"-Dzookeeper.forceSync={'yes' if sync else 'no'}", *_LOGGING, *java]
        self._classes = f"{_CLASSES}:{_TELLING}" if tells else _CLASSES
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._notes_what_it_loads = False
        self._owner = os.getpid()

    def __enter__(self) -> ZooKeeperServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"zookeeper://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def directory(self) -> Path:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="aiodlock-zookeeper-"))
        return self._directory

    @property
    def log(self) -> Path:
        """What it has written about itself."""
        return self.directory / "log"

    def start(self, *, wait: bool = True) -> None:
        """Start, and return when it serves. The data of before is still there."""
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        if self._number:
            (data / "myid").write_text(f"{self._number}\n")
        configuration = self.directory / "zoo.cfg"
        configuration.write_text("\n".join([*self.lines, f"dataDir={data}"]))
        self._notes_what_it_loads = self._classes == _CLASSES and not _LOADED.exists()
        loaded = (
            f"-XX:ArchiveClassesAtExit={self.directory / _LOADED.name}"
            if self._notes_what_it_loads
            else f"-XX:SharedArchiveFile={_LOADED}"
        )
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "java",
                    *_JAVA,
                    loaded,
                    *self._java,
                    "-cp",
                    self._classes,
                    _MAIN,
                    str(configuration),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                start_new_session=True,
            )
        atexit.register(self.stop)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Return when it serves."""
        give_up = time.monotonic() + 120
        while not self.mode():
            assert self.running, f"ZooKeeper did not start: {self.log.read_text()[-2000:]}"
            assert time.monotonic() < give_up, "ZooKeeper does not serve"
            time.sleep(0.02)

    def ask(self, word: str) -> str:
        """Return the answer to a four-letter word, or nothing."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2.0) as connection:
                connection.sendall(word.encode())
                with connection.makefile("rb") as answer:
                    return answer.read().decode()
        except OSError:
            return ""

    def mode(self) -> str:
        """Return "standalone", "leader" or "follower"; nothing while it does not serve."""
        lines = self.ask("srvr").splitlines()
        return next((line.partition(": ")[2] for line in lines if line.startswith("Mode:")), "")

    def transactions(self) -> list[str]:
        """Return what its transaction logs have on record, a line each, as ZooKeeper's tool prints it."""
        found: list[str] = []
        for log in sorted((self.directory / "data" / "version-2").glob("log.*")):
            command = ["java", "-Duser.timezone=UTC", "-cp", _CLASSES, _READER]
            printed = subprocess.run(
                [*command, "--dump", str(log)], capture_output=True, text=True, errors="replace"
            )
            for line in printed.stdout.splitlines():
                if " zxid 0x" in line or not found:
                    found.append(line)
                else:
                    found[-1] += (
                        f";{line}"  # newer releases take a line for each call of a transaction
                    )
        return found

    def stop(self) -> None:
        """Stop at once, as a crash does, and remove everything."""
        if os.getpid() != self._owner:
            return
        if self._notes_what_it_loads and self.running:
            self._end_with_a_note()
        self.crash()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _end_with_a_note(self) -> None:
        """End the first server of a checkout in order: Java writes down then what it has loaded."""
        assert self._process is not None
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
            _LOADED.parent.mkdir(exist_ok=True)
            with contextlib.suppress(OSError):  # it was not written, or lies on another disk
                os.replace(
                    shutil.copy(self.directory / _LOADED.name, f"{_LOADED}-{os.getpid()}"), _LOADED
                )

    def crash(self) -> None:
        """Kill the server."""
        if self.running:
            self._signal(signal.SIGKILL)
            assert self._process is not None
            self._process.wait()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.running:
            assert self._process is not None
            self._process.send_signal(number)


class Links:
    """Proxies in a thread of their own, so that tests of any event loop can use them.

    A link can be stalled (bytes stay in it, as when packets are lost) or cut (connections are reset, and
    refused).
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._links: list[Link] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def add(self, to: int, port: int = 0) -> Link:
        """Make a link to a local port."""
        link = Link(self._loop, to, port or free_port())
        asyncio.run_coroutine_threadsafe(link.listen(), self._loop).result(10)
        self._links.append(link)
        return link

    def stop(self) -> None:
        async def cancel_all() -> None:
            for link in self._links:
                await link.close()
            mine = asyncio.current_task()
            tasks = [task for task in asyncio.all_tasks() if task is not mine]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.01)  # for transports to close

        asyncio.run_coroutine_threadsafe(cancel_all(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class Link:
    """One port that leads to another."""

    def __init__(self, loop: asyncio.AbstractEventLoop, to: int, port: int) -> None:
        self.port = port
        self._to = to
        self._loop = loop
        self._flows: dict[str, asyncio.Event] = {}
        self._cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: Listener | None = None

    async def listen(self) -> None:
        self._flows = {"there": asyncio.Event(), "back": asyncio.Event()}
        self.heal_here()
        self._listener = Listener(self._serve, self.port)

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()

    def stall(self, *ways: str) -> None:
        """Let no byte through any more: "there", "back", or both."""

        def stall() -> None:
            for way in ways or ("there", "back"):
                self._flows[way].clear()

        self._call(stall)

    def cut(self) -> None:
        """Reset the connections, and refuse new ones."""

        def cut() -> None:
            self._cut = True
            for writer in self._writers:
                writer.transport.abort()

        self._call(cut)

    def heal(self) -> None:
        """Let everything through again."""
        self._call(self.heal_here)

    def heal_here(self) -> None:
        self._cut = False
        for flow in self._flows.values():
            flow.set()

    def _call(self, function: Callable[[], None]) -> None:
        async def call() -> None:
            function()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.transport.abort()
            return
        try:
            onward, out = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.transport.abort()
            return
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        self._writers |= {writer, out}
        pumps = [
            asyncio.ensure_future(self._pump(reader, out, "there")),
            asyncio.ensure_future(self._pump(onward, writer, "back")),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            writer.transport.abort()
            out.transport.abort()
            self._writers -= {writer, out}
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                await self._flows[way].wait()
                writer.write(data)
                await writer.drain()


class ZooKeeperEnsemble:
    """Three servers. Each one reaches the others' quorum ports, and clients reach each one, through links.

    ``peers[a, b]`` is the link from server a to the quorum port of server b; ``doors[a]`` is for clients.
    """

    def __init__(
        self,
        *,
        tick: float = TICK,
        sync_limit: int = 200,
        init_limit: int = 400,
        longest: float = 100.0,
        tells: bool = False,
    ) -> None:
        self.links = Links()
        numbers = (1, 2, 3)
        quorum = {number: free_port() for number in numbers}
        election = {number: free_port() for number in numbers}
        clients = {number: free_port() for number in numbers}
        self.peers = {
            (a, b): self.links.add(quorum[b], free_port())
            for a in numbers
            for b in numbers
            if a != b
        }
        self.doors = {number: self.links.add(clients[number], free_port()) for number in numbers}
        self.servers: dict[int, ZooKeeperServer] = {}
        for number in numbers:
            lines = [f"syncLimit={sync_limit}", f"initLimit={init_limit}"]
            for other in numbers:
                port = quorum[other] if other == number else self.peers[number, other].port
                lines.append(f"server.{other}=127.0.0.1:{port}:{election[other]}")
            self.servers[number] = ZooKeeperServer(
                tick=tick,
                longest=longest,
                lines=lines,
                number=number,
                port=clients[number],
                tells=tells,
            )

    def __enter__(self) -> ZooKeeperEnsemble:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        for server in self.servers.values():
            server.start(wait=False)
        for server in self.servers.values():
            server.wait()

    def stop(self) -> None:
        for server in self.servers.values():
            server.resume()
            server.stop()
        self.links.stop()

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{door.port}" for door in self.doors.values())
        return f"zookeeper://{hosts}"

    def url_of(self, number: int) -> str:
        """Return the URL of one server alone."""
        return f"zookeeper://127.0.0.1:{self.doors[number].port}"

    def leader(self) -> int:
        """Return the number of the leader, as soon as there is one."""
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up:
            for number, server in self.servers.items():
                if server.mode() == "leader":
                    return number
            time.sleep(0.05)
        raise AssertionError("no leader")

    def follower(self) -> int:
        """Return the number of a follower."""
        return next(
            number for number, server in self.servers.items() if server.mode() == "follower"
        )

    def isolate(self, number: int, *, reset: bool = False) -> None:
        """Take a server away from the others. Its clients still reach it."""
        for (a, b), link in self.peers.items():
            if number in (a, b):
                link.cut() if reset else link.stall()

    def heal(self, *, restart_after: float = 1000.0) -> None:
        """Let everything flow, run and serve again.

        :param restart_after: a server that has not served for so many seconds is killed and started again:
            one whose disk was full may run on, and serve nobody.
        """
        for link in (*self.peers.values(), *self.doors.values()):
            link.heal()
        for server in self.servers.values():
            server.resume()
            if not server.running:
                server.start(wait=False)
        give_up, began = time.monotonic() + 120, time.monotonic()
        while silent := [server for server in self.servers.values() if not server.mode()]:
            assert time.monotonic() < give_up, f"ZooKeeper does not serve: {silent[0].log}"
            if time.monotonic() - began > restart_after:
                began = time.monotonic()
                for server in silent:
                    server.crash()
                    server.start(wait=False)
            time.sleep(0.02)


@asynccontextmanager
async def looking(url: str) -> AsyncIterator[tuple[Session, str]]:
    """Give a session beside those of clients, and the root under which clients keep everything."""
    ensemble = read_url(url, "aiodlock")
    session = Session(ensemble, 5.0, "tests")
    task = asyncio.create_task(session.run())
    try:
        await session.wait_up(10.0)
        await session.ask(jute.sync("/"))
        yield session, ensemble.root
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _children(session: Session, path: str) -> list[str]:
    try:
        return [f"{path}/{node}" for node in (await session.ask(jute.get_children(path))).value[0]]
    except jute.ZooKeeperError:
        return []


async def left(url: str, *, receipts: bool) -> list[str]:
    """Return the nodes of requests that are there."""
    async with looking(url) as (session, root):
        queues = await _children(session, f"{root}/locks")
        queues += await _children(session, f"{root}/semaphores")
        found = [node for queue in queues for node in await _children(session, queue)]
        return found + (await _children(session, f"{root}/ids") if receipts else [])


async def empty(url: str) -> None:
    """Delete the requests' nodes, behind the clients' backs."""
    async with looking(url) as (session, root):
        queues = await _children(session, f"{root}/locks")
        queues += await _children(session, f"{root}/semaphores")
        for queue in [*queues, f"{root}/ids"]:
            for node in await _children(session, queue):
                with suppress(jute.ZooKeeperError):
                    await session.ask(jute.delete(node))
