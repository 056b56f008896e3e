"""Sequencers: strings that are true while exactly that grant holds, and never dangerous."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aiodlock
from aiodlock import Client

from ..conftest import MakeClient
from ..servers import ALL, CLUSTER, REPLICATED, SENTINEL, Store


async def test_sequencer_is_true_while_the_grant_holds(make_client: MakeClient) -> None:
    client, service = await make_client(), await make_client()
    async with client.lock("order:42") as lease:
        assert await service.check_sequencer(lease.sequencer)
        assert lease.sequencer.isprintable()
        assert str(lease.token) in lease.sequencer
    assert not await service.check_sequencer(lease.sequencer)
    async with client.lock("order:42") as later:
        assert not await service.check_sequencer(lease.sequencer)
        assert await service.check_sequencer(later.sequencer)


async def test_each_reader_has_its_own(client: Client) -> None:
    rwlock = client.rwlock("a")
    leases = await asyncio.gather(*(asyncio.create_task(rwlock.read.acquire()) for _ in range(3)))
    assert len({lease.sequencer for lease in leases}) == 3
    assert all([await client.check_sequencer(lease.sequencer) for lease in leases])
    await leases[1].release()
    checked = [await client.check_sequencer(lease.sequencer) for lease in leases]
    assert checked == [True, False, True]
    for lease in (leases[0], leases[2]):
        await lease.release()


@pytest.mark.stores(*ALL, CLUSTER, SENTINEL, REPLICATED)
async def test_semaphore_and_lock_of_one_name_are_told_apart(client: Client) -> None:
    async with client.semaphore("a", 2) as lease:
        assert await client.check_sequencer(lease.sequencer)
        for kind in ("shared", "exclusive"):
            assert not await client.check_sequencer(lease.sequencer.replace("semaphore", kind))


async def test_first_body_of_a_once_has_one(make_client: MakeClient) -> None:
    client, service = await make_client(), await make_client()
    if not client._core.use().backend.capabilities.once:
        assert not await service.check_sequencer("a:once:1")
        return
    async with client.once("a", keep=60) as once:
        assert once.lease is not None
        sequencer = once.lease.sequencer
        assert await service.check_sequencer(sequencer)
        assert not await service.check_sequencer(sequencer + "0")
        for kind in ("shared", "exclusive", "semaphore"):
            assert not await service.check_sequencer(sequencer.replace("once", kind))
    assert not await service.check_sequencer(sequencer)


async def test_broken_lock_makes_it_false(client: Client) -> None:
    lease = await client.lock("a").acquire()
    await client.break_lock("a")
    assert not await client.check_sequencer(lease.sequencer)
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_forged_strings_are_false(client: Client, store: Store) -> None:
    async with client.lock("a") as lease:
        name, mode, token = lease.sequencer.split(":")
        forged = [
            "",
            ":",
            "::",
            "a",
            name,
            f"{name}:{mode}",
            f"{name}:{mode}:",
            f"{name}:{mode}:{int(token) + 1}",
            f"{name}:{mode}:{token}0",
            f"{name}:{mode}:0{token}",
            f"{name}:{mode}:+{token}",
            f"{name}:{mode}:-{token}",
            f"{name}:{mode}: {token}",
            f"{name}:{mode}:{token}\n",
            f"{name}:{mode}:{token}:",
            f"{name}:{mode}:{float(token):e}",
            f"{name}:{mode}:{''.join(chr(0x660 + int(digit)) for digit in token)}",
            f"{name}:shared:{token}",
            f"{name}:x:{token}",
            f"b:{mode}:{token}",
            f"%61:{mode}:{token}",
            f"%:{mode}:{token}",
            f"%ff:{mode}:{token}",
            f"\ud800:{mode}:{token}",
            f"{{a}}:state:{token}",
            f"a') redis.call('FLUSHALL') --:{mode}:{token}",
            "x" * 100_000,
            f"{'x' * 100_000}:{mode}:{token}",
            f"{name}:{mode}:{'9' * 100_000}",
        ]
        for text in forged:
            assert not await client.check_sequencer(text), text[:80]
        assert await client.check_sequencer(lease.sequencer)
        assert lease.held


@pytest.mark.stores("memory")
async def test_any_text_is_false_and_never_an_exception(client: Client) -> None:
    runner = asyncio.get_running_loop()
    texts: list[str] = []

    @settings(max_examples=300, suppress_health_check=list(HealthCheck))
    @given(st.text() | st.builds("{}:{}:{}".format, st.text(), st.text(), st.integers()))
    def collect(text: str) -> None:
        texts.append(text)

    await runner.run_in_executor(None, collect)
    assert texts
    for text in texts:
        assert await client.check_sequencer(text) is False


async def test_names_of_all_kinds_come_through(client: Client) -> None:
    for name in ("{}", "a b", "\0", "a\nb", "\U0001f600", ":", "a:exclusive:1", "%41", "é" * 256):
        async with client.lock(name) as lease:
            assert lease.sequencer.isascii()
            assert lease.sequencer.isprintable()
            assert await client.check_sequencer(lease.sequencer)


async def test_what_is_no_string_is_a_type_error(client: Client) -> None:
    with pytest.raises(TypeError):
        await client.check_sequencer(b"a:exclusive:1")  # type: ignore[arg-type]
