"""Faults of a PostgreSQL server, of its connections and of single messages: what they cost at the most."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator

import asyncpg
import pytest

from aiodlock import BackendError, BackendUnavailable, Client, LockLost
from aiodlock._clock import now
from aiodlock.backends.postgres.schema import create_statements
from aiodlock.backends.postgres.sweeping import Sweeping
from aiodlock.cli import _doctor_postgres

from ..listening import Listener
from ..postgres import PostgresServer, find_wheel
from ..scenes import bounded, store_of, until, until_cancelled, until_held, until_waiting
from ..servers import installed, postgres_server
from ..soak.wire import Wire

NAME = "order:42"
_SESSIONS = (
    "select pg_terminate_backend(pid) from pg_stat_activity "
    "where backend_type = 'client backend' and pid <> pg_backend_pid() and query ~ '{}'"
)

#: Those that wait for a lock.
_BLOCKED = "select from pg_stat_activity where wait_event_type = 'Lock'"

pytestmark = pytest.mark.skipif(not installed("postgres"), reason="postgres is not installed")


@pytest.fixture(scope="module")
def _server() -> Iterator[PostgresServer]:
    with postgres_server("postgres") as server:
        yield server


@pytest.fixture(params=["logged", "unlogged"])
def durability(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(_server: PostgresServer, durability: str) -> Iterator[PostgresServer]:
    """Give a server that loses nothing, with an empty schema."""
    _server.resume()
    if not _server.running:
        _server.start()
    _server.execute("drop schema if exists aiodlock cascade;")
    _server.execute(create_statements("unlogged" if durability == "unlogged" else "logged"))
    yield _server
    _server.resume()


logged = pytest.mark.parametrize("durability", ["logged"], indirect=True)
unlogged = pytest.mark.parametrize("durability", ["unlogged"], indirect=True)


class Proxy:
    """Passes bytes on. When a message contains ``loses``, its reply is lost and the connection cut. When
    one contains ``stops``, nothing is passed on from there: to the server the client stands still."""

    def __init__(self, server: PostgresServer) -> None:
        self.loses: bytes | None = None
        self.lost = asyncio.Event()
        self.stops: bytes | None = None
        self.stopped = asyncio.Event()
        self.server = server
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._listener = Listener(self._accept)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every connection, and take no more."""
        await self._listener.close()
        await self.cut()

    async def cut(self) -> None:
        """End every connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports close their sockets in the next turn

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self._listener.port}/postgres"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self.server.port)
        except BaseException:
            writer.transport.abort()
            raise
        cutting = asyncio.Event()

        async def ask() -> None:
            while data := await reader.read(65536):
                if self.stops is not None and self.stops in data.lower():
                    self.stops = None
                    self.stopped.set()
                    await asyncio.Event().wait()  # until the server ends the session
                if self.loses is not None and self.loses in data:
                    self.loses = None
                    cutting.set()
                to_server.write(data)

        async def answer() -> None:
            while data := await from_server.read(65536):
                if cutting.is_set():
                    self.lost.set()
                    return
                writer.write(data)

        asking, answering = asyncio.create_task(ask()), asyncio.create_task(answer())
        try:
            await asyncio.wait({asking, answering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in (asking, answering):
                one.cancel()
            await asyncio.gather(asking, answering, return_exceptions=True)
            for end in (writer, to_server):
                end.transport.abort()


Worker = Callable[[Client, float], Coroutine[None, None, int]]


def only_one_at_a_time() -> Worker:
    """Return a worker that acquires and releases until a moment; two inside at once fail the test."""
    inside: list[int] = []

    async def work(client: Client, until_when: float) -> int:
        turns = 0
        while now() < until_when:
            try:
                async with client.lock(NAME, ttl=3) as lease:
                    assert not inside, "two are inside"
                    inside.append(lease.token)
                    try:
                        await asyncio.sleep(0)
                    finally:
                        inside.pop()
                    turns += 1
            except (LockLost, BackendUnavailable):
                pass
        return turns

    return work


# -- the server --------------------------------------------------------------------------------------


@logged
async def test_leases_and_places_survive_a_crash_of_the_server(server: PostgresServer) -> None:
    async with Client(server.url, ttl=20) as one, Client(server.url, ttl=20) as other:
        async with one.lock(NAME) as lease:
            waiting = asyncio.create_task(other.lock(NAME).acquire())
            await until_waiting(one, NAME)
            server.crash()
            await asyncio.to_thread(server.start)
            await until_held(one, NAME)
            assert lease.held
            assert not waiting.done()
        second = await asyncio.wait_for(waiting, 20)
        assert second.token > lease.token
        await second.release()


@logged
async def test_release_that_a_crash_forgets_keeps_the_name_until_the_deadline_at_the_most(
    server: PostgresServer,
) -> None:
    """Releases do not wait for the disk."""
    async with Client(server.url, ttl=3) as client:
        for _ in range(3):
            lease = await client.lock(NAME).acquire()
            granted = now()
            await lease.release()
            server.crash()
            await asyncio.to_thread(server.start)
            back = now()
            second = await asyncio.wait_for(client.lock(NAME).acquire(), 20)
            assert second.token > lease.token
            assert now() < max(granted + 3, back) + 5  # and what a new connection takes
            await second.release()


@unlogged
async def test_crash_that_empties_the_tables_lets_nobody_in_before_the_lease_has_ended(
    server: PostgresServer,
) -> None:
    async with Client(server.url, ttl=4) as one, Client(server.url, ttl=4) as other:
        lease = await one.lock(NAME, on_lost="flag", auto_extend=False).acquire()
        server.crash()
        await asyncio.to_thread(server.start)
        second = await asyncio.wait_for(other.lock(NAME, timeout=30).acquire(), 30)
        assert not lease.held, "two hold"
        assert second.token > lease.token
        await second.release()


@unlogged
async def test_crash_that_empties_the_tables_waits_for_a_lease_that_was_extended_further(
    server: PostgresServer,
) -> None:
    async with Client(server.url, ttl=1) as one, Client(server.url, ttl=1) as other:
        lease = await one.lock(NAME, on_lost="flag", auto_extend=False).acquire()
        await lease.extend(7)
        server.crash()
        await asyncio.to_thread(server.start)
        second = await asyncio.wait_for(other.lock(NAME, timeout=30).acquire(), 30)
        assert not lease.held, "two hold"
        await second.release()


@unlogged
async def test_tables_that_were_emptied_behind_a_connection_are_noticed(
    server: PostgresServer,
) -> None:
    """As behind a pooler, which keeps its clients' connections while the server crashes."""
    async with Client(server.url, ttl=2) as client:
        async with client.lock(NAME):
            pass
        server.execute("truncate aiodlock.present, aiodlock.name, aiodlock.waiter;")
        asked = now()
        async with client.lock(NAME, timeout=20):
            assert now() - asked > 1.5


