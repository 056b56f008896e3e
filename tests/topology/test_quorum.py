"""A quorum of independent servers: killed, stopped, cut off and restarted while clients contend."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from redis.asyncio import Redis

import aiodlock
from aiodlock._clock import now
from aiodlock._embedded import EmbeddedServer, find_valkey9
from aiodlock.backends.redis.quorum import QuorumBackend
from aiodlock.backends.redis.scripts import UNVOTE, VOTE

from ..conftest import MakeClient
from ..fault.scenes import calling
from ..fault.test_cancelled import Steps, When, cancel_everywhere, drive
from ..proxy import FaultProxy
from ..scenes import SOON, bounded, is_held, store_of, until
from .load import turns_so_far, until_turns
from .quorum_load import Faults, contending
from .witness import judge

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> Iterator[list[EmbeddedServer]]:
    """Give servers of the test's own, empty: five, or as many as the test's parameter says."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(EmbeddedServer(find_valkey9()))
            for _ in range(getattr(request, "param", 5))
        ]


@pytest.fixture
async def make_client(no_stray_tasks: None) -> AsyncIterator[MakeClient]:
    """Give a factory of entered clients."""
    async with AsyncExitStack() as stack:

        async def make(sources: list[str], **options: object) -> aiodlock.Client:
            client = aiodlock.Client(sources, **options)  # type: ignore[arg-type]
            return await stack.enter_async_context(client)

        yield make


# -- under load --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        "kill",
        pytest.param("stop", marks=pytest.mark.long),
        pytest.param("cut", marks=pytest.mark.long),
    ],
)
async def test_any_two_of_five_lost_under_load_violate_nothing_and_all_go_on(
    nodes: list[EmbeddedServer], tmp_path: Path, how: str
) -> None:
    """Whatever goes on, nobody waits for longer than a lease and a place in the queue last; while nothing
    goes wrong (before, with two nodes lost, and after), all wait for about one round of sixteen.

    A machine that stands still once makes all of a round wait for longer: of three windows of a hundred
    turns the middle one counts."""
    ttl, store = 2.0, tmp_path / "store.db"
    calm: dict[str, list[tuple[float, float]]] = defaultdict(list)
    losses: list[float] = []

    async def stay_calm(when: str) -> None:
        await until_turns(store, 16)  # by who came before
        for _ in range(3):
            began = now()
            await until_turns(store, 100)
            calm[when].append((began, now()))

    async with AsyncExitStack() as stack:
        proxies = []
        if how == "cut":
            proxies = [await stack.enter_async_context(FaultProxy(node.url)) for node in nodes]
        faults = Faults(nodes, proxies)
        urls = [one.url for one in proxies or nodes]
        async with contending(urls, store, ttl=ttl, restart_delay=ttl) as told:
            await until_turns(store, 32)
            await stay_calm("before")
            for number in ("first", "second"):
                losses.append(now())
                lost = await faults.take(how)
                await until_turns(store, 32)
                await stay_calm(f"{number} two lost")
                await faults.give_back(how, lost)
                # Two others are lost next: until then these have to count again.
                await asyncio.sleep(2 * ttl)
                await stay_calm(f"{number} two back")
    verdict = judge(store)
    assert verdict.all_is_well, verdict
    assert verdict.turns > 5 * 300
    for lost_at in losses:
        assert len(told.across(lost_at)) >= 10, "nearly all sixteen were waiting"
    too_long = [wait for wait in told.waits if wait.length > 2 * ttl + told.stalled(wait)]
    assert not too_long, "ttl and waiter_ttl"
    for when, windows in calm.items():
        spreads = []
        for began, ended in windows:
            waits = told.within(began, ended)
            assert len(waits) >= 60, when
            passed = max(told.passed_by(wait) for wait in waits)
            assert passed <= 2 * 15, f"{when}: {passed} entered while one waited"
            usual, most = told.median_and_p99(waits)
            spreads.append(most / usual)
        assert median(spreads) <= 2, f"{when}: p99 is {spreads} times the median"


