"""Locks on a Sentinel service: the primary is found, lost, and found again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import ConnectionError as RedisConnectionError

import aiodlock
from aiodlock._embedded import find_valkey9
from aiodlock.backends.base import Unanswered
from aiodlock.backends.redis import Source
from aiodlock.backends.redis.sentinel import Sentinel as OneSentinel
from aiodlock.cli._doctor_servers import examine_sentinels
from aiodlock.cli._finding import Finding

from ..conftest import MakeClient
from ..proxy import FaultProxy, named
from ..scenes import is_held, takes, until, until_waiting
from .load import contending, fail_over, turns_so_far, until_turns
from .servers import FAILOVER_WITHIN, SERVICE, Node, SentinelService
from .servers import Sentinel as Watcher
from .witness import Witness, create, judge

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
async def make_client(service: SentinelService) -> AsyncIterator[MakeClient]:
    """Give a factory of entered clients of the service."""
    async with AsyncExitStack() as stack:

        async def make(url: str | None = None, **options: object) -> aiodlock.Client:
            client = aiodlock.Client(url or service.url, **options)  # type: ignore[arg-type]
            return await stack.enter_async_context(client)

        yield make


# -- finding the primary -----------------------------------------------------------------------------


async def test_client_made_by_a_sentinel_is_a_source(service: SentinelService) -> None:
    manager = Sentinel([("127.0.0.1", one.port) for one in service.sentinels])  # type: ignore[no-untyped-call]
    ready = manager.master_for(SERVICE)
    async with aiodlock.Client(ready) as client, aiodlock.Client(service.url) as other:
        async with client.lock("name"):
            assert await other.lock("name").locked()
    assert await ready.ping(), "it stays its owner's"
    await ready.aclose()
    for sentinel in manager.sentinels:
        await sentinel.aclose()


async def test_sentinels_that_do_not_answer_are_passed_over(service: SentinelService) -> None:
    for silent in service.sentinels[:2]:
        silent.pause()
    async with takes(at_most=5.0):
        async with aiodlock.Client(service.url) as client, client.lock("name") as lease:
            assert lease.held


async def test_sentinels_that_all_fall_silent_are_named_in_the_reason(
    service: SentinelService,
) -> None:
    for silent in service.sentinels:
        silent.pause()
    with pytest.raises(aiodlock.BackendUnavailable, match="no sentinel can name the primary of"):
        async with aiodlock.Client(service.url):
            pass


async def test_server_is_found_again_by_what_sentinels_said_before_they_fell_silent(
    service: SentinelService, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = await make_client()
    for silent in service.sentinels:
        silent.pause()
    await until(lambda: any("no sentinel of" in one for one in caplog.messages))
    for kind in ("normal", "pubsub"):
        service.primary.call("CLIENT", "KILL", "TYPE", kind)
    async with takes(at_most=3.0), client.lock("name", timeout=10.0) as lease:
        assert lease.held


async def test_service_that_no_sentinel_knows_is_unavailable_and_named(
    service: SentinelService,
) -> None:
    url = service.url.replace(f"/{SERVICE}/", "/nobody/")
    with pytest.raises(aiodlock.BackendUnavailable, match="nobody"):
        async with aiodlock.Client(url):
            pass


async def test_server_that_is_no_primary_any_more_is_refused(service: SentinelService) -> None:
    source = Source.from_url(service.url)
    connection = source.make_connection()
    demoted = ("127.0.0.1", service.followers[0].port)
    with pytest.raises(RedisConnectionError, match="demoted"):
        await connection.connect_to(demoted)  # type: ignore[attr-defined]
    await connection.disconnect()
    await connection.connect()  # type: ignore[no-untyped-call]
    assert connection.port == service.primary.port  # type: ignore[attr-defined]
    await connection.disconnect()


async def test_servers_and_sentinels_have_passwords_of_their_own(tmp_path: Path) -> None:
    with ExitStack() as stack:
        primary = stack.enter_context(Node(find_valkey9(), requirepass="of-servers"))
        sentinel = stack.enter_context(
            Watcher(
                find_valkey9(),
                tmp_path,
                primary,
                quorum=1,
                **{"sentinel auth-pass": f"{SERVICE} of-servers", "requirepass": "of-sentinels"},
            )
        )
        url = f"redis+sentinel://:of-servers@127.0.0.1:{sentinel.port}/{SERVICE}/0"
        async with aiodlock.Client(f"{url}?sentinel_password=of-sentinels") as client:
            async with client.lock("name") as lease:
                assert lease.held
        with pytest.raises(aiodlock.BackendError, match=r"refuses this client: .*uthentication"):
            async with aiodlock.Client(url):
                pass


async def test_user_of_the_sentinels_that_the_page_lists_is_enough(
    service: SentinelService,
) -> None:
    examples = Path(__file__).parents[2] / "examples" / "operators"
    for sentinel in service.sentinels:
        for line in (examples / "sentinel.acl").read_text().splitlines():
            sentinel.call(*line.split())
    servers = [service.primary, *service.followers]
    for number, server in enumerate(servers):
        # The page says that nobody copies users: the ones before got theirs.
        assert not server.call("ACL", "GETUSER", "locks"), number
        for line in (examples / "locks.acl").read_text().splitlines():
            server.call(*line.split())
        server.call("ACL", "SETUSER", "locks", "+hello")
    url = service.url.replace("//", "//locks:PASSWORD@", 1)
    url += "?sentinel_username=locks&sentinel_password=PASSWORD"
    async with aiodlock.Client(url) as client, client.lock("name") as lease:
        assert lease.held


async def test_doctor_tells_a_refusal_of_sentinels_from_the_lack_of_replicas(
    service: SentinelService,
) -> None:
    url = service.url + "?sentinel_username=looks&sentinel_password=secret"

    async def replicas(*rights: str) -> Finding:
        for sentinel in service.sentinels:
            sentinel.call("ACL", "SETUSER", "looks", "RESET", "ON", ">secret", *rights)
        found = await examine_sentinels(url, "aiodlock", fix=False)
        (finding,) = [one for one in found if one.subject == "replicas"]
        return finding

    refused = await replicas("+ping", "+hello", "+sentinel|master")
    assert (refused.level, refused.fix.split()[5]) == ("note", "+sentinel|replicas,")
    assert refused.found.startswith("unknown: the user of the sentinels may not")
    lines = (Path(__file__).parents[2] / "examples/operators/sentinel.acl").read_text().splitlines()
    rights = [word for line in lines for word in line.split() if word.startswith("+")]
    assert (await replicas(*rights)).found == str(len(service.followers))


async def test_far_sentinels_that_want_a_login_are_reached(service: SentinelService) -> None:
    # The login and the question take longer than a second together, but not each of them.
    async with AsyncExitStack() as stack:
        ports = []
        for sentinel in service.sentinels:
            sentinel.call("ACL", "SETUSER", "far", "reset", "on", ">secret", "+@all")
            proxy = await stack.enter_async_context(FaultProxy(sentinel.url))
            proxy.delay(0.3)
            ports.append(f"127.0.0.1:{proxy.port}")
        url = f"redis+sentinel://{','.join(ports)}/{SERVICE}/0"
        login = "?sentinel_username=far&sentinel_password=secret"
        async with aiodlock.Client(url + login) as client, client.lock("name") as lease:
            assert lease.held


async def test_dial_goes_on_while_far_sentinels_bring_it_further(
    service: SentinelService, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncExitStack() as stack:
        ports = []
        for sentinel in service.sentinels:
            proxy = await stack.enter_async_context(FaultProxy(sentinel.url))
            proxy.delay(0.7)
            ports.append(f"127.0.0.1:{proxy.port}")
        url = f"redis+sentinel://{','.join(ports)}/{SERVICE}/0"
        async with aiodlock.Client(url) as client, client.lock("name") as lease:
            assert lease.held
    assert not [one for one in caplog.records if getattr(one, "event", "") == "no_connection"]


@pytest.mark.parametrize("rules", [["+@all", "resetpass", ">other"], ["+ping"]])
async def test_sentinels_that_all_refuse_the_user_are_told_as_a_refusal(
    service: SentinelService, rules: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for sentinel in service.sentinels:
        sentinel.call("ACL", "SETUSER", "asks", "reset", "on", ">secret", *rules)
    url = f"{service.url}?sentinel_username=asks&sentinel_password=secret"
    with pytest.raises(aiodlock.BackendError, match="refuses this client: no sentinel") as told:
        async with aiodlock.Client(url):
            pass
    assert not isinstance(told.value, aiodlock.BackendUnavailable)
    assert not [one for one in caplog.records if one.exc_info]


@asynccontextmanager
async def _slow(service: SentinelService) -> AsyncIterator[tuple[OneSentinel, FaultProxy]]:
    """Give one of the sentinels, which takes 1.2 s for each answer, and what makes it do so."""
    async with FaultProxy(service.sentinels[0].url) as proxy:
        proxy.delay(1.2)
        dial = Source.from_url(proxy.url).make_connection
        yield OneSentinel(("127.0.0.1", proxy.port), dial), proxy


async def test_sentinel_that_takes_long_for_each_answer_is_heard(
    service: SentinelService,
) -> None:
    async with _slow(service) as (sentinel, _):
        found = await sentinel.ask(SERVICE, 0)
        assert found.address == ("127.0.0.1", service.primary.port)
        assert sentinel.dialling.patience.learned > 1.2


async def test_silence_of_a_sentinel_counts_once_however_many_ask(service: SentinelService) -> None:
    async with _slow(service) as (sentinel, proxy):
        await proxy.heal()
        sentinel.kept = True
        await sentinel.ask(SERVICE, 0)
        proxy.hold_reply(named("SENTINEL"))
        asking = [asyncio.create_task(sentinel.ask(SERVICE, 0)) for _ in range(8)]
        await asyncio.wait(asking)
        assert all(isinstance(one.exception(), Unanswered) for one in asking)
        assert sentinel.dialling.patience.learned == 2.0
        sentinel.close()


async def test_sentinel_that_was_slow_once_is_not_waited_for_that_long_on_a_dead_connection(
    service: SentinelService,
) -> None:
    async with _slow(service) as (sentinel, proxy):
        sentinel.kept = True
        while sentinel.heard is None:
            with suppress(TimeoutError):
                await sentinel.ask(SERVICE, 0)
        await proxy.heal()
        await sentinel.ask(SERVICE, 0)
        proxy.hold_reply(named("SENTINEL"))
        with pytest.raises((TimeoutError, Unanswered)):
            await sentinel.ask(SERVICE, 0)
        async with takes(at_most=1.0):
            await sentinel.ask(SERVICE, 0)  # on a connection of its own
        sentinel.close()


# -- failovers ---------------------------------------------------------------------------------------


async def promoted(service: SentinelService, lost: Node) -> None:
    await asyncio.to_thread(service.wait_promoted, lost)


async def brought_back(service: SentinelService, node: Node) -> None:
    await asyncio.to_thread(service.bring_back, node)


async def test_holder_and_waiters_keep_what_the_new_primary_has(
    service: SentinelService, make_client: MakeClient
) -> None:
    client, other = [await make_client(ttl=300.0, waiter_ttl=300.0) for _ in range(2)]
    lease = await client.lock("name").acquire()
    order: list[int] = []

    async def turn(number: int) -> None:
        async with (client, other)[number % 2].lock("name") as lease:
            order.append(lease.token)

    waiting = []
    for number in range(4):
        waiting.append(asyncio.create_task(turn(number)))
        await until_waiting(client, "name", number + 1)
    await until(lambda: service.primary.replicas() == 2)
    await until(lambda: all(has_all_of(service.primary, node) for node in service.followers))
    lost = service.kill_primary()
    await promoted(service, lost)
    await until_waiting_again(client, 4)
    assert lease.held
    await lease.extend()
    await lease.release()
    await asyncio.gather(*waiting)
    assert order == sorted(order), "in the order in which they came"
    assert lease.token < order[0]
    await brought_back(service, lost)


def has_all_of(primary: Node, replica: Node) -> bool:
    offset: int = primary.call("ROLE")[1]
    return bool(replica.call("ROLE")[4] == offset)


async def until_waiting_again(client: aiodlock.Client, number: int) -> None:
    async def are_waiting() -> bool:
        try:
            return len((await client.inspect("name")).waiters) == number
        except aiodlock.BackendUnavailable:
            return False

    await until(are_waiting, "the waiters", within=FAILOVER_WITHIN)


async def test_holder_whom_the_new_primary_does_not_know_is_told_and_its_writes_refused(
    service: SentinelService, make_client: MakeClient, tmp_path: Path
) -> None:
    """What can happen without ``min_replicas``: the grant is acknowledged, and lost with its server."""
    create(tmp_path / "store.db")
    store = Witness(tmp_path / "store.db")
    first, second = [await make_client(ttl=300.0) for _ in range(2)]
    service.cut_replicas_off()
    lease = await first.lock("name").acquire()
    assert store.write(lease.token)
    lost = service.kill_primary()
    service.resume_replicas()
    await promoted(service, lost)
    # Granted twice: the first body has not been told yet, or just now.
    successor = await second.lock("name").acquire()
    assert successor.token > lease.token
    assert store.write(successor.token)
    assert not store.write(lease.token), "the resource refuses the stale writer"
    if is_held(lease):
        with pytest.raises(aiodlock.LockLost):
            await lease.extend()
    assert (await lease.wait_lost()).reason in ("gone", "taken_over")
    with pytest.raises(aiodlock.LockLost):
        await lease.release()
    await successor.release()
    store.close()
    await brought_back(service, lost)


async def test_waiters_whom_the_new_primary_does_not_know_queue_again(
    service: SentinelService, make_client: MakeClient
) -> None:
    client, other = [await make_client(ttl=3.0, waiter_ttl=3.0) for _ in range(2)]
    held = await other.lock("name").acquire()
    service.cut_replicas_off()
    turns = 0

    async def turn() -> None:
        nonlocal turns
        async with client.lock("name"):
            turns += 1

    waiting = [asyncio.create_task(turn()) for _ in range(5)]
    await until_waiting(client, "name", 5)
    lost = service.kill_primary()
    service.resume_replicas()
    await promoted(service, lost)
    with suppress(aiodlock.LockLost):
        await held.release()
    await asyncio.gather(*waiting)
    assert turns == 5
    await brought_back(service, lost)


async def test_failover_under_load_without_min_replicas_goes_on(
    service: SentinelService, tmp_path: Path
) -> None:
    store = tmp_path / "store.db"
    async with contending(service.url, store, ttl=2.0) as told:
        await until_turns(store, 10)
        await fail_over(service, "kill")
        await until_turns(store, 10)
    assert told["turns"] > 20


async def test_failovers_with_min_replicas_under_load_violate_nothing(
    small_service: SentinelService, tmp_path: Path
) -> None:
    store = tmp_path / "store.db"
    async with contending(small_service.url, store, min_replicas=1, ttl=2.0):
        await until_turns(store, 10)
        for _ in range(2):
            await fail_over(small_service, "kill")
            before = turns_so_far(store)
            await until_turns(store, 10)
            assert turns_so_far(store) > before
    verdict = judge(store)
    assert verdict.all_is_well, verdict
    assert verdict.turns >= 30


async def test_wakeups_follow_the_commands_to_the_new_primary(
    service: SentinelService, make_client: MakeClient
) -> None:
    client, other = [await make_client(ttl=30.0, waiter_ttl=30.0) for _ in range(2)]
    frozen = service.pause_primary()
    await promoted(service, frozen)
    # The frozen server holds the old connections open. A notice must not be waited for on them.
    held = await other.lock("name").acquire()
    waiting = asyncio.create_task(client.lock("name").acquire())
    await until_waiting_again(other, 1)
    async with takes(at_most=3.0):
        await held.release()
        lease = await waiting
    await lease.release()
    frozen.resume()