async def test_holder_knows_of_its_loss_before_the_next_one_gets_in_when_the_server_stood_still(
    server: PostgresServer,
) -> None:
    async with Client(server.url, ttl=1.5) as one, Client(server.url, ttl=1.5) as other:
        with pytest.raises(LockLost, match="expired"):  # noqa: PT012
            async with one.lock(NAME):
                waiting = asyncio.create_task(other.lock(NAME, ttl=30).acquire())
                await until_waiting(one, NAME)
                server.pause()
                await until_cancelled()
        lost_at = now()
        server.resume()
        second = await asyncio.wait_for(waiting, 30)
        assert lost_at < now()
        await second.release()
        await until(lambda: _nothing_left(server), "nothing left")


async def test_restart_in_order_is_an_outage_and_no_more(server: PostgresServer) -> None:
    async with Client(server.url) as client:
        server.shut_down()
        await asyncio.to_thread(server.start)
        async with bounded(20), client.lock(NAME):
            pass


# -- the connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["aiodlock.turn[(]", "select 1|LISTEN", ""])
async def test_sessions_that_are_terminated_let_nobody_in_twice_and_leave_nothing(
    server: PostgresServer, which: str
) -> None:
    """Some of these end a call between its commit and its reply."""
    chance, work, terminated = random.Random(1), only_one_at_a_time(), 0
    async with Client(server.url) as one, Client(server.url) as other:
        ends = now() + 6
        tasks = [asyncio.create_task(work(client, ends)) for client in (one, other) * 8]
        while now() < ends - 1.5:
            await asyncio.sleep(chance.uniform(0.2, 0.5))
            ended = await asyncio.to_thread(server.execute, _SESSIONS.format(which))
            terminated += len(ended)
        turns = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert all(turns), turns
    # A connection that does not last is made again with pauses. That for messages is a new one each time.
    assert terminated > (1 if "LISTEN" in which else 5)
    await until(lambda: _nothing_left(server), "nothing left")