async def test_all_five_restarted_empty_one_after_another_violate_nothing(
    nodes: list[EmbeddedServer], tmp_path: Path
) -> None:
    ttl, store = 2.0, tmp_path / "store.db"
    urls = [node.url for node in nodes]
    # It takes some turns with each node away, and not as many as these cores can carry out meanwhile.
    async with contending(urls, store, ttl=ttl, restart_delay=ttl, body=0.02) as told:
        await until_turns(store, 32)
        for node in nodes:
            await asyncio.to_thread(node.kill)
            await asyncio.to_thread(node.start)
            before = turns_so_far(store)
            # Clients come back to it within a second, and look at what they believe each second.
            await asyncio.sleep(ttl + 2.0)
            await until_turns(store, 32)
            assert turns_so_far(store) > before
    verdict = judge(store)
    assert verdict.all_is_well, verdict
    assert told.counts["turns"] >= 5 * 32


# -- too few servers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [3], indirect=True)
async def test_nothing_is_held_or_granted_while_a_majority_is_frozen_and_all_goes_on_afterwards(
    nodes: list[EmbeddedServer], make_client: MakeClient
) -> None:
    client = await make_client([node.url for node in nodes], ttl=1.0, unavailable_after=2.0)
    lease = await client.lock("held").acquire()
    for node in nodes[:2]:
        node.pause()
    try:
        ends = now() + lease.remaining()
        lost = await lease.wait_lost()
        assert lost.reason == "expired"
        assert now() >= ends - 0.01, "until then a majority kept its word"
        with pytest.raises(aiodlock.BackendUnavailable):
            await client.lock("free").acquire()
    finally:
        for node in nodes[:2]:
            node.resume()
    with pytest.raises(aiodlock.LockLost):
        await lease.release()
    async with bounded(20):
        for name in ("held", "free"):
            async with client.lock(name, ttl=60) as again:
                assert again.token > (lease.token if name == "held" else 0)


# -- a server that has forgotten ---------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [3], indirect=True)
@pytest.mark.parametrize("how", ["restarted", "replaced", "believed"])
async def test_restart_delay_keeps_the_second_holder_out_that_gets_in_without_it(
    nodes: list[EmbeddedServer], make_client: MakeClient, tmp_path: Path, how: str
) -> None:
    """The first holds by two nodes, of which one forgets it, while the first cannot be heard.

    *replaced*: at its address is then another server, which has been running for longer than the delay.
    """
    ttl = 3.0 if how == "replaced" else 5.0
    delay = 0.0 if how == "believed" else ttl
    urls = [addressed(node, tmp_path / str(number)) for number, node in enumerate(nodes)]
    second = await make_client(urls, ttl=ttl, restart_delay=delay)
    async with AsyncExitStack() as stack:
        if how == "replaced":
            spare = stack.enter_context(EmbeddedServer(find_valkey9()))
            await asyncio.sleep(delay + 1.5)
        proxies = [await stack.enter_async_context(FaultProxy(url)) for url in urls]
        await proxies[2].refuse()
        ways = [proxy.url for proxy in proxies]
        first = await make_client(ways, ttl=ttl, restart_delay=delay)
        lease = await first.lock("name").acquire()
        for proxy in proxies:
            proxy.half_open()
        await asyncio.to_thread(nodes[1].kill)
        if how == "replaced":
            addressed(spare, tmp_path / "1")
        else:
            await asyncio.to_thread(nodes[1].start)
        third = await make_client(urls, ttl=ttl, restart_delay=delay)
        entering = {
            asyncio.create_task(client.lock("name").acquire()) for client in (second, third)
        }
        entered, _ = await asyncio.wait(entering, return_when=asyncio.FIRST_COMPLETED)
        both_hold = is_held(lease)
        (successor,) = [task.result() for task in entered]
        assert is_held(successor)
        assert both_hold is (how == "believed")
        if not both_hold:
            assert successor.token > lease.token
        await successor.release()
        for task in entering - entered:
            await (await task).release()
        await until(lambda: not is_held(lease), "the end of the first lease", within=2 * ttl)
        for proxy in proxies:
            await proxy.heal()
        with pytest.raises(aiodlock.LockLost):
            await lease.release()