@pytest.mark.parametrize("message", [b"acquire\t", b"leave\t", b"extend\t"])
async def test_lost_reply_costs_no_second_holder_and_leaves_nothing(
    server: PostgresServer, message: bytes
) -> None:
    async with Proxy(server) as proxy:
        async with Client(proxy.url, ttl=3) as one, Client(server.url, ttl=3) as other:
            async with one.lock("warm"):
                pass
            proxy.loses = message
            async with bounded(20):
                async with one.lock(NAME) as lease:
                    if message != b"leave\t":
                        await proxy.lost.wait()
                    assert await other.lock(NAME).locked()
                    assert lease.held
                await proxy.lost.wait()
                async with other.lock(NAME) as second:
                    assert second.token > lease.token
    await until(lambda: _nothing_left(server), "nothing left")


@pytest.mark.parametrize("message", [b"acquire\t", b"leave\t", b"extend\t"])
async def test_lost_reply_of_a_waiter_costs_no_place(
    server: PostgresServer, message: bytes
) -> None:
    async with Proxy(server) as proxy, bounded(30):
        async with Client(proxy.url, waiter_ttl=3) as one, Client(server.url) as other:
            async with other.lock(NAME):
                if message == b"acquire\t":
                    proxy.loses = message
                waiting = asyncio.create_task(one.lock(NAME).acquire())
                await until_waiting(other, NAME)
                proxy.loses = message if message != b"acquire\t" else proxy.loses
                if message == b"leave\t":
                    waiting.cancel()
                    await asyncio.wait({waiting})
                await proxy.lost.wait()
                later = asyncio.create_task(other.lock(NAME).acquire())
            if message != b"leave\t":
                lease = await waiting
                assert not later.done()
                await lease.release()
            await (await later).release()
    await until(lambda: _nothing_left(server), "nothing left")