def addressed(node: EmbeddedServer, path: Path) -> str:
    """Give a server an address that may become another's, and return it."""
    path.unlink(missing_ok=True)
    path.symlink_to(node.url.removeprefix("unix://").partition("?")[0])
    return f"unix://{path}"


@pytest.mark.parametrize("nodes", [3], indirect=True)
async def test_all_restarted_empty_at_once_are_no_new_quorum_while_a_client_knows_better(
    nodes: list[EmbeddedServer], make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    delay = 8.0
    urls = [node.url for node in nodes]
    await make_client(urls, ttl=delay, restart_delay=delay)
    for node in nodes:
        await asyncio.to_thread(node.kill)
    restarted_at = now()
    for node in nodes:
        await asyncio.to_thread(node.start)

    async def all_marked() -> bool:
        return all(["aiodlock:2:quorum" in await stored_at(node) for node in nodes])

    await until(all_marked, "the client that was there")
    newcomer, another = [await make_client(urls, ttl=delay, restart_delay=delay) for _ in range(2)]
    tries = [client.lock("name").acquire_nowait() for client in (newcomer, another)]
    for refusal in await asyncio.gather(*tries, return_exceptions=True):
        # Neither stands in the other's way.
        assert isinstance(refusal, aiodlock.BackendUnavailable)
        assert "3 nodes do not count yet for another" in str(refusal)
    events = [getattr(record, "event", None) for record in caplog.records]
    assert events.count("quorum_distrusted") == 3
    async with newcomer.lock("name"):
        assert now() - restarted_at >= delay


# -- one client and what it is not told ----------------------------------------------------------------


async def stored_at(node: EmbeddedServer) -> set[str]:
    """Return the keys that a node has."""
    async with Redis.from_url(node.url, decode_responses=True) as raw:
        return {str(key) for key in await raw.keys("*")}


async def stored(nodes: list[EmbeddedServer]) -> set[str]:
    """Return the keys that any node has, but for those that stay: tokens, and marks of members."""
    found = {key for node in nodes for key in await stored_at(node)}
    return {key for key in found if not key.endswith((":token", ":2:quorum", ":2:quorum:lengths"))}


async def nothing_left(nodes: list[EmbeddedServer], *, markers: bool = False) -> None:
    """Wait until no node knows anything of the requests any more."""

    async def is_clean() -> bool:
        return all(markers and ":marker:" in key for key in await stored(nodes))

    try:
        await until(is_clean)
    except AssertionError:
        raise AssertionError(f"left at the nodes: {await stored(nodes)}") from None


_STEPS = {
    "ask": calling(VOTE, b"\r\nask\r\n"),
    "fence": calling(VOTE, b"\r\nfence\r\n"),
    "held": calling(VOTE, b"\r\nheld\r\n"),
    "leave": calling(UNVOTE, b"\r\nended\r\n"),
}


@pytest.mark.parametrize("nodes", [3], indirect=True)
@pytest.mark.parametrize("lossy", [1, 2])
@pytest.mark.parametrize("what", ["command", "reply"])
async def test_message_lost_at_any_step_leaves_nothing_and_loses_nothing(
    nodes: list[EmbeddedServer], make_client: MakeClient, what: str, lossy: int
) -> None:
    """At one node, which must not be noticed, or at two, a majority, which takes another attempt."""
    watcher = await make_client([node.url for node in nodes])
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(FaultProxy(node.url)) for node in nodes]
        ttl = 60.0
        urls = [proxy.url for proxy in proxies]
        for step, matches in _STEPS.items():
            client = await make_client(urls, ttl=ttl, waiter_ttl=ttl)
            last = 0
            for _ in range(3):
                faults = [
                    proxy.drop_reply(matches) if what == "reply" else proxy.drop_command(matches)
                    for proxy in proxies[:lossy]
                ]
                async with bounded(20):
                    lease = await client.lock("name").acquire()
                    assert lease.token > last, step
                    last = lease.token
                    await lease.extend()
                    assert is_held(lease), step
                    await lease.release()
                    # Not kept out by what is left of the first.
                    successor = await watcher.lock("name").acquire(timeout=10)
                    assert successor.token > last, step
                    last = successor.token
                    await successor.release()
                for fault in faults:
                    fault.release()
            await nothing_left(nodes, markers=True)


@pytest.mark.parametrize("nodes", [3], indirect=True)
async def test_token_that_a_majority_did_not_hear_of_is_written_as_soon_as_they_are_back(
    nodes: list[EmbeddedServer], make_client: MakeClient
) -> None:
    """The votes stand, and no node has a reason to say so again: the next extension is far away."""
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(FaultProxy(node.url)) for node in nodes]
        client = await make_client([proxy.url for proxy in proxies], ttl=600.0, waiter_ttl=600.0)
        for _ in range(5):
            faults = [proxy.drop_command(_STEPS["fence"]) for proxy in proxies[:2]]
            async with bounded(20), client.lock("name") as lease:
                assert is_held(lease)
            assert any(fault.happened.is_set() for fault in faults)


@pytest.mark.parametrize("nodes", [3], indirect=True)
async def test_request_that_was_left_is_not_asked_again_after_a_node_forgot_its_scripts(
    nodes: list[EmbeddedServer], make_client: MakeClient
) -> None:
    """Another client has brought them back meanwhile, so the leave is carried out, and finds nothing."""

    async def unvoted(server: Redis) -> bool:
        calls: dict[str, dict[str, int]] = await server.info("commandstats")
        return calls.get("cmdstat_zrem", {}).get("calls", 0) > 0  # what a leave begins with

    async with bounded(20), AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(FaultProxy(node.url)) for node in nodes]
        client = await make_client([proxy.url for proxy in proxies], ttl=60, waiter_ttl=60)
        servers = [await stack.enter_async_context(Redis.from_url(node.url)) for node in nodes]
        for server in servers:
            await server.script_flush()
        held = [proxy.hold_reply(_STEPS["ask"]) for proxy in proxies]
        asking = asyncio.create_task(client.lock("name").acquire())
        for reply in held:
            await reply.happened.wait()
        for server in servers:
            for script in (VOTE, UNVOTE):
                await server.script_load(script.source)
            await server.config_resetstat()
        asking.cancel()
        for server in servers:
            await until(partial(unvoted, server))
        for reply in held:
            reply.release()
        await asyncio.wait({asking})
        async with client.lock("another"):
            pass  # whatever was sent before this was carried out
        await nothing_left(nodes)


@pytest.mark.parametrize("nodes", [3], indirect=True)
@pytest.mark.parametrize("contended", [False, True])
async def test_acquire_cancelled_at_every_await_leaves_nothing_at_any_node(
    nodes: list[EmbeddedServer], make_client: MakeClient, contended: bool
) -> None:
    urls = [node.url for node in nodes]
    mine, other = await make_client(urls), await make_client(urls)

    async def acquire_and_release(client: aiodlock.Client) -> None:
        await (await client.lock("name").acquire()).release()

    async def run(points: frozenset[int], when: When) -> tuple[Steps, asyncio.Task[object]]:
        if not contended:
            return await drive(acquire_and_release, mine, points, when)
        held = await other.lock("name").acquire()
        leaving: list[asyncio.Task[None]] = []

        async def free() -> None:
            await asyncio.sleep(0.01)
            await held.release()

        leaving.append(asyncio.create_task(free()))
        try:
            return await drive(acquire_and_release, mine, points, when)
        finally:
            await asyncio.gather(*leaving)

    async def check() -> None:
        async with bounded(10):
            await (await other.lock("name").acquire()).release()
        # A vote may be announced when its request has left: it is given back for good, with a marker.
        await nothing_left(nodes, markers=contended)

    await cancel_everywhere(run, check, at_least=2)