@logged
@pytest.mark.parametrize("pooled", [False, True])
async def test_calls_that_were_given_up_leave_no_sessions(
    server: PostgresServer, pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While somebody keeps the table, each one would stay in the server, until it takes no connections."""
    monkeypatch.setattr("aiodlock.backends.postgres.messages.LONGEST", 2.0)
    async with Client(server.url, listen_source=server.url if pooled else None) as client:
        link, seen = store_of(client)._messages.link, set[object]()
        keeper, looking = [await asyncpg.connect(server.url) for _ in range(2)]
        try:
            await keeper.execute("begin; lock table aiodlock.name")
            acquiring = asyncio.create_task(client.lock(NAME).acquire())

            async def most(number: int) -> bool:
                rows = await looking.fetch(_BLOCKED)
                return len(rows) <= number

            def given_up() -> bool:
                seen.add(link.connection)
                return len(seen - {None}) > 3

            await until(given_up, "three connections were given up")
            await until(lambda: most(1), "their sessions have ended")
        finally:
            await keeper.close()
            await looking.close()
        await (await asyncio.wait_for(acquiring, 20)).release()


@logged
async def test_event_loop_that_stood_still_takes_no_answer_for_missing(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is there when the loop runs again, and so is the moment at which it is overdue."""
    monkeypatch.setattr("aiodlock.backends.postgres.messages.LEAST", 0.5)
    async with Client(server.url) as client:
        async with client.lock("warm"):
            pass
        messages = store_of(client)._messages
        connection = messages.link.connection
        acquiring = asyncio.create_task(client.lock(NAME).acquire())
        while not messages._busy:
            await asyncio.sleep(0)
        time.sleep(1.0)
        await (await acquiring).release()
        assert messages.link.connection is connection


async def test_call_whose_transaction_does_not_begin_leaves_no_coroutine(
    server: PostgresServer,
) -> None:
    """It would be told as never awaited, which fails every test."""
    async with Proxy(server) as proxy:
        async with Client(proxy.url, listen_source=server.url) as client:
            async with client.lock("warm"):
                pass
            proxy.loses = b"begin; set"
            async with bounded(20), client.lock(NAME):
                assert proxy.lost.is_set()


async def test_client_that_stands_still_before_its_commit_keeps_nobody_out(
    server: PostgresServer,
) -> None:
    """With ``listen_source`` a call is a transaction of several messages, which keeps its name."""
    async with Proxy(server) as proxy, bounded(30):
        async with Client(proxy.url, listen_source=server.url) as one, Client(server.url) as other:
            connection = store_of(other)._messages.link.connection
            proxy.stops = b"commit"
            acquiring = asyncio.create_task(one.lock(NAME).acquire())
            await proxy.stopped.wait()
            async with bounded(5), other.lock(NAME):
                pass
            assert store_of(other)._messages.link.connection is connection
            await (await acquiring).release()
    await until(lambda: _nothing_left(server), "nothing left")


# -- notifications ----------------------------------------------------------------------------------


async def hand_over(holder: Client, waiter: Client) -> None:
    """Fail unless a hand-over is noticed long before the waiter's next extension."""
    lease = await holder.lock(NAME).acquire()
    waiting = asyncio.create_task(waiter.lock(NAME).acquire())
    await until_waiting(holder, NAME)
    await lease.release()
    async with bounded(5):
        await (await waiting).release()


async def test_waiters_poll_while_the_listening_connection_is_away(server: PostgresServer) -> None:
    async with Proxy(server) as proxy:
        async with (
            Client(server.url, listen_source=proxy.url, waiter_ttl=60) as one,
            Client(server.url) as other,
        ):
            await proxy.close()
            await hand_over(other, one)


async def test_listening_connection_follows_that_for_messages_to_another_server(
    server: PostgresServer,
) -> None:
    """As after a switch-over, when the old primary is still there and says nothing of the new one."""
    with server.make_standby() as new:
        await asyncio.to_thread(new.promote)
        async with Proxy(server) as proxy, Client(proxy.url, ttl=60, waiter_ttl=60) as one:
            proxy.server = new
            store_of(one)._messages.link.give_up(TimeoutError("a hiccup"))
            async with Client(new.url) as other:
                await until(lambda: hears(new), "the listener there")
                await hand_over(other, one)
                lease = await one.lock(NAME, on_lost="flag").acquire()
                await other.break_lock(NAME)
                async with bounded(5):
                    await lease.wait_lost()


async def hears(server: PostgresServer) -> bool:
    """Tell whether both clients listen there."""
    sessions = "select count(*) from pg_stat_activity where query ~ '^(LISTEN|select 1$)'"
    return bool((await asyncio.to_thread(server.execute, sessions))[0][0] == 2)


async def test_notification_that_comes_late_ends_polling(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodlock.backends.postgres.notifications._PROBE_WITHIN", 0.0)
    async with Client(server.url) as client, bounded(10):
        while store_of(client)._notifications.polls:
            await asyncio.sleep(0.01)


@pytest.mark.skipif(not installed("postgres18"), reason="older servers have a queue of 8 GB")
async def test_full_queue_of_notifications_costs_time_and_no_more() -> None:
    """A session that listens, and leaves a transaction open, keeps all notifications since."""
    programs = find_wheel()
    assert programs is not None
    with PostgresServer(programs, max_notify_queue_pages=64) as server:
        server.execute(create_statements())
        keeper, other = [await asyncpg.connect(server.url) for _ in range(2)]
        await keeper.execute("listen elsewhere")
        await keeper.execute("begin; select 1")
        many = "select pg_notify('elsewhere', repeat('a', 7900) || i) from generate_series(1, {}) i"
        for number in (20, 1):
            with pytest.raises(asyncpg.ProgramLimitExceededError):  # noqa: PT012
                while True:
                    await other.execute(many.format(number))
        (finding,) = [
            one for one in await _doctor_postgres.examine(server.url) if "queue" in one.found
        ]
        assert finding.level == "warning"
        async with (
            bounded(20),
            Client(server.url) as one,
            Client(server.url, ttl=3, waiter_ttl=3) as two,
        ):
            lease = await one.lock(NAME).acquire()
            waiting = asyncio.create_task(two.lock(NAME, on_lost="flag").acquire())
            await until_waiting(one, NAME)
            await lease.release()
            second = await waiting
            assert await one.break_lock(NAME) == 1
            assert (await second.wait_lost()).reason == "broken"
        await keeper.close()
        await other.close()


# -- limits of the session ---------------------------------------------------------------------------


@logged
@pytest.mark.parametrize("limit", ["statement_timeout", "lock_timeout"])
async def test_limit_that_ends_a_call_is_an_outage_and_no_more(
    server: PostgresServer, limit: str
) -> None:
    server.execute(f"alter role postgres set {limit} = '500ms';")
    try:
        async with Client(server.url) as client:
            blocker = asyncio.create_task(
                asyncio.to_thread(
                    server.execute,
                    f"set {limit} = 0; begin; lock table aiodlock.name in exclusive mode;"
                    "select pg_sleep(2); commit;",
                )
            )
            await asyncio.sleep(0.3)
            async with bounded(20):
                async with client.lock(NAME):
                    pass
            await blocker
    finally:
        server.execute(f"alter role postgres reset {limit};")
    await until(lambda: _nothing_left(server), "nothing left")


@logged
async def test_message_that_is_refused_for_good_takes_no_other_along(
    server: PostgresServer,
) -> None:
    async with Client(server.url) as client:
        # In one call, since they are sent in one turn of the loop.
        store = store_of(client)
        refused, other = (
            store._calls.turn(f"leave\tl:{marker}\tid\t{marker}\tended") for marker in ("none", "0")
        )
        assert await other == "gone gone"
        with pytest.raises(BackendError, match="refused"):
            await refused


@logged
async def test_server_without_a_free_connection_is_unavailable(server: PostgresServer) -> None:
    server.execute(
        "drop role if exists limited; create role limited login connection limit 1;"
        "grant usage on schema aiodlock to limited;"
        "grant execute on all functions in schema aiodlock to limited;"
    )
    with pytest.raises(BackendUnavailable, match="too many connections"):
        async with Client(server.url_of("limited")):
            pytest.fail("entered with one connection")


async def _nothing_left(server: PostgresServer) -> bool:
    rows = await asyncio.to_thread(
        server.execute,
        "select key from aiodlock.name n where cardinality(aiodlock.holders_of(n)) > 0 "
        "union select key from aiodlock.waiter",
    )
    return not rows


# -- what is long, late or of another version --------------------------------------------------------


@logged
async def test_long_record_is_read_once_for_all_who_ask_and_not_in_the_answer(
    server: PostgresServer,
) -> None:
    """The name is locked until an answer is written out, and its reader may be paused."""
    text = "x" * 60_000
    async with Client(server.url) as client:
        async with client.once("job", keep=60) as once:
            once.result = text
        store = store_of(client)
        key = store._calls.key("once", "job")
        words = (key, "me-1", "x", "tme", "9000", "9000", "0", "wait")
        assert await store._calls.turn("\t".join(("acquire", *words))) == "done"

        async def ask() -> bool:
            async with client.once("job", keep=60) as once:
                return once.result == text and not once.first

        assert all(await asyncio.gather(*(ask() for _ in range(40))))
        assert await client.forget("job")
        async with client.once("job", keep=60) as once:
            assert once.first


@unlogged
async def test_lease_of_years_closes_no_name_for_longer_than_a_day(server: PostgresServer) -> None:
    async with Client(server.url) as client:
        async with client.lock("long", ttl=1e9):
            pass
        server.execute("truncate aiodlock.present, aiodlock.name, aiodlock.waiter;")
        with pytest.raises(BackendUnavailable, match=r"in 8\d\d\d\d\.?\d* s"):
            await client.lock(NAME, timeout=1).acquire()


@logged
@pytest.mark.parametrize("seconds", [1.5, 2.5])
async def test_answers_that_become_slow_cost_neither_the_connection_nor_a_lease(
    server: PostgresServer, seconds: float
) -> None:
    async with Wire(server.port) as wire:
        url = server.url.replace(f":{server.port}/", f":{wire.port}/")
        async with Client(url, ttl=60) as client:
            lease = await client.lock("kept", on_lost="flag").acquire()
            connection = store_of(client)._messages.link.connection
            wire.delay(seconds / 2)
            async with bounded(60):
                for _ in range(3):
                    async with client.lock(NAME):
                        pass
            assert store_of(client)._messages.link.connection is connection
            assert lease.held
            await wire.heal()


@logged
async def test_sweep_takes_smaller_steps_where_a_limit_of_the_server_ends_long_ones(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Client(server.url) as client:
        async with client.lock(NAME):
            pass
        server.execute("update aiodlock.name set keep_until = 1")
        store = store_of(client)
        rows = store._calls.rows

        async def limited(sql: str, pages: int, *more: object) -> object:
            if pages > 10:
                raise BackendUnavailable("canceling statement due to statement timeout")
            return await rows(sql, pages, *more)

        monkeypatch.setattr(store._calls, "rows", limited)
        sweeping = Sweeping(store._calls)
        before = sweeping.pages
        await sweeping.sweep()
        assert server.execute("select count(*) from aiodlock.name")[0][0] == 0
        assert sweeping.pages < before
        monkeypatch.undo()
        for _ in range(10):  # the server had much else to do, and has no more
            await sweeping.sweep()
        assert sweeping.pages == before