@pytest.mark.parametrize("nodes", [3], indirect=True)
async def test_leave_that_every_node_answers_is_sent_once(
    nodes: list[EmbeddedServer], make_client: MakeClient
) -> None:
    """A majority's answers suffice; those that come after them are answers too."""
    client = await make_client([node.url for node in nodes])
    for _ in range(20):
        async with client.lock("name"):
            pass
    # What is sent again is sent within this, with a marker.
    await asyncio.sleep(0.5)
    assert await stored(nodes) == set()


@pytest.mark.parametrize("nodes", [3], indirect=True)
async def test_node_that_was_cut_off_is_left_after_longer_than_the_ttl_of_a_lease_that_was_extended_further(
    nodes: list[EmbeddedServer], make_client: MakeClient
) -> None:
    async with FaultProxy(nodes[2].url) as proxy:
        urls = [nodes[0].url, nodes[1].url, proxy.url]
        client = await make_client(urls, ttl=0.5, waiter_ttl=0.5)
        lease = await client.lock("name").acquire()
        await lease.extend(60.0)
        await until(lambda: _held_at(nodes[2], least_ms=50_000))
        await proxy.refuse()
        proxy.cut()
        await lease.release()
        # Whoever reckons with the ttl of the lock believes by now that the node has dropped the lease.
        await asyncio.sleep(1.5)
        await proxy.accept()
        await nothing_left(nodes, markers=True)


@pytest.mark.parametrize("nodes", [3], indirect=True)
async def test_node_that_is_not_connected_when_the_client_is_left_keeps_nothing(
    nodes: list[EmbeddedServer], no_stray_tasks: None
) -> None:
    async with FaultProxy(nodes[2].url) as proxy:
        async with aiodlock.Client([nodes[0].url, nodes[1].url, proxy.url]) as client:
            lease = await client.lock("name").acquire()
            await lease.extend(600.0)
            await until(lambda: _held_at(nodes[2], least_ms=500_000))
            session = client._core.session
            assert session is not None
            server = session.backend.store.nodes.voters[2].server  # type: ignore[attr-defined]
            await proxy.refuse()
            proxy.cut()
            await until(lambda: server.wire is None)
            await lease.release()
            await proxy.accept()
        await nothing_left(nodes, markers=True)


async def _held_at(node: EmbeddedServer, *, least_ms: int) -> bool:
    async with Redis.from_url(node.url) as raw:
        return bool(await raw.pttl("aiodlock:2:lock:{name}:state") >= least_ms)


# -- tickets that cross ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [3], indirect=True)
async def test_votes_split_one_to_one_to_one_are_sorted_out_without_a_lease_that_ends(
    nodes: list[EmbeddedServer], make_client: MakeClient
) -> None:
    """Each of three has the vote of one node before the others hear of it."""
    lasting = 120.0
    order: list[int] = []
    async with AsyncExitStack() as stack:
        clients, ways = [], []
        for _ in nodes:
            proxies = [await stack.enter_async_context(FaultProxy(node.url)) for node in nodes]
            ways.append(proxies)
            urls = [proxy.url for proxy in proxies]
            clients.append(await make_client(urls, ttl=lasting, waiter_ttl=lasting))
            async with clients[-1].lock("first"):
                pass  # the nodes know from then on which leases are in use
        for _ in range(5):
            held_up = [
                proxy
                for number, proxies in enumerate(ways)
                for node, proxy in enumerate(proxies)
                if node != number
            ]
            for proxy in held_up:
                proxy.stall()

            async def turn(number: int) -> None:
                async with clients[number].lock("name") as lease:
                    order.append(lease.token)

            async def are_split() -> bool:
                votes = []
                for node in nodes:
                    async with Redis.from_url(node.url) as raw:
                        votes.append(await raw.hlen("aiodlock:2:lock:{name}:state"))
                return votes == [1, 1, 1]

            turns = [asyncio.create_task(turn(number)) for number in range(3)]
            await until(are_split, "split votes")
            assert not any(task.done() for task in turns)
            for proxy in held_up:
                await proxy.heal()
            async with bounded(20):
                await asyncio.gather(*turns)
            # On a machine that stalls, a message is given up that is then carried out.
            await nothing_left(nodes, markers=True)
    assert order == sorted(order)
    assert len(set(order)) == 15


# -- one server under several names --------------------------------------------------------------------


# -- what leaving says of the lease --------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [3], indirect=True)
async def test_lease_that_a_majority_had_seen_expire_is_told_as_lost_though_one_node_released_it(
    nodes: list[EmbeddedServer], make_client: MakeClient
) -> None:
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(FaultProxy(node.url)) for node in nodes]
        client = await make_client([proxy.url for proxy in proxies])
        lock = client.lock("name", ttl=0.5, auto_extend=False, lock_delay=30)
        lease = await lock.acquire()
        await lease.extend()
        held_up = [proxy.hold_command(calling(UNVOTE)) for proxy in proxies[1:]]
        leaving = asyncio.create_task(leave_body(lease))
        for fault in held_up:
            await fault.happened.wait()
        await asyncio.sleep(0.2)  # the lease is over at the nodes
        for fault in held_up:
            fault.release()
        with pytest.raises(aiodlock.LockLost) as lost:
            await leaving
        assert lost.value.reason == "expired"


@pytest.mark.parametrize("nodes", [3], indirect=True)
async def test_lease_that_a_majority_released_is_released_though_their_replies_were_lost(
    nodes: list[EmbeddedServer], make_client: MakeClient
) -> None:
    """And though the third one dropped it earlier, as overdue: its last extension did not arrive."""
    state = "aiodlock:2:lock:{name}:state"
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(FaultProxy(node.url)) for node in nodes]
        client = await make_client([proxy.url for proxy in proxies])
        lease = await client.lock("name", ttl=20, auto_extend=False, lock_delay=60).acquire()
        await lease.extend()
        async with Redis.from_url(nodes[2].url) as third:
            ((id, record),) = (await third.hgetall(state)).items()
            assert isinstance(record, bytes)
            mode, token, deadline, *rest = record.decode().split(" ")
            overdue = " ".join([mode, token, str(int(deadline) - 30_000), *rest])
            await third.hset(state, id, overdue)
        for proxy in proxies[:2]:
            proxy.drop_reply(calling(UNVOTE))
        await proxies[1].refuse()  # so that the third answers together with the first
        await lease.release()


async def leave_body(lease: aiodlock.Lease) -> None:
    """Be inside the block until shortly before the lease ends, and leave it while it is held."""
    async with lease:
        await asyncio.sleep(lease.remaining() - 0.1)
        assert lease.held


@pytest.mark.parametrize("nodes", [2], indirect=True)
@pytest.mark.parametrize("restart_delay", [0.0, 5.0])
async def test_server_that_is_listed_under_two_names_is_refused(
    nodes: list[EmbeddedServer], restart_delay: float
) -> None:
    async with FaultProxy(nodes[0].url) as proxy:
        urls = [nodes[0].url, proxy.url, nodes[1].url]
        client = aiodlock.Client(urls, restart_delay=restart_delay)
        with pytest.raises(aiodlock.BackendError, match="are the same server"):
            await client.__aenter__()


@pytest.mark.parametrize("nodes", [3], indirect=True)
async def test_address_that_leads_to_another_node_later_on_counts_for_nothing(
    nodes: list[EmbeddedServer], make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    async with FaultProxy(nodes[2].url) as proxy:
        urls = [nodes[0].url, nodes[1].url, proxy.url]
        client = await make_client(urls, ttl=1.0, restart_delay=0.0, unavailable_after=1.0)
        backend = store_of(client)
        assert isinstance(backend, QuorumBackend)
        proxy.lead_to(nodes[1].url)
        proxy.cut()
        await until(lambda: backend.nodes.doubles != {}, within=10.0)
        assert [r for r in caplog.records if getattr(r, "event", "") == "node_twice"]
        nodes[0].kill()
        with pytest.raises(aiodlock.AcquireTimeout):
            await client.lock("n").acquire(timeout=1.0)


async def copy_data(of: EmbeddedServer, to: EmbeddedServer) -> None:
    """As a cloned machine or a snapshot does that is loaded at another one."""
    async with Redis.from_url(of.url) as source, Redis.from_url(to.url) as target:
        await target.flushall()
        for key in await source.keys("*"):
            await target.restore(key, max(0, await source.pttl(key)), await source.dump(key) or b"")


@pytest.mark.parametrize("nodes", [3], indirect=True)
@pytest.mark.parametrize("restart_delay", [0.0, None])
async def test_copy_of_a_node_is_refused_on_entering(
    nodes: list[EmbeddedServer], make_client: MakeClient, restart_delay: float | None
) -> None:
    urls = [node.url for node in nodes]
    async with aiodlock.Client(urls, ttl=1.0) as client:
        backend = store_of(client)
        assert isinstance(backend, QuorumBackend)
        await until(lambda: all(voter.trust.id for voter in backend.nodes.voters))
        async with client.lock("n"):
            pass
    await copy_data(of=nodes[0], to=nodes[1])
    client = aiodlock.Client(urls, restart_delay=restart_delay)
    with pytest.raises(aiodlock.BackendError, match="one is a copy of the other"):
        await client.__aenter__()


@pytest.mark.parametrize("nodes", [4], indirect=True)
async def test_copy_of_a_node_that_takes_the_place_of_another_later_on_counts_for_nothing(
    nodes: list[EmbeddedServer], make_client: MakeClient
) -> None:
    async with FaultProxy(nodes[2].url) as proxy:
        urls = [nodes[0].url, nodes[1].url, proxy.url]
        client = await make_client(urls, ttl=1.0, restart_delay=0.0, unavailable_after=1.0)
        backend = store_of(client)
        assert isinstance(backend, QuorumBackend)
        await until(lambda: all(voter.trust.id for voter in backend.nodes.voters))
        await copy_data(of=nodes[1], to=nodes[3])
        proxy.lead_to(nodes[3].url)
        proxy.cut()
        await until(lambda: backend.nodes.doubles != {}, within=10.0)
        nodes[0].kill()
        with pytest.raises((aiodlock.AcquireTimeout, aiodlock.BackendUnavailable)):
            await client.lock("n").acquire(timeout=2.0)


@pytest.mark.parametrize("nodes", [3], indirect=True)
async def test_what_others_wrote_among_the_lengths_in_use_closes_nothing(
    nodes: list[EmbeddedServer], make_client: MakeClient
) -> None:
    strange: dict[Any, Any] = {
        "x": "y",
        "-5": "9e99",
        "1e400": "1",
        "9" * 20: "1e15",
        "1000": "inf",
        "20": "nan",
    }
    # Somebody's thousands of numbers are no lengths either: those are rounded.
    strange |= {str(number): "9e14" for number in range(1001, 9999, 7) if number % 100}
    for node in nodes:
        async with Redis.from_url(node.url) as raw:
            await raw.hset("aiodlock:2:quorum:lengths", mapping=strange)
    client = await make_client([node.url for node in nodes], ttl=2.0)
    async with client.lock("n", timeout=5.0):
        pass
    async with Redis.from_url(nodes[0].url) as raw:
        assert set(await raw.hkeys("aiodlock:2:quorum:lengths")) == {b"2000"}


@pytest.mark.parametrize("nodes", [3], indirect=True)
async def test_nodes_that_cannot_note_the_lengths_in_use_are_named_at_once(
    nodes: list[EmbeddedServer], make_client: MakeClient
) -> None:
    for node in nodes:
        async with Redis.from_url(node.url) as raw:
            await raw.set("aiodlock:2:quorum:lengths", "somebody else's")
    client = await make_client([node.url for node in nodes], ttl=2.0)
    with pytest.raises(aiodlock.BackendError, match="WRONGTYPE"):
        await client.lock("n").acquire(timeout=5.0)


@pytest.mark.parametrize("nodes", [3], indirect=True)
@pytest.mark.parametrize("far", [2, 3])
async def test_nodes_that_become_far_keep_their_connections_and_the_leases(
    nodes: list[EmbeddedServer],
    make_client: MakeClient,
    far: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(FaultProxy(node.url)) for node in nodes]
        client = await make_client([p.url for p in proxies], ttl=30.0, unavailable_after=60.0)
        lease = await client.lock("held").acquire()
        dialled = [proxy.accepted for proxy in proxies]
        for proxy in proxies[:far]:
            proxy.delay(1.5)
        for _ in range(2):
            async with client.lock("name", timeout=60.0):
                assert lease.held
        await lease.extend()
        assert [proxy.accepted for proxy in proxies] == dialled
        assert not [one for one in caplog.records if getattr(one, "event", "") == "no_connection"]
        for proxy in proxies:
            await proxy.heal()
        await lease.release()


@pytest.mark.parametrize("nodes", [3], indirect=True)
async def test_body_is_left_within_a_second_though_answers_take_longer(
    nodes: list[EmbeddedServer], make_client: MakeClient
) -> None:
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(FaultProxy(node.url)) for node in nodes]
        client = await make_client([p.url for p in proxies], ttl=60.0, unavailable_after=60.0)
        for proxy in proxies:
            proxy.delay(3.0)
        async with client.lock("name", timeout=60.0):
            leaving = now()
        left_within = now() - leaving
        for proxy in proxies:
            await proxy.heal()
        await nothing_left(nodes, markers=True)
        assert left_within < SOON


@pytest.mark.parametrize("nodes", [3], indirect=True)
async def test_reader_that_holds_on_or_leaves_costs_no_node_a_look_at_all_others(
    nodes: list[EmbeddedServer], make_client: MakeClient
) -> None:
    """With a thousand readers, nodes that looked at all for each one lost them all."""
    client = await make_client([node.url for node in nodes], ttl=60.0)
    readers = 50
    async with asyncio.TaskGroup() as group:
        reading = [group.create_task(client.rwlock("name").read.acquire()) for _ in range(readers)]
    leases = [task.result() for task in reading]

    async def looks() -> int:
        """Return how often nodes have read whole hashes."""
        found = 0
        for node in nodes:
            async with Redis.from_url(node.url) as raw:
                stats = await raw.info("commandstats")
                found += stats.get("cmdstat_hgetall", {}).get("calls", 0)
        return found

    before = await looks()
    await asyncio.gather(*(lease.extend() for lease in leases))
    await asyncio.gather(*(lease.release() for lease in leases))
    await nothing_left(nodes)
    assert await looks() - before < readers


@pytest.mark.parametrize("nodes", [3], indirect=True)
async def test_client_is_closed_soon_though_its_nodes_have_been_silent_for_long(
    nodes: list[EmbeddedServer],
) -> None:
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(FaultProxy(node.url)) for node in nodes]
        client = aiodlock.Client([p.url for p in proxies], ttl=60.0, close_timeout=0.1)
        await client.__aenter__()
        await client.lock("name").acquire()
        for proxy, voter in zip(proxies, store_of(client).nodes.voters, strict=True):
            proxy.stall()
            for _ in range(5):  # as when one question after the other has no answer
                voter.patience.ran_out()
        async with bounded(15.0):
            await client.__aexit__(None, None, None)


@pytest.mark.parametrize("nodes", [3], indirect=True)
@pytest.mark.parametrize("silent", [0, 1, 2])
async def test_holder_is_seen_and_broken_while_any_node_is_silent(
    nodes: list[EmbeddedServer], make_client: MakeClient, silent: int
) -> None:
    """Two nodes have confirmed it when it holds. The third one may hear of that as late as it extends."""
    async with FaultProxy(nodes[silent].url) as proxy:
        urls = [node.url for node in nodes]
        holder = await make_client(urls, ttl=60.0)
        urls[silent] = proxy.url
        people = await make_client(urls)
        lease = await holder.lock("name").acquire()
        proxy.stall()
        assert await people.lock("name").locked()
        assert [one.token for one in (await people.inspect("name")).holders] == [lease.token]
        assert await people.check_sequencer(lease.sequencer)
        assert await people.break_lock("name", tokens=[lease.token]) == 1
        assert (await lease.wait_lost()).reason == "broken"
        await proxy.heal()
